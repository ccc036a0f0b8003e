"""Arguments for vLLM, and how its answers become records, without vLLM; ``test_vllm_real`` runs it."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lm.vllm_stand_in import processes, python_with_vllm
from tests.qa import small_models
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpuherd.errors import MissingExtra, UsageError
from gpuherd.lm import vllm
from gpuherd.lm.backend import Decoding, Finish, PromptTokens
from gpuherd.lm.vllm import (
    PYTHON,
    TESTED,
    VllmBackend,
    VllmFailed,
    drawn_settings,
    engine_settings,
    environment_of,
    generation_of,
    greedy_settings,
    in_float32,
    installed_version,
    require,
    seed_of,
    visible_gpus,
)
from gpuherd.models.load.identity import reference
from gpuherd.models.load.options import ModelOptions
from gpuherd.models.memory.weights import Precision

HOW = Decoding(samples=3, temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=9, end_ids=(1, 6), stop=("\n",), seed=4)


@pytest.fixture(scope="module")
def tokenizer(trained: Path) -> Any:
    return AutoTokenizer.from_pretrained(trained)


def test_nothing_is_taken_over_and_log_probs_are_of_the_chosen_alone() -> None:
    greedy, drawn = greedy_settings(HOW), drawn_settings(HOW, "q")
    assert greedy["temperature"] == 0 and "n" not in greedy
    assert (drawn["n"], drawn["temperature"], drawn["top_p"], drawn["top_k"]) == (3, 0.7, 0.9, 20)
    assert drawn["detokenize"] and not greedy_settings(replace(HOW, stop=()))["detokenize"]  # for stop strings alone
    for settings in (greedy, drawn):
        assert settings["logprobs"] == 0 and settings["max_tokens"] == 9
        assert settings["stop_token_ids"] == [1, 6] and settings["stop"] == ["\n"] and settings["ignore_eos"]


@given(st.integers(0, 2**40), st.text("ab\0\ud800"))
def test_each_prompt_has_a_seed_of_its_own(seed: int, prompt_id: str) -> None:
    assert 0 <= seed_of(seed, prompt_id) < 2**31
    assert seed_of(seed, prompt_id) == seed_of(seed, prompt_id)
    assert seed_of(seed, prompt_id) != seed_of(seed + 1, prompt_id)


def test_log_probs_are_float32_and_none_where_not_finite() -> None:
    found = in_float32([-0.1, float("-inf"), float("nan")])
    assert found[1:] == [None, None]
    assert found[0] == pytest.approx(-0.1, abs=1e-7) and found[0] != -0.1
    with pytest.raises(UsageError, match="no log-probs"):
        in_float32(None)


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
    def made(
        model: str, *, exact: bool = False, gpus: int = 2, attention: str | None = None, **more: Any
    ) -> dict[str, Any]:
        options, ref = ModelOptions(**more), reference(model)
        return engine_settings(model, ref, options, positions=120, rows=8, exact=exact, gpus=gpus, attention=attention)

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
    # A generator of the CPU can't be turned back behind a part of a prompt.
    assert "enable_chunked_prefill" not in plain and not made("m", device_map="cpu")["enable_chunked_prefill"]
    # It knows one attention of transformers' by name, on GPUs.
    assert made("org/name", attention="flash_attention_2")["attention_config"]["backend"] == "FLASH_ATTN"
    assert "attention_config" not in made("org/name", attention="eager")
    assert "attention_config" not in made("org/name", attention="flash_attention_2", device_map="cpu")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingExtra, match=rf"vLLM can't be imported \(it is not installed\).*{PYTHON}"):
        require(ModelOptions(), "m")
    for python, problem in ((f"{sys.executable}-none", "is no program"), (str(tmp_path / "other"), "has none")):
        monkeypatch.setenv(PYTHON, python)
        (tmp_path / "other").symlink_to(sys.executable)
        with pytest.raises(MissingExtra, match=rf"{PYTHON}=.* {problem}"):
            require(ModelOptions(), "m")
        (tmp_path / "other").unlink()


# --- in a process -----------------------------------------------------------------------------------------------------

DRAWN = Decoding(greedy=True, samples=3, temperature=0.7, max_new_tokens=5, end_ids=(1,), seed=4, tempered=True)
ASKED = [PromptTokens("a", (5, 6, 7)), PromptTokens("b", (9,), most=2)]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is found in another Python."""
    monkeypatch.setenv(PYTHON, str(python_with_vllm(tmp_path)))


