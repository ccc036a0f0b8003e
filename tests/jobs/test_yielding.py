"""Who gives way to whom: reports, pauses, and no flapping."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.jobs.gpu.usage import Action, ActionKind, OurAttempt, Sightings, Stranger, contention_actions
from gpuherd.jobs.options import YieldTo

ALICE = Stranger("GPU-a", "0", "4711", "alice runs python (pid 4711, 900 MB)", 4711, 900)
BOB = Stranger("GPU-b", "1", "4712", "bob runs python (pid 4712)", 4712)
TRAIN = OurAttempt(1, "train", frozenset({"GPU-a"}))
WIDE = OurAttempt(2, "wide", frozenset({"GPU-b", "GPU-c"}))


@dataclass
class Story:
    """Looks one after the other, with what the dispatcher would keep."""

    mode: YieldTo
    quiet_s: float = 9.0
    seen: Sightings = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)

    def look(self, now: float, *strangers: Stranger, running: tuple[OurAttempt, ...] = (TRAIN, WIDE)) -> list[Action]:
        actions, self.seen = contention_actions(
            self.mode, self.seen, strangers, running, self.paused, now=now, quiet_s=self.quiet_s
        )
        self.paused |= {action.attempt for action in actions if action.kind is ActionKind.PAUSE}
        self.paused -= {action.attempt for action in actions if action.kind is ActionKind.RESUME}
        return list(actions)


@pytest.mark.parametrize("mode", ["ignore", "pause", "requeue"])
def test_who_is_gone_at_the_next_look_changes_nothing(mode: YieldTo) -> None:
    story = Story(mode)
    assert story.look(0.0, ALICE) == []
    assert story.look(2.0) == []
    assert story.look(4.0, ALICE) == []


def test_a_stranger_is_reported_once() -> None:
    story = Story("ignore")
    story.look(0.0, ALICE)
    (action,) = story.look(2.0, ALICE)
    assert action == Action(ActionKind.REPORT, 1, f"{ALICE.sentence} on GPU 0, where train runs")
    assert story.look(4.0, ALICE) == []
    second = Stranger("GPU-a", "0", "99", "someone runs a process (pid 99)")
    story.look(6.0, ALICE, second)
    (action,) = story.look(8.0, ALICE, second)
    assert action.sentence == "someone runs a process (pid 99) on GPU 0, where train runs"


def test_a_job_is_paused_once_and_goes_on_after_the_quiet_time() -> None:
    story = Story("pause")
    story.look(0.0, ALICE)
    (action,) = story.look(2.0, ALICE)
    assert (action.kind, action.attempt) == (ActionKind.PAUSE, 1)
    assert action.sentence == f"train is paused: {ALICE.sentence} on GPU 0"
    assert story.look(4.0, ALICE) == []
    for now in (6.0, 8.0, 10.0, 12.0):
        assert story.look(now) == []
    (action,) = story.look(13.0)
    assert action == Action(ActionKind.RESUME, 1, "train goes on: nobody else uses its GPUs")
    assert story.look(15.0) == []


def test_a_stranger_between_two_phases_does_not_make_it_stop_and_go() -> None:
    story = Story("pause")
    actions = [story.look(float(now), *([ALICE] if now % 8 < 4 else [])) for now in range(0, 80, 2)]
    assert [action.kind for each in actions for action in each] == [ActionKind.PAUSE]


def test_any_stranger_on_any_of_its_gpus_keeps_a_job_paused() -> None:
    story = Story("pause")
    story.look(0.0, BOB)
    (action,) = story.look(2.0, BOB)
    assert action.attempt == 2
    on_c = Stranger("GPU-c", "2", "5", "carol runs a (pid 5)")
    for now in range(4, 30, 2):
        assert story.look(float(now), on_c) == []


def test_a_job_goes_back_into_the_queue() -> None:
    story = Story("requeue")
    story.look(0.0, ALICE, BOB)
    actions = story.look(2.5, ALICE, BOB)
    assert [(action.kind, action.attempt) for action in actions] == [(ActionKind.REQUEUE, 1), (ActionKind.REQUEUE, 2)]
    assert "goes back into the queue: bob runs" in actions[1].sentence


def test_a_job_paused_under_another_rule_goes_on() -> None:
    story = Story("pause")
    story.look(0.0, ALICE)
    story.look(2.0, ALICE)
    story.mode = "ignore"
    assert [action.kind for action in story.look(4.0, ALICE)] == [ActionKind.RESUME]
    story = Story("pause", paused={1})
    story.mode = "requeue"
    story.look(0.0, ALICE)
    assert [action.kind for action in story.look(2.0, ALICE)] == [ActionKind.REQUEUE]


def test_what_is_remembered_does_not_grow() -> None:
    story = Story("ignore")
    for now in range(200):
        strangers = [Stranger("GPU-a", "0", str(now + step), "x") for step in range(3)]
        story.look(float(now), *strangers)
    story.look(500.0, running=(WIDE,))
    assert story.seen == {}


@given(
    st.sampled_from(["ignore", "pause", "requeue"]),
    st.lists(st.sets(st.sampled_from([ALICE, BOB])), max_size=40),
)
def test_pauses_and_resumptions_alternate_and_keep_the_quiet_time(mode: YieldTo, looks: list[set[Stranger]]) -> None:
    story = Story(mode)
    last_stranger: dict[int, float] = {}
    for step, strangers in enumerate(looks):
        now, before = 2.0 * step, set(story.paused)
        for stranger in strangers:
            last_stranger[1 if stranger is ALICE else 2] = now
        for action in story.look(now, *strangers):
            if action.kind is ActionKind.PAUSE:
                assert (mode, action.attempt in before) == ("pause", False)
                assert last_stranger[action.attempt] == now
            if action.kind is ActionKind.RESUME:
                assert action.attempt in before
                assert now - last_stranger[action.attempt] >= story.quiet_s
