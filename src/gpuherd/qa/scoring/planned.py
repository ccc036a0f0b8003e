"""What could be measured by the models that a scoring names: each statistic with its model's digest and its settings.

Finds models and reads their files, which takes a moment for each; a model is looked at only where a measure needs it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, UsageError
from gpuherd.models.load.options import ModelOptions
from gpuherd.models.names import shown
from gpuherd.models.plan.precision import Precision
from gpuherd.qa.encoders.config import EncoderKind, check_bi_encoder, check_cross_encoder, kind_of, nli_labels
from gpuherd.qa.encoders.model_files import EncoderFiles, encoder_files
from gpuherd.qa.judging.verdicts import Judgment, Verdict
from gpuherd.qa.measures.evidence import Need
from gpuherd.qa.record import Answered
from gpuherd.qa.runs import Run
from gpuherd.qa.scoring.options import BY_TEXT, ScoreOptions
from gpuherd.qa.scoring.statistic import Kind, Spec
from gpuherd.qa.span import span_setting

# How a generator was loaded for its answers is how it is asked about them, unless something else is said.
_AS_GENERATED = ("dtype", "quantization", "adapter", "merge_adapter", "trust_remote_code")
_PAIRWISE = frozenset({Need.EQUIVALENCE, Need.AFFINITY})


@dataclass(frozen=True, slots=True)
class Generator:
    """The model that answered, as the run tells of it: its name as seen from here, its digest, and how it is loaded."""

    model: str
    sha256: str
    options: ModelOptions


def generator_of(run: Run, options: ModelOptions) -> Generator:
    """The run's model. ``options``: what is said now, which goes before what was said then.

    Raises UsageError where the run does not say which files it had.
    """
    config = run.config
    model = str(config["model"])
    inside = Path(str(run.record.get("cwd", "."))) / model
    if not Path(model).expanduser().exists() and inside.exists():
        model = str(inside)
    plain = ModelOptions()
    given = {each.name: getattr(options, each.name) for each in fields(ModelOptions)}
    for name in _AS_GENERATED:
        if given[name] == getattr(plain, name) and config.get(name) is not None:
            value = config[name]
            given[name] = Precision(value) if name in ("dtype", "quantization") else value
    sha256 = run.record.get("model_sha256")
    if not isinstance(sha256, str):
        raise UsageError(f"run {run.run_id} doesn't say which files its model had, so that it can't be asked again")
    return Generator(model, sha256, ModelOptions(**given))


def planned_specs(
    options: ScoreOptions, needs: frozenset[Need], run: Run, labels: Mapping[str, Judgment] | None
) -> dict[str, Spec]:
    """The statistics that these needs could be met from, by what they are called in ``choosing.sources``.

    Args:
        labels: the judgment of each question's main answer, by id; None where no judging is named.

    Raises MissingModel, BadModel, UsageError where a model that was named can't be used.
    """
    found: dict[str, Spec] = {}
    if options.relevance_model is not None:
        files, kind = _similarity(options.relevance_model, options.relevance_kind)
        common = {"encoder": kind.value, "long_texts": options.long_texts, **span_setting(options.span)}
        for need, name, answers in (
            (Need.RELEVANCE, "relevance", "greedy"),
            (Need.SAMPLE_RELEVANCE, "sample-relevance", "samples"),
        ):
            if need in needs:
                found[name] = Spec(Kind.RELEVANCE, files.name, files.sha256, {**common, "answers": answers})
    similarity = options.similarity_model or options.relevance_model
    if similarity is not None and (Need.SIMILARITY in needs or needs & _PAIRWISE):
        own = options.similarity_model is not None
        kind_word = options.similarity_kind if own else options.relevance_kind
        found["similarity"] = _similarity_spec(options, similarity, kind_word)
    if needs & _PAIRWISE and options.equivalence not in (None, *BY_TEXT):
        _add_equivalence(found, options, run)
    if Need.P_TRUE in needs and options.measures:
        found["p-true"] = _p_true(options, run, labels)
    if Need.P_IK in needs and options.measures and options.judge is not None:
        generator = generator_of(run, options)
        found["hidden"] = Spec(Kind.HIDDEN, generator.model, generator.sha256, _loaded(generator.options))
    return found


def _similarity_spec(options: ScoreOptions, model: str, kind_word: str | None) -> Spec:
    files, kind = _similarity(model, kind_word)
    settings = {
        "encoder": kind.value,
        "long_texts": options.long_texts,
        "with_question": not options.similarity_without_question,
        **span_setting(options.span),
    }
    return Spec(Kind.SIMILARITY, files.name, files.sha256, settings)


def _add_equivalence(found: dict[str, Spec], options: ScoreOptions, run: Run) -> None:
    if options.equivalence == "embedding":
        if options.equivalence_model is not None:
            found["equivalence-similarity"] = _similarity_spec(options, options.equivalence_model, None)
        return
    if options.equivalence == "nli":
        files = encoder_of(str(options.equivalence_model))
        nli_labels(files.name, files.config)
        settings: dict[str, Any] = {
            "by": "nli",
            "condition_on_question": options.condition_on_question,
            "long_texts": options.long_texts,
            **span_setting(options.span),
        }
        found["entailment"] = Spec(Kind.ENTAILMENT, files.name, files.sha256, settings)
        return
    from gpuherd.qa.scoring.asking import ENTAILMENT_SHA256

    model, sha256, loaded = _language_model(options, run)
    settings = {"by": "judge", "prompt_sha256": ENTAILMENT_SHA256, **_loaded(loaded), **span_setting(options.span)}
    found["entailment"] = Spec(Kind.ENTAILMENT, model, sha256, settings)


def _language_model(options: ScoreOptions, run: Run) -> tuple[str, str, ModelOptions]:
    """The model that is asked for equivalence: as named, or the one that answered."""
    if options.equivalence_model is None:
        generator = generator_of(run, options)
        return generator.model, generator.sha256, generator.options
    from gpuherd.models.load.identity import model_files

    loaded = ModelOptions(**{each.name: getattr(options, each.name) for each in fields(ModelOptions)})
    return options.equivalence_model, model_files(options.equivalence_model, options.adapter).sha256, loaded


def _p_true(options: ScoreOptions, run: Run, labels: Mapping[str, Judgment] | None) -> Spec:
    from gpuherd.qa.scoring.asking import p_true_sha256

    generator = generator_of(run, options)
    if options.p_true_ideas and not any(each.samples for each in run.answers()):
        raise UsageError("--p-true-ideas shows the samples, and the run has none; generate with --samples 10, say")
    examples: list[list[Any]] = []
    if options.p_true_examples:
        examples = chosen_examples(list(run.answers()), labels or {}, options.p_true_examples, options.seed)
    settings = {
        "form": options.p_true,
        "prompt_sha256": p_true_sha256(options.p_true),
        "ideas": options.p_true_ideas,
        "examples": examples,
        **_loaded(generator.options),
        **span_setting(options.span),
    }
    return Spec(Kind.P_TRUE, generator.model, generator.sha256, settings)


def chosen_examples(
    answers: Sequence[Answered], labels: Mapping[str, Judgment], number: int, seed: int
) -> list[list[Any]]:
    """So many questions by number with their labels, drawn by the seed from those that were judged right or wrong.

    Raises UsageError where there are not so many, or none would be left to ask about.
    """
    known = [
        [each.number, labels[each.question.id].verdict is Verdict.CORRECT]
        for each in answers
        if each.question.id in labels and labels[each.question.id].verdict in (Verdict.CORRECT, Verdict.INCORRECT)
    ]
    if len(known) < number or len(answers) <= number:
        raise UsageError(
            f"--p-true-examples {number}: {len(known)} of {len(answers)} answers have a label, and examples are not "
            "asked about; take fewer"
        )
    return sorted(random.Random(seed).sample(known, number))  # noqa: S311 - a choice, not a secret


def _loaded(options: ModelOptions) -> dict[str, Any]:
    """How a language model is loaded, as far as numbers depend on it."""
    plain = ModelOptions()
    return {
        name: str(getattr(options, name)) for name in _AS_GENERATED if getattr(options, name) != getattr(plain, name)
    }


def _similarity(name: str, word: str | None) -> tuple[EncoderFiles, EncoderKind]:
    files = encoder_of(name)
    kind = kind_of(files.config) if word is None else EncoderKind(word)
    if kind is EncoderKind.CROSS:
        check_cross_encoder(files.name, files.config)
    else:
        check_bi_encoder(files.name, files.config, files.settings("modules.json"))
    return files, kind


@lru_cache(maxsize=8)
def encoder_of(name: str) -> EncoderFiles:
    """The encoder's files, read once by a command. Raises what ``encoder_files`` raises."""
    return encoder_files(name)


def language_model_of(spec: Spec, options: ScoreOptions, run: Run) -> tuple[str, ScoreOptions]:
    """The model's name for the jobs of a statistic by a language model, and the options with how it is loaded.

    Raises BadModel where the model is not the one that answered any more.
    """
    from gpuherd.models.load.identity import files_digest, model_files

    if spec.kind is Kind.ENTAILMENT and options.equivalence_model is not None:
        return options.equivalence_model, options
    generator = generator_of(run, options)
    folders = model_files(generator.model, generator.options.adapter).folders
    if files_digest(*folders, recorded=generator.sha256) != generator.sha256:
        raise BadModel(
            f"{shown(generator.model)} is not the model any more that answered: its files have changed; what it would "
            "say now says nothing about those answers"
        )
    return generator.model, replace(
        options, **{each.name: getattr(generator.options, each.name) for each in fields(ModelOptions)}
    )
