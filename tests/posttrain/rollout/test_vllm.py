"""A policy behind the face that vLLM has, with our own decoding in its place; ``test_vllm_real`` runs vLLM."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.lm.vllm_stand_in import python_with_vllm
from tests.posttrain.letters import Letters

from gpuherd.errors import JobCannotFit, MissingExtra, UsageError
from gpuherd.gpus import query, visible
from gpuherd.gpus.state import Machine
from gpuherd.lm.backend import Decoded, Decoding, PromptTokens
from gpuherd.lm.guidance.guide import Guide
from gpuherd.lm.vllm import PYTHON
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.place import inventory
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.resources import read_with_precision, resources_of
from gpuherd.posttrain.rollout import vllm
from gpuherd.posttrain.rollout.loading import keeping_models
from gpuherd.posttrain.rollout.sampler import Prefix, Sampler, sampler_of
from gpuherd.posttrain.rollout.vllm import VllmSampler
from gpuherd.posttrain.types import BackendName, Collecting, Policy, Precision, Sampling, Split

HOW = Sampling(max_new_tokens=6, batch_size=4, seed=3, temperature=0.7)
TASK = Letters()
PROBLEMS = TASK.problems(Split.TRAIN, 5, 0)


class Engine:
    """Decodes by the model of a sampler, and notes what it was started with and asked for."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.started: list[int] = []
        self.asked: list[tuple[Sequence[PromptTokens], Decoding]] = []
        self.closed = 0

    def start(self, positions: int) -> Engine:
        self.started.append(positions)
        return self

    def decode(self, prompts: Sequence[PromptTokens], how: Decoding) -> Sequence[Decoded]:
        self.asked.append((prompts, how))
        return self.sampler.model.decode(prompts, replace(how, tempered=True))

    def record(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="module")
def hf(policy_model: Path) -> Sampler:
    return Sampler(Policy(str(policy_model)), Precision(), "cpu", HOW)


def behind(hf: Sampler, policy_model: Path, sampling: Sampling = HOW) -> tuple[VllmSampler, Engine]:
    engine = Engine(hf)
    made = VllmSampler(Policy(str(policy_model)), Precision(), "cpu", sampling, start=engine.start)
    return made, engine


def test_rollouts_are_those_of_the_backend_in_our_form(hf: Sampler, policy_model: Path) -> None:
    sampler, engine = behind(hf, policy_model)
    assert sampler.end_ids == hf.end_ids
    found = sampler.rollouts(TASK, PROBLEMS, 3, first_sample=1, stream="7")
    ours = hf.rollouts(TASK, PROBLEMS, 3, first_sample=1, stream="7")
    assert [replace(each, log_probs=()) for each in found] == [replace(each, log_probs=()) for each in ours]
    for one, other in zip(found, ours, strict=True):  # other batches: the last bits may differ
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    ((prompts, how),) = engine.asked  # all at once: vLLM makes its own batches
    assert len(prompts) == 5 and (how.samples, how.first_sample, how.tempered) == (3, 1, True)
    assert engine.started == [256]


