"""What is requested of an evaluation, how its problems are divided among jobs, what it finds (figures with their
intervals), and ``result.json``. No numpy.

Made by ``evaluation``, gathered by ``tables``, shown by ``summary`` and the page. A figure that can't be computed is
None and says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from gpuherd.atomic import atomic_write
from gpuherd.errors import CannotWrite, ExitCode, GpuherdError, UsageError
from gpuherd.posttrain.types import Split
from gpuherd.qa.intervals import Figure
from gpuherd.runs import records
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import dealt, number_of_shards

T = TypeVar("T")

FORMAT = 1  # of the files of a result
RESULT = "result.json"
ASKED = "asked.json"  # what an evaluation is of; there as soon as it has begun
REFERENCE = "reference"  # the algorithm's name of a model as it was before any training
MOST_ROUNDS = 100_000

# ---- what is requested


class Tie(StrEnum):
    """What a majority vote earns where several answers have the most votes."""

    SHARE = "share"  # the share of them that is right: what a fair draw among them earns on average
    FIRST = "first"  # whether the one that was drawn first is right
    UNIQUE = "unique"  # nothing: the majority must be unique (PITA's public code)


class Divergence(StrEnum):
    """How the KL divergence from the reference is measured where decoding has not recorded it."""

    EXACT = "exact"  # over the vocabulary at each position that was visited; both models in memory at once
    K3 = "k3"  # of the log-probs of the sampled tokens, by the estimator k3
    K1 = "k1"  # the same by k1
    NONE = "none"


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What is drawn and measured.

    Attributes:
        split: of the task's problems.
        problems: so many of them; None: all.
        samples: completions a problem.
        greedy: one completion a problem of the most probable tokens; ``samples`` is 1 then.
        etas: at which a guided policy is evaluated in addition to its own.
        pass_at: the k of pass@k, each at most ``samples``; pass@1 is always there. Empty: ``samples``.
        majority_at: the k of maj@k; empty: ``samples``. Of fewer than 2 there is none.
        tie: what a tie of a majority vote earns.
        kl: how the divergence from the reference is measured; a guided decode records it exactly in any case.
        kl_samples: of how many completions a problem, the first ones; None: of all.
        resamples, confidence: of the bootstrap.
        problem_seed: the order of the problems, of which the first ``problems`` are taken.
    """

    split: Split = Split.TEST
    problems: int | None = None
    samples: int = 8
    greedy: bool = False
    etas: tuple[float, ...] = ()
    pass_at: tuple[int, ...] = ()
    majority_at: tuple[int, ...] = ()
    tie: Tie = Tie.SHARE
    kl: Divergence = Divergence.EXACT
    kl_samples: int | None = None
    resamples: int = 1000
    confidence: float = 0.95
    problem_seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1 or (self.greedy and self.samples != 1):
            raise UsageError(f"evaluation.samples={self.samples}; the least is 1, and greedy there is 1 only")
        for name, ks in (("pass_at", self.pass_at), ("majority_at", self.majority_at)):
            if any(not 1 <= k <= self.samples for k in ks) or len(set(ks)) < len(ks):
                raise UsageError(
                    f"evaluation.{name}={list(ks)}; each is there once, from 1 to the number of samples, {self.samples}"
                )
        if self.problems is not None and self.problems < 1:
            raise UsageError(f"evaluation.problems={self.problems}; the least is 1; leave it out for all")
        if self.kl_samples is not None and not 1 <= self.kl_samples <= self.samples:
            raise UsageError(f"evaluation.kl_samples={self.kl_samples}; it is from 1 to the samples, {self.samples}")
        if any(not eta > 0 for eta in self.etas) or len(set(self.etas)) < len(self.etas):
            raise UsageError(f"evaluation.etas={list(self.etas)}; each is above 0 and there once")
        if self.resamples < 100 or not 0.5 <= self.confidence < 1:
            raise UsageError("evaluation.resamples is 100 or more, evaluation.confidence at least 0.5 and below 1")


# ---- how the problems are divided among jobs
#
# Which completions a model reads together can change the last bits of a log-prob. So batches are fixed by the whole
# evaluation, in the order of its problems, and whole batches are dealt to the shards in turn: any number of shards
# gives the same lines.

