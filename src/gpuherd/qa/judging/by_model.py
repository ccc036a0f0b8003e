"""A judging by a model of ours: forms filled in here, jobs that measure, verdicts from what they measured.

The forms are made and written before any GPU is taken. What the jobs measure is kept under ``work/``, so that the same
command goes on where it was stopped, and another threshold takes no job at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from gpuherd.errors import UsageError, printable
from gpuherd.models.plan.workload import Workload
from gpuherd.qa.judging.config import JudgeConfig
from gpuherd.qa.judging.files import existing, write_judging
from gpuherd.qa.judging.form import Form, form_for
from gpuherd.qa.judging.items import Asking, Item, asking, items_of, spread
from gpuherd.qa.judging.judges import Judge, digest_of, judging_name
from gpuherd.qa.judging.made import RULES_VERSION, Made, now, versions
from gpuherd.qa.judging.meta import Answers, JudgingMeta
from gpuherd.qa.judging.room import with_room
from gpuherd.qa.judging.task import JudgingWork, Task, write_task
from gpuherd.qa.judging.verdict import Verdict
from gpuherd.qa.judging.verdicts import judgments_of_cases
from gpuherd.qa.runs import Run
from gpuherd.qa.working.gathering import gathered_lines
from gpuherd.qa.working.model_jobs import Asks, WorkerCall, having, shard_jobs
from gpuherd.qa.working.running import failure_lines, run_work
from gpuherd.qa.working.sharding import Shard, number_of_shards, plan_shards
from gpuherd.qa.working.shardplan import kept_plan, read_plan
from gpuherd.qa.working.shardwork import is_done

if TYPE_CHECKING:
    from gpuherd.qa.judging.judge_model import JudgeModel
    from gpuherd.qa.judging.prompting import Prompts

WORKER = "gpuherd.qa.judging.worker"


@dataclass(frozen=True)
class Ready:
    """Everything that is known before a job starts.

    Attributes:
        items: the answers to judge, and ``answers`` which these are.
        asked: the different cases among them.
        prompts: their forms as token ids; ``task`` what is measured behind each.
        measured: what the measurements depend on, as a text.
        name: of the judging; it depends on the threshold too.
        folder: where the jobs work.
    """

    judge: Judge
    run: Run
    config: JudgeConfig
    items: list[Item]
    answers: Answers
    asked: Asking
    form: Form
    model: JudgeModel
    prompts: Prompts
    task: Task
    measured: str
    name: str
    folder: JudgingWork

    @property
    def model_name(self) -> str:
        """What is loaded."""
        assert self.judge.model is not None  # noqa: S101 - judge_named gives every model judge one
        return self.judge.model

    @property
    def workload(self) -> Workload:
        """What a job does at once."""
        longest = max(map(len, self.prompts.fitting), default=1)
        return Workload(self.config.batch_size, longest, self.task.reply_tokens)


def judge_by_model(
    judge: Judge,
    run: Run,
    config: JudgeConfig,
    console: Console,
    *,
    given: Mapping[str, Any] | None = None,
    simulate: bool = False,
) -> Made:
    """Judges the run by a model, on as many GPUs as the plan gives it. Arguments as ``judge_run``.

    Raises:
        UsageError, MissingModel, BadModel, MissingExtra, JobCannotFit: before anything is started.
        CannotWrite, QueueBusy.
    """
    ready = prepare(judge, run, config, console)
    before = existing(run.folder, ready.name)
    if before is not None:
        return Made(before, already=True)
    if not _is_measured(ready):
        ready, asks = _with_room(ready, given or {})
        shards = begin(ready, asks.at_once)
        told = f"{len(shards)} {'job' if len(shards) == 1 else 'jobs'}; each: {asks.sentence}"
        console.print(printable(told), markup=False, highlight=False, soft_wrap=True)
        call = WorkerCall(WORKER, ready.model_name, (), ready.workload, simulate, ready.measured, "judge")
        jobs = shard_jobs(call, shards, ready.folder, asks, ready.config)
        outcome = run_work(jobs, ready.config, ready.folder, console, kind="judge")
        if not outcome.complete:
            return Made(None, outcome.exit_code, failures=tuple(failure_lines(outcome)))
    return finish(ready)


def _with_room(ready: Ready, given: Mapping[str, Any]) -> tuple[Ready, Asks]:
    work = ready.workload
    config, asks = with_room(
        ready.model_name,
        ready.config,
        having(ready.config),
        prompt_tokens=work.prompt_tokens,
        new_tokens=work.new_tokens,
        given=given,
    )
    return replace(ready, config=config), asks


def _is_measured(ready: Ready) -> bool:
    """Whether no job has anything to do: another judging has asked for the same, or every case is too long."""
    if not ready.prompts.fitting:
        return True
    if not ready.folder.plan.exists():
        return False
    return all(is_done(ready.folder, number) for number, shard in enumerate(read_plan(ready.folder)) if shard.items)


def prepare(judge: Judge, run: Run, config: JudgeConfig, console: Console) -> Ready:
    """Reads the answers, fetches the judge if it is not here, and fills in all forms. Writes nothing."""
    from gpuherd.qa.judging.judge_model import open_judge
    from gpuherd.qa.judging.prompting import make_prompts, make_task

    assert judge.model is not None  # noqa: S101 - judge_named gives every model judge one
    form = form_for(config.prompt, config.way, config.mode)
    items, answers = items_of(run.answers(), config.answers)
    asked = asking(items)
    model = open_judge(judge.model, config, config.chat)
    task = make_task(form, model, config.most_reply_tokens)
    room = task.reply_tokens if form.mode == "text" else _longest_word(task)
    prompts = make_prompts([each.case for each in asked.cases], form, model, room, console)
    if asked.cases and prompts.most is not None and prompts.most < 1:
        raise UsageError(f"the judge has {model.most_positions} positions; --reply-tokens leaves none for the form")
    measured = json.dumps(_what_measurements_depend_on(judge, config, model, task, prompts), sort_keys=True)
    whole = [RULES_VERSION, measured, config.model_threshold, config.least_mass, answers, run.answers_sha256]
    return Ready(
        judge=judge,
        run=run,
        config=config,
        items=items,
        answers=answers,
        asked=asked,
        form=form,
        model=model,
        prompts=prompts,
        task=task,
        measured=measured,
        name=judging_name(judge, digest_of(json.dumps(whole))),
        folder=JudgingWork(run.folder.work_of(judging_name(judge, digest_of(measured))).root),
    )


def begin(ready: Ready, at_once: int) -> tuple[Shard, ...]:
    """Writes what the jobs are given, and who has which cases; as it was at the first start, where there was one.

    Args:
        at_once: how many jobs can run side by side.
    """
    from gpuherd.lm.batching import plan_batches

    lengths = [len(each) for each in ready.prompts.fitting]
    config = ready.config

    def planned() -> tuple[Shard, ...]:
        number = number_of_shards(len(lengths), at_once, config.shards)
        return plan_shards(lengths, number, lambda some: plan_batches(some, rows=config.batch_size))

    write_task(ready.folder, ready.task, ready.prompts.fitting)
    return kept_plan(ready.folder, ready.measured, planned, wanted=config.shards)


def finish(ready: Ready) -> Made:
    """Makes judgments of what the jobs have measured, all of which is there, and writes them."""
    shards = read_plan(ready.folder) if ready.prompts.fitting else ()
    config = ready.config
    verdicts = judgments_of_cases(
        ready.asked.cases,
        ready.prompts,
        list(gathered_lines(ready.folder, shards)),
        ready.form,
        threshold=config.model_threshold,
        min_mass=config.least_mass,
    )
    meta = _meta(ready, _recorded(ready.folder, shards))
    written = write_judging(ready.run.folder, meta, spread(ready.items, ready.asked, verdicts))
    return Made(written, asked=len(ready.prompts.fitting))


def _longest_word(task: Task) -> int:
    return max(len(each) for ways in task.words.values() for each in ways)


def _what_measurements_depend_on(
    judge: Judge, config: JudgeConfig, model: JudgeModel, task: Task, prompts: Prompts
) -> dict[str, Any]:
    return {
        "model": judge.model,
        "files": model.sha256,
        "dtype": None if config.dtype is None else str(config.dtype),
        "quantization": None if config.quantization is None else str(config.quantization),
        "adapter": config.adapter,
        "merged": config.merge_adapter,
        # The tokens of the forms as they are filled in: whatever went into them.
        "prompts": digest_of(json.dumps(prompts.fitting)),
        "mode": task.mode,
        "words": {verdict.value: ways for verdict, ways in task.words.items()},
        "reply_tokens": task.reply_tokens,
        "ends": [task.end_ids, task.stop],
    }


def _recorded(folder: JudgingWork, shards: tuple[Shard, ...]) -> dict[str, Any]:
    """What the jobs say of how they were made: the dtype, versions, the rows that fitted."""
    records = [json.loads(folder.shard_done(number).read_bytes()) for number, each in enumerate(shards) if each.items]
    return {
        "dtype": sorted({str(each.get("dtype")) for each in records}),
        "versions": {name: version for each in records for name, version in each.get("versions", {}).items()},
        "shards": len(shards),
        # The rows of the largest batch, as it was planned at the first start.
        "batch_size": max((len(batch) for shard in shards for batch in shard.batches), default=0),
    }


def _meta(ready: Ready, recorded: Mapping[str, Any]) -> JudgingMeta:
    judge, config = ready.judge, ready.config
    settings: dict[str, Any] = {
        "mode": ready.form.mode,
        "way": ready.form.way,
        "prompt": config.prompt or f"built in, {ready.form.way}",
        "chat": ready.model.chat,
        "cases": len(ready.asked.cases),
        "not_asked": sum(place is None for place in ready.prompts.of_case),
        "batch_size": recorded["batch_size"],
        "shards": recorded["shards"],
        "dtype": recorded["dtype"],
        "files_sha256": ready.model.sha256,
        "work": ready.folder.root.name,
        "rules_version": RULES_VERSION,
    }
    if ready.form.mode == "tokens":
        settings["min_mass"] = config.least_mass
        settings["words"] = {
            verdict.value: [ready.model.tokenizer.decode(list(each)) for each in ways]
            for verdict, ways in ready.task.words.items()
        }
    else:
        settings["reply_tokens"] = ready.task.reply_tokens
    if config.adapter is not None:
        settings |= {"adapter": config.adapter, "merged": config.merge_adapter}
    return JudgingMeta(
        name=ready.name,
        judge=judge.said,
        kind=judge.kind,
        model=judge.model,
        threshold=config.model_threshold,
        prompt_sha256=ready.form.sha256,
        answers=ready.answers,
        answers_sha256=ready.run.answers_sha256,
        counts=dict.fromkeys(Verdict, 0),
        sha256="",
        settings=settings,
        versions={**versions(), **recorded["versions"]},
        made=now(),
    )
