"""What the YAML of ``gpuherd train`` may say, and what is refused, by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.learning.settings import TrainSettings, read_settings, set_value

PPO = "training: {algorithm: ppo}\npolicy_env: {dataset: arithmetic}\n"

# As the guide writes it.
GUIDE = """
experiment_name: my_experiment

distributed:
  enabled: true

  # GPU selection
  num_gpus: 4                    # Use 4 GPUs
  gpu_ids: [0, 1, 2, 3]         # Specific GPU IDs

  # Parallelism strategy
  strategy: "ddp"                # ddp or fsdp

  # For FSDP (large models)
  fsdp_sharding_strategy: "full_shard"
  fsdp_cpu_offload: false

model:
  model_name_or_path: "Qwen/Qwen2.5-7B"
  device_map: "auto"             # Or "cuda", "cpu"
  torch_dtype: "bfloat16"
"""

# All keys of MRLM's schema that are taken.
WHOLE = """
experiment_name: whole
description: every key
tags: [a, b]
output_dir: outputs/whole
training:
  algorithm: grpo
  num_epochs: 3
  num_iterations: 5
  batch_size: 8
  mini_batch_size: 4
  learning_rate: 3e-4
  max_grad_norm: 0.5
  optimizer: adamw
  weight_decay: 0.01
  adam_beta1: 0.9
  adam_beta2: 0.999
  adam_epsilon: 1e-8
  lr_scheduler: cosine
  warmup_steps: 2
  num_rollouts_per_iteration: 8
  max_episode_length: 64
  eval_every: 2
  eval_episodes: 3
  save_every: 2
  save_total_limit: 3
  log_every: 1
  wandb_project: null
  wandb_run_name: null
  use_tensorboard: false
  seed: 7
  use_fp16: false
  use_bf16: true
  gradient_accumulation_steps: 2
model:
  model_name_or_path: gpt2
  tokenizer_name_or_path: gpt2
  trust_remote_code: false
  use_flash_attention: true
  gradient_checkpointing: true
  load_in_8bit: false
  load_in_4bit: false
  use_lora: true
  lora_r: 4
  lora_alpha: 8
  lora_dropout: 0.1
  lora_target_modules: [c_attn]
  max_new_tokens: 32
  temperature: 0.7
  top_p: 0.95
  top_k: 40
  do_sample: true
  num_beams: 1
  repetition_penalty: 1.0
  length_penalty: 1.0
  device: auto
  device_map: auto
ppo: {clip_range: 0.2, clip_range_vf: null, gamma: 0.99, gae_lambda: 0.95, num_ppo_epochs: 4, value_loss_coef: 0.5,
      entropy_coef: 0.01, target_kl: 0.02, normalize_advantages: true}
grpo: {group_size: 4, gamma: 0.9, normalize_rewards: true, reward_normalization: running, temperature: 0.9}
dpo: {beta: 0.1, reference_free: false, label_smoothing: 0.0, loss_type: ipo}
sft: {mode: combined, bc_weight: 0.5, world_model_weight: 0.5, filter_low_reward: true, min_reward_threshold: 0.2,
      collect_every: 1, max_trajectories: 100}
policy_env: {env_type: math, mode: server, remote: false, dataset: arithmetic, timeout: 5, max_attempts: 2,
             reward_scale: 2, reward_clip: 3, reward_bias: 0.1}
eval_envs:
  - {env_type: math, mode: client, dataset: arithmetic}
  - {env_type: custom, custom_class: my.module.Env, custom_kwargs: {size: 3}, dataset: x.jsonl}
distributed: {enabled: false, backend: nccl, num_gpus: 1, gpu_ids: [0], num_nodes: 1, node_rank: 0,
              master_addr: localhost, master_port: 29500, strategy: fsdp, fsdp_sharding_strategy: shard_grad_op,
              fsdp_cpu_offload: true}
