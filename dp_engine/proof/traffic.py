"""Random traffic for simulations: what a router sends, and when it arrives, drawn from a seed."""

from dataclasses import dataclass
from random import Random

from dp_engine.messages import Add, ToRank
from dp_engine.proof.worlds import Router

LONGEST_PROMPT, MOST_TOKENS = 24, 12


@dataclass(frozen=True)
class Traffic:
    """arrivals: by rank, messages in order, each with the turn from which on it can be read; requests: with their rank;
    aborted: requests that owe nobody an end."""

    arrivals: list[list[tuple[int, ToRank]]]
    requests: dict[int, tuple[int, Add]]
    aborted: frozenset[int]


def random_traffic(random: Random, ranks: int, turns: int) -> Traffic:
    """A few requests in flight on each rank, on the average, with lulls in which the gang can fall asleep."""
    router = Router(ranks)
    sent: list[int] = []
    at = 0.0
    busy = random.uniform(0.02, 0.25) * ranks  # events a turn
    while at < turns:
        at += random.expovariate(busy)
        if random.random() < 0.01:
            at += random.uniform(20, 200)
        _event(random, router, ranks)
        sent += [int(at)] * (len(router.events) - len(sent))
    router.pause("none")
    sent.append(int(at) + 1)
    return _delivered(random, router, sent)


def _event(random: Random, router: Router, ranks: int) -> None:
    kind = random.random()
    if kind < 0.8 or not router.requests:
        rank = random.randrange(ranks) if random.random() < 0.8 else 0
        prompt = random.randint(1, LONGEST_PROMPT if random.random() < 0.5 else 6)
        like = random.randint(1, 3) if random.random() < 0.5 else None  # a prompt that others have, too
        router.add(rank, prompt, random.randint(1, MOST_TOKENS), like=like)
    elif kind < 0.94:
        request = random.randint(max(router.requests - 4 * ranks, 1), router.requests)
        router.abort(router.rank_of[request], request)
    elif kind < 0.97:
        router.reset_prefix_cache()
    else:
        router.pause(random.choice(("new", "all")))
        router.pause("none")


def _delivered(random: Random, router: Router, sent: list[int]) -> Traffic:
    """Each link keeps the order and has a delay of its own, now and then a long one."""
    arrivals: list[list[tuple[int, ToRank]]] = []
    for rank in range(router.ranks):
        queue: list[tuple[int, ToRank]] = []
        last = 0
        for event, turn in zip(router.events, sent, strict=True):
            for message in event.messages[rank]:
                delay = random.randint(0, 3) if random.random() < 0.98 else random.randint(10, 40)
                last = max(last, turn + delay)
                queue.append((last, message))
        arrivals.append(queue)
    adds = {
        message.request_id: (rank, message)
        for rank, queue in enumerate(arrivals)
        for _, message in queue
        if isinstance(message, Add)
    }
    return Traffic(arrivals, adds, frozenset(router.aborted))
