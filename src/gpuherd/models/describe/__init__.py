"""What a model is made of and what it takes at its peak, asked of the model itself.

transformers builds the architecture on the meta device from its configuration alone, in a process of its own: a strange
configuration can neither take this one down nor keep it waiting for ever, and torch is not imported here. The answer is
kept in the user's cache. No code of a checkpoint is run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, MissingExtra
from gpuherd.models.describe.cache import from_dict, read_cached, write_cached
from gpuherd.models.names import shown
from gpuherd.models.plan.architecture import Architecture

# A description takes about ten seconds, most of them for importing torch; the process bounds its processor time itself,
# so that this is for one that hangs.
_LONGEST_S = 1800.0
_LISTS = ("auto_mappings.py", "configuration_auto.py")


def described(config: Mapping[str, Any], model: str) -> Architecture:
    """The architecture of the model that transformers builds from a configuration.

    Args:
        config: a parsed config.json.
        model: how the user named it.

    Raises:
        BadModel: transformers can't build or run it.
        MissingExtra: torch or transformers is not installed, and the description is not in the cache.
    """
    found = read_cached(config, model)
    if found is not None:
        return found
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"{missing[0]} is not installed; pip install 'gpuherd[load]' brings what builds unknown architectures"
        )
    if not _may_know(config):
        raise BadModel(f"transformers has no model of the type {shown(str(config.get('model_type')))}")
    sys.stderr.write(f"gpuherd: {shown(model)} is described for the first time, which takes a few seconds ...\n")
    record = _ask(config, model)
    write_cached(config, record)
    return from_dict(record, config, model)


def _may_know(config: Mapping[str, Any]) -> bool:
    """Whether transformers' lists of models name the type: a look at its files, which spares a process that imports
    torch to say no."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return True
    word = f'"{config.get("model_type")}"'
    lists = [Path(found.origin).parent / "models" / "auto" / name for name in _LISTS]
    texts = [path.read_text("utf-8", errors="replace") for path in lists if path.is_file()]
    return not texts or any(word in text for text in texts)


def _ask(config: Mapping[str, Any], model: str) -> dict[str, Any]:
    """What a process with torch and transformers says of the configuration."""
    import subprocess

    command = [sys.executable, "-P", "-m", "gpuherd.models.describe.child"]
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            command,
            input=json.dumps({"config": config, "model": model}, default=str),
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
            env={**os.environ, **quiet},
        )
        answer = json.loads(done.stdout)
        if "problem" in answer:
            raise BadModel(str(answer["problem"]))
        return dict(answer["description"])
    except subprocess.TimeoutExpired:
        raise BadModel(f"{shown(model)}: building it took longer than {_LONGEST_S:.0f} s and was given up") from None
    except (KeyError, TypeError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BadModel(f"{shown(model)}: describing it failed: {shown(last[:300])}") from None
