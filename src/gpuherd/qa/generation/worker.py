"""Answers a shard's questions: ``python -m gpuherd.qa.generation.worker --model … --folder runs/… --shard 0``.

An ordinary program: it runs by hand under CUDA_VISIBLE_DEVICES as it does under the dispatcher, and knows nothing of
queues. What it is to do stands in the run's folder; killed at any instant, it goes on there behind the last batch that
was written whole. Its exit code (``ExitCode``) says whether another try can help.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuherd.engines import progress
from gpuherd.errors import printable
from gpuherd.gpus.visible import described
from gpuherd.lm.backend import Decoding
from gpuherd.lm.guidance.guide import Guide
from gpuherd.models.load.identity import reference
from gpuherd.models.load.job_options import ShardOptions
from gpuherd.models.load.jobs import is_writer, load, run_model_worker
from gpuherd.models.plan.workload import Workload
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.generation.answers import answered_of
from gpuherd.qa.generation.begun import Item, begun_record, read_items
from gpuherd.qa.generation.config import BACKEND_IN_RECORDS
from gpuherd.qa.generation.guiding import guide_bytes, load_guidance
from gpuherd.qa.record import line_of
from gpuherd.qa.runs import DamagedRun
from gpuherd.runs.shards import my_shard, work_through
from gpuherd.runs.worker import unbuffered

if TYPE_CHECKING:
    from gpuherd.lm.backend import Backend

MODULE = "gpuherd.qa.generation.worker"
DESCRIPTION = """\
Answers the questions of one shard of a run that gpuherd generate has begun.

example:
  CUDA_VISIBLE_DEVICES=0 python -m gpuherd.qa.generation.worker --model gpt2 --folder runs/gpt2-svamp-1f0a --shard 0
"""


def decoding_of(record: Mapping[str, Any]) -> Decoding:
    """How a run's answers are decoded, of what its run.json holds. Raises DamagedRun."""
    said = record["identity"]
    try:
        return Decoding(
            greedy=bool(said["greedy"]),
            samples=int(said["samples"]),
            temperature=float(said["temperature"]),
            top_p=float(said["top_p"]),
            top_k=int(said["top_k"]),
            max_new_tokens=int(said["max_new_tokens"]),
            end_ids=tuple(int(each) for each in record["end_tokens"]["ids"]),
            stop=tuple(str(each) for each in record["stop"]),
            seed=int(said["seed"]),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise DamagedRun(f"run.json doesn't say how answers are decoded: {problem!r}") from None


def answer(options: ShardOptions, words: Sequence[str]) -> None:
    """Answers all that is not answered yet."""
    folder = QADirectory(options.folder)
    record = begun_record(folder)
    if folder.done.exists():
        print(f"Run {printable(record['run_id'])} is complete; nothing is left to do")
        return
    how = decoding_of(record)
    items = read_items(folder, my_shard(folder, options.shard).items)
    print(f"Model: {printable(options.model)}")
    print(described(os.environ))
    progress.report(0, len(items), "load")
    engine = _engine(options, record, words)
    throughput = Throughput()

    def do(batch: Sequence[int]) -> list[str]:
        return throughput.timed(engine, [items[number] for number in batch], how)

    def made() -> Mapping[str, Any]:
        return {
            **engine.record(),
            "batch_size": options.batch_size,
            "tokens": throughput.tokens,
            "seconds": throughput.seconds,
        }

    done = work_through(folder, options.shard, do, stage="answer", record=made, writes=is_writer())
    print(
        f"Answered: {done.now} questions, {throughput.tokens} tokens in {throughput.seconds:.1f} s; {done.items} in all"
    )


class Throughput:
    """The work of this start: ``tokens`` of answers, end tokens counted, in ``seconds`` of decoding."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    def timed(self, engine: Backend, items: Sequence[Item], how: Decoding) -> list[str]:
        """The lines of a batch."""
        started = time.monotonic()
        decoded = engine.decode([item.prompt for item in items], how)
        self.seconds += time.monotonic() - started
        lines = []
        for item, answers in zip(items, decoded, strict=True):
            answered = answered_of(item.number, item.question, item.prompted, answers, in_thought=item.in_thought)
            self.tokens += sum(len(each.token_ids) + (each.end_id is not None) for each in answered.which.values())
            lines.append(line_of(answered))
        return lines


def _engine(options: ShardOptions, record: Mapping[str, Any], words: Sequence[str]) -> Backend:
    """The run's engine with its model in memory."""
    exact = bool(record["identity"]["exact"])
    if record["identity"][BACKEND_IN_RECORDS] == "vllm":
        from gpuherd.lm.vllm import VllmBackend

        positions = options.prompt_tokens + options.new_tokens
        return VllmBackend(
            options.model,
            reference(options.model),
            options,
            positions=positions,
            rows=options.batch_size,
            exact=exact,
        )
    from gpuherd.lm.model import LanguageModel

    guide = None if record.get("guide") is None else Guide.from_dict(record["guide"])
    beside = guide_bytes(guide, Workload(options.batch_size, options.prompt_tokens, options.new_tokens))
    loaded = load(options, words, beside=beside)
    for line in loaded.report.lines():
        print(printable(line))
    guidance = load_guidance(record, loaded.input_device)
    if guide is not None:
        print(f"Guide: {printable(guide.classifier)}, eta {guide.eta}, {guide.mode}, top {guide.top_k}")
    return LanguageModel.of(loaded, exact=exact, guidance=guidance)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker. Returns its exit code; what went wrong is on standard error."""
    return run_model_worker(MODULE, DESCRIPTION, answer, argv)


if __name__ == "__main__":
    unbuffered()
    sys.exit(main())
