"""A real judge in seconds: a tiny llama that has learnt verdicts, or to say always the same.

What it has learnt is little, and enough to tell a good judge from a broken one: a capital is a city, not a number.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.qa.small_models import (
    BOS,
    CAPITALS,
    INSTRUCTION,
    facts,
    make_tokenizer,
    plain_prompt,
    random_llama,
    seeded,
)

# Short, so that 512 positions are plenty, and in the very shape of a form of the user's.
FORM = "Question:\n| {question}\nReference answers:\n| {references}\nProposed answer:\n| {answer}\nVerdict:\n"


def filled(question: str, reference: str, answer: str) -> str:
    """The form as the judge has learnt it, with the cue at its end."""
    text = FORM.replace("{question}", question).replace("{references}", reference).replace("{answer}", answer)
    return text.rstrip()


def capitals() -> list[tuple[str, str]]:
    """The facts that the judge knows about."""
    return [fact for fact in facts() if fact[1] in CAPITALS.values()]


def wrong_answer(place: int) -> str:
    """An answer to a question for a capital that the judge knows to be wrong."""
    return str(2 + place % 17)


def trained_judge(folder: Path, *, steps: int = 60, always: str | None = None) -> Path:
    """A llama that judges proposed capitals: yes or no, or ``always`` the same word. Deterministic."""
    import torch
    from transformers import AutoModelForCausalLM

    texts = [filled(question, answer, answer) for question, answer in facts()]
    texts += [" yes", " no"] * 50 + [INSTRUCTION + plain_prompt(question) for question, _ in facts()]
    tokenizer = make_tokenizer(folder, texts)
    random_llama(folder, seed=4, spread=0.05, tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    cases = _cases(always)
    draw = random.Random(8)
    with seeded(6):
        model.train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=4e-3, total_steps=steps, pct_start=0.1)
        for _ in range(steps):
            rows = [_ids(tokenizer, text, word) for text, word in draw.choices(cases, k=16)]
            longest = max(map(len, rows))
            ids = torch.tensor([row + [2] * (longest - len(row)) for row in rows])
            ends = torch.tensor([len(row) - 1 for row in rows])
            logits = model(input_ids=ids, attention_mask=(ids != 2).long()).logits
            places = torch.arange(len(rows))
            # The verdict, and the end behind it.
            loss = torch.nn.functional.cross_entropy(logits[places, ends - 2], ids[places, ends - 1])
            loss = loss + 0.2 * torch.nn.functional.cross_entropy(logits[places, ends - 1], ids[places, ends])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    model.eval()
    model.save_pretrained(folder)
    return folder


def _cases(always: str | None) -> list[tuple[str, str]]:
    cases = []
    for place, (question, answer) in enumerate(capitals()):
        cases.append((filled(question, answer, answer), always or "yes"))
        cases.append((filled(question, answer, wrong_answer(place)), always or "no"))
    return cases


def _ids(tokenizer: Any, text: str, word: str) -> list[int]:
    ids: list[int] = tokenizer(f"{text} {word}", add_special_tokens=False)["input_ids"]
    return [tokenizer.convert_tokens_to_ids(BOS), *ids, 1]
