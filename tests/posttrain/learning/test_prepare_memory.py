"""What a training asks of its GPUs, by plans."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuherd.errors import JobCannotFit
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.kv_cache import Reserve, Workload
from gpuherd.models.memory.training import training_usage
from gpuherd.models.memory.training_job import Method, TrainingJob, TrainingPrecision, TrainingUsage
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.posttrain.data import benchmarks
from gpuherd.posttrain.data.dataset import by_model
from gpuherd.posttrain.engine.checkpoints import FILE_BYTES
from gpuherd.posttrain.learning.prepare import check_data, foretell, need_of, training_task
from gpuherd.posttrain.learning.settings import TrainSettings, settings_of
from gpuherd.posttrain.rollout.lengths import UNKNOWN, Lengths, Texts, lengths_of
from gpuherd.posttrain.runs.memory import _ASLEEP_MB, host_memory, host_words, vllm_memory
from gpuherd.posttrain.runs.plan import StepRequest
from gpuherd.posttrain.types import Precision as Loading
from gpuherd.standin.machine import SimulatedMachine

GIB = 1 << 30


def config(name: str = "gpt2", **blocks: Any) -> TrainSettings:
    """A training of the model of this name."""
    model = {"model_name_or_path": name, **blocks.pop("model", {})}
    env = {} if "data_file" in blocks.get("training", {}) else {"policy_env": {"dataset": "arithmetic"}}
    return settings_of({**env, **blocks, "model": model})


def job_of(
    told: TrainSettings, trained: Precision, processes: int, lengths: Lengths = UNKNOWN, frozen: Precision | None = None
) -> TrainingJob:
    """The training in the planner's words."""
    task = training_task(told, (), processes, lengths)
    return task.job(trained, trained if frozen is None else frozen, chunked=False)


def cards(count: int, size: int) -> list[GpuSpec]:
    """GPUs of so many bytes."""
    return [GpuSpec(str(number), "", total=size, free=size) for number in range(count)]


def test_a_small_model_fits(policy_model: Path) -> None:
    told = config(str(policy_model), training={"batch_size": 8})
    need = need_of(told, cards(1, 40 * GIB), 1)
    assert 0 < need.memory_mb < 20_000 and "PPO" in need.sentence and "8 at once" in need.sentence
    shared = config(str(policy_model), training={"batch_size": 8}, distributed={"num_gpus": 2, "strategy": "fsdp"})
    divided = need_of(shared, cards(2, 40 * GIB), 2)
    assert "by fsdp" in divided.sentence and " of the computer's memory, " in divided.sentence
    assert "computer's memory" not in need.sentence


def test_what_fsdp_takes_of_the_computer_s_memory() -> None:
    """The file of a checkpoint, and what is offloaded: weights, gradients and two moments, 4 bytes each."""

    def told(**more: Any) -> Any:
        return config(
            "llama-3.1-8b",
            training={"algorithm": "sft", "batch_size": 8, "use_bf16": True, "data_file": "x"},
            distributed={"num_gpus": 8, "strategy": "fsdp", **more},
        )

    weights = sum(each.numel for each in read_architecture("llama-3.1-8b").tensors())
    architecture, steps = read_architecture("llama-3.1-8b"), told().steps(8)
    job = job_of(told(), Precision.FP32, 8)
    assert host_memory(architecture, job, steps, 8) == 2 * FILE_BYTES
    offloading = told(fsdp_cpu_offload=True).steps(8)
    offloaded = host_memory(architecture, job, offloading, 8) - 2 * FILE_BYTES
    assert 8 * offloaded == pytest.approx(16 * weights, rel=0.001)
    many = read_architecture("llama-3.1-405b")
    with pytest.raises(
        JobCannotFit, match=r"8 processes take .* of the computer's memory \(fsdp_cpu_offload\), which has"
    ):
        host_words(many, job, offloading, 8, 8)


