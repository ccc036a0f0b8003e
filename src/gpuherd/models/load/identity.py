"""A model's files before it is loaded: its tokenizer, its config, and a digest that says whether it is the same model.

Of a model on the Hub only the small files are fetched here; its weights come when a job loads it. The SHA-256 of a
large file is cached from one command to the next, in the user's cache, a file of its own for each path. It holds while
size, modification time, change time and inode stay as they were: the change time shows a rewrite that sets the
modification time back. A cache that is damaged or can't be written costs another reading, never a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write
from gpuherd.errors import BadModel, MissingModel, naming_extras
from gpuherd.jobs.settings import user_cache
from gpuherd.models.checkpoints.open import read_json
from gpuherd.models.checkpoints.stored import FileStamp, opened, unchanged
from gpuherd.models.describe.known_models import known_model
from gpuherd.models.load.pretrained import EXTRAS
from gpuherd.models.memory.weights import split_precision
from gpuherd.models.names import ModelRef, parse_model, quoted
from gpuherd.runs.console import of_bytes

# The content of smaller files goes into the digest as it is, that of larger ones by its SHA-256, which is kept from one
# command to the next.
_LARGE = 32 << 20
_END = 1 << 20
_PIECES, _PIECE = 64, 16 << 10
_READ_BEFORE = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".safetensors", ".bin", ".pt", ".pth", ".py")
_READ = (*_READ_BEFORE, ".bpe", ".vocab", ".gguf")
# hashlib lets other threads run: with several files at once neither a disk nor a core is what the others wait for.
_AT_ONCE = 4
_READ_BYTES = 8 << 20  # at a time
_SMALL = 1 << 20  # read again as fast as its hash is looked up
# File systems keep times as coarsely as to two seconds: a file that was just written can change again unseen.
_SETTLED_NS = 3_000_000_000
_HASH = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's small files are.

    Attributes:
        config_folder: its config.json, and generation_config.json if there is one.
        tokenizer_folder: its tokenizer: the adapter's, where that brings one.
        folders: what its digest is made of: the model's folder or file, and the adapter's.
    """

    config_folder: Path
    tokenizer_folder: Path
    folders: tuple[Path, ...]

    @property
    def sha256(self) -> str:
        """The same for the same files, as ``files_digest``. Reads all of them whose hash is not kept."""
        return files_digest(*self.folders)


def model_files(model: str, adapter: str | None = None) -> ModelFiles:
    """The small files of a model, fetched if need be. Raises MissingModel, BadModel, MissingExtra."""
    from gpuherd.models.load.prepare import tokenizer_folder
    from gpuherd.models.lora.adapter import taken_apart

    ref = reference(model)
    base, top = taken_apart(ref, _folder) if adapter is None else (_folder(ref), _folder(parse_model(adapter)))
    config = base if base.is_dir() else base.parent
    return ModelFiles(config, tokenizer_folder(base, top), (base,) if top is None else (base, top))


def files_digest(*folders: Path, recorded: str | None = None) -> str:
    """SHA-256 that says whether a model, and the adapter on top of it, are the same.

    Of a model on the Hub by its commit, of a local one by names, sizes and the whole content.

    Args:
        recorded: the digest in the record of work that goes on. Earlier versions compared large files by pieces: where
            theirs is that of the pieces as they are now, it is the result, with a warning of what can't be compared.

    Raises MissingModel, BadModel where a file can't be read.
    """
    now = _of_all([_digest(folder) for folder in folders])
    if recorded in (None, now) or recorded != _of_all([_digest(folder, by_pieces=True) for folder in folders]):
        return now
    _log.warning(
        "%s: this work was begun by an earlier gpuherd, which compared weight files of over 32 MiB by pieces only. The "
        "pieces are the same, so the work goes on; if the weights have been changed since, begin it anew",
        " and ".join(str(folder) for folder in folders),
    )
    return recorded


