"""Self-evaluation: what the model that answered says of its answers, asked or read from its hidden state.

P(True): the probability that it gives to its answer being true. The wordings are data, with a digest that goes into the
name of what is measured by them.

P(IK): does it know the answer? A linear probe of its hidden state behind the prompt, cross-validated (Kadavath et al.
2022, arXiv 2207.05221, section 5), as jlko/semantic_uncertainty does it: a logistic regression on the state of the
prompt's last token. There the probe is trained on another split; here on the other folds of the same run, so that no
question's probability comes from a probe that saw its label. A job measures the states; the probe, which takes
scikit-learn and a moment, is trained for each scoring.
"""

from __future__ import annotations

import base64
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpuherd.errors import UsageError, naming_extras
from gpuherd.lm.backend import Generation, PromptTokens
from gpuherd.lm.tokens import spellings, without_longer
from gpuherd.options import option
from gpuherd.qa.grading.verdicts import Judgment, Verdict
from gpuherd.qa.measures.evidence import EvidenceNeed
from gpuherd.qa.record import Answered
from gpuherd.qa.span import Span, is_only_thought, part_of, span_setting
from gpuherd.qa.statistics.files import BadStatistic, StatisticSpec, line, short
from gpuherd.qa.statistics.language_model import (
    Weigher,
    Word,
    generator_of,
    load_settings,
    longest_prompt,
    mass_remarks,
    mass_seen,
    one_line,
)
from gpuherd.qa.statistics.registry import (
    NO_ANSWER,
    NOT_FINITE,
    TOO_LONG,
    BatchMeasurer,
    CommonOptions,
    Has,
    JobInputs,
    NeedSource,
    Planned,
    Planning,
    Statistic,
    StatisticCost,
    ValueInputs,
    Values,
    planned_or_there,
    register,
)
from gpuherd.units import count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gpuherd.qa.runs import Run

# --- P(IK) ------------------------------------------------------------------------------------------------------------

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

    def source(self, need: str, options: CommonOptions, has: Has, planned: Planned) -> NeedSource | str:  # noqa: ARG002
        """The states that are planned, else the latest ones, with the labels of the judging."""
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
        return probe(states, given.labels, given.options.seed)


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
    """The prompts that the run's model was given, in the order of the questions. Raises DamagedRun where they can't be
    read, BadStatistic where they are not those that the answers tell of."""
    from gpuherd.qa.generate.worker import read_items

    items = read_items(run.folder, range(run.questions))
    for answered in run.answers():
        item = items[answered.number]
        if item.question.id != answered.question.id or item.prompted.sha256 != answered.prompt.sha256:
            raise BadStatistic(f"{run.folder.prompts}: the prompt of {item.question.id!r} is not the one of its answer")
    return [items[number].prompt for number in range(run.questions)]


