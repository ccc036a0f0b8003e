"""Packed rows are learnt as they are alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.memory.training_meter import Meter

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.packing import PADDING, attention_mask, mask_bytes, pack, plan, refusal

NOT_TRAINED = -100
LENGTHS = st.lists(st.integers(0, 16), max_size=40)


def first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The same by looking through all sequences."""
    found: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        fits = (some for some in found if sum(lengths[each] for each in some) + lengths[row] <= capacity)
        some = next(fits, None)
        if some is None:
            found.append(some := [])
        some.append(row)
    return found


@given(LENGTHS)
def test_a_plan_is_first_fit_decreasing(lengths: list[int]) -> None:
    found = plan(lengths, 16)
    assert found == first_fit(lengths, 16)
    assert sorted(row for some in found for row in some) == list(range(len(lengths)))


def test_many_rows_are_planned_and_a_long_one_is_refused() -> None:
    lengths = [(37 * number) % 500 + 1 for number in range(20_000)]
    found = plan(lengths, 1000)
    assert len(found) * 1000 < 1.01 * sum(lengths) + 1000
    with pytest.raises(UsageError, match="row 2 has 9 tokens, and a packed sequence 8"):
        plan([3, 9, 1], 8)


@given(st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=8), min_size=1, max_size=9))
def test_every_row_stands_there_once_with_its_own_positions(ids: list[list[int]]) -> None:
    sequences = pack([len(row) for row in ids], 12, multiple=4)
    assert len({each.length for each in sequences}) == 1
    assert sequences[0].length % 4 == 0
    for each in sequences:
        input_ids, labels = each.laid(ids, 0), each.learnt(ids, NOT_TRAINED)
        assert len(input_ids) == len(labels) == len(each.segments) == len(each.position_ids) == each.length
        for segment, row in enumerate(each.rows):
            places = [place for place, found in enumerate(each.segments) if found == segment]
            assert [input_ids[place] for place in places] == ids[row]
            assert [each.position_ids[place] for place in places] == list(range(len(ids[row])))
            assert [labels[place] for place in places] == [NOT_TRAINED, *ids[row][1:]]
        empty = [place for place, found in enumerate(each.segments) if found == PADDING]
        assert all(labels[place] == NOT_TRAINED for place in empty)
    assert sorted(row for each in sequences for row in each.rows) == list(range(len(ids)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_and_its_gradients_are_those_of_rows_one_by_one(policy_model: Path, attention: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(policy_model, dtype="float32", attn_implementation=attention)
    lengths = [5, 11, 3, 8, 2, 7]
    rows = [[(7 * row + 3 * place) % 90 + 5 for place in range(length)] for row, length in enumerate(lengths)]
    labels = [[NOT_TRAINED] * (len(ids) // 3) + ids[len(ids) // 3 :] for ids in rows]

    def summed(**words: Any) -> tuple[Any, dict[str, Any]]:
        """The sum of -ln p over learnt tokens, and its gradients."""
        targets = words.pop("labels")[:, 1:]
        model.zero_grad()
        logits = model(**words, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_TRAINED, reduction="sum"
        )
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), {name: each.grad.clone() for name, each in model.named_parameters()}

    pairs = list(zip(rows, labels, strict=True))
    alone = [summed(input_ids=torch.tensor([ids]), labels=torch.tensor([own])) for ids, own in pairs]
    packed = pack(lengths, 16)
    assert len(packed) < len(rows)
    ids = torch.tensor([each.laid(rows, 1) for each in packed])
    targets = torch.tensor([each.learnt(labels, NOT_TRAINED) for each in packed])
    loss, gradients = summed(
        input_ids=ids,
        labels=targets,
        position_ids=torch.tensor([each.position_ids for each in packed]),
        attention_mask=attention_mask(torch.tensor([each.segments for each in packed]), torch.float32),
    )
    learnt = sum(label != NOT_TRAINED for own in labels for label in own[1:])
    assert loss / learnt == pytest.approx(sum(each for each, _ in alone) / learnt, abs=1e-6)
    for name, gradient in gradients.items():
        wanted = sum(each[name] for _, each in alone)
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5 * max(1.0, float(wanted.abs().max())))
    # The test would see it: with a causal mask alone rows look at each other.
    leaking, _ = summed(input_ids=ids, labels=targets)
    assert abs(leaking - loss) > 1e-2


def config(**fields: Any) -> Any:
    text = SimpleNamespace(**fields)
    return SimpleNamespace(get_text_config=lambda: text)


def test_models_that_look_further_than_a_mask_are_refused() -> None:
    assert refusal(config(model_type="llama"), "sdpa") is None
    assert refusal(config(layer_types=["full_attention"] * 2, sliding_window=None), "eager") is None
    assert refusal(config(sliding_window=4096, use_sliding_window=False), "sdpa") is None
    for told, attention, reason in (
        (config(model_type="llama"), "flash_attention_2", "takes no mask of blocks"),
        (config(layer_types=["full_attention", "sliding_attention"]), "sdpa", "layers of sliding_attention"),
        (config(sliding_window=4096), "sdpa", "a window of 4096 tokens"),
        (config(model_type="falcon_mamba"), "sdpa", "keep a state"),
    ):
        assert reason in (refusal(told, attention) or "")


@pytest.mark.parametrize(("sequences", "dtype"), [(1, "float32"), (4, "float32"), (4, "bfloat16")])
def test_what_a_mask_has_in_memory_is_what_is_planned(sequences: int, dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)
    segments = torch.tensor([pack([100, 60, 40], 256, multiple=256)[0].segments] * sequences)
    with Meter() as meter:
        meter.add(segments)
        before = meter.now
        mask = attention_mask(segments, kind)
        real = meter.peak - before
    assert mask.shape == (sequences, 1, 256, 256)
    assert real <= mask_bytes(sequences, 256, kind.itemsize) < 1.3 * real
