"""One computation with a loaded model: whether it runs, gives numbers, and takes no more memory than was planned.

torch is imported inside functions only.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.models.load.loading import Loaded
from gpuherd.models.load.placed import Device
from gpuherd.models.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Trial:
    """What a prompt of random tokens came to.

    Attributes:
        sequences, tokens: how many, and how long each.
        seconds: for all of it, the first time.
        finite: whether all numbers that came out are finite.
        peaks: GPU -> most bytes that CUDA's allocator had given out at once, weights included; empty off GPUs.
        planned: GPU -> bytes that the plan expects there at most, without the context and reserve of other libraries.
    """

    sequences: int
    tokens: int
    seconds: float
    finite: bool
    peaks: Mapping[int, int]
    planned: Mapping[int, int]

    @property
    def within(self) -> bool:
        """Whether no GPU took more than was planned."""
        return all(self.peaks[gpu] <= self.planned[gpu] for gpu in self.peaks if gpu in self.planned)

    def sentence(self) -> str:
        """The trial in words."""
        told = f"a prompt of {self.sequences} x {self.tokens} tokens took {self.seconds:.1f} s"
        if not self.finite:
            told += "; NOT ALL NUMBERS THAT CAME OUT ARE FINITE"
        return told if self.within else f"{told}; IT TOOK MORE MEMORY THAN PLANNED"

    def as_json(self) -> dict[str, Any]:
        """The trial as plain JSON values; sizes in bytes."""
        return {
            "sequences": self.sequences,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "finite": self.finite,
            "peak_bytes": {str(gpu): size for gpu, size in self.peaks.items()},
            "planned_bytes": {str(gpu): size for gpu, size in self.planned.items()},
            "within_plan": self.within,
        }


def try_out(loaded: Loaded, workload: Workload, planned: Mapping[int, int]) -> Trial:
    """Computes one prompt of random tokens, of the workload's size or the longest that the model takes.

    Args:
        planned: bytes expected on each GPU at most; see ``Trial``.
    """
    import torch

    gpus = _real_gpus(loaded)
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    tokens = min(workload.prompt_tokens, _longest(loaded.model.config))
    words = _inputs(loaded, workload.batch, tokens)
    started = time.monotonic()
    with torch.inference_mode():
        answer = loaded.model(**words)
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    out = getattr(answer, "logits", None)
    out = answer.last_hidden_state if out is None else out
    return Trial(
        sequences=workload.batch,
        tokens=tokens,
        seconds=time.monotonic() - started,
        finite=bool(torch.isfinite(out).all()),
        peaks={gpu: torch.cuda.max_memory_allocated(gpu) for gpu in gpus},
        planned={gpu: planned[gpu] for gpu in gpus if gpu in planned},
    )


def _real_gpus(loaded: Loaded) -> list[int]:
    used: set[Device] = set(loaded.report.device_map.values())
    return [] if loaded.report.simulated else sorted(device for device in used if isinstance(device, int))


def _longest(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else 1 << 20


def _inputs(loaded: Loaded, sequences: int, tokens: int) -> dict[str, Any]:
    """Random token ids with a mask, and what else the model's class wants."""
    import torch

    model, config = loaded.model, loaded.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, text.vocab_size, (sequences, tokens), generator=random).to(loaded.input_device)
    words: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        start = getattr(config, "decoder_start_token_id", None) or 0
        words["decoder_input_ids"] = torch.full((sequences, 1), start, device=ids.device)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        # As generating does: of a prompt only the last position's logits are wanted.
        words["logits_to_keep"] = 1
    return words
