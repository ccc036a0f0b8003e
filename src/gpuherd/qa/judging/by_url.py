"""A judging by a model behind an address: several requests at once, each batch of replies kept as soon as it is there.

In this process, without GPUs and without torch. Replies are kept under ``work/`` as the lines of a shard are, so that
the same command goes on where it was stopped, and pays for no reply twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from gpuherd.atomic import atomic_write
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.qa.folder import FORMAT
from gpuherd.qa.judging.config import JudgeConfig
from gpuherd.qa.judging.dialect import VERDICT_TOKENS, Dialect, Reply, judged
from gpuherd.qa.judging.endpoint import HERE, CaseFailed, Endpoint, Patience
from gpuherd.qa.judging.files import existing, write_judging
from gpuherd.qa.judging.form import Case, Form, filled, form_for
from gpuherd.qa.judging.items import Asking, Item, asking, items_of, spread
from gpuherd.qa.judging.judges import Judge, digest_of, judging_name
from gpuherd.qa.judging.made import RULES_VERSION, Made, now, versions
from gpuherd.qa.judging.meta import Answers, JudgingMeta
from gpuherd.qa.judging.task import BadTask, JudgingWork
from gpuherd.qa.judging.verdict import Judgment, Verdict
from gpuherd.qa.runs import Run
from gpuherd.qa.working.gathering import gathered_lines
from gpuherd.qa.working.shardfile import ShardFile
from gpuherd.qa.working.sharding import Shard
from gpuherd.qa.working.shardplan import kept_plan
from gpuherd.qa.working.shardwork import is_done
from gpuherd.report.progress import track

# So many requests of each of those that run at once lie in a batch: the slowest of a batch holds the others up seldom,
# and a kill costs few replies.
REQUESTS_EACH = 4
# What nobody can refuse: by this is found out how, and whether at all, the server wants to be asked.
PLAIN = Case("How much is 1 + 1?", ("2",), "2")


def judge_by_url(
    judge: Judge, run: Run, config: JudgeConfig, console: Console, *, patience: Patience | None = None
) -> Made:
    """Judges the run by a model behind an address.

    Args:
        patience: with failures that may pass; by the options where None.

    Raises UsageError, JudgeRefused, JudgeUnavailable, CannotWrite, ShardBusy. What was replied before is kept.
    """
    form = form_for(config.prompt, config.way, config.mode)
    items, answers = items_of(run.answers(), config.answers)
    asked = asking(items)
    texts = [_text(form, each.case) for each in asked.cases]
    most_tokens = config.reply_tokens or (VERDICT_TOKENS if form.mode == "tokens" else config.most_reply_tokens)
    measured = json.dumps([judge.url, judge.model, form.mode, most_tokens, digest_of(json.dumps(texts))])
    whole = [RULES_VERSION, measured, form.way, config.model_threshold, config.least_mass, answers, run.answers_sha256]
    name = judging_name(judge, digest_of(json.dumps(whole)))
    before = existing(run.folder, name)
    if before is not None:
        return Made(before, already=True)
    endpoint = _endpoint(judge, config, most_tokens, patience)
    folder = JudgingWork(run.folder.work_of(judging_name(judge, digest_of(measured))).root)
    replies = _asked(endpoint, texts, _text(form, PLAIN), folder, measured, config, console)
    verdicts = _verdicts(asked, replies, form, config)
    meta = _meta(judge, run, config, form, name, answers, len(texts), _asked_as(folder) if texts else None)
    return Made(write_judging(run.folder, meta, spread(items, asked, verdicts)), asked=len(texts))


def _text(form: Form, case: Case) -> str:
    """What is sent of a case."""
    text = filled(form, case)
    return f"{text}\n{form.cue}" if form.mode == "tokens" else text


def _endpoint(judge: Judge, config: JudgeConfig, most_tokens: int, patience: Patience | None) -> Endpoint:
    assert judge.url is not None and judge.model is not None  # noqa: S101 - judge_named gives an address both
    key = None
    if config.api_key_env is not None:
        key = os.environ.get(config.api_key_env)
        if not key:
            # Not named: who gives the key itself must not find it in a message.
            raise UsageError("the environment variable that --api-key-env names is not set; it should hold the key")
        parts = urlsplit(judge.url)
        if parts.scheme.lower() != "https" and parts.hostname not in HERE:
            raise UsageError(f"a key would go to {parts.hostname} unencrypted; use https, or no key")
    return Endpoint(
        judge.url,
        judge.model,
        key=key,
        most_tokens=most_tokens,
        dialect=Dialect() if config.mode == "tokens" else Dialect(top=None),
        patience=patience or Patience(config.request_timeout, config.request_retries),
    )


def _asked(
    endpoint: Endpoint,
    texts: Sequence[str],
    plain: str,
    folder: JudgingWork,
    measured: str,
    config: JudgeConfig,
    console: Console,
) -> list[Reply]:
    """The reply to each text; those of an earlier start are not asked for again. ``plain``: one without fault."""
    if not texts:
        return []
    size = config.concurrency * REQUESTS_EACH
    plan = (Shard(tuple(tuple(range(at, min(at + size, len(texts)))) for at in range(0, len(texts), size))),)
    shards = kept_plan(folder, measured, lambda: plan)
    with ShardFile(folder.shard(0), shards[0], sealed=True) as file:
        if file.todo:
            endpoint.settle(plain)
        for batch in track(console, file.todo, "asking the judge"):
            replies = _together(endpoint, [texts[place] for place in batch], plain, config)
            file.append([_line(each) for each in replies])
        if not is_done(folder, 0):
            _say_done(folder, endpoint.dialect)
    return [_reply(line) for line in gathered_lines(folder, shards)]


def _together(endpoint: Endpoint, texts: Sequence[str], plain: str, config: JudgeConfig) -> list[Reply]:
    """The replies to some texts, asked at once; the first failure ends it, and no further request is sent."""
    with ThreadPoolExecutor(config.concurrency, "judge") as pool:
        waiting = [pool.submit(_reply_to, endpoint, text, plain) for text in texts]
        try:
            ended = wait(waiting, return_when=FIRST_EXCEPTION).done
            for each in ended:
                each.result()  # raises the failure, whichever request it was of
            return [each.result() for each in waiting]
        except BaseException:
            endpoint.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _reply_to(endpoint: Endpoint, text: str, plain: str) -> Reply:
    """The reply to a text; where it is the text that the server can't deal with (it is too long, or not allowed there),
    what it said: one such text must not keep the others from being judged."""
    try:
        return endpoint.ask(text)
    except CaseFailed as failure:
        endpoint.settle(plain)
        return Reply("", None, None, failure.complaint)


def _say_done(folder: JudgingWork, asked_as: Dialect) -> None:
    try:
        atomic_write(
            folder.shard_done(0), json.dumps({"format": FORMAT, "asked_as": asdict(asked_as)}).encode() + b"\n"
        )
    except OSError as problem:
        raise CannotWrite(f"can't write {folder.shard_done(0)}: {problem.strerror}") from None


def _asked_as(folder: JudgingWork) -> dict[str, Any]:
    """How the server was asked, by whichever start had the last reply. Raises BadTask."""
    path = folder.shard_done(0)
    try:
        return dict(json.loads(path.read_bytes())["asked_as"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadTask(f"{path} is damaged; remove {folder.root} to begin anew") from None


def _line(reply: Reply) -> str:
    return json.dumps(asdict(reply), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _reply(line: bytes) -> Reply:
    value = json.loads(line)
    return Reply(**value)


def _verdicts(asked: Asking, replies: Sequence[Reply], form: Form, config: JudgeConfig) -> list[Judgment]:
    def verdict(item: Item, reply: Reply) -> Judgment:
        return judged(
            reply,
            item.question.id,
            item.which,
            way=form.way,
            mode=form.mode,
            threshold=config.model_threshold,
            min_mass=config.least_mass,
        )

    return [verdict(item, reply) for item, reply in zip(asked.cases, replies, strict=True)]


def _meta(
    judge: Judge,
    run: Run,
    config: JudgeConfig,
    form: Form,
    name: str,
    answers: Answers,
    cases: int,
    asked_as: Mapping[str, Any] | None,
) -> JudgingMeta:
    settings = {
        "mode": form.mode,
        "way": form.way,
        "prompt": config.prompt or f"built in, {form.way}",
        "address": judge.url,
        "cases": cases,
        "min_mass": config.least_mass if form.mode == "tokens" else None,
        "asked_as": asked_as,
        "rules_version": RULES_VERSION,
    }
    return JudgingMeta(
        name=name,
        judge=judge.said,
        kind=judge.kind,
        model=judge.model,
        threshold=config.model_threshold,
        prompt_sha256=form.sha256,
        answers=answers,
        answers_sha256=run.answers_sha256,
        counts=dict.fromkeys(Verdict, 0),
        sha256="",
        settings=settings,
        versions=versions(),
        made=now(),
    )
