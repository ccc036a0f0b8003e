"""The settings files of an encoder: its kind, its labels, its pooling, how long a text may be. Pure.

Nothing is derived from a model's name: ``config.json`` and the files of sentence-transformers' layout say it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.names import parse_model, quoted

# What transformers gives a tokenizer that knows no limit (1e30), and anything of that size.
_NO_LIMIT = 1 << 30
# RoBERTa and its kin count positions from padding_idx + 1, so that two of the table's rows are no position of a text.
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet", "longformer", "xlm-roberta-xl"})


class EncoderKind(StrEnum):
    """How an encoder compares two texts."""

    CROSS = "cross-encoder"  # both texts in one input, one label
    BI = "bi-encoder"  # a vector a text, cosine of two


class Pooling(StrEnum):
    """How one vector is made of those of the tokens."""

    MEAN = "mean"
    CLS = "cls"


@dataclass(frozen=True, slots=True)
class NliLabels:
    """The numbers of the three labels of a model of natural language inference."""

    entailment: int
    neutral: int
    contradiction: int


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a bi-encoder makes a vector of a text, before it is divided by its length."""

    pooling: Pooling = Pooling.MEAN
    prefix: str = ""
    lower_case: bool = False


def kind_of(config: Mapping[str, Any]) -> EncoderKind:
    """A cross-encoder where the checkpoint has a head for sequence classification, else a bi-encoder.

    >>> kind_of({"architectures": ["RobertaForSequenceClassification"]}).value
    'cross-encoder'
    """
    classes = config.get("architectures") or ()
    return EncoderKind.CROSS if any("ForSequenceClassification" in str(each) for each in classes) else EncoderKind.BI


def labels_of(config: Mapping[str, Any]) -> dict[int, str]:
    """The labels by number. Raises BadModel where ``id2label`` is no such table."""
    table = config.get("id2label")
    if table is None:
        number = config.get("num_labels", 2)
        return {index: f"LABEL_{index}" for index in range(number if isinstance(number, int) else 2)}
    try:
        return {int(number): str(label) for number, label in dict(table).items()}
    except (TypeError, ValueError):
        raise BadModel("config.json: id2label is no table of labels by number") from None


def check_cross_encoder(name: str, config: Mapping[str, Any]) -> None:
    """Raises BadModel unless this is a cross-encoder of one label whose similarity is the sigmoid of its logit.

    That is what sentence-transformers does with one label, unless the config names another activation: a model for
    ranking, whose logits are no similarities, names the identity.
    """
    if kind_of(config) is not EncoderKind.CROSS:
        raise BadModel(f"{quoted(name)} has no head for sequence classification; it is a bi-encoder, or none at all")
    labels = labels_of(config)
    if len(labels) != 1:
        raise BadModel(
            f"{quoted(name)} has {len(labels)} labels ({', '.join(sorted(labels.values())[:5])}); a cross-encoder for "
            "similarity has 1"
        )
    newer = config.get("sentence_transformers")
    activation = newer.get("activation_fn") if isinstance(newer, Mapping) else None
    activation = activation or config.get("sbert_ce_default_activation_function")
    if activation is not None and str(activation).rpartition(".")[2] != "Sigmoid":
        raise BadModel(
            f"{quoted(name)} names {quoted(str(activation))} as its activation: its scores are no similarities from 0 "
            "to 1. Take one trained for similarity, such as cross-encoder/stsb-roberta-large"
        )


def check_bi_encoder(name: str, config: Mapping[str, Any], modules: Any) -> None:
    """Raises BadModel for a language model: its states are no embeddings of texts, unless ``modules.json`` (None where
    there is none) says that it was made an encoder."""
    classes = [str(each) for each in config.get("architectures") or ()]
    generative = [each for each in classes if each.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))]
    if generative and modules is None:
        raise BadModel(
            f"{quoted(name)} is a language model ({quoted(generative[0])}), which makes no vectors of texts; take an "
            "encoder, such as cross-encoder/stsb-roberta-large or sentence-transformers/all-MiniLM-L6-v2"
        )


def nli_labels(name: str, config: Mapping[str, Any]) -> NliLabels:
    """Which label is which. Raises BadModel where the config does not say.

    >>> nli_labels("m", {"id2label": {"0": "CONTRADICTION", "1": "NEUTRAL", "2": "ENTAILMENT"}})
    NliLabels(entailment=2, neutral=1, contradiction=0)
    """
    labels = labels_of(config)
    by_word = {label.strip().lower(): number for number, label in labels.items()}
    words = ("entailment", "neutral", "contradiction")
    if len(labels) != 3 or not all(word in by_word for word in words):
        raise BadModel(
            f"{quoted(name)} has the labels {quoted(', '.join(labels[number] for number in sorted(labels)))}; a "
            f"model of natural language inference has {', '.join(words)}, by these names in its config.json (id2label)"
        )
    return NliLabels(*(by_word[word] for word in words))


def embedding_of(name: str, modules: Any, poolings: Mapping[str, Any], sentence: Any, prompts: Any) -> Embedding:
    """How this bi-encoder makes its vectors: as its files in sentence-transformers' layout say, else the mean.

    Args:
        name: of the model, for messages.
        modules: of ``modules.json``, None where there is none.
        poolings: ``config.json`` of each folder that ``modules`` names as pooling, by the folder's name.
        sentence: of ``sentence_bert_config.json``, None where there is none.
        prompts: of ``config_sentence_transformers.json``, likewise.

    Raises:
        BadModel: it has parts that are not carried out here (a dense layer, another pooling).
    """
    prefix = _default_prompt(prompts)
    pooling = Pooling.MEAN
    for module in modules if isinstance(modules, Sequence) else ():
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(name, poolings.get(str(module.get("path"))), prefix)
        elif kind not in ("Transformer", "Normalize"):
            raise BadModel(f"{quoted(name)} has a module {quoted(kind)}, which is not supported here")
    lower = isinstance(sentence, Mapping) and sentence.get("do_lower_case") is True
    return Embedding(pooling, prefix, lower)