def probe(states: Sequence[NDArray[np.float32] | None], labels: Sequence[bool | None], seed: int) -> Values:
    """Probabilities out of fold, in [0, 1]; None for all, with the reason, where no probe can be trained.

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
        counts = f"{right.sum()} right and {(~right).sum()} wrong answers have a label"
        return Values([None] * len(labels), (f"p-ik: {counts}; a probe takes 2 of each at least",))
    with naming_extras({"sklearn": "qa", "sklearn.linear_model": "qa"}, "the probe of p-ik takes"):
        from sklearn.model_selection import StratifiedKFold
    table = np.stack([np.zeros_like(states[there[0]]) if state is None else state for state in states])
    found: list[float | None] = [None] * len(labels)
    folds = StratifiedKFold(min(FOLDS, fewest), shuffle=True, random_state=seed)
    parts = [(known[train], right[train], known[test]) for train, test in folds.split(np.zeros((len(known), 1)), right)]
    for train, labelled, test in [*parts, *([(known, right, others)] if len(others) else [])]:
        for number, value in zip(test, _fitted(table, train, labelled, test), strict=True):
            found[number] = value
    return Values(found)


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


# --- P(True) ----------------------------------------------------------------------------------------------------------

PTrueForm = Literal["true", "letter"]
EXAMPLE = "the question is one of the examples"

# LM-Polygraph's PTrue asks so and scores the word; jlko/semantic_uncertainty asks so and scores the letter. Both follow
# Kadavath et al. 2022 (arXiv 2207.05221), section 3.
_OPTIONS = {"true": " (A) True\n (B) False", "letter": "A) True\nB) False"}
_IDEAS = {"true": "Here are some ideas that were brainstormed:", "letter": "Brainstormed Answers:"}
_ASK = "Is the possible answer:\n{options}\nThe possible answer is:"


def p_true_sha256(form: str) -> str:
    """The digest of the wording of this form."""
    return hashlib.sha256("\0".join((_IDEAS[form], _ASK, _OPTIONS[form])).encode()).hexdigest()


# An option of a group.
_self_evaluation = partial(option, group="self-evaluation")


@dataclass(frozen=True, kw_only=True)
class PTrueOptions(CommonOptions):
    """The prompt for P(True): whether the model calls its own answer true."""

    p_true: PTrueForm = _self_evaluation(
        "true",
        help="reply that P(True) is the probability of: the word True (LM-Polygraph), or the letter A (jlko)",
        choices=get_args(PTrueForm),
    )
    p_true_ideas: bool = _self_evaluation(
        False, help="show the samples as brainstormed ideas before the answer is asked about"
    )
    p_true_examples: int = _self_evaluation(
        0,
        help="put so many of the run's questions with their labels before it; these get no P(True); needs --judge",
        parse=count,
        metavar="K",
    )

    def contradictions(self) -> Iterator[str]:
        """Examples have labels."""
        yield from super().contradictions()
        if self.p_true_examples > 0 and self.judge is None:
            yield "--p-true-examples shows labelled answers; --judge names the judging that has the labels"


class PTrue(Statistic[PTrueOptions]):
    """log p of "true" for the main answer."""

    kind = "p-true"
    options = PTrueOptions
    needs = (EvidenceNeed.P_TRUE,)
    costly = True

    def plan(self, options: PTrueOptions, planning: Planning) -> dict[str, StatisticSpec]:
        """P(True) of the model that answered."""
        if EvidenceNeed.P_TRUE not in planning.needs:
            return {}
        run = planning.run
        generator = generator_of(run, options)
        if options.p_true_ideas and not any(each.samples for each in run.answers()):
            raise UsageError("--p-true-ideas shows the samples, and the run has none; generate with --samples 10, say")
        examples: list[list[Any]] = []
        if options.p_true_examples:
            labels = planning.labels or {}
            examples = chosen_examples(list(run.answers()), labels, options.p_true_examples, options.seed)
        settings = {
            "form": options.p_true,
            "prompt_sha256": p_true_sha256(options.p_true),
            "ideas": options.p_true_ideas,
            "examples": examples,
            **load_settings(generator.options),
            **span_setting(options.span),
        }
        return {"p-true": StatisticSpec(self.kind, generator.model, generator.sha256, settings)}

    def source(self, need: str, options: PTrueOptions, has: Has, planned: Planned) -> NeedSource | str:  # noqa: ARG002
        """The planned statistic, else the latest one of this form with as many examples."""
        examples = options.p_true_examples
        alike = tuple(each for each in has.measured if len(each.spec.settings.get("examples", ())) == examples)
        known = Has(has.greedy, has.samples, alike).latest(
            self.kind, options.span, form=options.p_true, ideas=options.p_true_ideas
        )
        return planned_or_there(planned.get("p-true"), known, "--measures p-true has the model asked")

    def cost(self, spec: StatisticSpec, answers: Sequence[Answered]) -> StatisticCost:
        """A prompt a question, with its ideas and the examples before it."""
        samples = [sum(len(each.token_ids) for each in answered.samples) for answered in answers]
        greedy = [0 if each.greedy is None else len(each.greedy.token_ids) for each in answers]
        ideas = max(samples, default=0) if spec.settings["ideas"] else 0
        return StatisticCost(
            tuple(one + many + 1 for one, many in zip(greedy, samples, strict=True)),
            (longest_prompt(answers) + ideas) * (1 + len(spec.settings["examples"])),
            None,
        )

    def job(self, spec: StatisticSpec, inputs: JobInputs) -> BatchMeasurer:
        """Computes the probabilities of both options behind each prompt."""
        weigher = Weigher(inputs.language_model(), inputs.options.batch_size)
        settings = spec.settings
        examples = tuple((inputs.answers[number], bool(label)) for number, label in settings["examples"])
        prompts = PTruePrompts(weigher.model.tokenizer, settings["form"], settings["ideas"], examples, spec.span)
        masses: list[float] = []
        return BatchMeasurer(
            lambda batch: measure_p_true(weigher, prompts, batch, masses), lambda: mass_seen("both options", masses)
        )

    def remarks(self, seen: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Whether the model would have said something else."""
        return mass_remarks(seen)

    def values(self, given: ValueInputs[PTrueOptions]) -> Values:
        """log p of each question."""
        return Values([row["log_p"] for row in given.rows or ()])


P_TRUE = register(PTrue())