def started(model: Path, **more: Any) -> VllmBackend:
    options = ModelOptions(dtype=Precision.FP32, device_map="cpu")
    return VllmBackend(
        str(model), reference(str(model)), options, positions=16, rows=4, exact=False, tempered=True, **more
    )


def worst(backend: VllmBackend, model: Path) -> float:
    """How far recorded log-probs of draws are from a model's."""
    import torch

    judge = AutoModelForCausalLM.from_pretrained(model)
    gaps = []
    for prompt, answer in zip(ASKED, backend.decode(ASKED, DRAWN), strict=True):
        assert len(answer.samples) == 3 and answer.greedy is not None
        for each in answer.samples:
            ended = each.end_id is not None
            ids = [*each.token_ids, *([each.end_id] if ended else [])]
            told = torch.tensor([*each.log_probs, *([each.end_log_prob] if ended else [])])
            assert 0 < len(ids) <= (prompt.most or DRAWN.max_new_tokens)
            with torch.no_grad():
                logits = judge(torch.tensor([[*prompt.token_ids, *ids]])).logits[0, len(prompt.token_ids) - 1 : -1]
            law = (logits / DRAWN.temperature).log_softmax(-1)
            gaps.append(float((law.gather(1, torch.tensor(ids)[:, None])[:, 0] - told).abs().max()))
    return max(gaps)


