"""Next-token training of small models from scratch on prompts with their answers: what bases are made by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.posttrain.types import Problem

IGNORED = -100  # the label of a token that is not learnt, torch's own
WARMUP = 50  # steps in which the learning rate rises to where it then stays


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

    width: int = 64
    layers: int = 4
    heads: int = 4
    positions: int = 256


@dataclass(frozen=True)
class Example:
    """All tokens of a prompt with its answer and the end, and how many of them are the prompt's."""

    ids: tuple[int, ...]
    asked: int


def small_llama(shape: Shape, tokenizer: Any, seed: int) -> Any:
    """A Llama of random weights for this tokenizer, float32, embeddings and head not tied."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=shape.width,
            intermediate_size=2 * shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=shape.positions,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )


def encoded(tokenizer: Any, problem: Problem) -> Example:
    """A problem with the first of its answers."""
    prompt = tokenizer(problem.prompt, add_special_tokens=False)["input_ids"]
    answer = tokenizer(problem.answers[0], add_special_tokens=False)["input_ids"]
    return Example((*prompt, *answer, tokenizer.eos_token_id), len(prompt))


def batch(examples: Sequence[Example], pad: int) -> tuple[Any, Any, Any]:
    """Ids, labels (-100 but for the answer and the end) and mask, padded at the right: (examples, longest) int64."""
    import torch

    longest = max(len(each.ids) for each in examples)
    behind = [longest - len(each.ids) for each in examples]
    pairs = [*zip(examples, behind, strict=True)]
    ids = [[*each.ids, *[pad] * free] for each, free in pairs]
    labels = [[*[IGNORED] * each.asked, *each.ids[each.asked :], *[IGNORED] * free] for each, free in pairs]
    mask = [[*[1] * len(each.ids), *[0] * free] for each, free in pairs]
    return torch.tensor(ids), torch.tensor(labels), torch.tensor(mask)


def imitating(model: Any, pad: int, batches: Iterable[Sequence[Example]], lr: float) -> Iterator[int]:
    """Trains by AdamW (weight decay 0.1, gradients of norm 1 at most); after each batch, the number of steps made."""
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    rise = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / WARMUP))
    for step, examples in enumerate(batches, 1):
        ids, labels, mask = batch(examples, pad)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rise.step()
        yield step


def forced(model: Any, examples: Sequence[Example], pad: int) -> tuple[Any, Any]:
    """Of each token behind the first, given all before it: its log-probability (float32) and whether it is the
    likeliest; 0 and True where it is not the answer's. Both (examples, longest - 1)."""
    import torch

    was_training = model.training
    model.eval()
    with torch.no_grad():
        ids, labels, mask = batch(examples, pad)
        log_probs = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(dim=-1)
    model.train(was_training)
    said = labels[:, 1:]
    is_answer = said != IGNORED
    own = log_probs.gather(2, said.clamp(min=0)[:, :, None])[:, :, 0]
    return own.masked_fill(~is_answer, 0.0), (log_probs.argmax(dim=-1) == said) | ~is_answer
