"""What a merge writes: which tensor comes from where, in which format, into which file, and the files next to them.

A tensor that the adapter leaves alone is copied as it is stored. The format of the result is the config's, as
transformers loads a model, else that of most of the weights; where that is another than the file's, or where it is
requested, all tensors of the file's main format are converted. Numbers that a model keeps in float32 next to 16-bit
weights stay in float32.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.stored import StoredTensor
from gpuherd.models.lora.update import Merged, is_saved
from gpuherd.models.names import WEIGHT_ENDINGS
from gpuherd.models.tensors.kinds import BaseNames, Ties, classify, is_input_embedding, ties_of
from gpuherd.models.tensors.source import BY_TORCH, READABLE, TensorInfo, stored_bytes

# Formats of weights, and their names in configs.
TORCH = {short: name for name, short in BY_TORCH.items() if short in READABLE}
# Of a model whose files are no safetensors: what fits into most machines' page cache.
DEFAULT_SHARD_BYTES = 5 * 10**9

Action = Literal["copy", "convert", "edit"]


@dataclass(frozen=True, slots=True)
class MergedTensor(TensorInfo):
    """A tensor of the result: its name, in the base too where it has it, its shape and the format it is written in.

    Attributes:
        action: ``copy`` the stored bytes, ``convert`` them to another format, or ``edit`` them by the adapter.
        replaced: whether the adapter holds it whole.
    """

    action: Action = "copy"
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The files of the result, each with its tensors, and the format of its weights."""

    files: Mapping[str, tuple[MergedTensor, ...]]
    dtype: str
    converted: bool

    @property
    def tensors(self) -> list[MergedTensor]:
        """All tensors."""
        return [tensor for tensors in self.files.values() for tensor in tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def params(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def changed(self) -> list[str]:
        """Names of the tensors that the adapter changes or brings."""
        return [tensor.name for tensor in self.tensors if tensor.action == "edit" or tensor.replaced]


def plan_merge(
    merged: Merged, files: Mapping[str, str], *, dtype: str | None = None, shard_bytes: int | None = None
) -> MergePlan:
    """What to write for a base with an adapter.

    Args:
        merged: the base's headers, and the adapter's edits.
        files: in which file of the base each tensor lies.
        dtype: format of the result by safetensors' name (F32, F16, BF16); None for the base's own.
        shard_bytes: the largest file of the result; None for the base's division into files.

    Raises:
        BadModel: the base is quantised, or has no floating-point weights.
    """
    _refuse_codes(merged.base.tensors.values())
    main = _main_format(merged.base.tensors.values())
    target = dtype or _configured(merged.config) or main
    left_out = _tied_copies(merged)
    written = [_written(merged, name, main, target) for name in merged.tensors if name not in left_out]
    return MergePlan(_divided(written, files, shard_bytes), target, target != main)


def quantised_base(form: str) -> BadModel:
    """The error for a base whose numbers are codes."""
    return BadModel(
        f"the base is quantised ({form}): a sum can't be written back into its codes. "
        "Give the unquantised model by --base-model, and quantise the result"
    )


def _refuse_codes(infos: Iterable[TensorInfo]) -> None:
    codes = next((info for info in infos if info.dequantized), None)
    if codes is not None:
        raise quantised_base(f"{codes.name!r} is {codes.dtype}")


def _main_format(infos: Iterable[TensorInfo]) -> str:
    """The floating-point format of most bytes."""
    sizes: Counter[str] = Counter()
    for info in infos:
        if info.dtype in TORCH:
            sizes[info.dtype] += info.nbytes
    if not sizes:
        raise BadModel("the base has no weights in a floating-point format")
    return max(sizes, key=lambda name: (sizes[name], name))


def _configured(config: Mapping[str, Any]) -> str | None:
    """The format that a config names, which transformers loads the model in; of its text part if that names one."""
    parts = (config, config.get("text_config"))
    for part in parts:
        if isinstance(part, Mapping):
            for key in ("dtype", "torch_dtype"):
                if isinstance(part.get(key), str):
                    found = BY_TORCH.get(str(part[key]).removeprefix("torch."))
                    return found if found in TORCH else None
    return None


def _tied_copies(merged: Merged) -> frozenset[str]:
    """The tensors that are left out, because they are an embedding too and loading ties them to it again."""
    nothing = Ties({}, frozenset())
    return frozenset(
        name
        for name, owner in ties_of(merged.tensors, merged.config).counted_in.items()
        if merged.tensors[name].shares is None
        or classify(merged.tensors[owner], nothing, embeddings=True)[0] == "embedding"
    )


def _written(merged: Merged, name: str, main: str, target: str) -> MergedTensor:
    info = merged.tensors[name]
    stored = info.dtype
    # What the adapter holds whole takes the format of what it stands for, as in PEFT.
    place = merged.base.tensors.get(name)
    own = place.dtype if place is not None else main
    dtype_written = target if own == main else own
    if stored not in TORCH:
        dtype_written = stored
        if name in merged.edits:
            raise BadModel(f"the adapter changes {name!r}, but the base's numbers there are {stored}, no weights")
    if not _is_writable(name):
        raise BadModel(f"{name!r} can't be the name of a tensor in a safetensors file; rename it in the base")
    action: Action = "edit" if name in merged.edits else "copy" if dtype_written == stored else "convert"
    nbytes = stored_bytes(dtype_written, math.prod(info.shape))
    if nbytes is None:
        raise BadModel(f"tensor {name!r} has the format {stored}, which can't be written")
    return MergedTensor(name, info.shape, dtype_written, nbytes, action=action, replaced=name in merged.replaced)


def _is_writable(name: str) -> bool:
    """Whether it can stand in a header: valid text, and not the one name that has a meaning there."""
    return name != "__metadata__" and not any("\ud800" <= letter <= "\udfff" for letter in name)


def _divided(
    tensors: Sequence[MergedTensor], files: Mapping[str, str], shard_bytes: int | None
) -> dict[str, tuple[MergedTensor, ...]]:
    """The tensors by file, in their order."""
    safetensors = all(file.endswith(".safetensors") for file in files.values())
    groups: list[list[MergedTensor]] = []
    if shard_bytes is None and safetensors:
        by_file: dict[str, list[MergedTensor]] = {}
        last = next(reversed(list(files.values())), "")
        for tensor in tensors:
            by_file.setdefault(files.get(tensor.name, last), []).append(tensor)
        groups = list(by_file.values())
    else:
        groups = _packed(tensors, shard_bytes or DEFAULT_SHARD_BYTES)
    if len(groups) == 1:
        return {"model.safetensors": tuple(groups[0])}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": tuple(group)
        for number, group in enumerate(groups, start=1)
    }


def _packed(tensors: Iterable[MergedTensor], most: int) -> list[list[MergedTensor]]:
    """Tensors one after the other into files of at most so many bytes; a larger one gets a file of its own."""
    groups: list[list[MergedTensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(tensor)
        room -= tensor.nbytes
    return groups


# ---- a tied head -----------------------------------------------------------------------------------------------------

# Where the base has its embedding as output head and the adapter holds that embedding whole: as PEFT does it, the
# adapter's embedding takes the place of the input only, and the head stays what the base's embedding was, unless the
# adapter was trained with ``ensure_weight_tying``.

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
    trained = is_saved(embedding.rpartition(".")[0], adapter)
    if embedding in merged.edits:  # factors of the head: PEFT saves the embedding with them
        if trained:
            raise BadModel(f"the adapter holds {embedding!r} whole, and factors of the head that is tied to it")
        return merged
    if adapter.get("ensure_weight_tying") is True or not (trained or is_saved(head.rpartition(".")[0], adapter)):
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


# ---- config and other files ------------------------------------------------------------------------------------------

# The config is the base's; it changes where the result is another model than that: its embeddings are no longer tied,
# its vocabulary has grown, its numbers have another format, or it has a head for classifying. The tokenizer is the
# adapter's where the adapter brings one, since it was trained with that.

# Files of a tokenizer, with the templates of its chats, and of what prepares pictures and sounds.
_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "spiece*", "sentencepiece*",
)  # fmt: skip
# What else of the base belongs to a model that was made from it. Its card would describe another model.
_OTHERS = ("generation_config.json", "preprocessor_config.json", "processor_config.json", "*.py", "license*", "notice*")
_TEMPLATES = "additional_chat_templates"
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
        if not path.name.endswith((*WEIGHT_ENDINGS, ".index.json"))
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
