"""The methods, each by ``gpuherd.posttrain``'s own algorithm, from one base, on one fixed set of problems, one budget.

As in the Q# paper's star graphs (arXiv 2502.20548, appendix C) the true answer of each problem and a wrong one that the
base has drawn are what DPO, RPO, Q# and CD learn from; next-token learns the true answers; REINFORCE, GRPO and PPO draw
from the policy; PITA collects as it does anywhere: it cuts the base's greedy answer and compares two ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write
from gpuherd.lm.guidance.guide import Kind
from gpuherd.posttrain.algos import cd, dpo, grpo, pita, ppo, qsharp, reinforce, sft
from gpuherd.posttrain.engine.options import Scheduler, StepOptions
from gpuherd.posttrain.eval.evaluation import Evaluating, evaluate
from gpuherd.posttrain.eval.results import REFERENCE, About, EvaluationOptions, Point
from gpuherd.posttrain.guidance.options import Guidance
from gpuherd.posttrain.types import (
    Algorithm,
    Collecting,
    Comparison,
    Policy,
    Precision,
    Problem,
    Rollout,
    Row,
    Sampling,
    Split,
    Task,
    Training,
)

ETAS = (0.02, 0.1, 0.5, 1.0, 5.0)
GUIDED = ("Q#", "CD", "PITA")
RATE = 1e-4  # the Q# paper's for DPO and RPO, which depend on it more than the others do


@dataclass(frozen=True)
class Budget:
    """What each method may use, and its settings.

    Attributes:
        steps: optimiser steps.
        sequences: completions of a step; of methods that learn from pairs half as many pairs.
        max_new_tokens: of a completion.
        lr: of all methods, constant.
        group: completions of one prompt, of methods that compare them.
        kl_coef: of GRPO and PPO.
        beta: of DPO and RPO.
        eta, top_k: of the guided methods.
        kind: of the classifiers: whether a token's value is read behind it or before it.
        passes: over the rows, where there are so many rows that this makes ``steps``.
    """

    steps: int
    sequences: int
    max_new_tokens: int
    lr: float = 4e-4
    group: int = 8
    kl_coef: float = 0.0
    beta: float = 0.1
    eta: float = 0.1
    top_k: int = 10
    kind: Kind = Kind.V
    passes: int = 1

    @property
    def completions(self) -> int:
        """That each method learns from."""
        return self.steps * self.sequences

    def at_rate(self, factor: float) -> Budget:
        """The same with all learning rates times this."""
        return replace(self, lr=self.lr * factor)


@dataclass(frozen=True)
class Shared:
    """What all methods of one base have in common.

    Attributes:
        family: what the comparison is of, such as ``G(2,3)``.
        problems: what all of them learn from.
        pairs: of each problem the true answer and a wrong one that the base drew.
    """

    budget: Budget
    family: str
    seed: int
    base: Policy
    task: Task
    problems: Sequence[Problem]
    pairs: Sequence[Comparison]


@dataclass(frozen=True)
class Method:
    """An algorithm and its rows; ``rows`` None: it collects its own, a round of all problems."""

    algorithm: Algorithm
    rows: Callable[[Shared], Sequence[Row]] | None


def methods(budget: Budget) -> Mapping[str, Method]:
    """All of them, with the same learning rate and as many completions each; DPO and RPO also with the paper's rate."""
    pairs = budget.sequences // 2
    common: dict[str, Any] = {"lr": budget.lr, "weight_decay": 0.0, "grad_clip": 1.0, "scheduler": Scheduler.CONSTANT}
    on_rows: dict[str, Any] = {**common, "epochs": 2 * budget.passes, "max_steps": budget.steps}
    online: dict[str, Any] = {**common, "epochs": 1_000, "max_steps": budget.steps}
    value: dict[str, Any] = {
        **common,
        "epochs": budget.passes,
        "classifier_type": budget.kind,
        "validation_share": 0.0,
        "guidance": Guidance(eta=budget.eta, top_k=budget.top_k),
    }
    groups = budget.sequences // budget.group

    def preferring(**more: Any) -> Method:
        options = on_rows | {"beta": budget.beta, "batch_size": pairs} | more
        return Method(dpo.DPO(dpo.Options(**options)), as_pairs)

    return {
        "next-token": Method(sft.SFT(sft.Options(**on_rows, batch_size=budget.sequences)), true_answers),
        "REINFORCE": Method(
            reinforce.Reinforce(reinforce.ReinforceOptions(**online, batch_size=budget.sequences)), nothing
        ),
        "RPO": preferring(rpo_weight=1.0),
        f"RPO {RATE:g}": preferring(rpo_weight=1.0, lr=RATE),
        "DPO": preferring(),
        f"DPO {RATE:g}": preferring(lr=RATE),
        "GRPO": Method(
            grpo.GRPO(
                grpo.GRPOOptions(**online, batch_size=groups, samples_per_prompt=budget.group, kl_coef=budget.kl_coef)
            ),
            nothing,
        ),
        "CD": Method(cd.ControlledDecoding(cd.CDOptions(**value, batch_size=budget.sequences)), both_answers),
        "Q#": Method(qsharp.QSharp(qsharp.QSharpOptions(**value, batch_size=budget.sequences)), both_answers),
        "PPO": Method(ppo.PPO(ppo.PPOOptions(**online, batch_size=budget.sequences, kl_coef=budget.kl_coef)), nothing),
        "PITA": Method(pita.PITA(pita.PITAOptions(**value, batch_size=pairs, samples_per_example=4)), None),
    }


