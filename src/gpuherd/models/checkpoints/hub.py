"""The Hugging Face Hub: what a repository holds, pieces of its files, models brought to this machine, and failures.

Distinguishes the failures that users have to handle differently: no such repository, no such revision, gated, no
network; what may pass is tried again. The cache, tokens, the endpoint and HF_HUB_OFFLINE are huggingface_hub's own.

Downloads only what is read: config files and one format of weights, safetensors if the repository has it, GGUF only
where there is nothing else; for loading, also the tokenizer and what else transformers looks for. Before a download it
checks that the disk has room for it.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from gpuherd.errors import BadModel, CannotWrite, MissingModel
from gpuherd.models.names import WEIGHT_ENDINGS, ModelRef, quoted

logger = logging.getLogger(__name__)

# Seconds before each further try after a failure that may pass.
WAITS = (1.0, 4.0, 15.0)
TIMEOUT_S = 20.0
_REACH_S = 5.0

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository. ``size`` in bytes, and the SHA-256 of its content; None where the Hub doesn't say."""

    name: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """What a repository holds at one commit, in all folders."""

    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def names(self) -> list[str]:
        """The files' names."""
        return [file.name for file in self.files]


class NoNetwork(Exception):
    """The Hub could not be reached, though it was tried several times."""


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def no_answer() -> str | None:
    """Why the Hub can't be reached, by one short attempt; None where it answers, whatever it says.

    For commands that people wait for: their libraries would try for half a minute before they say so.
    """
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils import get_session

    endpoint = str(HfApi().endpoint)
    try:
        get_session().head(endpoint, timeout=_REACH_S)
    except (errors.HTTPError, OSError) as problem:  # OSError: ConnectionError, TimeoutError, and offline by the library
        return f"{endpoint}: {_in_a_line(problem)}"
    return None


def repo_of(ref: ModelRef) -> str:
    """``org/name`` of a model that is on the Hub."""
    if ref.repo_id is None:
        raise ValueError(f"{ref.text!r} is no Hugging Face id")
    return ref.repo_id


def list_repo(ref: ModelRef) -> Listing:
    """The repository's files at the ref's revision, with their sizes. One request; raises what the library raises."""
    from huggingface_hub import HfApi

    # Without huggingface_hub's own retries, so that it is known at once whether there is a network.
    info = HfApi().model_info(repo_of(ref), revision=ref.revision, timeout=TIMEOUT_S, files_metadata=True)
    files = tuple(
        RemoteFile(sibling.rfilename, sibling.size, getattr(sibling.lfs, "sha256", None))
        for sibling in info.siblings or ()
    )
    return Listing(str(info.sha or ref.revision or "main"), files)


def read_range(ref: ModelRef, commit: str, name: str, start: int, stop: int) -> bytes:
    """Bytes ``start`` to ``stop`` of a file, fewer where it ends before. One request; no more is received than that.

    Raises what the library raises.
    """
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(repo_of(ref), name, revision=commit, endpoint=HfApi().endpoint)
    # A server that compresses what it sends would count other bytes than we do.
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        if response.status_code == 416:  # the file has no bytes in that range
            return b""
        hf_raise_for_status(response)
        # A server may send the whole file nevertheless.
        skip = 0 if response.status_code == 206 else start
        received = bytearray()
        for chunk in response.iter_bytes():
            received += chunk
            if len(received) >= skip + stop - start:
                break
    return bytes(received[skip : skip + stop - start])


def patiently(call: Callable[[], ResultT], ref: ModelRef, waits: Sequence[float] = WAITS) -> ResultT:
    """The call's result; a failure of the network or the server is tried again after so many seconds each, any other
    becomes our error.

    Raises NoNetwork after the last try; MissingModel (no such model, revision or file, gated), CannotWrite.
    """
    for wait in (*waits, None):
        try:
            return call()
        except Exception as problem:
            passing = _judge(problem, ref)
            if wait is None:
                raise NoNetwork(passing) from None
            logger.warning("model %s: %s; trying again in %.0f s", quoted(ref.text), passing, wait)
            time.sleep(wait)
    raise AssertionError("unreachable")