def measure_p_true(
    weigher: Weigher, prompts: PTruePrompts, answered: Sequence[Answered], masses: list[float]
) -> list[str]:
    """``log_p``: log of the probability of the word or letter that says "true"; ``mass``: of it and its opposite, which
    ``masses`` is given too."""
    why_not = [_why_not(prompts, each) for each in answered]
    tokens = [prompts.tokens(each) if why is None else None for each, why in zip(answered, why_not, strict=True)]
    found = iter(weigher.weigh([each for each in tokens if each is not None], prompts.words))
    lines = []
    for each, prompt, why_none in zip(answered, tokens, why_not, strict=True):
        weighed = None if prompt is None else next(found)
        if weighed is None or weighed[0] is None:
            why = why_none or (TOO_LONG if weighed is None else NOT_FINITE)
            lines.append(line(each, {"log_p": None, "mass": None}, why))
            continue
        mass = math.fsum(math.exp(each) for each in weighed if each is not None)
        masses.append(mass)
        lines.append(line(each, {"log_p": min(0.0, weighed[0]), "mass": short(min(1.0, mass))}))
    return lines


def _why_not(prompts: PTruePrompts, answered: Answered) -> str | None:
    """Why this answer has no P(True); None if it has one."""
    if answered.number in prompts.example_numbers:
        return EXAMPLE
    no_answer = prompts.span == "answer" and is_only_thought(answered.main)
    return NO_ANSWER if answered.main.is_nan or no_answer else None


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


@dataclass(frozen=True)
class PTruePrompts:
    """Prompts that ask whether the main answer is true.

    Attributes:
        tokenizer: of the model.
        form: ``true`` or ``letter``.
        ideas: show the samples before the answer.
        examples: questions with their label, shown before every other question.
        span: which part of a generation is shown.
    """

    tokenizer: Any
    form: str
    ideas: bool = False
    examples: tuple[tuple[Answered, bool], ...] = ()
    span: Span = "answer"

    @cached_property
    def example_numbers(self) -> frozenset[int]:
        """The numbers of the questions that are examples; they have no P(True)."""
        return frozenset(each.number for each, _ in self.examples)

    @cached_property
    def words(self) -> tuple[Word, Word]:
        """The ways to write "true", and its opposite. Raises UsageError where this tokenizer can't tell them apart."""
        if self.form == "true":
            found = spellings(self.tokenizer, "True"), spellings(self.tokenizer, "False")
        else:
            # Not in lower case: "a" is a word.
            found = _as_it_is(self.tokenizer, "A"), _as_it_is(self.tokenizer, "B")
        if len(without_longer((*found[0], *found[1]))) < len(found[0]) + len(found[1]):
            raise UsageError("the tokenizer of this model writes both options of P(True) with the same tokens")
        return found

    @cached_property
    def _controls(self) -> tuple[str, ...]:
        from gpuherd.qa.prompts.conversation import control_texts

        return control_texts(self.tokenizer)

    def text(self, answered: Answered) -> str:
        """The whole prompt; plain text, as in the codes that it follows, also for models that converse."""
        apart = "\n" if self.form == "letter" else "\n\n"  # as jlko has it
        shown = [f"{self._question_text(each)} {self._word(label)}{apart}" for each, label in self.examples]
        return "".join((*shown, self._question_text(answered)))

    def tokens(self, answered: Answered) -> PromptTokens:
        """The prompt as tokens."""
        from gpuherd.qa.prompts.conversation import token_ids

        return PromptTokens(answered.question.id, token_ids(self.tokenizer, self.text(answered), conversation=False))

    def _question_text(self, answered: Answered) -> str:
        lines = [f"Question: {self._one_line(answered.question.question)}"]
        if self.ideas:
            ideas = [self._said(each) for each in answered.samples]
            if self.form == "letter":
                # jlko's begin on the line of their heading, and have the answer itself among them.
                lines.append(f"{_IDEAS[self.form]} " + "\n".join((*ideas, self._said(answered.main))))
            else:
                lines += [_IDEAS[self.form], *ideas]
        lines += [f"Possible answer: {self._said(answered.main)}", _ASK.format(options=_OPTIONS[self.form])]
        return "\n".join(lines)

    def _word(self, label: bool) -> str:
        return ("True" if label else "False") if self.form == "true" else ("A" if label else "B")

    def _said(self, generation: Generation) -> str:
        return self._one_line(part_of(generation, self.span).text)

    def _one_line(self, text: str) -> str:
        return one_line(text, self._controls)


def _as_it_is(tokenizer: Any, word: str) -> Word:
    ids = (tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (f" {word}", word))
    return without_longer(each for each in ids if each)
