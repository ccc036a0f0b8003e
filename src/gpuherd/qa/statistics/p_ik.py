"""P(IK): does the model know the answer? A linear probe of its hidden state behind the prompt, cross-validated.

Kadavath et al. 2022 (arXiv 2207.05221), section 5, as jlko/semantic_uncertainty does it: a logistic regression on the
state of the prompt's last token. There the probe is trained on another split; here on the other folds of the same run,
so that no question's probability comes from a probe that saw its label. A job measures the states; the probe, which
takes scikit-learn and a moment, is trained for each scoring.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.errors import naming_extras
from gpuherd.lm.backend import PromptTokens
from gpuherd.qa.measures.evidence import EvidenceNeed
from gpuherd.qa.record import Answered
from gpuherd.qa.statistics.files import BadStatistic, StatisticSpec, line
from gpuherd.qa.statistics.language_model import generator_of, load_settings
from gpuherd.qa.statistics.registry import (
    NOT_FINITE,
    BatchMeasurer,
    CommonOptions,
    Has,
    JobInputs,
    NeedSource,
    Planning,
    Statistic,
    StatisticCost,
    ValueInputs,
    Values,
    planned_or_there,
    register,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gpuherd.qa.runs import Run

FOLDS = 5
_TOLERANCE = 1e-9  # of the gradient, an answer's mean


class Hidden(Statistic[CommonOptions]):
    """The generator's last hidden state behind the prompt, and a probe of it."""

    kind = "hidden"
    needs = (EvidenceNeed.P_IK,)
    costly = True

    def plan(self, options: CommonOptions, planning: Planning) -> dict[str, StatisticSpec]:
        """The model that answered reads its prompts again, where there are labels for a probe."""
        if EvidenceNeed.P_IK not in planning.needs or options.judge is None:
            return {}
        generator = generator_of(planning.run, options)
        return {"hidden": StatisticSpec(self.kind, generator.model, generator.sha256, load_settings(generator.options))}

    def sources(
        self, options: CommonOptions, has: Has, planned: Mapping[str, StatisticSpec]
    ) -> dict[str, NeedSource | str]:
        """The states that are planned, else the latest ones, with the labels of the judging."""
        return {EvidenceNeed.P_IK: self._source(options, has, planned)}

    def _source(self, options: CommonOptions, has: Has, planned: Mapping[str, StatisticSpec]) -> NeedSource | str:
        if options.judge is None:
            return "--judge names the judging whose labels train the probe"
        remedy = "--measures p-ik has the model read"
        met = planned_or_there(planned.get("hidden"), has.latest(self.kind, "both"), remedy)
        return met if isinstance(met, str) else NeedSource(f"{met.said}, labels of {options.judge}", met.spec)

    def settings(self, options: CommonOptions, sources: Mapping[str, NeedSource]) -> dict[str, Any]:
        """Whose labels, and the folds."""
        return {"judging": options.judge, "seed": options.seed} if EvidenceNeed.P_IK in sources else {}

    def cost(self, spec: StatisticSpec, answers: Sequence[Answered]) -> StatisticCost:  # noqa: ARG002
        """A prompt a question."""
        tokens = tuple(each.prompt.tokens for each in answers)
        return StatisticCost(tokens, max(tokens, default=1), None)

    def job(self, spec: StatisticSpec, inputs: JobInputs) -> BatchMeasurer:  # noqa: ARG002
        """The model reads the prompts."""
        model = inputs.language_model()
        prompts = prompts_of(inputs.run)
        return BatchMeasurer(lambda batch: measure_hidden(model.hidden, prompts, batch))

    def values(self, given: ValueInputs[CommonOptions]) -> Values:
        """The probe's probability of each question, from folds that did not see its label."""
        states = [None if row["state"] is None else state_of(row["state"]) for row in given.rows or ()]
        found = probe(states, given.labels, given.options.seed)
        return Values(found.values, () if found.why is None else (f"p-ik: {found.why}",))


HIDDEN = register(Hidden())


def measure_hidden(
    states: Callable[[Sequence[PromptTokens]], NDArray[np.float32]],
    prompts: Sequence[PromptTokens],
    answered: Sequence[Answered],
) -> list[str]:
    """``state``: the last layer's state of the prompt's last token, little-endian float32 in base64; null where not all
    of it is finite, as where a model overflows its half precision."""
    import numpy as np

    lines = []
    for each, row in zip(answered, states([prompts[each.number] for each in answered]), strict=True):
        finite = bool(np.isfinite(row).all())
        state = base64.b64encode(row.astype("<f4").tobytes()).decode("ascii") if finite else None
        lines.append(line(each, {"state": state}, None if finite else NOT_FINITE))
    return lines


