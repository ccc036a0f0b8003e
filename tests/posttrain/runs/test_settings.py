"""An experiment's settings: every key typed, nothing read and ignored, names settled."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import PostTrainingAlgorithms, ValueGuidedAlgorithms, algorithm_class, algorithms
from gpuherd.posttrain.config.composing import compose, said
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.runs.settings import NEUTRAL, Settings, absolute, settings_of
from gpuherd.posttrain.types import BackendName
from gpuherd.runs.records import jsonable


@cache
def shipped(*groups: str) -> dict[str, Any]:
    return compose(["experiment.name=x", *groups])


def composed(*words: str) -> Settings:
    """The settings of overrides; composed by Hydra once for each choice of groups, which takes a while."""
    chosen = [word for word in words if word.startswith(("algos=", "models=", "datasets="))]
    values = deepcopy(shipped(*chosen))
    for key, value in said([word for word in words if word not in chosen]).items():
        *path, last = key.split(".")
        place = values
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return settings_of(values)


def test_every_key_of_the_guides_and_their_origin_is_there() -> None:
    """The blocks as their configurations have them (the PITA code's own eta is the inverse of the papers')."""
    settings = composed(
        "algos=[PITA,QSharp,QSharp-HF,DPO,GRPO,GRPO-HF]",
        "rounds_of_training=2",
        "system={dtype:bf16,amp_dtype:bf16,attn_impl:eager,clear_cache_interval:10,use_parallel_execution:true}",
        "generation={max_new_tokens:2048,temperature:0.8,top_p:0.9,use_chat_template:true,batch_size:8}",
        "training={micro_batch_size:4,gradient_checkpointing:true,datasets:[gsm8k]}",
        "data_collection={samples_per_example:4,seed:42,max_examples:0,reward_batch_size:32,"
        "bradley_terry_sampling:true,bradley_terry_beta:1.0}",
        "evaluation.etas=[.25,.5,1,2,4,8]",
        "evaluation.datasets_by_train.gsm8k=[gsm8k,math]",
        "parallel_generation=true",
        "async_rounds=false",
        "resume_from=null",
        "job_priority=null",
        "algos.PITA={enabled:true,epochs:10,batch_size:24,max_batch_num_tokens:16384,num_workers:4,lr:2e-5,"
        "weight_decay:0,grad_clip:1,loss_type:bce,num_atoms:11,V_min:0,V_max:1,"
        "guidance:{eta:1,mode:bernoulli,top_k:20,use_cache:true}}",
        "algos.QSharp-HF={proxy_epochs:5,proxy_lr:2e-5,proxy_loss_type:bradley_terry,loss_type:mle,"
        "guidance:{mode:expectation}}",
        "algos.DPO={beta:0.1}",
        "algos.GRPO={samples_per_prompt:4,kl_coef:0.05}",
    )
    assert [each.name for each in settings.choices()] == ["PITA", "QSharp", "QSharp-HF", "DPO", "GRPO", "GRPO-HF"]
    options = {each.name: each.options for each in settings.choices()}
    assert options["PITA"].batch_size == 24 and options["PITA"].guidance.eta == 1
    assert options["GRPO"].kl_coef == 0.05
    assert settings.system.precision.dtype == "bfloat16" and settings.system.precision.amp_dtype == "bfloat16"
    assert settings.steps.micro_batch_size == 4 and settings.steps.clear_cache_interval == 10
    assert settings.evaluated_on("gsm8k") == ("gsm8k", "math")
    assert settings.generation.sampling(3).seed == 3


def test_what_is_shared_reaches_those_that_were_not_told_themselves() -> None:
    settings = composed(
        "algos=[PITA,QSharp]", "data_collection.samples_per_example=7", "algos.QSharp.samples_per_example=2"
    )
    assert [each.options.samples_per_example for each in settings.choices()] == [7, 2]
    with pytest.raises(UsageError, match=r"data_collection.bradley_terry_beta: none of QSharp reads it"):
        composed("algos=[QSharp]", "data_collection.bradley_terry_beta=2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algos.PITA.lrr=1"], "there is no key algos.PITA.lrr; did you mean algos.PITA.lr?"),
        (["algos.RPO.lr=1"], "algorithm 'RPO' is DPO with rpo_weight above 0"),
        (["algos.PITTA.lr=1"], "algorithm 'PITTA' is none of"),
        (["algos.PITA.guidance.eta=0"], "algos.PITA.guidance.eta=0.0; it is above 0"),
        (["algos.mine.algorithm=PITA", "algos.mine.lr=a"], "algos.mine.lr=a: it should be a number"),
        (["algos.PITA=3"], "algos.PITA=3: it should be a mapping"),
        (["algos=[]"], "no algorithm is enabled"),
        (["algos.PITA.enabled=false", "algos.QSharp.enabled=false"], "no algorithm is enabled"),
        (["models=[]"], "no models"),
        (["models=[]", "models.m.reference=gpt2"], "models.m.value is missing: algos.PITA trains a classifier from it"),
        (["datasets=[]"], "no data sets"),
        (["training.micro_batchsize=1"], "no key training.micro_batchsize; did you mean training.micro_batch_size?"),
        (["micro_batch_size=1"], "did you mean training.micro_batch_size?"),
        (["training.micro_batch_size=0"], "training.micro_batch_size=0; the least is 1"),
        (["rounds_of_training=0"], "rounds_of_training=0; the least is 1"),
        (["generation.temperature=0"], "generation.temperature=0.0; it is above 0"),
        (["generation.top_p=1.5"], "generation.top_p=1.5"),
        (["system.attn_impl=flash"], "system.attn_impl=flash: it is one of eager, sdpa, flash_attention_2"),
        (["system.dtype=int8"], "system.dtype=int8: it is one of"),
        (["evaluation.etas=[1,1]"], "evaluation.etas=[1.0, 1.0]: each is there once"),
        (["evaluation.etas=[0]"], "evaluation.etas=[0.0]; each is above 0"),
        (["evaluation.etas=[1,inf]"], "evaluation.etas: an infinite eta"),
        (["algos.PITA.guidance.eta=inf"], "algos.PITA.guidance.eta: an infinite eta"),
        (["evaluation.pass_at=[16]"], "evaluation.pass_at=[16]; each is"),
        (["evaluation.datasets_by_train.math=[math]"], "evaluation.datasets_by_train.math: nothing is trained on it"),
        (["parallel_generation=false", "data_collection.shards=2"], "parallel_generation=false with data_collection"),
        (["data_collection.shards=0"], "data_collection.shards=0; the least is 1"),
        (["experiment.name=../x"], "experiment.name='../x'"),
        (["evaluation.num_samples=0"], "evaluation.num_samples=0; the least is 1"),
        (["evaluation.kl_samples=99"], "evaluation.kl_samples=99; it is from 1 to the samples, "),
        (["training.lr=-1"], "training.lr=-1.0; it is above 0"),
        (["training.seed=1e30"], "training.seed=1000000000000000019884624838656; the least is -1e+15, and the most"),
        (["algos.GRPO.enabled=true", "algos.grpo.lr=1e-3"], "algos.grpo and algos.GRPO differ in case alone"),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as problem:
        composed(*words)
    assert message in str(problem.value)


def test_a_name_is_needed() -> None:
    with pytest.raises(UsageError, match=r"^experiment\.name is missing"):
        settings_of(compose())


def test_under_autocast_trained_weights_are_float32() -> None:
    system = composed().system
    assert (system.precision.dtype, system.training.dtype, system.training.amp_dtype) == (
        *("bfloat16", "float32", "bfloat16"),
    )
    plain = composed("system.amp_dtype=null").system
    assert plain.training == plain.precision and plain.precision.dtype == "bfloat16"


def test_an_algorithm_may_be_there_twice_under_names_of_ones_own() -> None:
    settings = composed("algos=[]", "algos.weak={algorithm:'q#',guidance:{eta:4}}", "algos.strong={algorithm:QSharp}")
    assert [(each.name, each.algorithm) for each in settings.choices()] == [("weak", "QSharp"), ("strong", "QSharp")]


def test_the_identity_is_of_all_that_results_depend_on() -> None:
    one = composed()
    assert one.identity() == composed().identity() != composed("training.seed=1").identity()
    assert one.identity() == composed("output_dir=/x", "job_priority=a.b", "resume_from=y").identity()
    assert one.identity() == composed("system.use_parallel_execution=false").identity()
    assert all(_has(jsonable(one), key) for key in NEUTRAL)
    by_function = composed("datasets.gsm8k.reward=own.py:score").identity()
    assert one.identity() == composed("datasets.gsm8k.reward_timeout=5").identity() != by_function
    assert by_function == composed("datasets.gsm8k.reward=own.py:score", "datasets.gsm8k.reward_timeout=5").identity()


def _has(values: Any, key: str) -> bool:
    for part in key.split("."):
        if part not in values:
            return False
        values = values[part]
    return True


def test_settings_are_json_and_back() -> None:
    settings = composed("algos=[PITA,GRPO]", "evaluation.datasets_by_train.gsm8k=[math]")
    assert read(Settings, jsonable(settings)) == settings


def test_the_two_kinds_of_algorithms() -> None:
    for name in algorithms():
        assert algorithm_class(name).guided == (name in ValueGuidedAlgorithms) != (name in PostTrainingAlgorithms)


def test_which_algorithms_collect() -> None:
    words = ["algos=[GRPO,PPO,SFT]", "algos.PPO.online=false", "algos.GRPO-HF.preferences=pairs.jsonl"]
    assert {each.name: each.collects for each in composed(*words).choices()} == {
        "GRPO": False,
        "PPO": True,
        "SFT": True,
        "GRPO-HF": False,
    }


def test_files_and_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.jsonl").touch()
    (tmp_path / "pairs.jsonl").touch()
    (tmp_path / "own.py").touch()
    settings = absolute(
        composed(
            "models=[]",
            "models.m={reference:./model,value:org/model}",
            "training.datasets=[data/mine.jsonl,gsm8k]",
            "evaluation.datasets_by_train={data/mine.jsonl:[math]}",
            "algos.GRPO-HF.preferences=pairs.jsonl",
            "datasets.gsm8k.reward=own.py:score",
            "datasets.math.reward=package.own:score",
        )
    )
    assert settings.dataset("gsm8k").reward == f"{tmp_path}/own.py:score"
    assert settings.dataset("math").reward == "package.own:score"
    with pytest.raises(UsageError, match=r"datasets\.x: reward='gone\.py:score': there is no file"):
        absolute(replace(settings, datasets={"x": replace(settings.dataset("math"), reward="gone.py:score")}))
    assert settings.models["m"].reference == str(tmp_path / "model") and settings.models["m"].value == "org/model"
    assert settings.trained_on() == ("mine", "gsm8k")
    assert settings.dataset("mine").task == str(tmp_path / "data" / "mine.jsonl")
    assert settings.evaluated_on("mine") == ("math",)
    assert settings.algos["GRPO-HF"]["preferences"] == str(tmp_path / "pairs.jsonl")
    with pytest.raises(UsageError, match="a data set is called mine already"):
        absolute(
            replace(settings, datasets={"mine": settings.datasets["gsm8k"]}, training=_on("data/mine.jsonl", settings))
        )


def _on(name: str, settings: Settings) -> Any:
    return replace(settings.training, datasets=(name,))


def test_data_sets_by_their_names_in_any_case() -> None:
    settings = composed("training.datasets=[GSM8K,star_graph]")
    assert settings.trained_on() == ("GSM8K", "star_graph")
    assert settings.dataset("GSM8K").task == "gsm8k" and settings.dataset("star_graph").task == "star_graph"


def test_what_vllm_could_not_sample_is_refused() -> None:
    vllm = "generation.backend=vllm"
    assert composed("algos=[SFT]", vllm).generation.backend is BackendName.VLLM
    # A draw's log-probs are learnt by: of the whole law alone, whether it is collected or drawn while it trains.
    assert composed("algos=[CD]", vllm, "generation.top_p=0.9").generation.top_p == 0.9
    for online in ("true", "false"):
        words = ("algos=[GRPO]", vllm, f"algos.GRPO.online={online}")
        assert composed(*words).generation.backend is BackendName.VLLM
        with pytest.raises(UsageError, match=r"algos\.GRPO learns by; set generation\.top_p=1 and generation\.top_k=0"):
            composed(*words, "generation.top_k=20")
    with pytest.raises(UsageError, match="no algorithm here samples answers"):
        composed("algos=[QSharp-HF]", vllm, "algos.QSharp-HF.preferences=pairs.jsonl")
    lora = ("algos=[SFT]", vllm, "algos.SFT.lora={r:4}", "rounds_of_training=2")
    assert composed(*lora).generation.backend is BackendName.VLLM
    with pytest.raises(UsageError, match=r"algos\.GRPO\.lora\.quantization=nf4 with generation\.backend=vllm"):
        composed("algos=[GRPO]", vllm, "algos.GRPO.lora={r:4,quantization:nf4}")


def test_evaluations_that_vllm_could_not_make_are_refused() -> None:
    vllm = "evaluation.backend=vllm"
    assert composed("algos=[GRPO]", vllm).evaluation.backend is BackendName.VLLM
    adapters = ("models.x.reference=org/x", "models.x.adapter=org/adapter", "algos.SFT.lora={r:4}")
    assert composed("algos=[SFT]", vllm, *adapters).evaluation.backend is BackendName.VLLM
    refused = {
        r"policies of algos\.PITA are guided": ("algos=[GRPO,PITA]", vllm),
        r"evaluation\.kl=k3 .* greedy answers": (
            "algos=[SFT]", vllm, "evaluation.kl=k3", "evaluation.greedy=true", "generation.temperature=0.5",
        ),
        r"evaluation\.kl=k1 .* cut draws": (
            "algos=[SFT]", vllm, "evaluation.kl=k1", "generation.top_p=0.9", "generation.temperature=0.5",
        ),
    }  # fmt: skip
    for message, words in refused.items():
        with pytest.raises(UsageError, match=message):
            composed(*words)
    assert composed("algos=[SFT]", vllm, "evaluation.kl=k3", "generation.temperature=0.5").evaluation.kl == "k3"


@pytest.mark.parametrize(
    ("words", "identity"),
    [
        ((), "b8f32fca4c325c32b92a1c0127c2f20104d9c91c279a4a5dafcfa5a4fa1c27ad"),
        (("generation.top_p=0.9",), "e53bc528004b03dca0998ba40aca8ed13cd93220d80eadc0742bb3e3371d90bf"),
        (
            ("algos=[GRPO,DPO,QSharp,PPO,SFT,GRPO-HF,REINFORCE,PITA,CD]",),
            "6df1af1612891dac3097b272769bf6f66ecc7debf3171a233e64560fc624dfd2",
        ),
        (
            ("datasets.x.task=arithmetic", "training.datasets=[x]"),
            "f360fe3f9c53cf3b1341322135e64a1aad895698831e6c8da473d0ae27208b9b",
        ),
    ],
)
def test_runs_of_earlier_versions_go_on(words: tuple[str, ...], identity: str) -> None:
    """Computed by a version without several GPUs a training, shards of evaluations, vLLM and reward functions."""
    assert settings_of(compose(["experiment.name=a", *words])).identity() == identity


@pytest.mark.parametrize(
    ("words", "identity"),
    [
        (
            ("data_collection.shards=4", "evaluation.shards=2"),
            "b435cae321dcb8868a2279bd0ccf8b232a6d55879f6f1ee8d8f4d5bbff325a1f",
        ),
        (("parallel_generation=false",), "8645a059de9e2819eea7109c5d64440e8b10b254d519bff4434e407b39e88f31"),
    ],
)
def test_runs_of_versions_in_which_shards_were_part_of_the_identity_go_on(
    words: tuple[str, ...], identity: str
) -> None:
    """Computed by such a version; now they are one run, however it is divided."""

    def named(*words: str) -> Settings:
        return settings_of(compose(["experiment.name=a", *words]))

    recorded = jsonable(named(*words))
    for now in (named(), named("data_collection.shards=3")):
        assert now.earlier_identity(recorded) == identity
        assert now.identity() == named(*words).identity()
    assert named("training.seed=1").earlier_identity(recorded) != identity


@pytest.mark.parametrize("word", ["generation.backend=vllm", "evaluation.backend=vllm", "algos.SFT.gpus=2"])
def test_what_changes_results_changes_the_identity(word: str) -> None:
    assert composed("algos=[SFT]", word).identity() != composed("algos=[SFT]").identity()
