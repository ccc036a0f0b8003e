"""A judging by a model of ours: forms filled in here, jobs that measure, verdicts from what they measured.

The forms are made and written before any GPU is taken. What the jobs measure is kept under ``work/``, so that the
same command continues where it was stopped, and another threshold takes no job at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd.errors import JobCannotFit, UsageError, printable
from gpuherd.jobs.job import Job
from gpuherd.jobs.records import Outcome
from gpuherd.lm.batching import plan_batches
from gpuherd.models.load.jobs import JobRequest, Resources, WorkerCall, job_request, resources_for, shard_jobs
from gpuherd.models.plan.workload import Workload
from gpuherd.qa.judging.config import Judge, JudgeConfig
from gpuherd.qa.judging.items import Item, asking, spread
from gpuherd.qa.judging.prompting import Prompts
from gpuherd.qa.judging.stage import RULES_VERSION, JudgingOutcome, JudgingStage
from gpuherd.qa.judging.task import JudgingWork, log_probs_of, reply_of, write_task
from gpuherd.qa.judging.template import JudgeTemplate, template_for
from gpuherd.qa.judging.verdicts import Judgment, Verdict, parse_reply, weighed
from gpuherd.qa.runs import Run
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import ShardedWork, gathered_lines, read_plan, shard_records
from gpuherd.runs.spec import digest_of, versions

# --- Verdicts from what was measured ----------------------------------------------------------------------------------
#
# From what was measured of each case to judgments. Pure: another threshold is another call.


def judgments_of_cases(
    cases: Sequence[Item],
    prompts: Prompts,
    lines: Sequence[bytes],
    form: JudgeTemplate,
    *,
    threshold: float | None,
    min_mass: float,
) -> list[Judgment]:
    """A judgment a case.

    Args:
        lines: what the jobs wrote of each case for which the judge had room, in order.
    """
    found = []
    for item, place, reason in zip(cases, prompts.of_case, prompts.unasked, strict=True):
        if place is None:
            found.append(Judgment(item.question.id, item.which, Verdict.UNPARSED, note=reason))
        elif form.mode == "tokens":
            found.append(_weighed(item, lines[place], threshold, min_mass))
        else:
            found.append(_read(item, lines[place], form, in_thought=prompts.in_thought))
    return found


def _weighed(item: Item, line: bytes, threshold: float | None, min_mass: float) -> Judgment:
    result = weighed(log_probs_of(line), threshold=threshold, min_mass=min_mass)
    return Judgment(
        item.question.id, item.which, result.verdict, p_correct=result.p_correct, mass=result.mass, note=result.note
    )


def _read(item: Item, line: bytes, form: JudgeTemplate, *, in_thought: bool) -> Judgment:
    reply, cut = reply_of(line)
    verdict, note = parse_reply(reply, form.way, in_thought=in_thought)
    if note is not None and cut:
        note += "; the reply was cut off (--reply-tokens allows more)"
    return Judgment(item.question.id, item.which, verdict, reply=reply, note=note)


# --- The judging ------------------------------------------------------------------------------------------------------

WORKER = "gpuherd.qa.judging.worker"


class JudgingByModel(JudgingStage):
    """A judging by a model, on as many GPUs as the plan gives it.

    Making one reads the answers, fetches the judge if it is not here, and fills in all forms; it writes nothing.

    Attributes:
        asked: the different cases among the answers.
        prompts: their forms as token ids; ``task`` what is measured behind each.
        work: the cases as the jobs share them.

    Raises:
        UsageError, MissingModel, BadModel, MissingExtra: before anything is started; running it also JobCannotFit.
    """

    def __init__(
        self,
        judge: Judge,
        run: Run,
        config: JudgeConfig,
        console: Console,
        *,
        given: Mapping[str, Any] | None = None,
        simulate: bool = False,
    ) -> None:
        from gpuherd.qa.judging.prompting import make_prompts, make_task, open_judge

        super().__init__(judge, run, config, console)
        assert judge.model is not None  # noqa: S101 - judge_named gives every model judge one
        self._model_name = judge.model
        self._given, self._simulate = given or {}, simulate
        self.form = template_for(config.prompt, config.way, config.mode)
        self.asked = asking(self.items)
        self.model = open_judge(judge.model, config, config.chat)
        self.task = make_task(self.form, self.model, config.most_reply_tokens)
        longest_word = max((len(each) for ways in self.task.words.values() for each in ways), default=0)
        room = self.task.reply_tokens if self.form.mode == "text" else longest_word
        self.prompts = make_prompts([each.case for each in self.asked.cases], self.form, self.model, room, console)
        if self.asked.cases and self.prompts.most is not None and self.prompts.most < 1:
            raise UsageError(
                f"the judge has {self.model.most_positions} positions; --reply-tokens leaves none for the form"
            )
        measured = json.dumps(self._measured_by(), sort_keys=True)
        self.name = self.named(
            [RULES_VERSION, measured, config.model_threshold, config.least_mass, self.answers, run.answers_sha256]
        )
        self.folder = self._folder = JudgingWork(self.work_folder(measured).root)
        lengths = [len(each) for each in self.prompts.fitting]
        batches = partial(plan_batches, rows=config.batch_size)
        self.work = ShardedWork(self.folder, measured, lengths, batches, config.shards)
        self._asks: JobRequest | None = None

    @property
    def workload(self) -> Workload:
        """What a job does at once."""
        return Workload(self.config.batch_size, max(self.work.lengths, default=1), self.task.reply_tokens)

    @property
    def is_measured(self) -> bool:
        """Whether no job has anything to do: another judging has asked for the same, or every case is too long."""
        return not self.prompts.fitting or self.work.is_done()

    def prepare(self) -> None:
        if self.is_measured:
            return
        work = self.workload
        self.config, self._asks = with_room(
            self._model_name,
            self.config,
            resources_for(self.config),
            prompt_tokens=work.prompt_tokens,
            new_tokens=work.new_tokens,
            given=self._given,
        )
        self.work = replace(self.work, batches=partial(plan_batches, rows=self.config.batch_size))

    def begin(self) -> None:
        if self._asks is None:
            return
        shards = self.begin_work(self._asks.at_once)
        line = f"{len(shards)} {'job' if len(shards) == 1 else 'jobs'}; each: {self._asks.sentence}"
        self.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def begin_work(self, at_once: int) -> tuple[Shard, ...]:
        """Writes what the jobs are given, and who has which cases: as at the first start, if there was one."""
        write_task(self.folder, self.task, self.prompts.fitting)
        return self.work.begin(at_once)

    def jobs(self) -> Sequence[Job]:
        if self._asks is None:
            return ()
        call = WorkerCall(WORKER, self._model_name, (), self.workload, self._simulate, self.work.identity, "judge")
        return shard_jobs(call, self.work.shards(self._asks.at_once), self.folder, self._asks, self.config)

    @property
    def folders_of_results(self) -> Sequence[Path]:
        return (self.folder.shards,)

    def finish(self, jobs: Outcome | None) -> JudgingOutcome:
        """Makes judgments of what the jobs have measured, where all of it is there."""
        if jobs is not None and not jobs.complete:
            return JudgingOutcome(jobs)
        shards = read_plan(self.folder) if self.prompts.fitting else ()
        verdicts = judgments_of_cases(
            self.asked.cases,
            self.prompts,
            list(gathered_lines(self.folder, shards)),
            self.form,
            threshold=self.config.model_threshold,
            min_mass=self.config.least_mass,
        )
        records = shard_records(self.folder, shards)
        return self.written(
            spread(self.items, self.asked, verdicts),
            self._settings(shards, records),
            {**versions(), **{name: each for record in records for name, each in record.get("versions", {}).items()}},
            threshold=self.config.model_threshold,
            prompt_sha256=self.form.sha256,
            jobs=jobs,
            asked=len(self.prompts.fitting),
        )

    def _measured_by(self) -> dict[str, Any]:
        """All that the measurements depend on."""
        config, task = self.config, self.task
        return {
            "model": self.judge.model,
            "files": self.model.sha256,
            "dtype": None if config.dtype is None else str(config.dtype),
            "quantization": None if config.quantization is None else str(config.quantization),
            "adapter": config.adapter,
            "merged": config.merge_adapter,
            # The tokens of the forms as they are filled in: whatever went into them.
            "prompts": digest_of(json.dumps(self.prompts.fitting)),
            "mode": task.mode,
            "words": {verdict.value: ways for verdict, ways in task.words.items()},
            "reply_tokens": task.reply_tokens,
            "ends": [task.end_ids, task.stop],
        }

    def _settings(self, shards: Sequence[Shard], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What the description says of the judging. ``records``: what the jobs say of how they went."""
        config = self.config
        settings: dict[str, Any] = {
            "mode": self.form.mode,
            "way": self.form.way,
            "prompt": config.prompt or f"built in, {self.form.way}",
            "chat": self.model.chat,
            "cases": len(self.asked.cases),
            "not_asked": sum(place is None for place in self.prompts.of_case),
            # The rows of the largest batch, as it was planned at the first start.
            "batch_size": max((len(batch) for shard in shards for batch in shard.batches), default=0),
            "shards": len(shards),
            "dtype": sorted({str(each.get("dtype")) for each in records}),
            "files_sha256": self.model.sha256,
            "work": self.folder.root.name,
            "rules_version": RULES_VERSION,
        }
        if self.form.mode == "tokens":
            settings["min_mass"] = config.least_mass
            settings["words"] = {
                verdict.value: [self.model.tokenizer.decode(list(each)) for each in ways]
                for verdict, ways in self.task.words.items()
            }
        else:
            settings["reply_tokens"] = self.task.reply_tokens
        if config.adapter is not None:
            settings |= {"adapter": config.adapter, "merged": config.merge_adapter}
        return settings


def with_room(
    model: str, config: JudgeConfig, have: Resources, *, prompt_tokens: int, new_tokens: int, given: Mapping[str, Any]
) -> tuple[JudgeConfig, JobRequest]:
    """The options, and what each job asks for with them.

    A judge reads much and says one word, so that a smaller batch costs it little: where the model does not fit with
    the usual one (a 70B judge in 16 bit on four GPUs of 40 GB), it is halved until it does. A batch that the user gave
    is kept.

    Raises as ``job_request``; JobCannotFit only where not even one case at a time has room, or the batch was given.
    """
    while True:
        try:
            return config, job_request(model, config, Workload(config.batch_size, prompt_tokens, new_tokens), have)
        except JobCannotFit:
            if "batch_size" in given or config.batch_size == 1:
                raise
        config = replace(config, batch_size=config.batch_size // 2)
