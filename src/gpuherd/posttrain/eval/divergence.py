"""How far a policy is from its reference along completions that it drew: KL(policy || reference).

A guided decode records it while it draws, and the reference itself has none. All other completions are read again, by
teacher forcing, and the figures kept in a file, a line a problem, resumed like answers.

Exactly: both models read the completion, and at each of its positions the divergence of their laws of the next token is
summed over the vocabulary, at temperature 1. The mean over completions of the sum over positions is, by the chain rule,
an unbiased estimate of the divergence of the laws of whole completions, where the completions were drawn at temperature
1 without top-p and top-k; of other draws it is the divergence along the paths that were taken.

By estimators, where only the reference is to be in memory: with p the probability of the sampled token under the law
that sampled and q under the reference's at the same temperature (Schulman 2020, "Approximating KL divergence"),
k1 = log p - log q, and k3 = q/p - 1 - log(q/p), which is never negative and mostly varies less. Both have the KL
divergence as their mean at each position.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpuherd.engines.progress import report
from gpuherd.errors import UsageError
from gpuherd.lm.forward import BatchReading, CausalModel, causal_model, halving, padded, pieces
from gpuherd.posttrain.eval.answers import AnsweredProblem, BadAnswers, Completion, read_lines
from gpuherd.posttrain.eval.results import Divergence, Estimator
from gpuherd.runs.shard_file import Shard, ShardFile

if TYPE_CHECKING:
    import torch

    from gpuherd.posttrain.rollout.sampler import Sampler

# ---- of completions, with the models in memory

Found = TypeVar("Found")

_MOST_NUMBERS = 1 << 25  # logits of a model at a time: 128 MB in float32


def estimated(
    log_probs: Sequence[float | None], reference: Sequence[float | None], estimator: Estimator
) -> float | None:
    """The estimate of one completion's divergence, in nats: the sum over its tokens by K1 or K3. None where a log-prob
    or the sum is not finite.

    Args:
        log_probs: of its tokens under the law that sampled them.
        reference: of the same under the reference, at the same temperature.

    >>> estimated([-1.0, -2.0], [-1.5, -2.0], Estimator.K1)
    0.5
    """
    total = 0.0
    for p, q in zip(log_probs, reference, strict=True):
        if p is None or q is None:
            return None
        try:
            total += p - q if estimator is Estimator.K1 else math.expm1(q - p) - (q - p)
        except OverflowError:
            return None
    return total


def exact(
    policy: Any, reference: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[float | None]:
    """KL(policy || reference) summed over the positions of each answer, at temperature 1, in nats; 0 of an empty one.
    None where it is not finite: the reference gives a token no chance that the policy may take, or a model is broken.

    A batch is halved where memory runs out. Raises UsageError where the two have other vocabularies.

    Args:
        policy, reference: transformers' modules, in evaluation mode; each where it lies.
    """
    models = causal_model(policy), causal_model(reference)
    widths = [_vocabulary(each) for each in models]
    if widths[0] != widths[1]:
        raise UsageError(
            f"the policy has {widths[0]} tokens and the reference {widths[1]}; "
            "a divergence is of two laws over one vocabulary: name the model that the policy was made from"
        )

    def summed(some: Sequence[int]) -> list[float | None]:
        import torch

        totals = torch.zeros(len(some), dtype=torch.float64)
        for logits, _, counts in _walk(models, [prompts[at] for at in some], [answers[at] for at in some]):
            mine, theirs = (torch.log_softmax(each.float(), dim=-1) for each in logits)
            # A token that the policy never takes adds nothing, whatever the reference thinks of it.
            parts = torch.where(mine == -math.inf, 0.0, mine.exp() * (mine - theirs.to(mine.device)))
            totals += (parts.sum(-1) * counts.to(mine.device)).sum(-1).double().cpu()
        return [each if math.isfinite(each) else None for each in totals.tolist()]

    return _halving(len(answers), summed, models)


def forced_log_probs(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], temperature: float
) -> list[tuple[float | None, ...]]:
    """The natural log of each answer token's probability under a model at a temperature; None where not finite."""
    models = (causal_model(model),)

    def forced(some: Sequence[int]) -> list[tuple[float | None, ...]]:
        import torch

        rows: list[list[float]] = [[] for _ in some]
        for (logits,), targets, counts in _walk(models, [prompts[at] for at in some], [answers[at] for at in some]):
            log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
            values = log_probs.gather(2, targets.to(log_probs.device)[..., None])[..., 0].tolist()
            for row, more, used in zip(rows, values, counts.tolist(), strict=True):
                row += [value for value, each in zip(more, used, strict=True) if each]
        return [tuple(value if math.isfinite(value) else None for value in row) for row in rows]

    return _halving(len(answers), forced, models)


