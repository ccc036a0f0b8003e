"""Which way the divergence of an evaluation's completions is had, and its file: a line a problem, resumed like answers.

A guided decode has recorded it; the reference itself has none; all others are read again by teacher forcing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.engines.progress import report
from gpuherd.errors import UsageError
from gpuherd.posttrain.eval.answered import AnsweredProblem, BadAnswers, Completion
from gpuherd.posttrain.eval.options import Divergence
from gpuherd.posttrain.eval.result import Estimator
from gpuherd.runs import records
from gpuherd.runs.shard_file import ShardFile, unsealed
from gpuherd.runs.shards import in_batches

if TYPE_CHECKING:
    from gpuherd.posttrain.rollout.sampler import Sampler

Table = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A divergence a completion, (problems, samples), None where it was not measured, and how; or None both."""

    kl: Table | None
    estimator: Estimator | None


def measured_kl(
    answered: Sequence[AnsweredProblem],
    *,
    guided: bool,
    is_reference: bool,
    how: Divergence,
    most: int | None,
    temperature: float,
    at_once: int,
    path: Path,
    policy: Callable[[], Sampler],
    release: Callable[[], None],
    reference: Callable[[], Sampler],
) -> Measured:
    """The divergences of all completions.

    Args:
        guided: the decode recorded them.
        is_reference: the policy is the reference: they are 0.
        how: EXACT, K1 or K3, where they must be measured.
        most: of how many completions a problem; None: of all.
        temperature: of the draws; the estimators are of the laws at it.
        at_once: completions that are read together, at most, a problem's all.
        path: their file.
        policy, reference: load the models, when they are needed.
        release: lets the policy go.
    """
    if guided:
        return Measured(tuple(tuple(each.kl for each in row.completions) for row in answered), Estimator.EXACT)
    if is_reference:
        return Measured(tuple((0.0,) * len(row.completions) for row in answered), Estimator.EXACT)
    estimator = {Divergence.EXACT: Estimator.EXACT, Divergence.K1: Estimator.K1, Divergence.K3: Estimator.K3}[how]
    taken = [row.completions[:most] for row in answered]
    shard = in_batches(len(taken), max(1, at_once // len(taken[0])))
    with ShardFile(path, shard, sealed=True) as file:
        if file.todo:
            measure = _measure(estimator, temperature, policy, release, reference)
            for batch in file.todo:
                report(batch[0], len(taken), "divergence from the reference")
                rows = _rows(answered, taken, batch, measure)
                file.append([json.dumps({"kl": row}, allow_nan=False) for row in rows])
    read = _read(path, [len(row) for row in taken])
    return Measured(
        tuple((*row, *[None] * (len(each.completions) - len(row))) for row, each in zip(read, answered, strict=True)),
        estimator,
    )


@dataclass(frozen=True, slots=True)
class _Line:
    kl: tuple[float | None, ...]


def _read(path: Path, counts: Sequence[int]) -> list[tuple[float | None, ...]]:
    """The file's rows, each of so many figures. Raises BadAnswers."""
    found = []
    try:
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if (content := unsealed(line)) is None:
                raise ValueError(f"line {number} is incomplete or has changed")
            row: _Line = records.read(_Line, json.loads(content))
            found.append(row.kl)
    except (TypeError, ValueError, KeyError, RecursionError) as problem:
        raise BadAnswers(f"{path} is damaged ({problem}); move it away") from None
    if [len(row) for row in found] != list(counts):
        raise BadAnswers(f"{path} is not of these completions; move it away")
    return found


Measure = Callable[[Sequence[Sequence[int]], Sequence[Completion]], Sequence[float | None]]


def _measure(
    estimator: Estimator,
    temperature: float,
    policy: Callable[[], Sampler],
    release: Callable[[], None],
    reference: Callable[[], Sampler],
) -> Measure:
    """Prompts and completions -> their divergences."""
    from gpuherd.lm.guidance.guide import tokens_digest
    from gpuherd.posttrain.eval.divergence import estimated, exact, forced_log_probs

    if estimator is Estimator.EXACT:
        mine, theirs = policy(), reference()
        if tokens_digest(mine.tokenizer.get_vocab()) != tokens_digest(theirs.tokenizer.get_vocab()):
            raise UsageError(
                "evaluation: policy and reference have other tokenizers, so that their laws can't be compared; "
                "name the model that the policy was made from as reference"
            )
        modules = mine.model.module, theirs.model.module
        return lambda prompts, completions: exact(*modules, prompts, [each.ids for each in completions])
    release()
    only = reference().model.module

    def by_estimator(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> list[float | None]:
        told = forced_log_probs(only, prompts, [each.ids for each in completions], temperature)
        pairs = zip(completions, told, strict=True)
        return [estimated(each.log_probs, log_probs, estimator) for each, log_probs in pairs]

    return by_estimator


def _rows(
    answered: Sequence[AnsweredProblem],
    taken: Sequence[Sequence[Completion]],
    batch: Sequence[int],
    measure: Measure,
) -> list[list[float | None]]:
    """A list of divergences for each problem of the batch."""
    prompts = [answered[item].prompt_ids for item in batch for _ in taken[item]]
    values = iter(measure(prompts, [each for item in batch for each in taken[item]]))
    return [[next(values) for _ in taken[item]] for item in batch]
