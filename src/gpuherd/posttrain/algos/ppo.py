"""PPO: small steps of the policy, by advantages that a value head on its own trunk helps to estimate.

Proximal Policy Optimization (arXiv 1707.06347) as it is used on language models (arXiv 1909.08593, 2203.02155): a token
earns what the task gives at the end of a turn, less ``kl_coef (ln policy - ln reference)`` for itself. With GAE
(arXiv 1506.02438) these rewards become advantages and returns; then, in several passes over minibatches,

    -min(rho A, clip(rho, 1 - eps, 1 + eps) A) + value_loss_coef (clipped value loss) - entropy_coef H

is made smaller, until the passes are over or the policy is further than ``target_kl`` from the one that sampled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.errors import UsageError
from gpuherd.models.memory.training_job import Method
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.config.typed import check_range
from gpuherd.posttrain.engine.train_engine import StepFigures, pooled_means
from gpuherd.posttrain.policy_gradient.advantages import KLControl, estimated
from gpuherd.posttrain.policy_gradient.algorithm import PolicyGradient, PolicyOptions
from gpuherd.posttrain.types import Training

if TYPE_CHECKING:
    from gpuherd.posttrain.policy_gradient.rollout_trainer import RolloutTrainer


@dataclass(frozen=True, kw_only=True)
class PPOOptions(PolicyOptions):
    """``PolicyOptions`` and:

    Attributes:
        num_ppo_epochs: passes over each step's rollouts.
        clip_range: of the ratio.
        clip_range_vf: how far a value may go from what it was; None: as far as it likes.
        gamma, gae_lambda: of GAE, by token.
        value_loss_coef, entropy_coef: weights of value loss and entropy.
        target_kl: no further pass where the policy is further than this (nats a token) from the one that sampled.
        normalize_advantages: to mean 0 and spread 1 over all tokens of a step.
        kl_target: of the divergence from the reference, nats an answer, towards which ``kl_coef`` is moved; None: it
            stays.
        kl_horizon: rollouts in which it is moved.
    """

    samples_per_prompt: int = 1
    num_ppo_epochs: int = 4
    clip_range: float = 0.2
    clip_range_vf: float | None = 0.2
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_loss_coef: float = 0.5
    entropy_coef: float = 0.0
    target_kl: float | None = None
    normalize_advantages: bool = True
    kl_target: float | None = None
    kl_horizon: int = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_ppo_epochs", "kl_horizon"):
            check_range(self, name, 1)
        for name in ("gamma", "gae_lambda"):
            check_range(self, name, 0, 1)
        check_range(self, "clip_range", above=0, most=1)
        for name in ("clip_range_vf", "target_kl", "kl_target"):
            check_range(self, name, above=0)
        check_range(self, "value_loss_coef", above=0)  # values that are not learnt are noise
        check_range(self, "entropy_coef", 0)
        if self.kl_target is not None and self.kl_coef == 0:
            raise UsageError(f"kl_target={self.kl_target}; it moves a kl_coef that is above 0, and kl_coef is 0")


@register
class PPO(PolicyGradient):
    """See the module."""

    name: ClassVar[str] = "PPO"
    Options: ClassVar[type[PPOOptions]] = PPOOptions
    memory: ClassVar[Method] = Method.PPO
    options: PPOOptions

    def learning(self, work: Training) -> dict[str, Any]:
        """With a value head."""
        return {**super().learning(work), "passes": self.options.num_ppo_epochs, "valued": True}

    def learn(self, trainer: RolloutTrainer) -> None:
        """See the module."""
        options = self.options
        objective = trainer.objective(
            clip=(options.clip_range, options.clip_range),
            entropy_coef=options.entropy_coef,
            value_coef=options.value_loss_coef,
            value_clip=options.clip_range_vf,
        )
        control = KLControl(options.kl_coef, options.kl_target, options.kl_horizon)
        control = KLControl(**trainer.kept.get("control", asdict(control)))
        for step in trainer.steps():
            rollouts = trainer.rollouts(step)
            own = [rollouts[place] for place in trainer.mine(rollouts)]
            now, values = trainer.score(own)
            drawn = trainer.old_logprobs(step, own, now)
            items, figures = estimated(
                own, now, drawn, values, trainer.ref_logprobs(own), control.weight, trainer.world,
                gamma=options.gamma, lam=options.gae_lambda, normalise=options.normalize_advantages,
            )  # fmt: skip
            learnt: list[StepFigures] = []
            for number in range(options.num_ppo_epochs):
                one_pass = [
                    trainer.trainee.step([items[place] for place in places], objective.loss, objective.weight)
                    for places in trainer.minibatches(step, number, len(rollouts))
                ]
                learnt += one_pass
                means = pooled_means(one_pass)
                if options.target_kl is not None and means.get("approx_kl", 0.0) > options.target_kl:
                    break
            figures |= {"kl_coef": control.weight, "passes": number + 1.0}
            control = control.after(figures.get("divergence", 0.0), len(rollouts))
            trainer.finish(step, rollouts, learnt, {**means, **figures}, {"control": asdict(control)})
