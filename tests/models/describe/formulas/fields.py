"""The fields of a model's config, with the defaults and other names that its family has for them. Pure.

What a config leaves out is filled in as transformers' config classes do: from ``family_defaults.json``, which says what
those classes have (a test compares it with them), and by the few rules below.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from gpuherd.errors import BadModel
from gpuherd.models.names import quoted

# Far above any model that exists, and small enough that no product of a few of them is slow to handle.
MAX_SIZE = 1 << 40
MAX_LAYERS = 10_000


class Fields:
    """A config by transformers' canonical names. Every question may raise BadModel, naming the field."""

    def __init__(self, config: Mapping[str, Any], model: str, model_type: str) -> None:
        known = family_defaults().get(model_type, {})
        self.model = model
        self.model_type = model_type
        self._config = config
        self._defaults: Mapping[str, Any] = known.get("defaults", {})
        self._aliases: Mapping[str, str] = known.get("aliases", {})

    def get(self, name: str) -> Any:
        """The value as it is; None where neither the config nor the family has one."""
        for key in self._keys(name):
            if key in self._config:
                return self._config[key]
        return next((self._defaults[key] for key in self._keys(name) if key in self._defaults), None)

    def says(self, name: str) -> bool:
        """Whether the config itself has the field, and not as null."""
        return any(self._config.get(key) is not None for key in self._keys(name))

    def size(self, *names: str) -> int:
        """A whole number of at least 1, from the first of these fields that is not null."""
        for name in names:
            value = self.get(name)
            if value is not None:
                return self._number(name, value, least=1)
        raise BadModel(f"{quoted(self.model)}: its config ({self.model_type}) has no {names[0]}")

    def count(self, name: str) -> int:
        """A whole number of at least 0; 0 for null."""
        value = self.get(name)
        return 0 if value is None else self._number(name, value, least=0)

    def flag(self, name: str) -> bool:
        """Whether the field is true."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool | int):
            raise self.bad(name, value, "true or false")
        return bool(value)

    def list(self, name: str) -> Sequence[Any] | None:
        """A list, or None where there is none."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise self.bad(name, value, "a list")
        return cast("Sequence[Any] | None", value)

    def numbers(self, name: str, least: int = 0) -> Sequence[int] | None:
        """A list of whole numbers of at least ``least`` entries, or None where there is none, or an empty one."""
        value = self.list(name)
        if not value:
            return None
        if len(value) < least or not all(isinstance(number, int) for number in value):
            raise self.bad(name, value, f"a list of at least {least} whole numbers")
        return value

    def part(self, name: str, default_type: str) -> Fields:
        """A config within the config."""
        value = self._config.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.bad(name, value, "a config of its own")
        return Fields(value, self.model, str(value.get("model_type") or default_type))

    @property
    def hidden(self) -> int:
        """Width of the stream from layer to layer."""
        return self.size("hidden_size")

    @property
    def layers(self) -> int:
        """How many layers; at most 10,000."""
        return self.layers_in("num_hidden_layers")

    def layers_in(self, *names: str) -> int:
        """The number of layers, or of other modules that are listed one by one, that a field has; at most 10,000."""
        number = self.size(*names)
        if number > MAX_LAYERS:
            raise self.bad(names[0], number, f"at most {MAX_LAYERS}")
        return number

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.size("num_attention_heads")

    @property
    def key_heads(self) -> int:
        """Key and value heads; as many as query heads where the config doesn't say."""
        return self.size("num_key_value_heads", "num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.size("head_dim") if self.get("head_dim") is not None else max(1, self.hidden // self.heads)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return self.size("vocab_size")

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.flag("tie_word_embeddings")

    def _keys(self, name: str) -> tuple[str, ...]:
        alias = self._aliases.get(name)
        return (name,) if alias is None else (alias, name)

    def _number(self, name: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
            raise self.bad(name, value, f"a whole number of at least {least}")
        return value

    def bad(self, name: str, value: object, wanted: str) -> BadModel:
        """The error that says so."""
        return BadModel(f"{quoted(self.model)}: its config has {name} = {quoted(str(value))}; it must be {wanted}")


@cache
def family_defaults() -> Mapping[str, Mapping[str, Any]]:
    """For each model_type: ``defaults`` of its fields, ``aliases`` (canonical name -> name in the config),
    ``class_name`` of the model that is loaded, and whether it has a ``tensor_parallel`` plan."""
    text = Path(__file__).with_name("family_defaults.json").read_text("utf-8")
    return cast("Mapping[str, Mapping[str, Any]]", json.loads(text))
