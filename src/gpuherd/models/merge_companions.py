"""What lies beside the weights of a merged model: its config, and the files that are copied from base and adapter.

The config is the base's; it changes where the result is another model than that: its embeddings are no longer tied,
its vocabulary has grown, its numbers have another format, or it has a head for classifying. The tokenizer is the
adapter's where the adapter brings one, since it was trained with that.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel
from gpuherd.models.kinds import is_input_embedding
from gpuherd.models.merge_plan import TORCH, MergePlan
from gpuherd.models.merged import Merged

# Files of a tokenizer, with the templates of its chats, and of what prepares pictures and sounds.
_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "spiece*", "sentencepiece*",
)  # fmt: skip
# What else of the base belongs to a model that was made from it. Its card would describe another model.
_OTHERS = ("generation_config.json", "preprocessor_config.json", "processor_config.json", "*.py", "license*", "notice*")
_TEMPLATES = "additional_chat_templates"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CLASSIFIERS = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}
_CLASSIFIER_HEADS = ("score.weight", "classifier.weight", "classifier.out_proj.weight")


def merged_config(config: Mapping[str, Any], adapter: Mapping[str, Any], merged: Merged, plan: MergePlan) -> Any:
    """The result's config.json.

    Args:
        config: the base's.
        adapter: the adapter's own config.
        merged: the merged model.
        plan: what is written of it.
    """
    result = copy.deepcopy(dict(config))
    if merged.config.get("tie_word_embeddings") is False and config.get("tie_word_embeddings") is not False:
        _set_everywhere(result, "tie_word_embeddings", False)
    words = _words(merged)
    if words is not None:
        _set_everywhere(result, "vocab_size", words)
    if plan.converted:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        _set_everywhere(result, key, TORCH[plan.dtype])
    ending = _CLASSIFIERS.get(str(adapter.get("task_type")))
    if ending is not None:
        _add_classifier(result, ending, merged)
    return result


def _set_everywhere(config: dict[str, Any], key: str, value: Any) -> None:
    """Sets a field, in the text part too where that has its own."""
    text = config.get("text_config")
    if isinstance(text, dict) and key in text:
        text[key] = value
    if key in config or not isinstance(text, dict) or key not in text:
        config[key] = value


def _words(merged: Merged) -> int | None:
    """The size of the vocabulary where the adapter brings an embedding of another size than the base's."""
    for name, tensor in merged.replaced.items():
        base = merged.base.tensors.get(name)
        if base is not None and is_input_embedding(name) and base.shape[0] != tensor.info.shape[0]:
            return tensor.info.shape[0]
    return None


def _add_classifier(config: dict[str, Any], ending: str, merged: Merged) -> None:
    heads = [
        tensor
        for name, tensor in merged.replaced.items()
        if name.endswith(_CLASSIFIER_HEADS) and name not in merged.base.tensors
    ]
    names = config.get("architectures")
    if len(heads) != 1 or not isinstance(names, list):
        return
    config["architectures"] = [str(name).partition("For")[0] + ending for name in names]
    labels = heads[0].info.shape[0]
    config["id2label"] = {str(number): f"LABEL_{number}" for number in range(labels)}
    config["label2id"] = {f"LABEL_{number}": number for number in range(labels)}


def config_text(config: Mapping[str, Any]) -> bytes:
    """A config as transformers writes it."""
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def companions(base: Path, adapter: Path) -> dict[str, Path]:
    """The files to copy, by their names in the result.

    Args:
        base: the base's folder.
        adapter: the adapter's folder.

    Raises BadModel when one of them can't be listed.
    """
    tokenizer = _matching(adapter, _TOKENIZER)
    if not any(name.startswith("tokenizer") for name in tokenizer):
        tokenizer = _matching(base, _TOKENIZER)
    return {**_matching(base, _OTHERS), **tokenizer}


def _matching(folder: Path, patterns: Iterable[str]) -> dict[str, Path]:
    found = {
        path.name: path
        for path in _files(folder)
        if not path.name.endswith((*_WEIGHTS, ".index.json"))
        and any(fnmatchcase(path.name.lower(), pattern) for pattern in patterns)
    }
    templates = folder / _TEMPLATES
    if patterns is _TOKENIZER and templates.is_dir():
        found |= {f"{_TEMPLATES}/{path.name}": path for path in _files(templates)}
    return found


def _files(folder: Path) -> list[Path]:
    """The files of a folder, by name. Raises BadModel."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as problem:
        raise BadModel(f"{folder} can't be listed: {problem.strerror}") from None
