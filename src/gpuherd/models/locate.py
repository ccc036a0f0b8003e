"""Brings a model to this machine: a local path as it is, a Hugging Face id as a snapshot of its config and weights.

Downloads only what analysis reads: config files and one format of weights, safetensors if the repository has it,
GGUF only where there is nothing else. Says apart what users have to do different things about: no such repository, no
such revision, gated, not in the cache of an offline machine, no network. The cache, tokens and HF_HUB_OFFLINE are
huggingface_hub's own.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from gpuherd.errors import BadModel, CannotWrite, MissingModel
from gpuherd.models.names import ModelRef, shown

logger = logging.getLogger(__name__)

_CONFIGS = ("config.json", "adapter_config.json", "*.index.json")
# For a repository's own top folder. Copies in other layouts (original/, onnx/, consolidated.*) are left out.
_SAFETENSORS = ("*.safetensors",)
_PICKLES = ("*.bin", "*.pt", "*.pth")
_ENDINGS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_NOT_WEIGHTS = (
    "*/*", "consolidated*", "training_args.bin", "optimizer*", "scheduler*", "rng_state*", "scaler*", "*.fp16.*",
    "flax_model*", "tf_model*", "rust_model*",
)  # fmt: skip
# The vision part of a GGUF model, a file of its own, and the number of a shard in a GGUF file's name.
_PROJECTOR = "mmproj*"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
# Seconds before each further try after a failure that may pass.
WAITS = (1.0, 4.0, 15.0)

ResultT = TypeVar("ResultT")


def locate(ref: ModelRef, *, waits: Sequence[float] = WAITS, sleep: Callable[[float], None] = time.sleep) -> Path:
    """The folder or file that holds the model, downloaded if it is a Hugging Face id and not in the cache.

    A failing network is tried again after ``waits`` seconds each. Raises MissingModel when the model is not to be had
    (missing, gated, offline) and BadModel when its repository has no weights that can be read.
    """
    if ref.path is not None:
        return ref.path
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _from_cache(ref, None)
    try:
        files = _patiently(lambda: _list_files(ref), ref, waits, sleep)
        return _patiently(lambda: _download(ref, choose_files(files, ref)), ref, waits, sleep)
    except _NoNetwork as problem:
        # Without the network a model that was downloaded before will do.
        return _from_cache(ref, str(problem))


class _NoNetwork(Exception):
    """The Hub could not be reached, though it was tried several times."""


def choose_files(files: Sequence[str], ref: ModelRef) -> list[str]:
    """Of the files of a repository those to download: configs, and weights in one format. Raises BadModel."""
    top = [name for name in files if not any(fnmatchcase(name, pattern) for pattern in _NOT_WEIGHTS)]
    configs = [name for name in top if any(fnmatchcase(name, pattern) for pattern in _CONFIGS)]
    for patterns in (_SAFETENSORS, _PICKLES):
        weights = [name for name in top if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if weights:
            ending = "safetensors" if patterns is _SAFETENSORS else "bin"
            kept = [name for name in configs if not name.endswith("index.json") or f".{ending}." in name]
            return sorted({*kept, *weights})
    return _gguf(top, ref)


def _gguf(files: Sequence[str], ref: ModelRef) -> list[str]:
    """The GGUF files of a repository without other weights: of one model, in one file or in shards. Raises BadModel."""
    found = sorted(name for name in files if name.lower().endswith(".gguf") and not fnmatchcase(name, _PROJECTOR))
    models = {_SHARD.sub("", name) for name in found}
    if not found:
        raise BadModel(f"model {shown(ref.text)} has no safetensors, PyTorch or GGUF weights in its top folder")
    if len(models) > 1:
        names = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        raise BadModel(
            f"model {shown(ref.text)} has several GGUF files ({names}); download the one to analyse and give its path"
        )
    return found


def _list_files(ref: ModelRef) -> list[str]:
    from huggingface_hub import HfApi

    # One request without huggingface_hub's own retries, so that it is known at once whether there is a network.
    info = HfApi().model_info(_repo(ref), revision=ref.revision, timeout=20)
    return [sibling.rfilename for sibling in info.siblings or ()]


def _download(ref: ModelRef, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _no_progress_bars():
        return Path(snapshot_download(_repo(ref), revision=ref.revision, allow_patterns=[*files]))


def _from_cache(ref: ModelRef, problem: str | None) -> Path:
    """The snapshot that was downloaded before. Raises MissingModel when there is none, or none with weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(_repo(ref), revision=ref.revision, local_files_only=True))
    except LocalEntryNotFoundError as missing:
        # Newer versions call a snapshot incomplete that has only the files that we had asked for.
        folder = Path(getattr(missing, "snapshot_path", None) or "")
    if folder.name and any(
        path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") for path in folder.iterdir()
    ):
        return folder
    reason = f"the Hugging Face Hub can't be reached ({problem})" if problem else "HF_HUB_OFFLINE is set"
    raise MissingModel(
        f"model {shown(ref.text)} is not in the local cache, and {reason}; download it where there is a network"
    )


