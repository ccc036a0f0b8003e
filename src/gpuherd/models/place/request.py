"""In which precision a model is to lie in memory: what is said of it, what its name asks for, what its checkpoint has.
Pure; ``naming`` takes names apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.workload import MIB, Reserve, Workload
from gpuherd.options import option
from gpuherd.units import size_mb, size_or_none_mb

if TYPE_CHECKING:
    from gpuherd.models.plan.training_job import TrainingJob

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

    >>> [precision_named(word).value for word in ("torch.bfloat16", "8bit", "NF4", "nf4_dq")]
    ['bf16', 'int8', 'nf4', 'nf4-dq']
    """
    key = word.strip().lower().removeprefix("torch.").replace("-", "").replace("_", "")
    found = {each.replace("-", ""): each for each in DTYPES}.get(key) or _OTHER_WORDS.get(key)
    if found is None:
        raise UsageError(f"{word!r} is no dtype that is planned for; there are {', '.join(DTYPES)}")
    return Precision(found)


def agreed_precision(model: str, ending: Precision | None, said: Precision | None) -> Precision | None:
    """What is asked for, None where nothing is.

    Args:
        model: as the user named it, for messages.
        ending: what its name asks for (``naming.split_precision``).
        said: what was said apart, as by ``--dtype``.

    Raises UsageError when both ask for something else; 4 bits with double quantisation are 4 bits, too.
    """
    if ending is None or said in (None, ending) or (ending, said) == (Precision.NF4, Precision.NF4_DQ):
        return said or ending
    raise UsageError(f"{model} asks for {ending}, and --dtype for {said}; leave one of them out")


def precision_for(architecture: Architecture, wanted: Precision | None) -> tuple[Precision, str | None]:
    """The precision in which a model is planned, and a sentence where it had to be assumed.

    Raises UsageError for another than that of a checkpoint that is quantised already: it is loaded as it is.
    """
    if architecture.stored == Precision.AS_STORED:
        if wanted not in (None, Precision.AS_STORED, Precision.AS_STORED.computes_in):
            raise UsageError(f"{architecture.model} is quantised already and loaded as it is; leave {wanted} out")
        return Precision.AS_STORED, None
    if wanted is not None:
        return wanted, None
    if architecture.stored in DTYPES:
        return Precision(architecture.stored), None
    return Precision.BF16, "Neither config nor weights tell the dtype: bf16 is assumed; --dtype says another."


def resolve_precision(architecture: Architecture, wanted: Precision | None) -> tuple[Architecture, Precision]:
    """The architecture and the precision in which it is planned; where that had to be assumed, the architecture says
    so. Raises as ``precision_for``."""
    precision, assumed = precision_for(architecture, wanted)
    if assumed is not None:
        architecture = replace(architecture, assumptions=(*architecture.assumptions, assumed))
    return architecture, precision


# What can be asked of a memory plan, as the command line and Python name it. Declares and checks; plans nothing.

AUTO = "auto"
_MOST = 10**9


