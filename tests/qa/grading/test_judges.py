"""What a user may call a judge by, and what its files are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuherd.errors import UsageError
from gpuherd.jobs.run_dir import safe_name
from gpuherd.qa.grading.config import Judge, judge_named, judging_name
from gpuherd.qa.grading.files import RULES, JudgeKind


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_called_by_their_names(rule: JudgeKind) -> None:
    assert judge_named(rule.value) == Judge(rule.value, rule)


@pytest.mark.parametrize(
    ("word", "model"),
    [
        ("llm_llama-3.1-70b", "meta-llama/Llama-3.1-70B-Instruct"),
        ("llama-3.1-70b", "meta-llama/Llama-3.1-70B-Instruct"),
        ("llm_llama-3.1-70b-8bit", "meta-llama/Llama-3.1-70B-Instruct-8bit"),
        ("llm_Llama-3.1-70B-4bit", "meta-llama/Llama-3.1-70B-Instruct-4bit"),
        ("llm_llama-3.1-8b-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("llm_llama-2-13b", "meta-llama/Llama-2-13b-chat-hf"),
        ("llm_llama-3-70b", "meta-llama/Meta-Llama-3-70B-Instruct"),
    ],
)
def test_the_guides_names_mean_models_that_follow_instructions(word: str, model: str) -> None:
    judge = judge_named(word)
    assert (judge.kind, judge.model) == (JudgeKind.MODEL, model)
    said = {"-8bit": " in int8", "-4bit": " in nf4"}
    assert (
        judge.notice
        == f"{word} is {model.removesuffix(model[-5:]) + said[model[-5:]] if model[-5:] in said else model}"
    )


@pytest.mark.parametrize("word", ["llm_gpt-3.5", "gpt-4"])
def test_a_judge_that_nobody_can_load_is_told_by_its_address(word: str) -> None:
    with pytest.raises(UsageError, match=r"--judge-model gpt-[\w.-]+ --api-key-env"):
        judge_named(word)


@pytest.mark.parametrize("word", ["Qwen/Qwen2.5-7B-Instruct", "gpt2", "llama-3.2-1b", "./exact", "a/b-8bit"])
def test_any_other_id_or_path_is_a_model(word: str) -> None:
    assert judge_named(word) == Judge(word, JudgeKind.MODEL, word)
    assert judge_named(f"llm_{word}").model == word


def test_a_folder_is_a_model_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="did you mean squad"):
        judge_named("squadd")
    (tmp_path / "squadd").mkdir()
    assert judge_named("squadd").kind is JudgeKind.MODEL


@pytest.mark.parametrize(
    ("word", "nearest"), [("exat", "exact"), ("llm_llama3.1-70b", "llama-3.1-70b"), ("Rouge", "rouge")]
)
def test_a_slip_is_answered_with_the_nearest(word: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {nearest}"):
        judge_named(word)


def test_an_address_takes_a_model_and_keeps_no_secrets() -> None:
    judge = judge_named("https://host:8000/v1/", "served")
    assert (judge.kind, judge.url, judge.model) == (JudgeKind.URL, "https://host:8000/v1", "served")
    assert judge_named("http://h/v1/chat/completions", "m").url == "http://h/v1"
    with pytest.raises(UsageError, match="--judge-model"):
        judge_named("https://host/v1")
    for word in ("https://me:secret@host/v1", "https://host/v1?key=secret", "https://host/v1#secret"):
        with pytest.raises(UsageError) as refused:
            judge_named(word, "m")
        assert "secret" not in str(refused.value)
    with pytest.raises(UsageError, match="no host"):
        judge_named("http:///v1", "m")
    with pytest.raises(UsageError, match="no address"):
        judge_named("http://[::1/v1", "m")
    for word in ("http://h/v1\n", "http://h/v 1", " http://h/v1", "http://h\u00e9/v1", "http://h/\x00"):
        with pytest.raises(UsageError, match="no address"):
            judge_named(word, "m")
    with pytest.raises(UsageError, match="goes with an address"):
        judge_named("squad", "m")


@pytest.mark.parametrize(
    ("judge", "name"),
    [
        (Judge("squad", JudgeKind.SQUAD), "squad-01234567"),
        (Judge("llm_llama-3.1-70b", JudgeKind.MODEL, "m"), "llm_llama-3.1-70b-01234567"),
        (Judge("llm_org/a-model", JudgeKind.MODEL, "m"), "llm_a-model-01234567"),
        (Judge("/models/judge/", JudgeKind.MODEL, "m"), "judge-01234567"),
        (Judge("../..", JudgeKind.MODEL, "m"), "judge-01234567"),
        (Judge("https://host/v1", JudgeKind.URL, "org/m", "https://host/v1"), "org-m-at-host-01234567"),
        (Judge("x" * 300, JudgeKind.MODEL, "m"), "x" * 70 + "-01234567"),
        (Judge("a model\x1b[31m", JudgeKind.MODEL, "m"), "a-model-31m-01234567"),
    ],
)
def test_a_judgings_name_is_a_file_name(judge: Judge, name: str) -> None:
    assert judging_name(judge, "0123456789abcdef") == name == safe_name(name)
