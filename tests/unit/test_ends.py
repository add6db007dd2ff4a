"""What the end of a rank's run means."""

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RaySystemError, RayTaskError

from dp_engine.link import RouterLost
from launcher.ends import RankEnd, blame, end_of
from launcher.processes import ProcessId
from launcher.whereabouts import Whereabouts

WHERE = Whereabouts("abcdef0123", "10.0.0.3", ProcessId(77, "1"), (), 1, (), ())


class LockstepBroken(Exception):
    pass


def raised(error: Exception) -> RayTaskError:
    return RayTaskError("run", "traceback", error)


@pytest.mark.parametrize(
    ("error", "kind", "bystander", "words"),
    [
        (None, "left", False, "left unasked"),
        (raised(ValueError("two\nlines")), "raised", False, "failed: ValueError: two lines"),
        (raised(RouterLost("no router")), "lost", False, "failed: RouterLost: no router"),
        (raised(LockstepBroken("rank 2 left")), "raised", True, "rank 2 left"),
        (ActorDiedError(), "killed", False, "died: its process (pid 77) was killed or crashed"),
        (ActorUnavailableError("?", None), "lost", False, "was lost: its node 10.0.0.3 (abcdef01) cannot be reached"),
        (RaySystemError("no store"), "killed", False, "ended: RaySystemError: System error: no store"),
    ],
)
def test_ends(error: Exception | None, kind: str, bystander: bool, words: str) -> None:
    assert end_of(4, error, WHERE, {"abcdef0123"}) == RankEnd(4, words, bystander, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("gone", None), RaySystemError("no store")])
def test_a_rank_whose_node_is_gone_is_lost_with_it(error: Exception) -> None:
    end = end_of(4, error, WHERE, {"another"})
    assert (end.kind, end.reason) == ("lost", "was lost with its node 10.0.0.3 (abcdef01)")


def test_bystanders_are_blamed_only_if_there_is_nobody_else() -> None:
    noticed, killed = RankEnd(0, "rank 1 left", True, "raised"), RankEnd(1, "died", False, "killed")
    assert blame([noticed, killed]) == "rank 1 died"
    assert blame([RankEnd(2, "rank 1 left", True, "raised"), noticed]) == "rank 1 left"
