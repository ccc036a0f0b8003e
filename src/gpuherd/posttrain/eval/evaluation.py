"""A policy is evaluated: completions of a task's problems, how far they are from the reference, and what both come to.

Each eta of a guided policy is a point with files of its own; each batch of problems is written as it is done, so that a
killed evaluation resumes at the next batch, and one that is done loads no model. What is drawn depends on the seed, the
problem and the sample's number alone: the same at every eta (common random numbers), in any batches. The last bits of
log-probs and divergences can depend on which completions a model reads together: so batches are fixed by the order of
the problems, and an evaluation that is divided into shards deals whole batches to them. By vLLM, whose own batches are
not fixed so, a draw may come out otherwise in a near-tie.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.engines.progress import report
from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.posttrain.eval.answers import AnsweredProblem, BadAnswers, Completion, read_answers, scores_of
from gpuherd.posttrain.eval.divergence import Measured, measure_kl, measured
from gpuherd.posttrain.eval.results import (
    ASKED,
    RESULT,
    About,
    Cost,
    Divergence,
    Evaluation,
    EvaluationOptions,
    Part,
    Point,
    parts_of,
    read_values,
    shard_done,
    without_infinity,
    write_result,
    write_values,
)
from gpuherd.posttrain.types import BackendName, Policy, Precision, Problem, Reward, Sampling, Task
from gpuherd.runs import records
from gpuherd.runs.files import create_file, write_lines
from gpuherd.runs.shard_file import Shard, ShardFile, line_ends, sealed
from gpuherd.runs.shards import lines_in_order

if TYPE_CHECKING:
    from gpuherd.posttrain.rollout.sampler import Continuation, RolloutBackend, Sampler
    from gpuherd.posttrain.rollout.vllm import VllmSampler

SamplerOf = Callable[[Policy], "Sampler"]


class OtherEvaluation(GpuherdError):
    """The folder holds the answers of an evaluation that was asked otherwise."""

    exit_code = ExitCode.BAD_INPUT


class LackingShards(GpuherdError):
    """Shards of an evaluation are not whole. Another start of the run makes them again."""


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
        backend: what decodes the policy; divergences are measured by transformers.
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
    backend: BackendName = BackendName.HF


def evaluate(work: Evaluating, sampler_of: SamplerOf | None = None) -> Evaluation:
    """Evaluates and writes ``work.folder/result.json``, resuming the evaluation that is there. Returns the result.

    Args:
        sampler_of: makes the sampler of a policy, the policy's own loaded by default. For models in memory already.

    Raises:
        OtherEvaluation: the folder was begun with another policy, problems or settings.
        CannotWrite; what the task, loading and sampling raise.
    """
    problems = _begin(work, digested=sampler_of is None and not (work.folder / RESULT).exists())
    (whole,) = _parts(work, problems, 1)
    _fill(work, problems, replace(whole, folder=work.folder), _Loaded(work, sampler_of))
    return _conclude(work, problems, work.gpus)


# ---- shards


def evaluate_shard(work: Evaluating, number: int, shards: int, sampler_of: SamplerOf | None = None) -> dict[str, int]:
    """Answers one shard's problems and measures their divergences, resuming where a killed process stopped; the file
    ``shard_done`` is written last. Any number of shards give the same lines, to the bit: which problems share a batch
    is fixed by the whole evaluation. Returns what that file says, for people.

    Raises as ``evaluate``; ShardBusy where another process works on the shard.
    """
    started, done = time.monotonic(), shard_done(work.folder, number)
    problems = _begin(work, digested=sampler_of is None and not done.exists())
    part = _parts(work, problems, shards)[number]
    now = _fill(work, problems, part, _Loaded(work, sampler_of))
    figures = {"problems": len(part.answers.items), "answers_last_start": now, "gpus": work.gpus}
    write_values(done, figures | {"seconds_last_start": time.monotonic() - started}, indent=1)
    return figures


def join_shards(work: Evaluating, shards: int) -> Evaluation:
    """Puts the lines of all shards together in the order of the problems, and writes and returns the same result as
    ``evaluate`` in one process. Loads no model. The shards' own lines are removed then.

    Raises LackingShards where a shard is not done, or its lines are not as they were written; as ``evaluate``.
    """
    problems = _begin(work, digested=False)
    parts = _parts(work, problems, shards)
    names = [name for each in _at_etas(work) for name in (each.answers, each.kl) if name is not None]
    missing = [name for name in names if not _is_whole(work.folder / name, len(problems))]
    lacking = [
        number
        for number, part in enumerate(parts)
        if not shard_done(work.folder, number).exists()
        or not all(_is_whole(part.folder / name, len(part.answers.items)) for name in missing)
    ]
    if lacking:
        for number in lacking:
            shard_done(work.folder, number).unlink(missing_ok=True)
        raise LackingShards(
            f"{work.folder}: lines of shards {', '.join(map(str, lacking))} are missing or have changed; "
            "start the same command again, which makes them again"
        )
    for name in missing:
        lines = lines_in_order([(part.folder / name, part.answers) for part in parts], lambda _: "start again")
        write_lines(work.folder / name, map(sealed, lines))
    made = [read_values(shard_done(work.folder, number), _Shard) for number in range(shards)]
    evaluation = _conclude(work, problems, max(each.gpus for each in made))
    for part in parts:
        shutil.rmtree(part.folder, ignore_errors=True)
    return evaluation


@dataclass(frozen=True, slots=True)
class _Shard:
    """What is read of a shard's ``shard_done``."""

    gpus: int


