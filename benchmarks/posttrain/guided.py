"""What guided decoding costs over plain decoding: tokens a second of ``gpuherd.lm`` with and without a classifier.

    python -m benchmarks.posttrain guided                        batches of 1, 8 and 32, in float32 and bfloat16
    python -m benchmarks.posttrain.guided --dtype float32 --batch 8     one, printed

A Llama of random weights (88 million parameters; 1.2 billion on a GPU) is guided by classifiers of a quarter of its
parameters (half as deep), among 20 candidates. All decode as many tokens greedily for the same prompts of 40 tokens.
Ways:

- ``plain``: no classifier;
- ``guided_v``: kind V: a step reads the 20 candidates of all rows in one pass (tree attention), the chosen one's keys
  and values stay;
- ``guided_q``: kind Q: a step reads the chosen token alone, and the head says the values of all that may follow;
- ``guided_v_bfloat16``: kind V, the classifier in bfloat16 beside a model in float32;
- ``naive_v``: kind V as it is done without a cache: each candidate with all that stands before it.

Beside them: how many multiplications by weights a step of each takes, relative to plain decoding; and ``least_v``: what
kind V would take if the classifier's products ran at the speed of one large product and all else of it took no time, so
what no better code of ours could get below. Where a step waits for the weights to come from memory (one row; a GPU), 20
candidates cost little more than one token. Without CUDA seconds are
those of the CPU, of one process and its threads; with it they are of the clock. Each way is run three times, in turns;
the median counts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.generate import WORDS, device, write_model

BATCHES = (1, 8, 32)
PROMPT, NEW, NAIVE_STEPS, TOP_K, ROUNDS = 40, 32, 2, 20, 3


def run(*, quick: bool) -> dict[str, Any]:
    """Tokens a second of each way by dtype and batch, and how many times plain decoding's time each takes."""
    found = {
        dtype: {f"batch_{rows}": measured(rows, dtype, quick=quick) for rows in ((2,) if quick else BATCHES)}
        for dtype in (("float32",) if quick else ("float32", "bfloat16"))
    }
    return {"device": device(), "prompt_tokens": PROMPT, "new_tokens": NEW, "candidates": TOP_K, **found}


