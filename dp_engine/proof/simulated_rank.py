"""The ends of a simulated rank: a link whose messages take their time, and a runner whose collectives are meetings."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from dp_engine.batch import Batch, Drawn
from dp_engine.messages import Message, Output, Rejected, Shutdown, ToRank
from dp_engine.proof.pretended import PretendedModel
from ep.dispatch import CollectiveFailed
from vote.recorder import Ring
from vote.simulated import RankMissing, SimulatedGang


class Turns:
    """The gang's clock. A turn is one look into the inbox and the vote that follows; a rank that wakes later than
    others keeps them waiting, so the turn of the last one is everybody's."""

    def __init__(self) -> None:
        self._latest: list[int] = []  # by number of looks into an inbox

    @property
    def last(self) -> int:
        return self._latest[-1]

    def begin(self, look: int, earliest: int) -> int:
        """The turn of a rank's look number `look`, which comes at `earliest` or, if it is later than that, right after
        the vote before."""
        turn = max(earliest, self._latest[look - 1] + 1 if look else 0)
        if look == len(self._latest):
            self._latest.append(turn)
        self._latest[look] = max(self._latest[look], turn)
        return turn


class SimulatedLink:
    """One rank's end, which notes what the router is told. When nothing more is to come, its next sleep is its last."""

    bad_messages = 0

    def __init__(self, turns: Turns, rank: int, arrivals: Sequence[tuple[int, ToRank]]) -> None:
        self.turn = 0
        self.sleeps = 0
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, str] = {}
        self._turns = turns
        self._rank = rank
        self._arrivals = arrivals
        self._next = 0
        self._looks = 0
        self._earliest = 0
        self._over = False

    def drain(self) -> list[ToRank]:
        self.turn = self._turns.begin(self._looks, self._earliest)
        self._looks += 1
        first = self._next
        while self._next < len(self._arrivals) and self._arrivals[self._next][0] <= self.turn:
            self._next += 1
        messages = [message for _, message in self._arrivals[first : self._next]]
        return [*messages, Shutdown(0)] if self._over else messages

    def wait(self) -> None:
        self.sleeps += 1
        self._over = self._next == len(self._arrivals)
        if not self._over:
            self._earliest = self._arrivals[self._next][0]

    def send(self, message: Message) -> None:
        if isinstance(message, Rejected):
            raise AssertionError(f"request {message.request_id} was rejected: {message.reason}")
        if not isinstance(message, Output):
            return
        for request, token in zip(message.request_ids, message.tokens, strict=True):
            assert request not in self.ends, f"a token for request {request} after its end"
            self.tokens[request].append(token)
        for request, reason in message.finished:
            assert request not in self.ends, f"request {request} ended twice"
            self.ends[request] = reason


class SimulatedRunner:
    """A forward of one layer: dispatch, experts, combine. `before`: called first, for faults."""

    def __init__(self, gang: SimulatedGang, rank: int, model: PretendedModel, ring: Ring) -> None:
        self.num_collectives = 0
        self.before: Callable[[], None] = lambda: None
        self._gang = gang
        self._rank = rank
        self._model = model
        self._ring = ring

    def run(self, batch: Batch) -> Drawn:
        self.before()
        self._collective("dispatch", batch)
        tokens = self._model.run(batch)
        self._collective("combine", batch)
        return Drawn(tokens)

    def _collective(self, name: str, batch: Batch) -> None:
        self.num_collectives += 1
        entry = self._ring.enter(name.encode(), batch.num_tokens, self.num_collectives)
        try:
            self._gang.meet(self._rank, (name, batch.step_type), self.num_collectives)
        except RankMissing as error:
            raise CollectiveFailed(f"the {name} of layer 0") from error
        self._ring.leave(entry)
