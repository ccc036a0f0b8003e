"""What transformers, bitsandbytes, PEFT and the GPUs can load, and transformers' own loading with everything explicit:
class, dtype, device of each block, and only local files.

What can be decided before torch is imported (is bitsandbytes there, can the GPU compute so, does the model bring code
of its own) comes first; torch, transformers and PEFT are imported inside functions only. Refuses what transformers
would let pass: a model of other shapes than the planned one, weights that are missing (it fills them with random
numbers). No code of a model is ever imported here unless it was allowed.
"""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel, GpuherdError, MissingExtra, UsageError, naming_extras
from gpuherd.gpus.visible import CUDA
from gpuherd.models.describe.config import model_type_of
from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.known_models import known_types
from gpuherd.models.load.options import DISK
from gpuherd.models.load.placement import BlockPlacement, Built, block_of, fitted
from gpuherd.models.memory.weights import Precision
from gpuherd.models.names import quoted
from gpuherd.models.place.gpus import Capability, GpuSpec, capability_verdict

if TYPE_CHECKING:
    from gpuherd.models.load.prepare import PreparedModel


# ---- classes ---------------------------------------------------------------------------------------------------------

# What a model that brings its own code is loaded by, in this order.
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")


def own_code(config: Mapping[str, Any]) -> str | None:
    """The class that a model's config says to import from the model's own files: ``modeling_x.XForCausalLM``; None
    where it names none."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return None
    for name in _AUTO_CLASSES:
        reference = auto_map.get(name)
        if isinstance(reference, str):
            return reference.rpartition("--")[2]
    return None


def check_code(model: str, config: Mapping[str, Any], *, trusted: bool) -> None:
    """Raises BadModel where a model can only be loaded by code of its own, which was not allowed. Imports nothing:
    what transformers has is known from its files."""
    code = own_code(config)
    if trusted or code is None or _in_transformers(config):
        return
    raise BadModel(
        f"{quoted(model)} needs code of its own to be loaded ({quoted(code)}); read that code, and then allow it with "
        "--trust-remote-code"
    )


def _in_transformers(config: Mapping[str, Any]) -> bool:
    """Whether transformers itself has this architecture: that of a known model, or a folder of its own there."""
    if model_type_of(config) in known_types():
        return True
    return bool(_folders_in_transformers(config))


def _folders_in_transformers(config: Mapping[str, Any]) -> list[Path]:
    """The folders of this architecture in transformers, which is not imported."""
    spec = importlib.util.find_spec("transformers")
    places = spec.submodule_search_locations if spec is not None else None
    name = model_type_of(config).replace("-", "_")
    folders = [Path(place) / "models" / name for place in places or () if name.isidentifier()]
    return [folder for folder in folders if folder.is_dir()]


def has_class(config: Mapping[str, Any], task: str) -> bool | None:
    """Whether transformers has a class of this architecture for a task (``ForSequenceClassification``); None where that
    is unknown. Imports nothing: its files are listed."""
    files = [file for folder in _folders_in_transformers(config) for file in folder.glob("modeling_*.py")]
    if not files:
        return None
    return any(f"{task}(" in file.read_text(encoding="utf-8", errors="replace") for file in files)


def runs_own_code(config: Mapping[str, Any], *, trusted: bool) -> bool:
    """Whether the model's own code is run: where that is allowed, and transformers has not its architecture."""
    return trusted and not _in_transformers(config)


