"""Answers by a real vLLM next to those of transformers: its CPU build, in an environment of its own (``make vllm``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.qa import small_models

from gpuherd.lm import vllm
from gpuherd.lm.backend import Decoding, PromptTokens
from gpuherd.lm.model import LanguageModel
from gpuherd.models.load.identity import reference
from gpuherd.models.load.options import ModelOptions
from gpuherd.models.memory.weights import Precision

_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
PYTHON = Path(os.environ.get("GPUHERD_VLLM_PYTHON", _CACHE / "gpuherd-vllm" / "bin" / "python"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: make vllm, or GPUHERD_VLLM_PYTHON ({PYTHON})"),
]
QUESTIONS, SAMPLES = 16, 40  # prompts of more tokens than vLLM reads at once


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained llama; vLLM's CPU attention has no heads that are narrower than 32."""
    return small_models.trained_llama(tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The same questions answered by both backends: the lines of answers.jsonl, each with the prompt's token ids."""
    folder = tmp_path_factory.mktemp("answers")
    questions = small_models.write_questions(folder / "facts.jsonl", QUESTIONS)
    found = {}
    for backend in ("transformers", "vllm"):
        words = ["--model", str(model), "--dataset", str(questions), "--runs-dir", str(folder / backend)]
        words += ["--backend", backend, "--dtype", "fp32", "--device-map", "cpu", "--greedy", "--samples", str(SAMPLES)]
        environment = {**os.environ, vllm.PYTHON: str(PYTHON), "VLLM_CPU_KVCACHE_SPACE": "1"}
        command = [sys.executable, "-m", "gpuherd", "generate", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (run,) = (folder / backend).iterdir()
        prompts = {line["id"]: line["token_ids"] for line in lines(run / "prompts.jsonl")}
        found[backend] = [{**line, "prompt": prompts[line["id"]]} for line in lines(run / "answers.jsonl")]
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_greedy_answers_and_their_log_probs_are_those_of_transformers(answers: dict[str, list[dict[str, Any]]]) -> None:
    assert len(answers["vllm"]) == len(answers["transformers"]) == QUESTIONS
    for theirs, ours in zip(answers["vllm"], answers["transformers"], strict=True):
        for name in ("id", "prompt"):
            assert theirs[name] == ours[name]
        for name in ("text", "finish", "token_ids", "ends", "end_id"):
            assert theirs["greedy"][name] == ours["greedy"][name]
        assert theirs["greedy"]["log_probs"] == pytest.approx(ours["greedy"]["log_probs"], abs=1e-4)
        assert theirs["greedy"]["end_log_prob"] == pytest.approx(ours["greedy"]["end_log_prob"], abs=1e-4)


def test_log_probs_of_draws_are_those_of_the_model(answers: dict[str, list[dict[str, Any]]], model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    judge = LanguageModel(AutoModelForCausalLM.from_pretrained(model), tokenizer)
    drawn = set()
    for line in answers["vllm"]:
        prompt = PromptTokens(line["id"], tuple(line["prompt"]))
        assert len(line["samples"]) == SAMPLES
        for sample in line["samples"]:
            drawn.add((line["id"], sample["text"]))
            tokens = [*sample["token_ids"], *([] if sample["end_id"] is None else [sample["end_id"]])]
            said = [*sample["log_probs"], *([] if sample["end_id"] is None else [sample["end_log_prob"]])]
            (forced,) = judge.log_probs([prompt], [tokens])
            assert said == pytest.approx(list(forced), abs=1e-4)
    assert len(drawn) > QUESTIONS  # they are draws, and not one answer again and again


def test_an_engine_that_was_asleep_answers_as_before(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CPU build frees nothing, and is asked all the same: it pauses, wakes up in parts and reads weights."""
    monkeypatch.setenv(vllm.PYTHON, str(PYTHON))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    options = ModelOptions(dtype=Precision.FP32, device_map="cpu")
    backend = vllm.VllmBackend(
        str(model), reference(str(model)), options, positions=64, rows=4, exact=False, sleeps=True
    )
    try:
        assert not backend.sleeps  # on a CPU
        asked = [PromptTokens("a", (5, 6, 7)), PromptTokens("b", (9, 4))]
        how = Decoding(greedy=True, samples=3, temperature=0.7, max_new_tokens=8, end_ids=(1,), seed=4)
        before = backend.decode(asked, how)
        backend.sleeps = True
        for _ in range(2):
            backend.sleep()
            backend.load_weights(model)
            assert backend.decode(asked, how) == before
    finally:
        backend.close()
