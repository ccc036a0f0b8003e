"""Every number that an algorithm is told has a range, and what lies outside of it is refused by its key."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator

import pytest

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class, algorithms
from gpuherd.posttrain.config.typed import read

Path = tuple[str, ...]
# What may be 0 (nothing, never, no weight) and what may be below.
FROM_0 = {
    *("weight_decay", "warmup_steps", "num_workers", "bc_weight", "world_model_weight", "label_smoothing"),
    *("rpo_weight", "kl_coef", "entropy_coef", "gamma", "gae_lambda", "validation_share", "lora.dropout"),
    *("first_cut", "on_policy", "Distill.beta", "max_resample_times"),
}
ANY = {"min_reward_threshold", "correct_bonus", "V_min"}
# What has no default.
NEEDED: dict[str, dict[str, object]] = {"Distill": {"teacher": "model"}}
# Infinity leaves the reference as it is.
INFINITE = {"guidance.eta"}


def numbers(kind: type, before: Path = ()) -> Iterator[tuple[Path, type]]:
    """The fields that are numbers, with those of blocks in them."""
    annotations = typing.get_type_hints(kind)
    for each in dataclasses.fields(kind):
        annotation = annotations[each.name]
        is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        for inner in typing.get_args(annotation) if is_union else (annotation,):
            if inner in (int, float):
                yield (*before, each.name), inner
            elif dataclasses.is_dataclass(inner):
                yield from numbers(typing.cast(type, inner), (*before, each.name))


def nested(path: Path, value: float) -> dict[str, object]:
    return {path[0]: value if len(path) == 1 else nested(path[1:], value)}


@pytest.mark.parametrize("name", algorithms())
def test_numbers_out_of_range_are_refused_by_their_keys(name: str) -> None:
    options = algorithm_class(name).Options
    found = list(numbers(options))
    assert len(found) > 10
    for path, kind in found:
        key = ".".join(path)
        wrong: list[float] = [] if key in ANY else [-1] if {key, f"{name}.{key}"} & FROM_0 else [-1, 0]
        if kind is float and key not in INFINITE:
            wrong.append(math.inf)
        for value in wrong:
            with pytest.raises(UsageError) as refused:
                values = nested(path, float(value) if kind is float else value)
                read(options, {**NEEDED.get(name, {}), **values}, f"algos.{name}")
            said = str(refused.value)
            assert said.startswith(f"algos.{name}.{key}=") or f"{path[-1]}=" in said.partition(";")[0], said


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("GRPO", {"num_iterations": 0}, "algos.GRPO.num_iterations=0; the least is 1"),
        ("GRPO", {"num_iterations": -(10**400)}, "algos.GRPO.num_iterations=-1000"),
        ("GRPO", {"lr": 10**400}, "algos.GRPO.lr=inf; it is above 0"),
        ("GRPO", {"clip_range": -0.2}, "algos.GRPO.clip_range=-0.2; it is above 0, and at most 1"),
        ("GRPO", {"clip_range": 1.5}, "algos.GRPO.clip_range=1.5"),
        ("GRPO", {"clip_range_high": -0.1}, "algos.GRPO.clip_range_high=-0.1; it is above 0"),
        (
            "GRPO",
            {"clip_range_c": 1.1},
            "algos.GRPO.clip_range_c=1.1; the clip holds positive advantages at",
        ),
        (
            "GRPO",
            {"max_resample_times": 1, "online": False},
            "algos.GRPO.max_resample_times=1 with online=false: what was collected can't be drawn again",
        ),
        ("PPO", {"loss_type": "gspo"}, "algos.PPO.loss_type=gspo: it clips the ratio of whole answers"),
        ("RLOO", {"num_iterations": 0}, "algos.RLOO.num_iterations=0; the least is 1"),
        ("Distill", {}, "algos.Distill.teacher is missing"),
        ("GRPO", {"samples_per_prompt": 1}, "algos.GRPO.samples_per_prompt=1; an answer alone in its group"),
        ("PPO", {"clip_range_vf": 0}, "algos.PPO.clip_range_vf=0.0; it is above 0"),
        ("PPO", {"gae_lambda": 1.1}, "algos.PPO.gae_lambda=1.1; the least is 0, and the most 1"),
        ("PPO", {"target_kl": -1}, "algos.PPO.target_kl=-1.0"),
        ("REINFORCE", {"entropy_coef": -1}, "algos.REINFORCE.entropy_coef=-1.0; the least is 0"),
        ("DPO", {"lora": {"r": 0}}, "algos.DPO.lora.r=0; the least is 1"),
        ("QSharp", {"num_atoms": 1}, "algos.QSharp.num_atoms=1; the least is 2"),
    ],
)
def test_ranges_are_told_with_the_whole_key(name: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(algorithm_class(name).Options, values, f"algos.{name}")
    assert str(refused.value).startswith(message)


def test_the_ends_of_ranges_are_allowed() -> None:
    read(
        algorithm_class("GRPO").Options,
        {"clip_range": 1.0, "max_resample_times": 0, "samples_per_prompt": 2, "entropy_coef": 0},
    )
    read(algorithm_class("PPO").Options, {"clip_range_vf": None, "gamma": 0, "gae_lambda": 1})
    read(algorithm_class("REINFORCE").Options, {"samples_per_prompt": 1})
