"""A judging by a model behind an address: several requests at once, each batch of replies kept as soon as it is there.

In this process, without GPUs and without torch. Replies are kept under ``work/`` as the lines of a shard are, so that
the same command continues where it was stopped, and pays for no reply twice.
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

from gpuherd.errors import UsageError
from gpuherd.jobs.records import Outcome
from gpuherd.qa.grading.config import Judge, JudgeConfig
from gpuherd.qa.grading.openai import HERE, VERDICT_TOKENS, CaseFailed, Dialect, Endpoint, Reply, RetryPolicy, ruling_of
from gpuherd.qa.grading.stage import RULES_VERSION, JudgingOutcome, JudgingStage, distinct_cases, spread
from gpuherd.qa.grading.template import Case, JudgeTemplate, filled, template_for
from gpuherd.qa.runs import Run
from gpuherd.runs import records
from gpuherd.runs.console import track
from gpuherd.runs.shard_file import ShardFile
from gpuherd.runs.shards import ShardedDirectory, gathered_lines, in_batches, is_done, kept_plan, mark_done, undamaged
from gpuherd.runs.spec import digest_of, versions

# So many requests of each of those that run at once lie in a batch: the slowest of a batch holds the others up seldom,
# and a kill costs few replies.
REQUESTS_EACH = 4
# A case without fault: it shows in which dialect, and whether at all, the server answers.
PLAIN = Case("How much is 1 + 1?", ("2",), "2")


class JudgingByUrl(JudgingStage):
    """A judging by a model behind an address; no jobs, this process asks.

    Running it raises UsageError, JudgeRefused, JudgeUnavailable, CannotWrite, ShardBusy. What was replied before is
    kept.

    Args:
        patience: with failures that may pass; by the options where None.
    """

    def __init__(
        self, judge: Judge, run: Run, config: JudgeConfig, console: Console, *, patience: RetryPolicy | None = None
    ) -> None:
        super().__init__(judge, run, config, console)
        self._patience = patience
        self.template = template_for(config.prompt, config.way, config.mode)
        self.cases = distinct_cases(self.items)
        self._texts = [_text(self.template, each.case) for each in self.cases.cases]
        self._plain = _text(self.template, PLAIN)
        by_words = self.template.mode == "tokens"
        self._most_tokens = config.reply_tokens or (VERDICT_TOKENS if by_words else config.most_reply_tokens)
        texts = digest_of(json.dumps(self._texts))
        self._measured = json.dumps([judge.url, judge.model, self.template.mode, self._most_tokens, texts])
        verdicts_by = [self.template.way, config.model_threshold, config.least_mass, self.answers, run.answers_sha256]
        self.name = self.named([RULES_VERSION, self._measured, *verdicts_by])

    def finish(self, jobs: Outcome | None) -> JudgingOutcome:
        folder, template, config = self.work_folder(self._measured), self.template, self.config
        how: dict[str, Any] = {"threshold": config.model_threshold, "min_mass": config.least_mass}
        replies = self._replies(self._endpoint(), folder)
        rulings = [ruling_of(each, way=template.way, mode=template.mode, **how) for each in replies]
        return self.written(
            spread(self.items, self.cases, rulings),
            self._settings(_dialect_used(folder) if self._texts else None),
            versions(),
            threshold=config.model_threshold,
            prompt_sha256=template.sha256,
            jobs=jobs,
            judged_cases=len(self._texts),
        )

    def _settings(self, dialect: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "mode": self.template.mode,
            "way": self.template.way,
            "prompt": self.config.prompt or f"built in, {self.template.way}",
            "address": self.judge.url,
            "cases": len(self._texts),
            "min_mass": self.config.least_mass if self.template.mode == "tokens" else None,
            "asked_as": dialect,
            "rules_version": RULES_VERSION,
        }

    def _endpoint(self) -> Endpoint:
        url, model, config = self.judge.url, self.judge.model, self.config
        assert url is not None and model is not None  # noqa: S101 - judge_named gives an address both
        key = None
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env)
            if not key:
                # Not named: who gives the key itself must not find it in a message.
                raise UsageError("the environment variable that --api-key-env names is not set; it should hold the key")
            parts = urlsplit(url)
            if parts.scheme.lower() != "https" and parts.hostname not in HERE:
                raise UsageError(f"a key would go to {parts.hostname} unencrypted; use https, or no key")
        dialect = Dialect() if config.mode == "tokens" else Dialect(top=None)
        patience = self._patience or RetryPolicy(config.request_timeout, config.request_retries)
        return Endpoint(url, model, key=key, most_tokens=self._most_tokens, dialect=dialect, patience=patience)

    def _replies(self, endpoint: Endpoint, folder: ShardedDirectory) -> list[Reply]:
        """The reply to the text of each case; those of an earlier start are not requested again."""
        if not self._texts:
            return []
        size = self.config.concurrency * REQUESTS_EACH
        shards = kept_plan(folder, self._measured, lambda: (in_batches(len(self._texts), size),))
        with ShardFile(folder.shard(0), shards[0], sealed=True) as file:
            if file.todo:
                endpoint.settle(self._plain)
            for batch in track(self.console, file.todo, "asking the judge"):
                replies = self._together(endpoint, [self._texts[place] for place in batch])
                file.append([records.line_of(each) for each in replies])
            if not is_done(folder, 0):
                mark_done(folder, 0, {"asked_as": asdict(endpoint.dialect)})
        return [records.read(Reply, json.loads(line)) for line in gathered_lines(folder, shards)]

    def _together(self, endpoint: Endpoint, texts: Sequence[str]) -> list[Reply]:
        """The replies to some texts, by concurrent requests; the first failure ends it, and no further request is
        sent."""
        with ThreadPoolExecutor(self.config.concurrency, "judge") as pool:
            waiting = [pool.submit(self._reply_to, endpoint, text) for text in texts]
            try:
                for each in wait(waiting, return_when=FIRST_EXCEPTION).done:
                    each.result()  # raises the failure, whichever request it was of
                return [each.result() for each in waiting]
            except BaseException:
                endpoint.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _reply_to(self, endpoint: Endpoint, text: str) -> Reply:
        """The reply to a text; where it is the text that the server can't deal with (it is too long, or not allowed
        there), what it said: one such text must not keep the others from being judged."""
        try:
            return endpoint.ask(text)
        except CaseFailed as failure:
            endpoint.settle(self._plain)
            return Reply("", None, None, failure.complaint)


def _text(template: JudgeTemplate, case: Case) -> str:
    """The text of the request for a case."""
    text = filled(template, case)
    return f"{text}\n{template.cue}" if template.mode == "tokens" else text


def _dialect_used(folder: ShardedDirectory) -> dict[str, Any]:
    """The dialect of the start that had the last reply. Raises Damaged."""
    path = folder.shard_done(0)
    with undamaged(path, f"remove {folder.root} to begin anew"):
        return dict(json.loads(path.read_bytes())["asked_as"])
