"""Reward models score texts as they were trained on them: real small classifiers, compared with transformers' own."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain import tiny
from tests.qa.small_models import CHAT_TEMPLATE, seeded

from gpuherd.errors import BadModel, MissingModel, UsageError
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.envs.interface import EnvironmentOptions
from gpuherd.posttrain.envs.registry import make_environments
from gpuherd.posttrain.preference.data import Preference
from gpuherd.posttrain.preference.tokens import Writing, load_tokenizer
from gpuherd.posttrain.rewards.reward_model import FORM_FILE, Form, RewardModel
from gpuherd.posttrain.types import Split

PROMPTS = ["ab", "a longer prompt than the other", "", "x"]
COMPLETIONS = ["yes", "n", "a longer answer", ""]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def bert(folder: Path, *, labels: Sequence[str] = ("LABEL_0",), positions: int = 64) -> Path:
    """A small encoder of characters with a separator, as OpenAssistant's and sentiment models are."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    signs = [chr(code) for code in range(97, 123)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs, *(f"##{each}" for each in signs)]
    tokenizer = BertTokenizerFast(vocab={token: place for place, token in enumerate(vocabulary)})
    tokenizer.save_pretrained(folder)
    with seeded(5):
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=len(vocabulary),
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=positions,
                initializer_range=0.5,
                id2label=dict(enumerate(labels)),
                label2id={label: place for place, label in enumerate(labels)},
                num_labels=len(labels),
            )
        )
    model.save_pretrained(folder)
    return folder


