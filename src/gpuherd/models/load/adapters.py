"""A LoRA adapter on a model that is loaded: as PEFT's modules beside the weights, or merged into them.

PEFT and torch are imported inside functions only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, naming_extras
from gpuherd.models.load.quantised import EXTRAS


def with_adapter(model: Any, adapter: Path, *, merge: bool) -> Any:
    """The model with the adapter: PEFT's model, or the model itself with changed weights where it is merged.

    The adapter's factors come to the device of the module that they belong to. Merging adds them module by module, so
    that no more than one weight is in memory twice.

    Raises BadModel where PEFT can't use it.
    """
    with naming_extras(EXTRAS, "loading adapters takes"):
        from peft import PeftModel
    try:
        # Read on the CPU first: PEFT's default is the first GPU, whatever lies there.
        adapted = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu", local_files_only=True)
    except (ValueError, KeyError, RuntimeError, OSError) as problem:
        raise BadModel(f"{adapter} can't be put on this model: {problem}") from None
    if not merge:
        return adapted.eval()
    # PEFT's "safe" merge rounds the update to the weights' precision before it adds it; this one rounds the sum alone.
    return adapted.merge_and_unload().eval()
