"""Plans and refusals of trainings: how many GPUs, what batch, what would fit."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.kv_cache import GIB, Reserve
from gpuherd.models.memory.training import training_usage
from gpuherd.models.memory.training_job import LoraShape, Method, Optimiser, Strategy, TrainingJob, TrainingPrecision
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.training import TrainingPlan, TrainingRefusal, make_training_plan

LLAMA_8B = read_architecture("llama-3.1-8b")
LLAMA_1B = read_architecture("llama-3.2-1b")
BF16 = TrainingPrecision.BF16


def cards(number: int, size_gb: int) -> tuple[GpuSpec, ...]:
    return tuple(GpuSpec(str(each), f"{size_gb}GB", size_gb * GIB, size_gb * GIB, (8, 0)) for each in range(number))


def planned(number: int, size_gb: int, job: TrainingJob) -> TrainingPlan:
    plan = make_training_plan(LLAMA_8B, cards(number, size_gb), job)
    assert isinstance(plan, TrainingPlan)
    return plan


def refused(number: int, size_gb: int, job: TrainingJob) -> TrainingRefusal:
    plan = make_training_plan(LLAMA_8B, cards(number, size_gb), job)
    assert isinstance(plan, TrainingRefusal)
    return plan


def test_sixteen_bytes_a_number() -> None:
    """AdamW in float32: 4 for the number, 4 for its gradient, 8 for its moments (ZeRO, arXiv 1910.02054, section 3)."""
    step = training_usage(LLAMA_8B, TrainingJob(), Reserve(), cards(1, 80)[0]).moments[-1]
    tensors = 32 * 9 + 3
    assert step.name == "optimiser step"
    assert step.total == 16 * 8_030_261_248 + 4 * tensors


def test_the_fewest_gpus_that_hold_it() -> None:
    plan = planned(8, 80, TrainingJob(strategy=Strategy.FSDP, batch=2))
    assert plan.gpus == 2
    assert make_training_plan(LLAMA_8B, cards(1, 80), TrainingJob(batch=2)).loads[0].left < 0
    assert plan.on_all is not None
    assert plan.on_all.gpus == 8
    assert plan.on_all.usage.total < plan.loads[0].usage.total
    assert plan.on_all.largest_batch > plan.largest_batch


def test_ddp_takes_all_gpus_that_fit() -> None:
    plan = planned(4, 80, TrainingJob(strategy=Strategy.DDP, lora=LoraShape()))
    assert plan.gpus == 4
    assert plan.loads[0].usage.most("exchange") == plan.loads[0].usage.most("gradients")


def test_full_ddp_says_why_it_fits_on_fewer() -> None:
    plan = planned(4, 72, TrainingJob(strategy=Strategy.DDP, precision=BF16, batch=1))
    assert plan.gpus == 1
    assert any("buckets" in sentence for sentence in plan.warnings)


def test_the_emptiest_cards_are_taken() -> None:
    used = (replace(cards(1, 80)[0], free=10 * GIB), *cards(2, 80)[1:])
    plan = make_training_plan(LLAMA_8B, used, TrainingJob(lora=LoraShape()))
    assert isinstance(plan, TrainingPlan)
    assert [load.gpu.label for load in plan.loads] == ["1"]


@pytest.mark.parametrize("gpus", [0, 3])
def test_gpus_must_be_a_number_of_cards(gpus: int) -> None:
    with pytest.raises(UsageError, match="take 1 to 2"):
        make_training_plan(LLAMA_8B, cards(2, 80), TrainingJob(), count=gpus)


def test_no_cards() -> None:
    with pytest.raises(UsageError, match="no GPUs"):
        make_training_plan(LLAMA_8B, (), TrainingJob())


def test_exactly_so_many() -> None:
    plan = make_training_plan(LLAMA_8B, cards(8, 80), TrainingJob(strategy=Strategy.FSDP), count=4)
    assert isinstance(plan, TrainingPlan)
    assert (plan.gpus, plan.on_all) == (4, None)


@settings(max_examples=30)
@given(
    batch=st.integers(1, 64),
    tokens=st.integers(1, 2000),
    size=st.integers(8, 200),
    checkpointing=st.booleans(),
    method=st.sampled_from(list(Method)),
    precision=st.sampled_from(list(TrainingPrecision)),
)
def test_the_largest_batch_is_the_largest(
    batch: int, tokens: int, size: int, checkpointing: bool, method: Method, precision: TrainingPrecision
) -> None:
    job = TrainingJob(method=method, precision=precision, batch=batch, new_tokens=tokens, checkpointing=checkpointing)
    card = cards(1, size)[0]
    plan = make_training_plan(LLAMA_1B, (card,), job)

    def total(many: int) -> int:
        return training_usage(LLAMA_1B, replace(job, batch=many), Reserve(), card).total

    if isinstance(plan, TrainingPlan):
        assert plan.largest_batch >= batch
        assert total(plan.largest_batch) <= card.free < total(plan.largest_batch + 1)
    else:
        assert plan.missing == total(batch) - card.free > 0


def test_both_ways_of_keeping_activations_are_shown() -> None:
    plan = planned(1, 141, TrainingJob(batch=1))
    assert plan.plain.most("activations") > 5 * plan.checkpointed.most("activations")
    assert plan.loads[0].usage == plan.checkpointed


def test_a_refusal_tells_what_is_missing_and_what_fits() -> None:
    refusal = refused(4, 48, TrainingJob(batch=4))
    assert refusal.missing == -refusal.loads[0].left > 0
    assert "8,030,261,248 numbers" in refusal.reason
    assert "are missing" in refusal.reason
    words = [" ".join(alternative.words) for alternative in refusal.alternatives]
    assert "--strategy fsdp" in words
    assert "--lora 16" in words


def applied(
    job: TrainingJob, words: tuple[str, ...], given: tuple[GpuSpec, ...]
) -> tuple[TrainingJob, tuple[GpuSpec, ...]]:
    """What the command line makes of an alternative."""
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--checkpointing":
            job = replace(job, checkpointing=True)
        elif word == "--gpus":
            number, size = left.pop(0).removesuffix("GB").split("x")
            given = cards(int(number), int(size))
        else:
            value = left.pop(0)
            changes = {
                "--loss": {"loss": value},
                "--strategy": {"strategy": value},
                "--optimiser": {"optimiser": value},
                "--training-precision": {"precision": value},
                "--batch": {"batch": value},
                "--accumulation": {"accumulation": value},
                "--lora": {"lora": value},
                "--dtype": {"base": value},
            }[word]
            kinds = {
                "strategy": Strategy,
                "optimiser": Optimiser,
                "precision": TrainingPrecision,
                "base": Precision,
                "batch": int,
                "accumulation": int,
                "lora": lambda rank: LoraShape(int(rank)),
                "loss": str,
            }
            job = replace(job, **{name: kinds[name](text) for name, text in changes.items()})  # type: ignore[operator]
    return job, given


@pytest.mark.parametrize(
    ("number", "size", "job"),
    [
        (4, 40, TrainingJob(batch=4)),
        (1, 24, TrainingJob(lora=LoraShape(), batch=8, checkpointing=False)),
        (2, 24, TrainingJob(method=Method.DPO, strategy=Strategy.DDP, precision=BF16)),
        (2, 80, TrainingJob(method=Method.PPO, value="model", batch=8)),
        (1, 16, TrainingJob(method=Method.GRPO, lora=LoraShape(), batch=32)),
        (2, 24, TrainingJob(strategy=Strategy.FSDP, optimiser=Optimiser.ADAFACTOR)),
    ],
)
def test_every_alternative_fits(number: int, size: int, job: TrainingJob) -> None:
    refusal = refused(number, size, job)
    assert refusal.alternatives
    for alternative in refusal.alternatives:
        changed, given = applied(job, alternative.words, cards(number, size))
        assert isinstance(make_training_plan(LLAMA_8B, given, changed), TrainingPlan), alternative


def test_a_model_that_fits_nowhere_has_no_alternative() -> None:
    huge = read_architecture("llama-3.1-405b")
    refusal = make_training_plan(huge, cards(1, 24), TrainingJob())
    assert isinstance(refusal, TrainingRefusal)
    assert refusal.alternatives == ()


class TestMethods:
    def test_dpo_asks_a_reference_and_passes_pairs(self) -> None:
        card = cards(1, 80)[0]
        sft = training_usage(LLAMA_1B, TrainingJob(precision=BF16), Reserve(), card)
        dpo = training_usage(LLAMA_1B, TrainingJob(Method.DPO, precision=BF16), Reserve(), card)
        assert dpo.fullest.models == dpo.fullest.parameters == 2 * LLAMA_1B.parameters
        first = training_usage(LLAMA_1B, TrainingJob(Method.DPO, precision=BF16, reference=False), Reserve(), card)
        assert first.most("logits") == 2 * sft.most("logits")
        assert first.most("models") == 0
        assert dpo.most("activations") == 2 * sft.most("activations")

    def test_an_adapter_needs_no_reference(self) -> None:
        for method in (Method.DPO, Method.PPO):
            job = TrainingJob(method, lora=LoraShape())
            assert training_usage(LLAMA_1B, job, Reserve(), cards(1, 80)[0]).most("models") == 0

    def test_grpo_has_a_reference_where_its_kl_has_weight(self) -> None:
        card = cards(1, 80)[0]
        for reference, models in ((None, 0), (True, 4 * LLAMA_1B.parameters)):
            job = TrainingJob(Method.GRPO, reference=reference)
            assert training_usage(LLAMA_1B, job, Reserve(), card).most("models") == models

    def test_answers_are_generated_all_at_once(self) -> None:
        """Keys and values of every answer of a step: 16 layers, 8 key heads of 64, in 16 bits, the last token never
        read back."""
        job = TrainingJob(Method.GRPO, precision=BF16, batch=4, accumulation=2, prompt_tokens=100, new_tokens=50)
        moment = training_usage(LLAMA_1B, job, Reserve(), cards(1, 80)[0]).moments[0]
        assert moment.name == "generating"
        assert moment.cache == 2 * 16 * 8 * 64 * 2 * (100 + 50 - 1) * 8
        assert moment.gradients == 0

    def test_only_answers_are_scored(self) -> None:
        job = TrainingJob(Method.GRPO, precision=BF16, prompt_tokens=1000, new_tokens=9)
        usage = training_usage(LLAMA_1B, job, Reserve(), cards(1, 80)[0])
        assert usage.most("logits") == 12 * 128_256 * 10

    def test_a_value_model_is_a_second_model_that_is_trained(self) -> None:
        card = cards(1, 80)[0]
        head = training_usage(LLAMA_1B, TrainingJob(Method.PPO, precision=BF16), Reserve(), card)
        model = training_usage(LLAMA_1B, TrainingJob(Method.PPO, precision=BF16, value="model"), Reserve(), card)
        for part in ("parameters", "gradients", "optimiser"):
            assert model.moments[-1].parts()[part] == 2 * head.moments[-1].parts()[part]
        assert model.most("models") == head.most("models")

    def test_a_reward_model_lies_whole_on_each_gpu(self) -> None:
        job = TrainingJob(Method.PPO, strategy=Strategy.FSDP)
        usage = training_usage(LLAMA_8B, job, Reserve(), cards(1, 80)[0], gpus=4, reward=LLAMA_1B)
        without = training_usage(LLAMA_8B, job, Reserve(), cards(1, 80)[0], gpus=4)
        assert usage.total - without.total == 2 * LLAMA_1B.parameters

    def test_groups_that_do_not_come_out_even_are_told(self) -> None:
        plan = make_training_plan(LLAMA_1B, cards(1, 80), TrainingJob(Method.GRPO, batch=3, samples=8, precision=BF16))
        assert any("must be a multiple" in sentence for sentence in plan.warnings)

    def test_a_chunked_loss_never_has_whole_logits(self) -> None:
        card = cards(1, 80)[0]
        whole = training_usage(LLAMA_1B, TrainingJob(batch=32, precision=BF16), Reserve(), card)
        chunked = training_usage(LLAMA_1B, TrainingJob(batch=32, precision=BF16, loss="chunked"), Reserve(), card)
        assert chunked.most("logits") < whole.most("logits") / 10


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"batch": 0}, "batch=0"),
        ({"new_tokens": -1}, "new_tokens=-1"),
        ({"accumulation": True}, "accumulation=True"),
        ({"base": Precision.NF4}, "under a LoRA adapter"),
        (
            {"base": Precision.INT8, "lora": LoraShape(), "strategy": Strategy.FSDP},
            "lie as int8",
        ),
        ({"base": Precision.AS_STORED, "lora": LoraShape(), "strategy": Strategy.FSDP}, "lie as as-stored"),
        ({"optimiser": Optimiser.ADAMW_8BIT, "strategy": Strategy.FSDP}, "can't divide the states"),
        ({"attention": "flash"}, "attention='flash': it is one of sdpa, eager"),
        ({"loss": "chunk"}, "loss='chunk'"),
        ({"value": ""}, "value=''"),
        ({"batch": 10**400}, "at most 10"),
    ],
)
def test_impossible_jobs_are_refused(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        TrainingJob(**fields)  # type: ignore[arg-type]


def test_lora_without_rank_or_targets() -> None:
    with pytest.raises(UsageError, match="rank=0"):
        LoraShape(0)
    with pytest.raises(UsageError, match="trains nothing"):
        LoraShape(8, ())


class TestWhatACardCanDo:
    V100 = GpuSpec("0", "V100", 80 * GIB, 80 * GIB, (7, 0))
    GTX_980 = GpuSpec("1", "GTX 980", 90 * GIB, 90 * GIB, (5, 2))

    def test_an_old_card_is_told_to_emulate_bfloat16(self) -> None:
        plan = make_training_plan(LLAMA_1B, (self.V100,), TrainingJob(lora=LoraShape()))
        assert isinstance(plan, TrainingPlan)
        assert any("V100" in sentence and "bf16 is emulated" in sentence for sentence in plan.warnings)

    def test_one_that_cannot_is_left_out(self) -> None:
        plan = make_training_plan(LLAMA_1B, (self.GTX_980, self.V100), TrainingJob(lora=LoraShape()))
        assert isinstance(plan, TrainingPlan)
        assert [load.gpu.name for load in plan.loads] == ["V100"]
        assert any("GTX 980" in sentence and "can't be used" in sentence for sentence in plan.warnings)

    @pytest.mark.parametrize("job", [TrainingJob(), TrainingJob(precision=TrainingPrecision.FP32)])
    def test_nothing_is_planned_where_none_can(self, job: TrainingJob) -> None:
        plan = make_training_plan(LLAMA_1B, (self.GTX_980,), job)
        assert isinstance(plan, TrainingPlan) == (job.precision is TrainingPrecision.FP32)
        if isinstance(plan, TrainingRefusal):
            assert plan.reason.startswith("no GPU can compute as llama-3.2-1b is to be trained: GPU 1 (GTX 980)")
            assert plan.alternatives == ()

    def test_a_base_in_codes_needs_what_bitsandbytes_needs(self) -> None:
        job = TrainingJob(lora=LoraShape(), base=Precision.NF4, precision=TrainingPrecision.FP32)
        assert isinstance(make_training_plan(LLAMA_1B, (self.GTX_980,), job), TrainingRefusal)

    def test_so_many_gpus_must_be_able(self) -> None:
        job = TrainingJob(strategy=Strategy.DDP, precision=BF16)
        plan = make_training_plan(LLAMA_1B, (self.GTX_980, self.V100), job, count=2)
        assert isinstance(plan, TrainingRefusal)
        assert plan.reason.startswith("2 GPUs are asked for, and 1 can compute")
        mig = replace(self.V100, label="2", mig=True)  # nor does a MIG instance take its place
        again = make_training_plan(LLAMA_1B, (self.GTX_980, self.V100, mig), job, count=2)
        assert isinstance(again, TrainingRefusal)
        assert len(again.loads) == 2


class TestUsualCases:
    """What students ask most, reckoned here from published sizes alone: numbers, layers, width, words. GB are 10^9."""

    TOKENS = 1024

    @staticmethod
    def fullest(model: str, job: TrainingJob, number: int, size: int) -> float:
        plan = make_training_plan(read_architecture(model), cards(number, size), job, Reserve(0, 0, 0.0), count=number)
        assert isinstance(plan, TrainingPlan)
        return plan.loads[0].usage.total / 1e9

    def test_a_7b_adapter_on_24_gb(self) -> None:
        """People report 15 to 18 GB with CUDA's own share."""
        adapter = 32 * 2 * 2 * 16 * 4096
        own = 2 * 6.738e9 + 12 * adapter  # parameters and moments: gradients come when logits are gone
        checkpoints, loss = 32 * self.TOKENS * 4096 * 2, 12 * 32_000 * self.TOKENS
        job = TrainingJob(lora=LoraShape(16, ("q_proj", "v_proj")))
        assert self.fullest("llama-2-7b", job, 1, 24) == pytest.approx((own + checkpoints + loss) / 1e9, rel=0.01)

    def test_8b_in_full_on_four_of_80_gb(self) -> None:
        """16 bytes a number over 4 GPUs; whole: embedding and head (bf16 copies, their gradients, a float32 buffer)."""
        divided, around = 16 * 8.030e9 / 4, 2 * 128_256 * 4096
        expected = divided + around * (2 + 2 + 4)
        assert self.fullest("llama-3.1-8b", TrainingJob(strategy=Strategy.FSDP), 4, 80) == pytest.approx(
            expected / 1e9, rel=0.02
        )

    def test_1b_by_dpo_on_40_gb(self) -> None:
        """At the end of the backward pass: two models, moments and gradients, that of the table which is the head too
        by head, by embedding and as their sum."""
        held, table = (4 + 8 + 4 + 4) * 1.2358e9, 128_256 * 2048 * 4
        assert self.fullest("llama-3.2-1b", TrainingJob(Method.DPO), 1, 40) == pytest.approx(
            (held + 2 * table) / 1e9, rel=0.01
        )

    def test_3b_by_grpo_with_8_answers_on_two_of_80_gb(self) -> None:
        """Both hold everything, gradients twice (DDP's buckets); activations of 8 answers come to that."""
        held, checkpoints = 20 * 3.2127e9, 8 * self.TOKENS * 3072 * 4 * 28
        layer = 8 * self.TOKENS * (12 * 3072 + 8 * 8192) * 2  # about: one layer computed again
        job = TrainingJob(Method.GRPO, strategy=Strategy.DDP, batch=8)
        total = self.fullest("llama-3.2-3b", job, 2, 80)
        assert held / 1e9 < total < (held + checkpoints + layer) / 1e9
        assert make_training_plan(read_architecture("llama-3.2-3b"), cards(2, 80), job).warnings == ()