def measured(rows: int, dtype: str, *, quick: bool) -> dict[str, Any]:
    """The figures of one batch."""
    import torch

    from gpuherd.lm.backend import Decoding, PromptTokens
    from gpuherd.lm.guidance.classifier import new_classifier
    from gpuherd.lm.guidance.guidance import Guidance
    from gpuherd.lm.guidance.guide import Guide, Kind
    from gpuherd.lm.model import LanguageModel

    draw = random.Random(0)
    length, new = (20, 4) if quick else (PROMPT, NEW)
    prompts = [PromptTokens(str(row), tuple(draw.randrange(2, WORDS) for _ in range(length))) for row in range(rows)]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        module = write_model(folder, dtype, quick=quick, large=torch.cuda.is_available())
        small = write_small(folder, folder / "small", dtype)
        where = "cuda" if torch.cuda.is_available() else "cpu"
        guide = Guide("random", eta=0.1, top_k=TOP_K)
        guidance = {}
        for name, kind, its_dtype in (("v", Kind.V, dtype), ("q", Kind.Q, dtype), ("v_bfloat16", Kind.V, "bfloat16")):
            classifier = new_classifier(small, kind, device=where, dtype=its_dtype)
            with torch.random.fork_rng():
                torch.manual_seed(1)
                torch.nn.init.normal_(classifier.module.head.weight, std=0.05)
            guidance[name] = Guidance(classifier, guide)
        tokenizer = classifier.tokenizer
    if dtype == "bfloat16":
        del guidance["v_bfloat16"]
    how = Decoding(max_new_tokens=new)
    models = {
        "plain": LanguageModel(module, tokenizer),
        **{f"guided_{name}": LanguageModel(module, tokenizer, guidance=each) for name, each in guidance.items()},
    }
    ways: dict[str, Callable[[], object]] = {name: partial(lm.decode, prompts, how) for name, lm in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for lm in models.values():
        lm.decode(prompts[:2], Decoding(max_new_tokens=2))
    for _ in range(ROUNDS):
        for name, way in ways.items():
            seconds[name].append(taken(way))
    each = {name: statistics.median(all_of) / (rows * new) for name, all_of in seconds.items()}
    each["naive_v"] = naive(guidance["v"], prompts, each["plain"], quick=quick)
    multiplied = TOP_K * multiplied_weights(guidance["v"].classifier.module.body)
    each["least_v"] = each["plain"] + multiplied * multiplication(dtype, where)
    for name, cost in each.items():
        print(f"{dtype}, {rows} rows, {name}: {1 / cost:.1f} tokens a second", file=sys.stderr, flush=True)
    classifier = guidance["v"].classifier
    return {
        "parameters": {"reference": size_of(module), "classifier": size_of(classifier.module.body)},
        "tokens_a_second": {name: 1 / cost for name, cost in each.items()},
        "times_plain": {name: cost / each["plain"] for name, cost in each.items()},
        "spread": {name: max(all_of) / min(all_of) for name, all_of in seconds.items()},
        "multiplications_times_plain": multiplications(module, classifier.module.body),
    }


def write_small(tokenizer: Path, folder: Path, dtype: str) -> Path:
    """A quarter of the parameters of the model whose folder has the tokenizer: half as deep and 0.6 times as wide."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(tokenizer)
    heads = max(1, round(0.6 * config.num_attention_heads))
    config.update({"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * 64})
    config.intermediate_size = config.hidden_size * 8 // 3
    config.num_hidden_layers //= 2
    with torch.random.fork_rng():
        torch.manual_seed(2)
        AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def naive(guidance: Any, prompts: Sequence[Any], plain_cost: float, *, quick: bool) -> float:
    """Seconds a token where each candidate is read with all that stands before it: those of plain decoding, and of
    the classifier at a text's middle length."""
    import torch

    middle = (20 + 2) if quick else PROMPT + NEW // 2
    classifier = guidance.classifier
    rows = torch.tensor([list(each.token_ids) + [3] * (middle - len(each.token_ids)) for each in prompts])
    texts: Any = rows.repeat_interleave(TOP_K, dim=0).to(classifier.device)

    def step() -> None:
        with torch.inference_mode():
            for some in texts.split(160):  # as many at once as a careful user's memory has room for
                classifier.module.values_at(classifier.module.states(some, torch.ones_like(some), places(some)))

    def places(some: Any) -> Any:
        return torch.arange(some.shape[1], device=some.device).expand(len(some), -1)

    return plain_cost + statistics.median(taken(step) for _ in range(NAIVE_STEPS)) / len(prompts)


def size_of(module: Any) -> int:
    """Parameters."""
    return sum(each.numel() for each in module.parameters())


def multiplied_weights(model: Any) -> int:
    """Weights that each token is multiplied by; embeddings are looked up, not multiplied."""
    return size_of(model) - int(model.get_input_embeddings().weight.numel())


def multiplication(dtype: str, where: str) -> float:
    """Seconds of one multiplication (and addition) in a large product, at its best of several."""
    import torch

    side, times = 1024, 4
    one, other = torch.ones(2, side, side, dtype=getattr(torch, dtype), device=where)

    def products() -> None:
        for _ in range(times):
            torch.mm(one, other)

    products()
    return min(taken(products) for _ in range(5)) / (times * side**3)


def multiplications(module: Any, body: Any) -> dict[str, float]:
    """Multiplications of a token by weights, relative to plain decoding."""
    plain, small = multiplied_weights(module), multiplied_weights(body)
    return {"guided_v": 1 + TOP_K * small / plain, "guided_q": 1 + small / plain}


def taken(work: Callable[[], object]) -> float:
    """Seconds: of the CPU, of the clock where a GPU works."""
    import torch

    if not torch.cuda.is_available():
        began = time.process_time()
        work()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    """One batch, printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    print(json.dumps(measured(args.batch, args.dtype, quick=args.quick), indent=2))


if __name__ == "__main__":
    main()