@pytest.mark.usefixtures("stand_in")
def test_it_decodes_in_a_process_of_its_own_and_takes_other_weights(trained: Path, tmp_path: Path) -> None:
    other = small_models.random_llama(tmp_path / "other", seed=3, spread=0.2)
    backend = started(trained)
    assert len(processes(os.getpid())) == 1
    assert backend.record() == {
        "engine": "vllm",
        "versions": {"vllm": "0.0.stand-in", "torch": torch_version()},
        "dtype": "float32",
    }
    before = backend.decode(ASKED, DRAWN)
    assert backend.decode(ASKED, DRAWN) == before
    assert worst(backend, trained) < 1e-4
    backend.load_weights(other)
    assert worst(backend, other) < 1e-4
    with pytest.raises(VllmFailed, match=r"vLLM 0\.0\.stand-in can't change its weights in place \(vLLM: OSError"):
        backend.load_weights(tmp_path / "missing")
    backend.load_weights(other)
    backend.sleep()  # nobody has said that it sleeps
    assert not backend.sleeps and worst(backend, other) < 1e-4
    backend.close()
    backend.close()
    assert not processes(os.getpid())
    with pytest.raises(VllmFailed, match="vLLM has ended"):
        backend.decode(ASKED, DRAWN)


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_what_sleeps_has_no_weights_but_those_that_it_is_woken_with(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = small_models.random_llama(tmp_path / "other", seed=3, spread=0.2)
    backend = started(trained, sleeps=True)
    assert backend.sleeps
    before = backend.decode(ASKED, DRAWN)
    for model in (trained, other):
        backend.sleep()
        backend.sleep()
        with pytest.raises(VllmFailed, match="vLLM sleeps, and has no weights"):
            backend.decode(ASKED, DRAWN)
        backend.load_weights(model)
        assert worst(backend, model) < 1e-4
        assert (backend.decode(ASKED, DRAWN) == before) == (model == trained)
    backend.close()
    said = capfd.readouterr()
    assert not said.out and "loading" in said.err  # what vLLM prints is none of this process's output


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_where_the_platform_can_not_sleep_it_stays_awake(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_AWAKE", "1")
    backend = started(trained, sleeps=True)
    backend.sleep()
    assert not backend.sleeps and backend.decode(ASKED, DRAWN)
    backend.close()


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_another_interface_is_told_with_the_version_that_has_this_one(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installed_version() == "0.0.stand-in"
    monkeypatch.setenv("STAND_IN_VERSION", "0.9.1")
    with pytest.raises(MissingExtra, match=rf"vLLM 0\.9\.1 has another .*'logprobs_mode'.*; install vLLM {TESTED}$"):
        started(trained)
    assert not processes(os.getpid())


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("variable", "told"),
    [
        pytest.param("STAND_IN_STOPS", "gave no sign for 2 s", marks=pytest.mark.slow),
        ("STAND_IN_DIES", "ended with exit code 3"),
    ],
)
def test_what_hangs_or_dies_in_a_step_is_ended(
    trained: Path, monkeypatch: pytest.MonkeyPatch, variable: str, told: str
) -> None:
    monkeypatch.setenv(variable, "4")
    monkeypatch.setattr(vllm, "_SILENT_S", 2.0)
    backend = started(trained)
    with pytest.raises(VllmFailed, match=told):
        backend.decode(ASKED, DRAWN)
    assert not processes(os.getpid())
    with pytest.raises(VllmFailed, match="vLLM has ended"):
        backend.decode(ASKED, DRAWN)


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_what_goes_on_may_take_its_time(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_STEP_S", "0.5")
    monkeypatch.setattr(vllm, "_SILENT_S", 5.0)
    backend = started(trained)
    begun = time.monotonic()
    assert backend.decode(ASKED, DRAWN)
    assert time.monotonic() - begun > 5.0
    backend.close()


def torch_version() -> str:
    import torch

    return str(torch.__version__)


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_a_process_that_is_killed_is_told_and_one_whose_parent_is_killed_ends(trained: Path, tmp_path: Path) -> None:
    backend = started(trained)
    (child,) = processes(os.getpid())
    os.kill(child, signal.SIGKILL)
    with pytest.raises(VllmFailed, match="vLLM's process was ended by SIGKILL"):
        backend.decode(ASKED, DRAWN)
    program = "import sys, time; from pathlib import Path; from tests.lm.test_vllm import started; " + (
        "kept = started(Path(sys.argv[1]), scratch=[Path(sys.argv[2])]); print('there', flush=True); time.sleep(600)"
    )
    (tmp_path / "weights").mkdir()
    words = [sys.executable, "-c", program, str(trained), str(tmp_path / "weights")]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"there\n"
        assert len(processes(parent.pid)) == 1
    finally:
        parent.kill()
        parent.communicate()
    deadline = time.monotonic() + 20
    while processes(parent.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes(parent.pid) and not (tmp_path / "weights").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_what_does_not_start_leaves_no_process(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(VllmFailed, match="ValueError: Unrecognized model"):
        VllmBackend(
            str(trained), reference(str(tmp_path / "empty")), ModelOptions(device_map="cpu"),
            positions=16, rows=4, exact=False,
        )  # fmt: skip
    assert not processes(os.getpid())


def test_its_environment_is_that_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    training = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "PYTHONPATH": "here", "PATH": "/bin"}
    alone = {"PYTHONPATH": "here", "PATH": "/bin", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    alone["VLLM_LOGGING_LEVEL"] = "WARNING"
    assert environment_of(training, None) == alone
    assert environment_of(training, 1) == {**alone, "CUDA_VISIBLE_DEVICES": "1"}
    # Another Python has its own libraries.
    assert "PYTHONPATH" not in environment_of({**training, PYTHON: "/other/python"}, None)
    assert environment_of({}, 1)["CUDA_VISIBLE_DEVICES"] == "1"
    assert visible_gpus(environment_of({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 1)) == 1
