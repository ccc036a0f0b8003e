"""A file as options of algorithms, samplers and steps."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class, algorithms
from gpuherd.posttrain.config.composing import compose
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.engine.options import Lora, Sharding, Strategy
from gpuherd.posttrain.learning.data import discounted
from gpuherd.posttrain.learning.keys import block_keys
from gpuherd.posttrain.learning.settings import TrainSettings, settings_of
from gpuherd.posttrain.runs.settings import settings_of as settings_of_rounds
from gpuherd.posttrain.types import Algorithm, BackendName, Rollout

NAMES = {each.name.lower(): name for name, each in algorithms().items() if not each.guided}
NEEDED: dict[str, Any] = {"distill": {"distill": {"teacher": "gpt2"}}}


def config(**blocks: Any) -> TrainSettings:
    """A training with these blocks."""
    training = blocks.get("training", {})
    env = {} if "data_file" in training else {"policy_env": {"dataset": "arithmetic"}}
    return settings_of({**env, **blocks})


def options_of(told: TrainSettings, problems: int) -> Any:
    """The algorithm's options on so many problems."""
    return told.with_problems(problems).options


@pytest.mark.parametrize("algorithm", NAMES)
def test_every_algorithm_takes_its_options(algorithm: str) -> None:
    told = config(
        training={"algorithm": algorithm, "learning_rate": 1e-4, "num_iterations": 7, "lr_scheduler": "linear"},
        model={"use_lora": True, "lora_r": 3, "lora_target_modules": ["c_attn"]},
        **NEEDED.get(algorithm, {}),
    )
    options = options_of(told, 500)
    assert type(options) is algorithm_class(NAMES[algorithm]).Options
    assert (options.lr, options.max_steps, options.scheduler, options.grad_clip) == (1e-4, 7, "linear", 1.0)
    assert (options.lora.r, options.lora.target_modules) == (3, ("c_attn",))


# Options of algorithms that no key of their block stands for, and why.
ELSEWHERE = {
    "lr", "weight_decay", "grad_clip", "scheduler", "warmup_steps", "optimizer", "betas", "eps",  # training
    "epochs", "batch_size", "minibatch_size", "max_steps", "save_every",  # training, in its own measure
    "lora",  # model
    "online", "source", "pairing", "max_tries", "all_rounds",  # of rounds
}  # fmt: skip


@pytest.mark.parametrize("algorithm", NAMES)
def test_every_option_of_an_algorithm_is_a_key_or_said_not_to_be(algorithm: str) -> None:
    kind: type[Algorithm] = algorithm_class(NAMES[algorithm])
    stand_for = {each.to.removeprefix("options.") for each in block_keys(kind) if each.to}
    left = {each.name for each in fields(kind.Options)} - stand_for
    refused = {"sft": {"samples_per_example"}, "distill": {"teacher_device"}}
    assert left <= ELSEWHERE | refused.get(algorithm, set())
    told = {"training": {"algorithm": algorithm, "max_grad_norm": None}, **NEEDED.get(algorithm, {})}
    assert options_of(config(**told), 500).grad_clip is None


@pytest.mark.parametrize("algorithm", NAMES)
def test_a_block_takes_the_options_names_of_rounds(algorithm: str) -> None:
    block = {"lr": 3e-4, "grad_clip": None, "scheduler": "cosine", "max_steps": 3}
    block |= NEEDED.get(algorithm, {}).get(algorithm, {})
    told = config(training={"algorithm": algorithm}, **{algorithm: block})
    options = options_of(told, 500)
    assert (options.lr, options.grad_clip, options.scheduler, options.max_steps) == (3e-4, None, "cosine", 3)
    assert told.keys["training.learning_rate"] == 3e-4
    with pytest.raises(UsageError, match=rf"{algorithm}\.lr and training\.learning_rate are the same key; keep one"):
        config(training={"algorithm": algorithm, "learning_rate": 1e-4}, **{algorithm: block})


