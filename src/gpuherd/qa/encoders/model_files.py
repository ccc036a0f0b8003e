"""Which files an encoder consists of, where they lie, and a digest that tells one model from another of the same name.

Reads bytes and JSON; knows no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.load.identity import hashes_of
from gpuherd.models.names import parse_model, shown

_SETTINGS = ("*.json", "*.txt", "*.model", "*/config.json")
_WEIGHTS = (("*.safetensors",), ("*.bin",))


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """An encoder on this machine.

    Attributes:
        name: as the user wrote it.
        folder: its files.
        config: what ``config.json`` says.
        sha256: of all files that loading reads, each with its name, in hex.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    sha256: str

    @property
    def float32_bytes(self) -> int:
        """What its weights take in float32, by the sizes of their files and the precision that its config names."""
        stored = str(self.config.get("dtype", self.config.get("torch_dtype", "float32")))
        return sum(path.stat().st_size for path in weight_files(self.folder)) * (2 if "16" in stored else 1)

    def settings(self, name: str) -> Any:
        """What another JSON file of the model says, None where there is none. Raises BadModel."""
        return _json(self.folder / name) if (self.folder / name).is_file() else None


def encoder_files(name: str) -> EncoderFiles:
    """Finds the model, downloads it if it is an id of the Hub, and reads each file whose hash is not kept.

    Raises MissingModel where it is not to be had, BadModel where it is no model that transformers can load.
    """
    from gpuherd.models.checkpoints.hub import locate

    folder = locate(parse_model(name), for_loading=True)
    if not folder.is_dir():
        raise BadModel(f"model {shown(name)} is a single file; an encoder is a folder with config, weights, tokenizer")
    if not (folder / "config.json").is_file():
        raise MissingModel(f"model {shown(name)} has no config.json in {folder}")
    config = _json(folder / "config.json")
    if not isinstance(config, dict):
        raise BadModel(f"{folder / 'config.json'} holds no object")
    return EncoderFiles(name, folder, config, digest_of(folder))


def digest_of(folder: Path) -> str:
    """SHA-256 over the names and contents of the files that loading a model from this folder reads, in hex."""
    whole = hashlib.sha256()
    hashes = hashes_of(list(_files(folder)))
    for path in sorted(hashes, key=lambda each: each.relative_to(folder).as_posix()):
        whole.update(f"{path.relative_to(folder).as_posix()}\0{hashes[path]}\n".encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for pattern in _SETTINGS:
        yield from (path for path in folder.glob(pattern) if path.is_file())
    yield from weight_files(folder)


def weight_files(folder: Path) -> list[Path]:
    """The files of weights that are read: transformers takes safetensors where there are any."""
    for patterns in _WEIGHTS:
        found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
        if found:
            return found
    return []


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        raise BadModel(f"can't read {path}: {problem}") from None
