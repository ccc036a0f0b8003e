"""How the problems of an evaluation are divided among jobs. Pure; light.

Which completions a model reads together can change the last bits of a log-prob. So batches are fixed by the whole
evaluation, in the order of its problems, and whole batches are dealt to the shards in turn: any number of shards gives
the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuherd.posttrain.eval.results import EvaluationOptions
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import dealt, number_of_shards

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
