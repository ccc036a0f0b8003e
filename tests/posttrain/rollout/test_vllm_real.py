"""Rollouts by a real vLLM: its CPU build, in an environment of its own (``make vllm``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lm.test_vllm_real import PYTHON
from tests.posttrain.rollout import by_vllm
from tests.qa import small_models

from gpuherd.lm import vllm
from gpuherd.posttrain.rollout.mismatch import Correction, importance_weights, mismatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks for it
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: make vllm, or GPUHERD_VLLM_PYTHON ({PYTHON})"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained llama; vLLM's CPU attention has no heads that are narrower than 32."""
    return small_models.trained_llama(tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, its last layer pushed a little."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("other")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        head = loaded.get_output_embeddings().weight
        head += 0.1 * torch.randn(head.shape, generator=generator)
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def drawn(model: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("drawn") / "drawn.json"
    here = {"PYTHONPATH": str(Path(__file__).parents[3]), vllm.PYTHON: str(PYTHON)}
    environment = {**os.environ, **here, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, by_vllm.__file__, str(model), str(other), str(file)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_draw_is_fixed_by_its_prefix_and_number(drawn: dict[str, Any]) -> None:
    whole = [[each["ids"] for each in group] for group in drawn["whole"]]
    assert [[each["ids"] for each in group] for group in drawn["rest"]] == [group[2:] for group in whole[1:]]
    assert len({tuple(ids) for group in whole for ids in group}) > 6  # they are draws
    assert drawn["short"][0][0]["ids"] == whole[0][0][:3]


def test_log_probs_are_the_trainers_at_the_sampling_temperature(drawn: dict[str, Any], model: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    for prompt, group in zip(drawn["prompts"], drawn["whole"], strict=True):
        for each in group:
            ids = torch.tensor([prompt + each["ids"]])
            with torch.no_grad():
                law = (trainer(ids).logits[0, len(prompt) - 1 : -1] / by_vllm.SAMPLING.temperature).log_softmax(-1)
            train = law.gather(1, torch.tensor(each["ids"])[:, None]).T
            sampler = torch.tensor([each["log_probs"]])
            assert sampler.tolist()[0] == pytest.approx(train.tolist()[0], abs=1e-4)
            figures = mismatch(train, sampler, torch.ones_like(train, dtype=torch.bool))
            assert figures is not None and abs(figures.kl) < 1e-4 and figures.gap < 1e-4
            weights = importance_weights(train, sampler, torch.ones_like(train), Correction.TOKEN)
            assert weights.tolist()[0] == pytest.approx([1.0] * len(each["ids"]), abs=1e-4)


def test_greedy_answers_are_the_most_probable_and_have_no_log_probs_at_that_temperature(
    drawn: dict[str, Any], model: Path
) -> None:
    from transformers import AutoModelForCausalLM

    trainer = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    for prompt, (only,) in zip(drawn["prompts"], drawn["greedy"], strict=True):
        with torch.no_grad():
            logits = trainer(torch.tensor([prompt + only["ids"]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == only["ids"]
        assert set(only["log_probs"]) == {None}


def test_an_adapter_answers(drawn: dict[str, Any], model: Path) -> None:
    """Its greedy answers' log-probs, at temperature 1, are PEFT's."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    adapted = PeftModel.from_pretrained(plain, drawn["adapter"])
    gaps = []
    for prompt, (only,) in zip(drawn["prompts"], drawn["adapted"], strict=True):
        ids = torch.tensor([prompt + only["ids"]])
        told = torch.tensor(only["log_probs"])
        for disabled in (False, True):
            with torch.no_grad(), adapted.disable_adapter() if disabled else nullcontext():
                law = adapted(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            found = law.gather(1, torch.tensor(only["ids"])[:, None])[:, 0]
            gaps.append((disabled, float((found - told).abs().max())))
    assert max(gap for disabled, gap in gaps if not disabled) < 1e-4
    assert max(gap for disabled, gap in gaps if disabled) > 1e-2


def test_an_evaluation_is_of_the_policy_that_answered(drawn: dict[str, Any], model: Path, other: Path) -> None:
    """The divergence is the exact one along vLLM's answers, measured when vLLM had ended."""
    from transformers import AutoModelForCausalLM

    found = drawn["evaluated"]
    assert found["left"] == [[], []]  # policy and reference were loaded, and no process of vLLM was there
    assert any("vLLM" in note for note in found["notes"])
    policy, reference = (AutoModelForCausalLM.from_pretrained(each, dtype="float32") for each in (other, model))
    kls = []
    for prompt, answers, log_probs in found["rows"]:
        for ids, recorded in zip(answers, log_probs, strict=True):
            with torch.no_grad():
                logits = [
                    each(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] for each in (policy, reference)
                ]
            mine, theirs = (each.double().log_softmax(-1) for each in logits)
            kls.append(float((mine.exp() * (mine - theirs)).sum()))
            law = (logits[0] / by_vllm.SAMPLING.temperature).log_softmax(-1)
            assert recorded == pytest.approx(law.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist(), abs=1e-4)
    assert len(kls) == 15 and sum(kls) > 0.01
    assert found["kl"] == pytest.approx(sum(kls) / len(kls), rel=1e-3)
