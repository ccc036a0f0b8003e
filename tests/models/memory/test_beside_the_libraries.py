"""Our split beside the maps that transformers and accelerate make, for random small models and budgets: never a refusal
of what they place and what fits, and never a fuller GPU when all GPUs are used."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from tests.models.describe.formulas.from_config import architecture_of
from tests.models.memory.toy import NOTHING, gpus_of

from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.weights import Precision

pytest.importorskip("transformers")


def drawn(random: Random) -> dict[str, Any]:
    heads = random.choice([2, 4, 8])
    return {
        "model_type": "llama",
        "hidden_size": 64 * heads,
        "intermediate_size": random.choice([256, 512, 1024]),
        "num_hidden_layers": random.randint(1, 20),
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([1, 2, heads]),
        "vocab_size": random.choice([1_000, 20_000, 90_000]),
        "tie_word_embeddings": random.random() < 0.5,
        "max_position_embeddings": 2048,
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_no_library_does_better(seed: int) -> None:
    from benchmarks._device_maps import by_accelerate, by_transformers, meta_model
    from benchmarks.placement import Judge, worse

    random = Random(seed)
    config = drawn(random)
    architecture = architecture_of(config, "random")
    gpus = random.randint(1, 5)
    share = architecture.parameters * 2 / gpus * random.uniform(0.9, 2.5)
    cards = gpus_of(*(max(1, int(share * random.choice([1, 1, 1, 2])) >> 20) for _ in range(gpus)))
    workload = Workload(random.choice([1, 4]), 64, 16)
    judge = Judge(architecture, Precision.BF16, cards, workload, NOTHING)
    model, _ = meta_model(config, "bf16")
    budgets = [card.free for card in cards]
    told = {"transformers": judge.map(by_transformers(model, None, budgets))}
    told["accelerate"] = judge.map(by_accelerate(model, budgets))
    assert worse(judge.plan("auto"), judge.plan("layers"), told) == [], told
