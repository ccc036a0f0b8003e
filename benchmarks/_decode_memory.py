"""Bytes of memory that a decoded token with its log-prob costs at the peak: run as a process of its own, prints JSON.

    python -m benchmarks._decode_memory gpuherd|generate

A Llama of one layer with a vocabulary of 64,000 decodes a batch for a few tokens, then for more; what the peak of the
process' resident memory grew by in between, divided by the tokens more, is told. Keys and values are in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import _generate_peers as peers

VOCABULARY, WIDTH, ROWS, FEW, MANY = 64_000, 64, 16, 8, 136


def main() -> None:
    """Measures the way that is named."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    config: Any = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    module: Any = AutoModelForCausalLM.from_config(config).eval()
    prompts = [tuple(range(2, 12 + row)) for row in range(ROWS)]
    ways: dict[str, Callable[[int], object]] = {
        "gpuherd": ours(module, prompts),
        "generate": lambda new: peers.batched(module, prompts, new),
    }
    decode = ways[sys.argv[1]]
    decode(FEW)
    before = peak()
    decode(MANY)
    grew = (peak() - before) / (ROWS * (MANY - FEW))
    print(json.dumps({"bytes_a_token": round(grew), "of_them_keys_and_values": 2 * WIDTH * 4}))


def ours(module: Any, prompts: list[tuple[int, ...]]) -> Callable[[int], object]:
    """Decodes so many tokens by ``gpuherd.lm``."""
    from gpuherd.lm.backend import Decoding, PromptTokens
    from gpuherd.lm.model import LanguageModel

    lm = LanguageModel(module, Words())
    asked = [PromptTokens(str(number), each) for number, each in enumerate(prompts)]
    return lambda new: lm.decode(asked, Decoding(max_new_tokens=new))


class Words:
    """A tokenizer that writes a number a token."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        """The numbers, each with a space before it."""
        return "".join(f" {each}" for each in token_ids)


def peak() -> int:
    """Bytes: the most resident memory of this program so far (getrusage's would have the process' that started it)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
