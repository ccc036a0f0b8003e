"""From collected rows to a guided policy: what the guided algorithms' ``train`` and ``policy`` have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.lm.guidance.guide import Head, read_form
from gpuherd.posttrain.guidance.data import Data
from gpuherd.posttrain.guidance.fitting import fit, trained_classifier
from gpuherd.posttrain.guidance.options import Loss, ValueOptions
from gpuherd.posttrain.types import Policy, Training

if TYPE_CHECKING:
    from gpuherd.lm.guidance.classifier import Classifier


def train_guide(data: Data, work: Training, options: ValueOptions) -> Policy:
    """Trains the classifier of a round, and returns the policy that it guides.

    It starts from the value model with a head of 0, or, with ``warm_start``, from the classifier of the round before.
    Raises UsageError where no value model is named or its tokenizer is another than the reference's.
    """
    fit(data, work, options, lambda device: _begin(data, work, options, device))
    return guided_policy(work, options)


def guided_policy(work: Training, options: ValueOptions) -> Policy:
    """The reference, guided by the classifier that a finished training has left. Raises GpuherdError where none is."""
    model = trained_classifier(work.folder)
    if model is None:
        raise GpuherdError(f"{work.folder} has no trained classifier; the training there is not finished")
    loss = Loss(read_form(model).loss or "")
    return replace(work.reference, guide=options.guide(str(model), loss))


def refuse_value_model(reference: str, value_model: str | None) -> str:
    """The value model's name. Raises UsageError where there is none, or where it reads other tokens than the reference
    writes: to be asked before anything is collected."""
    from gpuherd.lm.guidance.guide import refuse_other_tokens

    if value_model is None:
        raise UsageError("a guided algorithm takes a value model: name a small one that has the reference's tokenizer")
    refuse_other_tokens(_tokens(reference), _tokens(value_model), value_model)
    return value_model


def _begin(data: Data, work: Training, options: ValueOptions, device: str) -> Classifier:
    from gpuherd.lm.guidance.classifier import load_classifier, new_classifier

    attention = "eager" if work.precision.attention == "eager" else "sdpa"
    # Weights in training are float32 whatever the policy's: steps of 1e-5 would be lost in bfloat16.
    before = work.policy.guide
    if options.warm_start and before is not None:
        return load_classifier(before.classifier, device, "float32", attention)
    value_model = refuse_value_model(work.reference.model, work.value_model)
    head = Head.ATOMS if data.atoms else Head.BERNOULLI
    return new_classifier(
        value_model, options.classifier_type, head, data.atoms, device=device, dtype="float32", attention=attention
    )


def _tokens(model: str) -> dict[str, int]:
    from transformers import AutoTokenizer

    from gpuherd.models.checkpoints.hub import locate
    from gpuherd.models.names import parse_model

    folder = locate(parse_model(model), for_loading=True)
    found: dict[str, int] = AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab()
    return found
