"""The precision of a model in memory: from the option, from the suffix of its name, or from its checkpoint. Pure;
``names`` takes names apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from gpuherd.errors import UsageError
from gpuherd.models.describe.description import Architecture
from gpuherd.models.memory.kv_cache import MIB, Reserve, Workload
from gpuherd.models.memory.weights import Precision, split_precision
from gpuherd.options import option, option_fields, spellings
from gpuherd.units import size_mb, size_or_none_mb

if TYPE_CHECKING:
    from gpuherd.models.memory.training_job import TrainingJob

DTYPES = tuple(precision.value for precision in Precision if precision is not Precision.AS_STORED)
# As libraries and the guides write them.
_OTHER_WORDS = {
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "8bit": "int8",
    "4bit": "nf4",
}


def parse_precision(word: str) -> Precision:
    """The precision of this name. Raises UsageError, which names those that there are.

    >>> [parse_precision(word).value for word in ("torch.bfloat16", "8bit", "NF4", "nf4_dq")]
    ['bf16', 'int8', 'nf4', 'nf4-dq']
    """
    key = word.strip().lower().removeprefix("torch.").replace("-", "").replace("_", "")
    found = {each.replace("-", ""): each for each in DTYPES}.get(key) or _OTHER_WORDS.get(key)
    if found is None:
        raise UsageError(f"{word!r} is no dtype that is planned for; there are {', '.join(DTYPES)}")
    return Precision(found)


def agreed_precision(model: str, ending: Precision | None, option_dtype: Precision | None) -> Precision | None:
    """The options as given, None for those left out.

    Args:
        model: as the user named it, for messages.
        ending: what its name asks for (``split_precision``).
        option_dtype: the option, as by ``--dtype``.

    Raises UsageError when both ask for something else; 4 bits with double quantisation are 4 bits, too.
    """
    if ending is None or option_dtype in (None, ending) or (ending, option_dtype) == (Precision.NF4, Precision.NF4_DQ):
        return option_dtype or ending
    raise UsageError(f"{model} asks for {ending}, and --dtype for {option_dtype}; leave one of them out")


def precision_for(architecture: Architecture, requested: Precision | None) -> tuple[Precision, str | None]:
    """The precision in which a model is planned, and a sentence where it had to be assumed.

    Raises UsageError for another than that of a checkpoint that is quantised already: it is loaded as it is.
    """
    if architecture.stored == Precision.AS_STORED:
        if requested not in (None, Precision.AS_STORED, Precision.AS_STORED.computes_in):
            raise UsageError(f"{architecture.model} is quantised already and loaded as it is; leave {requested} out")
        return Precision.AS_STORED, None
    if requested is not None:
        return requested, None
    if architecture.stored in DTYPES:
        return Precision(architecture.stored), None
    return Precision.BF16, "Neither config nor weights tell the dtype: bf16 is assumed; --dtype says another."


def resolve_precision(architecture: Architecture, requested: Precision | None) -> tuple[Architecture, Precision]:
    """The architecture and the precision in which it is planned; where that had to be assumed, the architecture says
    so. Raises as ``precision_for``."""
    precision, assumed = precision_for(architecture, requested)
    return architecture if assumed is None else architecture.with_remarks(assumed), precision


ParallelOption = Literal["auto", "layers", "tensor", "replica"]
PARALLEL_OPTIONS: tuple[ParallelOption, ...] = ("auto", "layers", "tensor", "replica")


def parallel_option(word: str) -> ParallelOption:
    """The layout of this name. Raises UsageError, which names those that there are."""
    for each in PARALLEL_OPTIONS:
        if each == word:
            return each
    raise UsageError(f"parallel={word!r}; it is one of {', '.join(PARALLEL_OPTIONS)}")


# Options of a memory plan, as the command line and Python name it. Declares and checks; plans nothing.

AUTO = "auto"
_MOST = 10**9


def positive_integer(word: str) -> int:
    """A whole number above 0. Raises ValueError with a sentence."""
    if not re.fullmatch(r"\d{1,10}", word, re.ASCII) or not 1 <= int(word) <= _MOST:
        raise ValueError(f"{word!r} is not a whole number above 0")
    return int(word)


def reserve_words(word: str) -> str:
    """A size, a share or both (``2GB``, ``5%``, ``1GB+5%``), checked. Raises ValueError with a sentence."""
    _fixed_and_share(word)
    return word


def _fixed_and_share(word: str) -> tuple[int, float]:
    """Bytes, and a share of the GPU's memory."""
    fixed, share = 0, 0.0
    for part in word.split("+"):
        percent = re.fullmatch(r"\s*(\d{1,2}(?:\.\d{1,3})?)\s*%\s*", part, re.ASCII)
        try:
            share, fixed = (share + float(percent[1]) / 100, fixed) if percent else (share, fixed + _bytes(part))
        except ValueError:
            raise ValueError(f"{word!r} is no reserve; write 2GB, 5% or 1GB+5%, or 0 for none") from None
    if share >= 1:
        raise ValueError(f"{word!r} would keep the whole GPU free")
    return fixed, share


