"""Draws continuations by vLLM, and evaluates by it, and writes both as JSON: ``by_vllm.py MODEL OTHER FILE``, OTHER a
policy that is evaluated against MODEL."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.lm.vllm_stand_in import processes
from tests.posttrain.eval.first_letter import FirstLetter

from gpuherd.posttrain.eval import evaluation
from gpuherd.posttrain.eval.answers import read_answers
from gpuherd.posttrain.eval.evaluation import Evaluating, evaluate
from gpuherd.posttrain.eval.results import About, EvaluationOptions
from gpuherd.posttrain.rollout.sampler import Prefix, Sampler
from gpuherd.posttrain.rollout.vllm import VllmSampler
from gpuherd.posttrain.types import BackendName, Policy, Precision, Sampling

SAMPLING = Sampling(max_new_tokens=8, temperature=0.7, batch_size=16, seed=4)


def evaluated(model: str, other: str, folder: Path) -> dict[str, Any]:
    """Figures of an evaluation by vLLM, its completions, and which processes were left where a model was loaded."""
    load, left = evaluation._Loaded.fresh, []

    def fresh(self: Any, policy: Policy) -> Sampler:
        left.append(processes(os.getpid()))
        return load(self, policy)

    evaluation._Loaded.fresh = fresh  # type: ignore[method-assign]
    made = evaluate(
        Evaluating(
            About("GRPO", "letters", "letters", "tiny", 0),
            Policy(other),
            Policy(model),
            FirstLetter(),
            folder,
            options=EvaluationOptions(problems=5, samples=3, pass_at=(2,), resamples=100),
            sampling=SAMPLING,
            precision=Precision("float32"),
            backend=BackendName.VLLM,
        )
    )
    kl = made.own.metrics.kl
    rows = [
        [
            list(row.prompt_ids),
            [list(each.ids) for each in row.completions],
            [each.log_probs for each in row.completions],
        ]
        for row in read_answers(folder / "answers.jsonl")
    ]
    return {"left": left, "kl": None if kl is None else kl.sequence.value, "notes": made.notes, "rows": rows}


def write_adapter(model: str, folder: Path) -> None:
    """Of all linear layers, with random numbers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    config = LoraConfig(r=6, init_lora_weights=False, target_modules="all-linear")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)


def main(model: str, other: str, file: str) -> None:
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
    sampler.release()
    adapter = Path(file).parent / "adapter"
    write_adapter(model, adapter)
    policy = Policy(model, str(adapter))
    adapted = VllmSampler(policy, Precision("float32"), "cpu", replace(SAMPLING, temperature=1.0))
    told["adapted"] = [[asdict(each) for each in group] for group in adapted.continuations(prefixes, greedy=True)]
    adapted.release()
    figures = evaluated(model, other, Path(file).parent / "evaluation")
    Path(file).write_text(json.dumps({"prompts": prompts, "evaluated": figures, "adapter": str(adapter), **told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
