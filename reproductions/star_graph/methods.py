"""The methods, each by ``gpuherd.posttrain``'s own algorithm, on one fixed set of graphs and with one budget.

As in the paper's set-up the true path of each graph and a wrong path that the base has drawn are what DPO, RPO, Q# and
CD learn from; next-token learns the true paths; REINFORCE and GRPO draw from the policy; PITA collects as it does
anywhere: it cuts the base's greedy path and compares two ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuherd.jobs.durable import atomic_write
from gpuherd.posttrain.algos import cd, dpo, grpo, pita, qsharp, reinforce, sft
from gpuherd.posttrain.algos.interface import Algorithm, Collecting, Precision, Row, Sampling, Training
from gpuherd.posttrain.evaluation.evaluating import Evaluating, evaluate
from gpuherd.posttrain.evaluation.options import EvaluationOptions
from gpuherd.posttrain.evaluation.result import REFERENCE, About, Point
from gpuherd.posttrain.policy import Policy
from gpuherd.posttrain.problem import Problem, Split
from gpuherd.posttrain.rollout import Comparison, Rollout
from gpuherd.posttrain.tasks.star_graph import StarGraphs
from gpuherd.posttrain.training.options import Scheduler, StepOptions
from gpuherd.posttrain.value.options import Guidance
from reproductions.star_graph.protocol import ETAS, Protocol

PUBLISHED = ("next-token", "REINFORCE", "RPO", "DPO", "GRPO", "CD", "Q#", "PITA")


@dataclass(frozen=True)
class Shared:
    """What all methods of one base have in common.

    Attributes:
        problems: the graphs that all of them learn from.
        pairs: of each graph the true path and a wrong one that the base drew.
    """

    protocol: Protocol
    seed: int
    base: Policy
    task: StarGraphs
    problems: Sequence[Problem]
    pairs: Sequence[Comparison]


@dataclass(frozen=True)
class Method:
    """An algorithm and its rows; ``rows`` None: it collects its own, a round of all problems."""

    algorithm: Algorithm
    rows: Callable[[Shared], Sequence[Row]] | None


def methods(protocol: Protocol) -> Mapping[str, Method]:
    """All of them, with the same learning rate and as many completions each."""
    pairs = protocol.sequences // 2
    common: dict[str, Any] = {"lr": protocol.lr, "weight_decay": 0.0, "grad_clip": 1.0, "scheduler": Scheduler.CONSTANT}
    on_rows: dict[str, Any] = {**common, "epochs": 10, "max_steps": protocol.steps}
    online: dict[str, Any] = {**common, "epochs": 1_000, "max_steps": protocol.steps}
    value: dict[str, Any] = {
        **common,
        "epochs": 1,
        "validation_share": 0.0,
        "guidance": Guidance(eta=protocol.eta, top_k=protocol.top_k),
    }
    groups = protocol.sequences // protocol.group
    return {
        "next-token": Method(sft.SFT(sft.Options(**on_rows, batch_size=protocol.sequences)), true_paths),
        "REINFORCE": Method(
            reinforce.Reinforce(reinforce.ReinforceOptions(**online, batch_size=protocol.sequences)), nothing
        ),
        "RPO": Method(dpo.DPO(dpo.Options(**on_rows, beta=protocol.beta, rpo_weight=1.0, batch_size=pairs)), as_pairs),
        "DPO": Method(dpo.DPO(dpo.Options(**on_rows, beta=protocol.beta, batch_size=pairs)), as_pairs),
        "GRPO": Method(
            grpo.GRPO(
                grpo.GRPOOptions(
                    **online, batch_size=groups, samples_per_prompt=protocol.group, kl_coef=protocol.kl_coef
                )
            ),
            nothing,
        ),
        "CD": Method(cd.ControlledDecoding(cd.CDOptions(**value, batch_size=protocol.sequences)), both_paths),
        "Q#": Method(qsharp.QSharp(qsharp.QSharpOptions(**value, batch_size=protocol.sequences)), both_paths),
        "PITA": Method(pita.PITA(pita.PITAOptions(**value, batch_size=pairs, samples_per_example=4)), None),
    }


def nothing(_: Shared) -> Sequence[Row]:
    """Of methods that draw while they train."""
    return ()


def as_pairs(shared: Shared) -> Sequence[Row]:
    """True path preferred to wrong path."""
    return shared.pairs


def true_paths(shared: Shared) -> Sequence[Row]:
    """The chosen ones."""
    return [_rollout(each, 0) for each in shared.pairs]


def both_paths(shared: Shared) -> Sequence[Row]:
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


def share(protocol: Protocol, seed: int, base: Path, task: StarGraphs, folder: Path) -> Shared:
    """The graphs and the pairs of a base, drawn once and kept in the folder."""
    policy = Policy(str(base))
    problems = task.problems(Split.TRAIN, None, 0)
    path = folder / "pairs.jsonl"
    if not path.exists():
        algorithm = dpo.DPO(dpo.Options(pairing=dpo.Pairing.ANSWER))
        rows = list(algorithm.collect(_collecting(protocol, seed, policy, task, problems)))
        atomic_write(path, "".join(json.dumps(each.to_dict()) + "\n" for each in rows).encode())
    pairs = [Comparison.from_dict(json.loads(line)) for line in path.read_text().splitlines()]
    return Shared(protocol, seed, policy, task, problems, pairs)


def _sampling(protocol: Protocol, seed: int, *, top_k: int = 0) -> Sampling:
    return Sampling(
        max_new_tokens=protocol.length + 1, temperature=1.0, top_k=top_k, batch_size=256, seed=10_000 + seed
    )


def _collecting(
    protocol: Protocol, seed: int, policy: Policy, task: StarGraphs, problems: Sequence[Problem]
) -> Collecting:
    return Collecting(
        task=task,
        problems=problems,
        policy=policy,
        reference=policy,
        round=0,
        sampling=_sampling(protocol, seed),
        precision=Precision(dtype="float32"),
        device="cpu",
        reward_batch_size=256,
    )


def is_done(folder: Path) -> bool:
    """Whether a method has been run in this folder."""
    return (folder / "done.json").exists()


def run_method(shared: Shared, name: str, folder: Path) -> dict[str, Any]:
    """One method from rows to test; done once, its figures lie in ``folder/done.json``."""
    done = folder / "done.json"
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text())
        return found
    method = methods(shared.protocol)[name]
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
            sampling=_sampling(shared.protocol, shared.seed),
            precision=Precision(dtype="float32"),
            device="cpu",
            seed=shared.seed,
            steps=StepOptions(micro_batch_size=shared.protocol.sequences),
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
        work = _collecting(shared.protocol, shared.seed, shared.base, shared.task, shared.problems)
        rows = list(method.algorithm.collect(work))[: shared.protocol.budget // 2]
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, "".join(json.dumps(each.to_dict()) + "\n" for each in rows).encode())
    return [Comparison.from_dict(json.loads(line)) for line in path.read_text().splitlines()]


def tested(shared: Shared, name: str, policy: Policy, folder: Path) -> list[dict[str, Any]]:
    """What a policy earns on the test's graphs, a guided one at each eta."""
    protocol = shared.protocol
    evaluation = evaluate(
        Evaluating(
            about=About(
                algorithm=REFERENCE if name == "base" else name,
                dataset="star_graph",
                evaluated_on="star_graph",
                family=protocol.name,
                round=None if name == "base" else 0,
                seed=shared.seed,
            ),
            policy=policy,
            reference=shared.base,
            task=shared.task,
            folder=folder,
            options=EvaluationOptions(samples=1, etas=ETAS if policy.guide is not None else ()),
            sampling=_sampling(protocol, shared.seed, top_k=protocol.top_k),
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
