"""Answers a shard's questions: ``python -m gpuherd.qa.generate.worker --model … --folder runs/… --shard 0``.

An ordinary program: it runs by hand under CUDA_VISIBLE_DEVICES as it does under the dispatcher, and knows no queue. The
run's folder has its task. Killed at any moment and started again, it continues after the last complete batch. Its exit
code (``ExitCode``) tells whether another try can help.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.engines import progress
from gpuherd.errors import BadModel, printable
from gpuherd.gpus.visible import described
from gpuherd.lm.backend import Decoded, Decoding, PromptTokens
from gpuherd.lm.guidance.guide import Guide
from gpuherd.models.load.identity import reference
from gpuherd.models.load.jobs import is_writer, load, run_model_worker
from gpuherd.models.load.options import ShardOptions
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.generate.config import BACKEND_IN_RECORDS
from gpuherd.qa.generate.prepared import begun_record, guide_bytes
from gpuherd.qa.prompts.maker import TokenizedPrompt
from gpuherd.qa.record import Answered, Prompted, Question, line_of
from gpuherd.qa.runs import DamagedRun
from gpuherd.qa.span import opens_thought
from gpuherd.runs import records
from gpuherd.runs.shards import my_shard, work_through
from gpuherd.runs.worker import unbuffered

if TYPE_CHECKING:
    from gpuherd.lm.backend import Backend
    from gpuherd.lm.guidance.guidance import Guidance

MODULE = "gpuherd.qa.generate.worker"
DESCRIPTION = """\
Answers the questions of one shard of a run that gpuherd generate has begun.

example:
  CUDA_VISIBLE_DEVICES=0 python -m gpuherd.qa.generate.worker --model gpt2 --folder runs/gpt2-svamp-1f0a --shard 0
"""


@dataclass(frozen=True, slots=True)
class PromptedQuestion:
    """A question of a run with its prompt; ``in_thought``: the prompt ends with an open thought."""

    number: int
    question: Question
    prompt: PromptTokens
    prompted: Prompted
    in_thought: bool = False


def read_items(folder: QADirectory, items: Iterable[int]) -> dict[int, PromptedQuestion]:
    """The questions with these numbers and their prompts. Raises DamagedRun."""
    numbers = set(items)
    found: dict[int, PromptedQuestion] = {}
    try:
        with folder.questions.open("rb") as questions, folder.prompts.open("rb") as prompts:
            for number, (line, other) in enumerate(zip(questions, prompts, strict=True)):
                if number in numbers:
                    found[number] = _prompted_question(number, line, other)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise DamagedRun(f"{folder.root}: its questions or prompts can't be read: {problem}") from None
    if len(found) != len(numbers):
        raise DamagedRun(f"{folder.root} has no question {min(numbers - found.keys())}, from 0")
    return found


def _prompted_question(number: int, question_line: bytes, prompt_line: bytes) -> PromptedQuestion:
    question, prompt = records.read(Question, json.loads(question_line)), json.loads(prompt_line)
    if prompt["id"] != question.id:
        raise ValueError(f"the prompt in line {number + 1} is of another question")
    made = TokenizedPrompt(prompt["text"], tuple(int(each) for each in prompt["token_ids"]), int(prompt["cut"]))
    return PromptedQuestion(
        number, question, PromptTokens(question.id, made.token_ids), made.prompted, opens_thought(made.text)
    )


def decoding_of(record: Mapping[str, Any]) -> Decoding:
    """How a run's answers are decoded, by its run.json. Raises DamagedRun."""
    settings = record["identity"]
    try:
        return Decoding(
            greedy=bool(settings["greedy"]),
            samples=int(settings["samples"]),
            temperature=float(settings["temperature"]),
            top_p=float(settings["top_p"]),
            top_k=int(settings["top_k"]),
            max_new_tokens=int(settings["max_new_tokens"]),
            end_ids=tuple(int(each) for each in record["end_tokens"]["ids"]),
            stop=tuple(str(each) for each in record["stop"]),
            seed=int(settings["seed"]),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise DamagedRun(f"run.json doesn't say how answers are decoded: {problem!r}") from None


def answer(options: ShardOptions, words: Sequence[str]) -> None:
    """Answers the questions of the shard that have no answers yet."""
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
    backend = _backend(options, record, words)
    tokens, seconds = 0, 0.0  # of answers, with end tokens; of decoding

    def do(batch: Sequence[int]) -> list[str]:
        nonlocal tokens, seconds
        some = [items[number] for number in batch]
        started = time.monotonic()
        decoded = backend.decode([item.prompt for item in some], how)
        seconds += time.monotonic() - started
        rows = [answer_record(item, answers) for item, answers in zip(some, decoded, strict=True)]
        tokens += sum(len(each.token_ids) + (each.end_id is not None) for row in rows for each in row.which.values())
        return [line_of(row) for row in rows]

    def shard_record() -> Mapping[str, Any]:
        return {**backend.record(), "batch_size": options.batch_size, "tokens": tokens, "seconds": seconds}

    done = work_through(folder, options.shard, do, stage="answer", record=shard_record, writes=is_writer())
    print(f"Answered: {done.now} questions, {tokens} tokens in {seconds:.1f} s; {done.items} in all")


def answer_record(item: PromptedQuestion, decoded: Decoded) -> Answered:
    """The record of a question that was answered."""
    return Answered(
        number=item.number,
        question=item.question,
        prompt=item.prompted,
        greedy=None if decoded.greedy is None else replace(decoded.greedy, in_thought=item.in_thought),
        samples=tuple(replace(each, in_thought=item.in_thought) for each in decoded.samples),
    )


def _backend(options: ShardOptions, record: Mapping[str, Any], words: Sequence[str]) -> Backend:
    """The backend with the model in memory."""
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
    reserved = guide_bytes(guide, Workload(options.batch_size, options.prompt_tokens, options.new_tokens))
    loaded = load(options, words, reserved=reserved)
    for line in loaded.report.lines():
        print(printable(line))
    guidance = load_guidance(record, loaded.input_device)
    if guide is not None:
        print(f"Guide: {printable(guide.classifier)}, eta {guide.eta}, {guide.mode}, top {guide.top_k}")
    return LanguageModel.of(loaded, exact=exact, guidance=guidance)


def load_guidance(record: Mapping[str, Any], device: str) -> Guidance | None:
    """The classifier of a run by its run.json, on the model's device; None without a guide.

    Raises BadModel if its files have changed since the run was begun.
    """
    if record.get("guide") is None:
        return None
    from gpuherd.lm.guidance.guidance import Guidance
    from gpuherd.models.load.identity import files_digest

    guide = Guide.from_dict(record["guide"])
    recorded = record["guide_sha256"]
    if files_digest(Path(guide.classifier), recorded=recorded) != recorded:
        raise BadModel(f"{guide.classifier} has changed since the run was begun; give another --run-id")
    return Guidance.load(guide, device=device)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker. Returns its exit code; errors are printed to standard error."""
    return run_model_worker(MODULE, DESCRIPTION, answer, argv)


if __name__ == "__main__":
    unbuffered()
    sys.exit(main())
