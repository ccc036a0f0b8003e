"""Descriptions of configurations, each made once and kept in the user's cache.

They are made in a process of its own, which this module is when it is run: a request on standard input, the answer on
standard output, both JSON. Where a process has transformers' models anyway, as workers that train have, it makes them
itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, MissingExtra
from gpuherd.models.describe.cache import from_dict, read_cached, to_dict, write_cached
from gpuherd.models.describe.config import model_type_of
from gpuherd.models.describe.description import Architecture
from gpuherd.models.names import quoted

# A description takes about ten seconds, most of them for importing torch; the process bounds its processor time itself,
# so that this is for one that hangs.
_LONGEST_S = 1800.0
_MOST_MEMORY = 16 << 30  # of address space
_MOST_SECONDS = 200  # of processor time; 10 are usual
_LISTS = ("auto_mappings.py", "configuration_auto.py")


def described(config: Mapping[str, Any], model: str, *, training: bool = False) -> Architecture:
    """The architecture of the model that transformers builds from a configuration.

    Args:
        config: a parsed config.json.
        model: how the user named it.
        training: with what training steps need, which takes about as long again to measure.

    Raises:
        BadModel: transformers can't build or run it.
        MissingExtra: torch or transformers is not installed, and the description is not in the cache.
    """
    found = read_cached(config, model)
    if found is not None and not (training and _lacks_training(found)):
        return found
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"{missing[0]} is not installed; pip install 'gpuherd[load]' brings what builds unknown architectures"
        )
    if not may_know(config):
        raise BadModel(f"transformers has no model of the type {quoted(str(config.get('model_type')))}")
    sys.stderr.write(f"gpuherd: {quoted(model)} is described for the first time, which takes a few seconds ...\n")
    record = _describe_here(config, model, training) if _has_models() else _ask(config, model, training)
    write_cached(config, record)
    return from_dict(record, config, model)


def _lacks_training(architecture: Architecture) -> bool:
    return not architecture.trainings_measured and architecture.predicts


def may_know(config: Mapping[str, Any]) -> bool:
    """Whether transformers' lists of models name the type: a look at its files, which spares a process that imports
    torch to say no."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return True
    if not model_type_of(config):
        return False
    word = f'"{model_type_of(config)}"'
    lists = [Path(found.origin).parent / "models" / "auto" / name for name in _LISTS]
    texts = [path.read_text("utf-8", errors="replace") for path in lists if path.is_file()]
    return not texts or any(word in text for text in texts)


def _has_models() -> bool:
    return "transformers.modeling_utils" in sys.modules


def _describe_here(config: Mapping[str, Any], model: str, training: bool) -> dict[str, Any]:
    """What transformers says of the configuration, without another process that imports it for seconds. A process that
    has its models loads the same configuration to compute with it: it must bear what that does either way."""
    from importlib import import_module

    # By name: who plans must not come to import torch by way of this module.
    meta = import_module("gpuherd.models.describe.meta")
    return to_dict(meta.describe_config(config, model, training=training))


def _ask(config: Mapping[str, Any], model: str, training: bool) -> dict[str, Any]:
    """What a process with torch and transformers says of the configuration."""
    import subprocess

    command = [sys.executable, "-P", "-m", "gpuherd.models.describe.process"]
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            command,
            input=json.dumps({"config": config, "model": model, "training": training}, default=str),
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
        raise BadModel(f"{quoted(model)}: building it took longer than {_LONGEST_S:.0f} s and was given up") from None
    except (KeyError, TypeError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BadModel(f"{quoted(model)}: describing it failed: {quoted(last[:300])}") from None


# --- that process --------------------------------------------------------------------------------------------------


def main() -> None:
    """Answers one request, with no more memory and processor time than bounds allow, whatever the configuration asks
    for. Messages of libraries go to standard error, so that nothing but the answer is on standard output."""
    import resource

    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        for what, bound in ((resource.RLIMIT_AS, _MOST_MEMORY), (resource.RLIMIT_CPU, _MOST_SECONDS)):
            _, most = resource.getrlimit(what)
            with suppress(OSError, ValueError):  # systems that have no such bound
                resource.setrlimit(what, (bound if most == resource.RLIM_INFINITY else min(bound, most), most))
        request = json.load(sys.stdin)
        try:
            json.dump({"description": _describe_here(**request)}, answer, separators=(",", ":"))
        except BadModel as problem:
            json.dump({"problem": str(problem)}, answer)


if __name__ == "__main__":
    main()
