"""The Hugging Face Hub as the modules beside this one see it: what a repository holds, pieces of its files, and its
failures told apart and tried again.

Says apart what users have to do different things about: no such repository, no such revision, gated, no network. The
cache, tokens, the endpoint and HF_HUB_OFFLINE are huggingface_hub's own. Knows nothing of what the files mean.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gpuherd.errors import BadModel, CannotWrite, MissingModel
from gpuherd.models.names import ModelRef, shown

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


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a failing network is tried again: after ``waits`` seconds each, which ``sleep`` lets pass."""

    waits: Sequence[float] = WAITS
    sleep: Callable[[float], None] = time.sleep


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
        if response.status_code == 416:  # nothing of the file lies there
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


def patiently(call: Callable[[], ResultT], ref: ModelRef, patience: Patience) -> ResultT:
    """The call's result; a failure of the network or the server is tried again, any other becomes our error.

    Raises NoNetwork after the last try; MissingModel (no such model, revision or file, gated), CannotWrite.
    """
    for wait in (*patience.waits, None):
        try:
            return call()
        except Exception as problem:
            passing = _judge(problem, ref)
            if wait is None:
                raise NoNetwork(passing) from None
            logger.warning("model %s: %s; trying again in %.0f s", shown(ref.text), passing, wait)
            patience.sleep(wait)
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
        f"model {shown(ref.text)} is not in the local cache, and {reason}; download it where there is a network"
    )


def unreadable(ref: ModelRef, name: str, problem: str) -> BadModel:
    """The error for a file of the repository that is not what it should be."""
    return BadModel(f"model {shown(ref.text)}: its file {name!r} {problem}")


class no_progress_bars:  # noqa: N801 - used like a function
    """Keeps huggingface_hub's progress bars out of job logs."""

    def __enter__(self) -> None:
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

        self._were_disabled = are_progress_bars_disabled()
        disable_progress_bars()

    def __exit__(self, *_: Any) -> None:
        from huggingface_hub.utils import enable_progress_bars

        if not self._were_disabled:
            enable_progress_bars()
