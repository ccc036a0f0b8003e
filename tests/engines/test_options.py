"""Which engine, and what is asked of it: what goes with what, and that nothing is said in vain."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.batch.options import RunOptions
from gpuherd.engines.options import ENGINES, EngineOptions
from gpuherd.engines.registry import foreign
from gpuherd.errors import UsageError
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.options import foreign as foreign_to_jobs
from gpuherd.options import Parser, add_options, build, option_fields, words_of

SAID: dict[str, Any] = {
    "cpus_per_job": 8,
    "host_mem": 65536,
    "time_limit": 14400.0,
    "notice": 300.0,
    "at_most": 200,
    "node_gpus": "4xA100-80GB",
    "partition": "gpu",
    "account": "physics",
    "qos": "short",
    "constraint": "a100|h100",
    "gpu_type": "a100",
    "array_limit": 16,
    "ntasks_per_node": 4,
    "mpi": "pmix",
    "in_allocation": True,
    "slurm_args": ("--exclude=n3",),
    "setup": ("module load cuda",),
    "ray_address": "10.0.0.1:6379",
    "ray_resources": ("licence=1",),
}


def parsed(kind: type[Any], *words: str) -> Any:
    parser = Parser()
    add_options(parser, kind)
    return build(kind, parser.parse_args(words))


def test_all_options_are_known_here() -> None:
    assert {each.name for each in fields(EngineOptions)} >= {"engine", *SAID}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_option_is_taken_by_its_engines_and_by_no_other(engine: Any) -> None:
    for name, value in SAID.items():
        flag = f"--{name.replace('_', '-')}"
        if name in foreign(engine):
            with pytest.raises(UsageError, match=f"{flag} is for --engine .*, and this is {engine}"):
                EngineOptions(engine=engine, **{name: value})
        else:
            assert getattr(EngineOptions(engine=engine, **{name: value}), name) == value
    assert foreign("local") >= SAID.keys()
    assert not foreign("slurm") & foreign("ray") & SAID.keys()


def test_what_is_said_of_one_engine_names_it() -> None:
    for name, meant in (("partition", "slurm"), ("ray_address", "ray"), ("time_limit", "slurm or --engine ray.*")):
        with pytest.raises(UsageError, match=f"is for --engine {meant}, and this is local"):
            EngineOptions(**{name: SAID[name]})


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(UsageError, match="engine='pbs'; possible: local, slurm, ray"):
        DispatchOptions(engine="pbs")


def test_what_chooses_among_the_gpus_here_is_refused_elsewhere() -> None:
    for more, flag in (
        ({"gpu_list": ("0",)}, "--gpu-list"),
        ({"cpu_jobs": 2}, "--cpu-jobs"),
        ({"yield_to_others": "pause"}, "--yield"),
    ):
        with pytest.raises(UsageError, match=f"{flag} is for this machine's GPUs, and the engine is slurm"):
            DispatchOptions(engine="slurm", **more)
        assert next(iter(more)) in foreign_to_jobs("slurm") and next(iter(more)) not in foreign_to_jobs("local")
    # As a record in JSON has it.
    assert DispatchOptions(engine="slurm", gpu_list=[], setup=[]).setup == ()  # type: ignore[arg-type]


@given(st.sampled_from(("slurm", "ray")), st.sets(st.sampled_from(sorted(SAID))))
def test_options_survive_the_command_line(engine: Any, names: set[str]) -> None:
    told = {name: SAID[name] for name in names - foreign(engine) - {"slurm_args", "time_limit", "notice", "host_mem"}}
    options = EngineOptions(engine=engine, **told)
    assert parsed(EngineOptions, *words_of(options, EngineOptions)) == options


def test_a_single_command_has_no_options_of_many_jobs() -> None:
    options = RunOptions(engine="slurm", partition="gpu", time_limit=60.0)
    assert isinstance(options, EngineOptions) and (options.at_most, options.array_limit) == (1000, None)
    flags = {each.name for each, _ in option_fields(RunOptions)}
    assert not flags & {"cpus_per_job", "notice", "at_most", "array_limit"} and {"partition", "ray_address"} <= flags
    theirs = {each.name: each for each in fields(EngineOptions)}
    for each in fields(RunOptions):
        if each.name in theirs and each.name in flags and each.name != "host_mem":
            assert (each.default, each.metadata) == (theirs[each.name].default, theirs[each.name].metadata)


def test_what_a_job_says_of_itself_holds_anywhere() -> None:
    """``--host-mem`` of ``gpuherd run`` is the command's own wish, and has to be there on this machine too."""
    assert parsed(RunOptions, "--host-mem=2GB", "--cpus=2").host_mem == 2048
    with pytest.raises(UsageError, match="--host-mem is for --engine slurm or --engine ray"):
        EngineOptions(host_mem=2048)
    with pytest.raises(UsageError, match="--gpu-list is for this machine"):
        parsed(RunOptions, "--engine=slurm", "--gpu-list=0")
    with pytest.raises(UsageError, match="--mem is for this machine; slurm gives whole GPUs"):
        parsed(RunOptions, "--engine=slurm", "--mem=4GB")


@pytest.mark.parametrize(
    ("engine", "said"), [("slurm", {"partition": ""}), ("slurm", {"slurm_args": ("",)}), ("ray", {"ray_address": ""})]
)
def test_an_empty_word_is_refused_and_not_handed_on(engine: Any, said: dict[str, Any]) -> None:
    (name,) = said
    for options in (EngineOptions, RunOptions):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is empty; leave it out"):
            options(engine=engine, **said)