def state_of(text: str) -> NDArray[np.float32]:
    """The state that ``measure_hidden`` wrote, (d,) float32."""
    import numpy as np

    found: NDArray[np.float32] = np.frombuffer(base64.b64decode(text), dtype="<f4")
    return found


def prompts_of(run: Run) -> list[PromptTokens]:
    """The prompts that the run's model was given, in the order of the questions. Raises BadStatistic where they are not
    those that the answers tell of."""
    from gpuherd.qa.prompts.maker import TokenizedPrompt

    path = run.folder.prompts
    found = []
    try:
        with path.open("rb") as file:
            for line, answered in zip(file, run.answers(), strict=True):
                value = json.loads(line)
                ids = tuple(int(each) for each in value["token_ids"])
                if (
                    value["id"] != answered.question.id
                    or TokenizedPrompt("", ids).prompted.sha256 != answered.prompt.sha256
                ):
                    raise ValueError(f"the prompt of {value['id']!r} is not the one that was answered")
                found.append(PromptTokens(answered.question.id, ids))
    except OSError as problem:
        raise BadStatistic(f"can't read {path}: {problem.strerror}") from None
    except (ValueError, KeyError, TypeError) as problem:
        raise BadStatistic(f"{path} is damaged: {problem}") from None
    return found


@dataclass(frozen=True, slots=True)
class Probed:
    """P(IK) of each question, in [0, 1]; None for all, with the reason, where no probe can be trained."""

    values: tuple[float | None, ...]
    why: str | None = None


def probe(states: Sequence[NDArray[np.float32] | None], labels: Sequence[bool | None], seed: int) -> Probed:
    """Probabilities out of fold.

    Args:
        states: (d,) of each question; None where there is none, and so no probability.
        labels: whether the main answer was right; None where there is no label. Such a question trains nothing, and is
            given the probability of a probe of all labelled ones.
        seed: of the folds.

    There are 5 folds, fewer where a class has fewer members; with fewer than 2 of a class there is no probe. States are
    standardised by the training folds; the regression has an L2 penalty of 1 (C = 1) and is fitted to convergence.
    """
    import numpy as np

    there = [number for number, state in enumerate(states) if state is not None]
    known = np.array([number for number in there if labels[number] is not None], dtype=int)
    others = np.array([number for number in there if labels[number] is None], dtype=int)
    right = np.array([labels[number] for number in known], dtype=bool)
    fewest = int(min(right.sum(), (~right).sum()))
    if fewest < 2:
        return Probed(
            (None,) * len(labels),
            f"{right.sum()} right and {(~right).sum()} wrong answers have a label; a probe takes 2 of each at least",
        )
    with naming_extras({"sklearn": "qa", "sklearn.linear_model": "qa"}, "the probe of p-ik takes"):
        from sklearn.model_selection import StratifiedKFold
    table = np.stack([np.zeros_like(states[there[0]]) if state is None else state for state in states])
    found: list[float | None] = [None] * len(labels)
    folds = StratifiedKFold(min(FOLDS, fewest), shuffle=True, random_state=seed)
    parts = [(known[train], right[train], known[test]) for train, test in folds.split(np.zeros((len(known), 1)), right)]
    for train, labelled, test in [*parts, *([(known, right, others)] if len(others) else [])]:
        for number, value in zip(test, _fitted(table, train, labelled, test), strict=True):
            found[number] = value
    return Probed(tuple(found))


def _fitted(
    states: NDArray[np.float32], train: NDArray[np.int_], right: NDArray[np.bool_], test: NDArray[np.int_]
) -> list[float]:
    """P(right) of the questions ``test`` by a probe of the questions ``train``."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    known = scaler.fit_transform(states[train].astype("float64"))
    # The penalised weights lie in the span of the training states: there the problem has as many unknowns as questions
    # at most, and Newton's method, which ends at the optimum itself, is affordable whatever the model's width.
    axes = np.linalg.svd(known, full_matrices=False)[2].T
    model = LogisticRegression(solver="newton-cholesky", tol=_TOLERANCE, max_iter=1000)
    model.fit(known @ axes, right)
    column = list(model.classes_).index(True)
    projected = scaler.transform(states[test].astype("float64")) @ axes
    return [float(value) for value in model.predict_proba(projected)[:, column]]
