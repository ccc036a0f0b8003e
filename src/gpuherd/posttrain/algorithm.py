"""What an algorithm is: it collects data with the policy of the round before, and trains the next policy on it.

Nothing here knows of queues or rounds' folders: ``posttrain.rounds`` calls it in jobs, ``posttrain.learning`` in
processes, and a notebook may call it too. No torch is imported with this module or with an algorithm's: option classes
are read by commands that start at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from gpuherd.posttrain.policy import Policy
from gpuherd.posttrain.problem import Problem, Task
from gpuherd.posttrain.rollout import Comparison, Rollout

Row = Rollout | Comparison


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn while data is collected (and in evaluations of samples)."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int = 32
    use_chat_template: bool = False
    seed: int = 0


def cut_draws(sampling: Sampling, algorithm: str, block: str) -> str | None:
    """A warning of draws that an on-policy algorithm learns from and that top-p or top-k cuts; None where neither does.

    Its log-probs are of the policy's whole law at the sampling temperature: of draws from a part of it the ratio of new
    to old stays what it says, but their mean is the gradient of no policy's reward, and what is cut is never unlearnt.

    Args:
        block: of the configuration, where both keys stand.

    >>> cut_draws(Sampling(), "GRPO", "model") is None
    True
    >>> cut_draws(Sampling(top_k=50), "GRPO", "model").partition(",")[0]
    'GRPO: draws by model.top_k=50 are not of the law that its log-probs are of'
    """
    said = [] if sampling.top_p == 1 else [f"{block}.top_p={sampling.top_p:g}"]
    said += [] if sampling.top_k == 0 else [f"{block}.top_k={sampling.top_k}"]
    if not said:
        return None
    return (
        f"{algorithm}: draws by {' and '.join(said)} are not of the law that its log-probs are of, and its gradient is "
        f"biased; set {block}.top_p=1 and {block}.top_k=0"
    )


@dataclass(frozen=True, slots=True)
class Precision:
    """Of models: ``dtype`` of their weights (float32, bfloat16, float16; None: the checkpoint's), ``amp_dtype`` of
    autocast while training (None: none), and which attention (eager, sdpa, flash_attention_2)."""

    dtype: str | None = None
    amp_dtype: str | None = None
    attention: str = "sdpa"

    @property
    def frozen(self) -> Precision:
        """The same for weights that no step changes. Under autocast float32 is there to keep small changes: without any
        they stay as the checkpoint has them, which of a bfloat16 one is half the memory for the same numbers."""
        if self.amp_dtype is not None and self.dtype == "float32":
            return replace(self, dtype=None)
        return self


@dataclass(frozen=True, slots=True)
class Collecting:
    """Data to be collected by one job.

    Attributes:
        task, problems: what is asked; this job's share of the round's problems.
        policy: of the round before (of the first round: the reference).
        reference: the model that everything began with.
        round: from 0.
        reward_batch_size: completions that are scored at once.
    """

    task: Task
    problems: Sequence[Problem]
    policy: Policy
    reference: Policy
    round: int
    sampling: Sampling
    precision: Precision
    device: str
    reward_batch_size: int = 32


@dataclass(frozen=True, slots=True)
class Training:
    """A policy to be trained by one job, in one process or several (``posttrain.training.world``).

    Attributes:
        task: for algorithms that sample while they train; None where only rows are learnt from.
        problems: of the training split.
        rows: what was collected, a sequence a round, this one's last; read from disk by the caller.
        policy: of the round before.
        reference: the model that everything began with.
        value_model: what a classifier starts from, for the guided algorithms.
        folder: where the trained model or classifier goes (``folder/model``); ``folder/checkpoints`` while at work.
        steps: ``posttrain.training.options.StepOptions``: micro-batches, gradient checkpointing, and so on.
        digests: ``sha256`` of policy, reference and value model by these names; checkpoints record them, so that a
            model whose files have changed is no longer taken for the same.
        root: the run's folder, where that is not ``folder``. Checkpoints name paths below it relative to it, so that a
            moved run can be resumed.
    """

    task: Task | None
    problems: Sequence[Problem]
    rows: Sequence[Sequence[Row]]
    policy: Policy
    reference: Policy
    value_model: str | None
    folder: Path
    round: int
    sampling: Sampling
    precision: Precision
    device: str
    seed: int = 0
    steps: Any = None
    reward_batch_size: int = 32
    root: Path | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def named(self, policy: Policy) -> dict[str, Any]:
        """The policy as JSON values that identify it, independent of where the run's folder is now."""
        return policy.to_dict(self.folder if self.root is None else self.root)


class Algorithm(Protocol):
    """One algorithm with its options (a frozen dataclass, ``Options``, that stands in the same file)."""

    name: ClassVar[str]
    guided: ClassVar[bool]  # its policies are the reference with a classifier, evaluated at each of several etas
    on_policy: ClassVar[bool]  # it learns by the log-probs of what it drew: see ``cut_draws``

    def collect(self, work: Collecting) -> Iterator[Row]:
        """The rows of this job's problems, in their order. The same for any division into jobs."""
        ...

    def train(self, work: Training) -> Policy:
        """Trains and writes ``work.folder``; goes on from a checkpoint that lies there. Returns ``policy(folder)``."""
        ...

    def policy(self, work: Training) -> Policy:
        """The policy that a finished training in ``work.folder`` stands for."""
        ...
