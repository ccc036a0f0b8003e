"""Candidates that are read beside each other have the states that each has when all before it is read anew."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from tests.lm.test_architectures import KINDS
from tests.qa.small_models import seeded

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpuherd.lm.guidance.guide import ClassifierForm, Head, Kind  # noqa: E402
from gpuherd.lm.guidance.value_model import ReadingMaker, TreeReading, UncachedReading, ValueModel, width_of  # noqa: E402  # noqa: E402

FORM = ClassifierForm(Kind.V, Head.BERNOULLI, (), "", "")
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
COMMON: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2},
    "qwen2": SMALL,
}
SLIDING: dict[str, dict[str, Any]] = {
    "mistral": SMALL | {"sliding_window": 6},
    "gemma3_text": SMALL
    | {
        "head_dim": 8, "sliding_window": 4, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip


def body(kind: str, how: dict[str, Any], dtype: str = "float32", attention: str | None = None) -> ValueModel:
    """A random model of this kind without its head for tokens."""
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, **(how | ends), attn_implementation=attention)
    with seeded(3), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = transformers.AutoModel.from_config(config, dtype=getattr(torch, dtype)).eval()
    return ValueModel(module, FORM, width_of(module, kind))


def prompts(rows: int) -> tuple[Any, Any]:
    """Rows of unlike lengths, padded at the left by a token that is used elsewhere."""
    with seeded(0):
        ids = torch.randint(0, 64, (rows, 7))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 2 * row % 7] = 0
    return ids, mask


def furthest(maker: ReadingMaker, model: ValueModel, rows: int, steps: int) -> float:
    """The largest difference of a candidate's states from those of a plain reading, of the largest of them.

    On the way tokens are taken that were no candidates, a row ends, and rows are put in another order.
    """
    tree, plain = maker.new(rows), UncachedReading(model, rows)
    for reading in (tree, plain):
        reading.read(*prompts(rows))
    worst = 0.0
    with seeded(1), torch.inference_mode():
        for step in range(steps):
            candidates = torch.stack([torch.randperm(64)[:5] for _ in range(rows)])
            told, truth = tree.branch(candidates), plain.branch(candidates)
            assert torch.isfinite(told).all()
            worst = max(worst, float((told - truth).abs().max() / truth.abs().max()))
            taken = candidates[:, step % 5].clone()
            if step % 4 == 3:
                taken[-1] = next(token for token in range(64) if token not in candidates[-1].tolist())
            counts = torch.tensor([row != 1 or step < 6 for row in range(rows)])
            for reading in (tree, plain):
                reading.take(taken, counts)
                if step == 8:
                    reading.select(torch.tensor([0, *range(rows)][:rows]).flip(0))
    return worst


@pytest.mark.parametrize("kind", ["llama", "gpt2", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_cached_is_uncached(kind: str) -> None:
    model = body(kind, COMMON[kind])
    maker = ReadingMaker(model, kind)
    assert maker.keeps
    assert furthest(maker, model, 3, 10) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("kind", COMMON | SLIDING)
def test_cached_is_uncached_for_long_and_in_any_batch(kind: str, rows: int, dtype: str) -> None:
    model = body(kind, (COMMON | SLIDING)[kind], dtype)
    maker = ReadingMaker(model, kind)
    assert maker.keeps
    assert furthest(maker, model, rows, 24) < (1e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("kind", ["gemma3_text", pytest.param("mistral", marks=pytest.mark.slow)])
def test_windows_are_kept_to_and_the_tokens_behind_them_too(kind: str) -> None:
    model = body(kind, SLIDING[kind])
    maker = ReadingMaker(model, kind)
    assert maker.keeps
    assert furthest(maker, model, 2, 10) < 1e-5


def test_eager_attention_is_told_numbers_and_not_truths() -> None:
    model = body("llama", SMALL, attention="eager")
    maker = ReadingMaker(model, "llama")
    assert maker.keeps
    assert furthest(maker, model, 3, 4) < 1e-5


def test_a_model_whose_cache_can_not_is_read_anew_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Bloom's positions lie in its mask."""
    model = body("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2})
    maker = ReadingMaker(model, "bloom-7b")
    assert not maker.keeps
    assert isinstance(maker.new(2), UncachedReading)
    assert furthest(maker, model, 3, 4) == 0
    assert [each.getMessage() for each in caplog.records] == [
        "classifier bloom-7b: the layers of a BloomModel keep nothing that candidates could share, so every step reads "
        "all anew, which is slow"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_read_right_by_one_reading_or_the_other(kind: str) -> None:
    model = body(kind.removesuffix("_alibi"), KINDS[kind])
    maker = ReadingMaker(model, kind)
    assert furthest(maker, model, 3, 10) < 1e-4, maker.keeps


def test_a_reading_of_trees_keeps_one_place_a_token() -> None:
    """Of five candidates the chosen one stays, whatever was read beside it."""
    model = body("llama", SMALL)
    reading = ReadingMaker(model, "llama").new(2)
    assert isinstance(reading, TreeReading)
    with torch.inference_mode():
        reading.read(*prompts(2))
        for step in range(5):
            reading.branch(torch.arange(5).expand(2, -1))
            reading.take(torch.tensor([step, 0]), torch.tensor([True, True]))
    assert reading.mask.shape == (2, 12) and reading.mask.sum().item() == 22