def test_an_algorithm_is_named_as_in_rounds() -> None:
    assert config(training={"algorithm": "RLOO"}).algorithm.algorithm == "RLOO"
    told = config(training={"algorithm": "grpo_hf"}, **{"GRPO-HF": {"proxy_epochs": 2}})
    assert told.algorithm.options.proxy_epochs == 2
    with pytest.raises(UsageError, match=r"rloo.samples_per_prompt and rloo.group_size are the same key"):
        config(training={"algorithm": "rloo"}, rloo={"samples_per_prompt": 2, "group_size": 2})
    with pytest.raises(UsageError, match=r"grpo\.sampler_clipp; did you mean grpo\.sampler_clip\?"):
        config(training={"algorithm": "grpo"}, grpo={"sampler_clipp": 2})
    with pytest.raises(UsageError, match=r"training.algorithm=pita: it trains a classifier .* gpuherd posttrain does"):
        config(training={"algorithm": "pita"})
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"rloo": {"lr": "x"}}, r"training\.learning_rate=x: it should be a number"),
        ({"rloo": {"lr": -1}}, r"training\.learning_rate=-1\.0; it is above 0"),
        ({"rloo": {"kl_coef": -1}}, r"rloo\.kl_coef=-1\.0; the least is 0"),
        ({"pita": {}}, "there is no key pita; possible here: experiment_name, .*, engine, training, model"),
    )
    for block, told_of in wrong:
        with pytest.raises(UsageError, match=told_of):
            config(training={"algorithm": "grpo"}, **block)
    with pytest.raises(UsageError, match=r"distill\.teacher is missing"):
        config(training={"algorithm": "distill"})


def test_the_words_of_rounds_say_the_same() -> None:
    of_rounds = {
        "system": {"attn_impl": "eager", "dtype": "fp32", "amp_dtype": "bf16", "clear_cache_interval": 3},
        "generation": {
            "max_new_tokens": 9,
            "temperature": 0.5,
            "batch_size": 4,
            "use_chat_template": True,
            "backend": "vllm",
        },
        "training": {"lr": 1e-4, "gradient_checkpointing": True, "micro_batch_size": 2},
    }
    of_mrlm = {
        "training": {"learning_rate": 1e-4, "micro_batch_size": 2, "clear_cache_interval": 3, "use_bf16": True},
        "model": {
            "attn_implementation": "eager", "torch_dtype": "fp32", "gradient_checkpointing": True, "max_new_tokens": 9,
            "temperature": 0.5, "generation_batch_size": 4, "use_chat_template": True, "generation_backend": "vllm",
        },
    }  # fmt: skip
    assert config(**of_rounds) == config(**of_mrlm)
    with pytest.raises(UsageError, match=r"generation\.top_k and model\.top_k are the same key; keep one"):
        config(generation={"top_k": 5}, model={"top_k": 5})
    with pytest.raises(UsageError, match=r"there is no key generation\.shards; possible here: "):
        config(generation={"shards": 2})
    with pytest.raises(UsageError, match=r"the block grpo is there twice, as GRPO too"):
        config(grpo={}, GRPO={})
    with pytest.raises(UsageError, match=r"system\.amp_dtype and training\.use_bf16 are the same key"):
        config(system={"amp_dtype": "bf16"}, training={"use_bf16": False})
    with pytest.raises(UsageError, match=r"system\.amp_dtype=fp64: it is one of bf16"):
        config(system={"amp_dtype": "fp64"})


def test_what_vllm_could_not_sample_is_refused_as_in_rounds() -> None:
    def by_vllm(algorithm: str = "grpo", data_file: str | None = None, **model: Any) -> TrainSettings:
        training = {"algorithm": algorithm, **({} if data_file is None else {"data_file": data_file})}
        model = {"generation_backend": "vllm", **model}
        return config(training=training, model=model, **NEEDED.get(algorithm, {}))

    assert by_vllm().backend is BackendName.VLLM and config().backend is BackendName.HF
    assert by_vllm().deciding()["model.generation_backend"] == "vllm"
    for told in (by_vllm("sft"), by_vllm("dpo"), by_vllm("distill", top_p=0.9)):
        assert told.backend is BackendName.VLLM
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"algorithm": "dpo", "data_file": "x"}, r"vllm: dpo samples no answers here; leave the key out"),
        ({"top_k": 5}, r"which grpo learns by; set model\.top_p=1 and model\.top_k=0"),
        ({"use_lora": True, "load_in_4bit": True}, r"vllm with model\.load_in_8bit or load_in_4bit: quantised"),
        ({"generation_backend": "sglang"}, "it is one of hf, vllm"),
    )
    for given_words, sentence in wrong:
        with pytest.raises(UsageError, match=rf"model\.generation_backend=.*{sentence}"):
            by_vllm(**given_words)