def test_the_data_says_how_long_prompts_are(policy_model: Path, tmp_path: Path) -> None:
    """Characters are this model's tokens."""
    model = str(policy_model)
    problems = [{"question": f"{number:01200d}", "answer": "2"} for number in range(12)]
    env = {"env_type": "math", "max_attempts": 3, "problems": problems}
    training = {"num_rollouts_per_iteration": 2, "batch_size": 2, "num_iterations": 1, "eval_every": 0}
    told = config(model, training=training, policy_env=env)
    found = lengths_of(check_data(told), model, chat=False)
    assert 1202 < found.prompt < 1300 and (found.answer, found.turns) == (None, 3)  # the environment says more
    assert lengths_of(check_data(told), model, chat=True).prompt == found.prompt + 62
    job = job_of(told, Precision.FP32, 1, found)
    assert (job.prompt_tokens, job.new_tokens) == (found.prompt, 3 * told.sampling.max_new_tokens)
    need = need_of(told, cards(1, 40 * GIB), 1, found)
    assert f"with prompts of {found.prompt} tokens at most" in need.sentence and "up to 3 turns" in need.sentence
    assert need.memory_mb > need_of(told, cards(1, 40 * GIB), 1).memory_mb
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "123", "chosen": "4" * 70, "rejected": "5"}))
    pairs = config(model, training={"algorithm": "dpo", "data_file": str(file)})
    of_pairs = lengths_of(check_data(pairs), model, chat=False)
    assert (of_pairs.prompt, of_pairs.answer) == (5, 72)
    assert job_of(pairs, Precision.FP32, 1, of_pairs).new_tokens == 72


def test_where_lengths_are_not_known_it_is_said(policy_model: Path, tmp_path: Path) -> None:
    told = config(str(policy_model))
    assert "prompts taken to have 512 tokens" in need_of(told, cards(1, 40 * GIB), 1).sentence
    bare = tmp_path / "bare"
    shutil.copytree(policy_model, bare)
    (bare / "tokenizer.json").write_text("{}")
    found = lengths_of(Texts(["äb"]), str(bare), chat=False)
    assert (found.prompt, found.said) == (5, "with prompts of 5 tokens at most, a token taken for a byte")


def test_what_fits_nowhere_is_refused_with_figures(policy_model: Path) -> None:
    with pytest.raises(JobCannotFit, match=r"(what would fit|choose a smaller model)"):
        need_of(config(str(policy_model), training={"batch_size": 512}), cards(1, GIB), 1)


def test_of_the_user_s_own_gpus_it_is_told_and_nothing_is_refused(
    policy_model: Path, standin: Callable[..., SimulatedMachine], caplog: pytest.LogCaptureFixture
) -> None:
    standin("2x40GB")
    caplog.set_level(logging.INFO, "gpuherd")
    for size in (8, 512 * 64):
        training = {"batch_size": size, "num_rollouts_per_iteration": size}
        foretell(config(str(policy_model), training=training), 2, 2)
    small, large = caplog.messages
    assert small.startswith("PPO of") and "by ddp" in small and small.endswith("GiB on each GPU")
    assert large.startswith("memory may run out: PPO") and "what would fit" in large


def test_jobs_in_the_planner_s_words() -> None:
    told = config(training={"algorithm": "grpo", "use_bf16": True}, grpo={"kl_coef": 0.1})
    job = job_of(told, Precision.FP32, 1)
    assert (job.method, job.precision, job.keeps_reference) == (Method.GRPO, TrainingPrecision.MIXED, True)
    alone = config(training={"algorithm": "grpo"}, grpo={"kl_coef": 0})
    assert not job_of(alone, Precision.BF16, 1).keeps_reference
    lora = config(model={"use_lora": True, "load_in_4bit": True, "lora_r": 5})
    job = job_of(lora, Precision.NF4, 1)
    assert job.lora is not None and (job.lora.rank, job.base) == (5, Precision.NF4)
    dpo = config(training={"algorithm": "dpo", "data_file": "x"}, dpo={"reference_free": True})
    assert not job_of(dpo, Precision.FP32, 1).keeps_reference


BIG = GpuSpec("0", "big", 1 << 50, 1 << 50)


def usage(job: TrainingJob, gpus: int = 1) -> TrainingUsage:
    return training_usage(read_architecture("llama-3.2-1b"), job, Reserve(0, 0, 0.0), BIG, gpus=gpus)


