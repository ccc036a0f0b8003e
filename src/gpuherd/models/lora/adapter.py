"""A LoRA adapter: its files, checked, and which tensors of a base it changes.

Knows PEFT's file format: which keys there are, how ranks and scalings are configured, and what each variant does to
the weights. Plain LoRA, rsLoRA and DoRA on Linear, Conv1D, convolutions, embeddings and fused experts, modules saved
whole, and trained biases; any other method is refused by name. The arithmetic itself is ``edits``.

The sum is taken in float32 (float64 for a float64 base), whatever the base is stored in. PEFT merges a bfloat16 base
in bfloat16 and so rounds the sum to 8 bits; here it is not rounded.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.checkpoints.open import ADAPTER_CONFIG, SINGLE_FILES, read_json, read_weight_file
from gpuherd.models.checkpoints.stored import StoredTensor
from gpuherd.models.lora.edits import (
    BiasEdit,
    Edit,
    Factors,
    MatrixEdit,
    edits_of_experts_apart,
    expert_edit,
    matrix_edit,
)
from gpuherd.models.lora.update import Merged, is_saved
from gpuherd.models.names import ModelRef, parse_model, quoted
from gpuherd.models.tensors.kinds import BaseNames
from gpuherd.models.tensors.source import READABLE, TensorSource

# ---- patterns of ranks and scalings ----------------------------------------------------------------------------------

# PEFT matches a key of ``rank_pattern`` or ``alpha_pattern`` as the regular expression ``(.*\.)?(key)$``. The keys are
# hostile input, and one such as ``(a+)+b`` can keep Python's matcher busy for years. Plain names, which is what nearly
# every adapter has, are matched here; anything else in a process of its own that has a time limit.

LIMIT_S = 10.0
# Patterns times characters of names: a second's work at most.
MAX_PLAIN_WORK = 50_000_000
# No quantifier, group or choice: the matcher can't go back and forth. A dot is any character, as in PEFT.
_PLAIN = re.compile(r"\^?(?:[A-Za-z0-9_.-]|\\\.)+")

_CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
patterns, names = json.load(sys.stdin)
compiled = []
for number, pattern in enumerate(patterns):
    try:
        compiled.append(re.compile(rf"(.*\\.)?({pattern})$"))
    except (re.error, OverflowError, RecursionError):
        print(json.dumps(number))
        break
else:
    print(json.dumps([next((i for i, p in enumerate(compiled) if p.match(name)), None) for name in names]))
"""


def first_matches(patterns: Sequence[str], names: Sequence[str], *, limit_s: float = LIMIT_S) -> list[str | None]:
    """For each module name the first pattern that matches its end, None where none does.

    Raises BadModel for a pattern that is no regular expression, or when matching takes longer than ``limit_s`` seconds.
    """
    if len(patterns) * sum(map(len, names)) <= MAX_PLAIN_WORK and all(map(_PLAIN.fullmatch, patterns)):
        compiled = [(pattern, re.compile(rf"(.*\.)?({pattern})$")) for pattern in patterns]
        return [next((pattern for pattern, rule in compiled if rule.match(name)), None) for name in names]
    return _matched_apart(patterns, names, limit_s)


def _matched_apart(patterns: Sequence[str], names: Sequence[str], limit_s: float) -> list[str | None]:
    """The same, in a child process."""
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps([patterns, names]).encode("ascii"),
            capture_output=True,
            timeout=limit_s,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise BadModel(f"{_first(patterns)} can't be matched in {limit_s:g} s") from None
    except subprocess.CalledProcessError:
        raise BadModel(f"{_first(patterns)} can't be matched; they take too much memory") from None
    answer = json.loads(child.stdout)
    if isinstance(answer, int):
        raise BadModel(f"the pattern {quoted(patterns[answer])} is no regular expression")
    return [None if number is None else patterns[number] for number in answer]


def _first(patterns: Sequence[str]) -> str:
    return f"the patterns ({quoted(patterns[0])}{', ...' if len(patterns) > 1 else ''})"


# ---- the adapter -----------------------------------------------------------------------------------------------------

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_MODEL_FILES = tuple(f"{name}{index}" for name in SINGLE_FILES for index in ("", ".index.json"))

MAX_ALPHA = 1e30

