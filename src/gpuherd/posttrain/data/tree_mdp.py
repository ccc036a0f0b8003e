"""The tree of the Q# paper (arXiv 2502.20548, figure 4 and theorems 4.1, 4.2), where everything is known exactly.

From the start the reference goes left with probability p_left, which earns 0.1 for sure, else right, which wins 1 with
probability p_win = 0.05 and else earns nothing. As eta goes to 0 the optimum goes right and wins, at the price of its
KL divergence; controlled decoding (CD) compares expected rewards, 0.1 with 0.05, and goes left.

``write_reference`` and ``write_classifier`` make a model and a classifier that are this tree, so that guided decoding
is compared with the closed forms here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Head, Kind
from gpuherd.posttrain.data.generated import EOS, PAD, GeneratedTask, characters, generated
from gpuherd.posttrain.types import Problem, Reward, Split

if TYPE_CHECKING:
    from gpuherd.lm.guidance.classifier import Classifier

LEFT_REWARD, WIN_REWARD = 0.1, 1.0
START, LEFT, RIGHT, WIN, LOSE = "S", "L", "R", "W", "X"
_REWARDS = {LEFT: LEFT_REWARD, RIGHT + WIN: WIN_REWARD, RIGHT + LOSE: 0.0}
_LETTERS = (START, LEFT, RIGHT, WIN, LOSE)
_TOKENS = (EOS, PAD, *_LETTERS)
_NEVER = -1e4  # a logit whose token, or atom, has a probability of exactly 0 in float32


@dataclass(frozen=True, slots=True)
class Settings:
    """The tree.

    Attributes:
        p_left: of the reference's first choice.
        p_win: of winning behind the right.
        train, heldout, test: problems in each split, all the same tree: each has its own draws.
    """

    p_left: float = 0.5
    p_win: float = 0.05
    train: int = 1_000
    heldout: int = 100
    test: int = 1_000

    def __post_init__(self) -> None:
        for name in ("p_left", "p_win"):
            if not 0 < getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}; a probability between 0 and 1, neither of both")
        if min(self.train, self.heldout, self.test) < 1:
            raise UsageError("train, heldout and test are 1 or more")


@dataclass(frozen=True, slots=True)
class TreePolicy:
    """A policy on the tree, by its two choices.

    Attributes:
        left: the probability of left at the start.
        win: of winning, behind the right.
    """

    left: float
    win: float

    @property
    def reward(self) -> float:
        """What it earns, expected."""
        return self.left * LEFT_REWARD + (1 - self.left) * self.win * WIN_REWARD

    def first_kl(self, reference: TreePolicy) -> float:
        """KL divergence of the first choice from the reference's, nats: theorem 4.2 is of this."""
        return _kl(self.left, reference.left)

    def kl(self, reference: TreePolicy) -> float:
        """KL divergence of whole answers from the reference's, nats."""
        return self.first_kl(reference) + (1 - self.left) * _kl(self.win, reference.win)


def optimum(settings: Settings, eta: float) -> TreePolicy:
    """The best policy for E[r] - eta KL: in proportion to pi_ref E[exp(r/eta)] at both choices.

    >>> round(optimum(Settings(), 0.02).reward, 6)
    1.0
    """
    right = math.log(settings.p_win) + WIN_REWARD / eta  # ln of each branch's part of E[exp(r/eta)] behind the right
    behind = _log_add(right, math.log1p(-settings.p_win))
    left = math.log(settings.p_left) + LEFT_REWARD / eta
    return TreePolicy(_share(left, math.log1p(-settings.p_left) + behind), math.exp(right - behind))


def controlled(settings: Settings, eta: float) -> TreePolicy:
    """CD's policy: in proportion to pi_ref exp(E[r]/eta).

    >>> round(controlled(Settings(), 0.002).reward, 6)
    0.1
    """
    left = math.log(settings.p_left) + LEFT_REWARD / eta
    right = math.log1p(-settings.p_left) + settings.p_win * WIN_REWARD / eta
    win = math.log(settings.p_win) + WIN_REWARD / eta
    return TreePolicy(_share(left, right), _share(win, math.log1p(-settings.p_win)))


def reference(settings: Settings) -> TreePolicy:
    """The policy that all begins with."""
    return TreePolicy(settings.p_left, settings.p_win)


@generated("tree_mdp", Settings)
class TreeMDP(GeneratedTask[Settings]):
    """The task: every problem is the tree."""

    verifiable = False

    def generate(self, split: Split) -> Iterator[Problem]:
        """So many: their ids tell them apart, by which answers are drawn."""
        for number in range(getattr(self.settings, split)):
            yield Problem(f"tree-{split}-{number}", START, (RIGHT + WIN,))

    def reward(self, problem: Problem, completion: str) -> Reward:  # noqa: ARG002 - all are the tree
        """0.1 for left, 1 for right and won, 0 for right and lost, and 0 for what is no way through the tree."""
        value = _REWARDS.get(completion)
        return Reward(0.0, None, {}, "no way through the tree") if value is None else Reward(value)


def _kl(one: float, other: float) -> float:
    pairs = ((one, other), (1 - one, 1 - other))
    return math.fsum(p * math.log(p / q) for p, q in pairs if p > 0)


def _log_add(one: float, other: float) -> float:
    high, low = max(one, other), min(one, other)
    return high + math.log1p(math.exp(low - high))


def _share(one: float, other: float) -> float:
    """e^one / (e^one + e^other)."""
    return math.exp(one - _log_add(one, other))


# ---- a model and a classifier that are the tree ----------------------------------------------------------------------


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
    import tempfile

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
