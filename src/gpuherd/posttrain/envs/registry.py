"""Environments by name. One registers itself where it is defined:

    @environment("math", MathSettings)
    def make_math(settings: MathSettings, options: EnvironmentOptions) -> Environments: ...

And what all of them share: a task as an environment of one turn, an environment of the user's own class,
rewards shaped as a configuration says, and where problems are from.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from gpuherd.errors import UsageError, printable
from gpuherd.models.names import user_path
from gpuherd.options import did_you_mean
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.data.dataset import (
    SUFFIXES,
    Checked,
    ParsedRow,
    Part,
    first_problems,
    gather,
    read_rows,
    without_last_tenth,
)
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.envs.interface import (
    NOTHING,
    Environment,
    EnvironmentOptions,
    Environments,
    Episode,
    Message,
    Observation,
    Role,
    Step,
    VectorEnv,
    user,
)
from gpuherd.posttrain.rewards.answers import rewards_of
from gpuherd.posttrain.types import Problem, ProblemSource, Split, Task
from gpuherd.qa.data.questions import DataRow

Settings = TypeVar("Settings")
Maker = Callable[[Settings, EnvironmentOptions], Environments]

_NEEDED = ("name", "verifiable", "reward_range", "most_turns", "problems", "make", "step_all", "close")


@dataclass(frozen=True, slots=True)
class NamedEnvironment:
    """An environment that is known by a name: the dataclass of its settings, and what makes it of these."""

    name: str
    settings: type
    make: Callable[[Any, EnvironmentOptions], Environments]


_NAMED: dict[str, NamedEnvironment] = {}


def environment(name: str, settings: type[Settings]) -> Callable[[Maker[Settings]], Maker[Settings]]:
    """Registers the function that follows as what makes the environments of this name. Raises ValueError if it is
    taken."""

    def register(make: Maker[Settings]) -> Maker[Settings]:
        if name in _NAMED:
            raise ValueError(f"there is an environment {name!r} already")
        _NAMED[name] = NamedEnvironment(name, settings, make)
        return make

    return register


def environments() -> Mapping[str, NamedEnvironment]:
    """All environments that are known by a name but ``task``. Each module of this package registers its own when it is
    imported."""
    import gpuherd.posttrain.envs as package

    for module in sorted(each.name for each in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{module}")
    return _NAMED


def make_environments(options: EnvironmentOptions) -> Environments:
    """The environments that the options say. Raises UsageError, which says the nearest name; NoProtection, and what
    reading problems raises."""
    made = _custom(options) if options.custom_class is not None else _known(options)
    as_it_is = (options.reward_scale, options.reward_bias, options.reward_clip) == (1.0, 0.0, None)
    return made if as_it_is else Shaped(made, options)


def _known(options: EnvironmentOptions) -> Environments:
    plain = options.env_type.lower().replace("-", "_")
    if plain == "task":
        return _of_task(options)
    if (known := environments().get(plain)) is None:
        names = ["task", *environments()]
        hint = did_you_mean(plain, [*names, "custom"])
        raise UsageError(f"env_type {printable(options.env_type)!r} is none of {', '.join(names)} and custom{hint}")
    return known.make(read(known.settings, options.settings, known.name), options)


def _of_task(options: EnvironmentOptions) -> SingleTurn:
    """The environments of a task, whose own settings ``options.settings`` are. Raises UsageError."""
    if options.dataset is None:
        raise UsageError("env_type task: dataset=TASK or FILE says which")
    if options.max_attempts not in (None, 1):
        raise UsageError(
            f"max_attempts={options.max_attempts}: a task is answered in one turn; math and code take more"
        )
    return SingleTurn(make_task(options.dataset, replace(options.task, settings=options.settings)))


def _custom(options: EnvironmentOptions) -> Environments:
    """The user's own, made with ``custom_kwargs``. Raises UsageError."""
    name = options.custom_class or ""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        made = getattr(importlib.import_module(module), attribute)(**options.custom_kwargs)
    except (ImportError, AttributeError, ValueError, TypeError) as problem:
        raise UsageError(f"custom_class={printable(name)!r} can't be made: {problem}") from None
    missing = [each for each in _NEEDED if not hasattr(made, each)]
    if missing:
        raise UsageError(f"custom_class={printable(name)!r} has no {missing[0]}; envs.interface says what it needs")
    own: Environments = made
    return own


# ---- a task as an environment ----------------------------------------------------------------------------------------


class _OneTurn(Episode):
    def reset(self, problem: Problem, seed: int) -> Observation:  # noqa: ARG002 - nothing is drawn
        """Shows the problem's prompt. Raises UsageError for a conversation with tools."""
        if problem.chat:
            raise UsageError(
                f"problem {problem.id} is a conversation with tools or with turns out of order, and an environment "
                "shows texts; SFT learns from it (training.data_file)"
            )
        self.problem = problem
        turns = tuple(Message(cast(Role, role), content) for role, content in problem.messages)
        return Observation(turns) if turns else user(problem.prompt)