def nothing(_: Shared) -> Sequence[Row]:
    """Of methods that draw while they train."""
    return ()


def as_pairs(shared: Shared) -> Sequence[Row]:
    """The true answer is preferred to the wrong one."""
    return shared.pairs


def true_answers(shared: Shared) -> Sequence[Row]:
    """The chosen ones."""
    return [_rollout(each, 0) for each in shared.pairs]


def both_answers(shared: Shared) -> Sequence[Row]:
    """Both, each with what it earned."""
    return [_rollout(each, number) for each in shared.pairs for number in range(2)]


def _rollout(pair: Comparison, number: int) -> Rollout:
    ids, text = ((pair.chosen_ids, pair.chosen), (pair.rejected_ids, pair.rejected))[number]
    reward = 1.0 - number
    return Rollout(
        problem=pair.problem,
        sample=number,
        prompt_ids=pair.prompt_ids,
        ids=ids,
        by_policy=(True,) * len(ids),
        log_probs=(None,) * len(ids),
        text=text,
        reward=reward,
        correct=number == 0,
        finished=True,
        turn_rewards=((len(ids) - 1, reward),),
    )


def share(budget: Budget, family: str, seed: int, base: Path, task: Task, folder: Path) -> Shared:
    """The problems and the pairs of a base, drawn once and kept in the folder."""
    policy = Policy(str(base))
    problems = task.problems(Split.TRAIN, None, 0)
    path = folder / "pairs.jsonl"
    if not path.exists():
        algorithm = dpo.DPO(dpo.Options(pairing=dpo.Pairing.ANSWER))
        rows = list(algorithm.collect(_collecting(budget, seed, policy, task, problems)))
        atomic_write(path, "".join(json.dumps(each.to_dict()) + "\n" for each in rows).encode())
    pairs = [Comparison.from_dict(json.loads(line)) for line in path.read_text().splitlines()]
    return Shared(budget, family, seed, policy, task, problems, pairs)


def _sampling(budget: Budget, seed: int, *, top_k: int = 0) -> Sampling:
    return Sampling(
        max_new_tokens=budget.max_new_tokens, temperature=1.0, top_k=top_k, batch_size=256, seed=10_000 + seed
    )


def _collecting(budget: Budget, seed: int, policy: Policy, task: Task, problems: Sequence[Problem]) -> Collecting:
    return Collecting(
        task=task,
        problems=problems,
        policy=policy,
        reference=policy,
        round=0,
        sampling=_sampling(budget, seed),
        precision=Precision(dtype="float32"),
        device="cpu",
        reward_batch_size=256,
    )