SHARDS = "shards"  # the folder of an evaluation that has its shards


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the problems, by their places, and the folder of their lines.

    Attributes:
        answers: problems that are answered together.
        divergence: the same problems as their completions are read again together.
    """

    folder: Path
    answers: Shard
    divergence: Shard


def number_of_parts(
    problems: int, options: EvaluationOptions, batch_size: int, at_once: int, wanted: int | None = None
) -> int:
    """The number of shards that an evaluation of so many problems is divided into; each has whole batches.

    Args:
        batch_size: ``Sampling.batch_size``.
        at_once: how many can run at the same time.
        wanted: how many the user requests; None for the number that suits.

    >>> [number_of_parts(64, EvaluationOptions(samples=4), 16, 4, wanted) for wanted in (None, 2, 99)]
    [4, 2, 16]
    """
    return number_of_shards(problems, at_once, wanted, batch_size=_batch_sizes(options, batch_size)[1])


def shard_done(folder: Path, number: int) -> Path:
    """The file that is there when a shard of the evaluation in this folder is done."""
    return folder / SHARDS / f"{number:05d}.json"


def parts_of(folder: Path, problems: int, options: EvaluationOptions, batch_size: int, shards: int) -> list[Part]:
    """The shards of an evaluation.

    Args:
        folder: the evaluation's.
        problems: how many.
        batch_size: ``Sampling.batch_size``.
    """
    answered, read = _batch_sizes(options, batch_size)
    found = []
    for number, mine in enumerate(dealt(problems, read, shards)):
        pieces = (batch[at : at + answered] for batch in mine.batches for at in range(0, len(batch), answered))
        found.append(Part(folder / SHARDS / f"{number:05d}", Shard(tuple(pieces)), mine))
    return found


def _batch_sizes(options: EvaluationOptions, batch_size: int) -> tuple[int, int]:
    """How many problems are answered together, and how many are read again together: a multiple of the former, so that
    shards can have whole batches of both."""
    answered = max(1, batch_size // options.samples)
    read = max(1, batch_size // (options.kl_samples or options.samples))
    return answered, read - read % answered


# ---- what is found


class Estimator(StrEnum):
    """How a KL divergence was had."""

    EXACT = "exact"  # sum over the vocabulary at each visited position
    K1 = "k1"  # log p - log q of the sampled token
    K3 = "k3"  # q/p - 1 - log(q/p) of the sampled token


@dataclass(frozen=True, slots=True)
class About:
    """Of what an evaluation is.

    Attributes:
        algorithm: a name of ``algos.registry``, or REFERENCE.
        dataset: what was trained on (of the reference: evaluated on).
        evaluated_on: the task whose problems were asked.
        family: the model's short name.
        round: from 0; None for the reference.
        seed: of the training and of the draws: runs that differ in it alone are gathered into one row.
    """

    algorithm: str
    dataset: str
    evaluated_on: str
    family: str
    round: int | None
    seed: int = 0

    @property
    def data(self) -> str:
        """What the policy was trained and evaluated on, in words."""
        return self.dataset if self.dataset == self.evaluated_on else f"{self.dataset} on {self.evaluated_on}"

    @property
    def order(self) -> int:
        """The round, -1 of the reference."""
        return -1 if self.round is None else self.round


@dataclass(frozen=True, slots=True)
class AtK:
    """A figure of ``k`` completions a problem."""

    k: int
    figure: Figure


@dataclass(frozen=True, slots=True)
class TokenKL:
    """KL(policy || reference) along the completions that the policy drew, in nats.

    Attributes:
        estimator: how.
        sequence: summed over a completion's tokens, mean over completions.
        token: the mean over all their tokens.
        completions: at how many it was measured.
    """

    estimator: Estimator
    sequence: Figure
    token: Figure
    completions: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """The figures of one policy on one set of problems. Those of right and wrong are None where the task knows neither.

    Attributes:
        problems, samples: how many problems, and completions of each.
        reward: mean over completions.
        pass_at_1: share of right completions, all samples counted: the mean over samples.
        first: share of problems whose first sample is right.
        pass_at: P(at least one of k is right), the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1).
        majority: is the answer with the most votes right? Of k < samples the mean over disjoint groups of k.
        tie: what a tie of it earned.
        kl: None where it was not measured.
        tokens: mean length of a completion, its end token counted.
        finished: share of completions that the policy ended itself.
    """

    problems: int
    samples: int
    reward: Figure
    pass_at_1: Figure | None
    first: Figure | None
    pass_at: tuple[AtK, ...]
    majority: tuple[AtK, ...]
    tie: Tie
    kl: TokenKL | None
    tokens: Figure
    finished: Figure


@dataclass(frozen=True, slots=True)
class Cost:
    """What decoding took.

    Attributes:
        seconds: of wall clock, decoding and rewards; of all processes that ever worked on it.
        tokens: how many were decoded.
        gpus: how many GPUs; 0 on a CPU.
    """

    seconds: float
    tokens: int
    gpus: int

    @property
    def tokens_per_second(self) -> float | None:
        """None where it took no time."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def gpu_hours(self) -> float | None:
        """None on a CPU."""
        return self.seconds * self.gpus / 3600 if self.gpus else None