class SingleTurn(VectorEnv[_OneTurn]):
    """Environments of a task; the turns of many episodes are scored together."""

    episode = _OneTurn

    def __init__(self, task: Task):
        super().__init__(task.name, task, 1, task.reward_range)
        self.verifiable, self._task = task.verifiable, task

    def judged(self, episodes: Sequence[_OneTurn], texts: Sequence[str]) -> list[Step]:
        """The rewards of all texts, scored together."""
        rewards = rewards_of(self._task, self.name, [each.problem for each in episodes], texts)
        return [Step(NOTHING, each.value, True, each.correct, each.parts) for each in rewards]


# ---- rewards as a configuration shapes them --------------------------------------------------------------------------


class Shaped:
    """Environments whose turns pay shaped rewards: r becomes r * scale + bias, cut off at ± clip."""

    verifiable = False

    def __init__(self, inner: Environments, options: EnvironmentOptions):
        self.name, self.most_turns = inner.name, inner.most_turns
        self._inner = inner
        self._scale, self._bias = options.reward_scale, options.reward_bias
        self._clip = math.inf if options.reward_clip is None else options.reward_clip
        # Of an episode of one turn or more, each turn shaped by itself.
        low, high = sorted(each * self._scale for each in inner.reward_range)
        biases, most = (self._bias, self._bias * inner.most_turns), self._clip * inner.most_turns
        self.reward_range = max(-most, low + min(biases)), min(most, high + max(biases))

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """Those of the environments inside."""
        return self._inner.problems(split, count, seed)

    def make(self) -> Environment:
        """One whose own ``step`` pays shaped rewards too."""
        return _ShapedEnvironment(self._inner.make(), self.shaped)

    def step_all(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[Step]:
        """The steps of the environments inside, shaped."""
        inner = [each.inner for each in environments if isinstance(each, _ShapedEnvironment)]
        return [self.shaped(each) for each in self._inner.step_all(inner, texts)]

    def close(self) -> None:
        """Ends what was started inside."""
        self._inner.close()

    def shaped(self, step: Step) -> Step:
        """With the reward as it is paid, also where the episode is cut; one that is not finite stays, to be refused."""
        if not math.isfinite(step.reward + step.if_cut):
            return step
        paid = self._paid(step.reward)
        return replace(step, reward=paid, if_cut=self._paid(step.reward + step.if_cut) - paid if step.if_cut else 0.0)

    def _paid(self, reward: float) -> float:
        return max(-self._clip, min(self._clip, reward * self._scale + self._bias))


class _ShapedEnvironment:
    def __init__(self, inner: Environment, shaped: Callable[[Step], Step]):
        self.inner, self._shaped = inner, shaped
        self.reset = inner.reset

    def step(self, text: str) -> Step:
        """The step of the environment inside, shaped."""
        return self._shaped(self.inner.step(text))


# ---- where problems are from -----------------------------------------------------------------------------------------


class ListedProblems:
    """Problems that are known: all of one split, or divided (the last tenth is the test, the last tenth of the others
    held out)."""

    def __init__(self, name: str, problems: Sequence[Problem], only: Split | None):
        self._name = name
        if only is not None:
            self._parts = {split: problems if split is only else [] for split in Split}
            return
        others, test = without_last_tenth(problems)
        train, heldout = without_last_tenth(others)
        self._parts = {Split.TRAIN: train, Split.HELDOUT: heldout, Split.TEST: test}

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """The first problems of a split. Raises UsageError where there are not so many, or none at all."""
        if not self._parts[split]:
            raise UsageError(f"environment {self._name} has no {split} problems")
        return first_problems(self._parts[split], count, seed, f"environment {self._name}, {split}")

    def close(self) -> None:
        """Nothing was started."""


class ChangedPrompts:
    """A task's problems, with the prompts of an environment."""

    def __init__(self, task: ProblemSource, change: Callable[[Problem], Problem]):
        self._task, self._change = task, change

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """The task's. Raises what it raises."""
        return [self._change(each) for each in self._task.problems(split, count, seed)]

    def close(self) -> None:
        """Ends what the task has started."""
        self._task.close()


def source_of(
    options: EnvironmentOptions,
    parse: Callable[[Mapping[str, Any]], ParsedRow],
    made: Callable[[Checked], Problem],
    name: str,
    *,
    of_task: Callable[[Problem], Problem] | None = None,
) -> ProblemSource:
    """The problems that the options say: ``parse`` and ``made`` read rows of a file or of the configuration, as
    ``data.dataset.gather`` does; a task's problems are its own, changed by
    ``of_task`` where the environment says more than they do. Raises UsageError, and what reading raises."""
    if options.problems is not None:
        rows = [DataRow(f"problem {number}", each) for number, each in enumerate(options.problems, start=1)]
        return ListedProblems(name, gather(rows, parse, made, f"environment {name}"), options.only)
    if options.dataset is None:
        raise UsageError(f"environment {name} has no problems: set dataset=TASK or FILE, or problems")
    if options.dataset.lower().endswith(SUFFIXES):
        path = str(user_path(options.dataset))
        rows_of_file = read_rows(Part(path, "train"), None, frozenset())
        return ListedProblems(name, gather(rows_of_file, parse, made, f"environment {name} ({path})"), options.only)
    task = make_task(options.dataset, replace(options.task, settings={}))
    return task if of_task is None else ChangedPrompts(task, of_task)