def _judge(problem: Exception, ref: ModelRef) -> str:
    """A short reason if the failure may pass; raises our error if it won't, and what is no failure of the Hub as is."""
    from huggingface_hub import errors

    model = f"model {quoted(ref.text)}"
    log_in = "log in with 'hf auth login'"
    # Gated is a kind of missing repository in huggingface_hub, so it has to come first.
    for kind, what in (
        (errors.GatedRepoError, f" is gated: accept its licence on its page of the Hugging Face Hub and {log_in}"),
        (errors.RevisionNotFoundError, f": the repository has no revision {quoted(ref.revision or 'main')}"),
        (errors.RepositoryNotFoundError, f" is not on the Hugging Face Hub, or is private; check the id, or {log_in}"),
        (errors.DisabledRepoError, " has been disabled on the Hugging Face Hub"),
    ):
        if isinstance(problem, kind):
            raise MissingModel(f"{model}{what}") from None
    if isinstance(problem, errors.HfHubHTTPError):
        status = problem.response.status_code
        if status in (408, 429) or status >= 500:
            return f"the Hub answered {status}"
        raise MissingModel(f"{model} can't be downloaded: the Hub answered {status}") from None
    # HTTPError is the base of the HTTP library's own errors of transport.
    if isinstance(problem, errors.HTTPError | errors.LocalEntryNotFoundError | ConnectionError | TimeoutError):
        # The library's own words are long, and end in advice; what it met says why.
        met = problem.__cause__ if isinstance(problem.__cause__, Exception) else problem
        return _in_a_line(met)
    if isinstance(problem, OSError) and problem.strerror:
        where = f" ({problem.filename})" if problem.filename else ""
        raise CannotWrite(f"{model} can't be stored in the local cache: {problem.strerror}{where}") from None
    raise problem


def _in_a_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:120]}"


def missing(ref: ModelRef, problem: str | None) -> MissingModel:
    """The error for a model that would have to come from a Hub that can't be asked: offline, or without a network."""
    reason = f"the Hugging Face Hub can't be reached ({problem})" if problem else "HF_HUB_OFFLINE is set"
    return MissingModel(
        f"model {quoted(ref.text)} is not in the local cache, and {reason}; download it where there is a network"
    )


def unreadable(ref: ModelRef, name: str, problem: str) -> BadModel:
    """The error for a file of the repository that is not what it should be."""
    return BadModel(f"model {quoted(ref.text)}: its file {name!r} {problem}")


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keeps huggingface_hub's progress bars out of job logs."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()


# ---- room on the disk ------------------------------------------------------------------------------------------------

_MB = 1 << 20


def check_space(folder: Path, nbytes: int, what: str, *, remedy: str) -> None:
    """Raises CannotWrite when the disk of ``folder``, which need not exist yet, has no room for so many bytes.

    Args:
        folder: where it will be written.
        nbytes: how much.
        what: whose bytes they are, as the beginning of the sentence.
        remedy: what to do, as the end of the sentence.
    """
    there = folder.absolute()
    while not there.is_dir() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        return  # a disk that can't be asked may have room
    if nbytes > free:
        raise CannotWrite(
            f"{what} takes {_mb(nbytes)} MB on the disk of {folder}, where {free // _MB:,} MB are free; {remedy}"
        )


def _mb(nbytes: int) -> str:
    return f"{-(-nbytes // _MB):,}"


# ---- a model on this machine -----------------------------------------------------------------------------------------

_CONFIGS = ("config.json", "adapter_config.json", "*.index.json")
# What transformers reads in addition to config and weights: generation_config.json, the tokenizer in its many forms,
# the processor of pictures and sounds, chat templates.
_TOKENIZER = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm", "*.bpe", "*.vocab")
_TEMPLATES = "additional_chat_templates/*"
# Of folders inside a repository: chat templates, and the settings of sentence-transformers' modules (1_Pooling).
_FOLDERS = (_TEMPLATES, "[0-9]*_*/config.json")
_CODE = "*.py"
_SMALL_FILES = (*_TOKENIZER, _CODE)
_DOCUMENTS = ("license*", "notice*", "readme*", "use_policy*", "requirements*", "trainer_state*", "training_args*")
# For a repository's own top folder. Copies in other layouts (original/, onnx/, consolidated.*) are left out.
_SAFETENSORS = ("*.safetensors",)
_PICKLES = ("*.bin", "*.pt", "*.pth")
_NOT_WEIGHTS = (
    "*/*", "consolidated*", "training_args.bin", "optimizer*", "scheduler*", "rng_state*", "scaler*", "*.fp16.*",
    "flax_model*", "tf_model*", "rust_model*",
)  # fmt: skip
# The vision part of a GGUF model, a file of its own, and the number of a shard in a GGUF file's name.
_PROJECTOR = "mmproj*"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def locate(
    ref: ModelRef, *, for_loading: bool = False, with_code: bool = False, waits: Sequence[float] = WAITS
) -> Path:
    """The folder or file that holds the model, downloaded if it is a Hugging Face id and not in the cache.

    A download that was interrupted goes on: files that are complete stay, and only the others are fetched.

    Args:
        ref: the model.
        for_loading: fetch also what loading it with transformers needs: tokenizer, generation config, templates.
        with_code: fetch also the Python files that a model brings for ``trust_remote_code``; nothing is run here.
        waits: a failing network is tried again after so many seconds each.

    Raises:
        MissingModel: the model is not to be had (missing, gated, offline).
        BadModel: its repository has no weights that can be read.
        CannotWrite: the disk of the cache has no room for it, which is known before the download, or can't be written.
    """
    if ref.path is not None:
        return ref.path
    if is_offline():
        return _from_cache(ref, None)
    try:
        listing = patiently(lambda: list_repo(ref), ref, waits)
        chosen = choose_files(listing.names, ref, for_loading=for_loading, with_code=with_code)
        _check_disk(ref, listing, chosen)
        return patiently(lambda: _download(ref, chosen), ref, waits)
    except NoNetwork as problem:
        # Without the network a model that was downloaded before will do.
        return _from_cache(ref, str(problem))