def test_mig_instances_do_not_share_a_training() -> None:
    slices = tuple(replace(card, mig=True) for card in cards(3, 40))
    plan = make_training_plan(LLAMA_1B, slices, TrainingJob(strategy=Strategy.DDP, precision=BF16))
    assert isinstance(plan, TrainingPlan)
    assert plan.gpus == 1
    divided = make_training_plan(LLAMA_8B, slices, TrainingJob(strategy=Strategy.FSDP))
    assert isinstance(divided, TrainingRefusal)
    assert len(divided.loads) == 1
    with pytest.raises(UsageError, match="MIG instances can't share a training"):
        make_training_plan(LLAMA_1B, slices, TrainingJob(strategy=Strategy.DDP), count=2)


def test_what_is_not_counted_is_said() -> None:
    from tests.models.describe.formulas.from_config import architecture_of

    for kind, sentence in (("gemma3", "texts alone are counted"), ("t5", "encoder and decoder read one each")):
        plan = make_training_plan(architecture_of({"model_type": kind}, kind), cards(1, 192), TrainingJob())
        assert any(sentence in warning for warning in plan.warnings)


def test_a_single_gpu_is_one() -> None:
    with pytest.raises(UsageError, match="single trains on one GPU"):
        make_training_plan(LLAMA_1B, cards(2, 80), TrainingJob(), count=2)


