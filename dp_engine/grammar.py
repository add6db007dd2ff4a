"""Grammars: which tokens may follow in an output that has to be JSON, a match of an expression, one of some choices.

A matcher walks along with the committed tokens of its sequence. Compiling and every mask are bounded by llguidance's
limits on states and items, so that no grammar stops the step loop; one that goes beyond them fails its own request.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, regex_to_lark

from dp_engine.messages import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_TEXT = 1 << 16  # characters
MAX_CACHED = 64  # compiled grammars
MAX_MESSAGE = 300  # characters

# White space between JSON tokens ends: a model that has nothing better to say goes on with it for ever.
_JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": r"[ \t\r\n]{1,16}"}


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says why, in one line."""


class Matcher:
    """Where one output stands in its grammar. `failed`: it has left it, or the grammar has become too complex."""

    def __init__(self, parser: LLMatcher, width: int, eos: frozenset[int]) -> None:
        """`width`: int32 words of a mask."""
        self.width = width
        self._parser = parser
        self._eos = eos
        self.failed = False

    def take(self, tokens: Sequence[int]) -> int:
        """Go on by the tokens that are allowed; how many these are. `failed` if not all."""
        for taken, token in enumerate(tokens):
            if not self._parser.consume_token(token):
                self.failed = True
                return taken
        return len(tokens)

    def fitting(self, drafts: Sequence[int]) -> int:
        """How many drafts, from the first on, are allowed; none that ends the output."""
        count = next((i for i, token in enumerate(drafts) if token in self._eos), len(drafts))
        return self._parser.validate_tokens(list(drafts[:count]))

    def fill(self, masks: np.ndarray, row: int, drafts: Sequence[int]) -> None:
        """Write what is allowed next, and behind each of the drafts (which fit), into masks[row : row + 1 + drafts].

        A matcher that cannot go on allows everything: whatever is drawn then is not taken.
        """
        self._fill(masks, row)
        for number, token in enumerate(drafts, 1):
            self._parser.consume_token(token)
            self._fill(masks, row + number)
        if drafts:
            self._parser.rollback(len(drafts))

    def _fill(self, masks: np.ndarray, row: int) -> None:
        llguidance.numpy.fill_next_token_bitmask(self._parser, masks, row)
        if self._parser.is_error() or not masks[row].any():
            masks[row] = -1


class Vocabulary:
    """The tokens of a checkpoint, and the grammars compiled over them. To be used from one thread."""

    def __init__(self, tokenizer: str, size: int, eos_token_ids: Iterable[int]) -> None:
        """`tokenizer`: a tokenizer.json; `size`: of the model's vocabulary. Raises GrammarError."""
        self._eos = frozenset(eos_token_ids)
        if not self._eos:
            raise GrammarError("the model has no token that ends an output")
        try:
            tokens = LLTokenizer(tokenizer, eos_token=sorted(self._eos))
            if tokens.vocab_size < size:
                tokens = LLTokenizer(tokenizer, n_vocab=size, eos_token=sorted(self._eos))
        except ValueError as error:
            raise GrammarError(f"the checkpoint's tokenizer cannot be used for grammars: {_one_line(error)}") from None
        self._tokens = tokens
        self._limits = LLParserLimits(
            initial_lexer_fuel=500_000, max_grammar_size=100_000, max_lexer_states=32_000, verbose_errors=False
        )
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    @classmethod
    def load(cls, directory: Path, size: int, eos_token_ids: Iterable[int]) -> "Vocabulary":
        """Of a checkpoint; takes the better part of a second. Raises GrammarError."""
        try:
            tokenizer = (directory / "tokenizer.json").read_text()
        except OSError as error:
            raise GrammarError(f"the checkpoint has no tokenizer.json to read ({error.strerror or error})") from None
        return cls(tokenizer, size, eos_token_ids)

    def matcher(self, grammar: Grammar, emitted: Sequence[int] = ()) -> Matcher:
        """A matcher behind the tokens `emitted` so far. Raises GrammarError."""
        compiled = self._compiled.get(grammar) or self._compile(grammar)
        self._compiled[grammar] = compiled
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > MAX_CACHED:
            self._compiled.popitem(last=False)
        matcher = Matcher(compiled.deep_copy(), -(-self._tokens.vocab_size // 32), self._eos)
        matcher.take(emitted)
        return matcher

    def check(self, grammar: Grammar) -> None:
        """Compile, and ask what may come first. Raises GrammarError."""
        parser = self._compile(grammar)
        parser.compute_bitmask()
        if parser.is_error():
            raise GrammarError(_one_line(parser.get_error()))

    def _compile(self, grammar: Grammar) -> LLMatcher:
        parser = LLMatcher(self._tokens, _source(grammar), log_level=0, limits=self._limits)
        if parser.is_error():
            raise GrammarError(_one_line(parser.get_error()))
        return parser


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it. Raises GrammarError for what it cannot even read."""
    if len(grammar.text) > MAX_TEXT:
        raise GrammarError(f"it has {len(grammar.text)} characters, more than {MAX_TEXT}")
    try:
        match grammar.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON_OPTIONS)
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_OPTIONS)
            case "regex":  # of digits only 0 to 9 are meant
                return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.text, 'd')}/")
            case _:
                return grammar_from(grammar.kind, grammar.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(_one_line(error)) from None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:MAX_MESSAGE]
