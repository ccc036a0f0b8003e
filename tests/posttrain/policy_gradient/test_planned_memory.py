"""A real training of GRPO and PPO holds what is planned for it: every tensor that torch makes is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.memory.training_meter import Meter
from tests.posttrain import tiny
from tests.posttrain.algos.training_work import work
from tests.posttrain.letters import Letters

from gpuherd.models.describe.reading import read_for_training
from gpuherd.models.memory.kv_cache import Reserve
from gpuherd.models.memory.training import training_usage
from gpuherd.models.memory.training_job import TrainingUsage
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.resources import read_with_precision
from gpuherd.posttrain.engine.train_engine import TrainEngine
from gpuherd.posttrain.learning.prepare import training_task
from gpuherd.posttrain.learning.settings import TrainSettings, settings_of
from gpuherd.posttrain.policy_gradient.rollout_trainer import RolloutTrainer
from gpuherd.posttrain.rollout.lengths import Lengths
from gpuherd.posttrain.runs.memory import PLAIN_HEADS
from gpuherd.posttrain.types import Problem, Sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
PROMPT, NEW, GENERATED = 60, 24, 16
LORA = {"use_lora": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
BF16 = {"use_bf16": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in two types, wide enough that tensors of a few bytes are nothing beside it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wide = tiny.tiny_llama(tmp_path_factory.mktemp("wide"), width=192, layers=4)
    half = tmp_path_factory.mktemp("half")
    AutoModelForCausalLM.from_pretrained(wide, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(wide).save_pretrained(half)
    return {"float32": wide, "bfloat16": half}


@contextmanager
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Bytes at most while answers are generated, asked and learnt from."""
    peaks: dict[str, int] = {}
    with Meter() as meter:

        def counted(kind: Any, name: str, moment: str) -> None:
            inside = getattr(kind, name)

            def outside(*given: Any, **words: Any) -> Any:
                meter.peak = meter.now
                made = inside(*given, **words)
                if moment:
                    peaks[moment] = max(peaks.get(moment, 0), meter.peak)
                else:
                    trainer = given[0]
                    others = [] if trainer._reference is None else trainer._reference.module.parameters()
                    for tensor in (*trainer.trainee.plain.parameters(), *trainer.trainee.plain.buffers(), *others):
                        meter.add(tensor)
                return made

            monkeypatch.setattr(kind, name, outside)

        counted(RolloutTrainer, "__init__", "")
        counted(RolloutTrainer, "rollouts", "generating")
        counted(RolloutTrainer, "score", "weighing")
        counted(RolloutTrainer, "ref_logprobs", "weighing")
        counted(TrainEngine, "step", "learning")
        yield peaks


@pytest.mark.parametrize(
    ("algorithm", "stored", "model", "training"),
    [
        ("grpo", "bfloat16", {}, BF16),
        ("grpo", "bfloat16", LORA, BF16),
        ("grpo", "float32", LORA, BF16),
        ("grpo", "float32", {}, {}),
        ("ppo", "bfloat16", {}, BF16),
        ("ppo", "bfloat16", LORA, {}),
    ],
)
def test_a_training_holds_what_is_planned(
    algorithm: str,
    stored: str,
    model: dict[str, Any],
    training: dict[str, Any],
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = settings_of(
        {
            "policy_env": {"dataset": "arithmetic"},
            "training": {
                "algorithm": algorithm,
                "num_rollouts_per_iteration": GENERATED,
                "batch_size": GENERATED,
                "micro_batch_size": 4,
                "num_iterations": 2,
                "max_episode_length": NEW,
                **training,
            },
            "model": {
                "model_name_or_path": str(models[stored]),
                "max_new_tokens": NEW,
                "generation_batch_size": GENERATED,
                **model,
            },
            "grpo": {"group_size": 4},
        },
    )
    usage = planned(told)
    problems = [Problem(f"p{number}", "q" * PROMPT) for number in range(GENERATED)]
    given = work(models[stored], tmp_path, precision=told.precision)
    sampling = Sampling(max_new_tokens=NEW, batch_size=GENERATED)
    given = replace(given, task=Letters(), problems=problems, sampling=sampling, steps=told.steps(1))
    with measured(monkeypatch) as real:
        told.with_problems(len(problems)).make().train(given)
    of_moments = {moment.name: moment.total for moment in usage.moments}
    ours: dict[str, int] = {name: of_moments.pop(name) for name in ("generating", "weighing") if name in of_moments}
    ours["learning"] = max(of_moments.values())
    assert real.keys() == ours.keys()
    assert real["generating"] <= ours["generating"]  # a group shares the keys and values of its prompt, as plans don't
    assert real["weighing"] <= ours["weighing"] < 1.4 * real["weighing"]
    assert real["learning"] == pytest.approx(ours["learning"], rel=0.1)  # as in tests/models/memory


def planned(told: TrainSettings) -> TrainingUsage:
    """As ``need_of`` plans it, without what is kept free."""
    precision, name = told.precision, told.model
    architecture, trained = read_with_precision(name, precision.dtype, read_for_training)
    frozen = read_with_precision(name, precision.frozen.dtype)[1]
    chunked = architecture.model_type in PLAIN_HEADS
    job = training_task(told, (), 1, Lengths(PROMPT, None, 1, "")).job(trained, frozen, chunked=chunked)
    return training_usage(architecture, job, Reserve(0, 0, 0.0), GpuSpec("0", "big", 1 << 50, 1 << 50))
