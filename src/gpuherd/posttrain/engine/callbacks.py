"""A user's own code that is called while a model is trained: ``file.py:Class`` or ``package.module:Class``.

    class Watch:
        def on_step(self, event): ...        # behind each optimiser step (of algorithms that sample: each step)
        def on_evaluation(self, event): ...  # behind an evaluation during the training
        def on_checkpoint(self, event): ...  # behind a checkpoint
        def on_end(self, event): ...         # when the trained model is written

A class has at least one of these methods; an instance is made without arguments. It runs in the training's own process,
of several in the first one (rank 0), which waits for it. Nothing that it does changes what is learnt: what it raises is
logged, once for each method and kind of error, and the training goes on. A training that resumes from a checkpoint
makes a new instance, and reports the steps after the checkpoint again.

    python -P -m gpuherd.posttrain.engine.callbacks NAME ...

imports the classes and says what is wrong with them; ``check_callbacks`` runs it, so that nothing is imported into a
process that only plans.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError
from gpuherd.gpus.visible import environment, without
from gpuherd.posttrain.rewards.function import FunctionName
from gpuherd.posttrain.rewards.function_process import described, import_place, print_traceback
from gpuherd.runs.console import warn_once

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.dist_env import DistEnv

logger = logging.getLogger(__name__)

_STARTING_S = 300.0  # for importing all modules


class EventKind(StrEnum):
    """What has happened."""

    STEP = "step"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    END = "end"

    @property
    def method(self) -> str:
        """The name of the method that is called."""
        return f"on_{self}"


@dataclass(frozen=True, slots=True)
class TrainEvent:
    """What a callback is given.

    Attributes:
        kind: what has happened.
        step: steps done; ``total_steps``: of the whole training.
        metrics: figures of the step (those of ``curves.jsonl``) or of the evaluation, by name; else empty.
        folder: of the training.
        path: the checkpoint that was written, at the end the trained model; else None.
    """

    kind: EventKind
    step: int
    total_steps: int
    folder: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    path: Path | None = None


class Callbacks:
    """The callbacks of one training; in all processes but the first there are none.

    Args:
        names: of the classes.
        folder: of the training.

    Raises UsageError for a class that can't be imported or made.
    """

    def __init__(self, names: Sequence[str], world: DistEnv, folder: Path, total_steps: int):
        self._folder, self._total_steps = folder, total_steps
        self._instances: list[tuple[str, Any]] = []
        modules: dict[str, Any] = {}
        for name in names if world.is_main else ():
            try:
                self._instances.append((name, class_of(name, modules)()))
            except UsageError:
                raise
            except (Exception, SystemExit) as problem:
                raise UsageError(f"callbacks: {name} can't be made: {described(problem, __file__)}") from problem

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """A step is done, with these figures."""
        self._call(EventKind.STEP, step, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """The policy of this step was evaluated."""
        self._call(EventKind.EVALUATION, step, metrics)

    def checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint was written."""
        self._call(EventKind.CHECKPOINT, step, path=path)

    def end(self, model: Path) -> None:
        """The trained model was written."""
        self._call(EventKind.END, self._total_steps, path=model)

    def _call(
        self, kind: EventKind, step: int, metrics: Mapping[str, float | None] | None = None, path: Path | None = None
    ) -> None:
        for name, instance in self._instances:
            method = getattr(instance, kind.method, None)
            if method is None:
                continue
            numbers = {key: value for key, value in (metrics or {}).items() if value is not None}
            event = TrainEvent(kind, step, self._total_steps, self._folder, numbers, path)
            try:
                method(event)
            except (Exception, SystemExit) as problem:
                warn_once(
                    logger,
                    f"callback {name} {kind}",
                    problem,
                    "callback %s, %s at step %d: it raised %s; the training goes on, and further errors of this kind "
                    "are not logged",
                    *(name, kind.method, step, described(problem, __file__)),
                )


def class_of(name: str, modules: dict[str, Any]) -> type[Any]:
    """The class of a callback; its module is imported into ``modules``, once. Raises UsageError: it can't be, or has no
    such class with one of the methods."""
    place = FunctionName.of(name, "callbacks", "class")
    try:
        if place.place not in modules:
            modules[place.place] = import_place(str(place.absolute.place), first=False)
    except (Exception, SystemExit) as problem:
        raise UsageError(f"callbacks: {place.place} can't be imported: {described(problem, __file__)}") from problem
    module = modules[place.place]
    found = getattr(module, place.function, None)
    if not isinstance(found, type):
        there = [each for each, value in vars(module).items() if isinstance(value, type) and _is_callback(value)]
        known = f"; it has {', '.join(there)}" if there else ""
        raise UsageError(f"callbacks: {place.place} has no class {place.function}{known}")
    if not _is_callback(found):
        methods = ", ".join(kind.method for kind in EventKind)
        raise UsageError(f"callbacks: {name} has none of the methods {methods}")
    return found


def _is_callback(found: type[Any]) -> bool:
    return any(callable(getattr(found, kind.method, None)) for kind in EventKind)


def check_callbacks(names: Sequence[str]) -> None:
    """Sees whether the classes can be imported, in a process of their own without GPUs. Raises UsageError."""
    for name in names:
        FunctionName.of(name, "callbacks", "class")
    if not names:
        return
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, *names],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_STARTING_S,
            check=False,
            env={**without(os.environ), **environment(())},
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"callbacks: importing {', '.join(names)} took longer than {_STARTING_S:g} s") from None
    sys.stderr.write(done.stderr)
    if done.returncode != 0 or not done.stdout:
        raise UsageError(f"callbacks: importing {', '.join(names)} ended its process (exit code {done.returncode})")
    problem = json.loads(done.stdout)["problem"]
    if problem is not None:
        raise UsageError(problem)


def _main(names: Sequence[str]) -> None:
    """Prints the problem with the first of these that has one, as JSON; what they print goes to standard error."""
    reply = os.dup(1)
    os.dup2(2, 1)
    problem = None
    modules: dict[str, Any] = {}
    try:
        for name in names:
            class_of(name, modules)
    except UsageError as refused:
        problem = str(refused)
        if refused.__cause__ is not None:
            print_traceback(refused.__cause__, __file__)
    os.write(reply, json.dumps({"problem": problem}).encode())


if __name__ == "__main__":
    _main(sys.argv[1:])