_OTHER_METHODS = {
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
    "alora_invocation_tokens": "activated LoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "layer_replication": "layer replication",
    "trainable_token_indices": "trainable tokens",
}
# These change the base weights when they start, so that the saved factors belong to other base weights.
_CHANGED_BASE = re.compile(r"(pissa|olora|corda|lora_ga|loftq|mica)")

_KEY = re.compile(
    r"(?P<module>.+)\.(?:"
    r"lora_(?P<part>[AB])(?:\.[^.]+)?\.(?P<what>weight|bias)|"
    r"lora_embedding_(?P<embedding>[AB])(?:\.[^.]+)?|"
    r"(?P<magnitude>lora_magnitude_vector)(?:\.[^.]+)*)"
)
_WRAPPED = re.compile(r"(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.[^.]+)?)\.(?P<tensor>weight|bias)")


# The adapter's tensors for one module, by their part: A, B, magnitude, ...
_Parts = dict[str, StoredTensor]


def is_adapter(path: Path) -> bool:
    """Whether this folder (or its ``adapter_model`` file) is an adapter and not a whole model.

    A folder that has whole model weights and only the config of an adapter is a model.
    """
    folder = _folder(path)
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    if path != folder:
        return path.name in WEIGHT_FILES
    return any((folder / name).exists() for name in WEIGHT_FILES) or not any(
        (folder / name).exists() for name in _MODEL_FILES
    )


def _folder(path: Path) -> Path:
    return path.parent if path.is_file() else path


def adapter_base(path: Path) -> str | None:
    """The base model that the adapter's config names, with ``@revision`` if it names one; None if it names none."""
    config = read_json(_folder(path) / ADAPTER_CONFIG)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        return None
    return f"{base}@{revision}" if isinstance(revision, str) and revision and "@" not in base else base


def taken_apart(ref: ModelRef, fetch: Callable[[ModelRef], Path]) -> tuple[Path, Path | None]:
    """A model's folder or file, and None; of an adapter those of its base and its own.

    ``fetch`` brings a model to this machine. Raises BadModel for an adapter that names no base, and as ``fetch``.
    """
    path = fetch(ref)
    if not is_adapter(path):
        return path, None
    base = adapter_base(path)
    if base is None:
        raise BadModel(f"model {quoted(ref.text)} is an adapter, and its adapter_config.json names no base model")
    return fetch(parse_model(base)), path


def check_adapter(path: Path) -> None:
    """Checks an adapter by itself, without its base. Raises BadModel or MissingModel."""
    _open(_folder(path))


def merge(base: TensorSource, adapter_path: Path) -> Merged:
    """The base model with the adapter merged in, read tensor by tensor.

    Reads headers only. Raises BadModel when the adapter is of another method, damaged, or not for this base: each of
    its tensors must find its place.
    """
    folder = _folder(adapter_path)
    config, modules, whole = _open(folder)
    names = BaseNames(base.tensors, base.config)
    edits: dict[str, Edit] = {}
    ranks = _configured(folder, config, "rank_pattern", "r", modules)
    alphas = _configured(folder, config, "alpha_pattern", "lora_alpha", modules)
    for module, found in modules.items():
        factors = _factors(config, found, ranks[module], alphas[module])
        for name, edit in _edits(folder, config, base, names, module, factors, found.get("B_bias")):
            if name in edits:
                raise BadModel(f"{folder}: two adapter modules change {name!r}")
            edits[name] = edit
    replaced = _replacements(folder, config, names, whole, modules)
    # A head that is not the embedding: no longer tied.
    unties = any(name not in base.tensors or names.is_head(name) for name in replaced)
    return _merged(base, edits, replaced, unties=unties)


def _open(folder: Path) -> tuple[Mapping[str, Any], dict[str, _Parts], dict[str, StoredTensor]]:
    """The adapter's config, its factors by module, and its whole tensors by name."""
    config = read_json(folder / ADAPTER_CONFIG)
    _check_method(folder, config)
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).exists()), None)
    if file is None:
        raise MissingModel(f"{folder} has an adapter_config.json but no adapter_model.safetensors or adapter_model.bin")
    modules, whole = _sort_out(file, read_weight_file(file))
    if not modules and not whole:
        raise BadModel(f"{file} holds no LoRA weights")
    _check_magnitudes(file, config.get("use_dora") is True, modules)
    return config, modules, whole


