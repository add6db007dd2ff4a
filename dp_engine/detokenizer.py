"""Token ids to text as they come: no character is ever split, and stop strings are cut out however they arrive."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no (or not yet a) character
CONTEXT_TOKENS = 6  # tokens of the prompt that decide how the first new one reads (leading space, joined bytes)
CHARACTER_TOKENS = 4  # a character has at most 4 bytes, a token at least one
MAX_PENDING = 32  # tokens held back before bytes that never become a character are given out as they are

Decode = Callable[[list[int]], str]


class IncrementalDecoder:
    """Text of one sequence. `decode` is a tokenizer's decoding of ids, special tokens left out.

    Decoding is not additive (leading spaces, characters of several tokens), so a delta is the difference of two
    decodings that start at the same token. While the end may be part of a character nothing is given out.

        _ids:   |---- given out ----|---- pending ----|
                0                 _read             len(_ids)
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._read = len(self._ids)
        self._given = decode(self._ids).rstrip(REPLACEMENT)  # how _ids[:_read] reads; the model may end its character

    def push(self, ids: Sequence[int]) -> str:
        """Append tokens and return the text that is certain now."""
        self._ids.extend(ids)
        text = self._decode(self._ids)
        if len(text) > len(self._given) and not text.endswith(REPLACEMENT):
            delta = text[len(self._given) :]
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._given = self._decode(self._ids)
            return delta
        return self._give_out_garbage(text) if len(self._ids) - self._read > MAX_PENDING else ""

    def _give_out_garbage(self, text: str) -> str:
        """Cut the pending tokens where no character is cut, but leave so many that one may still be completed."""
        newest = len(self._ids) - CHARACTER_TOKENS
        for end in range(newest, newest - CHARACTER_TOKENS, -1):
            head = self._decode(self._ids[:end])
            if head + self._decode(self._ids[end:]) == text:
                break
        else:
            end, head = len(self._ids), text
        delta = head[len(self._given) :]
        self._ids, self._read, self._given = self._ids[end:], 0, ""
        return delta

    def flush(self) -> str:
        """Return what is left at the end of the sequence, an incomplete character as U+FFFD."""
        delta = self._decode(self._ids)[len(self._given) :]
        self._ids, self._read, self._given = [], 0, ""
        return delta


class StopStrings:
    """Cuts a text at the first stop string that is completed; the result does not depend on how the text arrives.

    Text that may be the beginning of a stop string is held back. Of several that are completed by the same character
    the longest counts.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise ValueError("a stop string is empty")
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Append text and return what can be given out; nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def flush(self) -> str:
        """Return what was held back in vain."""
        held, self._held = self._held, ""
        return held


class Detokenizer:
    """Text of one answer: incremental decoding, then stop strings. `num_tokens` counts tokens up to the stop,
    `num_characters` those that are decoded, given out or not."""

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._decoder = IncrementalDecoder(decode, prompt_ids)
        self._stop = StopStrings(stop) if stop else None
        self.num_tokens = 0
        self.num_characters = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been found; everything after it is ignored."""
        return self._stop is not None and self._stop.matched is not None

    def push(self, ids: Sequence[int]) -> str:
        """Append tokens and return the text that is certain now."""
        if self._stop is None:
            self.num_tokens += len(ids)
            return self._decode(ids)
        pieces = []
        for token in ids:
            if self.stopped:
                break
            self.num_tokens += 1
            pieces.append(self._stop.push(self._decode([token])))
        return "".join(pieces)

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._decoder.push(ids)
        self.num_characters += len(text)
        return text

    def flush(self) -> str:
        """The sequence has ended: return the rest of the text."""
        if self._stop is None:
            return self._decoder.flush()
        return self._stop.push(self._decoder.flush()) + self._stop.flush()
