"""Measures a part of a statistic: ``python -m gpuherd.qa.scoring.worker --folder ... --shard N --model ...``.

An ordinary program: it runs by hand under CUDA_VISIBLE_DEVICES as it does under the dispatcher, and goes on where it
was killed. What it is to measure stands in the folder's task.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpuherd.engines import progress
from gpuherd.errors import BadModel, printable
from gpuherd.gpus.visible import described
from gpuherd.lm.backend import PromptTokens
from gpuherd.models.load.job_options import ShardOptions
from gpuherd.models.load.jobs import is_writer, load, run_model_worker
from gpuherd.models.names import shown
from gpuherd.qa.encoders.config import EncoderKind
from gpuherd.qa.encoders.entailment import Entailment
from gpuherd.qa.encoders.model_files import encoder_files
from gpuherd.qa.encoders.similarity import self_similarity, similarity_model
from gpuherd.qa.record import Answered
from gpuherd.qa.runs import Run, run_of_path
from gpuherd.qa.scoring import tasks
from gpuherd.qa.scoring.remarks import seen
from gpuherd.qa.scoring.statistic import BadStatistic, Kind, Spec
from gpuherd.qa.scoring.task import Task, read_task
from gpuherd.runs.shards import ShardedDirectory, work_through
from gpuherd.runs.worker import unbuffered

MODULE = "gpuherd.qa.scoring.worker"
DESCRIPTION = """\
Measures a part of a statistic of a run's answers, by a model.

example:
  CUDA_VISIBLE_DEVICES=0 python -m gpuherd.qa.scoring.worker --folder runs/R/work/relevance-1a2b3c4d --shard 0 \\
    --model cross-encoder/stsb-roberta-large
"""
_TRIED = 16  # texts that a model of similarity is tried on


@dataclass
class Measuring:
    """What measures a batch, and what was seen of the model meanwhile."""

    measure: tasks.Measure
    seen: Callable[[], dict[str, Any]] = seen


def work(options: ShardOptions, words: Sequence[str]) -> None:
    """Measures what is not there yet of a shard. Raises what loading and measuring raise."""
    folder = ShardedDirectory(options.folder)
    task = read_task(folder)
    run = run_of_path(task.run)
    if run.answers_sha256 != task.answers_sha256:
        raise BadStatistic(f"{folder.root} was begun for other answers than those in {run.folder.root}; remove it")
    answers = list(run.answers())
    print(f"Model: {printable(options.model)}")
    print(described(os.environ))
    progress.report(0, None, "load")
    measured_by = measuring(task, run, answers, options, words)

    def do(items: Sequence[int]) -> list[str]:
        return measured_by.measure([answers[number] for number in items])

    done = work_through(
        folder, options.shard, do, stage=task.spec.kind.value, record=measured_by.seen, writes=is_writer()
    )
    print(f"{task.spec.name}: {done.now} of {done.items} questions measured now")


def measuring(
    task: Task, run: Run, answers: Sequence[Answered], options: ShardOptions, words: Sequence[str]
) -> Measuring:
    """The model in memory, and what it measures."""
    spec = task.spec
    if spec.by_encoder:
        return _by_encoder(spec, answers, options)
    return _by_language_model(spec, run, answers, options, words)


def _by_encoder(spec: Spec, answers: Sequence[Answered], options: ShardOptions) -> Measuring:
    files = encoder_files(options.model)
    if files.sha256 != spec.model_sha256:
        raise BadModel(f"{shown(options.model)} has changed since this work was begun; score again")
    settings = spec.settings
    cut = settings["long_texts"] == "cut"
    if spec.kind is Kind.ENTAILMENT:
        from gpuherd.qa.encoders.nli import NliModel

        nli: Entailment = NliModel(
            files, condition_on_question=settings["condition_on_question"], cut=cut, rows=options.batch_size
        )
        return Measuring(lambda batch: tasks.measure_entailment(nli, batch, spec.span))
    model = similarity_model(files, EncoderKind(settings["encoder"]), cut=cut, rows=options.batch_size)
    lowest = self_similarity(model, [each.question.question for each in answers[:_TRIED]])
    tried = partial(seen, self_similarity=lowest)
    if spec.kind is Kind.RELEVANCE:
        which = settings["answers"]
        return Measuring(lambda batch: tasks.measure_relevance(model, batch, which, spec.span), tried)
    question = settings["with_question"]
    return Measuring(lambda batch: tasks.measure_similarity(model, batch, spec.span, question=question), tried)


def _by_language_model(
    spec: Spec, run: Run, answers: Sequence[Answered], options: ShardOptions, words: Sequence[str]
) -> Measuring:
    from gpuherd.lm.model import LanguageModel
    from gpuherd.qa.scoring.asking import AskedEntailment, PTruePrompts
    from gpuherd.qa.scoring.weighing import Weigher

    loaded = load(options, words)
    for line in loaded.report.lines():
        print(printable(line))
    model = LanguageModel.of(loaded)
    if spec.kind is Kind.HIDDEN:
        prompts = prompts_of(run)
        return Measuring(lambda batch: tasks.measure_hidden(model.hidden, prompts, batch))
    weigher = Weigher(model, options.batch_size)
    masses: list[float] = []
    if spec.kind is Kind.P_TRUE:
        settings = spec.settings
        shown_ones = tuple((answers[number], bool(label)) for number, label in settings["examples"])
        asked = PTruePrompts(model.tokenizer, settings["form"], settings["ideas"], shown_ones, spec.span)
        return Measuring(
            lambda batch: tasks.measure_p_true(weigher, asked, batch, masses),
            lambda: seen(words="both options", masses=masses),
        )
    entailment = AskedEntailment(weigher, masses)
    return Measuring(
        lambda batch: tasks.measure_entailment(entailment, batch, spec.span),
        lambda: seen(words="the three words", masses=masses),
    )


def prompts_of(run: Run) -> list[PromptTokens]:
    """The prompts that the run's model was given, in the order of the questions. Raises BadStatistic where they are not
    those that the answers tell of."""
    from gpuherd.qa.prompts.maker import MadePrompt

    path = run.folder.prompts
    found = []
    try:
        with path.open("rb") as file:
            for line, answered in zip(file, run.answers(), strict=True):
                value = json.loads(line)
                ids = tuple(int(each) for each in value["token_ids"])
                if value["id"] != answered.question.id or MadePrompt("", ids).prompted.sha256 != answered.prompt.sha256:
                    raise ValueError(f"the prompt of {value['id']!r} is not the one that was answered")
                found.append(PromptTokens(answered.question.id, ids))
    except OSError as problem:
        raise BadStatistic(f"can't read {path}: {problem.strerror}") from None
    except (ValueError, KeyError, TypeError) as problem:
        raise BadStatistic(f"{path} is damaged: {problem}") from None
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker. Returns its exit code; what went wrong is on standard error."""
    return run_model_worker(MODULE, DESCRIPTION, work, argv)


if __name__ == "__main__":
    unbuffered()
    sys.exit(main())
