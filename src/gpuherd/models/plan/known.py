"""Models that can be planned by name alone: published configs, shipped as data (``known_models.json``).

Each entry has the id on the Hugging Face Hub, the fields of its config that shapes depend on, and the published number
of parameters, which a test compares with the formulas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from gpuherd.options import nearest

# Variants that were trained further and have the shapes of their base.
_VARIANT = re.compile(r"-(instruct|chat|it|pt|base|hf|thinking|deduped)(?=-|$)")


@dataclass(frozen=True, slots=True, eq=False)
class KnownModel:
    """A published model: its id, its config as far as it counts, and its published number of parameters."""

    model_id: str
    config: Mapping[str, Any]
    parameters: int


def known_models() -> Sequence[KnownModel]:
    """All of them, in the order of the file."""
    return _content()[0]


def known_model(text: str) -> KnownModel | None:
    """The model of this name, whatever its case, with or without its organisation and the ending of a variant
    (``-Instruct``, ``-it``, ``-chat``, ...); None if there is none.

    >>> known_model("llama-3.1-70b-instruct").model_id
    'meta-llama/Llama-3.1-70B'
    """
    organisation, _, name = text.strip().lower().rpartition("/")
    found = _by_name().get(name) or _by_name().get(_plain(name))
    if found is None or organisation not in ("", found.model_id.lower().partition("/")[0]):
        return None
    return found


def nearest_names(text: str) -> list[str]:
    """Ids of known models that the text may have meant, the nearest first; at most three."""
    found = nearest(_plain(text.lower().rpartition("/")[2]), _by_name(), most=3, cutoff=0.7)
    return list(dict.fromkeys(_by_name()[name].model_id for name in found))


def _plain(name: str) -> str:
    """A name in lower case without the endings of variants, and with one kind of separator."""
    return re.sub(r"[-_ ]+", "-", _VARIANT.sub("", name.lower()))


@cache
def _content() -> tuple[tuple[KnownModel, ...], Mapping[str, str]]:
    """The models, and other names -> ids."""
    content = json.loads(resources.files("gpuherd.models.plan").joinpath("known_models.json").read_text("utf-8"))
    models = tuple(KnownModel(entry["id"], entry["config"], entry["parameters"]) for entry in content["models"])
    return models, content["aliases"]


@cache
def _by_name() -> Mapping[str, KnownModel]:
    """Models by name in lower case, as it is and without the endings of variants; the name as it is wins."""
    models, aliases = _content()
    by_id = {model.model_id: model for model in models}
    names = {model.model_id.lower().rpartition("/")[2]: model for model in models}
    names |= {alias: by_id[model_id] for alias, model_id in aliases.items()}
    return {_plain(name): model for name, model in names.items()} | names