def _bytes(word: str) -> int:
    return size_or_none_mb(word) * MIB


_plan, _training = partial(option, None), partial(option, None, group="training")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is to be done with a model, and on which GPUs. None: not given."""

    dtype: Precision | None = _plan(
        help="how the weights lie in memory: fp32, bf16, fp16, int8, nf4 or nf4-dq (default: as in the checkpoint)",
        aliases=("quantization", "precision"),
        parse=parse_precision,
        metavar="DTYPE",
    )
    batch: int | None = _plan(help="sequences at once (default: 1)", parse=positive_integer, metavar="N")
    prompt_tokens: int | None = _plan(
        help="tokens of the longest prompt (default: 512)", parse=positive_integer, metavar="N"
    )
    new_tokens: int | None = _plan(
        help="tokens of the longest answer (default: 64; of training 512)", parse=positive_integer, metavar="N"
    )
    gpus: str | None = _plan(
        help="which GPUs: 4x40GB, 2x80GB+4x24GB, 4xA100-40, or auto: those of this machine, as free as they are now "
        "(default: auto where there are any, else a table of usual ones)",
        metavar="GPUS",
    )
    parallel: ParallelOption | None = _plan(
        help="auto: the fewest GPUs that hold it, replicas over the rest; replica: one GPU each; layers: over all, one "
        "after the other; tensor: each layer over all (default: auto)",
        choices=PARALLEL_OPTIONS,
    )
    gpus_per_job: int | None = _plan(
        help="GPUs of one replica (default: what --parallel says)",
        aliases=("gpus-per-replica",),
        parse=positive_integer,
        metavar="N",
    )
    adapter: str | None = _plan(
        help="a LoRA adapter that is loaded beside the model: a folder, or a Hugging Face id", metavar="ADAPTER"
    )
    reserve: str | None = _plan(
        help="kept free on each GPU against fragmentation: 2GB, 5% or 1GB+5% (default: 256MB+5%)",
        parse=reserve_words,
        metavar="SIZE",
    )
    cuda_context: int | None = _plan(
        help="what CUDA takes for itself on each GPU (default: 512MB)",
        parse=size_mb,
        metavar="SIZE",
    )
    busy_too: bool = option(False, help="with auto: plan also with what busy GPUs have left")

    def workload(self) -> Workload:
        """What is to be generated at once."""
        return Workload(**{name: number for name, number in _workload_numbers(self).items() if number is not None})

    def kept(self) -> Reserve:
        """What is kept free on each GPU."""
        usual = Reserve()
        fixed, share = (usual.fixed, usual.share) if self.reserve is None else _fixed_and_share(self.reserve)
        context = usual.context if self.cuda_context is None else self.cuda_context * MIB
        return Reserve(context=context, fixed=fixed, share=share)


def _workload_numbers(options: PlanOptions) -> dict[str, int | None]:
    return {each.name: getattr(options, each.name) for each in fields(Workload)}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How a model is to be trained; with ``train`` None it is not. None: not given."""

    train: str | None = _training(
        help="plan a training of this kind in place of answers", choices=("sft", "dpo", "grpo", "ppo")
    )
    lora: int | None = _training(
        help="train a LoRA adapter of this rank (without a number: 16) in place of the model; --dtype then says how "
        "the frozen model lies in memory",
        parse=positive_integer,
        alone="16",
        metavar="RANK",
    )
    lora_targets: str | None = _training(
        help="modules that get the adapter, with commas: q_proj,v_proj (default: all linear ones)",
        metavar="NAMES",
    )
    strategy: str | None = _training(
        help="one GPU, a copy on each, or parameters, gradients and optimiser divided (default: single)",
        choices=("single", "ddp", "fsdp"),
    )
    training_precision: str | None = _training(
        help="numbers that are trained: fp32, fp32 with products in bf16, or bf16 alone (default: mixed)",
        choices=("fp32", "mixed", "bf16"),
    )
    optimiser: str | None = _training(
        help="(default: adamw)", aliases=("optimizer",), choices=("adamw", "adamw-8bit", "sgd", "adafactor")
    )
    accumulation: int | None = _training(
        help="passes before each step of the optimiser (default: 1)", parse=positive_integer, metavar="N"
    )
    samples: int | None = _training(
        help="with grpo: answers to each prompt (default: 8)", parse=positive_integer, metavar="N"
    )
    no_checkpointing: bool = option(
        False, help="keep what every layer computes, in place of computing it twice", group="training"
    )
    attention: str | None = _training(
        help="eager keeps every attention score (default: sdpa)", choices=("sdpa", "eager")
    )
    loss: str | None = _training(
        help="logits of all positions at once, or a part after the other (default: whole)",
        choices=("whole", "chunked"),
    )
    reference: str | None = _training(
        help="whether a frozen copy of the model is asked too (default: as the method needs it)",
        choices=("yes", "no"),
    )
    value: str | None = _training(
        help="with ppo: values from a head on the model, or from a model of their own (default: head)",
        choices=("head", "model"),
    )
    no_reshard: bool = option(
        False, help="with fsdp: keep every layer's parameters from forward to backward", group="training"
    )
    bucket_view: bool = option(
        False, help="with ddp: gradients lie in the buckets that are sent, not beside them", group="training"
    )
    reward: str | None = _training(help="a reward model that lies on each GPU too", metavar="MODEL")

    def refuse_without_train(self) -> None:
        """Raises UsageError for an option of training where nothing is trained."""
        if self.train is not None:
            return
        for declared, spec in option_fields(TrainingOptions):
            if getattr(self, declared.name) != declared.default:
                flag = spellings(declared.name, spec)[0][0]
                raise UsageError(f"{flag} is said of a training; add --train sft, dpo, grpo or ppo")

    def job(self, options: PlanOptions, dtype: Precision | None) -> TrainingJob:
        """The training that is to be planned. ``dtype``: the precision of a frozen model; None: as usual.

        Raises UsageError for what does not go together.
        """
        from gpuherd.models.memory.training_job import LoraShape, TrainingJob

        if dtype is not None and self.lora is None:
            raise UsageError(
                f"--dtype {dtype} says how a frozen model lies in memory, and this training freezes nothing: add "
                "--lora, or say --training-precision fp32, mixed or bf16"
            )
        if self.lora_targets is not None and self.lora is None:
            raise UsageError("--lora-targets names modules of an adapter; add --lora")
        if self.reference is not None and self.train == "sft":
            raise UsageError("--reference is of trainings that compare with a frozen copy; with sft leave it out")
        for name, option_of, own in (
            ("samples", "grpo", self.train),
            ("value", "ppo", self.train),
            ("no_reshard", "fsdp", self.strategy or "single"),
            ("bucket_view", "ddp", self.strategy or "single"),
        ):
            if getattr(self, name) and own != option_of:
                raise UsageError(f"--{name.replace('_', '-')} is an option of {option_of}; with {own} leave it out")
        shape = None if self.lora is None else LoraShape(self.lora)
        if shape is not None and self.lora_targets is not None:
            names = (part.strip() for part in self.lora_targets.split(","))
            shape = replace(shape, targets=tuple(filter(None, names)))
        given = {
            "method": self.train,
            "precision": self.training_precision,
            **{name: getattr(self, name) for name in _LIKE_JOB},
            **_workload_numbers(options),
        }
        usual = TrainingJob()
        # A word becomes what the field's default is: a member of an enumeration, or a word.
        chosen = {name: type(getattr(usual, name))(value) for name, value in given.items() if value is not None}
        return TrainingJob(
            **chosen,
            lora=shape,
            base=dtype,
            checkpointing=not self.no_checkpointing,
            reference=None if self.reference is None else self.reference == "yes",
            reshard=not self.no_reshard,
            bucket_view=self.bucket_view,
        )


