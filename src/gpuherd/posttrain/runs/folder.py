"""The folders of runs: of rounds, ``outputs/<experiment>/<stamp>``, and of ``gpuherd train``. Every path in them;
``run.json``; which folder a run of rounds resumes; and ``policy.json``, by which a round passes its policy to the next.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from gpuherd.errors import CannotWrite, ExitCode, GpuherdError, UsageError
from gpuherd.jobs.run_dir import RunDirectory, safe_name
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.config.yaml_strict import read_yaml
from gpuherd.posttrain.runs.plan import Combination, Step, plan_steps
from gpuherd.posttrain.runs.settings import Settings, may_change, settings_of
from gpuherd.posttrain.types import Policy
from gpuherd.runs.files import create_file, write_file
from gpuherd.runs.records import jsonable

FORMAT = 1  # of what lies in the folder; in run.json as "format"


class OutputDirectory(RunDirectory):
    """An output folder of ``gpuherd posttrain`` or ``gpuherd train``.

    Attributes:
        kind: which of both, in run.json as "kind".
        run_log: what happened, over all starts, for people and grep.
        results, trainings: where results of evaluations, and curves of trainings, lie in folders of their own.
        done: written when all is there; holds the summary.
    """

    kind: ClassVar[str]

    def __init__(self, root: str | Path):
        super().__init__(root)
        self.run_log = self.root / "run.log"
        self.results = self.trainings = self.root
        self.done = self.root / "done.json"

    def write_record(self, values: Mapping[str, Any], *, keep: bool = False) -> None:
        """Writes run.json; with ``keep`` only where there is none yet. Raises CannotWrite."""
        text = json.dumps({"format": FORMAT, "kind": self.kind, **values}, indent=1).encode() + b"\n"
        (create_file if keep else write_file)(self.run_json, text)

    def record(self) -> dict[str, Any]:
        """What run.json holds. Raises BadRun where it is not of this kind."""
        try:
            values = json.loads(self.run_json.read_bytes())
        except OSError as problem:
            raise BadRun(f"{self.root} is no run of gpuherd {self.kind}: run.json: {problem.strerror}") from None
        except (ValueError, RecursionError):
            raise BadRun(f"{self.run_json} is damaged") from None
        if not isinstance(values, dict) or values.get("kind") != self.kind or not isinstance(values.get("format"), int):
            raise BadRun(f"{self.root} is no run of gpuherd {self.kind}")
        if values["format"] > FORMAT:
            raise BadRun(f"{self.run_json} is of a newer gpuherd (format {values['format']}); update gpuherd")
        return values

    def shown_settings(self, record: Mapping[str, Any]) -> Any:
        """What was asked for, for people, as JSON values. ``record``: what run.json holds, as far as it can be read."""
        return record.get("settings", {})


class RoundsDirectory(OutputDirectory):
    """Paths of a run of rounds.

    Attributes:
        datasets: what was collected: ``<algorithm>/<data set>_<family>_r<round>/<shard>.jsonl``, and ``<shard>.json``
            last, when the shard is done.
        models: what was trained: ``<algorithm>/<data set>_<family>_r<round>/``: ``model``, ``checkpoints``, and
            ``policy.json`` last.
        results: ``<algorithm>/<family>/<data set>/r<round>/result.json``.
        usage: what each job has taken of its GPU.
    """

    kind = "posttrain"

    def __init__(self, root: str | Path):
        super().__init__(root)
        self.datasets = self.root / "datasets"
        self.models = self.trainings = self.root / "models"
        self.results = self.root / "results"
        self.usage = self.root / "usage"

    def data(self, algorithm: str, dataset: str, family: str, round_number: int) -> Path:
        """The folder of a round's rows."""
        return self.datasets / safe_name(algorithm) / f"{_combination(dataset, family)}_r{round_number}"

    def rows(self, data: Path, shard: int) -> Path:
        """The rows of a shard, as they come."""
        return data / f"{shard:05d}.jsonl"

    def rows_done(self, data: Path, shard: int) -> Path:
        """What is there when a shard is done: how many rows it has, and what it took."""
        return data / f"{shard:05d}.json"

    def model(self, algorithm: str, dataset: str, family: str, round_number: int) -> Path:
        """The folder of a training."""
        return self.models / safe_name(algorithm) / f"{_combination(dataset, family)}_r{round_number}"

    def policy(self, model: Path) -> Path:
        """What a training hands on; there when it is done."""
        return model / "policy.json"

    def result(self, algorithm: str, family: str, dataset: str, round_number: int | None, evaluated_on: str) -> Path:
        """The folder of an evaluation; its ``result.json`` comes last."""
        folder = self.results / safe_name(algorithm) / safe_name(family) / safe_name(dataset)
        if round_number is not None:
            folder /= f"r{round_number}"
        return folder if evaluated_on == dataset else folder / f"on_{safe_name(evaluated_on)}"

    def usage_of(self, job: str) -> Path:
        """What a job has taken of its GPU."""
        return self.usage / f"{safe_name(job)}.json"


