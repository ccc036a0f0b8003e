"""GPUs for a model by its name: the planner's choice, among the GPUs as they are now."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuherd import gpus as api
from gpuherd.errors import JobCannotFit, UsageError
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.place.resources import auto_select_gpus_for_model
from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[[str], SimulatedMachine]


def test_the_fewest_that_the_plan_needs_idle_ones_first(standin: Standin) -> None:
    machine = standin("8x40GB")
    assert auto_select_gpus_for_model("llama-3.1-8b") == [0]
    assert len(auto_select_gpus_for_model("llama-3.1-70b", workload=Workload(batch=8))) == 4
    assert len(auto_select_gpus_for_model("llama-3.1-70b-8bit")) == 2
    machine.occupy(0, 3_000)
    (one,) = auto_select_gpus_for_model("llama-3.1-8b")
    assert one != 0


def test_a_busy_gpu_rather_than_one_more(standin: Standin) -> None:
    machine = standin("1x80GB+2x24GB")
    machine.occupy(0, 10_000)
    assert auto_select_gpus_for_model("llama-2-13b") == [0]


def test_one_replica_a_gpu_and_each_layer_over_all(standin: Standin) -> None:
    standin("4x40GB")
    assert auto_select_gpus_for_model("llama-3.1-8b", parallel="replica") == [0]
    assert auto_select_gpus_for_model("llama-3.1-8b", parallel="tensor") == [0, 1, 2, 3]


def test_what_fits_nowhere_now_is_refused_with_figures(standin: Standin) -> None:
    standin("2x40GB").occupy(0, 30_000)
    with pytest.raises(JobCannotFit, match=r"lacks .* GiB\. What would fit: ") as no:
        auto_select_gpus_for_model("llama-3.1-70b")
    assert isinstance(no.value, ValueError)


def test_words_that_mean_nothing(standin: Standin) -> None:
    standin("1x40GB")
    with pytest.raises(UsageError, match="'int3' is no dtype"):
        auto_select_gpus_for_model("llama-3.1-8b", dtype="int3")


def test_what_was_assumed_is_told(standin: Standin, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    standin("1x40GB")
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 100, "auto_map": {"AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert auto_select_gpus_for_model(str(tmp_path)) == [0]
    assert "bf16 is assumed" in caplog.text and "code of its own" in caplog.text


def test_without_gpus_none_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert auto_select_gpus_for_model("llama-3.1-8b") == []
    assert "no GPU is available" in caplog.text


def test_who_gives_a_name_for_a_size_is_told_where_to_go(standin: Standin) -> None:
    standin("1x40GB")
    with pytest.raises(JobCannotFit, match=r"gpuherd\.models\.place\.resources"):
        api.auto_select_gpus_for_model("llama-3.1-8b")
