"""Losses by chunked log-probs hold no more than is planned for them, and far less than whole logits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.models.memory.training_meter import Meter, autocast
from tests.models.memory.training_models import architecture
from tests.posttrain.policy_gradient.rollouts import rollout

from gpuherd.models.memory.kv_cache import Reserve
from gpuherd.models.memory.training import training_usage
from gpuherd.models.memory.training_job import Method, TrainingJob, TrainingPrecision
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.posttrain.algos import distill
from gpuherd.posttrain.engine import log_probs
from gpuherd.posttrain.engine.log_probs import CHUNK_NUMBERS, _ends_with, _head_of, token_log_probs
from gpuherd.posttrain.engine.options import StepOptions
from gpuherd.posttrain.policy_gradient.algorithm import ASKED_AT_ONCE, LossType
from gpuherd.posttrain.runs import memory
from gpuherd.posttrain.runs.blocks import ModelPair
from gpuherd.posttrain.runs.memory import PLAIN_HEADS, TrainingTask
from gpuherd.posttrain.runs.settings import algorithm_configs
from gpuherd.posttrain.types import Precision as Loading

NOTHING, BIG = Reserve(0, 0, 0.0), GpuSpec("0", "big", 1 << 50, 1 << 50)
VOCABULARY, HIDDEN, PROMPT, NEW, ROWS = 8000, 64, 16, 48, 4


def llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=PROMPT + NEW, tie_word_embeddings=False,
    )  # fmt: skip


@pytest.mark.parametrize("precision", list(TrainingPrecision))
@pytest.mark.parametrize("method", [Method.SFT, Method.DPO, Method.GRPO])
@pytest.mark.parametrize("positions", [24, 1000])  # many chunks, or one that is kept for the backward pass
def test_a_chunked_loss_holds_what_is_planned(
    positions: int, method: Method, precision: TrainingPrecision, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(log_probs, "CHUNK_NUMBERS", positions * VOCABULARY)
    config = llama()
    models = [AutoModelForCausalLM.from_config(config) for _ in range(2 if method is Method.DPO else 1)]
    if precision is TrainingPrecision.BF16:
        models = [each.to(torch.bfloat16) for each in models]
    ids = torch.randint(0, VOCABULARY, (ROWS, PROMPT + NEW))
    mask = torch.ones_like(ids)
    wanted = mask.bool()
    wanted[:, : PROMPT if method.generates else 0] = False
    mixed = precision is TrainingPrecision.MIXED

    def forward(model: Any) -> torch.Tensor:
        return token_log_probs(model, ids, mask, wanted, entropy_gradient=True).log_probs.sum()

    with torch.no_grad():
        for model in models:
            forward(model)  # the head is looked at once
    with Meter() as meter:
        for tensor in (*(each for model in models for each in model.parameters()), ids, mask, wanted):
            meter.add(tensor)
        with autocast() if mixed else nullcontext():
            loss = forward(models[0])
            with torch.no_grad():
                for reference in models[1:]:
                    forward(reference)
        loss.backward()  # type: ignore[no-untyped-call]
        real = meter.peak

    def planned(**loss: Any) -> int:
        job = TrainingJob(
            method=method, precision=precision, batch=ROWS // len(models), prompt_tokens=PROMPT, new_tokens=NEW,
            checkpointing=False, reference=len(models) > 1, sampled=1, **loss,
        )  # fmt: skip
        found = training_usage(architecture(config), job, NOTHING, BIG)
        learning = [each for each in found.moments if each.name not in ("generating", "optimiser step")]
        return max(each.total - each.optimiser for each in learning)

    ours, whole = planned(loss="chunked", chunk=positions * VOCABULARY), planned(loss="whole")
    assert real <= ours
    assert ours < 1.35 * real
    if positions < ROWS * NEW:  # else the chunk is the whole logits
        assert ours - real < whole - real


@pytest.mark.parametrize("positions", [24, 1000])
def test_laws_that_are_compared_in_chunks_hold_what_is_planned(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Distill adds to a training whose log-probs are chunked: the teacher, and what ``Memory`` counts of laws."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(log_probs, "CHUNK_NUMBERS", positions * VOCABULARY)
    monkeypatch.setattr(distill, "_CHUNK", positions * VOCABULARY // 4)
    config = llama()
    policy, teacher = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    answer = tuple(range(5, 5 + NEW))
    rollouts = [rollout(range(5, 5 + PROMPT), answer, problem=f"p{number}") for number in range(ROWS)]
    how = distill.Distillation(policy, teacher.requires_grad_(False), "cpu", 1.0, LossType.DAPO, NEW, 0.5)
    how.loss(rollouts[:1])  # heads are looked at once
    with Meter() as meter:
        weights = [each for model in (policy, teacher) for each in model.parameters()]
        for tensor in weights:
            meter.add(tensor)
        how.loss(rollouts).total.backward()  # type: ignore[no-untyped-call]
        real = meter.peak
    job = TrainingJob(
        method=Method.GRPO, precision=TrainingPrecision.FP32, batch=ROWS, prompt_tokens=PROMPT, new_tokens=NEW,
        checkpointing=False, reference=False, sampled=1, loss="chunked", chunk=positions * VOCABULARY,
    )  # fmt: skip
    moments = training_usage(architecture(config), job, NOTHING, BIG).moments
    alone = max(each.total - each.optimiser for each in moments if each.name not in ("generating", "optimiser step"))
    compared = memory._COMPARED // CHUNK_NUMBERS * positions * VOCABULARY
    logits = 4 * min(positions, ROWS * NEW) * VOCABULARY
    planned = alone + sum(each.nbytes for each in teacher.parameters()) + compared + logits
    assert real <= planned
    if positions < ROWS * NEW:
        assert planned < 1.35 * real
        assert real < planned - compared - logits + 4 * ROWS * NEW * VOCABULARY  # less than one law of all tokens


def test_logits_of_the_types_that_are_planned_so_are_what_their_head_answers() -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    small: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 16, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    }  # fmt: skip
    for name in sorted(PLAIN_HEADS):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**small))
        assert _ends_with(model, _head_of(model)), name


@pytest.mark.parametrize(
    ("algorithm", "options", "weighs"),
    [
        ("GRPO", {"kl_coef": 0.0}, False),
        ("GRPO", {}, True),
        ("GRPO", {"kl_coef": 0.0, "num_iterations": 2}, True),
        ("GRPO", {"kl_coef": 0.0, "minibatch_size": 8}, True),
        ("GRPO", {"kl_coef": 0.0, "sampler_correction": "token"}, True),
        ("GRPO", {"kl_coef": 0.0, "online": False}, True),
        ("PPO", {"kl_coef": 0.0}, True),
        ("REINFORCE", {}, False),
        ("GRPO-HF", {}, True),
        ("GRPO-HF", {"kl_coef": 0.0}, False),
        ("Distill", {"teacher": "gpt2"}, False),
        ("SFT", {}, False),
    ],
)
def test_log_probs_are_planned_where_they_are_asked(algorithm: str, options: dict[str, Any], weighs: bool) -> None:
    (choice,) = algorithm_configs({algorithm: options}, {})
    task = TrainingTask(
        name="x", choice=choice, family=ModelPair("gpt2"), loaded=Loading(), steps=StepOptions(), cards=(), gpus=1,
        prompt_tokens=8, new_tokens=8, sampled=4, pairs=4,
    )  # fmt: skip
    job = task.job(Precision.FP32, Precision.FP32, chunked=True)
    assert job.weighed == (ASKED_AT_ONCE if weighs else 0)
    assert job.loss == "chunked"
