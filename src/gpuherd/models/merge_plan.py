"""What a merge will write: which tensor comes from where, in which format, into which file. Pure: headers in.

A tensor that the adapter leaves alone is copied as it is stored. The format of the result is the config's, as
transformers loads a model, else that of most of the weights; where that is another than the file's, or where it is
asked for, all tensors of the file's main format are converted. Numbers that a model keeps in float32 beside 16-bit
weights stay in float32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpuherd.errors import BadModel
from gpuherd.models.dtypes import stored_bytes
from gpuherd.models.kinds import Ties, classify, ties_of
from gpuherd.models.merged import Merged
from gpuherd.models.source import TensorInfo

# Names of formats: safetensors' by torch's, as configs write them.
BY_TORCH = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
TORCH = {short: name for name, short in BY_TORCH.items()}
# Of a model whose files are no safetensors: what fits into most machines' page cache.
DEFAULT_SHARD_BYTES = 5 * 10**9

Action = Literal["copy", "convert", "edit"]


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor of the result.

    Attributes:
        name: in the result, and in the base where it has it.
        shape: its shape.
        dtype: format that it is written in.
        nbytes: bytes that it takes.
        action: ``copy`` the stored bytes, ``convert`` them to another format, or ``edit`` them by the adapter.
        replaced: whether the adapter holds it whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    action: Action
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The files of the result, each with its tensors, and the format of its weights."""

    files: Mapping[str, tuple[Written, ...]]
    dtype: str
    converted: bool

    @property
    def tensors(self) -> list[Written]:
        """All tensors."""
        return [tensor for tensors in self.files.values() for tensor in tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def params(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def changed(self) -> list[str]:
        """Names of the tensors that the adapter changes or brings."""
        return [tensor.name for tensor in self.tensors if tensor.action == "edit" or tensor.replaced]


def plan_merge(
    merged: Merged, files: Mapping[str, str], *, dtype: str | None = None, shard_bytes: int | None = None
) -> MergePlan:
    """What to write for a base with an adapter.

    Args:
        merged: the base's headers, and the adapter's edits.
        files: in which file of the base each tensor lies.
        dtype: format of the result by safetensors' name (F32, F16, BF16); None for the base's own.
        shard_bytes: the largest file of the result; None for the base's division into files.

    Raises:
        BadModel: the base is quantised, or has no floating-point weights.
    """
    _refuse_codes(merged.base.tensors.values())
    main = _main_format(merged.base.tensors.values())
    target = dtype or _configured(merged.config) or main
    left_out = _tied_copies(merged)
    written = [_written(merged, name, main, target) for name in merged.tensors if name not in left_out]
    return MergePlan(_divided(written, files, shard_bytes), target, target != main)


def quantised_base(form: str) -> BadModel:
    """The error for a base whose numbers are codes."""
    return BadModel(
        f"the base is quantised ({form}): a sum can't be written back into its codes. "
        "Give the unquantised model by --base-model, and quantise the result"
    )


def _refuse_codes(infos: Iterable[TensorInfo]) -> None:
    codes = next((info for info in infos if info.decoded), None)
    if codes is not None:
        raise quantised_base(f"{codes.name!r} is {codes.dtype}")


def _main_format(infos: Iterable[TensorInfo]) -> str:
    """The floating-point format of most bytes."""
    sizes: Counter[str] = Counter()
    for info in infos:
        if info.dtype in TORCH:
            sizes[info.dtype] += info.nbytes
    if not sizes:
        raise BadModel("the base has no weights in a floating-point format")
    return max(sizes, key=lambda name: (sizes[name], name))


def _configured(config: Mapping[str, Any]) -> str | None:
    """The format that a config names, which transformers loads the model in; of its text part if that names one."""
    parts = (config, config.get("text_config"))
    for part in parts:
        if isinstance(part, Mapping):
            for key in ("dtype", "torch_dtype"):
                if isinstance(part.get(key), str):
                    return BY_TORCH.get(str(part[key]).removeprefix("torch."))
    return None


def _tied_copies(merged: Merged) -> frozenset[str]:
    """The tensors that are left out, because they are an embedding too and loading ties them to it again."""
    nothing = Ties({}, frozenset())
    return frozenset(
        name
        for name, owner in ties_of(merged.tensors, merged.config).counted_in.items()
        if merged.tensors[name].shares is None
        or classify(merged.tensors[owner], nothing, embeddings=True)[0] == "embedding"
    )


def _written(merged: Merged, name: str, main: str, target: str) -> Written:
    info = merged.tensors[name]
    stored = info.dtype
    # What the adapter holds whole takes the format of what it stands for, as in PEFT.
    place = merged.base.tensors.get(name)
    own = place.dtype if place is not None else main
    wanted = target if own == main else own
    if stored not in TORCH:
        wanted = stored
        if name in merged.edits:
            raise BadModel(f"the adapter changes {name!r}, but the base's numbers there are {stored}, no weights")
    if not _is_writable(name):
        raise BadModel(f"{name!r} can't be the name of a tensor in a safetensors file; rename it in the base")
    action: Action = "edit" if name in merged.edits else "copy" if wanted == stored else "convert"
    nbytes = stored_bytes(wanted, math.prod(info.shape))
    if nbytes is None:
        raise BadModel(f"tensor {name!r} has the format {stored}, which can't be written")
    return Written(name, info.shape, wanted, nbytes, action, name in merged.replaced)


def _is_writable(name: str) -> bool:
    """Whether it can stand in a header: valid text, and not the one name that has a meaning there."""
    return name != "__metadata__" and not any("\ud800" <= letter <= "\udfff" for letter in name)


def _divided(
    tensors: Sequence[Written], files: Mapping[str, str], shard_bytes: int | None
) -> dict[str, tuple[Written, ...]]:
    """The tensors by file, in their order."""
    safetensors = all(file.endswith(".safetensors") for file in files.values())
    groups: list[list[Written]] = []
    if shard_bytes is None and safetensors:
        by_file: dict[str, list[Written]] = {}
        last = next(reversed(list(files.values())), "")
        for tensor in tensors:
            by_file.setdefault(files.get(tensor.name, last), []).append(tensor)
        groups = list(by_file.values())
    else:
        groups = _packed(tensors, shard_bytes or DEFAULT_SHARD_BYTES)
    if len(groups) == 1:
        return {"model.safetensors": tuple(groups[0])}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": tuple(group)
        for number, group in enumerate(groups, start=1)
    }


def _packed(tensors: Iterable[Written], most: int) -> list[list[Written]]:
    """Tensors one after the other into files of at most so many bytes; a larger one gets a file of its own."""
    groups: list[list[Written]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(tensor)
        room -= tensor.nbytes
    return groups