def _walk(
    models: Sequence[CausalModel], prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]]:
    """The answers position by position, a stretch at a time: each model's logits there, (rows, places, vocabulary), the
    tokens that follow, and 1 where one is of an answer, else 0; both (rows, places).

    Whole texts are padded at the left, so that the answers' ends lie below each other. A model whose state padding
    would pass through is asked one row at a time (``_halving``).
    """
    import torch

    together = all(each.takes_padding for each in models)
    longest = max(map(len, answers))
    if longest == 0:
        return
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    read_by = [padded(each, whole) for each in models]
    readings = [BatchReading(each, len(whole), keeping=each.takes_padding) for each in models]
    ids, wide = read_by[0][0].cpu(), len(max(whole, key=len))
    at_once = max(1, _MOST_NUMBERS // (len(whole) * _vocabulary(models[0]))) if together else longest
    begins = wide - torch.tensor([len(each) for each in answers])  # of each answer
    start, done = wide - longest, 0
    while start < wide:
        end = min(wide, start + at_once)
        logits = [
            reading.read(own[:, done : end - 1], mask[:, done : end - 1], keep=end - start)
            for reading, (own, mask) in zip(readings, read_by, strict=True)
        ]
        yield logits, ids[:, start:end], (torch.arange(start, end)[None] >= begins[:, None]).long()
        start, done = end, end - 1


def _halving(
    count: int, work: Callable[[Sequence[int]], Sequence[Found]], models: Sequence[CausalModel]
) -> list[Found]:
    """What ``work`` says of places 0 to ``count`` - 1, as many together as memory lasts for; one at a time where a
    model takes no padding."""
    import torch

    with torch.inference_mode():
        found = halving(pieces(count, None if all(each.takes_padding for each in models) else 1), work)
    return [found[place] for place in range(count)]


def _vocabulary(model: CausalModel) -> int:
    return int(model.module.config.get_text_config(decoder=True).vocab_size)


# ---- of an evaluation

Table = tuple[tuple[float | None, ...], ...]
_ESTIMATORS = {Divergence.EXACT: Estimator.EXACT, Divergence.K1: Estimator.K1, Divergence.K3: Estimator.K3}


@dataclass(frozen=True, slots=True)
class Measured:
    """A divergence a completion, (problems, samples), None where it was not measured, and how; or None both."""

    kl: Table | None
    estimator: Estimator | None


def measure_kl(
    path: Path,
    shard: Shard,
    answered: Callable[[], Mapping[int, AnsweredProblem]],
    *,
    how: Divergence,
    most: int | None,
    temperature: float,
    policy: Callable[[], Sampler],
    release: Callable[[], None],
    reference: Callable[[], Sampler],
) -> None:
    """Adds the divergences that are not in the file yet, a line a problem; loads models only where some are missing.

    Args:
        path: the file.
        shard: the problems whose completions are read together.
        answered: reads the problems of the shard with their completions, by the problems' places.
        how: EXACT, K1 or K3.
        most: of how many completions a problem; None: of all.
        temperature: of the draws; the estimators are of the laws at it.
        policy, reference: load the models.
        release: lets the policy go.

    Raises UsageError where the two have other tokenizers; CannotWrite, ShardBusy.
    """
    with ShardFile(path, shard, sealed=True) as file:
        if not file.todo:
            return
        rows, measure = answered(), _measure(_ESTIMATORS[how], temperature, policy, release, reference)
        items = len(shard.items)
        done = items - sum(map(len, file.todo))
        for batch in file.todo:
            report(done, items, "divergence from the reference")
            found = _measured_batch([rows[item] for item in batch], most, measure)
            file.append([json.dumps({"kl": row}, allow_nan=False) for row in found])
            done += len(batch)


def measured(
    answered: Sequence[AnsweredProblem], how: Divergence, path: Path | None, most: int | None, *, guided: bool
) -> Measured:
    """The divergences of all completions: from the file that ``measure_kl`` wrote; without one (None) those that a
    guided decode has recorded, or those of the reference from itself. Raises BadAnswers."""
    if path is not None:
        read = [row.kl for row in read_lines(path, _Line, "list of divergences")]
        if [len(row) for row in read] != [len(row.completions[:most]) for row in answered]:
            raise BadAnswers(f"{path} is not of these completions; move it away")
        rows = zip(read, answered, strict=True)
        kl: Table = tuple((*row, *[None] * (len(each.completions) - len(row))) for row, each in rows)
        return Measured(kl, _ESTIMATORS[how])
    return Measured(
        tuple(tuple(each.kl if guided else 0.0 for each in row.completions) for row in answered), Estimator.EXACT
    )


@dataclass(frozen=True, slots=True)
class _Line:
    kl: tuple[float | None, ...]


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
        forced = forced_log_probs(only, prompts, [each.ids for each in completions], temperature)
        pairs = zip(completions, forced, strict=True)
        return [estimated(each.log_probs, log_probs, estimator) for each, log_probs in pairs]

    return by_estimator


def _measured_batch(rows: Sequence[AnsweredProblem], most: int | None, measure: Measure) -> list[list[float | None]]:
    """A list of divergences for each problem of a batch, whose completions are read together."""
    taken = [row.completions[:most] for row in rows]
    prompts = [row.prompt_ids for row, some in zip(rows, taken, strict=True) for _ in some]
    values = iter(measure(prompts, [each for some in taken for each in some]))
    return [[next(values) for _ in some] for some in taken]
