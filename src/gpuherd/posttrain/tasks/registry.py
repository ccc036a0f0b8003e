"""Which tasks there are, by the names that configs use, and where: a module is imported when its task is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

from gpuherd.errors import UsageError, printable
from gpuherd.posttrain.problem import Task
from gpuherd.posttrain.tasks.options import TaskOptions

# A function of each module: TaskOptions -> Task.
TASKS: Mapping[str, str] = {
    "arithmetic": "arithmetic:make",
    "star_graph": "star_graph:make",
    "sentiment": "sentiment:make",
    "tree_mdp": "tree_mdp:make",
    "gsm8k": "gsm8k:make",
    "math": "math500:make",
    "aime": "aime:make",
    "aime22to24": "aime:make_22_to_24",
    "aime2024": "aime:make_2024",
    "aime2025": "aime:make_2025",
    "tldr": "tldr:make",
    "imdb": "imdb:make",
    "code": "code:make",
    "mbpp": "code:make_mbpp",
    "humaneval": "code:make_humaneval",
}
_SPELLINGS = {"imdbgen": "imdb", "math_500": "math", "math500": "math"}
_FILES = "files:make_of_file"  # Path, TaskOptions -> Task
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


def make_task(name_or_path: str, options: TaskOptions | None = None) -> Task:
    """The task of a name, or of the problems in a local file. No model is loaded and no problem read with it: that is
    done when problems or rewards are first asked for. Tasks that run code find out whether they can.

    Raises UsageError, which says the nearest name or setting; NoProtection; errors of looking into a file.
    """
    options = options or TaskOptions()
    plain = name_or_path.lower().replace("-", "_")
    plain = _SPELLINGS.get(plain, plain)
    if plain in TASKS:
        return _maker(TASKS[plain])(options)
    path = Path(name_or_path).expanduser()
    if path.suffix.lower() in _SUFFIXES or path.is_file():
        if not path.is_file():
            raise UsageError(f"{name_or_path}: there is no such file of problems")
        return _maker(_FILES)(path, options)
    near = difflib.get_close_matches(plain, TASKS, 1)
    hint = f"; did you mean {near[0]}?" if near else f"; tasks: {', '.join(TASKS)}; or a file of problems"
    raise UsageError(f"no task {printable(name_or_path)!r}{hint}")


def _maker(place: str) -> Callable[..., Task]:
    module, _, attribute = place.partition(":")
    made: Callable[..., Task] = getattr(importlib.import_module(f"gpuherd.posttrain.tasks.{module}"), attribute)
    return made