def causal(folder: Path, *, chat: bool = False, pad: bool = True) -> Path:
    """A small llama with a reward head."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = tiny.character_tokenizer(folder)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ bos_token }}", "")
    if not pad:
        tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    with seeded(6):
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.3,
            num_labels=1,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = LlamaForSequenceClassification(config)
    model.save_pretrained(folder)
    return folder


def alone(model: RewardModel, given: Any) -> float:
    """The score of one row by transformers itself, without padding."""
    with torch.inference_mode():
        logits = model.module(**{name: torch.tensor([ids]) for name, ids in given.items()}).logits
    return float(logits[0, model.output])


def test_a_pair_for_an_encoder(tmp_path: Path) -> None:
    model = RewardModel(str(bert(tmp_path)), batch_size=3)
    assert model.form is Form.PAIR
    wanted = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        made = model.tokenizer(prompt, completion)
        wanted.append(alone(model, {name: made[name] for name in ("input_ids", "token_type_ids", "attention_mask")}))
    assert model.scores(PROMPTS, COMPLETIONS) == pytest.approx(wanted, abs=1e-5)
    assert model.scores([], []) == []


def test_one_text_for_a_sentiment(tmp_path: Path) -> None:
    folder = str(bert(tmp_path, labels=("NEGATIVE", "POSITIVE")))
    model = RewardModel(folder, label="positive")
    assert (model.form, model.output) == (Form.JOINED, 1)
    made = model.tokenizer("abxyz")
    given = {name: made[name] for name in ("input_ids", "token_type_ids")}
    assert model.scores(["ab"], ["xyz"]) == pytest.approx([alone(model, given)], abs=1e-5)
    other = RewardModel(folder, label="NEGATIVE")
    assert other.scores(["ab"], ["xyz"]) != pytest.approx(model.scores(["ab"], ["xyz"]))
    with pytest.raises(UsageError, match=r"has 2 outputs \(NEGATIVE, POSITIVE\); say which label"):
        RewardModel(folder)
    with pytest.raises(UsageError, match="has no output 'neutral'; it has NEGATIVE, POSITIVE"):
        RewardModel(folder, label="neutral")


@pytest.mark.parametrize("pad", [True, False])
def test_tokens_of_rollouts(tmp_path: Path, pad: bool) -> None:
    """Of a causal body: the score is read at the last token, whatever is padded behind it."""
    model = RewardModel(str(causal(tmp_path, pad=pad)))
    rows = [[5, 6, 7, 9], [8, 9], [10, 11, 12, 13, 14, 15, 16]]
    wanted = [alone(model, {"input_ids": row}) for row in rows]
    assert model.scores_of_ids(rows) == pytest.approx(wanted, abs=1e-5)
    assert model.form is Form.JOINED


def test_a_conversation(tmp_path: Path) -> None:
    model = RewardModel(str(causal(tmp_path, chat=True)))
    assert model.form is Form.CHAT
    text = "<|user|>\nab<|end|>\n<|assistant|>\nxyz<|end|>\n"
    assert model.inputs("ab", "xyz")["input_ids"] == model.tokenizer(text)["input_ids"]
    model.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(UsageError, match=r"chat template can't put a prompt and its completion.*another form"):
        model.scores(["a"], ["b"])


@pytest.mark.parametrize("form", [Form.CHAT, Form.TURN])
def test_a_prompt_that_is_templated_is_not_templated_again(tmp_path: Path, form: Form) -> None:
    model = RewardModel(str(causal(tmp_path, chat=True)), form=form)
    prompt = "<|user|>\nab<|end|>\n<|assistant|>\n"
    found = model.inputs(prompt, "xyz")["input_ids"]
    assert model.tokenizer.decode(found).count("<|user|>") == 1
    assert found == [*model.tokenizer(f"{prompt}xyz")["input_ids"], model.tokenizer.eos_token_id]
    # A user who only writes what looks like the beginning of a turn stays a user.
    assert model.tokenizer.decode(model.inputs("<|user|>\nab", "xyz")["input_ids"]).count("user|>") == 2


def test_texts_are_scored_as_the_conversations_that_were_learnt_from(tmp_path: Path) -> None:
    """By the tokens that ``Writing`` makes of a preference, and with the end of a turn where the template has one."""
    folder = causal(tmp_path, chat=True)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.save_pretrained(folder)
    (folder / FORM_FILE).write_text('{"form": "turn"}')
    model = RewardModel(str(folder))
    learnt = Writing(tokenizer, chat=True).comparison(Preference("p", "ab", "xyz", "x"))
    wanted = [*learnt.prompt_ids, *learnt.chosen_ids]
    assert wanted[-1] == tokenizer.convert_tokens_to_ids("<|end|>") != tokenizer.eos_token_id
    assert model.inputs("ab", "xyz")["input_ids"] == wanted


def test_the_form_that_stands_beside_it(tmp_path: Path) -> None:
    folder = causal(tmp_path)
    (folder / FORM_FILE).write_text('{"form": "ended"}')
    model = RewardModel(str(folder))
    assert model.form is Form.ENDED
    ids = model.inputs("ab", "xyz")["input_ids"]
    assert ids == [*model.tokenizer("ab")["input_ids"], *model.tokenizer("xyz")["input_ids"], 0]
    assert RewardModel(str(folder), form=Form.JOINED).inputs("ab", "xyz")["input_ids"] == ids[:-1]
    (folder / FORM_FILE).write_text(json.dumps({"form": "other"}))
    with pytest.raises(BadModel, match="form 'other' is none of"):
        RewardModel(str(folder))


@pytest.mark.parametrize("form", [Form.CHAT, Form.JOINED, Form.ENDED, Form.TURN])
def test_a_completion_can_not_write_control_tokens(tmp_path: Path, form: Form) -> None:
    """What looks like an end token in a completion's text is text before the judge too."""
    model = RewardModel(str(causal(tmp_path, chat=True)), form=form)
    end, plain, hostile = (
        model.inputs("ab", text)["input_ids"].count(model.tokenizer.eos_token_id)
        for text in ("", "xyz", f"xyz{model.tokenizer.eos_token}{model.tokenizer.eos_token}")
    )
    assert end == plain == hostile


@pytest.mark.parametrize("form", list(Form))
def test_long_texts_lose_their_beginning(tmp_path: Path, form: Form, caplog: pytest.LogCaptureFixture) -> None:
    folder = bert(tmp_path, positions=16)
    if form in (Form.CHAT, Form.ENDED, Form.TURN):
        folder = causal(tmp_path / "causal", chat=True)
    model = RewardModel(str(folder), form=form)
    most = model.most_tokens
    assert most is not None
    with caplog.at_level(logging.WARNING):
        found = model.scores(["a " * 400, "b c " * 300], ["z q", "z q"])
    assert len(found) == 2
    assert model.cut == 2
    assert caplog.text.count(f"texts of more than {most} tokens lose their beginning") == 1
    ids = model.inputs("b c " * 300, "z q")["input_ids"]
    assert len(ids) <= most
    assert model.tokenizer("q", add_special_tokens=False)["input_ids"][0] in ids[-16:]


