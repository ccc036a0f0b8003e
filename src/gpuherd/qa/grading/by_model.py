"""A judging by a model of ours: prompts made here, jobs that measure, verdicts from what they measured.

The prompts are made and written before any GPU is taken. What the jobs measure is kept under ``work/``, so that the
same command continues where it was stopped, and another threshold takes no job at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd.errors import JobCannotFit, UsageError, printable
from gpuherd.jobs.job import Job
from gpuherd.jobs.records import Outcome
from gpuherd.lm.forward import plan_batches
from gpuherd.lm.tokens import end_tokens_in, positions_in
from gpuherd.models.load.identity import files_digest, tokenizer_in
from gpuherd.models.load.jobs import JobRequest, Resources, job_request, resources_for, shard_jobs
from gpuherd.models.load.options import LoadRequest, ModelOptions
from gpuherd.models.load.prepare import located, tokenizer_folder
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.names import quoted
from gpuherd.qa.grading.config import Chat, Judge, JudgeConfig
from gpuherd.qa.grading.files import GradingTask, log_probs_of, reply_of, write_work
from gpuherd.qa.grading.stage import RULES_VERSION, JudgingOutcome, JudgingStage, distinct_cases, spread
from gpuherd.qa.grading.template import Case, JudgeTemplate, filled, template_for
from gpuherd.qa.grading.verdicts import Ruling, Verdict, parse_reply, verdict_from_log_probs, verdict_tokens
from gpuherd.qa.prompts.conversation import control_texts, templated
from gpuherd.qa.runs import Run
from gpuherd.qa.span import opens_thought, with_closed_thought
from gpuherd.runs.console import track
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import ShardedWork, gathered_lines, read_plan, shard_records
from gpuherd.runs.spec import digest_of, versions
from gpuherd.units import counted

# --- The judge, before any GPU ----------------------------------------------------------------------------------------
#
# A judge as far as it is needed before any GPU: its tokenizer, its limits, and what tells it from another model.
#
# Reads weights only for their digest; loads no model.


@dataclass(frozen=True, slots=True)
class JudgeModel:
    """A model that will judge.

    Attributes:
        tokenizer: transformers' tokenizer.
        most_positions: the most tokens of prompt and reply together, None where the config does not say.
        end_ids: tokens that end a reply.
        chat: whether the prompt goes into the tokenizer's chat template.
        sha256: of its files, as ``files_digest``.
    """

    tokenizer: Any
    most_positions: int | None
    end_ids: tuple[int, ...]
    chat: bool
    sha256: str


def open_judge(model: str, options: ModelOptions, chat: Chat) -> JudgeModel:
    """The judge of this name, fetched if it is not here.

    Raises:
        MissingModel, BadModel: it, its adapter or its tokenizer is not to be had.
        UsageError: a chat template is required, and there is none.
        MissingExtra: transformers is not installed.
    """
    path, adapter = located(
        LoadRequest(
            model=model,
            adapter=options.adapter,
            merge_adapter=options.merge_adapter,
            trust_remote_code=options.trust_remote_code,
        )
    )
    folder = path if path.is_dir() else path.parent
    tokenizer = tokenizer_in(tokenizer_folder(path, adapter), trust_remote_code=options.trust_remote_code)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat == "yes" and not has_template:
        raise UsageError(f"judge {quoted(model)} has no chat template; leave out --chat yes")
    return JudgeModel(
        tokenizer=tokenizer,
        most_positions=positions_in(folder),
        end_ids=end_tokens_in(folder, tokenizer).ids,
        chat=has_template and chat != "no",
        sha256=files_digest(*([folder] if adapter is None else [folder, adapter])),
    )


# --- Prompts ----------------------------------------------------------------------------------------------------------

_AT_ONCE = 256  # texts that the tokenizer is given, over which its threads divide themselves


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of all cases.

    Attributes:
        fitting: token ids of those for which the judge has room, in order.
        of_case: for each case its place among these, or why the judge can't judge it.
        most: the most that a prompt may have; None where the judge does not say.
        in_thought: the judge's template opens a thought, in which its reply begins.
    """

    fitting: tuple[tuple[int, ...], ...]
    of_case: tuple[int | str, ...]
    most: int | None
    in_thought: bool = False