# Options that are fields of the job by the same name.
_LIKE_JOB = ("strategy", "optimiser", "accumulation", "samples", "attention", "loss", "value")


# ---- the request as the user gave it, and other requests as commands ----------------------------------------------

_SWITCHES = ("--no-checkpointing",)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request to the planner, as the user gave it.

    Attributes:
        models: as the user named them.
        simulate: the value of ``--simulate``.
        here: the GPUs are those of this machine.
    """

    models: tuple[str, ...]
    options: PlanOptions
    training: TrainingOptions
    simulate: str | None = None
    here: bool = False

    @property
    def without_dtype(self) -> tuple[str, ...]:
        """The models without the dtype that a name may end with (``-8bit``)."""
        return tuple(split_precision(model)[0] for model in self.models)


def command_words(request: PlanRequest, changes: Sequence[str] = ()) -> list[str]:
    """The request as a command, with other options where ``changes`` has them (``--batch 4 --checkpointing``)."""
    flags = _flags(request)
    for flag, values in _by_flag(changes):
        opposite = flag.replace("--", "--no-", 1)
        if not values and opposite in _SWITCHES:
            flags.pop(opposite, None)
            continue
        if flag == "--parallel":
            flags.pop("--gpus-per-job", None)
        if flag == "--strategy":
            flags.pop("--bucket-view", None)
            flags.pop("--no-reshard", None)
        flags[flag] = values
    before = ["--simulate", request.simulate] if request.simulate is not None else []
    models = request.without_dtype if "--dtype" in flags else request.models
    return ["gpuherd", *before, "plan", *models, *[word for flag, values in flags.items() for word in (flag, *values)]]


def _flags(request: PlanRequest) -> dict[str, list[str]]:
    """Flag -> its words, of all options that were given."""
    flags: dict[str, list[str]] = {}
    for values, kind in ((request.options, PlanOptions), (request.training, TrainingOptions)):
        for declared, spec in option_fields(kind):
            value = getattr(values, declared.name)
            if value != declared.default:
                words = [] if value is True else [f"{value}MB" if declared.name == "cuda_context" else str(value)]
                flags[spellings(declared.name, spec)[0][0]] = words
    return flags


def _by_flag(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    at = 0
    while at < len(words):
        end = at + 1
        while end < len(words) and not words[end].startswith("--"):
            end += 1
        yield words[at], list(words[at + 1 : end])
        at = end