def test_what_learns_from_whole_steps_has_no_other_batch() -> None:
    told = config(training={"algorithm": "reinforce", "num_rollouts_per_iteration": 16})
    options = options_of(told, 100)
    assert (options.batch_size, options.minibatch_size, told.algorithm.sequences_per_step) == (16, None, 16)
    assert settings_of(yaml.safe_load(told.as_yaml())) == told
    with pytest.raises(UsageError, match=r"training.batch_size=8: reinforce learns from all 16 rollouts of a step"):
        config(training={"algorithm": "reinforce", "num_rollouts_per_iteration": 16, "batch_size": 8})


def test_sft_is_told_of_packing() -> None:
    told = config(training={"algorithm": "sft", "data_file": "x"}, sft={"packing": True})
    assert options_of(told, 10).packing is True


def test_ppo_is_told_what_its_block_says() -> None:
    told = config(training={"batch_size": 16}, ppo={"num_ppo_epochs": 2, "target_kl": 0.1, "entropy_coef": 0.5})
    options = options_of(told, 128)
    assert (options.num_ppo_epochs, options.target_kl, options.entropy_coef) == (2, 0.1, 0.5)
    assert (options.batch_size, options.minibatch_size, options.samples_per_prompt) == (128, 16, 1)


def test_grpo_s_groups_are_whole() -> None:
    told = config(training={"algorithm": "grpo", "num_iterations": 10}, grpo={"group_size": 8})
    options = options_of(told, 20)
    assert (options.samples_per_prompt, options.batch_size) == (8, 16)
    # 10 steps of 16 of 20 problems: two steps a pass.
    assert (options.max_steps, options.epochs) == (10, 5)
    plain = config(training={"algorithm": "grpo"}, grpo={"normalize_rewards": False})
    assert options_of(plain, 40).reward_normalization == "none"


def test_more_problems_a_step_than_there_are_is_refused() -> None:
    with pytest.raises(UsageError, match="asks for 128 problems a step, and there are 20"):
        options_of(config(), 20)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_processes_divide_the_batch(rows: int, world_size: int, accumulation: int) -> None:
    told = config(
        training={"batch_size": rows, "gradient_accumulation_steps": accumulation},
        distributed={"strategy": "fsdp", "fsdp_sharding_strategy": "shard_grad_op"},
    )
    if rows % world_size:
        with pytest.raises(UsageError, match=f"batch_size={rows} is no multiple of the {world_size} processes"):
            told.steps(world_size)
        return
    steps = told.steps(world_size)
    assert steps.micro_batch_size * world_size * accumulation >= rows
    assert (steps.micro_batch_size - 1) * world_size * accumulation < rows
    wanted = (Strategy.SINGLE, Sharding.FULL_SHARD) if world_size == 1 else (Strategy.FSDP, Sharding.SHARD_GRAD_OP)
    assert (steps.strategy, steps.fsdp_sharding_strategy) == wanted


def test_precision_and_sampling() -> None:
    told = config(model={"torch_dtype": "bf16", "use_flash_attention": True}, training={"use_bf16": True}).precision
    assert (told.dtype, told.amp_dtype, told.attention) == ("bfloat16", "bfloat16", "flash_attention_2")
    # Mixed precision keeps its weights in float32, whatever the checkpoint has.
    assert config(training={"use_fp16": True}).precision.dtype == "float32"
    assert config().precision.dtype is None
    drawn = config(training={"algorithm": "grpo", "max_episode_length": 9}, grpo={"temperature": 0.3}).sampling
    assert (drawn.temperature, drawn.max_new_tokens) == (0.3, 9)


