"""SFT collects demonstrations or samples, leaves out what earned too little, and imitates."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.posttrain import tiny
from tests.posttrain.preference.vowels import ADAPTER, SAMPLING, Vowels, collecting, comparisons, episodes, training

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.algos.sft import SFT, Imitated, SFTObjective, Source, Weights, chosen, row_of
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.rollout.sampler import Sampler
from gpuherd.posttrain.types import Policy, Precision, Problem, Rollout, Row

# PEFT asks transformers by a name that is old there.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_its_name() -> None:
    assert algorithm_class("sft") is SFT
    assert SFT.Options().lr == 2e-5


def test_demonstrations(policy_model: Path) -> None:
    rows = list(SFT().collect(collecting(policy_model, 3)))
    assert [(each.problem, each.text, each.reward) for each in rows if isinstance(each, Rollout)] == [
        ("p0", "aeiou0", 0.625),
        ("p1", "aeiou1", 0.625),
        ("p2", "aeiou2", 0.625),
    ]

    class Nameless(Vowels):
        def problems(self, *_: Any) -> list[Problem]:
            return [Problem("n", "q")]

    with pytest.raises(UsageError, match="problem n has no answer that could be imitated; set source=samples"):
        list(SFT().collect(collecting(policy_model, task=Nameless())))


def said(row: Row) -> tuple[str, tuple[int, ...], float]:
    """What a rollout is but for the rounding of its log-probs."""
    assert isinstance(row, Rollout)
    return row.problem, row.ids, row.reward


def test_samples_are_the_same_in_any_division(policy_model: Path) -> None:
    sft = SFT(SFT.Options(source=Source.SAMPLES, samples_per_example=2))
    whole = list(sft.collect(collecting(policy_model, 4)))
    work = collecting(policy_model, 4)
    parts = [
        row
        for some in (work.problems[:1], work.problems[1:])
        for row in sft.collect(dataclasses.replace(work, problems=some))
    ]
    assert [said(row) for row in whole] == [said(row) for row in parts]
    assert len(whole) == 8
    again = list(sft.collect(dataclasses.replace(work, round=1)))
    assert [said(row) for row in again] != [said(row) for row in whole]


def test_what_is_learnt_from() -> None:
    rows = episodes()
    assert chosen(rows, SFT.Options()) == rows
    good = chosen(rows, SFT.Options(filter_low_reward=True, min_reward_threshold=0.5))
    assert [each.problem for each in good] == ["p2", "p3", "p4", "p5"]
    assert len(chosen(rows, SFT.Options(mode=Imitated.WORLD_MODEL))) == 4
    with pytest.raises(UsageError, match="nothing to learn from: of 6 rollouts: 6 earned too little"):
        chosen(rows, SFT.Options(filter_low_reward=True, min_reward_threshold=9.0))


def test_prompts_are_not_trained_on() -> None:
    episode = episodes(1)[0]
    row = row_of(episode, Weights(1.0, 0.0))
    assert row["input_ids"] == [*episode.prompt_ids, *episode.ids]
    assert row["labels"][:3] == [-100] * 3
    assert [label != -100 for label in row["labels"][3:]] == list(episode.by_policy)
    world = row_of(episode, Weights(0.0, 1.0))
    assert [label != -100 for label in world["labels"][3:]] == [not own for own in episode.by_policy]
    alone = dataclasses.replace(episode, by_policy=(True,) * len(episode.ids))
    with pytest.raises(UsageError, match="1 have no token to be learnt in mode world_model"):
        chosen([alone], SFT.Options(mode=Imitated.WORLD_MODEL))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_weights_of_a_step_sum_to_those_of_the_kinds(places: list[int]) -> None:
    """Whatever rows stand in it; a kind that a step has none of adds nothing."""
    rows = [episodes()[place] for place in places]
    items = SFTObjective(Weights(0.3, 2.0), "cpu").items(rows)
    own = all(each for row in rows for each in row.by_policy)
    assert sum(sum(each.weights) for each in items) / len(rows) == pytest.approx(0.3 + (0.0 if own else 2.0))


def test_nothing_stands_before_a_first_token() -> None:
    """Of a text that is imitated whole, by a tokenizer that begins none, the first token has no probability."""
    row = dataclasses.replace(episodes(3)[2], prompt_ids=())
    (item,) = SFTObjective(Weights(1.0, 0.0), "cpu").items([row])
    assert item.ids == row.ids
    assert item.weights == (0.0, *[1 / (len(row.ids) - 1)] * (len(row.ids) - 1))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"samples_per_example": 0}, "samples_per_example=0"),
        ({"bc_weight": -1.0}, "bc_weight=-1.*; the least is 0"),
        ({"mode": "combined", "bc_weight": 0.0, "world_model_weight": 0.0}, "nothing is learnt from"),
    ],
)
def test_bad_options(words: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SFT.Options(**words)


def test_bad_rows(policy_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="SFT: nothing was collected"):
        SFT().train(training(policy_model, [], tmp_path))
    with pytest.raises(UsageError, match="SFT learns from rows of Rollout, and was given a Comparison"):
        SFT().train(training(policy_model, comparisons(), tmp_path))
    long = dataclasses.replace(episodes(1)[0], prompt_ids=(5,) * 300)
    with pytest.raises(UsageError, match=r"a row has 307 tokens, .* has places for 256"):
        SFT().train(training(policy_model, [long], tmp_path))


@pytest.mark.slow
def test_it_imitates(policy_model: Path, tmp_path: Path) -> None:
    """What it has seen it says itself in the end."""
    sft = SFT(SFT.Options(lr=2e-2, epochs=80, batch_size=4))
    rows = list(sft.collect(collecting(policy_model, 4)))
    policy = sft.train(training(policy_model, rows, tmp_path))
    losses = [line["loss"] for line in read_curves(tmp_path)]
    assert losses[-1] < 0.1 < losses[0]
    sampler = Sampler(policy, Precision(), "cpu", SAMPLING)
    answers = sampler.rollouts(Vowels(), collecting(policy_model, 4).problems, 1, greedy=True)
    assert [each.text for each in answers] == ["aeiou0", "aeiou1", "aeiou2", "aeiou3"]
    assert all(each.finished for each in answers)


@pytest.mark.slow
def test_an_adapter(policy_model: Path, tmp_path: Path) -> None:
    """Is trained in place of the weights, and gone on with in the next round."""
    sft = SFT(SFT.Options(lr=1e-2, epochs=20, batch_size=4, lora=ADAPTER))
    rows = list(sft.collect(collecting(policy_model, 4)))
    first = sft.train(training(policy_model, rows, tmp_path / "0"))
    assert first == Policy(str(policy_model), adapter=str(tmp_path / "0" / "model"))
    sft.train(training(policy_model, rows, tmp_path / "1", policy=first))
    losses = [[line["loss"] for line in read_curves(tmp_path / each)] for each in ("0", "1")]
    assert losses[0][-1] < 0.1 * losses[0][0]
    assert losses[1][0] == pytest.approx(losses[0][-1], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [Precision("bfloat16"), Precision("float32", "bfloat16")])
def test_half_precision(precision: Precision, policy_model: Path, tmp_path: Path) -> None:
    sft = SFT(SFT.Options(lr=1e-2, epochs=10, batch_size=4))
    rows = list(sft.collect(collecting(policy_model, 4)))
    sft.train(training(policy_model, rows, tmp_path, precision=precision))
    losses = [line["loss"] for line in read_curves(tmp_path)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("mode", [Imitated.BEHAVIORAL_CLONING, Imitated.COMBINED])
def test_packed_rows_are_learnt_as_they_are_alone(policy_model: Path, tmp_path: Path, mode: Imitated) -> None:
    """The losses of steps, also of those behind a step that changed the weights."""
    curves = []
    for packing in (False, True):
        folder = tmp_path / str(packing)
        sft = SFT(SFT.Options(mode=mode, lr=1e-2, epochs=2, batch_size=6, packing=packing))
        sft.train(training(policy_model, episodes(), folder))
        curves.append(read_curves(folder))
    alone, packed = curves
    assert len(packed) == 2
    for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy"):
        assert [line[name] for line in packed] == pytest.approx([line[name] for line in alone], abs=1e-6, rel=1e-5), (
            name
        )
    assert SFT.Options(packing=True).identity() == SFT.Options().identity()


def test_fewer_tokens_are_read_where_rows_are_packed(policy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    from gpuherd.posttrain.engine import log_probs

    module = AutoModelForCausalLM.from_pretrained(policy_model)
    shapes = []
    real = log_probs.padded

    def padded(rows: Any, device: str, fill: int = 0) -> Any:
        made = real(rows, device, fill)
        shapes.append(tuple(made[0].shape))
        return made

    monkeypatch.setattr(log_probs, "padded", padded)
    short = dataclasses.replace(episodes(1)[0], ids=(4, 0), by_policy=(True, True), prompt_ids=(5,))
    rows = [dataclasses.replace(short, prompt_ids=(5,) * 7), short, short, short]
    losses = []
    for packing in (False, True):
        objective = SFTObjective(Weights(1.0, 0.0), "cpu", packing)
        losses.append(objective.loss(module, objective.items(rows)).total.item())
    assert shapes == [(4, 9), (2, 9)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_model_that_can_not_be_packed_is_refused(tmp_path: Path) -> None:
    """Before any step."""
    from transformers import MistralConfig, MistralForCausalLM

    folder = tmp_path / "windowed"
    tokenizer = tiny.character_tokenizer(folder)
    MistralForCausalLM(
        MistralConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                      num_attention_heads=2, num_key_value_heads=1, sliding_window=4, max_position_embeddings=64)
    ).save_pretrained(folder)  # fmt: skip
    with pytest.raises(UsageError, match=r"packing: .*windowed can't be packed: it attends in a window of 4 tokens"):
        SFT(SFT.Options(packing=True)).train(training(folder, episodes(), tmp_path))
    assert read_curves(tmp_path) == []
