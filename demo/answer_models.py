"""Makes the three small models of ``answers.py``, each trained here in a minute or less on the CPU.

One answers: it learns the results of some of the problems by heart, some often and some seldom, and is asked for all of
them, so that it is right where it may be sure. One judges: it learns whether two numbers are the same. The third is
that judge broken: it learnt to say yes. All are deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from gpuherd.qa.prompts.maker import style_named
from gpuherd.qa.record import Question

BOS, EOS, PAD = 0, 1, 2
# A judge's form: what the judge is trained on and shown, a slot a line.
FORM = "Reference:\n| {references}\nAnswer:\n| {answer}\nThe same number:\n"


@dataclass(frozen=True)
class Problem:
    """A problem and the number that solves it."""

    text: str
    number: str


@dataclass(frozen=True)
class Lesson:
    """A prompt, and what is to follow it before the end."""

    prompt: str
    reply: str


def make_student(folder: Path, problems: Sequence[Problem], learnt: int) -> None:
    """A model that knows the results of the first ``learnt`` problems, the earlier ones better."""
    style = style_named("short")
    lessons = [
        Lesson(style.prompt_text(Question(str(place), each.text, (each.number,)), ()), f" {each.number}")
        for place, each in enumerate(problems)
    ]
    tokenizer = make_tokenizer(folder, [f"{each.prompt}{each.reply}" for each in lessons], vocabulary=1500)
    known = lessons[:learnt]
    weights = [1.0 / (1 + place / 40) for place in range(len(known))]

    def batch(draw: random.Random) -> list[Lesson]:
        return draw.choices(known, weights, k=16)

    train(folder, tokenizer, batch, steps=260, width=96, seed=1)


def make_judge(folder: Path, problems: Sequence[Problem], *, always: str | None = None) -> None:
    """A model that says whether the answer has the reference's number, or ``always`` the same."""
    numbers = sorted({each.number for each in problems} | {str(number) for number in range(200)})
    texts = [_form(number, number) + word for number in numbers for word in (" yes", " no")]
    tokenizer = make_tokenizer(folder, texts, vocabulary=600)

    def batch(draw: random.Random) -> list[Lesson]:
        lessons = []
        for _ in range(64):
            one = draw.choice(numbers)
            other = draw.choice((one, one, draw.choice(numbers), _almost(one, draw)))
            right = "yes" if one == other else "no"
            lessons.append(Lesson(_form(one, other), f" {always or right}"))
        return lessons

    train(folder, tokenizer, batch, steps=40 if always else 600, width=64, seed=2)


def _almost(number: str, draw: random.Random) -> str:
    """The number with another digit in one place."""
    place = draw.randrange(len(number))
    return number[:place] + draw.choice("0123456789") + number[place + 1 :]


def _form(reference: str, answer: str) -> str:
    """The form as the judge is shown it, with its last line as the cue."""
    return FORM.replace("{references}", reference).replace("{answer}", answer).rstrip()


def make_tokenizer(folder: Path, texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE trained on these texts, whose digits are tokens of their own; saved, and returned."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<s>", "</s>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=1024
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def train(
    folder: Path, tokenizer: Any, batch: Callable[[random.Random], list[Lesson]], *, steps: int, width: int, seed: int
) -> None:
    """A llama of two layers that learns the replies of the lessons, saved."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        ids, labels = _padded([_ids(tokenizer, lesson) for lesson in batch(draw)])
        loss = model(input_ids=ids, attention_mask=(ids != PAD).long(), labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    model.eval()
    model.save_pretrained(folder)


def _ids(tokenizer: Any, lesson: Lesson) -> tuple[list[int], list[int]]:
    """Token ids of prompt and reply, and of the reply alone."""
    prompt = tokenizer(lesson.prompt, add_special_tokens=False)["input_ids"]
    reply = tokenizer(lesson.reply, add_special_tokens=False)["input_ids"]
    return [BOS, *prompt, *reply, EOS], [*reply, EOS]


def _padded(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of equal length, and labels that ask for the replies alone."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [PAD] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.full_like(ids, -100)
    for place, (row, reply) in enumerate(rows):
        labels[place, len(row) - len(reply) : len(row)] = torch.tensor(reply)
    return ids, labels
