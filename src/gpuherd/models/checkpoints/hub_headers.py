"""What a model of the Hugging Face Hub is, from its config.json and the headers of its weight files alone.

A model of 800 GB is known after some hundred kilobytes: only the first bytes of each safetensors file are read.
They are checked as those of a local file are, against the file's size. What was learnt of a commit is kept in the
user's cache folder, so that the same model is known at once the next time, without a network too. Weights in other
formats are not looked into.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write
from gpuherd.errors import BadModel, MissingModel
from gpuherd.jobs.settings import user_cache
from gpuherd.models.checkpoints import hub
from gpuherd.models.checkpoints.hub import WAITS, Listing, NoNetwork, missing, unreadable
from gpuherd.models.checkpoints.open import (
    ADAPTER_CONFIG,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    json_object,
    merge_tensors,
    misplaced_tensor,
    read_json,
    shard_numbers,
    weight_map_of,
)
from gpuherd.models.checkpoints.safetensors import MAX_HEADER_BYTES, parse_header
from gpuherd.models.checkpoints.stored import FileStamp, StoredTensor
from gpuherd.models.names import WEIGHT_ENDINGS, ModelRef, quoted, safe_filename
from gpuherd.models.tensors.source import TensorInfo

_log = logging.getLogger(__name__)

# The headers of nearly all safetensors files are shorter, so that one request does.
FIRST_BYTES = 100_000
AT_ONCE = 8
# Of what we keep: many times what the model with the most tensors takes.
MAX_KEPT_BYTES = 200_000_000
_VERSION = 1
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that has not been downloaded.

    Attributes:
        commit: which state of the repository this is.
        config: the parsed config.json, empty if there is none.
        tensors: all tensors of its safetensors files by name; empty where its weights have another format.
        nbytes: bytes of its weight files.
    """

    commit: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    nbytes: int


class OnlyAdapter(BadModel):
    """What was named as a model is an adapter without its base."""


def read_remote(ref: ModelRef, *, waits: Sequence[float] = WAITS) -> RemoteModel:
    """The config and the tensors' headers of a model of the Hub.

    The Hub is queried for the commit of the revision, and for nothing more if that one is known already. Offline, and
    when the network fails (tried again after ``waits`` seconds each), what was learnt of the revision before will do.

    Raises:
        MissingModel: the model, its revision or a shard is not there, it is gated, or it is not known and the Hub can't
            be reached.
        OnlyAdapter: it is an adapter.
        BadModel: a file of it is damaged, or which files are its weights is not clear.
    """
    kept = _Kept(ref)
    if ref.revision is not None and _COMMIT.fullmatch(ref.revision):
        known = kept.read(ref.revision)
        if known is not None:
            return known
    if hub.is_offline():
        return _remembered(ref, kept, None)
    try:
        listing = hub.patiently(lambda: hub.list_repo(ref), ref, waits)
        model = kept.read(listing.commit)
        if model is None:
            model = _ask(ref, listing, waits)
            kept.write(model)
        kept.point_to(listing.commit)
        return model
    except NoNetwork as problem:
        return _remembered(ref, kept, str(problem))


class HubHeaders:
    """Reads config and headers of many Hub models before they are downloaded, several at a time, in the background.

    Where the Hub can't be reached, that costs one short attempt, and the cache is used. After any error a model counts
    as unknown: the job that downloads it reports the error.
    """

    def __init__(self, refs: Iterable[ModelRef]) -> None:
        self._reachable: bool | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._futures = {ref: self._pool.submit(self._ask, ref) for ref in dict.fromkeys(refs) if ref.path is None}

    def __enter__(self) -> HubHeaders:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __call__(self, ref: ModelRef) -> RemoteModel | None:
        """The model's config and headers; None where they are not available."""
        if ref not in self._futures:
            self._futures[ref] = self._pool.submit(self._ask, ref)
        return self._futures[ref].result()

    def _ask(self, ref: ModelRef) -> RemoteModel | None:
        try:
            if not self._is_reachable():
                return _remembered(ref, _Kept(ref), None)
            return read_remote(ref, waits=(1.0,))
        except BadModel as problem:
            _log.debug("%s: %s", quoted(ref.text), problem)
            self._is_reachable(again=True)
        except ModuleNotFoundError:
            _log.debug("%s: huggingface_hub is not installed", quoted(ref.text))
        return None

    def _is_reachable(self, *, again: bool = False) -> bool:
        """Whether the Hub answers. Checked once, and ``again`` after a failure that the network may have caused."""
        with self._lock:
            if self._reachable is None or (self._reachable and again):
                self._reachable = not hub.is_offline() and hub.no_answer() is None
            return self._reachable


