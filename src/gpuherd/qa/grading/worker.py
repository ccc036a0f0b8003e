"""Measures the cases of one shard of a judging: ``python -m gpuherd.qa.grading.worker --model … --folder … --shard 0``.

An ordinary program, which runs by hand as it does under the dispatcher. Knows tokens, no questions and no verdicts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gpuherd.lm.backend import Decoding, Finish, PromptTokens
from gpuherd.lm.model import LanguageModel
from gpuherd.models.load.jobs import is_writer, load, run_model_worker
from gpuherd.models.load.options import ShardOptions
from gpuherd.qa.grading.files import GradingTask, log_probs_line, read_cases, reply_line
from gpuherd.runs.shards import ShardedDirectory, read_task, work_through
from gpuherd.runs.worker import unbuffered

MODULE = "gpuherd.qa.grading.worker"

DESCRIPTION = """\
Measures what a model makes of one shard of the cases of a judging, and writes <folder>/shards/<shard>.jsonl.

example:
  CUDA_VISIBLE_DEVICES=0 python -m gpuherd.qa.grading.worker --model Qwen/Qwen2.5-7B-Instruct \\
      --folder runs/a-run/work/judge-01234567 --shard 0
"""


def judge_shard(options: ShardOptions, words: Sequence[str]) -> None:
    """Does the work of a shard. Raises what loading, reading and writing raise."""
    folder = ShardedDirectory(options.folder)
    task, cases = read_task(folder, GradingTask), read_cases(folder)
    loaded = load(options, words)
    model = LanguageModel.of(loaded)

    def do(batch: tuple[int, ...]) -> list[str]:
        return _lines(model, task, [PromptTokens(str(number), cases[number]) for number in batch])

    def record() -> Mapping[str, Any]:
        import torch
        import transformers

        return {
            "versions": {"torch": str(torch.__version__), "transformers": transformers.__version__},
            "dtype": str(loaded.report.precision),
            "most_rows": model.most_rows,
        }

    done = work_through(folder, options.shard, do, stage="judge", record=record, writes=is_writer())
    print(f"Judged: {done.items} cases, {done.now} of them now")


def _lines(model: LanguageModel, task: GradingTask, prompts: Sequence[PromptTokens]) -> list[str]:
    if task.mode == "tokens":
        continuations = [each for ways in task.words.values() for each in ways]
        return [log_probs_line(task.words, row) for row in model.weigh(prompts, continuations)]
    how = Decoding(max_new_tokens=task.reply_tokens, end_ids=task.end_ids, stop=task.stop)
    replies = [each.greedy for each in model.decode(prompts, how)]
    return [
        reply_line(reply.text, cut=reply.end_id is None and reply.finish is not Finish.STOP)
        for reply in replies
        if reply is not None
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker. Returns its exit code; what went wrong is on standard error."""
    return run_model_worker(MODULE, DESCRIPTION, judge_shard, argv)


if __name__ == "__main__":
    unbuffered()
    sys.exit(main())