def config_of(folder: Path, *, trusted: bool) -> Any:
    """The config as an object of transformers; ``trusted``: by the model's own code. Raises BadModel."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trusted, local_files_only=True)
    except ImportError as missing:
        raise MissingExtra(f"{folder}: its own code needs a library that is not installed: {missing}") from None
    except (ValueError, OSError, KeyError, TypeError) as problem:
        raise BadModel(f"{folder}: transformers can't use its config.json: {problem}") from None


def classes_for(architecture: Architecture, config: Any, *, trusted: bool) -> list[Any]:
    """The classes that the model may be loaded as, the likeliest first: the one that its config names, the one that was
    planned; of a model with code of its own that code's.

    A class for another kind of config is left out, whatever the config names.

    Raises BadModel: there are none.
    """
    import transformers

    named = [*(getattr(config, "architectures", None) or ()), architecture.class_name]
    found: list[Any] = [getattr(transformers, name, None) for name in dict.fromkeys(named) if isinstance(name, str)]
    models: list[Any] = [
        each for each in found if isinstance(each, type) and issubclass(each, transformers.PreTrainedModel)
    ]
    classes = [each for each in models if each.config_class is not None and isinstance(config, each.config_class)]
    if classes:
        return classes
    auto_map = getattr(config, "auto_map", None) or {}
    own = [getattr(transformers, name) for name in _AUTO_CLASSES if trusted and name in auto_map]
    if own:
        return own
    raise BadModel(
        f"{quoted(architecture.model)} is a {quoted(str(named[0]))}, which transformers {transformers.__version__} "
        "does not have"
    )


# ---- precisions ------------------------------------------------------------------------------------------------------

EXTRAS = {"torch": "load", "transformers": "load", "accelerate": "load", "peft": "load", "safetensors": "load"}
# Of checkpoints that are stored in 8 bits: weights and their scales.
_EIGHT_BITS = frozenset(
    {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"}
)
_DTYPES = {Precision.FP32: "float32", Precision.FP16: "float16", Precision.BF16: "bfloat16"}
# bfloat16 is emulated below; the product of 4-bit weights is then computed in float16, which takes as much.
_BF16_FROM = (8, 0)


def check_bitsandbytes(precision: Precision) -> None:
    """Raises MissingExtra where bitsandbytes is needed and not installed. Imports nothing."""
    if precision.is_quantised and importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra(
            f"bitsandbytes is not installed, and {precision} needs it; pip install 'gpuherd[bnb]' brings it, or load "
            "the model in bf16 or fp16"
        )


def check_gpus(precision: Precision, gpus: Sequence[GpuSpec]) -> tuple[str, ...]:
    """Sentences on gpus that are slow with this precision. Raises UsageError for one that can't do it at all."""
    verdicts = [(gpu, capability_verdict(precision, gpu.capability)) for gpu in gpus]
    for gpu, verdict in verdicts:
        if not verdict.possible:
            raise UsageError(f"GPU {gpu.label} ({gpu.name}): {verdict.sentence}; load the model in another dtype")
    return tuple(f"on GPU {gpu.label} ({gpu.name}) {verdict.sentence}" for gpu, verdict in verdicts if verdict.sentence)


def check_cuda(placement: BlockPlacement) -> None:
    """Raises MissingExtra where GPUs are planned that torch can't use, and simulated GPUs were not requested."""
    if placement.simulated or not placement.gpus:
        return
    import torch

    check_torch(torch.cuda.device_count())
    if torch.cuda.device_count() <= max(placement.gpus):
        raise GpuherdError(
            f"the plan uses GPU {max(placement.gpus)}, and torch sees {torch.cuda.device_count()} GPUs; was "
            f"{CUDA} changed after CUDA had started?"
        )


def check_torch(gpus: int) -> None:
    """Raises MissingExtra where GPUs are planned and torch sees none; ``gpus``: how many it sees."""
    import torch

    if not gpus:
        build = "has no CUDA" if torch.version.cuda is None else "can't use this machine's driver"
        raise MissingExtra(
            f"the plan is for GPUs, and torch {torch.__version__} {build}; install torch with CUDA (see gpuherd "
            "doctor), load with device_map='cpu', or pretend the GPUs with simulate"
        )