@dataclass(frozen=True, slots=True)
class Point:
    """A policy at one eta.

    Attributes:
        eta: None of a policy that is not guided, and of one whose eta is infinite (the reference's top k).
        own: whether it is the eta that the policy was made with, the one that summaries show: none is chosen by its
            result.
        answers, scores: names of files next to ``result.json``: the completions, and what each earned.
    """

    eta: float | None
    own: bool
    metrics: Metrics
    cost: Cost
    answers: str
    scores: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A policy, evaluated.

    Attributes:
        policy, reference: ``Policy.to_dict``.
        split: of the problems.
        sampling: the draws' settings by name.
        confidence: of all intervals.
        points: one for each eta, the largest eta first; of an unguided policy one.
        notes: what a reader must know first.
        versions: of the libraries that made it.
    """

    about: About
    policy: Mapping[str, Any]
    reference: Mapping[str, Any]
    split: str
    sampling: Mapping[str, Any]
    confidence: float
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def own(self) -> Point:
        """The point that summaries show."""
        return next((each for each in self.points if each.own), self.points[0])

    @property
    def drawn(self) -> str | None:
        """How completions were sampled, where not from the model's own distribution: temperature 1, uncut."""
        how = self.sampling
        if how.get("greedy"):
            return "of the most probable tokens"
        usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        words = {"temperature": "temperature", "top_p": "top-p", "top_k": "top-k"}
        other = [f"{words[key]} {how[key]:g}" for key, value in usual.items() if how.get(key, value) != value]
        return f"drawn at {', '.join(other)}" if other else None


# ---- files


class BadResult(GpuherdError):
    """A result's file is damaged, or of a newer gpuherd."""

    exit_code = ExitCode.BAD_INPUT


def write_result(folder: Path, evaluation: Evaluation) -> Path:
    """Writes ``folder/result.json`` as a whole. Returns its path. Raises CannotWrite."""
    return write_values(folder / RESULT, without_infinity(records.jsonable(evaluation)), indent=1)


def read_result(path: Path) -> Evaluation:
    """The result of a file, or of the folder that holds it. Raises BadResult."""
    path = path / RESULT if path.is_dir() else path
    evaluation = read_values(path, Evaluation)
    names = [name for each in evaluation.points for name in (each.answers, each.scores)]
    if not names or any(Path(name).name != name for name in names):
        raise BadResult(f"{path} has no point, or one whose files lie elsewhere")
    if evaluation.about.round is not None and not 0 <= evaluation.about.round <= MOST_ROUNDS:
        raise BadResult(f"{path} is of round {evaluation.about.round}, which can't be")
    return evaluation


def write_values(path: Path, values: Mapping[str, Any], indent: int | None) -> Path:
    """Writes JSON of this format as a whole. Returns the path. Raises CannotWrite."""
    values = {"format": FORMAT, **values}
    text = json.dumps(values, indent=indent, allow_nan=False, separators=None if indent else (",", ":"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, f"{text}\n".encode())
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}") from None
    return path


def read_values(path: Path, kind: type[T]) -> T:
    """A dataclass from the JSON that ``write_values`` wrote. Raises BadResult."""
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict) or not isinstance(values.get("format"), int):
            raise BadResult(f"{path} is no result of gpuherd posttrain")
        if values["format"] > FORMAT:
            raise BadResult(f"{path} is of a newer gpuherd (format {values['format']}, known here: {FORMAT})")
        found: T = records.read(kind, values)
        return found
    except OSError as problem:
        raise BadResult(f"can't read {path}: {problem.strerror}") from None
    except (TypeError, ValueError, KeyError, RecursionError) as problem:
        raise BadResult(f"{path} is not whole: {type(problem).__name__}: {problem}") from None


def without_infinity(value: Any) -> Any:
    """JSON has no infinity, and an eta may be infinite: it is written as a string."""
    if isinstance(value, dict):
        return {key: without_infinity(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_infinity(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