def test_it_starts_once_and_again_for_a_longer_prompt(
    hf: Sampler, policy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_STEP", 8)
    sampler, engine = behind(hf, policy_model)
    assert sampler.continuations([]) == []
    assert engine.started == []
    for length in (2, 1, 2, 4, 10):  # and six tokens behind it
        sampler.continuations([Prefix("a", (5,) * length)])
    assert engine.started == [8, 16] and engine.closed == 1  # never two in memory
    sampler.release()
    sampler.release()
    assert engine.closed == 2


def test_a_prompt_that_leaves_no_room_is_refused(hf: Sampler, policy_model: Path) -> None:
    sampler, _ = behind(hf, policy_model)
    assert sampler.places is not None
    with pytest.raises(UsageError, match="the model has places for"):
        sampler.continuations([Prefix("a", (5,) * sampler.places)])


@pytest.mark.parametrize(
    ("changes", "greedy", "tempered", "known"),
    [
        ({}, False, True, True),
        ({}, True, True, False),  # vLLM's greedy log-probs are at temperature 1
        ({"temperature": 1.0}, True, True, True),
        ({"top_p": 0.9}, False, False, False),
        ({"top_k": 3, "temperature": 1.0}, False, False, True),
    ],
)
def test_log_probs_are_kept_where_they_are_of_the_whole_law_at_the_temperature(
    hf: Sampler, policy_model: Path, changes: dict[str, Any], greedy: bool, tempered: bool, known: bool
) -> None:
    sampler, engine = behind(hf, policy_model, replace(HOW, **changes))
    ((only,),) = sampler.continuations([Prefix("a", (5, 6))], greedy=greedy)
    assert engine.asked[0][1].tempered is tempered
    assert len(only.log_probs) == len(only.ids) and (None not in only.log_probs) is known


def test_policies_that_it_can_not_decode_are_refused(policy_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"decodes no guided policy .* set generation\.backend=hf"):
        VllmSampler(Policy(str(policy_model), guide=Guide("folder", 0.1)), Precision(), "cpu", HOW)
    for name, value in (("use_dora", True), ("modules_to_save", ["lm_head"]), ("bias", "all")):
        adapter = tmp_path / name
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, name: value}))
        with pytest.raises(UsageError, match=rf"vLLM knows no adapter with {name}=.*gpuherd merge"):
            VllmSampler(Policy(str(policy_model), str(adapter)), Precision(), "cpu", HOW, start=Engine.start)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_an_adapter_answers(policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does by transformers, with a stand-in for vLLM in a process of its own."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv(PYTHON, str(python_with_vllm(tmp_path)))
    config = LoraConfig(r=12, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(policy_model), config).save_pretrained(tmp_path / "adapter")
    policy = Policy(str(policy_model), str(tmp_path / "adapter"))
    sampler = VllmSampler(policy, Precision(), "cpu", replace(HOW, temperature=1.0))
    prefixes = [Prefix("a", (5, 6, 7)), Prefix("b", (9,))]
    found = sampler.continuations(prefixes, greedy=True)
    sampler.release()
    ours = Sampler(policy, Precision(), "cpu", replace(HOW, temperature=1.0))
    for (one,), (other,) in zip(found, ours.continuations(prefixes, greedy=True), strict=True):
        assert one.ids == other.ids and one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    plain = Sampler(Policy(str(policy_model)), Precision(), "cpu", replace(HOW, temperature=1.0))
    assert plain.continuations(prefixes, greedy=True) != ours.continuations(prefixes, greedy=True)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_collection_names_its_backend(policy_model: Path) -> None:
    policy = Policy(str(policy_model))
    work = Collecting(TASK, PROBLEMS, policy, policy, 0, HOW, Precision(), "cpu")
    assert isinstance(sampler_of(work), Sampler)
    with keeping_models(), pytest.raises(MissingExtra, match=r"generation\.backend=vllm: vLLM can't be imported"):
        sampler_of(replace(work, backend=BackendName.VLLM))


def test_its_share_of_the_gpu_is_the_plans(policy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences or longer ones take more of it, and never all; without a GPU that is known, vLLM's largest."""
    cards = [GpuSpec("0", "8GB", 8 << 30, 8 << 30)]
    monkeypatch.setattr(inventory, "idle_gpus", lambda gpus: tuple(cards))
    monkeypatch.setattr(query, "machine", lambda **_: Machine())
    monkeypatch.setattr(visible, "visible_now", lambda gpus: gpus)

    def share(rows: int, positions: int) -> float:
        return vllm.planned_share(str(policy_model), "float32", replace(HOW, batch_size=rows), positions)

    architecture, precision = read_with_precision(str(policy_model), "float32")
    planned = resources_of(architecture, precision, Workload(4, 250, 6), cards, parallel="replica", most=1)
    assert share(4, 256) == vllm.share_of(planned.memory_mb << 20, 8 << 30)
    assert 0 < share(4, 256) < share(1024, 256) < share(1024, 512) <= 0.95
    with pytest.raises(JobCannotFit, match=r"needs 8\.5 GiB on 1 GPU of 8\.0 GiB"):
        share(4096, 512)
    cards.clear()
    assert share(4, 256) == 0.95
