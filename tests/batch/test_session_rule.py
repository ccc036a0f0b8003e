"""When a session gives its GPUs back: the rule, look by look."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from gpuherd.batch import session_rule
from gpuherd.batch.session_rule import Ending, EventKind, SessionEvent, SessionRule, SessionState, end_of, step
from gpuherd.gpus.idle_held import HOLE_S

RULE = SessionRule(idle_after_s=100.0, warn_s=20.0)


class Story:
    """Looks at one session, one after the other."""

    def __init__(self, rule: SessionRule = RULE):
        self.rule = rule
        self.state = SessionState.begun(0.0)

    def look(self, now: float, *, used: bool = False, kept_until: float = 0.0) -> SessionEvent | None:
        event, self.state = step(self.rule, self.state.kept(kept_until), now, is_used=used)
        return event

    def kinds(self, *times: float) -> list[str | None]:
        found = [self.look(now) for now in times]
        return [None if event is None else str(event.kind.value) for event in found]


def test_the_examples_in_the_docstrings_hold() -> None:
    ran = doctest.testmod(session_rule)
    assert (ran.attempted > 0, ran.failed) == (True, 0)


def test_it_is_warned_and_ended() -> None:
    story = Story()
    assert story.kinds(40.0, 79.0, 80.0, 99.0, 100.0) == [None, None, "warn", None, "end"]


def test_the_warning_says_how_much_time_is_left() -> None:
    story = Story()
    story.kinds(50.0)
    assert story.look(85.0) == SessionEvent(EventKind.WARN, Ending.IDLE, 20.0)
    assert story.kinds(100.0, 104.9, 105.0) == [None, None, "end"]


def test_use_puts_the_end_off_and_a_warned_session_is_told() -> None:
    story = Story()
    story.kinds(50.0, 85.0)
    assert story.look(95.0, used=True) == SessionEvent(EventKind.GOES_ON, Ending.IDLE, 100.0)
    assert story.kinds(130.0, 174.0, 175.0, 195.0) == [None, None, "warn", "end"]


def test_a_request_keeps_it_used_or_not() -> None:
    story = Story()
    story.kinds(50.0, 85.0)
    event = story.look(90.0, kept_until=300.0)
    assert event is not None and event.kind is EventKind.GOES_ON
    assert story.kinds(140.0, 190.0, 240.0, 279.0, 280.0, 300.0) == [None, None, None, None, "warn", "end"]


def test_a_request_for_less_than_it_has_changes_nothing() -> None:
    story = Story()
    assert story.look(10.0, kept_until=50.0) is None
    assert end_of(RULE, story.state) == (Ending.IDLE, 100.0)
    assert story.state.kept(20.0) == story.state


def test_its_time_is_up_whatever_it_does() -> None:
    story = Story(SessionRule(idle_after_s=100.0, warn_s=20.0, longest_s=130.0))
    assert [story.look(now, used=True) for now in (50.0, 100.0)] == [None, None]
    warned = story.look(110.0, used=True)
    assert warned == SessionEvent(EventKind.WARN, Ending.TIME, 20.0)
    assert story.look(130.0, used=True) == SessionEvent(EventKind.END, Ending.TIME)


def test_it_is_warned_again_when_another_end_comes_first() -> None:
    story = Story(SessionRule(idle_after_s=100.0, warn_s=20.0, longest_s=200.0))
    story.kinds(50.0)
    assert story.kinds(85.0) == ["warn"]
    event = story.look(86.0, kept_until=100.0)
    assert event is None  # still to be ended for idleness, at 100
    assert story.look(99.0, used=True) is not None
    event = story.look(150.0, used=True)
    assert event is None
    event = story.look(181.0, used=True)
    assert event == SessionEvent(EventKind.WARN, Ending.TIME, 20.0)


def test_no_session_ends_without_a_warning_however_long_nobody_looked() -> None:
    story = Story()
    story.kinds(50.0)
    assert story.kinds(50.0 + HOLE_S + 1) == [None], "a gap counts as use"
    late = Story(SessionRule(idle_after_s=40.0, warn_s=10.0))
    late.kinds(1.0)
    assert late.kinds(59.0, 68.0, 69.0) == ["warn", None, "end"]


@given(
    st.floats(1.0, 200.0),
    st.floats(0.1, 1.0),
    st.one_of(st.none(), st.floats(1.0, 400.0)),
    st.lists(st.tuples(st.floats(0.1, 40.0), st.booleans(), st.one_of(st.none(), st.floats(0, 900))), max_size=40),
)
def test_every_end_was_due_and_warned_of(
    idle_after_s: float, warn: float, longest_s: float | None, looks: list[tuple[float, bool, float | None]]
) -> None:
    rule = SessionRule(idle_after_s, warn * idle_after_s * 0.99, longest_s)
    story, now, used_at, keep, warned_at = Story(rule), 0.0, 0.0, 0.0, None
    for wait, used, request in looks:
        now += wait
        used_at = now if used else used_at
        keep = max(keep, request or 0.0)
        event = story.look(now, used=used, kept_until=request or 0.0)
        if event is not None and event.kind is EventKind.WARN:
            warned_at = now
            assert event.in_s >= rule.warn_s
        elif event is not None and event.kind is EventKind.GOES_ON:
            assert warned_at is not None
            warned_at = None
        elif event is not None:
            assert warned_at is not None and now - warned_at >= rule.warn_s - 1e-9
            assert now >= keep
            if event.ending is Ending.IDLE:
                assert now - used_at >= idle_after_s - 1e-9
            else:
                assert longest_s is not None and now >= longest_s - 1e-9
            break
