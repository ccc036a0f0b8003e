"""ExperimentConfig: what it accepts, what it refuses, and that it survives JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.esd.config import AnalysisOptions, ExperimentConfig
from gpuherd.options import Parser, add_options, build, words_of


def test_the_guides_example_runs_as_written() -> None:
    config = ExperimentConfig(
        mode="esd",
        model_list="models.csv",
        output_dir="./results",
        gpu_list=[0, 1, 2, 3],  # type: ignore[arg-type]  # the guide gives a list
        gpu_memory_threshold=500,
        max_checks=10,
    )
    assert config.gpu_ids == ("0", "1", "2", "3")
    assert config.gpu_memory_threshold == 500
    assert config.fix_fingers == "xmin_mid"
    assert config.evals_thresh == 1e-5
    assert config.bins == 100


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("num_gpus_per_job", "gpus_per_job", 2),
        ("gpu_mem_threshold", "gpu_memory_threshold", 1000),
        ("max_check", "max_checks", 3),
        ("gpus", "gpu_list", (2, 1)),
    ],
)
def test_aliases_are_keywords(alias: str, name: str, value: Any) -> None:
    given_by_alias = ExperimentConfig(single_model="gpt2", **{alias: value})
    assert given_by_alias == ExperimentConfig(single_model="gpt2", **{name: value})
    with pytest.raises(TypeError, match="same option"):
        ExperimentConfig(single_model="gpt2", **{alias: value, name: value})


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_chekcs"):
        ExperimentConfig(single_model="gpt2", max_chekcs=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "nothing to analyse"),
        ({"model_list": "a.csv", "single_model": "gpt2"}, "not both"),
        ({"single_model": "gpt2", "mode": "custom"}, "possible: esd"),
        ({"single_model": "gpt2", "fix_fingers": "median"}, "xmin_mid, xmin_peak, xmin_peak_wide, DKS"),
        ({"single_model": "gpt2", "device_map": "gpu"}, "auto, cpu, cuda"),
        ({"single_model": "gpt2", "evals_thresh": -1.0}, "evals_thresh"),
        ({"single_model": "gpt2", "evals_thresh": float("nan")}, "evals_thresh"),
        ({"single_model": "gpt2", "bins": 0}, "bins"),
        ({"single_model": "gpt2", "bins": 10**12}, "bins"),
        ({"single_model": "gpt2", "bins": 100.5}, "bins=100.5 is no int, as 100 is"),
        ({"single_model": "gpt2", "xmin_pos": "2"}, "xmin_pos='2' is no float, as 2.0 is"),
        ({"single_model": "gpt2", "evals_thresh": 10**400}, "evals_thresh"),
        ({"single_model": "gpt2", "farms": "no"}, "farms='no' is no bool, as False is"),
        ({"single_model": "gpt2", "embeddings": None}, "embeddings"),
        ({"single_model": "gpt2", "seed": 2**63}, "seed"),
        ({"single_model": "gpt2", "limit": 0}, "limit"),
        ({"single_model": "gpt2", "retries": -1}, "retries"),
        ({"single_model": "gpt2", "max_gpus": 0}, "max_gpus"),
        ({"single_model": ""}, "single_model"),
        ({"single_model": "a\0b"}, "single_model"),
        ({"model_list": "a.csv", "base_model": "gpt2"}, "source_model"),
    ],
)
def test_values_that_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        ExperimentConfig(**values)


def test_paths_may_be_path_objects() -> None:
    config = ExperimentConfig(model_list=Path("a.csv"), output_dir=Path("out"), log_dir=Path("logs"))
    assert (config.model_list, config.output_dir, config.log_dir) == ("a.csv", "out", "logs")


configs = st.builds(
    ExperimentConfig,
    model_list=st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1),
    gpu_list=st.lists(st.one_of(st.integers(0, 15), st.just("GPU-1234"))).map(tuple),
    max_gpus=st.integers(1, 64),
    fix_fingers=st.sampled_from(["xmin_mid", "xmin_peak", "DKS"]),
    evals_thresh=st.floats(0, 1e300),
    limit=st.none() | st.integers(1, 10**6),
    overwrite=st.booleans(),
    embeddings=st.booleans(),
    log_dir=st.none() | st.just("logs"),
)


@given(configs)
def test_json_round_trip(config: ExperimentConfig) -> None:
    assert ExperimentConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_from_dict_names_an_unknown_option() -> None:
    with pytest.raises(UsageError, match="'colour'"):
        ExperimentConfig.from_dict({"single_model": "gpt2", "colour": 1})


@given(configs, configs)
def test_the_convention_is_what_the_figures_depend_on(one: ExperimentConfig, other: ExperimentConfig) -> None:
    def figures(config: ExperimentConfig) -> tuple[object, ...]:
        return config.fix_fingers, config.evals_thresh, config.bins, config.embeddings

    assert (repr(one.convention_columns) == repr(other.convention_columns)) == (figures(one) == figures(other))


def test_one_number_in_three_types_is_one_convention() -> None:
    one = ExperimentConfig(single_model="x", xmin_pos=2, evals_thresh=0, delta=-0.0, bins=50, tpl=True)
    two: dict[str, Any] = {"xmin_pos": np.float32(2), "bins": np.int64(50), "tpl": np.bool_(True)}
    other = ExperimentConfig(single_model="x", evals_thresh=0.0, delta=0.0, **two)
    words = "--single-model x --xmin-pos 2 --evals-thresh 0 --delta 0 --bins 50 --tpl"
    typed = parsed(*words.split())
    assert one == other == typed
    texts = {repr(each.convention_columns) for each in (one, other, typed)}
    assert len(texts) == 1
    assert words_of(other, AnalysisOptions) == words_of(typed, AnalysisOptions)
    assert json.loads(json.dumps(other.to_dict())) == typed.to_dict()


def parsed(*words: str) -> ExperimentConfig:
    parser = Parser(prog="gpuherd esd")
    add_options(parser, ExperimentConfig)
    return build(ExperimentConfig, parser.parse_args(words))


@pytest.mark.parametrize(
    "words",
    [
        "--model-list m.csv --gpu-list 4 5 --gpu-mem-threshold 1000 --max-checks 15 --gpus-per-job 2 --device-map cpu",
        "--model_list m.csv --gpus 4 5 --gpu_memory_threshold 1000 --max_check 15 --num_gpus_per_job 2"
        " --device_map cpu",
        "--model_list=m.csv --gpus 4,5 --gpu-memory-threshold=1000 --max-check=15 --gpus_per_job=2 --device_map=cpu",
    ],
)
def test_both_guides_spellings_mean_the_same(words: str) -> None:
    config = parsed(*words.split())
    assert config.model_list == "m.csv"
    assert config.gpu_ids == ("4", "5")
    assert (config.gpu_memory_threshold, config.max_checks, config.gpus_per_job) == (1000, 15, 2)
    assert config.device_map == "cpu"


def test_flags_of_the_production_example() -> None:
    words = (
        "--mode esd --model-list production_models.csv --max-gpus 8 --gpu-mem-threshold 500 --max-checks 10"
        " --output-dir ./production_results --log-dir ./logs/production --fix-fingers xmin_mid --evals-thresh 1e-5"
        " --bins 100 --overwrite --no-parallel-gpu --limit 3 --dry-run --embeddings"
    )
    config = parsed(*words.split())
    assert config == ExperimentConfig(
        model_list="production_models.csv",
        max_gpus=8,
        max_checks=10,
        output_dir="./production_results",
        log_dir="./logs/production",
        overwrite=True,
        no_parallel_gpu=True,
        limit=3,
        dry_run=True,
        embeddings=True,
    )


@pytest.mark.parametrize("folder", ["", "a\0b", "a\udcffb"])
def test_folders_that_no_record_could_name(folder: str) -> None:
    with pytest.raises(UsageError, match="no usable name"):
        ExperimentConfig(single_model="gpt2", output_dir=folder)


def test_how_the_dispatcher_behaves_can_be_said_too() -> None:
    parser = Parser()
    add_options(parser, ExperimentConfig)
    words = "--single-model a --timeout 2h --yield requeue --max-concurrent 3 --min-disk 2GB --order age --heartbeat 1h"
    config = build(ExperimentConfig, parser.parse_args(words.split()))
    assert (config.timeout, config.yield_to_others, config.max_concurrent) == (7200.0, "requeue", 3)
    assert (config.min_disk, config.order, config.heartbeat) == (2048, "age", 3600.0)
    assert ExperimentConfig(single_model="a").order == "longest"
    assert ExperimentConfig.from_dict(config.to_dict()) == config
    with pytest.raises(UsageError, match="heartbeat"):
        ExperimentConfig(single_model="a", heartbeat=0)


def test_a_single_pattern_needs_no_list() -> None:
    assert AnalysisOptions(layers="*.0.*").layers == ("*.0.*",)  # type: ignore[arg-type]
    assert AnalysisOptions(exclude=["a", "b"]).exclude == ("a", "b")  # type: ignore[arg-type]
