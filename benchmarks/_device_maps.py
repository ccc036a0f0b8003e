"""Device maps as the libraries make them, for GPUs that need not be there: models on the meta device, budgets in bytes.

What ``from_pretrained(device_map="auto")`` does inside, called with the budgets that a machine of such GPUs would have:
``transformers`` by its own functions (with the quantiser that it would use), ``accelerate`` by its public ones.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

GIB = 1 << 30
# Host memory that a library may offload to: more than any model here has.
HOST = 2048 * GIB

DeviceMap = Mapping[str, int | str]


def meta_model(config: Mapping[str, Any], precision: str) -> tuple[Any, Any]:
    """The model on the meta device, with bitsandbytes' layers where they quantise, and the quantiser (None without)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    fields = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(precision, torch.float16)
    with torch.device("meta"), _quiet():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields), dtype=dtype)
    if precision not in ("int8", "nf4", "nf4-dq"):
        return model, None
    wishes = BitsAndBytesConfig(
        load_in_8bit=precision == "int8",
        load_in_4bit=precision != "int8",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=precision == "nf4-dq",
    )
    quantizer = AutoHfQuantizer.from_config(wishes, pre_quantized=False)
    with torch.device("meta"), _quiet():
        quantizer.preprocess_model(model=model, device_map="auto")
    return model, quantizer


def by_transformers(model: Any, quantizer: Any, budgets: Sequence[int]) -> DeviceMap:
    """The map of ``device_map="auto"``. Raises ValueError where transformers refuses."""
    from transformers.integrations.accelerate import _get_device_map

    with _quiet():
        found: DeviceMap = _get_device_map(model, "auto", _budgets(budgets), quantizer)
    return found


def by_accelerate(model: Any, budgets: Sequence[int]) -> DeviceMap:
    """The map of accelerate's own balanced memory. It knows nothing of bitsandbytes."""
    from accelerate.utils import get_balanced_memory, infer_auto_device_map

    classes = list(model._no_split_modules)
    with _quiet():
        memory = get_balanced_memory(model, max_memory=_budgets(budgets), no_split_module_classes=classes)
        found: DeviceMap = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=classes)
    return found


def _budgets(budgets: Sequence[int]) -> dict[int | str, int]:
    return {**dict(enumerate(budgets)), "cpu": HOST}


@contextlib.contextmanager
def _quiet() -> Any:
    """Without the libraries' remarks on GPUs that are not there."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
