"""The proxy of algorithms from human feedback: a reward model that is learnt from preferences in the reward's place.

It learns and scores in float32, whatever the policy computes in. Steps of 1e-5 would be lost in bfloat16, and float16
knows no gradient below 6e-8. A score near 3 has steps of 0.016 in bfloat16: equal completions of unlike batches would
earn unlike rewards, which GRPO divides by their own spread. Autocast in training is as the run says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import first_difference
from gpuherd.posttrain.engine.options import Watching, hooks_of
from gpuherd.posttrain.types import Training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuherd.posttrain.rewards.reward_model import RewardModel
    from gpuherd.posttrain.types import Comparison, Policy

logger = logging.getLogger(__name__)

_DTYPE = "float32"


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """Options of algorithms from human feedback.

    Attributes:
        preferences: a file or a data set of the Hub with prompt, chosen and rejected, in place of comparisons of
            samples.
        proxy_model: what the proxy starts from; None: the value model, else the reference. It has the policy's tokens.
        proxy_epochs, proxy_lr, proxy_batch_size: of its training.
    """

    preferences: str | None = None
    proxy_model: str | None = None
    proxy_epochs: int = 5
    proxy_lr: float = 2e-5
    proxy_batch_size: int = 16

    def check_proxy(self) -> None:
        """Raises UsageError for what is out of range."""
        for name in ("proxy_epochs", "proxy_batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}; the least is 1")
        if not 0 < self.proxy_lr < float("inf"):
            raise UsageError(f"proxy_lr={self.proxy_lr}; it is above 0")

    def proxy_base(self, value_model: str | None, reference: str) -> str:
        """The model that the proxy starts from."""
        return self.proxy_model or value_model or reference


def compared_by_people(preferences: str, policy: Policy, *, chat: bool) -> list[Comparison]:
    """The preferences of a file or data set, as a policy's tokens; refused rows are logged. Raises UsageError, and what
    ``read_preferences`` raises."""
    from gpuherd.posttrain.preference.data import read_preferences
    from gpuherd.posttrain.preference.tokens import Writing, load_tokenizer

    found = read_preferences(preferences)
    if (refused := found.refusals()) is not None:
        logger.warning("%s", refused)
    return Writing(load_tokenizer(policy.model, policy.adapter), chat=chat).comparisons(found.pairs)


def train_proxy(
    work: Training, comparisons: Sequence[Comparison], options: ProxyOptions, *, num_workers: int = 0
) -> Path:
    """The folder of the proxy, ``work.folder/proxy/model``; nothing is done where it is trained already.

    Raises UsageError where it would read other tokens than the policy writes, and as ``train_reward_model``.
    """
    from gpuherd.posttrain.preference.reward_model import RewardTraining, train_reward_model
    from gpuherd.posttrain.preference.tokens import load_tokenizer

    base = options.proxy_base(work.value_model, work.reference.model)
    ours, its = load_tokenizer(work.policy.model, work.policy.adapter), load_tokenizer(base)
    refuse_other_tokens(ours.get_vocab(), its.get_vocab(), base)
    return train_reward_model(
        comparisons,
        base,
        work.folder / "proxy",
        RewardTraining(
            epochs=options.proxy_epochs,
            batch_size=options.proxy_batch_size,
            lr=options.proxy_lr,
            num_workers=num_workers,
        ),
        precision=replace(work.precision, dtype=_DTYPE),
        device=work.device,
        seed=work.seed,
        steps=work.steps,
        use_chat_template=work.sampling.use_chat_template,
        watching=Watching(stopping=hooks_of(work, Watching()).stopping),
    )


def load_proxy(folder: Path, device: str, batch_size: int) -> RewardModel:
    """A trained proxy, ready to score."""
    from gpuherd.posttrain.rewards.reward_model import RewardModel

    return RewardModel(str(folder), device, _DTYPE, batch_size=batch_size)


def refuse_other_tokens(policy: Mapping[str, int], proxy: Mapping[str, int], name: str) -> None:
    """Raises UsageError where the proxy reads other tokens than the policy writes.

    Args:
        policy, proxy: token -> id.
        name: of the model that the proxy starts from.
    """
    difference = first_difference(policy, proxy, name)
    if difference is not None:
        raise UsageError(
            f"the proxy's tokenizer is another than the policy's: {difference}; choose a proxy_model of the policy's "
            "family"
        )