def test_quantised_models_are_named_so() -> None:
    assert config(model={"load_in_8bit": True, "use_lora": True}).model == "gpt2-8bit"
    assert config(model={"load_in_4bit": True, "use_lora": True}).model == "gpt2-4bit"


def test_later_turns_are_discounted() -> None:
    rollout = Rollout(
        problem="a",
        sample=0,
        prompt_ids=(1,),
        ids=(2, 3, 4, 5, 6),
        by_policy=(True, True, False, True, True),
        log_probs=(0.0, 0.0, None, 0.0, 0.0),
        text="",
        reward=3.0,
        correct=True,
        finished=True,
        turn_rewards=((1, 1.0), (4, 2.0)),
    )
    found = discounted(rollout, 0.5)
    assert found.turn_rewards == ((1, 1.0), (4, 1.0)) and found.reward == 2.0
    assert discounted(rollout, 1.0) is rollout


@pytest.mark.parametrize("algorithm", NAMES)
def test_defaults_are_those_of_rounds(algorithm: str) -> None:
    """But for how much is done in a step, ``train`` and ``posttrain`` do the same where nothing is said."""
    kind = algorithm_class(NAMES[algorithm])
    needed = NEEDED.get(algorithm, {})
    own = read(kind.Options, needed.get(algorithm, {}))
    told = config(training={"algorithm": algorithm, **({"data_file": "x"} if algorithm == "sft" else {})}, **needed)
    found = options_of(told, 1000)
    sizes = {"batch_size", "minibatch_size", "epochs", "max_steps"}
    sizes |= {"samples_per_example"} if algorithm == "sft" else set()
    assert {**asdict(found), **dict.fromkeys(sizes)} == {**asdict(own), **dict.fromkeys(sizes)}
    words = [f"algos.{NAMES[algorithm]}.{name}={value}" for name, value in needed.get(algorithm, {}).items()]
    shipped = settings_of_rounds(compose([f"algos=[{NAMES[algorithm]}]", "experiment.name=x", *words]))
    (choice,) = shipped.choices()
    assert choice.options == own
    one, other = told.sampling, shipped.generation.sampling(0)
    for name in ("temperature", "top_p", "top_k", "use_chat_template"):
        assert getattr(one, name) == getattr(other, name), name
    assert (other.top_p, other.top_k) == (1.0, 0)
    lora = config(training={"algorithm": algorithm}, model={"use_lora": True}, **needed)
    assert options_of(lora, 1000).lora == Lora()


def test_answers_drawn_at_once_can_be_said() -> None:
    assert config(model={"generation_batch_size": 96}).sampling.batch_size == 96
    assert config().sampling.batch_size == 32


@pytest.mark.parametrize("algorithm", NAMES)
def test_draws_are_of_the_law_that_is_learnt_by_unless_told_otherwise(algorithm: str) -> None:
    needed = NEEDED.get(algorithm, {})
    told = config(training={"algorithm": algorithm}, **needed)
    assert (told.sampling.top_p, told.sampling.top_k) == (1.0, 0) and told.cut is None
    as_the_guide = config(training={"algorithm": algorithm}, model={"top_p": 0.9, "top_k": 50}, **needed)
    assert (as_the_guide.sampling.top_p, as_the_guide.sampling.top_k) == (0.9, 50)
    assert (as_the_guide.cut is not None) == (algorithm not in ("dpo", "sft", "distill"))
    warning = as_the_guide.cut
    assert warning is None or f"{algorithm}: draws by model.top_p=0.9 and model.top_k=50 are not" in warning


def test_a_teacher_has_no_gpu_of_its_own_here() -> None:
    block = {"teacher": "gpt2-medium", "teacher_device": "own"}
    with pytest.raises(UsageError, match=r"distill\.teacher_device.*gives a teacher a GPU of its own"):
        config(training={"algorithm": "distill"}, policy_env={"dataset": "arithmetic"}, distill=block)