def test_frozen_weights_are_counted_as_they_are_loaded() -> None:
    """Under autocast a model of bfloat16 trains in float32, and stays bfloat16 where no step changes it."""
    numbers = read_architecture("llama-3.2-1b").parameters
    of_file = {"algorithm": "dpo", "data_file": "x", "use_bf16": True}
    for algorithm in ({"algorithm": "grpo", "use_bf16": True}, of_file):
        told = config(training=algorithm)
        for frozen, size in ((Precision.BF16, 2), (Precision.FP32, 4)):
            whole = usage(job_of(told, Precision.FP32, 1, frozen=frozen))
            assert (whole.most("models"), whole.most("parameters")) == (size * numbers, 4 * numbers)
    lora = config(training={"algorithm": "grpo", "use_bf16": True}, model={"use_lora": True})
    held, wide = (usage(job_of(lora, Precision.FP32, 1, frozen=each)) for each in (Precision.BF16, Precision.FP32))
    assert wide.most("parameters") - held.most("parameters") == 2 * numbers
    assert held.most("models") == 0
    assert held.most("activations") == wide.most("activations")  # float32 between the layers, of both
    assert wide.most("copies") > held.most("copies")  # autocast's, of frozen matrices in float32


def test_fsdp_divides_the_reference_and_holds_the_policy_whole_while_it_answers() -> None:
    numbers = read_architecture("llama-3.2-1b").parameters
    shared = {"num_gpus": 4, "strategy": "fsdp"}
    told = config(training={"algorithm": "grpo", "use_bf16": True}, distributed=shared)
    for frozen in (Precision.BF16, Precision.FP32):  # a checkpoint's type; passes compute in bfloat16
        ours = usage(job_of(told, Precision.FP32, 4, frozen=frozen), 4)
        assert ours.most("models") == numbers // 2
        assert ours.moments[0].name == "generating" and ours.moments[0].copies == 2 * numbers
    exact = config(training={"algorithm": "grpo"}, distributed=shared)
    assert usage(job_of(exact, Precision.FP32, 4), 4).most("models") == numbers
    dpo = config(training={"algorithm": "dpo", "data_file": "x", "use_bf16": True}, distributed=shared)
    assert usage(job_of(dpo, Precision.FP32, 4, frozen=Precision.BF16), 4).most("models") == numbers // 2


def test_answers_that_are_drawn_at_once_have_their_keys_and_values(policy_model: Path) -> None:
    """``generation_batch_size``, but no more than there are, whatever is learnt from at once."""
    training = {"algorithm": "grpo", "use_bf16": True, "num_rollouts_per_iteration": 64, "micro_batch_size": 1}

    def cache(at_once: int) -> int:
        told = config(training=training, model={"generation_batch_size": at_once, "max_new_tokens": 100})
        return usage(job_of(told, Precision.FP32, 1, Lengths(50, None, 1, ""), Precision.BF16)).most("cache")

    assert cache(32) == 32 * 16 * 2 * 8 * 64 * 4 * (50 + 100 - 1)  # layers, keys and values, heads, float32
    assert cache(64) == 2 * cache(32) and cache(10_000) == cache(72)
    # What dpo and sft learn from is answered before, by the model as it is; that can take more than the training.
    sft = {"algorithm": "sft", "micro_batch_size": 1}
    many = {"generation_batch_size": 4096}
    of_file = config(str(policy_model), training={**sft, "data_file": "x"}, model=many)
    answering = config(str(policy_model), training=sft, model=many)
    least, most = (need_of(each, cards(1, 80 * GIB), 1) for each in (of_file, answering))
    assert most.memory_mb > 2 * least.memory_mb
    assert most.sentence.startswith("4096 answers at once of ")


@pytest.mark.parametrize(
    ("algorithm", "blocks", "said"),
    [
        ("grpo", {}, "GRPO of {model} in fp32, 4 at once, with its reference, "),
        ("grpo", {"grpo": {"kl_coef": 0.0}}, "GRPO of {model} in fp32, 4 at once, prompts taken "),
        ("rloo", {}, "RLOO of {model} in fp32, 4 at once, with its reference, "),
        ("rlcr", {}, "RLCR of {model} in fp32, 4 at once, with its reference, "),
        ("ppo", {}, "PPO of {model} in fp32, 4 at once, with its reference, "),
        ("grpo-hf", {}, "GRPO-HF of {model} in fp32, 4 at once, with its reference, its proxy {model}, "),
        (
            "distill",
            {"distill": {"teacher": "{model}"}},
            "Distill of {model} in fp32, 4 at once, with teacher {model}, ",
        ),
    ],
)
def test_a_plan_says_its_algorithm_and_what_is_counted(
    policy_model: Path, algorithm: str, blocks: dict[str, Any], said: str
) -> None:
    model = str(policy_model)
    given = {name: {key: model if value == "{model}" else value for key, value in block.items()}
             for name, block in blocks.items()}  # fmt: skip
    told = config(
        model, training={"algorithm": algorithm, "num_rollouts_per_iteration": 8, "micro_batch_size": 4}, **given
    )
    assert said.format(model=model) in need_of(told, cards(1, 40 * GIB), 1).sentence