def _combination(dataset: str, family: str) -> str:
    return f"{safe_name(dataset)}_{safe_name(family)}"


class TrainDirectory(OutputDirectory):
    """Paths of one training of ``gpuherd train``.

    Attributes:
        model: the trained model, as transformers saves it, or an adapter.
        checkpoints: of the training, removed when the model is there.
        config: the configuration as it was resolved.
        rows: what was collected before the training began (``runs.rows``).
        stop: is there when the training is asked to stop.
        train_lock: held by the training at work.
    """

    kind = "train"

    def __init__(self, root: str | Path):
        super().__init__(root)
        self.model = self.root / "model"
        self.checkpoints = self.root / "checkpoints"
        self.config = self.root / "config.yaml"
        self.rows = self.root / "rows.jsonl"
        self.stop = self.root / "stop"
        self.train_lock = self.root / "train.lock"

    def create_root(self) -> None:
        """Makes the folder, without those of a queue. Raises CannotWrite."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise CannotWrite(f"can't make {self.root}: {problem.strerror}; choose another folder") from None

    def summary(self) -> Mapping[str, Any] | None:
        """What done.json holds; None where the training has not ended. Raises UsageError for one that is none."""
        try:
            told = json.loads(self.done.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as problem:
            raise UsageError(f"{self.done} can't be read: {problem}; remove it to train again") from None
        if not isinstance(told, dict):
            raise UsageError(f"{self.done} is no summary; remove it to train again")
        return told

    def shown_settings(self, record: Mapping[str, Any]) -> Any:  # noqa: ARG002 - a training's are its configuration
        """See ``OutputDirectory``."""
        try:
            return read_yaml(self.config)
        except (UsageError, OSError):
            return {}


class BadRun(GpuherdError):
    """A folder is no run of the command, or its run.json is damaged or of a newer gpuherd."""

    exit_code = ExitCode.BAD_INPUT


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What run.json holds.

    Attributes:
        settings: the experiment's, paths absolute.
        combinations: how it is divided among the GPUs of its last start.
        identity: what its results depend on.
        cwd: where it was begun; jobs run there.
        made: command, time, host, versions.
        divided: the number of shards of what was begun by an earlier start in another number, by ``Step.undivided``.
    """

    settings: Settings
    combinations: tuple[Combination, ...]
    identity: str
    cwd: str
    made: Mapping[str, Any]
    divided: Mapping[str, int] = field(default_factory=dict)

    def steps(self) -> tuple[Step, ...]:
        """All its steps."""
        told = self.settings
        return plan_steps(
            self.combinations,
            told.rounds_of_training,
            asynchronous=told.async_rounds,
            references=told.evaluation.base,
            divided=self.divided,
        )

    def divided_anew(self, combinations: Sequence[Combination], begun: Collection[str]) -> RunRecord:
        """The record with the shards of these combinations; what has begun (``Step.undivided``) keeps its own."""
        found = {each.key: each for each in combinations}
        anew = tuple(each.divided_as(found.get(each.key, each)) for each in self.combinations)
        wanted = {step.undivided: step.shards for step in replace(self, combinations=anew, divided={}).steps()}
        kept = {step.undivided: step.shards for step in self.steps() if step.undivided in begun}
        divided = {name: shards for name, shards in kept.items() if shards != wanted[name]}
        return replace(self, combinations=anew, divided=divided)


def begin(folder: RoundsDirectory, record: RunRecord, *, anew: bool = False) -> RunRecord:
    """Writes run.json where there is none yet, or in its place (``anew``). Returns what is there then.

    Raises CannotWrite, BadRun.
    """
    values = {
        "experiment": record.settings.experiment.name,
        "identity": record.identity,
        "cwd": record.cwd,
        **record.made,
        "settings": jsonable(record.settings),
        "combinations": jsonable(record.combinations),
        "divided": dict(record.divided),
    }
    if anew:  # its jobs in the queue are known by the identity that it began with, which stays
        values["goes_on_as"] = record.settings.identity()
    folder.write_record(values, keep=not anew)
    return read_record(folder)


