"""A tiny model that has learnt sums of one digit, half of them wrong: so that there is something to compare."""

from __future__ import annotations

from pathlib import Path

from tests.posttrain import tiny
from tests.qa.small_models import seeded

CHARACTERS = "0123456789+="


def adder(folder: Path, *, steps: int = 250) -> Path:
    """A llama that answers ``3+4=`` right about as often as not, at temperature 1; saved into the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny.tiny_llama(folder, width=32, characters=CHARACTERS, spread=0.05, positions=64)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id
    with seeded(0):
        optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(steps):
            one, two = torch.randint(0, 10, (2, 64)).tolist()
            off = [int(torch.randint(1, 3, ())) if torch.rand(()) < 0.5 else 0 for _ in one]
            texts = [f"{a}+{b}={a + b + c}" for a, b, c in zip(one, two, off, strict=True)]
            rows = [[*tokenizer(text)["input_ids"], end] for text in texts]
            longest = max(map(len, rows))
            ids = torch.tensor([row + [end] * (longest - len(row)) for row in rows])
            labels = torch.tensor([[-100] * 4 + row[4:] + [-100] * (longest - len(row)) for row in rows])
            optimiser.zero_grad()
            model(input_ids=ids, labels=labels).loss.backward()
            optimiser.step()
    model.save_pretrained(folder)
    return folder


def classifier_base(folder: Path) -> Path:
    """A random llama with the same tokens, for classifiers."""
    return tiny.tiny_llama(folder, seed=1, width=16, characters=CHARACTERS, spread=0.05, positions=64)