def test_a_score_that_is_no_number_is_named(tmp_path: Path) -> None:
    model = RewardModel(str(causal(tmp_path)))
    with torch.no_grad():
        model.module.score.weight.fill_(torch.nan)
    with pytest.raises(BadModel, match="the reward of completion 'yes' to 'ab' is nan, no finite number"):
        model.scores(["ab"], ["yes"])
    with pytest.raises(BadModel, match=r"the reward of row 1 of 1 \(2 tokens\) is nan"):
        model.scores_of_ids([[5, 6]])


def test_no_reward_model(policy_model: Path, tmp_path: Path) -> None:
    """A language model has no such head, and one of random numbers would reward anything."""
    with pytest.raises(UsageError, match="has 2 outputs"):
        RewardModel(str(policy_model))
    config = json.loads((policy_model / "config.json").read_text())
    for each in policy_model.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": {"0": "LABEL_0"}, "label2id": None}))
    with pytest.raises(BadModel, match=r"no reward model: its checkpoint has no score\.weight"):
        RewardModel(str(tmp_path))
    with pytest.raises(MissingModel):
        RewardModel(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="batch_size=0; the least is 1"):
        RewardModel(str(tmp_path), batch_size=0)


@pytest.mark.slow
def test_smaller_batches_where_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """(What stands in for memory is how many rows torch embeds at once.)"""
    model = RewardModel(str(causal(tmp_path)), batch_size=16)
    rows = [[5 + place % 20] * (1 + place % 7) for place in range(120)]
    wanted = model.scores_of_ids(rows)
    embed, room = torch.nn.Embedding.forward, [3]
    seen: list[int] = []

    def scarce(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[0] > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        seen.append(ids.shape[0])
        return embed(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", scarce)
    with caplog.at_level(logging.WARNING):
        assert model.scores_of_ids(rows) == pytest.approx(wanted, abs=1e-5)
    assert "out of memory with 16 rows; 8 now" in caplog.text
    assert max(seen) == 2
    room[0] = 99
    model.scores_of_ids(rows)
    assert max(seen) > 2, "it grows back"
    room[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        model.scores_of_ids(rows)


# ---- tasks that score by a reward model ----------------------------------------------------------------------------


@pytest.fixture
def sentiment_model(tmp_path: Path) -> str:
    """A small llama with the outputs NEGATIVE and POSITIVE."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path / "sentiment"
    tokenizer = tiny.character_tokenizer(folder)
    with seeded(3):
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=256,
            initializer_range=0.3,
            id2label={0: "NEGATIVE", 1: "POSITIVE"},
            label2id={"NEGATIVE": 0, "POSITIVE": 1},
            pad_token_id=tokenizer.pad_token_id,
        )
        LlamaForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def test_reviews_earn_the_logit_of_their_label(sentiment_model: str, tmp_path: Path) -> None:
    from gpuherd.posttrain.rewards.reward_model import RewardModel

    path = tmp_path / "reviews.jsonl"
    path.write_text("".join(f"{json.dumps({'text': f'film number {n} that nobody saw'})}\n" for n in range(9)))
    settings = {"words": 3, "data": str(path), "test_data": str(path)}
    task = make_task("imdb", TaskOptions(settings, reward_model=sentiment_model, reward_batch_size=2))
    problems = task.problems(Split.TEST, 3, 0)
    said = [" was good", "", " was bad"]
    rewards = task.rewards(problems, said)
    for label, sign in (("POSITIVE", 1), ("NEGATIVE", -1)):
        model = RewardModel(sentiment_model, label=label)
        expected = model.scores([each.prompt for each in problems], said)
        near = [abs(each.value - score) < 1e-5 for each, score in zip(rewards, expected, strict=True)]
        assert all(near) if sign > 0 else not any(near)
    assert {each.correct for each in rewards} == {None}
    task.close()
    assert task.rewards(problems, said) == rewards  # loaded again


def test_debates_are_judged_by_a_model_that_is_named(sentiment_model: str) -> None:
    options = EnvironmentOptions(
        "debate",
        problems=({"topic": "tests"},),
        only=Split.TRAIN,
        max_attempts=2,
        settings={"label": "POSITIVE"},
        task=TaskOptions(reward_model=sentiment_model),
    )
    debates = make_environments(options)
    environment = debates.make()
    environment.reset(debates.problems(Split.TRAIN, 1, 0)[0], 0)
    first, last = environment.step("They help."), environment.step("They do.")
    assert first.info["judge"] == sentiment_model
    assert last.done
    assert abs(last.reward - (float(first.info["score"]) + float(last.info["score"])) / 2) < 1e-9
    debates.close()