def loading_words(
    precision: Precision, capabilities: Sequence[Capability | None] = (), *, overflows: bool = False
) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for the precision. Imports torch and transformers.

    Args:
        capabilities: of the GPUs that it will be on.
        overflows: float16 is too narrow for a part of the model, which transformers would keep in float32.
    """
    import torch

    plain = precision.computes_in
    emulated = any(each is not None and each < _BF16_FROM for each in capabilities)
    if precision in (Precision.NF4, Precision.NF4_DQ) and emulated and not overflows:
        plain = Precision.FP16
    dtype = getattr(torch, _DTYPES[plain])
    if precision is Precision.AS_STORED:
        return {"dtype": "auto"}
    if not precision.is_quantised:
        return {"dtype": dtype}
    from transformers import BitsAndBytesConfig

    if precision is Precision.INT8:
        return {"dtype": dtype, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=precision is Precision.NF4_DQ,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"dtype": dtype, "quantization_config": settings}


def expected_dtypes(precision: Precision) -> frozenset[str]:
    """In which torch dtypes weights that are no codes may be stored, except those that stay in float32 anyway."""
    if precision is Precision.AS_STORED:
        return frozenset(_DTYPES.values()) | _EIGHT_BITS
    if precision in (Precision.NF4, Precision.NF4_DQ):
        return frozenset({"bfloat16", "float16"})
    return frozenset({_DTYPES[precision.computes_in]})


# ---- loading with everything explicit --------------------------------------------------------------------------------


def fitted_class(
    classes: Sequence[Any], config: Any, ready: PreparedModel
) -> tuple[Any, PreparedModel, dict[str, Any]]:
    """The first of the classes that builds the very model that was planned, the plan in its names, and the device map
    that it is loaded with: the planned one, with a place for buffers that are in no block.

    What is loaded as it is stored quantised, and what the model's own code builds, is known only when it is loaded.

    Raises BadModel where transformers builds another model than was planned: a tensor is named.
    """
    if ready.precision is Precision.AS_STORED or not hasattr(classes[0], "_from_config"):
        return classes[0], ready, dict(ready.placement.device_map)
    from gpuherd.models.checkpoints.open import open_checkpoint

    stored = open_checkpoint(ready.path).tensors
    differences: list[str] = []
    for each in classes:
        empty = _empty_model(each, config)
        found = fitted(ready.base, ready.placement, _built(empty), stored)
        if not isinstance(found, str):
            base, placement = found
            return each, replace(ready, base=base, placement=placement), _complete_map(empty, placement)
        differences.append(f"{each.__name__} has {found}")
    raise BadModel(
        f"{quoted(ready.request.model)}: transformers builds another model than was planned from its weights: "
        + "; ".join(differences)
    )


def _built(empty: Any) -> Built:
    """The shapes of a model without memory."""
    parameters: dict[str, tuple[int, ...]] = {}
    owners: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, each in empty.named_parameters(remove_duplicate=False):
        parameters[name] = tuple(each.shape)
        owner = owners.setdefault(id(each), name)
        if owner != name:
            tied[name] = owner
    return Built(
        parameters=parameters,
        buffers={name: tuple(each.shape) for name, each in empty.named_buffers(remove_duplicate=False)},
        tied=tied,
        prefix=str(getattr(empty, "base_model_prefix", "")),
    )


def _complete_map(empty: Any, placement: BlockPlacement) -> dict[str, Any]:
    """The device map, with the buffers that are in no block on the first block's device.

    By their module where it has no block inside: accelerate moves a module that the map names with all that is in it.
    """
    device_map: dict[str, Any] = dict(placement.device_map)
    first = next(iter(device_map.values()))
    outside = [name for name, _ in empty.named_buffers(remove_duplicate=False) if block_of(name, device_map) is None]
    for name in outside:
        module = name.rpartition(".")[0]
        holds_blocks = not module or any(block.startswith(f"{module}.") for block in placement.by_block)
        device_map[name if holds_blocks else module] = first
    return device_map


def _empty_model(model_class: Any, config: Any) -> Any:
    """The model without memory."""
    import torch

    with torch.device("meta"):
        return model_class(config)


def from_pretrained(
    model_class: Any, config: Any, ready: PreparedModel, device_map: Mapping[str, Any] | None, **more: Any
) -> tuple[Any, list[str]]:
    """The model, and tensors of the checkpoint that it has no place for. Raises BadModel where some are missing.

    ``more``: further words for transformers; without a device map they say where it goes.
    """
    overflows = any(tensor.fp32_in_fp16 for tensor in ready.base.tensors())
    words: dict[str, Any] = {
        **loading_words(ready.precision, ready.capabilities, overflows=overflows),
        **_file_words(ready, config),
    }
    offloads = device_map is not None and DISK in device_map.values()
    folder = tempfile.TemporaryDirectory(prefix="gpuherd-offload-") if offloads else None
    if folder is not None:
        words |= {"offload_folder": folder.name}
    with no_progress_bars(), _no_word_on_buffers(), _as_our_errors(ready):
        model, loading_info = model_class.from_pretrained(
            ready.folder,
            config=config,
            device_map=None if device_map is None else dict(device_map),
            weights_only=True,
            output_loading_info=True,
            trust_remote_code=runs_own_code(ready.config, trusted=ready.request.trust_remote_code),
            local_files_only=True,
            **words,
            **more,
        )
    if folder is not None:
        weakref.finalize(model, folder.cleanup)
    missing = [*loading_info["missing_keys"], *(str(key) for key in loading_info["mismatched_keys"])]
    if missing:
        # transformers fills them with random numbers, and goes on.
        raise BadModel(
            f"{quoted(ready.request.model)}: its checkpoint has no {few(sorted(missing))}, without which the model "
            "computes nonsense"
        )
    return model.eval(), sorted(loading_info["unexpected_keys"])


def _file_words(ready: PreparedModel, config: Any) -> dict[str, Any]:
    """Which file is meant, where it is not the folder's usual one."""
    if ready.path.is_dir():
        return {}
    if ready.path.suffix.lower() == ".safetensors":
        config.transformers_weights = ready.path.name
        return {}
    if ready.path.name != "pytorch_model.bin":
        raise BadModel(f"{ready.path}: transformers loads a single file only if it is safetensors")
    return {"use_safetensors": False}


