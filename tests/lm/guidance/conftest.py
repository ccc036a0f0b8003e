"""A policy and classifiers with its tokenizer, tiny and random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.conftest import policy_model, value_model
from tests.qa.small_models import seeded

__all__ = ["policy_model", "value_model"]

MakeClassifier = Callable[..., Any]


@pytest.fixture(scope="session")
def policy(policy_model: Path) -> Any:
    """The policy's module."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy_model).eval()


@pytest.fixture(scope="session")
def tokenizer(policy_model: Path) -> Any:
    """The policy's tokenizer, padding at the left."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy_model, padding_side="left")


@pytest.fixture(scope="session")
def make(value_model: Path) -> MakeClassifier:
    """``make(kind, atoms)``: a classifier whose random head says p of all sizes."""

    def made(kind: str = "v", atoms: tuple[float, ...] = (), **how: Any) -> Any:
        import torch

        from gpuherd.lm.guidance.classifier import new_classifier
        from gpuherd.lm.guidance.guide import Head, Kind

        head = Head.ATOMS if atoms else Head.BERNOULLI
        classifier = new_classifier(value_model, Kind(kind), head, atoms, **how)
        with seeded(5):
            torch.nn.init.normal_(classifier.module.head.weight, std=0.7)
            torch.nn.init.normal_(classifier.module.head.bias, std=0.5)
        return classifier

    return made
