"""A model's weights on disk: a folder or a single file, opened by its headers and read tensor by tensor.

Knows which files of a folder are the weights and what can be wrong with them. The file formats themselves are
``safetensors_file`` and ``torch_file``; what the tensors mean is ``matrices``. Nothing is ever loaded as a whole.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models import safetensors_file, torch_file
from gpuherd.models.dtypes import FloatArray
from gpuherd.models.quantised import quantised_as
from gpuherd.models.source import Run, TensorInfo
from gpuherd.models.stored import StoredTensor, opened

ADAPTER_CONFIG = "adapter_config.json"
# Many times the largest in use. Parsed JSON can take twenty times its size, so that a limit is needed.
MAX_CONFIG_BYTES = 5_000_000
MAX_INDEX_BYTES = 50_000_000

# In the order of preference; safetensors before pickles, as transformers does.
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SAFETENSORS = (".safetensors",)
_PICKLES = (".bin", ".pt", ".pth")
# Files of a training run or of an adapter that have the same endings as weights.
_OTHER = re.compile(
    r"(training_args|optimizer.*|scheduler.*|scaler.*|rng_state.*|random_states.*|adapter_model|consolidated.*|"
    r"tokenizer.*|.*embedder.*|trainer_state.*|.*optim_states)\.(bin|pt|pth|safetensors)"
)
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(safetensors|bin)")
# What else people keep models in, to be able to say so.
_FOREIGN = {
    ".gguf": "GGUF", ".ggml": "GGML", ".h5": "TensorFlow (.h5)", ".msgpack": "Flax (.msgpack)", ".onnx": "ONNX",
    ".ckpt": "a training checkpoint (.ckpt)", ".npz": "NumPy (.npz)", ".tflite": "TensorFlow Lite",
    ".mlmodel": "Core ML", ".ot": "Rust (.ot)",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Weights on disk: a ``TensorSource``.

    Attributes:
        path: the folder or file that was opened.
        config: the parsed config.json beside the weights, empty if there is none.
        stored: place of each tensor, by name, in the order of the files.
    """

    path: Path
    config: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return {name: tensor.info for name, tensor in self.stored.items()}

    def read(self, name: str) -> FloatArray:
        """One tensor as float32 (stored as F16, BF16, F32) or float64 (F64). Raises BadModel."""
        return self.stored[name].read()

    def read_part(self, name: str, start: int, stop: int) -> FloatArray:
        """Entries ``start`` to ``stop`` of the tensor's first axis; only their bytes are read."""
        return self.stored[name].read(start, stop)

    def has_blocks(self, name: str) -> bool:
        """Whether blocks of the tensor can be read by themselves: not where it is a view that skips numbers."""
        return self.stored[name].has_blocks

    def read_block(self, name: str, rows: Run, columns: Run) -> FloatArray:
        """A block of the tensor seen as (all axes but the last, the last axis); only its bytes are read."""
        return self.stored[name].read_block(rows, columns)


