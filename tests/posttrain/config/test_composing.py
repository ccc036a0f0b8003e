"""Shipped groups, a user's file, overrides: what goes before what, and what is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithms
from gpuherd.posttrain.config.composing import compose, groups, said
from gpuherd.posttrain.config.yaml_strict import read_yaml


def test_overrides_go_before_a_file_and_that_before_what_is_shipped(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [models: gpt2, override /algos: [GRPO, PITA]]\n"
        "generation: {temperature: 0.5, batch_size: 2}\n"
        "data_collection: {reward_batch_size: '${generation.batch_size}'}\n"
        "algos: {PITA: {lr: 1e-5}}\n"
    )
    found = compose(["experiment.name=x", "generation.temperature=0.7", "models=[gpt2,qwen3]"], file)
    assert found["experiment"] == {"name": "x"}
    assert found["generation"]["temperature"] == 0.7
    assert found["generation"]["batch_size"] == found["data_collection"]["reward_batch_size"] == 2
    assert found["generation"]["max_new_tokens"] == compose()["generation"]["max_new_tokens"]
    assert list(found["algos"]) == ["GRPO", "PITA"] and found["algos"]["PITA"]["lr"] == 1e-5
    assert list(found["models"]) == ["gpt2", "qwen3"]


def test_keys_need_not_be_in_the_yaml() -> None:
    found = compose(["algos.GRPO-HF.enabled=true", "+a.b=[1,2]", "~training.gradient_checkpointing", "x=null"])
    assert found["algos"]["GRPO-HF"] == {"enabled": True} and found["a"] == {"b": [1, 2]} and found["x"] is None
    assert "gradient_checkpointing" not in found["training"]
    for word in ("models=[]", "~models"):
        assert compose([word]).get("models", {}) == {}


def test_groups_are_those_of_the_registry() -> None:
    assert sorted(groups()["algos"]) == sorted(algorithms())
    assert {"llama32", "gpt2", "qwen3"} <= set(groups()["models"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["models=gpt3"], "models=gpt3: there is no such choice; did you mean gpt2?"),
        (["algos=[PITA,QSharpe]"], "algos=QSharpe: there is no such choice; did you mean QSharp?"),
        (["models=null"], "models=null: none of its choices is models=[]"),
        (["name"], "'name' is no override; write key=value"),
        (["seed=1,2"], "a sweep, which is not done; a list is [a,b]"),
        (["a=["], "a=[: no override"),
        (["~nothing"], "'nothing' does not exist"),
        (["+training.micro_batch_size=1"], "An item is already at 'training.micro_batch_size'"),
        (["a=${b.c}"], "Interpolation key 'b.c' not found"),
        (["hydra.run.dir=/tmp"], "Hydra only composes here"),
        (["a=???"], "a"),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as problem:
        compose(words)
    assert message in str(problem.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "line 2: the key 'a' is there twice"),
        ("hydra: {run: {dir: x}}", "there is no key hydra"),
        ("defaults: models", "defaults should be a list"),
        ("defaults: [gpt2]", "should be a group and its choice"),
        ("defaults: [model: gpt2]", "no group 'model'; did you mean models?"),
        ("defaults: [models: gpt3]", "no such choice; did you mean gpt2?"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as problem:
        compose([], file)
    assert message in str(problem.value)


def test_what_overrides_say_of_a_run_that_goes_on() -> None:
    assert said(["resume_from=a/b", "x.y=1"]) == {"resume_from": "a/b", "x.y": 1}
    for word in ("models=gpt2", "~x", "+x=1"):
        with pytest.raises(UsageError, match="a run that goes on has its own configuration"):
            said([word])


def test_the_guides_own_configuration_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "guide.yaml"
    file.write_text("""
system:
  attn_impl: eager               # Attention implementation (eager/flash_attention_2)
  clear_cache_interval: 10       # Clear GPU cache every N steps
  use_parallel_execution: true   # Enable multi-GPU parallel execution
training:
  micro_batch_size: 4            # Gradient accumulation micro-batches
  gradient_checkpointing: true   # Save memory at cost of speed
data_collection:
  reward_batch_size: 32          # Reward model batch size (was 2)
algos:
  PITA:
    enabled: true
    batch_size: 24               # Training batch size (was 16)
    num_workers: 4               # Data loader workers (was 2)
""")
    assert read_yaml(file)["algos"]["PITA"]["num_workers"] == 4
    assert compose([], file)["algos"]["PITA"] == {"enabled": True, "batch_size": 24, "num_workers": 4}