def _parts(work: Evaluating, problems: Sequence[Problem], shards: int) -> list[Part]:
    return parts_of(work.folder, len(problems), work.options, work.sampling.batch_size, shards)


def _is_whole(path: Path, lines: int) -> bool:
    """Whether a file has so many lines, all as they were written."""
    ends = line_ends(path) if path.exists() else []
    return path.exists() and len(ends) == lines and path.stat().st_size == (ends[-1] if ends else 0)


# ---- the work


def _begin(work: Evaluating, *, digested: bool) -> Sequence[Problem]:
    """The problems, once it is sure that the folder is of this evaluation.

    Args:
        digested: compare the models' files too.
    """
    problems = work.task.problems(work.options.split, work.options.problems, work.options.problem_seed)
    _claim(work, problems, {"policy": work.policy.sha256, "reference": work.reference.sha256} if digested else {})
    return problems


@dataclass(frozen=True, slots=True)
class _AtEta:
    """The policy at one of its etas, and the names of its files.

    Attributes:
        kl: None where completions are not read again to measure their divergence: of a guided policy decoding has
            recorded it, and that of the reference is 0.
    """

    policy: Policy
    answers: str
    kl: str | None
    scores: str


def _at_etas(work: Evaluating) -> list[_AtEta]:
    """The policy at each of its etas, its own among them, the largest, which guides least, first."""
    own, guide = work.policy, work.policy.guide
    etas = [] if guide is None else sorted({*work.options.etas, guide.eta}, reverse=True)
    policies = [own.at(eta) for eta in etas] or [own]
    read_again = guide is None and own != work.reference and work.options.kl is not Divergence.NONE
    found = []
    for each in policies:
        at = "" if each.guide is None else f"-eta{each.guide.eta!r}"
        kl = f"kl{at}.jsonl" if read_again else None
        found.append(_AtEta(each, f"answers{at}.jsonl", kl, f"scores{at}.json"))
    return found


def _fill(work: Evaluating, problems: Sequence[Problem], part: Part, loaded: _Loaded) -> int:
    """Adds the lines that are not in the part's files yet. Returns how many answers were."""
    now = 0
    for each in _at_etas(work):
        policy, path = each.policy, part.folder / each.answers
        stage = "evaluating" if policy.guide is None else f"evaluating, eta {policy.guide.eta:g}"
        now += _answer(work, problems, path, part.answers, partial(loaded.at, policy), stage)
        if each.kl is not None:
            measure_kl(
                part.folder / each.kl,
                part.divergence,
                partial(_answers_by_place, path, problems, part.answers),
                how=work.options.kl,
                most=work.options.kl_samples,
                temperature=work.sampling.temperature,
                policy=partial(loaded.reading, policy),
                release=loaded.release,
                reference=partial(loaded.fresh, work.reference),
            )
    return now


