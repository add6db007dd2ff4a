"""The ballot's layout: what one MIN all-reduce proves and decides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vote.ballot import AGREED, BALLOT_SIZE, MAX_VALUE, VOTES, Facts, Lockstep, Tally, write_ballot


def ballot(lockstep: Lockstep, facts: Facts) -> np.ndarray:
    out = np.full(BALLOT_SIZE, 7, np.int32)
    write_ballot(out, lockstep, facts)
    return out


def tally(*ballots: np.ndarray) -> Tally:
    return Tally(np.minimum.reduce(ballots))


HERE = Lockstep(protocol=1, epoch=1, vote=5, step=4, ballot=1, decode_step=3, settings=77, collectives=90, owed=6)

values = st.integers(0, MAX_VALUE)
locksteps = st.builds(Lockstep, **dict.fromkeys(AGREED, values))
facts = st.builds(Facts, wake=values, running=values, **{name: st.booleans() for name in VOTES})


@given(st.lists(facts, min_size=1, max_size=5))
def test_votes_and_ranges_are_what_a_loop_over_the_ranks_says(all_facts: list[Facts]) -> None:
    result = tally(*(ballot(HERE, one) for one in all_facts))
    for vote in VOTES:
        assert result.all(vote) == all(getattr(one, vote) for one in all_facts)
        assert result.any(vote) == any(getattr(one, vote) for one in all_facts)
    for name in ("wake", "running"):
        column = [getattr(one, name) for one in all_facts]
        assert result.range(name) == (min(column), max(column))
    asking = [one.running for one in all_facts if one.wants_prefill]
    assert result.range("asker")[0] == min(asking, default=MAX_VALUE)
    assert result.disagreements() == {}


@given(st.lists(locksteps, min_size=1, max_size=4))
def test_a_tally_proves_lockstep_exactly_when_all_values_are_equal(all_locksteps: list[Lockstep]) -> None:
    result = tally(*(ballot(one, Facts()) for one in all_locksteps))
    for name in AGREED:
        column = [getattr(one, name) for one in all_locksteps]
        expected = (min(column), max(column))
        assert result.disagreements().get(name, (column[0], column[0])) == expected


@pytest.mark.parametrize("name", AGREED)
def test_each_agreed_field_is_checked(name: str) -> None:
    other = Lockstep(**{field: getattr(HERE, field) + (field == name) for field in AGREED})
    assert tally(ballot(HERE, Facts()), ballot(other, Facts())).disagreements() == {
        name: (getattr(HERE, name), getattr(HERE, name) + 1)
    }
