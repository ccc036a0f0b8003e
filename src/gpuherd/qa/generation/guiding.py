"""Answers that a classifier guides: the options, what a run keeps of its guide, and the memory that it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel, UsageError
from gpuherd.lm.guidance.guide import FILE, HEAD_FILE, Guide, Head, Mode, read_form, refuse_other_tokens, tokens_digest
from gpuherd.lm.guidance.law import refuse_mode
from gpuherd.models.plan.workload import Workload
from gpuherd.options import option

if TYPE_CHECKING:
    from gpuherd.lm.guidance.guidance import Guidance

_BOUNDLESS = 1 << 50
_NAMES = ("guide", "eta", "guide_mode", "guide_top_k")


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{word!r} is no number") from None


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is no whole number") from None


def _mode(word: str) -> Mode:
    try:
        return Mode(word)
    except ValueError:
        raise ValueError(f"{word!r} is none of {', '.join(Mode)}") from None


@dataclass(frozen=True, kw_only=True)
class GuideOptions:
    """By what answers are guided. Raises UsageError for options that say how and none that says by what."""

    guide: str | None = option(
        None,
        help="a classifier's folder (of Q#, PITA or CD) that guides the answers; log-probs stay the model's own",
        metavar="CLASSIFIER",
        group="guidance",
    )
    eta: float | None = option(
        None,
        help="weight of the divergence from the model, as in the papers: small guides strongly (default: 0.1)",
        parse=_number,
        metavar="ETA",
        group="guidance",
    )
    guide_mode: Mode | None = option(
        None,
        help="what is added to a candidate's log-prob (default: bernoulli, or distributional where the classifier "
        "predicts several rewards; expectation is CD)",
        parse=_mode,
        choices=tuple(Mode),
        group="guidance",
    )
    guide_top_k: int | None = option(
        None,
        help="the model's so many most probable tokens are candidates, and no others (default: 20)",
        parse=_whole,
        metavar="N",
        group="guidance",
    )

    def __post_init__(self) -> None:
        if self.guide is None:
            for name in _NAMES[1:]:
                if getattr(self, name) is not None:
                    raise UsageError(f"--{name.replace('_', '-')} without --guide: nothing is guided")
            return
        if self.eta is not None and not math.isfinite(self.eta):
            raise UsageError("--eta: it is finite; without --guide nothing is guided")
        self.as_guide(Mode.EXPECTATION)  # refuses numbers that make no sense

    def as_guide(self, usual: Mode) -> Guide:
        """What guides, where something does; ``usual``: the mode where none is said."""
        assert self.guide is not None  # noqa: S101 - asked where something guides
        guide = Guide(self.guide, mode=usual if self.guide_mode is None else Mode(self.guide_mode))
        return replace(
            guide,
            eta=guide.eta if self.eta is None else self.eta,
            top_k=guide.top_k if self.guide_top_k is None else self.guide_top_k,
        )


def settled_guide(options: GuideOptions, tokenizer: Any) -> Guide | None:
    """The guide of a run with all of it said; None where nothing guides.

    Raises MissingModel, BadModel where there is no classifier; UsageError where it has another tokenizer than the
    policy (``tokenizer``), or its head does not go with the mode.
    """
    if options.guide is None:
        return None
    folder = Path(options.guide).expanduser()
    form = read_form(folder)
    guide = options.as_guide(Mode.BERNOULLI if form.head is Head.BERNOULLI else Mode.DISTRIBUTIONAL)
    refuse_mode(guide.mode, atoms=form.head is Head.ATOMS)
    tokens: Mapping[str, int] = tokenizer.get_vocab()
    if tokens_digest(tokens) != form.tokenizer_sha256:
        from gpuherd.models.load.identity import tokenizer_in

        refuse_other_tokens(tokens, tokenizer_in(folder).get_vocab(), str(folder))
        raise BadModel(f"{folder}: its tokenizer is not the one that it was trained with ({FILE})")
    return Guide(str(folder.resolve()), guide.eta, guide.mode, guide.top_k)


def guide_bytes(guide: Guide | None, workload: Workload) -> int:
    """Memory that a classifier takes beside the model: weights, what it keeps of rows that grow, and a pass of all
    candidates. 0 without one. Raises MissingModel, BadModel."""
    if guide is None:
        return 0
    from gpuherd.models.place.gpus import GpuSpec
    from gpuherd.models.place.planner import make_plan
    from gpuherd.models.place.resources import read_with_precision
    from gpuherd.models.place.result import AnswerRefusal
    from gpuherd.models.plan.workload import Reserve

    architecture, precision = read_with_precision(guide.classifier, None)
    # Each step reads the candidates behind what there is: a pass of as many tokens as a short prompt's.
    at_once, longest = max(workload.prompt_tokens, guide.top_k), workload.new_tokens + guide.top_k
    plan = make_plan(
        architecture,
        [GpuSpec("0", "", total=0, free=_BOUNDLESS)],
        precision,
        Workload(workload.batch, at_once, longest),
        Reserve(context=0, fixed=0, share=0.0),
    )
    if isinstance(plan, AnswerRefusal):
        raise BadModel(f"{guide.classifier} can't be planned: {plan.reason}")
    return (plan.memory_mb << 20) + _head_bytes(Path(guide.classifier))


def _head_bytes(folder: Path) -> int:
    """Of kind Q it is as wide as the vocabulary, for each atom. Raises BadModel."""
    try:
        return (folder / HEAD_FILE).stat().st_size
    except OSError as problem:
        raise BadModel(f"{folder / HEAD_FILE} can't be read: {problem.strerror}") from None


def load_guidance(record: Mapping[str, Any], device: str) -> Guidance | None:
    """The classifier of a run by its run.json, on the model's device; None where nothing guides.

    Raises BadModel where its files are others than when the run was begun.
    """
    if record.get("guide") is None:
        return None
    from gpuherd.lm.guidance.guidance import Guidance
    from gpuherd.models.load.identity import files_digest

    guide = Guide.from_dict(record["guide"])
    recorded = record["guide_sha256"]
    if files_digest(Path(guide.classifier), recorded=recorded) != recorded:
        raise BadModel(f"{guide.classifier} has changed since the run was begun; give another --run-id")
    return Guidance.load(guide, device=device)
