"""What the YAML of ``gpuherd train`` can say: typed and light. Keys are MRLM's; what else there is says so. Defaults of
algorithms, optimiser and adapters are the algorithms' own, so that ``gpuherd posttrain`` has the same. What contradicts
itself is refused in ``checking``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpuherd.posttrain.algos.dpo import Options as DPOOptions
from gpuherd.posttrain.algos.grpo import GRPOOptions
from gpuherd.posttrain.algos.ppo import PPOOptions
from gpuherd.posttrain.algos.sft import Options as SFTOptions
from gpuherd.posttrain.data.options import REWARD_TIMEOUT_S
from gpuherd.posttrain.engine.options import Lora, OptimiserOptions, Optimizer, Scheduler, Sharding
from gpuherd.posttrain.types import Sampling

Algorithm = Literal["ppo", "grpo", "dpo", "sft"]
_OPTIMISER, _LORA, _SAMPLING = OptimiserOptions(), Lora(), Sampling()
_PPO, _GRPO, _DPO, _SFT = PPOOptions(), GRPOOptions(), DPOOptions(), SFTOptions()
Dtype = Literal["auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBlock:
    """``training:``.

    Attributes:
        algorithm: ppo and grpo sample while they train; dpo and sft learn from ``data_file``, or from what the policy
            answers before they begin.
        num_iterations: steps of sampling and learning (ppo, grpo); None: ``num_epochs`` of them.
        num_epochs: passes over the data (dpo, sft); without ``num_iterations`` the steps of ppo and grpo.
        batch_size: rollouts or rows of one optimiser step, over all processes.
        mini_batch_size: the same for ppo and grpo, in place of ``batch_size``.
        gradient_accumulation_steps: micro-batches of an optimiser step in each process.
        micro_batch_size: items at once, in place of that (ours).
        learning_rate: None: the algorithm's own.
        lr_scheduler: linear, cosine or constant.
        num_rollouts_per_iteration: rollouts of a step of ppo and grpo.
        max_episode_length: tokens that the policy may say in one turn, where ``model.max_new_tokens`` says more.
        eval_every, eval_episodes: steps between evaluations on ``eval_envs``, and problems in each.
        save_every, save_total_limit: steps between checkpoints, and how many stay.
        log_every: steps between lines of the curves.
        use_fp16, use_bf16: passes run in it (autocast); weights stay as ``model.torch_dtype`` says.
        data_file: preferences (dpo) or problems with answers (sft): a file, or an id of the Hub or of a task (ours).
        max_problems: of the training split; None: all (ours).
        dynamic_batch_size, clear_cache_interval: see ``training.options.StepOptions`` (ours).
    """

    algorithm: Algorithm = "ppo"
    num_epochs: int = 100
    num_iterations: int | None = None
    batch_size: int = 32
    mini_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    micro_batch_size: int | None = None
    learning_rate: float | None = None
    max_grad_norm: float | None = _OPTIMISER.max_grad_norm
    optimizer: Optimizer = Optimizer.ADAMW
    weight_decay: float = _OPTIMISER.weight_decay
    adam_beta1: float = _OPTIMISER.betas[0]
    adam_beta2: float = _OPTIMISER.betas[1]
    adam_epsilon: float = _OPTIMISER.eps
    lr_scheduler: Scheduler | None = None
    warmup_steps: int = 0
    num_rollouts_per_iteration: int = 128
    max_episode_length: int = 512
    eval_every: int = 10
    eval_episodes: int = 10
    save_every: int = 10
    save_total_limit: int | None = None
    checkpoint_dir: str | None = None
    log_every: int = 1
    log_dir: str | None = None
    use_tensorboard: bool = False
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_run_name: str | None = None
    trackio_project: str | None = None
    seed: int = 0
    use_fp16: bool = False
    use_bf16: bool = False
    data_file: str | None = None
    max_problems: int | None = None
    dynamic_batch_size: bool = False
    clear_cache_interval: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBlock:
    """``model:``.

    Attributes:
        model_name_or_path: an id of the Hub or a folder.
        torch_dtype: of the weights; ``dtype`` is the same; auto: the checkpoint's.
        use_flash_attention: where it is installed and knows the model; sdpa otherwise, and the log says so.
        load_in_8bit, load_in_4bit: the frozen weights under an adapter, by bitsandbytes.
        max_new_tokens, temperature, top_p, top_k: how answers are drawn (of each turn); None: nothing is cut.
        generation_batch_size: answers that are drawn at once, in each process (ours).
        use_chat_template: prompts are a user's message (ours).
        device, device_map: auto, cpu or cuda.
    """

    model_name_or_path: str = "gpt2"
    model_type: str | None = None
    tokenizer_name_or_path: str | None = None
    trust_remote_code: bool = False
    torch_dtype: Dtype | None = None
    dtype: Dtype | None = None
    use_flash_attention: bool = False
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    gradient_checkpointing: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    use_lora: bool = False
    lora_r: int = _LORA.r
    lora_alpha: float = _LORA.alpha
    lora_dropout: float = _LORA.dropout
    lora_target_modules: tuple[str, ...] | None = None
    max_new_tokens: int = _SAMPLING.max_new_tokens
    temperature: float = _SAMPLING.temperature
    top_p: float | None = None
    top_k: int | None = None
    generation_batch_size: int = _SAMPLING.batch_size
    do_sample: bool = True
    num_beams: int = 1
    repetition_penalty: float = 1.0
    length_penalty: float = 1.0
    use_chat_template: bool = False
    device: str = "auto"
    device_map: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOBlock:
    """``ppo:``. ``kl_coef`` (ours): weight of the divergence from the model as it came; 0: none is loaded."""

    clip_range: float = _PPO.clip_range
    clip_range_vf: float | None = _PPO.clip_range_vf
    gamma: float = _PPO.gamma
    gae_lambda: float = _PPO.gae_lambda
    num_ppo_epochs: int = _PPO.num_ppo_epochs
    value_loss_coef: float = _PPO.value_loss_coef
    entropy_coef: float = _PPO.entropy_coef
    target_kl: float | None = _PPO.target_kl
    normalize_advantages: bool = _PPO.normalize_advantages
    kl_coef: float = _PPO.kl_coef


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOBlock:
    """``grpo:``. ``gamma`` discounts what later turns of an episode earn; ``temperature`` stands above the model's;
    ``clip_range`` and ``kl_coef`` are ours."""

    group_size: int = _GRPO.samples_per_prompt
    gamma: float = 1.0
    normalize_rewards: bool = True
    reward_normalization: Literal["group", "batch", "running"] = "group"
    temperature: float | None = None
    clip_range: float = _GRPO.clip[0]
    kl_coef: float = _GRPO.kl_coef


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOBlock:
    """``dpo:``. ``rpo_weight`` and ``samples_per_prompt`` (where there is no data_file) are ours."""

    beta: float = _DPO.beta
    reference_free: bool = _DPO.reference_free
    label_smoothing: float = _DPO.label_smoothing
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    rpo_weight: float = _DPO.rpo_weight
    samples_per_prompt: int = _DPO.samples_per_example


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTBlock:
    """``sft:``. Without a data_file so many trajectories of the policy are learnt from."""

    mode: Literal["combined", "behavioral_cloning", "world_model"] = "behavioral_cloning"
    bc_weight: float = _SFT.bc_weight
    world_model_weight: float = _SFT.world_model_weight
    filter_low_reward: bool = _SFT.filter_low_reward
    min_reward_threshold: float = _SFT.min_reward_threshold
    packing: bool = _SFT.packing  # ours
    collect_every: int = 1
    max_trajectories: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvBlock:
    """``policy_env:`` and each of ``eval_envs:``.

    Attributes:
        env_type: ``task`` (ours): one answer, scored by the task of ``dataset``.
        dataset: a task by name (``arithmetic``, ``gsm8k``), or a file of problems.
        settings: of that task, by name (ours).
        problems: written out here in place of a dataset.
        timeout: seconds of a program that the environment runs.
        max_attempts: turns that a problem is tried in.
        custom_class, custom_kwargs: an environment of one's own, by dotted name.
        reward_scale, reward_bias, reward_clip: reward * scale + bias, then cut to [-clip, clip].
        reward_model: that scores answers, where the task takes one (ours).
        reward: a function of the user's that scores the answers of a task, ``package.module:function`` or
            ``path/to/file.py:function`` (ours).
        reward_timeout: seconds of that function for a batch (ours).
    """

    env_type: Literal["code", "math", "debate", "tool", "custom", "task"] = "task"
    mode: Literal["server", "client"] | None = None
    remote: bool = False
    server_address: str | None = None
    dataset: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Mapping[str, Any], ...] | None = None
    timeout: float = 5.0
    max_attempts: int | None = None
    custom_class: str | None = None
    custom_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reward_scale: float = 1.0
    reward_clip: float | None = None
    reward_bias: float = 0.0
    reward_model: str | None = None
    reward: str | None = None
    reward_timeout: float = REWARD_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedBlock:
    """``distributed:``. ``enabled`` None: where more than one GPU is asked for. On a CPU ``num_gpus`` is the number of
    processes."""

    enabled: bool | None = None
    backend: Literal["nccl", "gloo"] | None = None
    num_gpus: int | None = None
    gpu_ids: tuple[int, ...] | None = None
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int | None = None
    strategy: Literal["single", "ddp", "fsdp", "deepspeed"] = "ddp"
    fsdp_sharding_strategy: Sharding = Sharding.FULL_SHARD
    fsdp_cpu_offload: bool = False
    deepspeed_config: str | None = None
    zero_stage: int | None = None

    @property
    def gpu_count(self) -> int:
        """GPUs (or processes) of this machine that are asked for."""
        if self.gpu_ids is not None:
            return len(self.gpu_ids)
        return 1 if self.num_gpus is None else self.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The whole of it. ``output_dir`` None: ``outputs/<experiment_name>``. ``engine``: as ``engines.block`` reads it,
    for the command line. ``callbacks`` (ours): classes that are called while it trains (``engine.callbacks``)."""

    experiment_name: str = "training"
    description: str = ""
    tags: tuple[str, ...] = ()
    output_dir: str | None = None
    training: TrainingBlock = field(default_factory=TrainingBlock)
    model: ModelBlock = field(default_factory=ModelBlock)
    ppo: PPOBlock = field(default_factory=PPOBlock)
    grpo: GRPOBlock = field(default_factory=GRPOBlock)
    dpo: DPOBlock = field(default_factory=DPOBlock)
    sft: SFTBlock = field(default_factory=SFTBlock)
    policy_env: EnvBlock | None = None
    eval_envs: tuple[EnvBlock, ...] = ()
    distributed: DistributedBlock = field(default_factory=DistributedBlock)
    engine: Any = None
    callbacks: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """What the model's block says of it: auto, cpu or cuda."""
        return self.model.device if self.model.device != "auto" else (self.model.device_map or "auto")

    @property
    def on_cpu(self) -> bool:
        """It is to compute on the CPU, whatever GPUs there are."""
        return self.device == "cpu"
