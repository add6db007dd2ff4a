"""Counted messages: whatever is lost or comes again shows at the next one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_engine.numbering import MessagesLost, Reception, numbered


@given(st.lists(st.binary(max_size=20), max_size=30), st.data())
def test_every_loss_and_every_repeat_shows(payloads: list[bytes], data: st.DataObject) -> None:
    """At the next message, with the right number, and then no more."""
    reception, due = Reception(), 0
    arrivals = data.draw(st.lists(st.integers(0, len(payloads) - 1), max_size=40)) if payloads else []
    for number in arrivals:
        frame = numbered(number, payloads[number])
        if number == due:
            assert reception.payload(frame) == payloads[number]
        else:
            with pytest.raises(MessagesLost) as caught:
                reception.payload(frame)
            assert caught.value.missing == number - due
        due = max(due, number + 1)


@given(st.lists(st.binary(max_size=20), max_size=30))
def test_what_comes_in_order_is_unharmed(payloads: list[bytes]) -> None:
    reception = Reception()
    assert [reception.payload(numbered(number, payload)) for number, payload in enumerate(payloads)] == payloads


@pytest.mark.parametrize(
    ("number", "words"),
    [(3, "1 message was lost on the way"), (5, "3 messages were lost on the way"), (1, "a message came again")],
)
def test_words(number: int, words: str) -> None:
    reception = Reception()
    reception.payload(numbered(0, b""))
    reception.payload(numbered(1, b""))
    with pytest.raises(MessagesLost, match=f"^{words}$"):
        reception.payload(numbered(number, b""))


def test_a_frame_without_a_number_is_no_message_and_not_counted() -> None:
    reception = Reception()
    for junk in (b"", b"1234567"):
        assert reception.payload(junk) == b""
    assert reception.payload(numbered(0, b"first")) == b"first"