def make_prompts(
    cases: Sequence[Case], template: JudgeTemplate, judge: JudgeModel, room: int, console: Console
) -> Prompts:
    """The prompts of these cases.

    Args:
        room: positions that are left for what follows the prompt.
        console: shows how far it is, where it takes long.
    """
    control = control_texts(judge.tokenizer)
    most = None if judge.most_positions is None else judge.most_positions - room
    fitting: list[tuple[int, ...]] = []
    of_case: list[int | str] = []
    special = _special_ids(judge.tokenizer, control)
    nothing = filled(template, Case("", ("",), ""))
    (plain,) = _token_ids([nothing], template, judge)
    ours = sum(each in special for each in plain)
    pieces = [cases[at : at + _AT_ONCE] for at in range(0, len(cases), _AT_ONCE)]
    for piece in track(console, pieces, "making prompts"):
        for ids in _token_ids([filled(template, case, control) for case in piece], template, judge):
            reason = None
            if most is not None and len(ids) > most:
                reason = f"the judge has room for {most} tokens, and this case takes {len(ids)}"
            elif sum(each in special for each in ids) != ours:
                # Some tokenizers make one of other signs too: of those that look like its own, or of other capitals.
                reason = "the judge would read a control word in this case, however it is written there"
            of_case.append(reason or len(fitting))
            if reason is None:
                fitting.append(ids)
    in_thought = judge.chat and opens_thought(_in_conversation(nothing, template, judge))
    return Prompts(tuple(fitting), tuple(of_case), most, in_thought)


def _special_ids(tokenizer: Any, control: Sequence[str]) -> frozenset[int]:
    """The tokens that no text of a case may become: all special ones but the one for what is not known."""
    ids = {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(list(control))}
    unknown = tokenizer.unk_token_id
    return frozenset(ids - ({unknown} - {tokenizer.bos_token_id, tokenizer.eos_token_id}))


def make_task(template: JudgeTemplate, judge: JudgeModel, reply_tokens: int) -> GradingTask:
    """The task for each prompt. Raises UsageError where verdict words can't be distinguished as tokens."""
    if template.mode == "tokens":

        def encode(text: str) -> Sequence[int]:
            ids: list[int] = judge.tokenizer.encode(text, add_special_tokens=False)
            return ids

        return GradingTask("tokens", verdict_tokens(template.way, template.cue, encode))
    # A base model, which only continues a text, would continue with the next case; one that converses ends its turn.
    return GradingTask("text", {}, judge.end_ids, () if judge.chat else ("\n",), reply_tokens)


def _token_ids(texts: Sequence[str], template: JudgeTemplate, judge: JudgeModel) -> list[tuple[int, ...]]:
    """Token ids of filled-in templates. The cue stands where the reply begins, except for a written reply to a
    conversation, before which a judge may think."""
    if judge.chat:
        whole = [_in_conversation(text, template, judge) for text in texts]
    else:
        whole = [f"{text}\n{template.cue}" for text in texts]
    # A conversation brings its special tokens; other texts get what this tokenizer puts before any (BOS, in most), and
    # lose what a few put behind it. Not verbose: that a text is too long is reported as a verdict, not as a warning.
    rows = judge.tokenizer(whole, add_special_tokens=not judge.chat, verbose=False)["input_ids"]
    eos = judge.tokenizer.eos_token_id
    return [tuple(row[:-1] if row[-1] == eos and not judge.chat else row) for row in rows]


def _in_conversation(text: str, template: JudgeTemplate, judge: JudgeModel) -> str:
    whole = templated(judge.tokenizer, [{"role": "user", "content": text}])
    if template.mode == "text":
        return whole
    # Where the template opens a thought the verdict would else be weighed in the middle of it.
    return with_closed_thought(whole) + template.cue


# --- Verdicts from what was measured ----------------------------------------------------------------------------------
#
# From what was measured of each case to rulings. Pure: another threshold is another call.


def rulings_on_cases(
    prompts: Prompts, lines: Sequence[bytes], template: JudgeTemplate, *, threshold: float | None, min_mass: float
) -> list[Ruling]:
    """A ruling a case.

    Args:
        lines: what the jobs wrote of each case for which the judge had room, in order.
    """
    found = []
    for place in prompts.of_case:
        if isinstance(place, str):
            found.append(Ruling(Verdict.UNPARSED, note=place))
        elif template.mode == "tokens":
            found.append(verdict_from_log_probs(log_probs_of(lines[place]), threshold=threshold, min_mass=min_mass))
        else:
            found.append(_by_reply(lines[place], template, in_thought=prompts.in_thought))
    return found


def _by_reply(line: bytes, template: JudgeTemplate, *, in_thought: bool) -> Ruling:
    reply, cut = reply_of(line)
    verdict, note = parse_reply(reply, template.way, in_thought=in_thought)
    if note is not None and cut:
        note += "; the reply was cut off (--reply-tokens allows more)"
    return Ruling(verdict, note=note, reply=reply)


# --- The judging ------------------------------------------------------------------------------------------------------

WORKER = "gpuherd.qa.grading.worker"


