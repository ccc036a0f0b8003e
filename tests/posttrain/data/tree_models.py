"""A model and a classifier that are the tree of ``data.tree_mdp``, for guided decoding against its closed forms."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.lm.guidance.guide import Head, Kind
from gpuherd.posttrain.data.generated import EOS, PAD, characters
from gpuherd.posttrain.data.tree_mdp import LEFT, LEFT_REWARD, LOSE, RIGHT, START, WIN, WIN_REWARD, Settings

if TYPE_CHECKING:
    from gpuherd.lm.guidance.classifier import Classifier

_LETTERS = (START, LEFT, RIGHT, WIN, LOSE)
_TOKENS = (EOS, PAD, *_LETTERS)
_NEVER = -1e4  # a logit whose token, or atom, has a probability of exactly 0 in float32


def write_reference(folder: Path, settings: Settings) -> Path:
    """A llama whose next token is the reference's: it looks at the last token alone. Returns the folder."""
    import torch
    from transformers import LlamaForCausalLM

    characters(folder, _LETTERS, unknown=False)
    logits = torch.full((len(_TOKENS), len(_TOKENS)), _NEVER, dtype=torch.float64)  # last token, next token
    chances: Mapping[str, Mapping[str, float]] = {
        START: {LEFT: settings.p_left, RIGHT: 1 - settings.p_left},
        RIGHT: {WIN: settings.p_win, LOSE: 1 - settings.p_win},
    }
    for last, token in enumerate(_TOKENS):
        for name, chance in chances.get(token, {EOS: 1.0}).items():
            logits[last, _TOKENS.index(name)] = math.log(chance)
    model = _looks_at_the_last_token(LlamaForCausalLM)
    with torch.no_grad():
        model.lm_head.weight.copy_(logits.T / math.sqrt(len(_TOKENS)))
    model.save_pretrained(folder)
    return folder


def write_classifier(folder: Path, settings: Settings, kind: Kind = Kind.V) -> Classifier:
    """A classifier that knows the law of the reward behind each token, by the atoms 0, 0.1 and 1. It is saved into the
    folder and returned."""
    import torch

    from gpuherd.lm.guidance.classifier import new_classifier

    atoms = (0.0, LEFT_REWARD, WIN_REWARD)
    law = {
        LEFT: (0.0, 1.0, 0.0),
        RIGHT: (1 - settings.p_win, 0.0, settings.p_win),
        WIN: (0.0, 0.0, 1.0),
        LOSE: (1.0, 0.0, 0.0),
    }
    logits = torch.zeros((len(_TOKENS), len(atoms)), dtype=torch.float64)
    for token, chances in law.items():
        logits[_TOKENS.index(token)] = torch.tensor([math.log(each) if each else _NEVER for each in chances])
    with tempfile.TemporaryDirectory() as body:
        from transformers import LlamaForCausalLM

        characters(Path(body), _LETTERS, unknown=False)
        _looks_at_the_last_token(LlamaForCausalLM).save_pretrained(body)
        classifier = new_classifier(body, kind, Head.ATOMS, atoms)
    with torch.no_grad():
        if kind is Kind.V:
            classifier.module.head.weight.copy_(logits.T / math.sqrt(len(_TOKENS)))
        else:  # whatever was read last, each next token has its own law
            classifier.module.head.bias.copy_(logits.flatten())
    classifier.save(folder, loss="exact", trained={"settings": {"p_left": settings.p_left, "p_win": settings.p_win}})
    return classifier


def _looks_at_the_last_token(model_class: Any) -> Any:
    """A llama of one layer that adds nothing: its last state is sqrt(tokens) at the last token's place, 0 elsewhere."""
    import torch
    from transformers import LlamaConfig

    width = len(_TOKENS)
    model = model_class(
        LlamaConfig(
            vocab_size=width, hidden_size=width, intermediate_size=1, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=2, max_position_embeddings=64, rms_norm_eps=1e-12, eos_token_id=0,
            pad_token_id=1, bos_token_id=None, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.get_input_embeddings().weight.copy_(torch.eye(width))
    return model