def whole(word: str) -> int:
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


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is to be done with a model, and on which GPUs. None is what was not said."""

    dtype: Precision | None = option(
        None,
        help="how the weights lie in memory: fp32, bf16, fp16, int8, nf4 or nf4-dq (default: as in the checkpoint)",
        aliases=("quantization", "precision"),
        parse=parse_precision,
        metavar="DTYPE",
    )
    batch: int | None = option(None, help="sequences at once (default: 1)", parse=whole, metavar="N")
    prompt_tokens: int | None = option(
        None, help="tokens of the longest prompt (default: 512)", parse=whole, metavar="N"
    )
    new_tokens: int | None = option(
        None, help="tokens of the longest answer (default: 64; of training 512)", parse=whole, metavar="N"
    )
    gpus: str | None = option(
        None,
        help="which GPUs: 4x40GB, 2x80GB+4x24GB, 4xA100-40, or auto: those of this machine, as free as they are now "
        "(default: auto where there are any, else a table of usual ones)",
        metavar="GPUS",
    )
    parallel: str | None = option(
        None,
        help="auto: the fewest GPUs that hold it, replicas over the rest; replica: one GPU each; layers: over all, one "
        "after the other; tensor: each layer over all (default: auto)",
        choices=("auto", "layers", "tensor", "replica"),
    )
    gpus_per_job: int | None = option(
        None,
        help="GPUs of one replica (default: what --parallel says)",
        aliases=("gpus-per-replica",),
        parse=whole,
        metavar="N",
    )
    adapter: str | None = option(
        None, help="a LoRA adapter that is loaded beside the model: a folder, or a Hugging Face id", metavar="ADAPTER"
    )
    reserve: str | None = option(
        None,
        help="kept free on each GPU against fragmentation: 2GB, 5% or 1GB+5% (default: 256MB+5%)",
        parse=reserve_words,
        metavar="SIZE",
    )
    cuda_context: int | None = option(
        None,
        help="what CUDA takes for itself on each GPU (default: 512MB)",
        parse=size_mb,
        metavar="SIZE",
    )
    busy_too: bool = option(False, help="with auto: plan also with what busy GPUs have left")

    def workload(self) -> Workload:
        """What is to be generated at once."""
        usual = Workload()
        return Workload(
            batch=self.batch or usual.batch,
            prompt_tokens=self.prompt_tokens or usual.prompt_tokens,
            new_tokens=self.new_tokens or usual.new_tokens,
        )

    def kept(self) -> Reserve:
        """What is kept free on each GPU."""
        usual = Reserve()
        fixed, share = (usual.fixed, usual.share) if self.reserve is None else _fixed_and_share(self.reserve)
        context = usual.context if self.cuda_context is None else self.cuda_context * MIB
        return Reserve(context=context, fixed=fixed, share=share)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How a model is to be trained; with ``train`` None it is not. None is what was not said."""

    train: str | None = option(
        None,
        help="plan a training of this kind in place of answers",
        choices=("sft", "dpo", "grpo", "ppo"),
        group="training",
    )
    lora: int | None = option(
        None,
        help="train a LoRA adapter of this rank (without a number: 16) in place of the model; --dtype then says how "
        "the frozen model lies in memory",
        parse=whole,
        alone="16",
        metavar="RANK",
        group="training",
    )
    lora_targets: str | None = option(
        None,
        help="modules that get the adapter, with commas: q_proj,v_proj (default: all linear ones)",
        metavar="NAMES",
        group="training",
    )
    strategy: str | None = option(
        None,
        help="one GPU, a copy on each, or parameters, gradients and optimiser divided (default: single)",
        choices=("single", "ddp", "fsdp"),
        group="training",
    )
    training_precision: str | None = option(
        None,
        help="numbers that are trained: fp32, fp32 with products in bf16, or bf16 alone (default: mixed)",
        choices=("fp32", "mixed", "bf16"),
        group="training",
    )
    optimiser: str | None = option(
        None,
        help="(default: adamw)",
        aliases=("optimizer",),
        choices=("adamw", "adamw-8bit", "sgd", "adafactor"),
        group="training",
    )
    accumulation: int | None = option(
        None, help="passes before each step of the optimiser (default: 1)", parse=whole, metavar="N", group="training"
    )
    samples: int | None = option(
        None, help="with grpo: answers to each prompt (default: 8)", parse=whole, metavar="N", group="training"
    )
    no_checkpointing: bool = option(
        False, help="keep what every layer computes, in place of computing it twice", group="training"
    )
    attention: str | None = option(
        None,
        help="eager keeps every attention score (default: sdpa)",
        choices=("sdpa", "eager"),
        group="training",
    )
    loss: str | None = option(
        None,
        help="logits of all positions at once, or a part after the other (default: whole)",
        choices=("whole", "chunked"),
        group="training",
    )
    reference: str | None = option(
        None,
        help="whether a frozen copy of the model is asked too (default: as the method needs it)",
        choices=("yes", "no"),
        group="training",
    )
    value: str | None = option(
        None,
        help="with ppo: values from a head on the model, or from a model of their own (default: head)",
        choices=("head", "model"),
        group="training",
    )
    no_reshard: bool = option(
        False, help="with fsdp: keep every layer's parameters from forward to backward", group="training"
    )
    bucket_view: bool = option(
        False, help="with ddp: gradients lie in the buckets that are sent, not beside them", group="training"
    )
    reward: str | None = option(
        None, help="a reward model that lies on each GPU too", metavar="MODEL", group="training"
    )

    def refuse_without_train(self) -> None:
        """Raises UsageError for an option of training where nothing is trained."""
        from gpuherd.options import option_fields, spellings

        if self.train is not None:
            return
        for declared, spec in option_fields(TrainingOptions):
            if getattr(self, declared.name) != declared.default:
                flag = spellings(declared.name, spec)[0][0]
                raise UsageError(f"{flag} is said of a training; add --train sft, dpo, grpo or ppo")

    def job(self, options: PlanOptions, dtype: Precision | None) -> TrainingJob:
        """The training that is to be planned. ``dtype``: how a frozen model lies in memory; None: as usual.

        Raises UsageError for what does not go together.
        """
        from gpuherd.models.plan.training_job import (
            LoraShape,
            Method,
            Optimiser,
            Strategy,
            TrainingJob,
            TrainingPrecision,
        )

        if dtype is not None and self.lora is None:
            raise UsageError(
                f"--dtype {dtype} says how a frozen model lies in memory, and this training freezes nothing: add "
                "--lora, or say --training-precision fp32, mixed or bf16"
            )
        if self.lora_targets is not None and self.lora is None:
            raise UsageError("--lora-targets names modules of an adapter; add --lora")
        usual = TrainingJob()
        shape = None if self.lora is None else LoraShape(self.lora)
        if shape is not None and self.lora_targets is not None:
            shape = replace(shape, targets=tuple(part.strip() for part in self.lora_targets.split(",")))
        return TrainingJob(
            method=Method(self.train or usual.method),
            strategy=Strategy(self.strategy or usual.strategy),
            precision=TrainingPrecision(self.training_precision or usual.precision),
            optimiser=Optimiser(self.optimiser or usual.optimiser),
            lora=shape,
            base=dtype,
            batch=options.batch or usual.batch,
            prompt_tokens=options.prompt_tokens or usual.prompt_tokens,
            new_tokens=options.new_tokens or usual.new_tokens,
            accumulation=self.accumulation or usual.accumulation,
            samples=self.samples or usual.samples,
            checkpointing=not self.no_checkpointing,
            attention="eager" if self.attention == "eager" else "sdpa",
            loss="chunked" if self.loss == "chunked" else "whole",
            reference=None if self.reference is None else self.reference == "yes",
            value="model" if self.value == "model" else "head",
            reshard=not self.no_reshard,
            bucket_view=self.bucket_view,
        )