def _check_method(folder: Path, config: Mapping[str, Any]) -> None:
    method = config.get("peft_type")
    if method != "LORA":
        raise BadModel(f"{folder} is an adapter of the method {method}; only LoRA (with rsLoRA and DoRA) can be merged")
    for key, name in _OTHER_METHODS.items():
        if config.get(key):
            raise BadModel(f"{folder} is an adapter that uses {name}, which can't be merged")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and _CHANGED_BASE.match(start):
        raise BadModel(
            f"{folder} was started with {start}, which changes the base weights; save it converted to plain LoRA"
        )
    ranks, alphas = (config.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    if not isinstance(ranks, Mapping) or not isinstance(alphas, Mapping):
        raise BadModel(f"{folder}/{ADAPTER_CONFIG}: rank_pattern and alpha_pattern must be tables")
    if not all(type(rank) is int and rank > 0 for rank in (config.get("r"), *ranks.values())):
        raise BadModel(f"{folder}/{ADAPTER_CONFIG}: r must be a whole number above 0, in rank_pattern too")
    if not all(_is_sane(alpha) for alpha in (config.get("lora_alpha"), *alphas.values())):
        raise BadModel(f"{folder}/{ADAPTER_CONFIG}: lora_alpha must be a finite number, in alpha_pattern too")
    for key in ("use_rslora", "use_dora", "fan_in_fan_out"):
        if not isinstance(config.get(key), bool | None):
            raise BadModel(f"{folder}/{ADAPTER_CONFIG}: {key} must be true or false")
    for key in ("modules_to_save", "target_parameters"):
        names = config.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise BadModel(f"{folder}/{ADAPTER_CONFIG}: {key} must be a list of names")


def _is_sane(alpha: object) -> bool:
    """Whether it is a number that can be a factor in float32; JSON's can be NaN, infinite or of a thousand digits."""
    return isinstance(alpha, int | float) and not isinstance(alpha, bool) and abs(alpha) < MAX_ALPHA


def _sort_out(file: Path, tensors: Iterable[StoredTensor]) -> tuple[dict[str, _Parts], dict[str, StoredTensor]]:
    """Factors by module and whole tensors by name, names without PEFT's ``base_model.model.``."""
    modules: dict[str, _Parts] = {}
    whole: dict[str, StoredTensor] = {}
    for tensor in tensors:
        key = tensor.info.name.removeprefix("base_model.model.")
        match = _KEY.fullmatch(key)
        if match is None:
            if "lora_" in key or ".trainable_tokens" in key or ".original_module." in key:
                raise BadModel(f"{file}: {tensor.info.name!r} is no tensor of a LoRA adapter that is known here")
            wrapped = _WRAPPED.fullmatch(key)
            whole[f"{wrapped['module']}.{wrapped['tensor']}" if wrapped else key] = tensor
            continue
        if tensor.info.dtype not in READABLE:
            raise BadModel(f"{file}: {tensor.info.name!r} is {tensor.info.dtype}; factors are floating-point numbers")
        part = _part_name(match)
        parts = modules.setdefault(match["module"], {})
        if part in parts:
            raise BadModel(f"{file}: module {match['module']!r} has more than one adapter")
        parts[part] = tensor
    for module, found in modules.items():
        _check_parts(file, module, found)
    return modules, whole


def _check_magnitudes(file: Path, use_dora: bool, modules: Mapping[str, _Parts]) -> None:
    """DoRA's factors mean other weights with magnitudes than without: config and file must agree."""
    for module, found in modules.items():
        if use_dora is not ("magnitude" in found):
            which = "says use_dora, but there are no" if use_dora else "does not say use_dora, but there are"
            raise BadModel(f"{file}: the adapter's config {which} DoRA magnitudes of module {module!r}")


def _part_name(match: re.Match[str]) -> str:
    if match["magnitude"]:
        return "magnitude"
    if match["embedding"]:
        return f"embedding_{match['embedding']}"
    return match["part"] + ("_bias" if match["what"] == "bias" else "")


def _check_parts(file: Path, module: str, parts: Mapping[str, StoredTensor]) -> None:
    pairs = [pair for pair in (("A", "B"), ("embedding_A", "embedding_B")) if any(name in parts for name in pair)]
    if len(pairs) != 1 or not all(name in parts for name in pairs[0]):
        raise BadModel(f"{file}: module {module!r} lacks one of its two LoRA factors")


def _configured(
    folder: Path, config: Mapping[str, Any], pattern: str, default: str, modules: Iterable[str]
) -> dict[str, Any]:
    """The rank or alpha of each module: of the first pattern that matches the end of its name, else the default."""
    names, values = list(modules), config.get(pattern) or {}
    try:
        matches = first_matches(list(values), names)
    except BadModel as problem:
        raise BadModel(f"{folder}/{ADAPTER_CONFIG}: {pattern}: {problem}") from None
    return {
        name: config[default] if match is None else values[match] for name, match in zip(names, matches, strict=True)
    }


def _factors(config: Mapping[str, Any], parts: Mapping[str, StoredTensor], rank: int, alpha: float) -> Factors:
    """One module's factors and settings together."""
    embedding = "embedding_A" in parts
    return Factors(
        a=parts["embedding_A" if embedding else "A"],
        b=parts["embedding_B" if embedding else "B"],
        magnitude=parts.get("magnitude"),
        rank=rank,
        alpha=alpha,
        rank_stabilised=config.get("use_rslora") is True,
        embedding=embedding,
    )


def _edits(
    folder: Path,
    config: Mapping[str, Any],
    base: TensorSource,
    names: BaseNames,
    module: str,
    factors: Factors,
    trained_bias: StoredTensor | None,
) -> Iterable[tuple[str, Edit]]:
    """What the adapter does to the tensors of one module: to its weight and, with lora_bias, to its bias."""
    where = f"{folder}: module {module!r}"
    plain = module.replace(".base_layer", "")
    name = names.weight(plain)
    if name is None:
        targets = config.get("target_parameters") or ()
        parameters = names.parameters(plain, targets)
        apart = [] if parameters else names.experts_apart(plain, targets)
        if apart:
            yield from edits_of_experts_apart(where, factors, apart, base.tensors)
            return
        yield expert_edit(where, base.config, factors, {p: base.tensors[p] for p in parameters})
        return
    fan_in_fan_out = names.stores_transpose(plain, config.get("fan_in_fan_out") is True)
    yield name, matrix_edit(where, base.tensors[name], factors, fan_in_fan_out)
    if trained_bias is not None:
        bias = names.tensor(f"{plain}.bias")
        if bias is None:
            raise BadModel(f"{where} has a trained bias, but the base has no bias there")
        yield bias, BiasEdit(trained_bias, factors.scaling)


def _replacements(
    folder: Path,
    config: Mapping[str, Any],
    names: BaseNames,
    whole: Mapping[str, StoredTensor],
    modules: Collection[str],
) -> dict[str, StoredTensor]:
    """Tensors that the adapter holds whole, by the name of the base tensor that they stand for.

    One without such a tensor is new (a classification head), if the config lists its module in modules_to_save.
    """
    result: dict[str, StoredTensor] = {}
    for key, tensor in whole.items():
        module = key.rpartition(".")[0]
        # PEFT saves an embedding or a head that it trains together with the factors, which belong to the same tensor.
        trained = module in modules and key.endswith(".weight")
        name = names.weight(module) if trained else names.tensor(key)
        if name is None:
            # The head of a tied model is not in the base's file; PEFT saves it together with the embedding.
            if not names.is_head(key) and not is_saved(module, config):
                raise BadModel(f"{folder}: tensor {key!r} of the adapter has no place in the base model")
            name = key
        elif tensor.info.shape[1:] != names.shape(name)[1:]:
            # A vocabulary may have grown; anything else belongs to another model.
            raise BadModel(
                f"{folder}: tensor {key!r} of shape {tensor.info.shape} does not fit {name!r} of the base, of shape "
                f"{names.shape(name)}; is this the right base model?"
            )
        result[name] = tensor
    return result


def _merged(base: TensorSource, edits: dict[str, Edit], replaced: dict[str, StoredTensor], *, unties: bool) -> Merged:
    infos = {**base.tensors, **{name: replace(tensor.info, name=name) for name, tensor in replaced.items()}}
    infos |= {name: replace(infos[name], shares=None) for name in (*replaced, *edits)}
    config = {**base.config, **({"tie_word_embeddings": False} if unties else {})}
    for name, edit in edits.items():
        if isinstance(edit, MatrixEdit | BiasEdit):
            edit.check(infos[name])
    return Merged(base, config, infos, edits, replaced)