@contextmanager
def _as_our_errors(ready: PreparedModel) -> Iterator[None]:
    """A library that the model's quantisation or code wants, and what is wrong with the model, as our errors."""
    try:
        yield
    except ImportError as missing:
        raise MissingExtra(f"{quoted(ready.request.model)} needs a library that is not installed: {missing}") from None
    except ValueError as problem:
        raise BadModel(f"{quoted(ready.request.model)}: transformers can't load it: {problem}") from None


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keeps transformers' progress bars out of job logs."""
    from transformers.utils import logging as transformers_logging

    shown_before = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown_before:
            transformers_logging.enable_progress_bar()


@contextmanager
def _no_word_on_buffers() -> Iterator[None]:
    """accelerate warns of a buffer's name in a device map, which transformers reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules", UserWarning)
        yield


def few(names: Sequence[str]) -> str:
    """Some of the names, and how many more there are."""
    return ", ".join(quoted(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def load_weights(ready: PreparedModel, *, divided: Any = None) -> tuple[Any, PreparedModel]:
    """The model, and what was prepared in the names of the model's class, with a note on tensors that have no place.

    Args:
        divided: transformers' ``DistributedConfig``, where each layer is divided over several processes; without it
            each block goes where the placement says.
    """
    trusted = runs_own_code(ready.config, trusted=ready.request.trust_remote_code)
    config = config_of(ready.folder, trusted=trusted)
    model_class, ready, device_map = fitted_class(classes_for(ready.base, config, trusted=trusted), config, ready)
    if divided is None:
        model, unexpected = from_pretrained(model_class, config, ready, device_map)
    else:
        model, unexpected = from_pretrained(model_class, config, ready, None, distributed_config=divided)
    if unexpected:
        note = f"{len(unexpected)} tensors of the checkpoint have no place in the model: {few(unexpected)}"
        ready = replace(ready, notes=(*ready.notes, note))
    return model, ready


# ---- adapters --------------------------------------------------------------------------------------------------------


def with_adapter(model: Any, adapter: Path, *, merge: bool) -> Any:
    """The model with the adapter: PEFT's model, or the model itself with changed weights where it is merged.

    The adapter's factors come to the device of the module that they belong to. Merging adds them module by module, so
    that no more than one weight is in memory twice.

    Raises BadModel where PEFT can't use it.
    """
    with naming_extras(EXTRAS, "loading adapters takes"):
        from peft import PeftModel
    try:
        # Read on the CPU first: PEFT's default is the first GPU, whatever is on it.
        adapted = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu", local_files_only=True)
    except (ValueError, KeyError, RuntimeError, OSError) as problem:
        raise BadModel(f"{adapter} can't be put on this model: {problem}") from None
    if not merge:
        return adapted.eval()
    # PEFT's "safe" merge rounds the update to the weights' precision before it adds it; this one rounds the sum alone.
    return adapted.merge_and_unload().eval()
