"""A model of similarity behind a statistic: found and checked before any job, tried in the job. No torch to plan it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

from gpuherd.qa.statistics.registry import CommonOptions, JobInputs

if TYPE_CHECKING:
    from gpuherd.qa.encoders.model_files import EncoderFiles
    from gpuherd.qa.encoders.similarity import Similarity

EncoderWord = Literal["cross-encoder", "bi-encoder"]

_TRIED = 16  # texts that a model of similarity is tried on
_LOW_SELF_SIMILARITY = 0.9  # below this a model does not even find a text similar to itself


@lru_cache(maxsize=8)
def encoder_of(name: str) -> EncoderFiles:
    """The encoder's files, read once by a command. Raises MissingModel, BadModel."""
    from gpuherd.qa.encoders.model_files import encoder_files

    return encoder_files(name)


def similarity_settings(
    name: str, word: EncoderWord | None, options: CommonOptions
) -> tuple[EncoderFiles, dict[str, Any]]:
    """The files of a model of similarity, and what its figures depend on. ``word``: how it compares texts, where that
    is not what its config says. Raises MissingModel, BadModel."""
    from gpuherd.qa.encoders.config import EncoderKind, check_bi_encoder, check_cross_encoder, kind_of

    files = encoder_of(name)
    kind = kind_of(files.config) if word is None else EncoderKind(word)
    if kind is EncoderKind.CROSS:
        check_cross_encoder(files.name, files.config)
    else:
        check_bi_encoder(files.name, files.config, files.settings("modules.json"))
    return files, {"encoder": kind.value, "long_texts": options.long_texts}


def loaded_similarity(inputs: JobInputs) -> tuple[Similarity, partial[Mapping[str, Any]]]:
    """A job's model of similarity in memory, and what is seen of it: how similar it finds a text to itself."""
    from gpuherd.qa.encoders.config import EncoderKind
    from gpuherd.qa.encoders.similarity import self_similarity, similarity_model

    settings = inputs.spec.settings
    cut = settings["long_texts"] == "cut"
    kind = EncoderKind(settings["encoder"])
    model = similarity_model(inputs.encoder(), kind, cut=cut, rows=inputs.options.batch_size)
    lowest = self_similarity(model, [each.question.question for each in inputs.answers[:_TRIED]])
    return model, partial(dict, self_similarity=lowest)


def self_similarity_remarks(seen: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A sentence where the model does not find a text similar to itself."""
    lowest = min((each["self_similarity"] for each in seen if each.get("self_similarity") is not None), default=None)
    if lowest is None or lowest >= _LOW_SELF_SIMILARITY:
        return ()
    return (f"the model finds a text similar to itself by as little as {lowest:.2f}, which should be near 1",)
