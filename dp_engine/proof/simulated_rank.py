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
        self.collective("dispatch", batch.num_tokens, batch.step_type.value)
        tokens = self._model.run(batch)
        self.collective("combine", batch.num_tokens, batch.step_type.value)
        return Drawn(tokens)

    def collective(self, name: str, size: int, what: str) -> None:
        """Meet the others there; `what`: has to be the same for all of them."""
        self.num_collectives += 1
        entry = self._ring.enter(name.encode(), size, self.num_collectives)
        try:
            self._gang.meet(self._rank, (name, what), self.num_collectives)
        except RankMissing as error:
            raise CollectiveFailed(f"the {name} of layer 0") from error
        self._ring.leave(entry)


class SimulatedRebalancer:
    """Rounds of two layers, every `interval` forwards; experts of every other layer it looks at move."""

    def __init__(self, runner: SimulatedRunner, interval: int) -> None:
        self.placement = 0
        self.rounds = 0
        self._runner = runner
        self._interval = interval
        self._forwards = 0
        self._layer = 0

    @property
    def wanted(self) -> bool:
        return self._layer > 0 or self._forwards >= self._interval

    def advance(self) -> None:
        self._runner.collective("expert loads", 1, f"layer {self._layer}")
        if self._layer == self.rounds % 2:
            self._runner.collective("expert weights", 1, f"layer {self._layer}")
            self.placement += 1
        self._layer = 1 - self._layer
        if self._layer == 0:
            self._forwards = 0
            self.rounds += 1

    def step_done(self) -> None:
        self._forwards += 1
