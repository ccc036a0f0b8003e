"""Models that can be planned by name alone: published configs (``known_models.json``), and descriptions of the best
known (``descriptions.jsonl``), both shipped as data.

Each config has the id on the Hugging Face Hub, the fields that shapes depend on, and the published number of
parameters, which a test compares with what transformers builds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from gpuherd.errors import BadModel
from gpuherd.models.describe.cache import BESIDE, from_dict
from gpuherd.models.describe.config import model_type_of, number_of, text_part
from gpuherd.models.describe.description import Architecture, Block, Role, Tensor
from gpuherd.options import nearest

SHIPPED = "descriptions.jsonl"

# What a fine-tuned model may have of its own: nothing else depends on it than the tables of words.
_MAY_DIFFER = BESIDE | {"vocab_size", "max_position_embeddings"}
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


def known_types() -> set[str]:
    """The types that their configs name."""
    return {model_type_of(model.config) for model in known_models()}


def known_model(text: str) -> KnownModel | None:
    """The model of this name, whatever its case, with or without its organisation and the ending of a variant
    (``-Instruct``, ``-it``, ``-chat``, ...); None if there is none.

    >>> known_model("llama-3.1-70b-instruct").model_id
    'meta-llama/Llama-3.1-70B'
    """
    organisation, _, name = text.strip().lower().rpartition("/")
    found = _by_name().get(name) or _by_name().get(_normalised(name))
    if found is None or organisation not in ("", found.model_id.lower().partition("/")[0]):
        return None
    return found


def nearest_names(text: str) -> list[str]:
    """Ids of known models that the text may have meant, the nearest first; at most three."""
    found = nearest(_normalised(text.lower().rpartition("/")[2]), _by_name(), most=3, cutoff=0.7)
    return list(dict.fromkeys(_by_name()[name].model_id for name in found))


def _normalised(name: str) -> str:
    """A name in lower case without the endings of variants, and with one kind of separator."""
    return re.sub(r"[-_ ]+", "-", _VARIANT.sub("", name.lower()))


@cache
def _content() -> tuple[tuple[KnownModel, ...], Mapping[str, str]]:
    """The models, and other names -> ids."""
    content = json.loads(resources.files("gpuherd.models.describe").joinpath("known_models.json").read_text("utf-8"))
    models = tuple(KnownModel(entry["id"], entry["config"], entry["parameters"]) for entry in content["models"])
    return models, content["aliases"]


@cache
def _by_name() -> Mapping[str, KnownModel]:
    """Models by name in lower case, as it is and without the endings of variants; the name as it is wins."""
    models, aliases = _content()
    by_id = {model.model_id: model for model in models}
    names = {model.model_id.lower().rpartition("/")[2]: model for model in models}
    names |= {alias: by_id[model_id] for alias, model_id in aliases.items()}
    return {_normalised(name): model for name, model in names.items()} | names


# --- descriptions --------------------------------------------------------------------------------------------------


def shipped(model_id: str, config: Mapping[str, Any], model: str) -> Architecture | None:
    """The description of a well-known model that comes with gpuherd; None where there is none.

    One line a model: the id, a tab, the description. Only the model's own line is parsed.
    """
    return next(_shipped({model_id: config}, model), None)


def shipped_alike(config: Mapping[str, Any], model: str) -> Iterator[Architecture]:
    """The shipped descriptions of models of the same type and width, of which a fine-tuned model may be one."""
    alike = {known.model_id: known.config for known in known_models() if _width(known.config) == _width(config)}
    return _shipped(alike, model)


def shipped_same(config: Mapping[str, Any], model: str) -> Architecture | None:
    """The shipped description of a well-known model all of whose fields the config has, as fine-tuned models do, but
    for the size of the vocabulary; None where there is none."""
    same = {
        known.model_id: config
        for known in known_models()
        if all(config.get(key) == value for key, value in known.config.items() if key not in _MAY_DIFFER)
    }
    found = next(_shipped(same, model), None)
    return None if found is None else _with_vocabulary(found, config)


def _with_vocabulary(architecture: Architecture, config: Mapping[str, Any]) -> Architecture:
    words = config.get("vocab_size")
    if type(words) is not int or not 0 < words < 1 << 40:
        return architecture

    def resized(tensor: Tensor) -> Tensor:
        is_table = tensor.role in (Role.EMBEDDING, Role.HEAD) and tensor.shape[0] == architecture.vocab_size
        return replace(tensor, shape=(words, *tensor.shape[1:])) if is_table else tensor

    blocks = tuple(replace(each, tensors=tuple(map(resized, each.tensors))) for each in architecture.blocks)
    return replace(architecture, blocks=blocks, vocab_size=words)


def with_shipped_peaks(architecture: Architecture) -> Architecture:
    """The same architecture with the peaks of a well-known model whose layers it has, as fine-tuned models do; without
    any where none has the same."""
    width = {"model_type": architecture.model_type, "hidden_size": architecture.hidden_size}
    alike = shipped_alike(width, architecture.model)
    with_peaks = [each for found in alike if (each := with_peaks_of(architecture, found)).peaks]
    return next((each for each in with_peaks if each.trainings_measured), next(iter(with_peaks), architecture))


def _width(config: Mapping[str, Any]) -> tuple[str, int | None]:
    """A model's type, and how wide its language model is."""
    return model_type_of(config), number_of({**config, **(text_part(config) or {})}, "hidden")


def with_peaks_of(architecture: Architecture, measured: Architecture) -> Architecture:
    """The same architecture with the peaks of another whose layers it has; as it is where it has others."""
    keys = {_layer(block): block.peaks for block in measured.blocks if block.kind == "layer"}
    if not all(_layer(block) in keys for block in architecture.blocks if block.kind == "layer"):
        return architecture
    blocks = tuple(
        replace(block, peaks=keys[_layer(block)]) if block.kind == "layer" else block for block in architecture.blocks
    )
    return replace(architecture, blocks=blocks, peaks=measured.peaks, around=measured.around)


def _layer(block: Block) -> object:
    """All of a layer that its peaks depend on, as far as its shapes tell."""
    start = len(block.name)
    return tuple(sorted((tensor.name[start:], tensor.shape, tensor.role) for tensor in block.tensors)), block.cache


def _shipped(configs: Mapping[str, Mapping[str, Any]], model: str) -> Iterator[Architecture]:
    """The shipped descriptions of these models."""
    source = resources.files("gpuherd.models.describe").joinpath(SHIPPED)
    if not source.is_file():
        return
    with source.open(encoding="utf-8") as lines:
        for line in lines:
            model_id, _, record = line.partition("\t")
            if model_id not in configs:
                continue
            try:
                yield from_dict(json.loads(record), configs[model_id], model)
            except (KeyError, TypeError, ValueError) as problem:
                said = f"the shipped description of {model_id} is damaged: {problem}"
                raise BadModel(f"{said}; install gpuherd again") from None
