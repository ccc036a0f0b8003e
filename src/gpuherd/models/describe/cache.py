"""Descriptions as files: one JSON object each, kept in the user's cache by the configuration's digest. Pure but for the
files; no torch here.

A description holds what transformers' code decides: blocks, tensors, caches, peaks. What a configuration says of its
checkpoint (the stored dtype, a quantisation) is read again each time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write
from gpuherd.jobs.settings import user_cache
from gpuherd.models.describe.config import assumptions_of, images_of, quantised_of, stored_precision
from gpuherd.models.describe.description import (
    Architecture,
    Block,
    Curve,
    LayerCache,
    Peaks,
    Polynomial,
    Role,
    SharedInput,
    Tensor,
    TrainingPeaks,
)

VERSION = 3
_MOST_FILES = 200
_MOST_BYTES = 16 << 20
# Fields of a configuration on which no shape, cache or peak depends.
BESIDE = frozenset(
    {"_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
     "finetuning_task", "id2label", "initializer_range", "label2id", "pad_token_id", "pretraining_tp",
     "quantization_config", "rope_parameters", "rope_scaling", "rope_theta", "sep_token_id", "task_specific_params",
     "tokenizer_class", "torch_dtype", "transformers_version", "use_cache"}
)  # fmt: skip
_FLAGS = ("keeps_fp32", "fp32_in_fp16", "transposed", "split", "buffer")
_SCALARS = (
    "model_type", "class_name", "hidden_size", "intermediate_size", "vocab_size", "heads", "is_encoder_decoder",
    "max_tokens", "tensor_parallel", "tensor_parallel_limit",
)  # fmt: skip
_CACHE = ("per_token", "window", "per_sequence", "per_sequence_fp32", "per_encoder_token")
_log = logging.getLogger(__name__)


def digest(config: Mapping[str, Any]) -> str:
    """Names a description: the same for configurations that transformers of this version builds the same model of."""
    counted = {key: value for key, value in config.items() if key not in BESIDE}
    text = json.dumps([VERSION, _transformers(), counted], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _transformers() -> str:
    from importlib import metadata

    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return ""


# --- JSON ----------------------------------------------------------------------------------------------------------


def to_dict(architecture: Architecture) -> dict[str, Any]:
    """A description as JSON has it. Layers of the same kind are written once: a template, and the range of numbers."""
    templates: dict[str, int] = {}
    blocks: list[list[Any]] = []
    for block in architecture.blocks:
        text = json.dumps(_template(block), separators=(",", ":"))
        number = templates.setdefault(text, len(templates))
        path, _, last = block.name.rpartition(".")
        follows = blocks and last.isdecimal() and blocks[-1][0] == path and blocks[-1][2:] == [int(last), number]
        if follows:
            blocks[-1][2] += 1
        elif last.isdecimal():
            blocks.append([path, int(last), int(last) + 1, number])
        else:
            blocks.append([block.name, number])
    return {
        "version": VERSION,
        **{name: getattr(architecture, name) for name in _SCALARS},
        "templates": [json.loads(text) for text in templates],
        "blocks": blocks,
        "peaks": {name: _peaks_dict(peaks) for name, peaks in architecture.peaks.items()},
        "around": dict(architecture.around),
    }


def _template(block: Block) -> dict[str, Any]:
    """All of a block but its name; names of tensors from the block's on."""
    start = len(block.name)
    tensors = [
        [
            tensor.name[start:],
            tensor.shape,
            tensor.role.value,
            [flag for flag in _FLAGS if getattr(tensor, flag)],
            *([tensor.tied_to] if tensor.tied_to is not None else []),
        ]
        for tensor in block.tensors
    ]
    kept = None if block.cache is None else [getattr(block.cache, name) for name in _CACHE]
    return {"kind": block.kind, "tensors": tensors, "cache": kept, "peaks": block.peaks}