def tokenizer_in(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder. Raises MissingModel where there is none that transformers can use, MissingExtra."""
    with naming_extras(EXTRAS, "making prompts takes"):
        from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as problem:  # the libraries raise what they like at a file that is damaged
        raise MissingModel(f"{folder} has no tokenizer that transformers can use: {problem}") from None


def reference(model: str, *, exact: bool = False) -> ModelRef:
    """What is meant, without the ``-8bit`` or ``-4bit`` behind it; a known name without its organisation stands for its
    id. Raises MissingModel, BadModel.

    ``exact``: only if it is that model's very name, not that of a variant of the same shapes.
    """
    name = split_precision(model)[0]
    known = known_model(name)
    if known is not None and "/" not in name and not Path(name).exists():
        if exact and known.model_id.partition("/")[2].lower() != name.strip().lower():
            raise BadModel(
                f"model {quoted(name)} is known by its shapes, which are those of {known.model_id}; to load it, give "
                "its own id on the Hugging Face Hub, or its folder"
            )
        name = known.model_id
    return parse_model(name)


def _folder(ref: ModelRef) -> Path:
    """The folder (or file) with the small files of a model."""
    if ref.path is not None:
        return ref.path
    with naming_extras(EXTRAS, "models of the Hub take"):
        import huggingface_hub  # noqa: F401 - known to be there before a model is looked for

    from gpuherd.models.checkpoints.hub import locate_small

    return locate_small(ref)


def _of_all(digests: Sequence[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _commit(folder: Path) -> str | None:
    """The commit of a snapshot of the Hub, which names all its files, downloaded or not."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return f"{folder.parent.parent.name}@{folder.name}"
    return None


def _digest(folder: Path, *, by_pieces: bool = False) -> str:
    """A digest of a model's files; of a snapshot of the Hub its commit. ``by_pieces``: as earlier versions did."""
    commit = _commit(folder)
    if commit is not None:
        return commit
    digest = hashlib.sha256()
    try:
        sizes = {path: path.stat().st_size for path in sorted(_files(folder, _READ_BEFORE if by_pieces else _READ))}
        large = {} if by_pieces else hashes_of([path for path, size in sizes.items() if size > _LARGE])
        for path, size in sizes.items():
            digest.update(f"{path.name}\0{size}\0".encode("utf-8", "surrogatepass"))
            digest.update(bytes.fromhex(large[path]) if path in large else _sample(path))
    except OSError as problem:
        raise BadModel(f"{folder} can't be read: {problem.strerror}") from None
    return digest.hexdigest()


def _files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    if not folder.is_dir():
        yield folder
        return
    for path in folder.iterdir():
        if path.suffix.lower() in suffixes and path.is_file():
            yield path


def _sample(path: Path) -> bytes:
    """The content of a file; of a large one the pieces that earlier versions compared."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size <= _LARGE:
            return file.read()
        pieces = [file.read(_END)]
        for number in range(1, _PIECES):
            file.seek(size * number // _PIECES)
            pieces.append(file.read(_PIECE))
        file.seek(-_END, os.SEEK_END)
        return b"".join([*pieces, file.read(_END)])


# ---- hashes of files


def hashes_of(paths: Sequence[Path], title: str = "reading the model's files to identify it") -> dict[Path, str]:
    """The SHA-256 of each file's content, in hex; with a progress bar of this title on standard error where that takes
    long.

    Raises MissingModel, BadModel where a file can't be read or changes while it is read.
    """
    looks = {path: _looked(path) for path in paths}
    found = {path: kept for path, (stamp, changed_ns) in looks.items() if (kept := _cached(stamp, changed_ns))}
    missing = [stamp for path, (stamp, _) in looks.items() if path not in found]
    if not missing:
        return found
    from rich.console import Console

    total = sum(stamp.size for stamp in missing)
    ended = threading.Event()
    with (
        of_bytes(Console(stderr=True), total, title) as advance,
        ThreadPoolExecutor(min(_AT_ONCE, len(missing))) as pool,
    ):

        def read(stamp: FileStamp) -> str:
            return _hash(stamp, looks[stamp.path][1], advance, ended)

        try:
            made = list(pool.map(read, missing))
        finally:
            ended.set()  # after an interrupt, or a file that can't be read, the other threads read no further
    return found | {stamp.path: each for stamp, each in zip(missing, made, strict=True)}


def _looked(path: Path) -> tuple[FileStamp, int]:
    """The file's stamp, and its change time in nanoseconds."""
    with opened(path) as (descriptor, stamp):
        return stamp, os.fstat(descriptor).st_ctime_ns


def _hash(stamp: FileStamp, changed_ns: int, advance: Callable[[int], None], ended: threading.Event) -> str:
    began = time.time_ns()
    whole = hashlib.sha256()
    with unchanged(stamp) as descriptor, os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
        while not ended.is_set() and (piece := file.read(_READ_BYTES)):
            whole.update(piece)
            advance(len(piece))
    if not ended.is_set() and stamp.size > _SMALL and max(stamp.modified_ns, changed_ns) < began - _SETTLED_NS:
        _cache(stamp, changed_ns, whole.hexdigest())
    return whole.hexdigest()


# ---- the cache of hashes


def _cached(stamp: FileStamp, changed_ns: int) -> str | None:
    """The hash that was made of the file as it looks now, None where there is none that can be trusted."""
    if stamp.size <= _SMALL:
        return None
    try:
        record = read_json(_cache_file(stamp.path))
    except BadModel:
        return None
    made = record.get("sha256")
    same = all(record.get(name) == value for name, value in _stamp_values(stamp, changed_ns).items())
    return made if same and isinstance(made, str) and _HASH.fullmatch(made) else None


def _cache(stamp: FileStamp, changed_ns: int, made: str) -> None:
    place = _cache_file(stamp.path)
    record = _stamp_values(stamp, changed_ns) | {"sha256": made}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(place, json.dumps(record).encode())
    except OSError as problem:
        _log.debug("hashes are not kept in %s: %s", place.parent, problem.strerror)


def _stamp_values(stamp: FileStamp, changed_ns: int) -> dict[str, str | int]:
    return {
        "path": os.path.realpath(stamp.path),
        "size": stamp.size,
        "mtime_ns": stamp.modified_ns,
        "ctime_ns": changed_ns,
        "inode": stamp.inode,
    }


def _cache_file(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return user_cache("hashes") / f"{name}.json"
