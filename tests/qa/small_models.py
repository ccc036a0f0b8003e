"""Small real language models with tokenizers of their own, made in seconds: random ones, and one that has learnt facts.

The trained one answers "Question: What is the capital of France?\\nAnswer:" (with or without an instruction and
examples before it) and ends its answer by itself. It knows some facts well, some a little, and some were kept from it:
so some of its answers are wrong, and log-probs are of all sizes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WITHOUT_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Poland": "Warsaw", "Hungary": "Budapest", "Romania": "Bucharest", "Bulgaria": "Sofia",
    "Ireland": "Dublin", "Iceland": "Reykjavik", "Belgium": "Brussels", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Ghana": "Accra", "Cuba": "Havana", "Peru": "Lima",
    "Chile": "Santiago", "Canada": "Ottawa", "Mexico": "Mexico City", "Turkey": "Ankara", "Iran": "Tehran",
    "Iraq": "Baghdad", "Nepal": "Kathmandu", "Vietnam": "Hanoi", "Thailand": "Bangkok", "Cyprus": "Nicosia",
}  # fmt: skip
INSTRUCTION = "Answer the following question as briefly as possible.\n"


def facts() -> list[tuple[str, str]]:
    """All questions with their answers, in one fixed order of mixed subjects; the trained model knows most of them."""
    capitals = [(f"What is the capital of {country}?", city) for country, city in CAPITALS.items()]
    sums = [(f"What is {one} plus {two}?", str(one + two)) for one in range(1, 10) for two in range(1, 10)]
    mixed = capitals + sums
    random.Random(7).shuffle(mixed)
    return mixed


def kept_secret(number: int) -> bool:
    """Whether the trained model never saw the fact of this place in ``facts``."""
    return number % 5 == 4


def write_questions(path: Path, count: int | None = None) -> Path:
    """The first so many facts as a file of questions: a JSON line each, with ``id``, ``question``, ``answers``."""
    rows = [
        {"id": f"fact-{number}", "question": question, "answers": [answer]}
        for number, (question, answer) in enumerate(facts()[:count])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plain_prompt(question: str) -> str:
    """The form of prompt that the trained model knows best; the answer follows it with a space before."""
    return f"Question: {question}\nAnswer:"


def make_tokenizer(
    folder: Path,
    texts: Iterable[str] | None = None,
    *,
    vocabulary: int = 512,
    chat: str | None = None,
    pad: bool = True,
    bos: bool = True,
) -> Any:
    """A byte-level BPE tokenizer trained on these texts (the facts by default), saved into the folder; returns it.

    Ids: 0 ``<s>`` (put first by the tokenizer where ``bos``), 1 ``</s>``, 2 ``<pad>`` (named as pad token where
    ``pad``), 3-6 the roles of a chat. ``chat``: a template such as ``CHAT_TEMPLATE``; none by default.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    if texts is None:
        texts = [INSTRUCTION + plain_prompt(question) + f" {answer}\n" for question, answer in facts()]
    inner.train_from_iterator(texts, trainer)
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
        )
    names: dict[str, Any] = {"bos_token": BOS, "eos_token": EOS}
    if pad:
        names["pad_token"] = PAD
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, **names, additional_special_tokens=list(ROLES), model_max_length=512
    )
    if chat is not None:
        tokenizer.chat_template = chat
    tokenizer.save_pretrained(folder)
    return tokenizer


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """One thread and this seed within; torch's generator is afterwards as it was."""
    import torch

    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def random_model(folder: Path, model_type: str, *, seed: int = 0, spread: float = 0.2, **fields: Any) -> Path:
    """A causal model of this type with random float32 weights, saved without a tokenizer.

    ``spread``: the standard deviation of the weights; large enough that the model is surer of some tokens than others.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, initializer_range=spread, **fields)
    with seeded(seed):
        model = AutoModelForCausalLM.from_config(config, dtype="float32")
        model.save_pretrained(folder)
    return folder


def random_llama(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat: str | None = None, **fields: Any
) -> Path:
    """A llama of 2 layers and width 64 with random weights and, if wanted, ``make_tokenizer``'s tokenizer."""
    if tokenizer:
        make_tokenizer(folder, chat=chat)
    settings: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
    }  # fmt: skip
    return random_model(folder, "llama", seed=seed, **(settings | fields))


def random_gpt2(folder: Path, *, seed: int = 0, tokenizer: bool = True, **fields: Any) -> Path:
    """A GPT-2 (learnt positions) of 2 layers and width 64 with random weights and a tokenizer without pad token."""
    if tokenizer:
        make_tokenizer(folder, pad=False, bos=False)
    settings: dict[str, Any] = {
        "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512,
        "bos_token_id": 1, "eos_token_id": 1,
    }  # fmt: skip
    return random_model(folder, "gpt2", seed=seed, **(settings | fields))


def trained_llama(folder: Path, *, steps: int = 130, chat: str | None = None, **fields: Any) -> Path:
    """A llama of 2 layers and width 64 that has learnt most of ``facts`` well or a little. Deterministic; 6 CPU-s.

    ``fields``: of its configuration, where they are to be others.
    """
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = make_tokenizer(folder, chat=chat)
    random_llama(folder, seed=11, spread=0.05, tokenizer=False, **fields)
    model = AutoModelForCausalLM.from_pretrained(folder)
    known = [fact for number, fact in enumerate(facts()) if not kept_secret(number)]
    # Facts further down the list come up less and less often: the model is surer of some than of others.
    weights = [1.0 / (1 + number / 25) for number in range(len(known))]
    draw = random.Random(3)
    with seeded(5):
        model.train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=4e-3, total_steps=steps, pct_start=0.1)
        for _ in range(steps):
            batch = [_lesson(tokenizer, draw.choices(known, weights, k=3), draw) for _ in range(24)]
            longest = max(len(ids) for ids, _ in batch)
            ids = torch.tensor([ids + [2] * (longest - len(ids)) for ids, _ in batch])
            labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in batch])
            loss = model(input_ids=ids, attention_mask=(ids != 2).long(), labels=labels).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    model.eval()
    model.save_pretrained(folder)
    return folder


def _lesson(tokenizer: Any, lesson: list[tuple[str, str]], draw: random.Random) -> tuple[list[int], list[int]]:
    """Token ids, and labels that ask for the answers alone: up to two examples, then a question, answer and end."""
    shots = draw.choice((0, 0, 0, 1, 2))
    ids = [0, *(_plain(tokenizer, INSTRUCTION) if draw.random() < 0.5 else [])]
    labels = [-100] * len(ids)
    for number, (question, answer) in enumerate(lesson[: shots + 1]):
        asked = _plain(tokenizer, plain_prompt(question))
        last = number == shots
        said = [*_plain(tokenizer, f" {answer}"), 1]
        ids += asked + (said if last else [*said[:-1], *_plain(tokenizer, "\n\n")])
        labels += [-100] * len(asked) + said
        labels += [-100] * (len(ids) - len(labels))
    return ids, labels


def _plain(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
