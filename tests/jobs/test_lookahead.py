"""How far a decision looks: whatever the decisions say, they come to an end when nobody can be started."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuherd.jobs.scheduler.ordering import Lookahead
from gpuherd.jobs.scheduler.types import Decision

# What a decision that starts nobody says: seconds for which kept GPUs can be lent, GPUs left, jobs unseen.
_Said = tuple[bool, bool, bool]
_SAID = st.tuples(st.booleans(), st.booleans(), st.booleans())


def _after(lookahead: Lookahead, said: _Said) -> Lookahead:
    lends, left, unseen = said
    decision = Decision(starts=(), waits=(), refused=(), backfill_s=60.0 if lends else None, gpus_left=int(left))
    return lookahead.after(decision, unseen=unseen)


@given(st.fixed_dictionaries({Lookahead(lends, kinds): _SAID for lends in (False, True) for kinds in (False, True)}))
def test_decisions_that_start_nobody_come_to_an_end(said: dict[Lookahead, _Said]) -> None:
    """Each way of looking has its own answer, and gives the same one as long as nothing happens."""
    lookahead, decisions = Lookahead(), 1
    while (further := _after(lookahead, said[lookahead])).is_beyond(lookahead):
        lookahead, decisions = further, decisions + 1
        assert decisions <= 3


def test_a_decision_that_leaves_gpus_over_looks_at_every_kind_next_time_and_back_when_it_does_not() -> None:
    by_kind = _after(Lookahead(), (False, True, True))
    assert by_kind == Lookahead(by_kind=True)
    assert _after(by_kind, (False, False, True)) == Lookahead()
    assert _after(by_kind, (True, False, True)) == Lookahead(backfills=True, by_kind=True)
