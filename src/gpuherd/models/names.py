"""What a user may call a model by, and a safe file name for it.

Knows the form of Hugging Face ids and of local paths; looks at the file system only to see whether a path exists.
Downloads nothing and opens nothing.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import BadModel, MissingModel

MAX_HUB_NAME = 96
MAX_PATH = 4096
# File systems take 255 bytes, of which endings and temporary names want some.
MAX_STEM = 200
LONGEST_SHOWN = 80

# The rule of huggingface_hub's validate_repo_id, restated for ASCII: each part starts and ends with a letter, digit or
# underscore, which also keeps out leading dashes and dots.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"(?:{_PART}/)?{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._/-]{0,126}[A-Za-z0-9_])?")
_PLAIN_REVISION = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Of files that hold weights.
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_LOCAL_STARTS = ("/", "./", "../", "~")


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model by name.

    Attributes:
        text: as the user wrote it.
        path: absolute path of the folder or file when it is local, else None.
        repo_id: ``name`` or ``org/name`` when it is on the Hub, else None.
        revision: branch, tag or commit after ``@``, None for the default branch.
    """

    text: str
    path: Path | None = None
    repo_id: str | None = None
    revision: str | None = None


def quoted(text: str) -> str:
    """A repr for error messages: no control characters, and of more than 80 characters the first and last 40."""
    if len(text) <= LONGEST_SHOWN:
        return repr(text)
    half = LONGEST_SHOWN // 2
    return f"{text[:half]!r}...{text[-half:]!r} ({len(text)} characters)"


def user_path(text: str) -> Path:
    """The path with ``~`` and ``~user`` replaced; as it is where there is no such user, as shells have it."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def is_there(text: str) -> bool:
    """Whether there is a file or folder of this name; not where that can't be looked at."""
    try:
        return user_path(text).exists()
    except (OSError, ValueError):
        return False


def parse_model(text: str) -> ModelRef:
    """What the text names.

    An existing path is local, as is all that starts with ``/``, ``./``, ``../`` or ``~``; the rest must be a Hugging
    Face id, optionally with ``@revision``. Raises MissingModel for a local path that is not there, and BadModel for
    text that can be neither.
    """
    if not text.strip():
        raise BadModel("the model id is empty")
    if any(unicodedata.category(letter) == "Cc" for letter in text):
        raise BadModel(f"model {quoted(text)} contains a control character or a line break")
    if any(unicodedata.category(letter) == "Cs" for letter in text):
        raise BadModel(
            f"model {quoted(text)}: its path is not in UTF-8, so that no result file could name it; rename it"
        )
    if text.startswith("-"):
        raise BadModel(f"model {quoted(text)} starts with a dash; for a local folder write ./{quoted(text)[1:-1]}")
    if len(text) > MAX_PATH:
        raise BadModel(f"model {quoted(text)} is too long for an id or a path")
    local = _local(text)
    return local if local is not None else _hub(text)


def _local(text: str) -> ModelRef | None:
    try:
        path = Path(text).expanduser().absolute()
        if path.exists():
            return ModelRef(text, path=path)
    except (OSError, RuntimeError, ValueError) as problem:  # a part too long, no right to look, no such user for ~user
        if text.startswith(_LOCAL_STARTS):
            raise BadModel(f"model {quoted(text)} can't be looked at: {problem}") from None
        return None
    if text.startswith(_LOCAL_STARTS):
        raise MissingModel(f"model {quoted(text)}: there is no such folder or file")
    return None


def _hub(text: str) -> ModelRef:
    repo_id, at, revision = text.partition("@")
    problem = _hub_problem(repo_id)
    if problem is not None:
        raise BadModel(f"model {quoted(text)} is neither a local path nor a Hugging Face id: {problem}")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision):
        raise BadModel(f"model {quoted(text)}: {quoted(revision)} is no revision (a branch, tag or commit)")
    return ModelRef(text, repo_id=repo_id, revision=revision or None)


def _hub_problem(repo_id: str) -> str | None:
    """Why this is no Hugging Face id, None if it is one."""
    longest = max(map(len, repo_id.split("/")))
    if longest > MAX_HUB_NAME:
        return f"a name in it has {longest} characters, at most {MAX_HUB_NAME} are allowed"
    if "--" in repo_id or ".." in repo_id:
        return "'--' and '..' are not allowed in an id"
    if not _HUB_ID.fullmatch(repo_id):
        return "an id is 'name' or 'org/name' of letters, digits, '.', '_' and '-'"
    if repo_id.endswith(".git"):
        return "an id does not end in '.git'"
    return None


def safe_filename(model_id: str) -> str:
    """A file name stem for results of this model: at most 200 bytes, no ``/``, no leading dot or dash.

    A Hugging Face id keeps its name with ``/`` written ``--``, as in the published results, and ``@revision`` behind
    it. Anything else (a path, an odd or a long revision) is its last part, cleaned, ``+`` and the first 16 hex digits
    of its SHA-256. Ids hold neither ``--`` nor ``+``, so different texts have different names.
    """
    repo_id, at, revision = model_id.partition("@")
    if _hub_problem(repo_id) is None and (not at or _PLAIN_REVISION.fullmatch(revision)):
        stem = repo_id.replace("/", "--") + at + revision
        if len(stem) <= MAX_STEM:
            return stem
    digest = hashlib.sha256(model_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    last = model_id.rstrip("/").rpartition("/")[2]
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "_", last).lstrip(".-")[:100]
    return f"{cleaned or 'model'}+{digest}"
