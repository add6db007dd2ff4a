"""Counted messages: each end of a connection numbers what it sends, so that the other one sees a loss.

A connection that is cut and made again, or a queue that ends with it, loses messages without a word.
"""

import struct

_NUMBER = struct.Struct("<Q")


class MessagesLost(Exception):
    """The number of a message is not the next one. `missing`: how many lie between; negative: it came before."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        lost = f"{missing} messages were" if missing != 1 else "1 message was"
        super().__init__(f"{lost} lost on the way" if missing > 0 else "a message came again")


def numbered(number: int, payload: bytes) -> bytes:
    """The frame of message `number` of its sender; the first one is 0."""
    return _NUMBER.pack(number) + payload


class Reception:
    """What came from one sender; owner of the number that is due."""

    def __init__(self) -> None:
        self._due = 0

    def payload(self, frame: bytes) -> bytes:
        """The message in a frame; empty, and not counted, for a frame that is too short to have a number.

        Raises MessagesLost. Whoever goes on after a gap has it once: the message after this one is due then.
        """
        if len(frame) < _NUMBER.size:
            return b""
        number, due = _NUMBER.unpack_from(frame)[0], self._due
        self._due = max(due, number + 1)
        if number != due:
            raise MessagesLost(number - due)
        return frame[_NUMBER.size :]
