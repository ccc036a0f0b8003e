"""A policy is evaluated: completions of a task's problems, how far they are from the reference, and what both come to.

Each eta of a guided policy is a point with files of its own; each batch of problems is written as it is done, so that a
killed evaluation goes on with the next batch, and one that is done loads no model. What is drawn depends on the seed,
the problem and the sample's number alone: the same at every eta (common random numbers), in any batches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.atomic import atomic_write
from gpuherd.engines.progress import report
from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.posttrain.eval.answered import (
    AnsweredProblem,
    BadAnswers,
    Completion,
    line_of,
    read_answers,
    scores_of,
)
from gpuherd.posttrain.eval.files import without_infinity, write_result, write_scores
from gpuherd.posttrain.eval.measuring_kl import Measured, measured_kl
from gpuherd.posttrain.eval.options import Divergence, EvaluationOptions
from gpuherd.posttrain.eval.result import RESULT, About, Cost, Evaluation, Point
from gpuherd.posttrain.types import Policy, Precision, Problem, Sampling, Task
from gpuherd.runs import records
from gpuherd.runs.shard_file import ShardFile
from gpuherd.runs.shards import in_batches

if TYPE_CHECKING:
    from gpuherd.posttrain.rollout.sampler import Sampler

logger = logging.getLogger(__name__)

ASKED = "asked.json"
SamplerOf = Callable[[Policy], "Sampler"]


class OtherEvaluation(GpuherdError):
    """The folder holds the answers of an evaluation that was asked otherwise."""

    exit_code = ExitCode.BAD_INPUT


@dataclass(frozen=True, slots=True)
class Evaluating:
    """An evaluation to be made by one job.

    Attributes:
        about: what it is of.
        policy: evaluated.
        reference: the model that everything began with; what the divergence is from.
        task: whose problems.
        folder: where its files go.
        root: the run's folder, where that is not ``folder``. Paths below it are recorded relative to it, so that an
            evaluation can be resumed after its run was moved.
        gpus: how many the job has; 0 on a CPU.
        reward_batch_size: completions that are scored at once.
        versions: of libraries, for the record.
    """

    about: About
    policy: Policy
    reference: Policy
    task: Task
    folder: Path
    root: Path | None = None
    options: EvaluationOptions = field(default_factory=EvaluationOptions)
    sampling: Sampling = field(default_factory=Sampling)
    precision: Precision = field(default_factory=Precision)
    device: str = "cpu"
    gpus: int = 0
    reward_batch_size: int = 32
    versions: dict[str, str] = field(default_factory=dict)


def evaluate(work: Evaluating, sampler_of: SamplerOf | None = None) -> Evaluation:
    """Evaluates and writes ``work.folder/result.json``; goes on with what lies there. Returns what it wrote.

    Args:
        sampler_of: makes the sampler of a policy, the policy's own loaded by default. For models in memory already.

    Raises:
        OtherEvaluation: the folder was begun with another policy, problems or settings.
        CannotWrite; what the task, loading and sampling raise.
    """
    from gpuherd.posttrain.eval.metrics import metrics_of

    problems = work.task.problems(work.options.split, work.options.problems, work.options.problem_seed)
    digests: dict[str, str] = {}
    if sampler_of is None and not (work.folder / RESULT).exists():
        digests = {"policy": work.policy.sha256, "reference": work.reference.sha256}
    _claim(work, problems, digests)
    points, lost = [], []
    loaded = _Loaded(work, sampler_of)
    for policy in [work.policy.at(eta) for eta in _etas(work)] or [work.policy]:
        label = "" if policy.guide is None else f"-eta{policy.guide.eta!r}"
        stage = "evaluating" if policy.guide is None else f"evaluating, eta {policy.guide.eta:g}"
        path = work.folder / f"answers{label}.jsonl"
        _answer(work, problems, path, partial(loaded.at, policy), stage)
        answered = _read_all(path, problems)
        measured = _divergence(work, policy, answered, label, loaded)
        scores = scores_of(answered, problems, measured.kl, measured.estimator)
        lost += _lost(policy, measured, None if policy.guide is not None else work.options.kl_samples)
        write_scores(work.folder / f"scores{label}.json", scores)
        points.append(
            Point(
                eta=None if policy.guide is None or policy.guide.eta == float("inf") else policy.guide.eta,
                own=policy == work.policy,
                metrics=metrics_of(scores, work.options),
                cost=_cost(answered, work.gpus),
                answers=path.name,
                scores=f"scores{label}.json",
            )
        )
    evaluation = Evaluation(
        about=work.about,
        policy=work.policy.to_dict(),
        reference=work.reference.to_dict(),
        split=work.options.split.value,
        sampling=records.jsonable(work.sampling) | {"greedy": work.options.greedy},
        confidence=work.options.confidence,
        points=tuple(points),
        notes=_notes(work, lost),
        versions=work.versions,
    )
    write_result(work.folder, evaluation)
    return evaluation


class _Loaded:
    """The policy in memory, once it is needed, and moved from eta to eta without loading it again."""

    def __init__(self, work: Evaluating, sampler_of: SamplerOf | None):
        self._work, self._make = work, sampler_of
        self._sampler: Sampler | None = None
        self._policy: Policy | None = None

    def at(self, policy: Policy) -> Sampler:
        """A sampler of this policy."""
        held, guide = self._policy, policy.guide
        if self._sampler is None or held is None or guide is None or held.at(guide.eta) != policy:
            self._sampler = None  # one model at a time
            self._sampler = self.fresh(policy)
        elif held != policy:
            self._sampler = self._sampler.at(guide.eta)
        self._policy = policy
        return self._sampler

    def release(self) -> None:
        """Lets the policy go, so that there is room for another model."""
        self._sampler = self._policy = None

    def fresh(self, policy: Policy) -> Sampler:
        """Another sampler, beside the one that is held."""
        if self._make is not None:
            return self._make(policy)
        from gpuherd.posttrain.rollout.sampler import Sampler

        return Sampler(policy, self._work.precision, self._work.device, self._work.sampling)


def _etas(work: Evaluating) -> list[float]:
    """At which the policy is evaluated, its own among them, the largest, which guides least, first; none of one that is
    not guided."""
    return [] if work.policy.guide is None else sorted({*work.options.etas, work.policy.guide.eta}, reverse=True)


def _claim(work: Evaluating, problems: Sequence[Problem], digests: Mapping[str, str]) -> None:
    """Says in the folder what is asked, or raises OtherEvaluation where something else was.

    Args:
        digests: of the models' files; empty: they are not compared.
    """
    digest = hashlib.sha256(json.dumps(records.jsonable(problems)).encode())
    root = work.folder if work.root is None else work.root
    sampling = {name: value for name, value in records.jsonable(work.sampling).items() if name != "batch_size"}
    asked = {
        "policy": work.policy.to_dict(root),
        "reference": work.reference.to_dict(root),
        "task": work.task.name,
        "problems": len(problems),
        "problems_sha256": digest.hexdigest(),
        "samples": work.options.samples,
        "greedy": work.options.greedy,
        "kl": [work.options.kl.value, work.options.kl_samples],
        "sampling": sampling,
        "dtype": work.precision.dtype,
    }
    if digests:
        asked["models_sha256"] = dict(digests)
    text = json.dumps(without_infinity(asked), indent=1)
    work.folder.mkdir(parents=True, exist_ok=True)
    path = work.folder / ASKED
    if not path.exists():
        atomic_write(path, text.encode())
        return
    try:
        earlier = json.loads(path.read_bytes())
    except ValueError:
        earlier = {}
    if not isinstance(earlier, dict):
        earlier = {}
    if digests:
        earlier.setdefault("models_sha256", dict(digests))  # earlier versions recorded none
    other = [name for name, value in json.loads(text).items() if earlier.get(name) != value]
    if other:
        raise OtherEvaluation(
            f"{work.folder} holds the answers of an evaluation with another {', '.join(other)}; "
            "name another folder, or move that one away"
        )


def _answer(
    work: Evaluating, problems: Sequence[Problem], path: Path, sampler: Callable[[], Sampler], stage: str
) -> None:
    """Adds the answers that are not in the file yet."""
    shard = in_batches(len(problems), max(1, work.sampling.batch_size // work.options.samples))
    with ShardFile(path, shard, sealed=True) as file:
        for batch in file.todo:
            report(batch[0], len(problems), stage)
            some = [problems[item] for item in batch]
            loaded = sampler()
            began = time.monotonic()
            found = _answered(work, some, loaded)
            share = (time.monotonic() - began) / len(some)
            file.append(
                [
                    line_of(AnsweredProblem(problem.id, problem.prompt, prompt, share, completions))
                    for problem, (prompt, completions) in zip(some, found, strict=True)
                ]
            )
    report(len(problems), len(problems), stage)


def _answered(
    work: Evaluating, problems: Sequence[Problem], sampler: Sampler
) -> list[tuple[tuple[int, ...], tuple[Completion, ...]]]:
    """Prompt and completions of each problem, with what they earn."""
    from gpuherd.posttrain.rollout.sampler import Prefix, scored

    prompts = [sampler.prompt_ids(each) for each in problems]
    prefixes = [Prefix(each.id, ids) for each, ids in zip(problems, prompts, strict=True)]
    groups = sampler.continuations(prefixes, work.options.samples, greedy=work.options.greedy)
    asked = [each for each, group in zip(problems, groups, strict=True) for _ in group]
    texts = [sampler.scored_text(each.text) for group in groups for each in group]
    rewards = iter(scored(work.task, asked, texts, work.reward_batch_size))
    found = []
    for prompt, group in zip(prompts, groups, strict=True):
        completions = tuple(
            Completion(
                each.ids,
                each.log_probs,
                each.text,
                each.finished,
                (reward := next(rewards)).value,
                reward.correct,
                reward.note,
                _summed(each.kl),
            )
            for each in group
        )
        found.append((prompt, completions))
    return found


def _summed(kl: Sequence[float | None] | None) -> float | None:
    """Over a completion's tokens; None where it was not recorded, or is not finite somewhere."""
    known = [each for each in kl or () if each is not None]
    return sum(known) if kl is not None and len(known) == len(kl) else None


