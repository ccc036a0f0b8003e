"""A model that FSDP divides is read by each process for its own rows alone, and is the model that one process loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.tiny import character_tokenizer, tiny_llama
from tests.qa.small_models import seeded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks for it
]
ROOT = Path(__file__).parents[3]
CASES = ["gpt", "llama", "llama adapter", "llama lora", "mixtral", "mixtral lora", "tied", "tied lora"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models: with an adapter, with tied embeddings, with experts that transformers stacks while it loads, and of a
    class that has no plan of its own; some have sizes that two processes can't divide evenly."""
    import transformers
    from peft import LoraConfig, get_peft_model

    base = tmp_path_factory.mktemp("sharded")
    tiny_llama(base / "llama", layers=3)
    shared = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    for name, kind, words in (
        ("tied", "Llama", {**shared, "intermediate_size": 49, "tie_word_embeddings": True}),
        ("mixtral", "Mixtral", {**shared, "intermediate_size": 24, "num_local_experts": 3}),
        ("gpt", "GPT2", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}),
    ):
        tokenizer = character_tokenizer(base / name)
        config_class = getattr(transformers, f"{kind}Config")
        model_class = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
        config = config_class(
            vocab_size=len(tokenizer), eos_token_id=0, bos_token_id=None, pad_token_id=1, initializer_range=0.2, **words
        )
        with seeded(3):
            model_class(config).save_pretrained(base / name, max_shard_size="20KB")
    model = transformers.AutoModelForCausalLM.from_pretrained(base / "llama")
    with seeded(4):
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=3, init_lora_weights=False))
    adapted.save_pretrained(base / "llama-adapter")
    return base


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What two processes tell of each."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(ROOT / "tests/posttrain/rollout/sharded.py"), folder],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "told.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_rows_make_the_model(told: dict[str, list[dict[str, Any]]], case: str) -> None:
    for each in told[case]:
        assert (each["differ"], each["buffers"]) == ([], [])
        assert each["names"] and each["trained"] and each["logits"] and each["drawn"], each


def test_of_a_reward_model_the_head_is_drawn_alike(told: dict[str, list[dict[str, Any]]]) -> None:
    for each in told["reward"]:
        assert each == {"drawn": ["score.weight"], "differ": [], "kind": True}


@pytest.mark.parametrize("case", CASES)
def test_no_process_reads_more_than_its_rows(told: dict[str, list[dict[str, Any]]], case: str) -> None:
    """Placeholders are a number each; together the processes have every row once."""
    for each in told[case]:
        assert 0 < each["bytes"] <= 4 * each["placeholders"]
        assert 0.4 < each["rows"] < 0.6
    assert sum(each["rows"] for each in told[case]) == pytest.approx(1.0)


@pytest.mark.parametrize("case", CASES)
def test_what_was_trained_is_saved_as_its_kind_is(
    folder: Path, told: dict[str, list[dict[str, Any]]], case: str
) -> None:
    """With the names, the files' kinds and the config that the model came with, and no word of the processes."""
    from safetensors import safe_open

    def shapes(path: Path) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for each in path.glob("*.safetensors"):
            with safe_open(each, framework="pt") as file:
                found |= {name: file.get_slice(name).get_shape() for name in set(file.keys())}
        return found

    assert told[case][0]["loss"] == pytest.approx(told[case][1]["loss"])
    saved = folder / f"{case.replace(' ', '-')}-saved"
    name, _, kind = case.partition(" ")
    assert not list(folder.glob(".weights-*"))
    if kind:
        assert set(shapes(saved)) and all("lora_" in each for each in shapes(saved))
        return
    assert shapes(saved) == shapes(folder / name)
    ours, theirs = (json.loads((each / "config.json").read_text()) for each in (saved, folder / name))
    assert ours == theirs