def is_done(folder: Path, name: str) -> bool:
    """Whether a method has been run in this work folder."""
    return (_of_method(folder, name) / "done.json").exists()


def run_methods(
    shared: Shared, names: Sequence[str], folder: Path, after_each: Callable[[str, Mapping[str, Any]], None]
) -> None:
    """Each method in a folder of its own in the work folder; ``after_each`` is given all figures so far."""
    found: dict[str, Any] = {}
    for name in names:
        found[name] = run_method(shared, name, _of_method(folder, name))
        after_each(name, found)


def _of_method(folder: Path, name: str) -> Path:
    return folder / name.replace("#", "sharp").replace(" ", "-")


def run_method(shared: Shared, name: str, folder: Path) -> dict[str, Any]:
    """One method from rows to test; done once, its figures lie in ``folder/done.json``."""
    done = folder / "done.json"
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text())
        return found
    method = methods(shared.budget)[name]
    began = time.process_time()
    rows = list(_collected(shared, method, folder) if method.rows is None else method.rows(shared))
    collected = time.process_time()
    policy = method.algorithm.train(
        Training(
            task=shared.task,
            problems=shared.problems,
            rows=[rows],
            policy=shared.base,
            reference=shared.base,
            value_model=shared.base.model,
            folder=folder / "training",
            round=0,
            sampling=_sampling(shared.budget, shared.seed),
            precision=Precision(dtype="float32"),
            device="cpu",
            seed=shared.seed,
            steps=StepOptions(micro_batch_size=shared.budget.sequences),
            reward_batch_size=256,
        )
    )
    trained = time.process_time()
    points = tested(shared, name, policy, folder / "test")
    figures = {
        "rows": len(rows),
        "collect_cpu_s": round(collected - began, 1),
        "train_cpu_s": round(trained - collected, 1),
        "test_cpu_s": round(time.process_time() - trained, 1),
        "points": points,
    }
    atomic_write(done, json.dumps(figures, indent=1).encode() + b"\n")
    return figures


def _collected(shared: Shared, method: Method, folder: Path) -> Sequence[Row]:
    """The method's own rows, as many as the budget has pairs for."""
    path = folder / "rows.jsonl"
    if not path.exists():
        work = _collecting(shared.budget, shared.seed, shared.base, shared.task, shared.problems)
        rows = list(method.algorithm.collect(work))[: shared.budget.completions // 2 // shared.budget.passes]
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, "".join(json.dumps(each.to_dict()) + "\n" for each in rows).encode())
    return [Comparison.from_dict(json.loads(line)) for line in path.read_text().splitlines()]


def tested(shared: Shared, name: str, policy: Policy, folder: Path) -> list[dict[str, Any]]:
    """What a policy earns on the test's problems, a guided one at each eta."""
    evaluation = evaluate(
        Evaluating(
            about=About(
                algorithm=REFERENCE if name == "base" else name,
                dataset=shared.task.name,
                evaluated_on=shared.task.name,
                family=shared.family,
                round=None if name == "base" else 0,
                seed=shared.seed,
            ),
            policy=policy,
            reference=shared.base,
            task=shared.task,
            folder=folder,
            options=EvaluationOptions(samples=1, etas=ETAS if policy.guide is not None else ()),
            sampling=_sampling(shared.budget, shared.seed, top_k=shared.budget.top_k),
            precision=Precision(dtype="float32"),
        )
    )
    return [_figures(each) for each in evaluation.points]


def _figures(point: Point) -> dict[str, Any]:
    right, kl = point.metrics.pass_at_1, point.metrics.kl
    return {
        "eta": point.eta,
        "own": point.own,
        "problems": point.metrics.problems,
        "right": None if right is None else asdict(right),
        "kl": None if kl is None else asdict(kl.sequence) | {"estimator": kl.estimator.value},
    }
