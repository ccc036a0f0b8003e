"""What a step keeps: predicted and counted, on transformers' own models, whose tensors are fake where they can be."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuherd.models.describe.description import Architecture, Block, Peaks, Role, SharedInput, Tensor, TrainingPeaks
from gpuherd.models.memory.kv_cache import Reserve
from gpuherd.models.memory.training import TrainingTask, training_usage
from gpuherd.models.memory.training_activations import Kept, kept_by
from gpuherd.models.memory.training_job import LoraShape, Method, TrainingJob, TrainingPrecision, TrainingUsage
from gpuherd.models.memory.training_states import training_model
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.training import make_training_plan

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.models.memory.training_meter import Measured, Meter, autocast, fake, measure  # noqa: E402
from tests.models.memory.training_models import (  # noqa: E402
    CONFIGS,
    EAGER,
    EXPERTS,
    architecture,
    config_of,
    model_of,
)

from gpuherd.models.describe.peaks import LikeCuda  # noqa: E402

BATCH, TOKENS = 2, 256
NARROW = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4}
NOTHING = Reserve(0, 0, 0.0)
BIG = GpuSpec("0", "big", 1 << 50, 1 << 50)
PRECISIONS = list(TrainingPrecision)


def step_of(
    config: Any,
    precision: TrainingPrecision,
    checkpointing: bool,
    **more: Any,
) -> TrainingUsage:
    job = TrainingJob(
        precision=precision,
        batch=BATCH,
        prompt_tokens=TOKENS // 2,
        new_tokens=TOKENS - TOKENS // 2,
        checkpointing=checkpointing,
        **more,
    )
    return training_usage(architecture(config), job, NOTHING, BIG)


def counted(config: Any, precision: TrainingPrecision, checkpointing: bool, *, eager: bool = False) -> Measured:
    dtype = torch.bfloat16 if precision is TrainingPrecision.BF16 else torch.float32
    with fake():
        model, ids = model_of(config, dtype, eager=eager), torch.zeros(BATCH, TOKENS, dtype=torch.long)
        return measure(model, ids, mixed=precision is TrainingPrecision.MIXED, checkpointing=checkpointing)


def beyond_states(usage: TrainingUsage) -> int:
    """The most of forward and backward pass, beyond parameters and optimiser states."""
    learning = [moment for moment in usage.moments if moment.name not in ("optimiser step", "generating")]
    return max(moment.total - moment.parameters - moment.quantisation - moment.optimiser for moment in learning)


# Llama in bfloat16 is one of every family, below, and its bounds are narrower there.
OFTEN_MEASURED = {("llama", "mixed", True)}


@pytest.mark.parametrize(
    ("family", "precision", "checkpointing"),
    [
        pytest.param(*each, marks=[] if each in OFTEN_MEASURED else pytest.mark.slow)
        for each in itertools.product(("llama", "gpt2"), PRECISIONS, (False, True))
    ],
)
def test_the_peak_is_predicted_within_a_tenth(family: str, precision: TrainingPrecision, checkpointing: bool) -> None:
    config = config_of(family)
    real = counted(config, precision, checkpointing)
    assert beyond_states(step_of(config, precision, checkpointing)) == pytest.approx(
        max(real.forward, real.backward), rel=0.1
    )


# One of each kind of layer; the others are slow tests.
OFTEN = {
    *((family, "bf16", False) for family in ("llama", "falcon", "mixtral")),
    *((family, "mixed", True) for family in ("gpt2", "falcon", "opt")),
}
MIXED = [family for family in CONFIGS if family not in EXPERTS]


@pytest.mark.parametrize(
    ("family", "precision", "checkpointing"),
    [
        pytest.param(*each, marks=[] if each in OFTEN else pytest.mark.slow)
        for each in [
            *((family, TrainingPrecision.BF16, False) for family in CONFIGS),
            *((family, TrainingPrecision.MIXED, True) for family in MIXED),
        ]
    ],
)
def test_the_peak_of_every_family(family: str, precision: TrainingPrecision, checkpointing: bool) -> None:
    """Measured in one layer of each kind, at other lengths."""
    config = config_of(family, layers=2 if family == "mamba" else 6)
    with LikeCuda() if family == "deepseek_v3" else contextlib.nullcontext():  # keys and values that differ in size
        real = counted(config, precision, checkpointing, eager=family in EAGER)
    ours = beyond_states(step_of(config, precision, checkpointing))
    least = 1 - 1e-6  # the loss itself is not planned
    assert least < ours / max(real.forward, real.backward) < (1.6 if family.startswith("mamba") else 1.1)


def test_a_large_vocabulary_makes_the_loss_the_fullest_moment() -> None:
    config = config_of("llama", layers=2, vocab=64_000)
    real = counted(config, TrainingPrecision.BF16, True)
    usage = step_of(config, TrainingPrecision.BF16, True)
    assert usage.fullest.name == "loss"
    assert usage.fullest.logits == 3 * 4 * 64_000 * BATCH * TOKENS
    assert beyond_states(usage) == pytest.approx(max(real.forward, real.backward), rel=0.05)


@pytest.mark.parametrize("number", [2, 4])
def test_scores_of_answers_take_what_a_loss_on_texts_takes(number: int) -> None:
    """DPO, GRPO and PPO need the log-probability of each answer's token: ``log_softmax`` and ``gather``."""
    vocab, positions = 4000, 300
    job = TrainingJob(
        precision=TrainingPrecision.BF16 if number == 2 else TrainingPrecision.FP32,
        method=Method.GRPO,
        new_tokens=positions - 1,
    )
    usage = training_usage(architecture(config_of("llama", vocab=vocab)), job, NOTHING, BIG)
    with fake(), Meter() as meter:
        hidden = torch.zeros(positions, 8, requires_grad=True, dtype=torch.bfloat16 if number == 2 else torch.float32)
        head = torch.zeros(vocab, 8, dtype=hidden.dtype)
        tokens = torch.zeros(positions, 1, dtype=torch.long)
        before = meter.now
        chosen = (hidden @ head.T).float().log_softmax(-1).gather(-1, tokens)
        chosen.sum().backward()
        assert usage.most("logits") == pytest.approx(meter.peak - before, rel=0.01)


