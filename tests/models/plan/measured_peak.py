"""The largest memory that transformers' modelling code asks for, without a GPU, weights or arithmetic: torch's fake
tensors go through it and torch's memory tracker counts the storages that are alive.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from tests.models.plan.real_memory import cache_tensors, nbytes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker


@dataclass(frozen=True)
class Peaks:
    """Bytes beyond weights and cache: while a prompt is read, and for one more token."""

    prompt: int
    token: int


def measured(config: Any, *, batch: int, prompt: int, dtype: torch.dtype, attention: str | None = None) -> Peaks:
    """Runs a causal model of the config on a padded batch of prompts and then on one more token."""
    from transformers import AutoModelForCausalLM, DynamicCache

    config = copy.deepcopy(config)  # transformers writes the attention into it
    chosen = {} if attention is None else {"attn_implementation": attention}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **chosen).eval()
        ids = torch.zeros(batch, prompt + 1, dtype=torch.long)
        mask = torch.ones(batch, prompt + 1, dtype=torch.long)
        cache = DynamicCache(config=config)
        peaks = []
        for asked, known in ((ids[:, :prompt], mask[:, :prompt]), (ids[:, prompt:], mask)):
            tracker = MemTracker()
            tracker.track_external(model, *cache_tensors(cache))
            with tracker:
                answer = model(
                    input_ids=asked,
                    attention_mask=known,
                    position_ids=(known.cumsum(-1) - 1)[:, -asked.shape[1] :],
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                answer.logits[:, -1, :].to(copy=True, dtype=torch.float32)
            total = sum(each["Total"] for each in tracker.get_tracker_snapshot("peak").values())
            peaks.append(total - nbytes(model.parameters()) - nbytes(model.buffers()) - nbytes(cache_tensors(cache)))
            del answer
    return Peaks(*peaks)