def _remembered(ref: ModelRef, kept: _Kept, problem: str | None) -> RemoteModel:
    """What was learnt of the revision before. Raises MissingModel when nothing was."""
    commit = kept.commit()
    model = None if commit is None else kept.read(commit)
    if model is None:
        raise missing(ref, problem)
    return model


def _ask(ref: ModelRef, listing: Listing, waits: Sequence[float]) -> RemoteModel:
    """Reads the headers of one commit."""
    sizes = {file.name: file.size for file in listing.files}
    if ADAPTER_CONFIG in sizes and "config.json" not in sizes:
        raise OnlyAdapter(
            f"model {quoted(ref.text)} is an adapter, no model of its own; name its base, and this as its adapter"
        )
    config = _read_json(ref, listing, "config.json", MAX_CONFIG_BYTES, waits) if "config.json" in sizes else {}
    chosen = hub.choose_files(listing.names, ref)
    weights = [name for name in chosen if name.endswith(WEIGHT_ENDINGS)]
    tensors: dict[str, TensorInfo] = {}
    if weights and weights[0].endswith(".safetensors"):
        weight_map = _weight_map(ref, listing, weights, waits)
        weights = sorted(set(weight_map.values())) if weight_map else _weight_files(ref, weights)
        tensors = _merge(ref, _headers(ref, listing.commit, {name: sizes[name] for name in weights}, waits), weight_map)
    return RemoteModel(listing.commit, config, tensors, sum(sizes[name] or 0 for name in weights))


def _weight_map(ref: ModelRef, listing: Listing, found: Sequence[str], waits: Sequence[float]) -> Mapping[str, str]:
    """Which of the weight files each tensor is in, by the index; empty for a model without one. Raises BadModel."""
    if _SINGLE in found or _INDEX not in listing.names:
        return {}
    weight_map = weight_map_of(
        _read_json(ref, listing, _INDEX, MAX_INDEX_BYTES, waits), partial(unreadable, ref, _INDEX)
    )
    for tensor, shard in weight_map.items():
        if shard not in found:
            raise MissingModel(
                f"model {quoted(ref.text)}: its index lists shard {quoted(str(shard))}, but it is not in the "
                f"repository's top folder (tensor {quoted(tensor)})"
            )
    return weight_map


def _weight_files(ref: ModelRef, found: Sequence[str]) -> list[str]:
    """Which of the safetensors files are the model where there is no index, as for a folder. Raises BadModel."""
    if _SINGLE in found:
        return [_SINGLE]
    numbers = shard_numbers(found)
    if numbers is None and len(found) > 1:
        raise BadModel(f"model {quoted(ref.text)} has several weight files ({', '.join(found[:4])}) and no index")
    if numbers is not None and numbers.absent:
        raise MissingModel(
            f"model {quoted(ref.text)} has {numbers.count - len(numbers.absent)} of {numbers.count} shards"
        )
    if numbers is not None and numbers.beyond:
        raise BadModel(
            f"model {quoted(ref.text)} has a shard {numbers.beyond[0]} of {numbers.count}; which files are the model's "
            "is not clear"
        )
    return list(found)


def _headers(
    ref: ModelRef, commit: str, sizes: Mapping[str, int | None], waits: Sequence[float]
) -> list[list[StoredTensor]]:
    """The tensors of each file. Several files are read at once."""
    with ThreadPoolExecutor(min(AT_ONCE, len(sizes))) as pool:
        futures = {
            name: pool.submit(hub.patiently, lambda name=name, size=size: _header(ref, commit, name, size), ref, waits)
            for name, size in sizes.items()
        }
        try:
            return [future.result() for future in futures.values()]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _header(ref: ModelRef, commit: str, name: str, size: int | None) -> list[StoredTensor]:
    """The tensors of one file, by one request or two."""
    start = hub.read_range(ref, commit, name, 0, FIRST_BYTES)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > MAX_HEADER_BYTES or (size is not None and length > size - 8):
        raise unreadable(ref, name, "is truncated or no safetensors file: its header does not fit in it")
    if len(start) < 8 + length:
        start += hub.read_range(ref, commit, name, len(start), 8 + length)
    text = start[8 : 8 + length]
    if len(text) < length:
        raise unreadable(ref, name, "ends before its header does")
    whole = size if size is not None else _size_by_header(text, length)
    file = FileStamp(Path(f"{hub.repo_of(ref)}/{name}"), whole, 0, 0)
    return parse_header(text, file, 8 + length)