def _peaks_dict(peaks: Peaks) -> dict[str, Any]:
    def curves(some: Mapping[str, Sequence[Curve]]) -> dict[str, Any]:
        return {key: [[*each.once, *each.each, each.matrix] for each in some[key]] for key in some}

    found = {"prompt": curves(peaks.prompt), "token": curves(peaks.token), "fill": peaks.fill}
    if peaks.training:
        found["training"] = {key: [each.kept, each.entry, *each.passing] for key, each in peaks.training.items()}
        found["inputs"] = [[each.kept, *each.weights] for each in peaks.inputs]
    return found


def from_dict(record: Mapping[str, Any], config: Mapping[str, Any], model: str) -> Architecture:
    """A description of the model that a configuration asks for. Raises KeyError, TypeError or ValueError where the
    record is no description."""
    if record["version"] != VERSION:
        raise ValueError(f"a description of version {record['version']}")
    templates = record["templates"]
    blocks: list[Block] = []
    for name, *numbers in record["blocks"]:
        template = templates[numbers[-1]]
        paths = [name] if len(numbers) == 1 else [f"{name}.{n}" for n in range(numbers[0], numbers[1])]
        blocks += [_block(path, template) for path in paths]
    return Architecture(
        model=model,
        blocks=tuple(blocks),
        stored=stored_precision(config),
        source="model",
        assumptions=(*assumptions_of(config), *quantised_of(config), *images_of(blocks)),
        peaks={name: _peaks(each) for name, each in record["peaks"].items()},
        around={key: _polynomial(each) for key, each in record.get("around", {}).items()},
        **{name: record[name] for name in _SCALARS},
    )


def _block(name: str, template: Mapping[str, Any]) -> Block:
    tensors = tuple(
        Tensor(
            f"{name}{last}",
            tuple(shape),
            Role(role),
            tied_to=tied[0] if tied else None,
            **dict.fromkeys(flags, True),
        )
        for last, shape, role, flags, *tied in template["tensors"]
    )
    kept = None if template["cache"] is None else LayerCache(*template["cache"])
    return Block(name, template["kind"], tensors, kept, template["peaks"])


def _peaks(record: Mapping[str, Any]) -> Peaks:
    def curves(some: Mapping[str, Any]) -> Mapping[str, tuple[Curve, ...]]:
        return {
            key: tuple(Curve((a, b, c), (d, e, f), matrix) for a, b, c, d, e, f, matrix in rows)
            for key, rows in some.items()
        }

    training = {
        key: TrainingPeaks(_polynomial(kept), _polynomial(entry), tuple(_polynomial(each) for each in passing))
        for key, (kept, entry, *passing) in record.get("training", {}).items()
    }
    inputs = tuple(SharedInput(tuple(weights), kept) for kept, *weights in record.get("inputs", ()))
    return Peaks(curves(record["prompt"]), curves(record["token"]), record["fill"], training, inputs)


def _polynomial(numbers: Sequence[float]) -> Polynomial:
    once, each, pair = numbers
    return once, each, pair


# --- files ---------------------------------------------------------------------------------------------------------


def read_cached(config: Mapping[str, Any], model: str) -> Architecture | None:
    """The description in the user's cache; None where there is none that can be read."""
    path = _folder() / f"{digest(config)}.json"
    with suppress(OSError, KeyError, TypeError, ValueError, RecursionError):
        if path.stat().st_size <= _MOST_BYTES:
            return from_dict(json.loads(path.read_bytes()), config, model)
    return None


def write_cached(config: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Keeps a description, and no more than 200 of them: the oldest go. Failing costs only another measurement."""
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / f"{digest(config)}.json", json.dumps(record, separators=(",", ":")).encode())
        files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in files[:-_MOST_FILES]:
            old.unlink(missing_ok=True)
    except OSError as problem:
        _log.debug("descriptions are not kept in %s: %s", folder, problem.strerror)


def _folder() -> Path:
    return user_cache("descriptions")
