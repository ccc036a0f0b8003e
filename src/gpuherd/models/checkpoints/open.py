"""A model's weights on disk: a folder or a single file, opened by its headers and read tensor by tensor.

Knows which files of a folder are the weights and what can be wrong with them. The file formats themselves are
``safetensors``, ``torch_pickle`` and ``gguf``; what the tensors mean is ``matrices``. Nothing is ever loaded
as a whole.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.checkpoints import gguf as gguf_model
from gpuherd.models.checkpoints import safetensors, torch_pickle
from gpuherd.models.checkpoints.quantized import Dequantized, dequantized, quantised_as
from gpuherd.models.checkpoints.stored import StoredTensor, opened
from gpuherd.models.tensors.kinds import adapter_factor
from gpuherd.models.tensors.source import Codes, FloatArray, Half, Run, TensorInfo

# A tensor in a file: its numbers, or codes for them.
ReadableTensor = StoredTensor | Dequantized
StoredT = TypeVar("StoredT", bound=ReadableTensor)

ADAPTER_CONFIG = "adapter_config.json"
# Many times the largest in use. Parsed JSON can take twenty times its size, so that a limit is needed.
MAX_CONFIG_BYTES = 5_000_000
MAX_INDEX_BYTES = 50_000_000

# In the order of preference; safetensors before pickles, as transformers does.
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_SAFETENSORS = (".safetensors",)
_PICKLES = (".bin", ".pt", ".pth")
_GGUF = (".gguf",)
# Files of a training run or of an adapter that have the same endings as weights.
_OTHER = re.compile(
    r"(training_args|optimizer.*|scheduler.*|scaler.*|rng_state.*|random_states.*|adapter_model|consolidated.*|"
    r"tokenizer.*|.*embedder.*|trainer_state.*|.*optim_states|mmproj.*|.*imatrix.*)\.(bin|pt|pth|safetensors|gguf)"
)
# What else people keep models in, to be able to say so.
_FOREIGN = {
    ".ggml": "GGML", ".h5": "TensorFlow (.h5)", ".msgpack": "Flax (.msgpack)", ".onnx": "ONNX",
    ".ckpt": "a training checkpoint (.ckpt)", ".npz": "NumPy (.npz)", ".tflite": "TensorFlow Lite",
    ".mlmodel": "Core ML", ".ot": "Rust (.ot)",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Weights on disk: a ``TensorSource``.

    Attributes:
        path: the folder or file that was opened.
        config: the parsed config.json next to the weights, empty if there is none.
        stored: place of each tensor, by name, in the order of the files.
    """

    path: Path
    config: Mapping[str, Any]
    stored: Mapping[str, ReadableTensor]

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return {name: tensor.info for name, tensor in self.stored.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> FloatArray:
        """One tensor, or entries of its first axis, as float32 (stored as F16, BF16, F32) or float64 (F64). Raises
        BadModel."""
        return self.stored[name].read(start, stop)

    def has_blocks(self, name: str) -> bool:
        """Whether blocks of the tensor can be read by themselves: not where it is a view that skips numbers."""
        return self.stored[name].has_blocks

    def read_block(self, name: str, rows: Run, columns: Run) -> FloatArray:
        """A block of the tensor seen as (all axes but the last, the last axis); only its bytes are read."""
        return self.stored[name].read_block(rows, columns)

    def half_of(self, name: str) -> Half | None:
        """The tensor's format where ``read_codes`` can be called for it: 16 bits a number, stored as they are."""
        tensor = self.stored[name]
        return tensor.half if isinstance(tensor, StoredTensor) else None

    def read_codes(self, name: str, rows: Run, columns: Run, target: Codes) -> None:
        """Fills ``target`` with a block (see ``read_block``) as its 16-bit numbers are stored. Raises BadModel."""
        tensor = self.stored[name]
        if not isinstance(tensor, StoredTensor) or tensor.half is None:
            raise ValueError(f"{name} is not stored in 16 bits")
        tensor.read_codes(rows, columns, target)


def open_checkpoint(path: Path) -> Checkpoint:
    """The model in this folder, or in this single ``.safetensors``, ``.bin``, ``.pt``, ``.pth`` or ``.gguf`` file (of a
    GGUF file in shards: any of them).

    Headers are read and checked, no weights. Raises MissingModel when the path or a shard is not there, BadModel when
    it is no model, damaged, or quantised in a way that can't be turned back into weights.
    """
    path = Path(path)
    if not path.exists():
        raise MissingModel(f"{path} is not there")
    config, stored = _open(path)
    if not stored:
        raise BadModel(f"{path} has weight files, but there is no tensor in them")
    if adapter_factor(stored) is not None:
        raise BadModel(
            f"{path} holds the factors of an adapter; an adapter is given as its folder, with its adapter_config.json"
        )
    quantised = quantised_as(config, (tensor.info for tensor in stored.values()))
    if quantised is not None:
        raise BadModel(
            f"{path} is quantised ({quantised}), in a form that can't be turned back into weights here: its numbers "
            "are codes. Use the unquantised model; if the weights are plain after all, remove quantization_config from "
            "its config.json"
        )
    return Checkpoint(path, config, stored)


def _open(path: Path) -> tuple[Mapping[str, Any], Mapping[str, ReadableTensor]]:
    """Config and tensors of a folder or a file that exists."""
    whole_folder = path.is_dir()
    gguf = _only_gguf(path) if whole_folder else path if path.suffix.lower() in _GGUF else None
    if gguf is not None:
        config, files = gguf_model.read_model(gguf)
        return config, _merge(files)
    config_file = (path if whole_folder else path.parent) / "config.json"
    config = read_json(config_file) if config_file.exists() else {}
    return config, dequantized(_read_folder(path) if whole_folder else _merge([read_weight_file(path)]), config)


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file of at most ``limit`` bytes. Raises MissingModel or BadModel, naming the file."""
    with opened(path) as (fd, stamp):
        if stamp.size > limit:
            raise BadModel(f"{path} has {stamp.size} bytes, too many for such a file (at most {limit})")
        text = os.pread(fd, limit, 0)
    return json_object(text, lambda problem: BadModel(f"{path} {problem}"))


def read_weight_file(path: Path) -> list[StoredTensor]:
    """The tensors of one weight file, by its ending. Raises MissingModel or BadModel."""
    ending = path.suffix.lower()
    if ending in _SAFETENSORS:
        return safetensors.read_header(path)
    if ending in _PICKLES:
        return torch_pickle.read_header(path)
    if ending in _FOREIGN:
        raise BadModel(
            f"{path} is {_FOREIGN[ending]}, which can't be read; only safetensors, PyTorch and GGUF files can"
        )
    raise BadModel(f"{path} is no weight file; a model is a folder, or a .safetensors, .bin, .pt, .pth or .gguf file")


def _read_folder(folder: Path) -> Mapping[str, StoredTensor]:
    for single in SINGLE_FILES:
        if (folder / single).exists() or (folder / single).is_symlink():
            return _merge([read_weight_file(folder / single)])
        if (folder / f"{single}.index.json").exists():
            return _read_sharded(folder, folder / f"{single}.index.json")
    return _merge([read_weight_file(path) for path in _unnamed_weights(folder)])


def _read_sharded(folder: Path, index: Path) -> Mapping[str, StoredTensor]:
    weight_map = weight_map_of(read_json(index, MAX_INDEX_BYTES), lambda problem: BadModel(f"{index} {problem}"))
    shards: dict[str, None] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard.startswith(".") or "\0" in shard:
            raise BadModel(f"{index}: tensor {tensor!r} is said to be in {shard!r}, which is no file of this folder")
        shards[shard] = None
    absent = [shard for shard in shards if not _exists(folder / shard)]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise MissingModel(f"{index} lists shard {absent[0]!r}{more}, but it is not in the folder")
    stored = _merge([read_weight_file(folder / shard) for shard in shards])
    misplaced = misplaced_tensor(weight_map, stored)
    if misplaced is not None:
        tensor, shard = misplaced
        raise BadModel(f"{index}: tensor {tensor!r} is not in shard {shard!r}, where the index says it is")
    return stored


def _exists(path: Path) -> bool:
    """Whether a file is there; one whose name no folder could hold is not."""
    try:
        return path.exists()
    except OSError:
        return False


def _merge(files: Iterable[Sequence[StoredT]]) -> dict[str, StoredT]:
    """All files' tensors together. Raises BadModel for a name that comes twice."""

    def twice(name: str, first: Path, second: Path) -> BadModel:
        return BadModel(f"tensor {name!r} is both in {first} and in {second}")

    return merge_tensors(files, twice)


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no other weights, the first of its shards; None if there is none.

    Raises BadModel when there are several models, as of one model in several quantised forms.
    """
    files = _listed(folder)
    found = [path for path in files if path.suffix.lower() in _GGUF]
    if not found or any(path.suffix.lower() in (*_SAFETENSORS, *_PICKLES) for path in files):
        return None
    return found[0] if len(found) == 1 else _numbered_shards(folder, found)[0]


def _listed(folder: Path) -> list[Path]:
    """The files that may be weights, by name. Raises BadModel."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_file() and not _OTHER.fullmatch(path.name))
    except OSError as problem:
        raise BadModel(f"{folder} can't be listed: {problem.strerror}") from None


def _unnamed_weights(folder: Path) -> list[Path]:
    """The weight files of a folder that has none of the usual names. Raises BadModel when that is not clear."""
    files = _listed(folder)
    empty = not any(folder.iterdir())
    for endings in (_SAFETENSORS, _PICKLES):
        weights = [path for path in files if path.suffix.lower() in endings]
        if len(weights) == 1 and shard_numbers([weights[0].name]) is None:
            return weights
        if weights:
            return _numbered_shards(folder, weights)
    raise BadModel(_no_weights(folder, files, empty))


def _numbered_shards(folder: Path, weights: list[Path]) -> list[Path]:
    """Shards by the numbers in their names (``x-00001-of-00003``), when their index file is missing."""
    numbers = shard_numbers(path.name for path in weights)
    if numbers is None:
        names = ", ".join(path.name for path in weights[:4]) + (", ..." if len(weights) > 4 else "")
        raise BadModel(f"{folder} has several weight files ({names}) and no index; name the one to analyse")
    count = numbers.count
    if numbers.beyond:
        raise BadModel(f"{folder} has a shard {numbers.beyond[0]} of {count}; which files are the model's is not clear")
    if numbers.absent:
        raise MissingModel(f"{folder}: shard {numbers.absent[0]} of {count} is not in the folder")
    return weights


def _no_weights(folder: Path, files: list[Path], empty: bool) -> str:
    if empty:
        return f"{folder} is an empty folder"
    if (folder / ADAPTER_CONFIG).exists():
        return f"{folder} is an adapter without model weights; it can only be analysed together with its base model"
    foreign = [_FOREIGN[path.suffix.lower()] for path in files if path.suffix.lower() in _FOREIGN]
    if foreign:
        return f"{folder} has its weights only as {foreign[0]}, which can't be read"
    if (folder / "config.json").exists():
        return f"{folder} has a config.json but no weights (no .safetensors, .bin or .gguf file)"
    return f"{folder} is no model folder: it has neither config.json nor a .safetensors, .bin or .gguf file"


# ---- a model in several files: whether their names, their index and the tensors in them agree ------------------------
#
# A folder on disk and a repository of the Hub (``hub_headers``) are checked by the same rules; each words its own
# errors, as people look for the mistake in different places.

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(safetensors|bin|gguf)")


@dataclass(frozen=True, slots=True)
class ShardNumbers:
    """The numbers in the names of one model's shards (``x-00001-of-00003``), and how many there should be."""

    present: frozenset[int]
    count: int

    @property
    def absent(self) -> list[int]:
        """Numbers without a file, ascending."""
        return sorted(set(range(1, self.count + 1)) - self.present)

    @property
    def beyond(self) -> list[int]:
        """Numbers that no shard of this model has, ascending."""
        return sorted(number for number in self.present if not 0 < number <= self.count)


def shard_numbers(names: Iterable[str]) -> ShardNumbers | None:
    """The shards' numbers; None where a name has no number, or the names are those of several models.

    >>> shard_numbers(["m-00001-of-00003.bin", "m-00004-of-00003.bin"]).absent
    [2, 3]
    >>> shard_numbers(["a.bin", "m-00001-of-00003.bin"]) is None
    True
    """
    numbers: set[int] = set()
    models: set[tuple[str, str]] = set()
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            return None
        numbers.add(int(match["number"]))
        models.add((match["stem"], match["count"]))
    return ShardNumbers(frozenset(numbers), int(models.pop()[1])) if len(models) == 1 else None


def json_object(text: bytes, bad: Callable[[str], BadModel]) -> dict[str, Any]:
    """A JSON object from the text of a file. Raises ``bad`` of the problem."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise bad(f"can't be read as JSON: {problem}") from None
    if not isinstance(content, dict):
        raise bad("holds no JSON object")
    return content


def weight_map_of(index: Mapping[str, Any], bad: Callable[[str], BadModel]) -> Mapping[str, Any]:
    """The shard of each tensor, as an index has it: any value can stand there. Raises ``bad`` of the problem."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad("has no weight_map")
    return weight_map


def merge_tensors(
    files: Iterable[Sequence[StoredT]], twice: Callable[[str, Path, Path], BadModel]
) -> dict[str, StoredT]:
    """The tensors of all files by name. Raises ``twice`` of a name and of two files that hold such a tensor."""
    result: dict[str, StoredT] = {}
    for tensors in files:
        for tensor in tensors:
            name = tensor.info.name
            if name in result:
                raise twice(name, result[name].file.path, tensor.file.path)
            result[name] = tensor
    return result


def misplaced_tensor(weight_map: Mapping[str, Any], stored: Mapping[str, ReadableTensor]) -> tuple[str, Any] | None:
    """The first tensor that is not in the shard where the index has it, with that shard; None where all are."""
    for name, shard in weight_map.items():
        if name not in stored or stored[name].file.path.name != shard:
            return name, shard
    return None
