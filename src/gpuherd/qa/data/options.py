"""What a command that asks questions can be told about them. Pure, and light."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpuherd.errors import UsageError
from gpuherd.options import option

ContextRule = Literal["auto", "yes", "no"]


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Which questions are asked, and which are shown as examples. Raises UsageError for numbers that make no sense."""

    dataset: str = option(
        help="a name (trivia_qa, squad_v2, nq_open, svamp, coqa, sciq, bioasq, gsm8k, truthful_qa), a data set of the "
        "Hub as org/name or org/name:config, a folder of one (or FOLDER:CONFIG), or a file: JSONL, JSON, CSV, TSV or "
        "Parquet with question, answers and perhaps context and id",
        metavar="NAME|FILE",
        group="questions",
    )
    split: str | None = option(
        None, help="split of a data set of the Hub; the one that is usual for it by default", group="questions"
    )
    revision: str | None = option(
        None, help="branch, tag or commit of a data set of the Hub", metavar="COMMIT", group="questions"
    )
    limit: int | None = option(
        None,
        help="ask so many questions: the first ones, or any by --shuffle",
        parse=int,
        metavar="N",
        group="questions",
    )
    shuffle: bool = option(
        False, help="ask in an order drawn by --seed, so that --limit is a random choice", group="questions"
    )
    few_shot: int = option(
        0,
        help="show K questions with their answers first, drawn by --seed from the data set's training split; those "
        "that are drawn from a file itself are then not asked",
        parse=int,
        metavar="K",
        group="questions",
    )
    few_shot_file: str | None = option(None, help="draw them from this file instead", metavar="FILE", group="questions")
    context: ContextRule = option(
        "auto",
        help="give the model a question's context: auto where it is asked of one (squad_v2, coqa, files)",
        choices=("auto", "yes", "no"),
        alone="yes",
        group="questions",
    )

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--limit {self.limit}: at least one question has to be asked")
        if self.few_shot < 0:
            raise UsageError(f"--few-shot {self.few_shot}: 0 examples or more")
        if self.few_shot_file is not None and self.few_shot == 0:
            raise UsageError("--few-shot-file without --few-shot: say how many examples are drawn from it")
