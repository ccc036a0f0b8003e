"""Draws continuations by vLLM and writes them as JSON: ``by_vllm.py MODEL FILE``. Run by vLLM's own Python."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from gpuherd.posttrain.rollout.sampler import Prefix
from gpuherd.posttrain.rollout.vllm import VllmSampler
from gpuherd.posttrain.types import Policy, Precision, Sampling

SAMPLING = Sampling(max_new_tokens=8, temperature=0.7, batch_size=16, seed=4)


def main(model: str, file: str) -> None:
    """Four draws of each prefix at once, the last two of them again, and the greedy answers."""
    sampler = VllmSampler(Policy(model), Precision("float32"), "cpu", SAMPLING)
    prompts = [tuple(sampler.tokenizer(text)["input_ids"]) for text in ("The capital of", "Question:", "A")]
    prefixes = [Prefix(str(number), prompt) for number, prompt in enumerate(prompts)]
    found = {
        "whole": sampler.continuations(prefixes, 4),
        "rest": sampler.continuations(prefixes[1:], 2, first_sample=2),
        "greedy": sampler.continuations(prefixes, greedy=True),
        "short": sampler.continuations([Prefix("0", prompts[0], most=3)]),
    }
    told = {name: [[asdict(each) for each in group] for group in groups] for name, groups in found.items()}
    Path(file).write_text(json.dumps({"prompts": prompts, **told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
