"""Answers with log-probs: tokens a second of ``gpuherd.lm`` against the obvious ways, on the same requests.

    python -m benchmarks generate                              all cases
    python -m benchmarks.generate few_shot --dtype float32     one, printed

A Llama of random weights (88 million parameters; 1.2 billion on a GPU) and a tokenizer of numbered words are written
here. Every way decodes as many new tokens for each prompt, greedily, with the log-prob of each. Cases:

- ``few_shot``, what experiments ask: 32 questions of 20-60 tokens behind 350 tokens of examples, 50 new tokens each;
- ``questions``: the same without examples;
- ``samples``: 10 drawn answers to a prompt of 257 tokens, one prompt after the other;
- ``memory``: what a decoded token costs at the peak (``_decode_memory``).

Without CUDA seconds are those of the CPU, of one process and its threads; with it they are of the clock. All cases are
run in bfloat16, ``few_shot`` in float32 too, there without the harness (4 minutes in all on 2 cores).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import _generate_peers as peers
from benchmarks._peers import Absent

WORDS = 32_000
LONGEST = 2048
SAMPLES = 10
CASES = ("few_shot", "questions", "samples", "memory")


def run(*, quick: bool) -> dict[str, Any]:
    """Tokens a second of each way, and what they say of ours; ``None`` and a reason for a way that is not there."""
    found = {"bfloat16": measured(CASES, "bfloat16", quick=quick)}
    if not quick:
        found["float32"] = measured(["few_shot"], "float32", quick=quick, harness=False)
    return {"device": device(), **found}


def device() -> str:
    """What the models run on."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def write_model(folder: Path, dtype: str, *, quick: bool, large: bool) -> Any:
    """A Llama of random weights and a tokenizer of one word a token, in this folder; the model on its device."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "</s>": 1} | {f"w{number}": number for number in range(2, WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>", pad_token="</s>")
    tokenizer.save_pretrained(folder)
    layers, width = (2, 64) if quick else (16, 2048) if large else (10, 640)
    config = AutoConfig.for_model(
        "llama", vocab_size=WORDS, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, max_position_embeddings=LONGEST,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    module.save_pretrained(folder)
    return module.to("cuda" if torch.cuda.is_available() else "cpu")


def measured(cases: Sequence[str], dtype: str, *, quick: bool, harness: bool = True) -> dict[str, Any]:
    """The figures of these cases for one model."""
    import torch
    from transformers import AutoTokenizer

    from gpuherd.lm.model import LanguageModel

    draw = random.Random(0)
    rows, new = (4, 8) if quick else (32, 50)
    begin = words(draw, 40 if quick else 350)
    own = [words(draw, draw.randrange(20, 61)) for _ in range(rows)]
    long = [words(draw, 40 if quick else 257) for _ in range(2)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module = write_model(folder, dtype, quick=quick, large=torch.cuda.is_available())
        lm = LanguageModel(module, AutoTokenizer.from_pretrained(folder))
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "few_shot": partial(greedy, lm, folder, [(*begin, *each) for each in own], new, dtype, harness=harness),
            "questions": partial(greedy, lm, folder, own, new, dtype, harness=harness),
            "samples": partial(samples, lm, folder, long, 8 if quick else 16, dtype),
            "memory": memory,
        }
        return {
            "parameters": sum(each.numel() for each in module.parameters()),
            **{case: ways[case]() for case in cases},
        }


def words(draw: random.Random, count: int) -> tuple[int, ...]:
    """So many tokens."""
    return tuple(draw.randrange(2, WORDS) for _ in range(count))


def greedy(
    lm: Any, folder: Path, prompts: list[tuple[int, ...]], new: int, dtype: str, *, harness: bool
) -> dict[str, Any]:
    """Greedy answers to all prompts: ours in one batch, each way of ``_generate_peers``."""
    from gpuherd.lm.backend import Decoding, PromptTokens

    asked = [PromptTokens(str(number), prompt) for number, prompt in enumerate(prompts)]
    alone = prompts[:3]  # it is slow, and as fast for few as for many
    module, texts = lm.module, [lm.tokenizer.decode(list(each)) for each in prompts]

    def ours(count: int = len(prompts), tokens: int = new) -> list[list[int]]:
        decoded = lm.decode(asked[:count], Decoding(max_new_tokens=tokens))
        return [list(each.greedy.token_ids) for each in decoded]

    ours(2, 2)
    peers.each_alone(module, alone[:1], 2)
    peers.batched(module, prompts[:2], 2)
    answers: dict[str, list[list[int]]] = {}
    tokens = len(prompts) * new
    ways: dict[str, Callable[[], float]] = {
        "gpuherd": lambda: tokens / seconds(lambda: answers.update(ours=ours())),
        "generate_each_alone": lambda: (
            len(alone) * new / seconds(lambda: answers.update(alone=peers.each_alone(module, alone, new)))
        ),
        "generate_batched": lambda: tokens / seconds(lambda: peers.batched(module, prompts, new)),
        "vllm": lambda: tokens / peers.vllm(folder, prompts, new, dtype),
    }
    if harness:
        ways["lm_evaluation_harness"] = lambda: peers.lm_eval(folder, texts, new, dtype, len(prompts))
    found = asked_of(ways)
    same = sum(one == other for one, other in zip(answers["ours"], answers["alone"], strict=False))
    return {"prompts": len(prompts), "new_tokens": new, **found, "same_answers_as_alone": f"{same} of {len(alone)}"}


def samples(lm: Any, folder: Path, prompts: list[tuple[int, ...]], new: int, dtype: str) -> dict[str, Any]:
    """K drawn answers to each prompt, a prompt at a time."""
    from gpuherd.lm.backend import Decoding, PromptTokens

    tokens = len(prompts) * SAMPLES * new
    how = Decoding(greedy=False, samples=SAMPLES, max_new_tokens=new)

    def ours() -> None:
        for number, prompt in enumerate(prompts):
            lm.decode([PromptTokens(str(number), prompt)], how)

    def theirs() -> None:
        for prompt in prompts:
            peers.batched(lm.module, [prompt], new, SAMPLES)

    lm.decode([PromptTokens("first", prompts[0])], Decoding(samples=2, max_new_tokens=2))
    peers.batched(lm.module, prompts[:1], 2, 2)
    ways: dict[str, Callable[[], float]] = {
        "gpuherd": lambda: tokens / seconds(ours),
        "num_return_sequences": lambda: tokens / seconds(theirs),
        "vllm": lambda: tokens / peers.vllm(folder, prompts, new, dtype, SAMPLES),
    }
    return {"prompt_tokens": len(prompts[0]), "new_tokens": new, "samples": SAMPLES, **asked_of(ways)}


def asked_of(ways: dict[str, Callable[[], float]]) -> dict[str, Any]:
    """Tokens a second of each way, how many times those ours is, and why a way is not there."""
    speeds: dict[str, float | None] = {}
    absent: dict[str, str] = {}
    for name, way in ways.items():
        try:
            speeds[name] = way()
        except Absent as reason:
            speeds[name], absent[name] = None, str(reason)
        print(f"{name}: {speeds[name]} tokens a second", file=sys.stderr, flush=True)
    ours = speeds["gpuherd"] or 0.0
    times = {name: ours / speed for name, speed in speeds.items() if name != "gpuherd" and speed}
    return {"tokens_a_second": speeds, "ours_is_so_many_times": times, "absent": absent}


def memory() -> dict[str, Any]:
    """What a token costs at the peak, ours and where ``generate`` gives the logits; each in a process of its own."""

    def of(way: str) -> Any:
        words = [sys.executable, "-m", "benchmarks._decode_memory", way]
        return json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=600).stdout)

    return {way: of(way) for way in ("gpuherd", "generate")}


def seconds(work: Callable[[], object]) -> float:
    """Seconds of one run; what is slow at the first call was called before, on a small batch."""
    import torch

    cuda = torch.cuda.is_available()
    clock = time.perf_counter if cuda else time.process_time
    started = clock()
    work()
    if cuda:
        torch.cuda.synchronize()
    return clock() - started


def main() -> None:
    """The cases that the command line names, printed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description="Some cases, printed.")
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that they work")
    args = parser.parse_args()
    print(json.dumps(measured(args.cases, args.dtype, quick=args.quick), indent=2))


if __name__ == "__main__":
    main()