def _size_by_header(text: bytes, length: int) -> int:
    """The size that a file has by its own header, for a Hub that doesn't tell it."""
    with suppress(ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        entries = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        return 8 + length + max([end for end in ends if isinstance(end, int)], default=0)
    return 8 + length


def _merge(
    ref: ModelRef, files: Iterable[Sequence[StoredTensor]], weight_map: Mapping[str, Any]
) -> dict[str, TensorInfo]:
    """All files' tensors together; a name must not come twice, and what the index says must be true."""
    stored = merge_tensors(
        files,
        lambda name, first, second: unreadable(
            ref, second.name, f"holds tensor {name!r}, which {first.name!r} holds too"
        ),
    )
    misplaced = misplaced_tensor(weight_map, stored)
    if misplaced is not None:
        tensor, shard = misplaced
        raise unreadable(ref, _INDEX, f"says that tensor {tensor!r} is in {shard!r}, where it is not")
    return {name: tensor.info for name, tensor in stored.items()}


def _read_json(ref: ModelRef, listing: Listing, name: str, limit: int, waits: Sequence[float]) -> dict[str, Any]:
    """A JSON object from a file of the repository. Raises BadModel."""
    text = hub.patiently(lambda: hub.read_range(ref, listing.commit, name, 0, limit + 1), ref, waits)
    if len(text) > limit:
        raise unreadable(ref, name, f"has more than {limit} bytes, too many for such a file")
    return json_object(text, partial(unreadable, ref, name))


class _Kept:
    """What was learnt of a repository before: a file a commit, and a file that says which commit a revision was.

    Files that can't be read or written only cost another request.
    """

    def __init__(self, ref: ModelRef) -> None:
        self._folder = user_cache("headers") / safe_filename(hub.repo_of(ref))
        self._revision = self._folder / f"revision-{safe_filename(ref.revision or 'main')}.json"

    def commit(self) -> str | None:
        """The commit that the revision was when the Hub was last queried."""
        with suppress(BadModel):
            commit = read_json(self._revision).get("commit")
            if isinstance(commit, str) and _COMMIT.fullmatch(commit):
                return commit
        return None

    def read(self, commit: str) -> RemoteModel | None:
        """The model at a commit, None where it is not known."""
        if not _COMMIT.fullmatch(commit):
            return None
        with suppress(BadModel, KeyError, TypeError, ValueError):
            record = read_json(self._folder / f"{commit}.json", MAX_KEPT_BYTES)
            if record["version"] == _VERSION:
                tensors = {
                    name: TensorInfo(name, tuple(shape), dtype, nbytes)
                    for name, shape, dtype, nbytes in record["tensors"]
                }
                return RemoteModel(commit, dict(record["config"]), tensors, int(record["nbytes"]))
        return None

    def write(self, model: RemoteModel) -> None:
        """Writes down what a commit is."""
        tensors = [(info.name, info.shape, info.dtype, info.nbytes) for info in model.tensors.values()]
        record = {"version": _VERSION, "config": model.config, "tensors": tensors, "nbytes": model.nbytes}
        if _COMMIT.fullmatch(model.commit):
            self._store(self._folder / f"{model.commit}.json", record)

    def point_to(self, commit: str) -> None:
        """Writes down which commit the revision is now."""
        if _COMMIT.fullmatch(commit) and self.commit() != commit:
            self._store(self._revision, {"commit": commit})

    def _store(self, path: Path, record: Mapping[str, Any]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, json.dumps(record, separators=(",", ":")).encode())
        except OSError as problem:
            _log.debug("headers are not kept in %s: %s", self._folder, problem.strerror)