def _conclude(work: Evaluating, problems: Sequence[Problem], gpus: int) -> Evaluation:
    """The result of the files in ``work.folder``, written there."""
    from gpuherd.posttrain.eval.metrics import metrics_of

    points, lost = [], []
    for each in _at_etas(work):
        guide = each.policy.guide
        answered = _read_all(work.folder / each.answers, problems)
        divergence = _divergence(work, each, answered)
        scores = scores_of(answered, problems, divergence.kl, divergence.estimator)
        lost += _lost(each.policy, divergence, None if guide is not None else work.options.kl_samples)
        write_values(work.folder / each.scores, records.jsonable(scores), indent=None)
        seconds = sum(row.seconds for row in answered)
        tokens = sum(len(one.ids) for row in answered for one in row.completions)
        points.append(
            Point(
                eta=None if guide is None or guide.eta == float("inf") else guide.eta,
                own=each.policy == work.policy,
                metrics=metrics_of(scores, work.options),
                cost=Cost(seconds, tokens, gpus),
                answers=each.answers,
                scores=each.scores,
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
        self._vllm: VllmSampler | None = None

    def at(self, policy: Policy) -> RolloutBackend:
        """What decodes this policy. Raises UsageError for one that the backend can't."""
        if self._work.backend is BackendName.HF:
            return self.reading(policy)
        if self._vllm is None:
            from gpuherd.posttrain.rollout.vllm import EVALUATING, VllmSampler

            work = self._work
            self._vllm = VllmSampler(policy, work.precision, work.device, work.sampling, key=EVALUATING)
        return self._vllm

    def reading(self, policy: Policy) -> Sampler:
        """A sampler of this policy with its model in this process; another engine has ended then."""
        self._end_vllm()
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
        self._end_vllm()

    def _end_vllm(self) -> None:
        if self._vllm is not None:
            self._vllm.release()
            self._vllm = None

    def fresh(self, policy: Policy) -> Sampler:
        """Another sampler, next to the one that is held."""
        if self._make is not None:
            return self._make(policy)
        from gpuherd.posttrain.rollout.sampler import Sampler

        return Sampler(policy, self._work.precision, self._work.device, self._work.sampling)


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
    if work.backend is not BackendName.HF:
        asked["backend"] = work.backend.value
    if digests:
        asked["models_sha256"] = dict(digests)
    text = json.dumps(without_infinity(asked), indent=1)
    # Of shards that begin at the same time the first one's stays.
    there = create_file(work.folder / ASKED, text.encode())
    earlier: Any = None
    with suppress(ValueError):
        earlier = json.loads(there)
    if not isinstance(earlier, dict):
        earlier = {}
    if digests:
        earlier.setdefault("models_sha256", dict(digests))  # earlier versions recorded none
    asks = json.loads(text)
    other = [name for name, value in asks.items() if earlier.get(name) != value]
    other += ["backend"] if "backend" in earlier and "backend" not in asks else []
    if other:
        raise OtherEvaluation(
            f"{work.folder} holds the answers of an evaluation with another {', '.join(other)}; "
            "name another folder, or move that one away"
        )


def _answer(
    work: Evaluating,
    problems: Sequence[Problem],
    path: Path,
    shard: Shard,
    sampler: Callable[[], RolloutBackend],
    stage: str,
) -> int:
    """Adds the answers to the shard's problems that are not in the file yet. Returns how many."""
    items = len(shard.items)
    with ShardFile(path, shard, sealed=True) as file:
        before = done = items - sum(map(len, file.todo))
        for batch in file.todo:
            report(done, items, stage)
            some = [problems[item] for item in batch]
            loaded = sampler()
            began = time.monotonic()
            found = _answered(work, some, loaded)
            share = (time.monotonic() - began) / len(some)
            file.append(
                [
                    records.line_of(AnsweredProblem(problem.id, problem.prompt, prompt, share, completions))
                    for problem, (prompt, completions) in zip(some, found, strict=True)
                ]
            )
            done += len(batch)
    report(items, items, stage)
    return items - before


def _answered(
    work: Evaluating, problems: Sequence[Problem], sampler: RolloutBackend
) -> list[tuple[tuple[int, ...], tuple[Completion, ...]]]:
    """Prompt and completions of each problem, with what they earn."""
    from gpuherd.posttrain.rollout.sampler import Prefix, scored

    prompts = [sampler.prompt_ids(each) for each in problems]
    prefixes = [Prefix(each.id, ids) for each, ids in zip(problems, prompts, strict=True)]
    groups = sampler.continuations(prefixes, work.options.samples, greedy=work.options.greedy)
    asked = [each for each, group in zip(problems, groups, strict=True) for _ in group]
    texts = [sampler.scored_text(each.text) for group in groups for each in group]
    rewards = iter(scored(work.task, asked, texts, work.reward_batch_size))
    return [
        (prompt, tuple(_completion(each, next(rewards)) for each in group))
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def _completion(drawn: Continuation, earned: Reward) -> Completion:
    kl = _summed(drawn.kl)
    return Completion(
        drawn.ids, drawn.log_probs, drawn.text, drawn.finished, earned.value, earned.correct, earned.note, kl
    )


def _summed(kl: Sequence[float | None] | None) -> float | None:
    """Over a completion's tokens; None where it was not recorded, or is not finite somewhere."""
    known = [each for each in kl or () if each is not None]
    return sum(known) if kl is not None and len(known) == len(kl) else None


def _read_all(path: Path, problems: Sequence[Problem]) -> list[AnsweredProblem]:
    answered = list(read_answers(path))
    if [each.problem for each in answered] != [each.id for each in problems]:
        raise BadAnswers(f"{path} is not of this evaluation's problems; move it away")
    return answered


def _divergence(work: Evaluating, at: _AtEta, answered: Sequence[AnsweredProblem]) -> Measured:
    """How far the completions are from the reference, or that it was not measured."""
    if work.options.kl is Divergence.NONE:
        return Measured(None, None)
    path = None if at.kl is None else work.folder / at.kl
    return measured(answered, work.options.kl, path, work.options.kl_samples, guided=at.policy.guide is not None)


def _answers_by_place(path: Path, problems: Sequence[Problem], shard: Shard) -> dict[int, AnsweredProblem]:
    items = shard.items
    return dict(zip(items, _read_all(path, [problems[item] for item in items]), strict=True))


def _lost(policy: Policy, divergence: Measured, most: int | None) -> list[str]:
    """That divergences are not in their mean, where some are not finite."""
    asked = [kl for row in divergence.kl or () for kl in row[:most]]
    count = sum(kl is None for kl in asked)
    if not count:
        return []
    at = "" if policy.guide is None else f"eta {policy.guide.eta:g}: "
    return [f"{at}the divergence of {count} of {len(asked)} completions is not finite; their mean is without them"]


def _notes(work: Evaluating, lost: Sequence[str]) -> tuple[str, ...]:
    """What the figures don't say themselves."""
    found = []
    how = work.sampling
    if work.backend is BackendName.VLLM:
        found.append("decoded by vLLM, whose draws are not those of transformers with the same seed")
    if work.options.greedy:
        found.append("greedy completions: one a problem, so that nothing is known of the draws' spread")
    elif (how.temperature, how.top_p, how.top_k) != (1.0, 1.0, 0):
        found.append(
            f"drawn at temperature {how.temperature:g}, top-p {how.top_p:g}, top-k {how.top_k}: the divergence is "
            "along what this drew, and no unbiased estimate of that of the models' own laws"
        )
    return (*found, *lost)