def longest_input(config: Mapping[str, Any], tokenizer_limit: int | None, sentence: Any = None) -> int | None:
    """The most tokens of an input, special tokens counted: the smallest of what model, tokenizer and
    ``sentence_bert_config.json`` say. None where none names a limit.

    >>> longest_input({"model_type": "roberta", "max_position_embeddings": 514}, 512)
    512
    """
    limits = []
    positions = config.get("max_position_embeddings")
    # DeBERTa and others with relative positions alone say so by position_biased_input; their number is still what they
    # were trained with.
    if isinstance(positions, int) and positions > 0:
        limits.append(positions - (2 if config.get("model_type") in _OFFSET_POSITIONS else 0))
    if tokenizer_limit is not None and 0 < tokenizer_limit < _NO_LIMIT:
        limits.append(tokenizer_limit)
    trained = sentence.get("max_seq_length") if isinstance(sentence, Mapping) else None
    if isinstance(trained, int) and trained > 0:
        limits.append(trained)
    return min(limits, default=None)


def _default_prompt(prompts: Any) -> str:
    if not isinstance(prompts, Mapping) or prompts.get("default_prompt_name") is None:
        return ""
    known = prompts.get("prompts")
    return str(known.get(prompts["default_prompt_name"], "")) if isinstance(known, Mapping) else ""


def _pooling(name: str, config: Any, prefix: str) -> Pooling:
    if not isinstance(config, Mapping):
        raise BadModel(f"{quoted(name)}: modules.json names a pooling whose config.json is not there")
    if prefix and config.get("include_prompt") is False:
        raise BadModel(f"{quoted(name)} leaves its prompt out of the pooling, which is not supported here")
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [key.removeprefix("pooling_mode_") for key, on in config.items() if key[:13] == "pooling_mode_" and on]
    named = [modes] if isinstance(modes, str) else list(modes)
    plain = {"mean": Pooling.MEAN, "mean_tokens": Pooling.MEAN, "cls": Pooling.CLS, "cls_token": Pooling.CLS}
    if len(named) != 1 or named[0] not in plain:
        raise BadModel(f"{quoted(name)} pools by {quoted(', '.join(map(str, named)))}; here it can be mean or cls")
    return plain[named[0]]


# Which files an encoder consists of, where they lie, and a digest that tells one model from another of the same name.
#
# Reads bytes and JSON; knows no torch.

_SETTINGS = ("*.json", "*.txt", "*.model", "*/config.json")
_WEIGHTS = (("*.safetensors",), ("*.bin",))


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """An encoder on this machine.

    Attributes:
        name: as the user wrote it.
        folder: its files.
        config: what ``config.json`` says.
        sha256: of all files that loading reads, each with its name, in hex.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    sha256: str

    @property
    def float32_bytes(self) -> int:
        """Bytes of its weights in float32, by the sizes of their files and the precision that its config names."""
        stored = str(self.config.get("dtype", self.config.get("torch_dtype", "float32")))
        return sum(path.stat().st_size for path in weight_files(self.folder)) * (2 if "16" in stored else 1)

    def settings(self, name: str) -> Any:
        """The content of another JSON file of the model; None if there is none. Raises BadModel."""
        return _json(self.folder / name) if (self.folder / name).is_file() else None


def encoder_files(name: str) -> EncoderFiles:
    """Finds the model, downloads it if it is an id of the Hub, and reads each file whose hash is not kept.

    Raises MissingModel where it is not to be had, BadModel where it is no model that transformers can load.
    """
    from gpuherd.models.checkpoints.hub import locate

    folder = locate(parse_model(name), for_loading=True)
    if not folder.is_dir():
        raise BadModel(f"model {quoted(name)} is a single file; an encoder is a folder with config, weights, tokenizer")
    if not (folder / "config.json").is_file():
        raise MissingModel(f"model {quoted(name)} has no config.json in {folder}")
    config = _json(folder / "config.json")
    if not isinstance(config, dict):
        raise BadModel(f"{folder / 'config.json'} holds no object")
    return EncoderFiles(name, folder, config, digest_of(folder))


def digest_of(folder: Path) -> str:
    """SHA-256 over the names and contents of the files that loading a model from this folder reads, in hex."""
    from gpuherd.models.load.identity import hashes_of  # with numpy, which options of gpuherd score do without

    whole = hashlib.sha256()
    hashes = hashes_of(list(_files(folder)))
    for path in sorted(hashes, key=lambda each: each.relative_to(folder).as_posix()):
        whole.update(f"{path.relative_to(folder).as_posix()}\0{hashes[path]}\n".encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for pattern in _SETTINGS:
        yield from (path for path in folder.glob(pattern) if path.is_file())
    yield from weight_files(folder)


def weight_files(folder: Path) -> list[Path]:
    """The files of weights that are read: transformers takes safetensors where there are any."""
    for patterns in _WEIGHTS:
        found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
        if found:
            return found
    return []


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        raise BadModel(f"can't read {path}: {problem}") from None
