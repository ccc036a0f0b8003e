"""What a run of blocks takes: equal to real models of the same shape, and to a plain count over all tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.describe.formulas.from_config import architecture_of as read_config
from tests.models.memory.toy import usage_of

from gpuherd.models.describe.description import Architecture, Block, LayerCache, Role, Tensor
from gpuherd.models.memory.kv_cache import GIB, MIB, Reserve, Workload
from gpuherd.models.memory.usage import CostTable
from gpuherd.models.memory.weights import Precision, weight_bytes
from gpuherd.models.place.gpus import GpuSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.describe.meta_models import architecture_of, meta_model  # noqa: E402
from tests.models.memory.real_memory import cache_storage, loaded, storage_bytes  # noqa: E402

A100 = GpuSpec("0", "40GB", 40 * GIB, 40 * GIB)


def llama(**fields: Any) -> Any:
    """A config of Llama's kind; sizes are those of Llama-3.1-8B unless named."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    return transformers.LlamaConfig(**{**sizes, **fields})


def kv_of(config: Any) -> LayerCache:
    """What a plain attention layer keeps for each token."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kept = config.num_key_value_heads if hasattr(config, "num_key_value_heads") else config.num_attention_heads
    return LayerCache(per_token=2 * kept * head)


PUBLISHED = {
    "Llama-3.2-1B": llama(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True, head_dim=64
    ),
    "Llama-2-7B": llama(intermediate_size=11008, num_key_value_heads=32, vocab_size=32000),
    "Llama-3.1-8B": llama(),
    "Llama-2-13B": llama(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
        vocab_size=32000,
    ),
    "Llama-3.1-70B": llama(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    ),
}
# Section 4.1 of the reference: parameters; GB in 16 bits, int8, nf4, nf4 with double quantisation; KiB a token.
TABLE = {
    "Llama-3.2-1B": (1_235_814_400, 2.47, 1.50, 1.07, 1.03, 32),
    "Llama-2-7B": (6_738_415_616, 13.48, 7.01, 4.17, 3.87, 512),
    "Llama-3.1-8B": (8_030_261_248, 16.06, 9.09, 6.03, 5.70, 128),
    "Llama-2-13B": (13_015_864_320, 26.03, 13.35, 7.79, 7.20, 800),
    "Llama-3.1-70B": (70_553_706_496, 141.11, 72.68, 42.71, 39.52, 320),
}


@pytest.mark.parametrize("name", list(TABLE))
def test_the_table_of_the_guide_corrected(name: str) -> None:
    config = PUBLISHED[name]
    architecture = architecture_of(meta_model(config), kv_of(config))
    parameters, *sizes, kv = TABLE[name]
    assert architecture.parameters == parameters
    precisions = [Precision.BF16, Precision.INT8, Precision.NF4, Precision.NF4_DQ]
    for precision, expected in zip(precisions, sizes, strict=True):
        table = CostTable(architecture, precision, Workload(), Reserve())
        assert round(sum(table.weights(0, len(architecture.blocks))) / 1e9, 2) == expected, precision
    token = CostTable(architecture, Precision.BF16, Workload(1, 1, 1), Reserve())
    assert token.cache(0, len(architecture.blocks)).at_end == kv * 1024


# Columns of whole 64-blocks: bitsandbytes 0.50 repacks 4-bit weights on the CPU, and fails to with others.
SMALL: dict[str, Any] = {
    "llama": llama(
        hidden_size=192, intermediate_size=320, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=301,
    ),
    "tied": llama(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=211, tie_word_embeddings=True,
    ),
    "gpt2": transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=97, n_positions=128),
    "qwen2": transformers.Qwen2Config(
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=131,
    ),
    "mixtral": transformers.MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=131, sliding_window=None,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real models with random weights, a folder each."""
    root = tmp_path_factory.mktemp("small")
    for name, config in SMALL.items():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return root


# Every precision of one model, and of the others what is special to them: Conv1D, ties, biases, fused experts.
EVERY_TIME = {("llama", precision) for precision in Precision} | {
    ("gpt2", Precision.INT8),
    ("gpt2", Precision.NF4),
    ("tied", Precision.NF4_DQ),
    ("qwen2", Precision.BF16),
    ("mixtral", Precision.NF4),
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[] if (name, precision) in EVERY_TIME else [pytest.mark.slow])
        for name in SMALL
        for precision in list(Precision)[:6]
    ],
)
def test_predicted_memory_is_real_memory(saved: Path, name: str, precision: Precision) -> None:
    config = SMALL[name]
    architecture = architecture_of(meta_model(config), kv_of(config))
    model = loaded(saved / name, precision)
    real_weights, real_state, buffers = storage_bytes(model)
    table = CostTable(architecture, precision, Workload(3, 7, 5), Reserve())
    assert table.weights(0, len(architecture.blocks)) == (real_weights, real_state)
    assert buffers < 2048, "what no formula counts"
    kept = cache_storage(model, batch=3, prompt=7, new=5)
    assert table.cache(0, len(architecture.blocks)).at_end == kept