def _repo(ref: ModelRef) -> str:
    if ref.repo_id is None:
        raise ValueError(f"{ref.text!r} is no Hugging Face id")
    return ref.repo_id


def _patiently(
    call: Callable[[], ResultT], ref: ModelRef, waits: Sequence[float], sleep: Callable[[float], None]
) -> ResultT:
    """The call's result; a failure of the network or the server is tried again, any other becomes our error."""
    for wait in (*waits, None):
        try:
            return call()
        except Exception as problem:
            passing = _judge(problem, ref)
            if wait is None:
                raise _NoNetwork(passing) from None
            logger.warning("model %s: %s; trying again in %.0f s", shown(ref.text), passing, wait)
            sleep(wait)
    raise AssertionError("unreachable")


def _judge(problem: Exception, ref: ModelRef) -> str:
    """A short reason if the failure may pass; raises our error if it won't, and what is no failure of the Hub as is."""
    from huggingface_hub import errors

    model = f"model {shown(ref.text)}"
    # Gated is a kind of missing repository in huggingface_hub, so it has to come first.
    if isinstance(problem, errors.GatedRepoError):
        raise MissingModel(
            f"{model} is gated: accept its licence on its page of the Hugging Face Hub and log in with 'hf auth login'"
        ) from None
    if isinstance(problem, errors.RevisionNotFoundError):
        raise MissingModel(f"{model}: the repository has no revision {shown(ref.revision or 'main')}") from None
    if isinstance(problem, errors.RepositoryNotFoundError):
        raise MissingModel(
            f"{model} is not on the Hugging Face Hub, or is private; check the id, or log in with 'hf auth login'"
        ) from None
    if isinstance(problem, errors.DisabledRepoError):
        raise MissingModel(f"{model} has been disabled on the Hugging Face Hub") from None
    if isinstance(problem, errors.HfHubHTTPError):
        status = problem.response.status_code
        if status in (408, 429) or status >= 500:
            return f"the Hub answered {status}"
        raise MissingModel(f"{model} can't be downloaded: the Hub answered {status}") from None
    # HTTPError is the base of the HTTP library's own errors of transport.
    if isinstance(problem, errors.HTTPError | errors.LocalEntryNotFoundError | ConnectionError | TimeoutError):
        return f"{type(problem).__name__}: {' '.join(str(problem).split())[:120]}"
    if isinstance(problem, OSError) and problem.strerror:
        where = f" ({problem.filename})" if problem.filename else ""
        raise CannotWrite(f"{model} can't be stored in the local cache: {problem.strerror}{where}") from None
    raise problem


class _no_progress_bars:  # noqa: N801 - used like a function
    """Keeps huggingface_hub's progress bars out of job logs."""

    def __enter__(self) -> None:
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

        self._were_disabled = are_progress_bars_disabled()
        disable_progress_bars()

    def __exit__(self, *_: Any) -> None:
        from huggingface_hub.utils import enable_progress_bars

        if not self._were_disabled:
            enable_progress_bars()
