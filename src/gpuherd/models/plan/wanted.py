"""In which precision a model is to lie in memory: what is said of it, what its name asks for, what its checkpoint has.
Pure; ``naming`` takes names apart.
"""

from __future__ import annotations

from dataclasses import replace

from gpuherd.errors import UsageError
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.precision import Precision

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


def precision_named(word: str) -> Precision:
    """The precision of this name. Raises UsageError, which names those that there are.

    >>> [precision_named(word).value for word in ("torch.bfloat16", "8bit", "NF4", "nf4_dq")]
    ['bf16', 'int8', 'nf4', 'nf4-dq']
    """
    key = word.strip().lower().removeprefix("torch.").replace("-", "").replace("_", "")
    found = {each.replace("-", ""): each for each in DTYPES}.get(key) or _OTHER_WORDS.get(key)
    if found is None:
        raise UsageError(f"{word!r} is no dtype that is planned for; there are {', '.join(DTYPES)}")
    return Precision(found)


def wanted_precision(model: str, ending: Precision | None, said: Precision | None) -> Precision | None:
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


def planned_in(architecture: Architecture, wanted: Precision | None) -> tuple[Architecture, Precision]:
    """The architecture and the precision in which it is planned; where that had to be assumed, the architecture says
    so. Raises as ``precision_for``."""
    precision, assumed = precision_for(architecture, wanted)
    if assumed is not None:
        architecture = replace(architecture, assumptions=(*architecture.assumptions, assumed))
    return architecture, precision
