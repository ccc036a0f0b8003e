"""The most memory that a forward and a backward pass take in a process of their own.

    python tests/posttrain/engine/log_probs_memory.py chunked|whole VOCABULARY TOKENS

Prints the peak resident set before and after, in MiB, and the seconds between.
"""

from __future__ import annotations

import resource
import sys
import time

import torch

from gpuherd.posttrain.engine.log_probs import token_log_probs


def peak_mb() -> int:
    """The most that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main(kind: str, vocabulary: int, tokens: int) -> None:
    """One sequence through a small model with a wide head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=tokens,
        )
    )
    ids = torch.randint(0, vocabulary, (1, tokens))
    mask = torch.ones_like(ids)
    for weight in model.parameters():  # what training holds anyway
        weight.grad = torch.zeros_like(weight)
    token_log_probs(model, ids[:, :8], mask[:, :8], mask[:, :8].bool()).log_probs.sum().backward()
    before, started = peak_mb(), time.monotonic()
    if kind == "chunked":
        found = token_log_probs(model, ids, mask, mask.bool()).log_probs[:, 1:]
    else:
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        found = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[..., 0]
    found.sum().backward()
    print(before, peak_mb(), round(time.monotonic() - started, 1))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
