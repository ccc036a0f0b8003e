"""Arguments for vLLM, and how its answers become records, without vLLM; ``test_vllm_real`` runs it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gpuherd.errors import MissingExtra, UsageError
from gpuherd.lm.backend import Decoding, Finish
from gpuherd.lm.vllm import (
    chosen,
    drawn_settings,
    engine_settings,
    generation_of,
    greedy_settings,
    require,
    seed_of,
    visible_gpus,
)
from gpuherd.models.load.identity import reference
from gpuherd.models.load.options import ModelOptions

HOW = Decoding(samples=3, temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=9, end_ids=(1, 6), stop=("\n",), seed=4)


@dataclass
class Chosen:
    """As vLLM tells a token's log-prob."""

    logprob: float


@pytest.fixture(scope="module")
def tokenizer(trained: Path) -> Any:
    return AutoTokenizer.from_pretrained(trained)


def test_nothing_is_taken_over_and_log_probs_are_of_the_chosen_alone() -> None:
    greedy, drawn = greedy_settings(HOW), drawn_settings(HOW, "q")
    assert greedy["temperature"] == 0 and "n" not in greedy
    assert (drawn["n"], drawn["temperature"], drawn["top_p"], drawn["top_k"]) == (3, 0.7, 0.9, 20)
    for settings in (greedy, drawn):
        assert settings["logprobs"] == 0 and settings["max_tokens"] == 9
        assert settings["stop_token_ids"] == [1, 6] and settings["stop"] == ["\n"] and settings["ignore_eos"]


@given(st.integers(0, 2**40), st.text("ab\0\ud800"))
def test_each_prompt_has_a_seed_of_its_own(seed: int, prompt_id: str) -> None:
    assert 0 <= seed_of(seed, prompt_id) < 2**31
    assert seed_of(seed, prompt_id) == seed_of(seed, prompt_id)
    assert seed_of(seed, prompt_id) != seed_of(seed + 1, prompt_id)


def test_log_probs_are_float32_and_none_where_not_finite() -> None:
    told: list[dict[int, Any]] = [
        {5: Chosen(-0.1), 7: Chosen(-3.0)},
        {7: Chosen(float("-inf"))},
        {8: Chosen(float("nan"))},
    ]
    found = chosen([5, 7, 8], told)
    assert found[1:] == [None, None]
    assert found[0] == pytest.approx(-0.1, abs=1e-7) and found[0] != -0.1
    with pytest.raises(UsageError, match="no log-probs"):
        chosen([5], None)


def test_an_answer_ends_before_its_end_token(tokenizer: Any) -> None:
    ids = tokenizer(" New Delhi", add_special_tokens=False)["input_ids"]
    generation = generation_of(tokenizer, [*ids, 6], [-0.5] * len(ids) + [-0.25], HOW)
    assert generation.text == " New Delhi" and list(generation.token_ids) == ids
    assert (generation.end_id, generation.end_log_prob, generation.finish) == (6, -0.25, Finish.EOS)
    assert "".join(generation.pieces) == generation.text


def test_an_answer_ends_before_its_stop_string(tokenizer: Any) -> None:
    ids = tokenizer(" Paris\nQuestion", add_special_tokens=False)["input_ids"]
    generation = generation_of(tokenizer, ids, [-0.5] * len(ids), HOW)
    assert generation.text == " Paris" and generation.finish is Finish.STOP and generation.end_id is None
    assert len(generation.log_probs) == len(generation.token_ids) == len(generation.ends)


def test_an_answer_that_is_cut_by_its_length(tokenizer: Any) -> None:
    ids = tokenizer(" Paris", add_special_tokens=False)["input_ids"]
    assert generation_of(tokenizer, ids, [-0.5] * len(ids), HOW).finish is Finish.LENGTH


def test_gpus_that_a_job_was_given() -> None:
    assert [visible_gpus({"CUDA_VISIBLE_DEVICES": said}) for said in ("", "0", "GPU-a,GPU-b", "0,1,2")] == [0, 1, 2, 3]
    assert visible_gpus({}) == 1


def test_what_it_cannot_do_is_refused() -> None:
    said: list[dict[str, Any]] = [
        {"device_map": "auto"},
        {"adapter": "a"},
        {"allow_offload": "cpu"},
        {"merge_adapter": True},
        {"parallel": "layers"},
    ]
    for more in said:
        with pytest.raises(UsageError, match="is for --backend transformers"):
            require(ModelOptions(**more), "m")


def test_it_quantises_to_four_bits_alone() -> None:
    for model, more in (
        ("llama-3.1-8b-8bit", {}),
        ("org/name", {"quantization": "8bit"}),
        ("org/name", {"dtype": "int8"}),
    ):
        with pytest.raises(UsageError, match="in 8 bits is for --backend transformers"):
            require(ModelOptions(**more), model)  # type: ignore[arg-type]


def test_what_the_engine_is_made_of(trained: Path) -> None:
    def made(model: str, *, exact: bool = False, gpus: int = 2, **more: Any) -> dict[str, Any]:
        options = ModelOptions(**more)
        return engine_settings(model, reference(model), options, positions=120, rows=8, exact=exact, gpus=gpus)

    plain = made("org/name@main")
    assert (plain["model"], plain["revision"], plain["dtype"], plain["quantization"]) == (
        ("org/name", "main", "auto", None)
    )
    assert (plain["tensor_parallel_size"], plain["max_model_len"], plain["max_num_seqs"]) == (2, 120, 8)
    assert plain["logprobs_mode"] == "raw_logprobs" and plain["generation_config"] == "vllm"
    # The names of the guides, and what stands behind them.
    known = made("llama-3.1-70b-4bit")
    assert known["model"].startswith("meta-llama/") and known["quantization"] == "bitsandbytes"
    assert made(str(trained), dtype="bf16")["dtype"] == "bfloat16" and made(str(trained))["model"] == str(trained)
    # One sequence at a time, and nothing left over from another question.
    exact = made("org/name", exact=True, gpus=0)
    assert (exact["max_num_seqs"], exact["enable_prefix_caching"], exact["tensor_parallel_size"]) == (1, False, 1)
    assert plain["enable_prefix_caching"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_where_it_is_not_installed() -> None:
    with pytest.raises(MissingExtra, match="vLLM can't be imported"):
        require(ModelOptions(), "m")