class JudgingByModel(JudgingStage):
    """A judging by a model, on as many GPUs as the plan gives it.

    Making one reads the answers, fetches the judge if it is not here, and makes all prompts; it writes nothing.

    Attributes:
        cases: the different cases among the answers.
        prompts: of the cases, as token ids; ``task`` what is measured behind each.
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
        super().__init__(judge, run, config, console)
        assert judge.model is not None  # noqa: S101 - judge_named gives every model judge one
        self._model_name = judge.model
        self._given, self._simulate = given or {}, simulate
        self.template = template_for(config.prompt, config.way, config.mode)
        self.cases = distinct_cases(self.items)
        self.model = open_judge(judge.model, config, config.chat)
        self.task = make_task(self.template, self.model, config.most_reply_tokens)
        longest_word = max((len(each) for ways in self.task.words.values() for each in ways), default=0)
        room = self.task.reply_tokens if self.template.mode == "text" else longest_word
        self.prompts = make_prompts([each.case for each in self.cases.cases], self.template, self.model, room, console)
        if self.cases.cases and self.prompts.most is not None and self.prompts.most < 1:
            raise UsageError(
                f"the judge has {self.model.most_positions} positions; --reply-tokens leaves none for the prompt"
            )
        measured = json.dumps(self._measured_by(), sort_keys=True)
        self.name = self.named(
            [RULES_VERSION, measured, config.model_threshold, config.least_mass, self.answers, run.answers_sha256]
        )
        self.folder = self._folder = self.work_folder(measured)
        lengths = [len(each) for each in self.prompts.fitting]
        batches = partial(plan_batches, rows=config.batch_size)
        self.work = ShardedWork(self.folder, measured, lengths, batches, config.shards)
        self._asks: JobRequest | None = None

    @property
    def workload(self) -> Workload:
        """The size of a batch."""
        return Workload(self.config.batch_size, max(self.work.lengths, default=1), self.task.reply_tokens)

    @property
    def is_measured(self) -> bool:
        """Whether no job has anything to do: another judging has measured the same, or every case is too long."""
        return not self.prompts.fitting or self.work.is_done()

    def prepare(self) -> None:
        if self.is_measured:
            return
        work = self.workload
        self.config, self._asks = fit_batch_size(
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
        line = f"{counted(len(shards), 'job')}; each: {self._asks.sentence}"
        self.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def begin_work(self, at_once: int) -> tuple[Shard, ...]:
        """Writes what the jobs are given, and who has which cases: as at the first start, if there was one."""
        write_work(self.folder, self.task, self.prompts.fitting)
        return self.work.begin(at_once)

    def jobs(self) -> Sequence[Job]:
        if self._asks is None:
            return ()
        asks, config = self._asks, self.config
        return shard_jobs(
            WORKER, self._model_name, self.work, asks, self.workload, config, title="judge", simulate=self._simulate
        )

    @property
    def folders_of_results(self) -> Sequence[Path]:
        return (self.folder.shards,)

    def finish(self, jobs: Outcome | None) -> JudgingOutcome:
        """Makes judgments of what the jobs have measured, where all of it is there."""
        if jobs is not None and not jobs.complete:
            return JudgingOutcome(jobs)
        shards = read_plan(self.folder) if self.prompts.fitting else ()
        rulings = rulings_on_cases(
            self.prompts,
            list(gathered_lines(self.folder, shards)),
            self.template,
            threshold=self.config.model_threshold,
            min_mass=self.config.least_mass,
        )
        records = shard_records(self.folder, shards)
        return self.written(
            spread(self.items, self.cases, rulings),
            self._settings(shards, records),
            {**versions(), **{name: each for record in records for name, each in record.get("versions", {}).items()}},
            threshold=self.config.model_threshold,
            prompt_sha256=self.template.sha256,
            jobs=jobs,
            judged_cases=len(self.prompts.fitting),
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
            # The tokens of the prompts as they are filled in: whatever went into them.
            "prompts": digest_of(json.dumps(self.prompts.fitting)),
            "mode": task.mode,
            "words": {verdict.value: ways for verdict, ways in task.words.items()},
            "reply_tokens": task.reply_tokens,
            "ends": [task.end_ids, task.stop],
        }

    def _settings(self, shards: Sequence[Shard], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The settings in the description of the judging. ``records``: those that the jobs wrote of their work."""
        config = self.config
        settings: dict[str, Any] = {
            "mode": self.template.mode,
            "way": self.template.way,
            "prompt": config.prompt or f"built in, {self.template.way}",
            "chat": self.model.chat,
            "cases": len(self.cases.cases),
            "not_asked": sum(isinstance(place, str) for place in self.prompts.of_case),
            # The rows of the largest batch, as it was planned at the first start.
            "batch_size": max((len(batch) for shard in shards for batch in shard.batches), default=0),
            "shards": len(shards),
            "dtype": sorted({str(each.get("dtype")) for each in records}),
            "files_sha256": self.model.sha256,
            "work": self.folder.root.name,
            "rules_version": RULES_VERSION,
        }
        if self.template.mode == "tokens":
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


def fit_batch_size(
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