def test_answers_are_generated_beside_autocasts_copies() -> None:
    """They are made where gradients aren't wanted too, because the parameters want them."""
    config = config_of("llama", layers=4, vocab=500)
    with fake():
        model, ids = model_of(config, torch.float32), torch.zeros(1, 2, dtype=torch.long)
        with Meter() as meter:
            for parameter in model.parameters():
                meter.add(parameter)
            before = meter.now
            with torch.no_grad(), autocast():
                model(input_ids=ids)
            real = meter.peak - before
    job = TrainingJob(Method.GRPO, prompt_tokens=1, new_tokens=1)
    moment = training_usage(architecture(config), job, NOTHING, BIG).moments[0]
    assert moment.name == "generating"
    assert moment.copies == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("precision", [TrainingPrecision.MIXED, pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_reference_answers_while_the_models_own_pass_is_kept(precision: str) -> None:
    """DPO as it is written everywhere: the model's log-probabilities, then the reference's, then the loss."""
    vocab, config = 32_000, config_of("llama", layers=2, vocab=32_000)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with fake():
        model, reference = model_of(config, dtype).train(), model_of(config, dtype).eval().requires_grad_(False)
        ids = torch.zeros(2 * BATCH, TOKENS, dtype=torch.long)

        def scores(of: Any) -> Any:
            with autocast() if precision == "mixed" else contextlib.nullcontext():
                logits = of(input_ids=ids, use_cache=False).logits
            return logits.float().log_softmax(-1).gather(-1, ids[..., None]).sum(1)

        with Meter() as meter:
            for parameter in (*model.parameters(), *reference.parameters()):
                meter.add(parameter)
            before = meter.now
            own = scores(model)
            with torch.no_grad():
                others = scores(reference)
            (own - others).sigmoid().log().mean().backward()
            real = meter.peak - before
    job = TrainingJob(Method.DPO, precision=TrainingPrecision(precision), batch=BATCH, checkpointing=False)
    job = replace(job, prompt_tokens=TOKENS // 2, new_tokens=TOKENS // 2)
    usage = training_usage(architecture(config), job, NOTHING, BIG)
    assert usage.fullest.name == "reference"
    assert usage.fullest.logits == 14 * vocab * 2 * BATCH * TOKENS
    assert beyond_states(usage) - usage.most("models") == pytest.approx(real, rel=0.03)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT 0.21 asks for it
def test_a_base_in_4_bits_keeps_what_is_predicted(tmp_path: Path) -> None:
    """QLoRA for real: bitsandbytes' modules under PEFT's adapter, on the CPU."""
    peft, _ = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = config_of("llama", layers=5, vocab=500, **NARROW)
    model_of(config, torch.bfloat16).save_pretrained(tmp_path)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=four, dtype=torch.bfloat16)
    shape = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    real = measure(peft.get_peft_model(model, shape), ids, mixed=True, mask=mask)
    usage = step_of(config, TrainingPrecision.MIXED, False, lora=LoraShape(8), base=Precision.NF4)
    assert beyond_states(usage) == pytest.approx(max(real.forward, real.backward), rel=0.15)


def test_activations_grow_with_layers_and_checkpoints_with_their_inputs_alone() -> None:
    few, many = config_of("llama", layers=2), config_of("llama", layers=6)
    for checkpointing in (False, True):
        real = [counted(config, TrainingPrecision.BF16, checkpointing).kept for config in (few, many)]
        ours = [step_of(config, TrainingPrecision.BF16, checkpointing).moments[0].activations for config in (few, many)]
        # The result of a layer is counted with it, which the next layer's norm may keep as a copy in float32 alone.
        assert 0.999 < (ours[1] - ours[0]) / (real[1] - real[0]) < 1.05


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT 0.21 asks for it
@pytest.mark.parametrize(
    ("precision", "targets"),
    [
        (TrainingPrecision.MIXED, ("all-linear",)),
        (TrainingPrecision.BF16, ("q_proj", "v_proj")),
        pytest.param(TrainingPrecision.MIXED, ("q_proj", "v_proj"), marks=pytest.mark.slow),
        pytest.param(TrainingPrecision.BF16, ("all-linear",), marks=pytest.mark.slow),
        pytest.param(TrainingPrecision.FP32, ("q_proj", "v_proj"), marks=pytest.mark.slow),
        pytest.param(TrainingPrecision.FP32, ("all-linear",), marks=pytest.mark.slow),
    ],
)
def test_an_adapter_keeps_less(precision: TrainingPrecision, targets: tuple[str, ...]) -> None:
    """Real tensors: PEFT exchanges those of its modules, which fake ones don't allow."""
    config = config_of("llama", layers=5, vocab=500, **NARROW)
    real = measured_with_lora(config, precision, targets)
    usage = step_of(config, precision, False, lora=LoraShape(8, targets))
    assert beyond_states(usage) == pytest.approx(max(real.forward, real.backward), rel=0.1)


def measured_with_lora(config: Any, precision: TrainingPrecision, targets: tuple[str, ...]) -> Measured:
    peft = pytest.importorskip("peft")
    dtype = torch.float32 if precision is TrainingPrecision.FP32 else torch.bfloat16
    wanted = "all-linear" if targets == ("all-linear",) else list(targets)
    shape = peft.LoraConfig(r=8, target_modules=wanted, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model_of(config, dtype), shape)
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    return measure(model, ids, mixed=precision is TrainingPrecision.MIXED, mask=mask)


def test_eager_attention_keeps_every_score() -> None:
    config = config_of("llama")
    with fake():
        model, ids = model_of(config, torch.bfloat16, eager=True), torch.zeros(BATCH, TOKENS, dtype=torch.long)
        real = measure(model, ids)
    usage = step_of(config, TrainingPrecision.BF16, False, attention="eager")
    assert beyond_states(usage) == pytest.approx(max(real.forward, real.backward), rel=0.1)


def test_quantised_base_keeps_what_a_16_bit_one_keeps() -> None:
    config = config_of("llama")
    lora = LoraShape(8)
    plain = step_of(config, TrainingPrecision.MIXED, False, lora=lora)
    nf4 = step_of(config, TrainingPrecision.MIXED, False, lora=lora, base=Precision.NF4)
    assert nf4.most("activations") == plain.most("activations")
    assert nf4.fullest.quantisation > 0
    assert nf4.total < plain.total


def test_waiting_for_more_passes_keeps_gradients() -> None:
    """Gradients lie there through all passes but the first, and a new one beside the old before it is added."""
    config = config_of("llama", layers=3, vocab=500, hidden_size=128, intermediate_size=352, num_attention_heads=4)
    model, ids = model_of(config, torch.float32), torch.zeros(BATCH, TOKENS, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
    real = measure(model, ids, mask=mask)
    usage = step_of(config, TrainingPrecision.FP32, False, accumulation=2)
    assert beyond_states(usage) == pytest.approx(gradients + max(real.forward, real.backward), rel=0.1)


def test_a_model_that_was_not_measured_is_counted_twice_by_its_shapes() -> None:
    job, measured = TrainingJob(checkpointing=False), architecture(config_of("llama"))
    headers = replace(measured, peaks={}, around={}, model_type="new")
    layers = [TrainingTask(training_model(each), job).kept.whole for each in (measured, headers)]
    assert layers[1] == pytest.approx(2 * layers[0], rel=0.1)
    plan = make_training_plan(headers, (BIG,), job)
    assert any("how new computes its layers was not measured" in sentence for sentence in plan.warnings)
    assert not any("was not measured" in sentence for sentence in make_training_plan(measured, (BIG,), job).warnings)


# --- what plans add to measured layers --------------------------------------------------------------------------------


def measured_layer(quadratic: float = 0.0) -> Architecture:
    """One layer of made-up figures: 100 bytes a token, whole or frozen."""
    names = [".attn.q_proj.weight", ".attn.k_proj.weight", ".attn.o_proj.weight"]
    tensors = tuple(Tensor(f"h.0{name}", (8, 8), Role.LINEAR) for name in names)
    step = TrainingPeaks((0, 100, quadratic), (0, 16, 0), ((0, 30, 0), (7, 0, 1)))
    inputs = (SharedInput((names[0], names[1])), SharedInput((names[2],), kept=True))
    keys = [f"{kind}-{precision}" for kind in ("whole", "frozen") for precision in PRECISIONS]
    peaks = Peaks({}, {}, fill=64, training=dict.fromkeys(keys, step), inputs=inputs)
    blocks = (Block("h.0", "layer", tensors, peaks="h.0"), Block("head", "head", ()))
    return Architecture("m", "m", None, blocks, 8, 8, 9, 2, peaks={"h.0": peaks}, around=dict.fromkeys(keys, (0, 7, 0)))


def kept(job: TrainingJob, quadratic: float = 0.0) -> Kept:
    architecture = measured_layer(quadratic)
    return kept_by(architecture.blocks[0], architecture, replace(job, prompt_tokens=32, new_tokens=32))


def test_a_layer_keeps_what_was_measured_at_whole_chunks() -> None:
    layer = kept(TrainingJob())
    assert (layer.whole, layer.entry) == (6400, 16 * 64)
    architecture = measured_layer()
    short = TrainingJob(prompt_tokens=1, new_tokens=1)
    assert kept_by(architecture.blocks[0], architecture, short).whole == 6400
    assert TrainingTask(training_model(architecture), short).kept.outside == 14


def test_gradients_of_a_layer_lie_beside_the_largest_operation_once() -> None:
    """Those of parameters are of a whole batch, what else an operation needs of each sequence."""
    layer = kept(TrainingJob())
    assert layer.passing(3, gradients=True) == 3 * 64 * 64 + 7
    assert layer.passing(3, gradients=False) == 3 * 64 * 64
    once = training_usage(measured_layer(), TrainingJob(), NOTHING, BIG)
    again = training_usage(measured_layer(), TrainingJob(accumulation=2), NOTHING, BIG)
    tokens, gradient = TrainingJob().tokens, 8 * 8 * 4
    assert [usage.most("workspace") for usage in (once, again)] == [tokens**2 + 7, tokens**2 + gradient]


def test_an_adapter_adds_its_cast_inputs() -> None:
    """In float32 nothing is cast: what both projections read is kept once, and what was kept anyway not again."""
    lora = LoraShape(2, ("q_proj", "k_proj", "o_proj"))
    added = {
        precision: (kept(TrainingJob(precision=precision, lora=lora)).whole - 6400) // 64 for precision in PRECISIONS
    }
    assert added == {"fp32": 3 * 2 * 4 + 8 * 4, "mixed": 3 * 2 * 2 + 3 * 8 * 2, "bf16": 3 * 2 * 4 + 3 * 8 * 4}
    int8 = kept(TrainingJob(lora=lora, base=Precision.INT8)).whole - kept(TrainingJob(lora=lora)).whole
    assert int8 == 2 * 8 * 2 * 64


def test_scores_are_added_where_they_were_not_measured() -> None:
    job = TrainingJob(precision=TrainingPrecision.BF16, attention="eager")
    assert kept(job).whole - 6400 == 2 * (4 + 2) * 64 * 64
    assert kept(job, quadratic=12).whole == 6400 + 12 * 64 * 64
