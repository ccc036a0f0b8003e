"""What a training learns from is looked at before anything is taken or begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.posttrain.learning.prepare import check_data
from gpuherd.posttrain.learning.settings import TrainSettings, settings_of

ENV = {"env_type": "math", "problems": [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(12)]}
FEW = {"num_rollouts_per_iteration": 4}


def config(algorithm: str, training: dict[str, Any], **blocks: Any) -> TrainSettings:
    return settings_of({"training": {"algorithm": algorithm, **training}, **blocks})


@pytest.mark.parametrize(
    ("algorithm", "training", "blocks", "told"),
    [
        ("grpo", {"num_rollouts_per_iteration": 64}, {"policy_env": ENV}, "asks for 16 problems a step, and there are"),
        ("ppo", {"max_problems": 99}, {"policy_env": ENV}, "policy_env: .*99 problems were asked for"),
        (
            "ppo",
            {"num_rollouts_per_iteration": 4},
            {"policy_env": ENV, "eval_envs": [ENV]},
            r"eval_envs\[0\]: .*10 pro",
        ),
        ("ppo", {}, {"policy_env": {"dataset": "arithmetik"}}, "policy_env: no task .*did you mean arithmetic"),
        ("dpo", {}, {"policy_env": {**ENV, "max_attempts": 2}}, "dpo compares single answers"),
        ("sft", {"data_file": "arithmetik"}, {}, "did you mean arithmetic"),
    ],
)
def test_what_is_not_there_is_told(algorithm: str, training: Any, blocks: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_data(config(algorithm, training, **blocks))


def test_callbacks_are_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("class Watch:\n    def on_step(self, event): ...\n")
    check_data(config("ppo", FEW, policy_env=ENV, callbacks=[f"{file}:Watch"]))
    with pytest.raises(UsageError, match=r"callbacks: .*own\.py has no class Wotch; it has Watch"):
        check_data(config("ppo", FEW, policy_env=ENV, callbacks=[f"{file}:Wotch"]))


def test_trackers_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gpuherd.posttrain.learning.prepare.find_spec", lambda name: None if name == "wandb" else object()
    )
    check_data(config("ppo", {**FEW, "trackio_project": "x", "use_tensorboard": True}, policy_env=ENV))
    with pytest.raises(UsageError, match=r"training\.wandb_project: wandb is not installed; pip install wandb"):
        check_data(config("ppo", {**FEW, "wandb_project": "x"}, policy_env=ENV))


def test_a_reward_of_ones_own_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def score(completions):\n    return [0.0] * len(completions)\n")
    good = {"dataset": "arithmetic", "reward": f"{file}:score"}
    bad = {**good, "reward": f"{file}:skore"}
    few = {**FEW, "eval_episodes": 1}
    check_data(config("ppo", few, policy_env=good, eval_envs=[good]))
    with pytest.raises(UsageError, match=r"policy_env: reward .*own\.py:skore: .*no function skore; it has score"):
        check_data(config("ppo", few, policy_env=bad))
    with pytest.raises(UsageError, match=r"eval_envs\[0\]: reward .*no function skore"):
        check_data(config("ppo", few, policy_env=good, eval_envs=[bad]))
    with pytest.raises(UsageError, match="policy_env: reward is of env_type task; math says itself"):
        check_data(config("ppo", few, policy_env={**ENV, "reward": f"{file}:score"}))


def test_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b"}))
    with pytest.raises(GpuherdError, match="rejected"):
        check_data(config("dpo", {"data_file": str(file)}))
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    check_data(config("dpo", {"data_file": str(file)}))
    check_data(config("sft", {"data_file": "arithmetic", "max_problems": 8}))


def test_what_is_there_is_enough() -> None:
    few = {**FEW, "eval_episodes": 1}
    check_data(config("ppo", few, policy_env=ENV, eval_envs=[ENV]))
    # Nothing is evaluated: nothing has to be there for it. Environments of one's own are the processes' business.
    check_data(config("ppo", {**few, "eval_every": 0, "eval_episodes": 99}, policy_env=ENV, eval_envs=[ENV]))
    own = {"env_type": "custom", "custom_class": "nowhere.Env", "dataset": "x"}
    check_data(config("ppo", few, policy_env=own))


def test_only_what_is_compared_has_single_turns(tmp_path: Path, policy_model: Path) -> None:
    """Policies that were trained on comparisons are evaluated on episodes all the same."""
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    two_turns = {**ENV, "max_attempts": 2}
    check_data(config("dpo", {"data_file": str(file), "eval_episodes": 1}, eval_envs=[two_turns]))
    sums = {"dataset": "arithmetic"}
    model = {"model_name_or_path": str(policy_model)}
    check_data(config("grpo-hf", {**FEW, "eval_episodes": 1}, policy_env=sums, eval_envs=[two_turns], model=model))
    with pytest.raises(UsageError, match=r"eval_envs\[0\]: RLCR pays for answers that are right"):
        check_data(config("rlcr", {**FEW, "eval_episodes": 1}, policy_env=sums, eval_envs=[two_turns]))


def test_what_an_algorithm_asks_for_is_part_of_the_prompts() -> None:
    plain, asked = (check_data(config(name, FEW, policy_env={"dataset": "arithmetic"})) for name in ("grpo", "rlcr"))
    assert plain is not None and asked is not None
    added = {len(other) - len(one) for one, other in zip(plain.prompts, asked.prompts, strict=True)}
    assert len(added) == 1 and added.pop() > 100 and "<confidence>" in asked.prompts[0]


def rows_of(kind: str, number: int) -> dict[str, Any]:
    question, answer = f"What is {number}+1?", str(number + 1)
    user, assistant = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    kinds: dict[str, dict[str, Any]] = {
        "messages": {"messages": [user, assistant]},
        "two_answers": {"messages": [user, assistant, {"role": "user", "content": "Sure?"}, assistant]},
        "prompt-completion": {"prompt": question, "completion": answer},
        "messages_completed": {"prompt": [user], "completion": [assistant]},
        "text": {"text": f"{question} {answer}"},
        "preference": {"prompt": question, "chosen": answer, "rejected": "no"},
        "chosen": {"prompt": question, "chosen": [user, assistant]},
        "question-answers": {"question": question, "answers": [answer, "another"]},
    }
    return kinds[kind]


KINDS = ("messages", "two_answers", "prompt-completion", "messages_completed", "text", "preference", "chosen")


@pytest.mark.parametrize("kind", [*KINDS, "question-answers"])
def test_sft_learns_from_every_row_of_a_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(rows_of(kind, number))}\n" for number in range(100)))
    texts = check_data(config("sft", {"data_file": str(file)}))
    answers = 200 if kind == "two_answers" else 100
    assert texts is not None and texts.answers is not None and len(texts.answers) == answers
    assert texts.source == f"{file}: {answers} answers of 100 of 100 rows"
    ends = {each.rpartition(" ")[2] for each in texts.answers} if kind == "text" else set(texts.answers)
    assert ends == {str(number + 1) for number in range(100)}


def test_rows_that_sft_can_not_learn_from_are_told(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    bad = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}, {"completion": "b"}, {"text": " "}]
    file.write_text("".join(f"{json.dumps(each)}\n" for each in [{"prompt": "a", "completion": "b"}, *bad]))
    texts = check_data(config("sft", {"data_file": str(file)}))
    assert texts is not None and texts.source.startswith(f"{file}: 1 answers of 1 of 5 rows; ")
    assert "line 3: it has no turn of the assistant" in texts.source
    with pytest.raises(UsageError, match="scored by nothing"):
        check_data(config("sft", {"data_file": str(file)}, sft={"filter_low_reward": True}))


def test_sft_learns_from_what_a_task_holds_out(tmp_path: Path) -> None:
    file = tmp_path / "programs.jsonl"
    row = {"prompt": "Write f.", "tests": ["assert f(1) == 2"], "solution": "def f(x):\n    return x + 1\n"}
    file.write_text("".join(f"{json.dumps({**row, 'prompt': f'{number}.'})}\n" for number in range(100)))
    texts = check_data(config("sft", {"data_file": str(file)}))
    assert texts is not None and len(texts.prompts) == 90
    assert texts.source == "90 training problems of programs; its test is left out"


def test_the_splits_of_an_environment_are_told() -> None:
    texts = check_data(config("ppo", {**FEW, "eval_every": 0}, policy_env=ENV))
    assert texts is not None and texts.source == "9 training problems of math; 1 more are held out; 2 more are its test"


def test_a_data_set_laid_out_like_one_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(rows_of('messages', n))}\n" for n in range(10)))
    texts = check_data(config("sft", {"data_file": str(tmp_path)}))
    assert texts is not None and len(texts.prompts) == 10