def _plain(architecture: Architecture, first: int, after_last: int, precision: Precision) -> tuple[int, int]:
    """Each storage of a run of blocks once, by looking at every tensor."""
    owners = {tensor.name: tensor for tensor in architecture.tensors()}
    storages = {
        tensor.tied_to or tensor.name for block in architecture.blocks[first:after_last] for tensor in block.tensors
    }
    pairs = [weight_bytes(owners[name], precision) for name in storages]
    return sum(weights for weights, _ in pairs), sum(state for _, state in pairs)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """A few blocks, some of whose tensors share the storage of an earlier one."""
    names: list[str] = []
    blocks: list[Block] = []
    for number in range(draw(st.integers(1, 7))):
        tensors: list[Tensor] = []
        for part in range(draw(st.integers(0, 3))):
            name = f"blocks.{number}.{part}"
            shares = bool(names) and draw(st.booleans())
            tied = draw(st.sampled_from(names)) if shares else None
            tensors.append(
                Tensor(name, (draw(st.integers(1, 9)), draw(st.integers(1, 90))), draw(st.sampled_from(Role)), tied)
            )
            if tied is None:
                names.append(name)
        cache = draw(st.sampled_from([None, LayerCache(8), LayerCache(8, window=5), LayerCache(per_sequence=3)]))
        blocks.append(Block(f"blocks.{number}", "layer", tuple(tensors), cache))
    return Architecture("m", "llama", None, tuple(blocks), 16, 32, 50, 4)


@given(architectures(), st.sampled_from(Precision), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_any_run_of_blocks_is_what_a_plain_count_says(
    architecture: Architecture, precision: Precision, batch: int, prompt: int, new: int
) -> None:
    workload = Workload(batch, prompt, new)
    table = CostTable(architecture, precision, workload, Reserve())
    for first in range(len(architecture.blocks) + 1):
        for after_last in range(first, len(architecture.blocks) + 1):
            usage = table.usage(first, after_last, A100)
            assert (usage.weights, usage.quantisation) == _plain(architecture, first, after_last, precision)
            assert usage.workspace >= 0
            assert usage == usage_of(architecture, first, after_last, precision, workload, Reserve(), A100)


@given(architectures(), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_usage_is_additive_up_to_tied_storages_and_grows_with_the_batch(
    architecture: Architecture, batch: int, prompt: int, new: int
) -> None:
    table = CostTable(architecture, Precision.BF16, Workload(batch, prompt, new), Reserve())
    last = len(architecture.blocks)
    whole = table.usage(0, last, A100)
    for cut in range(last + 1):
        left, right = table.usage(0, cut, A100), table.usage(cut, last, A100)
        assert left.weights + right.weights >= whole.weights, "a tied pair on two GPUs lies there twice"
        assert left.cache + right.cache >= whole.cache
        assert max(left.total, right.total) <= whole.total
    assert table.usage(0, last, A100, batch + 1).total >= whole.total


def test_a_tied_head_is_free_beside_its_embedding_and_costs_on_another_gpu() -> None:
    config = SMALL["tied"]
    architecture = architecture_of(meta_model(config), kv_of(config))
    table = CostTable(architecture, Precision.BF16, Workload(), Reserve())
    last, shared = len(architecture.blocks), 211 * 64 * 2
    assert table.weights(0, last)[0] == 2 * architecture.parameters
    assert table.weights(0, 2)[0] + table.weights(2, last)[0] == 2 * architecture.parameters + shared


def test_the_reserve_and_the_context_stand_on_every_gpu() -> None:
    usage = usage_of(
        Architecture("m", "llama", None, (Block("empty", "norm", ()),), 8, 8, 8, 1), 0, 1, Precision.BF16, Workload(),
        Reserve(context=500 * MIB, fixed=100 * MIB, share=0.1), A100,
    )  # fmt: skip
    assert (usage.weights, usage.quantisation, usage.cache) == (0, 0, 0)
    assert (usage.context, usage.reserve) == (500 * MIB, 100 * MIB + 4 * GIB)


def test_tensor_parallel_divides_what_the_plan_of_transformers_divides() -> None:
    config = llama(num_hidden_layers=4)
    architecture = read_config(config.to_dict(), "test")
    last = len(architecture.blocks)
    one, four = (
        CostTable(architecture, Precision.BF16, Workload(8, 512, 64), Reserve(), ways=ways).usage(0, last, A100)
        for ways in (1, 4)
    )
    divided = 2 * sum(tensor.numel for tensor in architecture.tensors() if tensor.split)
    assert divided > 0.7 * one.weights, "all matrices of the layers, and the head"
    assert four.weights == one.weights - divided + divided // 4
    assert four.cache == one.cache // 4, "each GPU has two of the eight key heads"
    # The MLP's middle is divided, the hidden states beside it are not.
    assert one.workspace / 4 < four.workspace < one.workspace / 2