def cached_copy(ref: ModelRef) -> Path | None:
    """The folder of a model that was downloaded before, with its weights; asks no network. None where there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo_of(ref), revision=ref.revision, local_files_only=True))
    except LocalEntryNotFoundError as absent:
        # Newer versions call a snapshot incomplete that has only the files that we had asked for.
        folder = Path(getattr(absent, "snapshot_path", None) or "")
    if folder.name and any(path.suffix in WEIGHT_ENDINGS for path in folder.iterdir()):
        return folder
    return None


def choose_files(
    files: Sequence[str], ref: ModelRef, *, for_loading: bool = False, with_code: bool = False
) -> list[str]:
    """Of the files of a repository those to download: configs, and weights in one format. Raises BadModel."""
    top = [name for name in files if not _matches(name, _NOT_WEIGHTS)]
    configs = [name for name in top if _matches(name, _CONFIGS)]
    others = _others(files, for_loading, with_code)
    for patterns in (_SAFETENSORS, _PICKLES):
        weights = [name for name in top if _matches(name, patterns)]
        if weights:
            ending = "safetensors" if patterns is _SAFETENSORS else "bin"
            kept = [name for name in configs if not name.endswith("index.json") or f".{ending}." in name]
            return sorted({*kept, *weights, *others})
    return sorted({*_gguf(top, ref), *others})


def _others(files: Sequence[str], for_loading: bool, with_code: bool) -> list[str]:
    """Files that are fetched in addition to config and weights."""
    patterns = (*((*_TOKENIZER, _TEMPLATES) if for_loading else ()), *((_CODE,) if with_code else ()))
    return [
        name
        for name in files
        if _matches(name, patterns)
        and ("/" not in name or _matches(name, _FOLDERS))
        and not name.endswith(".index.json")
        and not _matches(name.lower(), _DOCUMENTS)
    ]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _gguf(files: Sequence[str], ref: ModelRef) -> list[str]:
    """The GGUF files of a repository without other weights: of one model, in one file or in shards. Raises BadModel."""
    found = sorted(name for name in files if name.lower().endswith(".gguf") and not fnmatchcase(name, _PROJECTOR))
    models = {_SHARD.sub("", name) for name in found}
    if not found:
        raise BadModel(f"model {quoted(ref.text)} has no safetensors, PyTorch or GGUF weights in its top folder")
    if len(models) > 1:
        names = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        raise BadModel(
            f"model {quoted(ref.text)} has several GGUF files ({names}); download the one to analyse and give its path"
        )
    return found


def _check_disk(ref: ModelRef, listing: Listing, chosen: Sequence[str]) -> None:
    """Raises CannotWrite when what is still to be downloaded is more than the cache's disk has room for."""
    from huggingface_hub import constants

    wanted = set(chosen)
    size = sum(
        file.size or 0 for file in listing.files if file.name in wanted and not _is_cached(ref, listing.commit, file)
    )
    check_space(
        Path(constants.HF_HUB_CACHE),
        size,
        f"model {quoted(ref.text)}",
        remedy="make room, or set HF_HOME to a folder on a larger disk",
    )


def _is_cached(ref: ModelRef, commit: str, file: RemoteFile) -> bool:
    """Whether the file is in the cache, for this commit or, by its content, for another."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    if isinstance(try_to_load_from_cache(repo_of(ref), file.name, revision=commit), str):
        return True
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_of(ref), repo_type="model")
    return file.sha256 is not None and (folder / "blobs" / file.sha256).exists()


def locate_small(ref: ModelRef) -> Path:
    """The folder of a Hub model with its config, tokenizer and code, fetched where they are not in the cache, without
    its weights. Raises MissingModel, CannotWrite."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    problem = None if is_offline() else no_answer()
    if problem is None and not is_offline():
        try:
            return patiently(lambda: _download(ref, _SMALL_FILES), ref)
        except NoNetwork as failure:
            problem = str(failure)
    try:
        return _download(ref, _SMALL_FILES, offline=True)
    except LocalEntryNotFoundError:
        raise missing(ref, problem) from None


def _download(ref: ModelRef, files: Sequence[str], *, offline: bool = False) -> Path:
    """The snapshot with these files. ``offline``: those in the cache."""
    from huggingface_hub import snapshot_download

    # By the name that was requested and not by the commit, so that the cache knows the name when it is offline.
    with no_progress_bars():
        return Path(
            snapshot_download(repo_of(ref), revision=ref.revision, allow_patterns=[*files], local_files_only=offline)
        )


def _from_cache(ref: ModelRef, problem: str | None) -> Path:
    """The snapshot that was downloaded before. Raises MissingModel when there is none, or none with weights."""
    folder = cached_copy(ref)
    if folder is None:
        raise missing(ref, problem)
    return folder
