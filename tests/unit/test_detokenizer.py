from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from dp_engine.detokenizer import MAX_PENDING, REPLACEMENT, Detokenizer, IncrementalDecoder, StopStrings
from tests.tokenizers import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 300)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def decode(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def stream(decoder: IncrementalDecoder | Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """Push `ids` in pieces of the lengths in `cuts` (cyclic, at least 1), then flush."""
    pieces, start, turn = [], 0, 0
    while start < len(ids):
        size = cuts[turn % len(cuts)] if cuts else 1
        pieces.append(decoder.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*pieces, decoder.flush()]


TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("🙂🚀👩‍🚀é你好 \nabc")), max_size=60)
CUTS = st.lists(st.integers(1, 5), max_size=4)


@given(text=TEXTS.filter(lambda text: REPLACEMENT not in text), cuts=CUTS)
@example(text="👩‍👩‍👧‍👦🏳️‍🌈", cuts=[1])
def test_characters_are_never_split(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = stream(IncrementalDecoder(decode(tokenizer)), ids, cuts)
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces)


@settings(max_examples=300)
@given(ids=st.lists(st.integers(3, 299), max_size=120), cuts=CUTS)
def test_any_ids_read_as_their_full_decoding(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    """Ids of a model gone astray: bytes in any order."""
    pieces = stream(IncrementalDecoder(decode(tokenizer)), ids, cuts)
    assert "".join(pieces) == decode(tokenizer)(ids)


@pytest.mark.parametrize("tail", ["", "🙂", "é and more"])
def test_garbage_is_given_out_before_the_end(tokenizer: Tokenizer, tail: str) -> None:
    """500 bytes that are never a character: held back no longer than necessary, and what follows is whole."""
    stray = tokenizer.token_to_id("\u0122")  # byte 0x80 in the byte-level alphabet
    assert decode(tokenizer)([stray]) == REPLACEMENT
    decoder = IncrementalDecoder(decode(tokenizer))
    text = ""
    for count in range(1, 501):
        text += decoder.push([stray])
        assert len(text) >= count - MAX_PENDING - 1
    for token in tokenizer.encode(tail, add_special_tokens=False).ids:
        text += decoder.push([token])
    assert text + decoder.flush() == REPLACEMENT * 500 + tail


def test_incomplete_character_at_the_end_is_flushed(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 🙂", add_special_tokens=False).ids[:-1]
    decoder = IncrementalDecoder(decode(tokenizer))
    assert "".join(decoder.push([token]) for token in ids).rstrip() == "ok"
    assert decoder.flush().endswith(REPLACEMENT)


def test_special_tokens_are_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Paris.<|im_end|>", add_special_tokens=False).ids
    assert "".join(stream(Detokenizer(decode(tokenizer)), ids, [1])) == "Paris."


def test_prompt_decides_how_the_first_token_reads() -> None:
    """A sentencepiece decoder drops the space at the very beginning, not in mid-sentence."""
    vocab = {"<unk>": 0, "▁The": 1, "▁capital": 2, "▁is": 3, "▁Paris": 4}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    assert "".join(stream(Detokenizer(tokenizer.decode, [1, 2]), [3, 4], [1])) == " is Paris"
    assert "".join(stream(Detokenizer(tokenizer.decode), [1, 2], [1])) == "The capital"


def test_model_completes_the_character_of_the_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🚀b", add_special_tokens=False).ids
    assert tokenizer.decode(ids[:-2]).endswith(REPLACEMENT)  # the prompt ends within the rocket
    assert "".join(stream(Detokenizer(decode(tokenizer), ids[:-2]), ids[-2:], [1])) == "🚀b"


# ---- stop strings


def cut_at_stop(text: str, stops: list[str]) -> str:
    """Character by character: the first stop string that is complete, the longest of several."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 6), max_size=5),
)
@example(text="abcd", stops=["abcd", "bc"], cuts=[4])
def test_stop_strings_cut_wherever_deltas_end(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopStrings(stops)
    given_out, start, turn = "", 0, 0
    while start < len(text):
        size = cuts[turn % len(cuts)] if cuts else 1
        given_out += matcher.push(text[start : start + size])
        start, turn = start + size, turn + 1
        assert cut_at_stop(text, stops).startswith(given_out)  # nothing given out is ever taken back
    assert given_out + matcher.flush() == cut_at_stop(text, stops)
    assert (matcher.matched is not None) == any(stop in text for stop in stops)


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopStrings(["###", "END"])
    assert matcher.push("hello #") == "hello "
    assert matcher.push("# E") == "## "
    assert matcher.push("N") == ""
    assert matcher.push("Done") == ""  # END is complete, the rest is cut
    assert matcher.matched == "END"
    assert matcher.push("more") == ""


def test_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["x", ""])


@pytest.mark.parametrize("cuts", [[1], [2], [3], [100]])
def test_tokens_are_counted_up_to_the_stop(tokenizer: Tokenizer, cuts: list[int]) -> None:
    ids = tokenizer.encode("one two STOP three", add_special_tokens=False).ids
    detokenizer = Detokenizer(decode(tokenizer), stop=["STOP"])
    assert "".join(stream(detokenizer, ids, cuts)) == "one two "
    assert detokenizer.stopped
    upto = next(n for n in range(len(ids)) if "STOP" in tokenizer.decode(ids[:n]))
    assert detokenizer.num_tokens == upto


def test_stop_completed_by_the_flush(tokenizer: Tokenizer) -> None:
    """The last bytes are no character, and the stop string is what they are shown as."""
    ids = tokenizer.encode("x🙂", add_special_tokens=False).ids[:-1]
    detokenizer = Detokenizer(decode(tokenizer), stop=[REPLACEMENT])
    assert "".join(stream(detokenizer, ids, [1])) == "x"
    assert detokenizer.stopped
