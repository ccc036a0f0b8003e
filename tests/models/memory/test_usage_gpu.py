"""Predicted memory against what CUDA's allocator says, where there is a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.models.describe.formulas.from_config import architecture_of
from tests.models.memory.toy import usage_of

from gpuherd.models.memory.kv_cache import GIB, Reserve, Workload
from gpuherd.models.memory.usage import Usage
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.memory.real_memory import DTYPES  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

WORKLOAD = Workload(batch=8, prompt_tokens=512, new_tokens=32)


def config() -> Any:
    """About 1 GB in 16 bits: large enough that the allocator's rounding doesn't count."""
    return transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        tie_word_embeddings=False,
    )


def predicted(precision: Precision) -> Usage:
    """What the plan says of the whole model on one GPU, without context and reserve."""
    found = architecture_of(config().to_dict(), "test")
    nothing = Reserve(context=0, fixed=0, share=0.0)
    card = GpuSpec("0", "80GB", 80 * GIB, 80 * GIB)
    return usage_of(found, 0, len(found.blocks), precision, WORKLOAD, nothing, card)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def _load(folder: Path, precision: Precision) -> Any:
    chosen: dict[str, Any] = {"dtype": DTYPES[precision.computes_in], "device_map": {"": 0}}
    if precision.is_quantised:
        pytest.importorskip("bitsandbytes")
        chosen["quantization_config"] = (
            transformers.BitsAndBytesConfig(load_in_8bit=True)
            if precision is Precision.INT8
            else transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=precision is Precision.NF4_DQ,
                bnb_4bit_compute_dtype=chosen["dtype"],
            )
        )
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **chosen).eval()


@pytest.mark.parametrize("precision", list(Precision)[:6])
def test_memory_on_a_gpu_is_what_was_predicted(saved: Path, precision: Precision) -> None:
    expected = predicted(precision)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = _load(saved, precision)
    weights = torch.cuda.memory_allocated() - before
    assert weights == pytest.approx(expected.weights + expected.quantisation, rel=0.03)

    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(3, 31000, (WORKLOAD.batch, WORKLOAD.prompt_tokens), device="cuda")
    mask = torch.ones_like(ids)
    mask[1:, :5] = 0  # prompts of unequal length, padded on the left
    with torch.no_grad():
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=WORKLOAD.new_tokens,
            min_new_tokens=WORKLOAD.new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 1.01 * expected.total, "never more than was planned"
    assert peak >= 0.9 * expected.total, "and not planned far too high"
    del model
    torch.cuda.empty_cache()
