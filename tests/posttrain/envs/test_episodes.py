"""Episodes become rollouts: with real tiny models, a chat template and a stand-in for people's words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain import tiny

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.envs.episodes import Turns, roll
from gpuherd.posttrain.envs.interface import NOTHING, Environment, EnvironmentOptions, Message, Observation, Step, user
from gpuherd.posttrain.envs.registry import SingleTurn, make_environments
from gpuherd.posttrain.types import Problem, Split

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Said:
    ids: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    text: str
    finished: bool


@dataclass
class Script:
    """Answers by heart: for each turn what is said, for every episode the same; remembers what it was asked."""

    tokenizer: Any
    lines: Sequence[str]
    ended: bool = True
    asked: list[tuple[str, str]] = field(default_factory=list)
    turn: int = 0

    def continuations(
        self, prefixes: Sequence[tuple[str, Sequence[int], Sequence[int]]], samples: int = 1, **_: Any
    ) -> list[list[Said]]:
        self.asked += [(name, self.tokenizer.decode(prompt)) for name, prompt, _ in prefixes]
        text = self.lines[self.turn]
        self.turn += 1
        ids = (*self.tokenizer(text)["input_ids"], *([self.tokenizer.eos_token_id] if self.ended else []))
        return [[Said(ids, (-0.5,) * len(ids), text, self.ended)] * samples for _ in prefixes]


class Counting:
    """An environment that says how many turns were taken and pays as much, up to three; problem "b" ends at once."""

    name, verifiable, reward_range, most_turns = "counting", False, (0.0, 6.0), 3

    def problems(self, split: Split, count: int | None, seed: int) -> list[Problem]:
        return [Problem("a", "one"), Problem("b", "two")]

    def make(self) -> Environment:
        return Counter()

    def step_all(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[Step]:
        return [each.step(text) for each, text in zip(environments, texts, strict=True)]

    def close(self) -> None:
        pass


class Counter:
    def reset(self, problem: Problem, seed: int) -> Observation:
        self.problem, self.turns, self.seed = problem, 0, seed
        return user(f"{problem.prompt}?")

    def step(self, text: str) -> Step:
        self.turns += 1
        if self.turns == 3 or self.problem.id == "b":
            return Step(NOTHING, float(self.turns), True, correct=text == "end")
        return Step(user(f"turn {self.turns} <|user|> </s>"), 0.0 if self.turns == 1 else 2.0, False)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return tiny.character_tokenizer(tmp_path)


def test_an_episode_keeps_every_token_and_marks_whose_it_is(tokenizer: Any) -> None:
    script = Script(tokenizer, ["x", "yy", "end"])
    rollouts = roll(Counting(), script, Turns(tokenizer, chat=False), Counting().problems(Split.TRAIN, None, 0), 2)
    assert [(each.problem, each.sample) for each in rollouts] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    first, last = rollouts[0], rollouts[3]
    assert tokenizer.decode(first.prompt_ids) == "one?"
    words = tokenizer.decode(first.ids)
    assert words == "x</s>\n\nturn 1 <|user|> < /s>\n\nyy</s>\n\nturn 2 <|user|> < /s>\n\nend</s>"
    own = [token for token, mine in zip(first.ids, first.by_policy, strict=True) if mine]
    assert tokenizer.decode(own) == "x</s>yy</s>end</s>"
    assert [each is None for each in first.log_probs] == [not mine for mine in first.by_policy]
    assert (first.reward, first.correct, first.finished, first.text) == (5.0, True, True, "end")
    assert first.turn_rewards == ((first.ids.index(0, 2 + 23), 2.0), (len(first.ids) - 1, 3.0))
    assert math.fsum(reward for _, reward in first.turn_rewards) == first.reward
    assert all(first.by_policy[place] for place, _ in first.turn_rewards)
    assert (last.reward, last.ids, last.turn_rewards) == (1.0, (*tokenizer("x")["input_ids"], 0), ((1, 1.0),))
    assert last.correct is False


def test_open_episodes_are_asked_together_each_under_its_own_name(tokenizer: Any) -> None:
    script = Script(tokenizer, ["x", "y", "z"])
    problems = Counting().problems(Split.TRAIN, None, 0)
    roll(Counting(), script, Turns(tokenizer, chat=False), problems, 2, first_sample=4, stream="step 3")
    assert [name for name, _ in script.asked[:2]] == ["a\nstep 3", "b\nstep 3"]
    assert [name for name, _ in script.asked[2:]] == [
        "a\nstep 3\nturn 1 of 4",
        "a\nstep 3\nturn 1 of 5",
        "a\nstep 3\nturn 2 of 4",
        "a\nstep 3\nturn 2 of 5",
    ]
    assert script.asked[2][1] == "one?x</s>\n\nturn 1 <|user|> < /s>\n\n"


@pytest.mark.parametrize("ended", [True, False])
def test_the_chat_template_stands_between_turns_and_no_word_ends_one(tokenizer: Any, ended: bool) -> None:
    tokenizer.chat_template = CHAT
    turns = Turns(tokenizer, chat=True)
    script = Script(tokenizer, ["x", " y ", "end"], ended=ended)
    rollout = roll(Counting(), script, turns, [Problem("a", "one")], 1)[0]
    close = "</s>"
    whole = tokenizer.decode((*rollout.prompt_ids, *rollout.ids))
    between = "<|user|>turn {} <|user|> < /s>" + close + "<|assistant|>"
    # What the policy said stands there as it said it, though the template would trim it.
    said = f"<|user|>one?{close}<|assistant|>x{close}{between.format(1)} y {close}{between.format(2)}end"
    assert whole == said + (close if ended else "")
    own = [token for token, mine in zip(rollout.ids, rollout.by_policy, strict=True) if mine]
    assert tokenizer.decode(own) == ("x</s> y </s>end</s>" if ended else "x y end")
    assert rollout.finished is ended


def test_an_episode_ends_where_there_is_no_room_for_another_turn(tokenizer: Any) -> None:
    problems = [Problem("a", "one")]
    turns = Turns(tokenizer, chat=False)
    short = roll(Counting(), Script(tokenizer, ["x", "y", "z"]), turns, problems, 1, most_tokens=20)[0]
    assert (tokenizer.decode(short.ids), short.finished, short.reward) == ("x</s>", False, 0.0)
    assert short.turn_rewards == ((1, 0.0),)
    maths = make_environments(
        EnvironmentOptions("math", problems=({"id": "p", "question": "1+1?", "answer": "2"},), only=Split.TRAIN)
    )
    asked = maths.problems(Split.TRAIN, None, 0)
    room = len(turns.prompt([Message("user", asked[0].prompt)])) + 10
    cut = roll(maths, Script(tokenizer, ["none", "2"]), turns, asked, 1, most_tokens=room)[0]
    assert (cut.reward, cut.correct, cut.finished, cut.turn_rewards) == (-0.3, False, False, ((4, -0.3),))
    whole = roll(Counting(), Script(tokenizer, ["x", "y", "z"]), turns, problems, 1, most_tokens=1000)[0]
    assert whole.reward == 5.0


def test_empty_turns_are_turns(tokenizer: Any) -> None:
    rollout = roll(
        Counting(), Script(tokenizer, ["", "", ""], ended=False), Turns(tokenizer, chat=False), [Problem("b", "")], 1
    )[0]
    assert (rollout.ids, rollout.turn_rewards, rollout.reward) == ((), ((0, 1.0),), 1.0)


def test_rewards_that_are_no_numbers_are_named(tokenizer: Any) -> None:
    class Broken(Counting):
        def step_all(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[Step]:
            return [Step(NOTHING, math.nan, True) for _ in environments]

    with pytest.raises(GpuherdError, match="environment counting, problem a, turn 1: the reward is nan"):
        roll(Broken(), Script(tokenizer, ["x"]), Turns(tokenizer, chat=False), [Problem("a", "one")], 1)
    with pytest.raises(UsageError, match="chat template"):
        Turns(tokenizer, chat=True)
    with pytest.raises(UsageError, match="greedy"):
        roll(Counting(), Script(tokenizer, []), Turns(tokenizer, chat=False), [], 2, greedy=True)


def test_words_like_our_own_marker_are_said_whole(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT
    said = Turns(tokenizer, chat=True).between([], [Message("user", "a gpuherdmarkerofwords b")], None)
    assert tokenizer.decode(said) == "</s><|user|>a gpuherdmarkerofwords b</s><|assistant|>"


def test_a_template_that_hides_what_was_said_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(UsageError, match="can't take turns"):
        Turns(tokenizer, chat=True).between([Message("user", "a")], [Message("user", "b")], None)


def test_an_environment_of_one_turn_rolls_as_the_sampler_does(policy_model: Path) -> None:
    from gpuherd.posttrain.rollout.sampler import Sampler
    from gpuherd.posttrain.types import Policy, Precision, Sampling

    task = make_task("arithmetic", TaskOptions({"digits": 1}))
    problems = task.problems(Split.TRAIN, 3, 0)
    sampler = Sampler(Policy(str(policy_model)), Precision(), "cpu", Sampling(max_new_tokens=4, batch_size=4))
    environments = SingleTurn(task)
    turns = Turns(sampler.tokenizer, chat=False)
    rolled = roll(environments, sampler, turns, problems, 2, first_sample=1, stream="s")
    assert rolled == sampler.rollouts(task, problems, 2, first_sample=1, stream="s")
    assert len({each.ids for each in rolled}) > 1


def test_several_turns_with_a_model_do_not_depend_on_what_rolls_beside(policy_model: Path) -> None:
    from gpuherd.posttrain.rollout.sampler import Sampler
    from gpuherd.posttrain.types import Policy, Precision, Sampling

    asked = tuple({"question": f"{n}+1?", "answer": str(n + 1)} for n in range(3))
    environments = make_environments(EnvironmentOptions("math", problems=asked, only=Split.TRAIN))
    problems = environments.problems(Split.TRAIN, None, 0)
    sampler = Sampler(Policy(str(policy_model)), Precision(), "cpu", Sampling(max_new_tokens=5, batch_size=8))
    turns = Turns(sampler.tokenizer, chat=False)
    together = roll(environments, sampler, turns, problems, 2)
    apart = [
        each
        for problem in problems
        for sample in range(2)
        for each in roll(environments, sampler, turns, [problem], 1, first_sample=sample)
    ]
    tokens = [(each.problem, each.sample, each.ids, each.reward) for each in together]
    assert tokens == [(each.problem, each.sample, each.ids, each.reward) for each in apart]
    assert all(False in each.by_policy for each in together if not each.correct)
    environments.close()