def open_checkpoint(path: Path) -> Checkpoint:
    """The model in this folder, or in this single ``.safetensors``, ``.bin``, ``.pt`` or ``.pth`` file.

    Headers are read and checked, no weights. Raises MissingModel when the path or a shard is not there, BadModel when
    it is no model, damaged, or quantised.
    """
    path = Path(path)
    if path.is_dir():
        config = read_json(path / "config.json") if (path / "config.json").exists() else {}
        stored = _read_folder(path)
    elif path.exists():
        beside = path.parent / "config.json"
        config = read_json(beside) if beside.exists() else {}
        stored = _merge([read_weight_file(path)])
    else:
        raise MissingModel(f"{path} is not there")
    if not stored:
        raise BadModel(f"{path} has weight files, but there is no tensor in them")
    if any(".lora_A." in name or ".lora_embedding_A" in name for name in stored):
        raise BadModel(
            f"{path} holds the factors of an adapter; an adapter is given as its folder, with its adapter_config.json"
        )
    quantised = quantised_as(config, (tensor.info for tensor in stored.values()))
    if quantised is not None:
        raise BadModel(
            f"{path} is quantised ({quantised}): its numbers are codes, not weights. Use the unquantised model; "
            "if the weights are plain after all, remove quantization_config from its config.json"
        )
    return Checkpoint(path, config, stored)


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file of at most ``limit`` bytes. Raises MissingModel or BadModel, naming the file."""
    with opened(path) as (fd, stamp):
        if stamp.size > limit:
            raise BadModel(f"{path} has {stamp.size} bytes, too many for such a file (at most {limit})")
        text = os.pread(fd, limit, 0)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise BadModel(f"{path} can't be read as JSON: {problem}") from None
    if not isinstance(content, dict):
        raise BadModel(f"{path} holds no JSON object")
    return content


def read_weight_file(path: Path) -> list[StoredTensor]:
    """The tensors of one weight file, by its ending. Raises MissingModel or BadModel."""
    return _reader(path)(path)


def _reader(path: Path) -> Callable[[Path], list[StoredTensor]]:
    ending = path.suffix.lower()
    if ending in _SAFETENSORS:
        return safetensors_file.read_header
    if ending in _PICKLES:
        return torch_file.read_header
    if ending in _FOREIGN:
        raise BadModel(f"{path} is {_FOREIGN[ending]}, which can't be read; only safetensors and PyTorch files can")
    raise BadModel(f"{path} is no weight file; a model is a folder, or a .safetensors, .bin, .pt or .pth file")


def _read_folder(folder: Path) -> Mapping[str, StoredTensor]:
    for single, index in zip(_SINGLE, _INDEX, strict=True):
        if (folder / single).exists() or (folder / single).is_symlink():
            return _merge([read_weight_file(folder / single)])
        if (folder / index).exists():
            return _read_sharded(folder, folder / index)
    return _merge([read_weight_file(path) for path in _unnamed_weights(folder)])


def _read_sharded(folder: Path, index: Path) -> Mapping[str, StoredTensor]:
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModel(f"{index} has no weight_map")
    shards: dict[str, None] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard.startswith(".") or "\0" in shard:
            raise BadModel(f"{index}: tensor {tensor!r} is said to be in {shard!r}, which is no file of this folder")
        shards[shard] = None
    absent = [shard for shard in shards if not (folder / shard).exists()]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise MissingModel(f"{index} lists shard {absent[0]!r}{more}, but it is not in the folder")
    stored = _merge([read_weight_file(folder / shard) for shard in shards])
    for tensor, shard in weight_map.items():
        if tensor not in stored or stored[tensor].file.path.name != shard:
            raise BadModel(f"{index}: tensor {tensor!r} is not in shard {shard!r}, where the index says it is")
    return stored


def _merge(files: Iterable[list[StoredTensor]]) -> dict[str, StoredTensor]:
    """All files' tensors together; a name must not come twice."""
    result: dict[str, StoredTensor] = {}
    for tensors in files:
        for tensor in tensors:
            name = tensor.info.name
            if name in result:
                raise BadModel(f"tensor {name!r} is both in {result[name].file.path} and in {tensor.file.path}")
            result[name] = tensor
    return result


def _unnamed_weights(folder: Path) -> list[Path]:
    """The weight files of a folder that has none of the usual names. Raises BadModel when that is not clear."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not _OTHER.fullmatch(path.name))
        empty = not any(folder.iterdir())
    except OSError as problem:
        raise BadModel(f"{folder} can't be listed: {problem.strerror}") from None
    for endings in (_SAFETENSORS, _PICKLES):
        weights = [path for path in files if path.suffix.lower() in endings]
        if len(weights) == 1 and not _NUMBERED.fullmatch(weights[0].name):
            return weights
        if weights:
            return _numbered_shards(folder, weights)
    raise BadModel(_no_weights(folder, files, empty))


def _numbered_shards(folder: Path, weights: list[Path]) -> list[Path]:
    """Shards by the numbers in their names (``x-00001-of-00003``), when their index file is missing."""
    matches = [_NUMBERED.fullmatch(path.name) for path in weights]
    stems = {(match["stem"], match["count"]) if match else None for match in matches}
    if len(stems) != 1 or None in stems:
        names = ", ".join(path.name for path in weights[:4]) + (", ..." if len(weights) > 4 else "")
        raise BadModel(f"{folder} has several weight files ({names}) and no index; name the one to analyse")
    count = int(next(match["count"] for match in matches if match))
    numbers = {int(match["number"]) for match in matches if match}
    absent = sorted(set(range(1, count + 1)) - numbers)
    if absent:
        raise MissingModel(f"{folder}: shard {absent[0]} of {count} is not in the folder")
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
        return f"{folder} has a config.json but no weights (no .safetensors or .bin file)"
    return f"{folder} is no model folder: it has neither config.json nor a .safetensors or .bin file"
