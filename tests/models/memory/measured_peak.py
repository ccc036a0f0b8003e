"""The largest memory that transformers' modelling code asks for, without a GPU, weights or arithmetic: torch's fake
tensors go through it and torch's memory tracker counts the storages that are alive.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from tests.models.memory.real_memory import cache_tensors, nbytes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker


@dataclass(frozen=True)
class Peaks:
    """Bytes beyond weights and cache: while a prompt is read, and for one more token."""

    prompt: int
    token: int


def as_on_cuda(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> tuple[Any, None]:
    """Attention by the kernel that CUDA has for heads whose keys and values differ in size; on the CPU torch has none,
    and would make a score for each pair."""
    mask = attention_mask
    if mask is not None:
        numbers = torch.zeros_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask
        missing = -numbers.shape[-1] % 8
        filled = torch.nn.functional.pad(numbers, (0, missing)) if missing else numbers
        mask = filled[..., : numbers.shape[-1]].expand(*query.shape[:3], -1)
    out = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, False)[0]
    return out.transpose(1, 2).contiguous(), None


def on_cuda() -> str:
    """The name under which transformers knows ``as_on_cuda``."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register("as_on_cuda", as_on_cuda)
    AttentionMaskInterface.register("as_on_cuda", sdpa_mask)
    return "as_on_cuda"


def measured_with_encoder(config: Any, *, batch: int, prompt: int, dtype: torch.dtype) -> Peaks:
    """The same for an encoder-decoder model: the greater of encoder and first token, then one more token. What the
    encoder gave out counts as long as it is there."""
    from transformers import AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache

    config = copy.deepcopy(config)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=dtype).eval()
        ids = torch.zeros(batch, prompt, dtype=torch.long)
        mask = torch.ones(batch, prompt, dtype=torch.long)
        weights = nbytes(model.parameters()) + nbytes(model.buffers())
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            read = model.get_encoder()(input_ids=ids, attention_mask=mask)
        peaks = [_peak(tracker) - weights]
        cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        for _ in range(2):
            tracker = MemTracker()
            tracker.track_external(model, read.last_hidden_state, *cache_tensors(cache))
            with tracker:
                answer = model(
                    encoder_outputs=read,
                    attention_mask=mask,
                    decoder_input_ids=ids[:, :1],
                    past_key_values=cache,
                    use_cache=True,
                )
                answer.logits[:, -1, :].to(copy=True, dtype=torch.float32)
            peaks.append(_peak(tracker) - weights - nbytes(cache_tensors(cache)))
            del answer
    return Peaks(max(peaks[:2]), peaks[2])


def _peak(tracker: Any) -> int:
    return sum(each["Total"] for each in tracker.get_tracker_snapshot("peak").values())


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
        peaks, kept = [], 0
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
            # A window is cut when the first token is computed: until then its cache is the whole prompt.
            kept = max(kept, nbytes(cache_tensors(cache)))
            peaks.append(_peak(tracker) - nbytes(model.parameters()) - nbytes(model.buffers()) - kept)
            del answer
    return Peaks(*peaks)
