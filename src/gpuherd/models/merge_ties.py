"""The output head of a merged model whose base has its embedding as head, where the adapter holds that embedding whole.

As PEFT does it: the adapter's embedding takes the place of the input only, and the head stays what the base's embedding
was, unless the adapter was trained with ``ensure_weight_tying``. Pure: headers in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpuherd.errors import BadModel
from gpuherd.models.kinds import is_input_embedding, ties_of
from gpuherd.models.merged import Merged
from gpuherd.models.naming import BaseNames
from gpuherd.models.stored import StoredTensor

# The head's name in transformers, where the base's files have none.
_HEAD = "lm_head.weight"
_WITH_HEAD = ("ForCausalLM", "LMHeadModel")


def with_head(merged: Merged, adapter: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> Merged:
    """The merged model with the head that it has.

    Args:
        merged: base and adapter.
        adapter: the adapter's config.
        stored: where the base's tensors lie.

    Raises BadModel where embedding and head are trained in ways that exclude each other.
    """
    base = merged.base
    embedding = next((name for name in merged.replaced if is_input_embedding(name) and name in stored), None)
    head = None if embedding is None else _tied_head(merged, embedding)
    if embedding is None or head is None:
        return merged
    trained = _is_saved(embedding, adapter)
    if embedding in merged.edits:  # factors of the head: PEFT saves the embedding beside them
        if trained:
            raise BadModel(f"the adapter holds {embedding!r} whole, and factors of the head that is tied to it")
        return merged
    if adapter.get("ensure_weight_tying") is True or not (trained or _is_saved(head, adapter)):
        # Both were saved, because they were trained as one or have grown.
        tensors = {name: info for name, info in merged.tensors.items() if name != head or name in base.tensors}
        replaced = {name: tensor for name, tensor in merged.replaced.items() if name != head}
        return replace(merged, config=base.config, tensors=tensors, replaced=replaced)
    if head in merged.replaced:
        return merged
    own = stored.get(head, stored[embedding])
    return replace(
        merged,
        config={**merged.config, "tie_word_embeddings": False},
        tensors={**merged.tensors, head: replace(own.info, name=head, shares=None)},
        replaced={**merged.replaced, head: own},
    )


def _is_saved(name: str, adapter: Mapping[str, Any]) -> bool:
    """Whether the adapter's config lists the tensor's module as one that is trained whole."""
    module = name.rpartition(".")[0]
    return any(f".{entry}." in f".{module}." for entry in adapter.get("modules_to_save") or ())


def _tied_head(merged: Merged, embedding: str) -> str | None:
    """The name of the head that is the base's embedding; None where the head is another, or there is none."""
    base = merged.base
    tied = ties_of(base.tensors, base.config).counted_in
    head = next((name for name, owner in tied.items() if owner == embedding), None)
    if head is not None:
        return head
    names, classes = BaseNames(base.tensors, base.config), base.config.get("architectures")
    has_head = isinstance(classes, list) and any(str(name).endswith(_WITH_HEAD) for name in classes)
    if not has_head or any(names.is_head(name) for name in base.tensors):
        return None
    return None if base.config.get("tie_word_embeddings") is False else _HEAD