"""


def read(tmp_path: Path, text: str, *overrides: str) -> TrainSettings:
    """The configuration of this text."""
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return read_settings(file, overrides)


def test_the_guide_s_own_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    found = read(tmp_path, GUIDE, "training.algorithm=ppo", "policy_env.dataset=arithmetic")
    assert found.gpu_ids == (0, 1, 2, 3) and found.algorithm.strategy == "ddp"
    assert (found.precision.dtype, found.device) == ("bfloat16", "auto")


def test_the_guide_s_file_alone_has_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="policy_env is missing: ppo answers its problems"):
        read(tmp_path, GUIDE)


def test_every_key_is_taken_and_written_back(tmp_path: Path) -> None:
    found = read(tmp_path, WHOLE)
    assert found.algorithm.options.lr == 3e-4 and found.eval_envs[1].custom_kwargs == {"size": 3}
    (tmp_path / "again.yaml").write_text(found.as_yaml())
    assert read_settings(tmp_path / "again.yaml") == found


def test_a_null_that_is_no_default_is_written_back(tmp_path: Path) -> None:
    found = read(tmp_path, PPO, "training.max_grad_norm=null")
    (tmp_path / "again.yaml").write_text(found.as_yaml())
    assert read_settings(tmp_path / "again.yaml").algorithm.options.grad_clip is None


def test_words_stand_over_the_file(tmp_path: Path) -> None:
    found = read(tmp_path, PPO, "training.seed=5", "eval_envs=[{dataset: gsm8k}]", "model.torch_dtype=bf16")
    assert found.sampling.seed == 5 and found.eval_envs[0].dataset == "gsm8k" and found.precision.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("training: {lerning_rate: 1}", r"training\.lerning_rate; did you mean training\.learning_rate\?"),
        ("training: {seed: 1}\ntraining: {seed: 2}", "the key 'training' is there twice; the first is in line "),
        ("training: {batch_size: many}", "training.batch_size=many: it should be a whole number"),
        ("training: {algorithm: dqn}", "training.algorithm=dqn"),
        ("training: {batch_size: 0}", "training.batch_size=0; the least is 1"),
        ("training: {use_fp16: true, use_bf16: true}", "use_fp16 and training.use_bf16 are both true"),
        ("training: {checkpoint_dir: x}", "training.checkpoint_dir: all of a training lies in its output folder"),
        ("training: {wandb_entity: x}", "WANDB_ENTITY"),
        ("training: {algorithm: grpo, num_rollouts_per_iteration: 6}", "no multiple of grpo.group_size=4"),
        ("training: {learning_rate: -1}", "training.learning_rate=-1.0; it is above 0"),
        ("training: {adam_beta2: 1}", "training.adam_beta2=1.0; it is from 0 to under 1"),
        ("training: {seed: -1}", "training.seed=-1; the least is 0, and the most 1e"),
        ("model: {top_p: 2}", "model.top_p=2.0; it is from 0 to 1"),
        ("model: {temperature: 0}", "model.temperature=0.0; it is above 0"),
        ("model: {max_new_tokens: 0}", "model.max_new_tokens=0; the least is 1"),
        ("ppo: {gamma: 7}", "ppo.gamma=7.0; the least is 0, and the most 1"),
        ("grpo: {group_size: 0}", "grpo.group_size=0; the least is 1"),
        ("training: {algorithm: grpo}\ngrpo: {group_size: 1}", "an answer alone in its group is no better"),
        ("training: {algorithm: dpo}\ndpo: {samples_per_prompt: 1}", "dpo.samples_per_prompt=1; a comparison takes 2"),
        ("model: {torch_dtype: fp32, dtype: bf16}", "the same key"),
        ("model: {model_type: gpt2}", "model.model_type"),
        ("model: {tokenizer_name_or_path: other}", "model.tokenizer_name_or_path"),
        ("model: {trust_remote_code: true}", "model.trust_remote_code"),
        ("model: {load_in_8bit: true, load_in_4bit: true}", "both true"),
        ("model: {load_in_4bit: true}", "set model.use_lora"),
        ("model: {do_sample: false}", "model.do_sample"),
        ("model: {num_beams: 4}", "model.num_beams=4"),
        ("model: {repetition_penalty: 1.2}", "model.repetition_penalty=1.2"),
        ("model: {device: 'cuda:1'}", "which GPUs say distributed.gpu_ids"),
        ("model: {device_map: balanced}", "processes share models by fsdp"),
        ("model: {use_flash_attention: true, attn_implementation: eager}", "keep one"),
        ("distributed: {strategy: deepspeed}", "strategy: fsdp divides"),
        ("distributed: {zero_stage: 3}", "DeepSpeed is not used"),
        ("distributed: {enabled: true}", "distributed.enabled with 1 GPU; it takes 2 or more"),
        ("distributed: {enabled: false, num_gpus: 2}", "leave one of the two out"),
        ("distributed: {num_gpus: 2, gpu_ids: [0, 1, 2]}", "gpu_ids names 3"),
        ("distributed: {gpu_ids: [1, 1]}", "each once"),
        ("distributed: {num_gpus: 2, strategy: single}", "choose ddp or fsdp"),
        ("distributed: {fsdp_cpu_offload: true}", "is for strategy fsdp"),
        ("distributed: {num_nodes: 2, node_rank: 2, master_port: 1}", "ranks are counted from 0"),
        ("distributed: {master_port: 70000}", "from 1 to 65535"),
        ("policy_env: {dataset: a, server_address: 'host:50051'}", "gRPC"),
        ("policy_env: {dataset: a, remote: true}", "gRPC"),
        ("policy_env: {env_type: custom, dataset: a}", "custom_class is missing"),
        ("policy_env: {dataset: a, custom_kwargs: {b: 1}}", "are for env_type custom"),
        ("policy_env: {dataset: a, problems: []}", "two sources of problems"),
        ("policy_env: {env_type: math}", "policy_env.dataset is missing"),
        ("eval_envs: [{dataset: a, reward_clip: 0}]", r"eval_envs\[0\].reward_clip=0.0; above 0"),
        ("training: {data_file: a.jsonl}", "name its problems by policy_env.dataset"),
        ("training: {algorithm: dpo, data_file: a}", "two sources of what is learnt from"),
        ("training: {algorithm: sft}\nsft: {collect_every: 2}", "use gpuherd posttrain"),
        ("training: {algorithm: sft, log_every: 2}", "sft logs every step"),
        ("policy_env: {dataset: a, mode: client}", "the policy is trained in it"),
        ("eval_envs: [{dataset: a, mode: server}]", "nothing is trained in it"),
        ("distributed: {num_gpus: 2, backend: gloo}", "on GPUs are exchanged by nccl"),
        ("distributed: {num_gpus: 2, backend: nccl}\nmodel: {device: cpu}", "on a CPU are exchanged by gloo"),
    ],
)
def test_what_can_not_be_is_refused_by_its_key(tmp_path: Path, text: str, told: str) -> None:
    env = "" if "policy_env" in text else "policy_env: {dataset: arithmetic}\n"
    with pytest.raises(UsageError, match=told):
        read(tmp_path, env + text)


def test_dpo_takes_a_file(tmp_path: Path) -> None:
    assert read(tmp_path, "training: {algorithm: dpo, data_file: p.jsonl}").data_file == "p.jsonl"
    with pytest.raises(UsageError, match=r"training\.data_file is missing"):
        read(tmp_path, "training: {algorithm: dpo}")


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=4),
    st.one_of(st.integers(-(10**6), 10**6), st.booleans(), st.none()),
)
def test_any_setting_is_found_where_it_was_put(names: list[str], value: Any) -> None:
    text = {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)
    values: dict[str, Any] = {}
    set_value(values, f"{'.'.join(names)}={text}")
    for name in names[:-1]:
        values = values[name]
    assert values == {names[-1]: value}


@pytest.mark.parametrize("word", ["seed", ".=1", "a..b=1", "training.seed.more=1", "x=[1"])
def test_words_that_are_no_settings_are_refused(word: str) -> None:
    with pytest.raises(UsageError):
        set_value({"training": {"seed": 1}}, word)