def test_a_reward_model_that_a_task_chooses_is_counted(policy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that the configuration names; in evaluations too, each of which loads its own."""
    model = str(policy_model)
    monkeypatch.setattr(benchmarks, "by_model", lambda options, _, label: by_model(options, model, label))

    def need(env: dict[str, Any], **more: Any) -> StepRequest:
        training = {"algorithm": "grpo", "num_rollouts_per_iteration": 8, **more.pop("training", {})}
        return need_of(config(model, training=training, policy_env=env, **more), cards(1, 40 * GIB), 1)

    chosen, named = need({"dataset": "imdb"}), need({"dataset": "arithmetic", "reward_model": model})
    plain = need({"dataset": "arithmetic"})
    assert plain.memory_mb < chosen.memory_mb == named.memory_mb
    assert f"reward model {model}" in chosen.sentence and "reward model" not in plain.sentence
    assert need({"dataset": "imdb", "reward_model": "gpt2"}).sentence.count("reward model gpt2") == 1
    evaluated = need({"dataset": "arithmetic"}, eval_envs=[{"dataset": "imdb"}], training={"eval_every": 1})
    assert evaluated.memory_mb == chosen.memory_mb
    assert need({"dataset": "arithmetic"}, eval_envs=[{"dataset": "imdb"}], training={"eval_every": 0}) == plain


def test_vllm_and_the_training_take_their_turns() -> None:
    """The training has no gradients and activations while vLLM draws, which sleeps while the policy learns."""
    training = {"algorithm": "grpo", "use_bf16": True, "micro_batch_size": 1}

    def memory(backend: str, **model: Any) -> int:
        told = config(
            "llama-3.1-8b", training=training, model={"generation_backend": backend, "max_new_tokens": 512, **model}
        )
        need = need_of(told, cards(1, 500 * GIB), 1)
        assert ("in turns with it" in need.sentence) == (backend == "vllm")
        return need.memory_mb

    # All weights: gradients alone are 32 GB, and vLLM's copy 16 GB.
    assert memory("vllm") == memory("hf") + _ASLEEP_MB
    # An adapter: there is little to give up. vLLM has its own 16 GB, and the cache of so many answers.
    lora = {"use_lora": True, "gradient_checkpointing": True}
    copy = vllm_memory("llama-3.1-8b", Loading("float32", "bfloat16"), Workload(32, 512, 512), cards(1, 500 * GIB))
    assert _ASLEEP_MB < memory("vllm", **lora) - memory("hf", **lora) < copy
    more = memory("vllm", generation_batch_size=64, **lora) - memory("vllm", **lora)
    assert more == pytest.approx(32 * (512 + 512) * 32 * 2 * 8 * 128 * 2 / (1 << 20), rel=0.1)


def test_models_besides_the_policy_are_counted(policy_model: Path) -> None:
    """A reward model, a teacher, a proxy: what lies in memory while it trains."""
    model, few = str(policy_model), {"num_rollouts_per_iteration": 8}

    def memory(algorithm: str, **blocks: Any) -> int:
        told = config(model, training={**few, "algorithm": algorithm}, **blocks)
        return need_of(told, cards(1, 40 * GIB), 1).memory_mb

    alone = memory("grpo")
    scored = memory("grpo", policy_env={"dataset": "arithmetic", "reward_model": model})
    assert alone < scored < 2 * alone
    assert memory("reinforce") < memory("distill", distill={"teacher": model})
    assert memory("reinforce") <= memory("grpo-hf")
    assert memory("grpo", grpo={"kl_coef": 0.0}) <= alone
    for algorithm, said in (("grpo", "GRPO"), ("rloo", "RLOO")):
        with pytest.raises(JobCannotFit, match=rf"{said} of .*: {said} of .*(what would fit|choose a smaller model)"):
            need_of(config(model, training={"algorithm": algorithm}), cards(1, 1 << 20), 1)
