"""What the rooms of post-training hand to each other: a problem and what answers to it earned, a policy (a way to
answer), and what an algorithm is: it collects data with the policy of the round before, and trains the next one on it.

Plain frozen data. No torch is imported here or with an algorithm's module: option classes are read by commands that
start at once. Nothing here knows of queues or of rounds' folders: ``posttrain.runs`` calls algorithms in jobs,
``posttrain.learning`` in processes, and a notebook may call them too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from gpuherd.lm.guidance.guide import Guide
from gpuherd.models.memory.training_job import Method


class Split(StrEnum):
    """Which part of a task's problems; they have no problem in common."""

    TRAIN = "train"
    HELDOUT = "heldout"  # for choosing among policies
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to be answered.

    Attributes:
        id: unique in the task, and the same whenever the task is read.
        prompt: what stands before the answer; with a chat template it is the user's message.
        answers: right answers, where the task knows some; the first is the one that is imitated.
        hidden: what the reward needs too, and the policy never sees (tests of code, a graph).
        messages: role and content of the conversation before the answer, where it is more than one message of the
            user's; a chat template writes these, and ``prompt`` is their texts with blank lines between them.
        chat: the same of a conversation with tools, calls or turns out of order, which ``messages`` can't say: JSON of
            ``messages`` and ``tools`` as chat templates take them.
    """

    id: str
    prompt: str
    answers: tuple[str, ...] = ()
    hidden: Mapping[str, str] = field(default_factory=dict)
    messages: tuple[tuple[str, str], ...] = ()
    chat: str = ""


@dataclass(frozen=True, slots=True)
class Reward:
    """What a completion earned.

    Attributes:
        value: finite.
        correct: None where the task knows no right and wrong.
        parts: what it is made of, by name.
        note: why, where a person would ask (a test that failed, no answer found).
    """

    value: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str | None = None


class ProblemSource(Protocol):
    """A source of problems; any task is one."""

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """The first ``count`` problems of a split in an order that the seed fixes; None: all (or the task's own number
        where it makes as many as are asked for). Raises UsageError where there are not so many."""
        ...

    def close(self) -> None:
        """Ends what was started (processes, models)."""
        ...


class Scoring(Protocol):
    """Rewards for problems of any task whose hidden parts and answers it understands.

    Attributes:
        verifiable: rewards are 0 or 1 and say whether a completion is right.
        reward_range: the least and the largest reward; what a histogram of rewards spans.
    """

    verifiable: bool
    reward_range: tuple[float, float]

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """What each completion earns: scored in batches, in this order."""
        ...

    def close(self) -> None:
        """Ends what scoring has started (processes, models)."""
        ...


class Task(ProblemSource, Scoring, Protocol):
    """Problems of one kind, and what completions earn; ``name``: its id."""

    name: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion, or one episode of several turns.

    Attributes:
        problem: its problem's id.
        sample: its number among the rollouts of this problem: those with one problem and one prompt are a group.
        prompt_ids: tokens of the prompt, special tokens included.
        ids: all tokens behind the prompt, the one that ended it included; an environment's words too.
        by_policy: which of ``ids`` the policy chose; the others are not trained on.
        log_probs: of the tokens that the policy chose, under the policy that sampled, at the sampling temperature,
            without top-k and top-p; None for the others (and where not finite).
        text: the completion as text, without the end token; of an episode, the policy's last turn.
        reward: what it earned in all.
        correct: None where the task knows no right and wrong.
        finished: the policy ended it by itself, not the limit of tokens.
        rolled_in: so many tokens at the beginning of ``ids`` came from another policy (Q#, PITA).
        turn_rewards: what was earned at a place in ``ids`` (of the last token before it was earned): (place, reward);
            sums to ``reward``. Of a single answer one pair at its last token.
    """

    problem: str
    sample: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    by_policy: tuple[bool, ...]
    log_probs: tuple[float | None, ...]
    text: str
    reward: float
    correct: bool | None
    finished: bool
    rolled_in: int = 0
    turn_rewards: tuple[tuple[int, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From ``to_dict``, or its JSON read back."""
        rewards = tuple((int(place), float(reward)) for place, reward in values.get("turn_rewards", ()))
        return cls(**{**_with_tuples(values), "turn_rewards": rewards})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two completions that begin alike, and which of them is preferred.

    Attributes:
        problem: its problem's id.
        prompt_ids: tokens of the prompt.
        context_ids: what both completions begin with; empty where the whole completions are compared.
        chosen_ids, rejected_ids: what follows, end tokens included.
        chosen, rejected: both as text, with the context.
        chosen_reward, rejected_reward: what they earned; None where a person preferred.
    """

    problem: str
    prompt_ids: tuple[int, ...]
    context_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    chosen: str
    rejected: str
    chosen_reward: float | None = None
    rejected_reward: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From ``to_dict``, or its JSON read back."""
        return cls(**_with_tuples(values))


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}


_INSIDE = "inside"


@dataclass(frozen=True, slots=True)
class Policy:
    """What is sampled and evaluated.

    Attributes:
        model: an id of the Hub or a folder.
        adapter: a LoRA adapter on top, or None.
        guide: what guides it while it decodes, or None.
    """

    model: str
    adapter: str | None = None
    guide: Guide | None = None

    def at(self, eta: float) -> Policy:
        """The same, guided at another eta; itself where it is not guided."""
        return self if self.guide is None else replace(self, guide=replace(self.guide, eta=eta))

    @property
    def sha256(self) -> str:
        """The same for the same files of model, adapter and classifier, wherever they lie. Reads all of them whose hash
        is not kept. Raises MissingModel, BadModel, MissingExtra."""
        from gpuherd.models.load.identity import files_digest, model_files

        guide = () if self.guide is None else (Path(self.guide.classifier),)
        return files_digest(*model_files(self.model, self.adapter).folders, *guide)

    def to_dict(self, root: Path | None = None) -> dict[str, Any]:
        """Plain values, for JSON.

        Args:
            root: a run's folder; places below it are written relative to it, as ``{"inside": "models/x"}``.
        """
        guide = None if self.guide is None else self.guide.to_dict()
        values = {"model": self.model, "adapter": self.adapter, "guide": guide}
        return values if root is None else _mapped(values, partial(_relative, root=root))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], root: Path | None = None) -> Self:
        """From ``to_dict`` with the run's folder as it is now. Raises ValueError for a place out of that folder."""
        told = values if root is None else _mapped(values, partial(_absolute, root=root))
        guide = told["guide"]
        return cls(told["model"], told["adapter"], None if guide is None else Guide.from_dict(guide))


def _mapped(values: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A policy's dictionary with the places of its models changed."""
    adapter, guide = values["adapter"], values["guide"]
    return {
        **values,
        "model": change(values["model"]),
        "adapter": None if adapter is None else change(adapter),
        "guide": None if guide is None else {**guide, "classifier": change(guide["classifier"])},
    }


def _relative(word: str, root: Path) -> Any:
    path = Path(word)
    return {_INSIDE: str(path.relative_to(root))} if path.is_absolute() and path.is_relative_to(root) else word


def _absolute(word: Any, root: Path) -> str:
    if not isinstance(word, dict):
        return str(word)
    path = (root / word[_INSIDE]).resolve()
    if not path.is_relative_to(root.resolve()):
        raise ValueError("a path out of the run's folder")
    return str(root / word[_INSIDE])


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


class BackendName(StrEnum):
    """What decodes."""

    HF = "hf"  # transformers with our own decoding
    VLLM = "vllm"


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
        backend: what decodes.
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
    backend: BackendName = BackendName.HF


@dataclass(frozen=True, slots=True)
class Training:
    """A policy to be trained by one job, in one process or several (``posttrain.engine.dist_env``).

    Attributes:
        task: for algorithms that sample while they train; None where only rows are learnt from.
        problems: of the training split.
        rows: what was collected, a sequence a round, this one's last; read from disk by the caller.
        policy: of the round before.
        reference: the model that everything began with.
        value_model: what a classifier starts from, for the guided algorithms.
        folder: where the trained model or classifier goes (``folder/model``); ``folder/checkpoints`` while at work.
        steps: ``posttrain.engine.options.StepOptions``: micro-batches, gradient checkpointing, and so on.
        digests: ``sha256`` of policy, reference and value model by these names; checkpoints record them, so that a
            model whose files have changed is no longer taken for the same.
        root: the run's folder, where that is not ``folder``. Checkpoints name paths below it relative to it, so that a
            moved run can be resumed.
        backend: what decoded ``rows``, and decodes the policy where it samples while it trains.
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
    backend: BackendName = BackendName.HF
    extra: dict[str, Any] = field(default_factory=dict)

    def named(self, policy: Policy) -> dict[str, Any]:
        """The policy as JSON values that identify it, independent of where the run's folder is now."""
        return policy.to_dict(self.folder if self.root is None else self.root)


class Algorithm(ABC):
    """One algorithm with its options. A subclass stands in a file of ``algos/`` with its options (a frozen dataclass,
    ``Options``), says here all that others have to know of it, and is registered by ``algos.registry.register``.

    Attributes:
        name: what configurations call it; ``aliases``: other spellings, in lower case.
        guided: its policies are the reference with a classifier, evaluated at each of several etas.
        on_policy: it learns by the log-probs of what it drew: see ``cut_draws``.
        off_policy: the rows of a round may have been collected with an older policy than the one that is trained.
        memory: how the planner counts its training step.
        frozen_role: what plans call its ``frozen_models``.
        Options: the class of its options.
        options: those that it was made with.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    guided: ClassVar[bool] = False
    on_policy: ClassVar[bool] = False
    off_policy: ClassVar[bool] = False
    memory: ClassVar[Method] = Method.SFT
    frozen_role: ClassVar[str] = "model"
    Options: ClassVar[type[Any]]
    options: Any

    @abstractmethod
    def collect(self, work: Collecting) -> Iterator[Row]:
        """The rows of this job's problems, in their order. The same for any division into jobs."""

    @abstractmethod
    def train(self, work: Training) -> Policy:
        """Trains and writes ``work.folder``; goes on from a checkpoint that lies there. Returns ``policy(folder)``."""

    @abstractmethod
    def policy(self, work: Training) -> Policy:
        """The policy that a finished training in ``work.folder`` stands for."""

    def check(self, sampling: Sampling) -> tuple[str, ...]:  # noqa: ARG002 - of those that look at it
        """Looks at its options with the draws of a run, before anything starts. Returns warnings of what is allowed and
        seldom meant; raises UsageError, as options do, which begins with the option's name."""
        return ()

    @property
    def collects(self) -> bool:
        """Whether it learns from rows that are collected before: not where it samples while it trains (``online``), and
        not where it learns from a file (``preferences``)."""
        return not getattr(self.options, "online", False) and getattr(self.options, "preferences", None) is None

    @property
    def imitates(self) -> bool:
        """Whether it learns from the answers that problems come with, which are known before anything runs."""
        return False

    @property
    def samples(self) -> bool:
        """Whether the policy answers while it trains."""
        return False

    @property
    def draws(self) -> bool:
        """Whether it learns by the log-probs of what is drawn for it, with its options."""
        return self.on_policy

    @property
    def frozen_models(self) -> tuple[str, ...]:
        """Models other than policy and reference that are in memory while it trains and read the policy's tokens."""
        return ()

    @property
    def frozen_apart(self) -> bool:
        """Whether these lie on GPUs of their own, as many as it trains on."""
        return False

    @property
    def collected_from(self) -> str | None:
        """The model whose answers are collected, where that is not the policy."""
        return None

    def evaluated(self, task: Task) -> Task:
        """The task as its policies are evaluated on it: asked as they were trained, with the task's own rewards. Raises
        UsageError for a task that the algorithm can't learn from."""
        return task