def test_a_model_without_linear_modules_takes_no_adapter() -> None:
    bare = replace(LLAMA_1B, blocks=tuple(block for block in LLAMA_1B.blocks if block.kind != "layer"))
    with pytest.raises(UsageError, match="no linear module"):
        make_training_plan(bare, cards(1, 80), TrainingJob(lora=LoraShape()))
    refusal = make_training_plan(bare, cards(1, 2), TrainingJob())  # nor is one offered
    assert isinstance(refusal, TrainingRefusal)
    assert not any("--lora" in alternative.words for alternative in refusal.alternatives)


@pytest.mark.parametrize("method", list(Method))
def test_an_encoder_alone_has_no_next_token(method: Method) -> None:
    from tests.models.describe.formulas.from_config import architecture_of

    bert = architecture_of({"model_type": "bert"}, "bert")
    with pytest.raises(UsageError, match="bert has no head that predicts a next token"):
        make_training_plan(bert, cards(1, 80), TrainingJob(method))


@given(sizes=st.lists(st.sampled_from([16, 24, 40, 80]), min_size=1, max_size=12), batch=st.integers(1, 8))
@settings(max_examples=30)
def test_fsdp_takes_the_fewest_of_unequal_cards(sizes: list[int], batch: int) -> None:
    """Found by halving among cards that are alike; held against trying every number."""
    given = tuple(GpuSpec(str(n), f"{size}GB", size * GIB, size * GIB, (8, 0)) for n, size in enumerate(sizes))
    job = TrainingJob(strategy=Strategy.FSDP, batch=batch)
    tried = [make_training_plan(LLAMA_1B, given, job, count=number) for number in range(1, len(given) + 1)]
    fitting = [plan.gpus for plan in tried if isinstance(plan, TrainingPlan)]
    plan = make_training_plan(LLAMA_1B, given, job)
    if fitting:
        assert isinstance(plan, TrainingPlan)
        assert plan.gpus == min(fitting)
    else:
        assert isinstance(plan, TrainingRefusal)
        assert plan.missing == min(each.missing for each in tried if isinstance(each, TrainingRefusal))


@pytest.mark.parametrize(
    "job",
    [TrainingJob(strategy=Strategy.FSDP), TrainingJob(Method.GRPO, strategy=Strategy.DDP)],
    ids=["fsdp", "grpo-ddp"],
)
def test_many_layers_and_many_gpus_are_quick(job: TrainingJob) -> None:
    """Equal layers are counted once, the cost table is built once a job, and numbers of GPUs are halved, not tried: it
    took seconds."""
    huge, given = read_architecture("llama-3.1-405b"), cards(128, 40)
    start = time.process_time()
    refusal = make_training_plan(huge, given, job)
    assert time.process_time() - start < 1
    assert isinstance(refusal, TrainingRefusal)