def _read_all(path: Path, problems: Sequence[Problem]) -> list[AnsweredProblem]:
    answered = list(read_answers(path))
    if [each.problem for each in answered] != [each.id for each in problems]:
        raise BadAnswers(f"{path} is not of this evaluation's problems; move it away")
    return answered


def _divergence(
    work: Evaluating, policy: Policy, answered: Sequence[AnsweredProblem], label: str, loaded: _Loaded
) -> Measured:
    """How far the completions are from the reference, or that nobody asked."""
    if work.options.kl is Divergence.NONE:
        return Measured(None, None)
    return measured_kl(
        answered,
        guided=policy.guide is not None,
        is_reference=policy == work.reference,
        how=work.options.kl,
        most=work.options.kl_samples,
        temperature=work.sampling.temperature,
        at_once=work.sampling.batch_size,
        path=work.folder / f"kl{label}.jsonl",
        policy=partial(loaded.at, policy),
        release=loaded.release,
        reference=partial(loaded.fresh, work.reference),
    )


def _cost(answered: Sequence[AnsweredProblem], gpus: int) -> Cost:
    tokens = sum(len(each.ids) for row in answered for each in row.completions)
    return Cost(sum(each.seconds for each in answered), tokens, gpus)


def _lost(policy: Policy, measured: Measured, most: int | None) -> list[str]:
    """That divergences are not in their mean, where some are not finite."""
    asked = [kl for row in measured.kl or () for kl in row[:most]]
    count = sum(kl is None for kl in asked)
    if not count:
        return []
    at = "" if policy.guide is None else f"eta {policy.guide.eta:g}: "
    return [f"{at}the divergence of {count} of {len(asked)} completions is not finite; their mean is without them"]


def _notes(work: Evaluating, lost: Sequence[str]) -> tuple[str, ...]:
    """What the figures don't say themselves."""
    found = []
    how = work.sampling
    if work.options.greedy:
        found.append("greedy completions: one a problem, so that nothing is known of the draws' spread")
    elif (how.temperature, how.top_p, how.top_k) != (1.0, 1.0, 0):
        found.append(
            f"drawn at temperature {how.temperature:g}, top-p {how.top_p:g}, top-k {how.top_k}: the divergence is "
            "along what this drew, and no unbiased estimate of that of the models' own laws"
        )
    return (*found, *lost)