def read_record(folder: RoundsDirectory) -> RunRecord:
    """What run.json holds. Raises BadRun."""
    values = folder.record()
    try:
        known = {"format", "kind", "experiment", "identity", "cwd", "settings", "combinations", "divided", "goes_on_as"}
        return RunRecord(
            read(Settings, values["settings"]),
            _combinations(values["combinations"]),
            str(values["identity"]),
            str(values["cwd"]),
            {name: value for name, value in values.items() if name not in known},
            {str(name): int(shards) for name, shards in values.get("divided", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, GpuherdError) as problem:
        raise BadRun(f"{folder.run_json} is damaged or of another gpuherd: {problem}") from None


def _combinations(values: Sequence[Any]) -> tuple[Combination, ...]:
    return tuple(read(Combination, each) for each in values)


_STAMP = "%Y-%m-%d_%H-%M-%S"


def unfinished(settings: Settings) -> RoundsDirectory | None:
    """The newest run of this experiment, by its name and all that its results depend on, that is not done."""
    folder = Path(settings.output_dir) / settings.experiment.name
    for path in sorted(folder.glob("*/run.json"), reverse=True):
        found = RoundsDirectory(path.parent)
        if found.done.exists():
            continue
        with suppress(BadRun, KeyError, TypeError, AttributeError):
            recorded = found.record()
            known = (recorded["identity"], recorded.get("goes_on_as"))
            if settings.identity() in known or settings.earlier_identity(recorded["settings"]) == known[0]:
                return found
    return None


def new_folder(settings: Settings, now: datetime) -> RoundsDirectory:
    """A folder that was not there: ``<output_dir>/<experiment>/<stamp>``. Raises CannotWrite."""
    parent = Path(settings.output_dir) / settings.experiment.name
    for number in range(1000):
        path = parent / f"{now:{_STAMP}}{f'_{number}' if number else ''}"
        try:
            path.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            continue
        except OSError as problem:
            raise CannotWrite(f"can't make {path}: {problem.strerror}; set another output_dir") from None
        return RoundsDirectory(path)
    raise CannotWrite(f"{parent} has 1000 runs of this second")


def future_folder(settings: Settings, now: datetime) -> RoundsDirectory:
    """What ``new_folder`` would make now; makes nothing."""
    return RoundsDirectory(Path(settings.output_dir) / settings.experiment.name / f"{now:{_STAMP}}")


def resumed(folder: RoundsDirectory, said: Mapping[str, Any]) -> RunRecord:
    """A run that goes on, with what is said anew for it.

    Args:
        said: values by their full keys.

    Raises UsageError: one that its results depend on is to be another, or makes no sense. BadRun.
    """
    record = read_record(folder)
    values = jsonable(record.settings)
    for key, value in said.items():
        if key == "resume_from":
            continue
        place, _, last = key.rpartition(".")
        inner = _at(values, place, key)
        if not may_change(key) and inner.get(last) != jsonable(value):
            raise UsageError(
                f"{folder.root} was begun with {key}={json.dumps(inner.get(last))}; with another it is another run: "
                "leave it out, or begin one without --resume"
            )
        inner[last] = value
    return replace(record, settings=settings_of(values) if said.keys() - {"resume_from"} else record.settings)


def _at(values: dict[str, Any], place: str, key: str) -> dict[str, Any]:
    inner: Any = values
    for part in filter(None, place.split(".")):
        inner = inner.get(part) if isinstance(inner, dict) else None
    if not isinstance(inner, dict):
        raise UsageError(f"{key}: the run that goes on has no such key; leave it out")
    return inner


class BadPolicy(GpuherdError):
    """A policy.json is damaged or of a newer gpuherd."""

    exit_code = ExitCode.BAD_INPUT


def write_policy(path: Path, policy: Policy, root: Path) -> None:
    """Writes the policy, whole or not at all. Raises CannotWrite."""
    text = json.dumps({"format": 1, "policy": policy.to_dict(root)}, indent=1)
    write_file(path, text.encode() + b"\n")


def read_policy(path: Path, root: Path) -> Policy:
    """The policy that was written. Raises BadPolicy."""
    try:
        found = json.loads(path.read_bytes())
        if found["format"] > 1:
            raise BadPolicy(f"{path} is of a newer gpuherd (format {found['format']}); update gpuherd")
        return Policy.from_dict(found["policy"], root)
    except OSError as problem:
        raise BadPolicy(f"{path} can't be read: {problem.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise BadPolicy(f"{path} is damaged ({type(problem).__name__}); remove it to train this round again") from None
