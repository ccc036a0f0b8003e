"""Rows of data sets of the Hub, or of a folder that is laid out like one, through the ``datasets`` library.

What was downloaded once is read from the library's cache, also without a network. Code of a data set is never run: the
library (since 4.0) refuses data sets that need it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.errors import GpuherdError, naming_extras
from gpuherd.models.checkpoints.hub import is_offline, no_answer
from gpuherd.qa.data.files import ColumnChoice
from gpuherd.qa.data.questions import BadQuestions, DataRow, MissingQuestions

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1000
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubRows:
    """A split of a data set: its rows, and the commit that they are from, if it is known."""

    rows: Iterator[DataRow]
    revision: str | None


def hub_rows(
    hub_id: str,
    config: str | None,
    split: str,
    revision: str | None,
    columns: ColumnChoice,
) -> HubRows:
    """The rows of a split, with the columns that ``columns`` chooses from their names; None for all.

    Raises MissingQuestions if there is no such data set, config or split or no access to it, BadQuestions if it can't
    be read, MissingExtra.
    """
    with naming_extras({"datasets": "qa"}, "data sets of the Hub are read with"):
        import datasets

    where = f"{hub_id}{f', config {config}' if config else ''}, split {split}"
    # The absolute path of a folder: the library takes the names "csv" and "json" for readers of its own.
    folder = Path(hub_id)
    name = str(folder.absolute()) if folder.is_dir() else hub_id
    unreached = None if folder.is_dir() or is_offline() else no_answer()
    try:
        with nullcontext() if unreached is None else _without_network():
            data = datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as problem:
        if unreached is not None and isinstance(problem, ConnectionError | FileNotFoundError):
            raise MissingQuestions(
                f"{where} is not in the local cache, and the Hugging Face Hub can't be reached ({unreached}); download "
                "it where there is a network, or name a file"
            ) from None
        raise _as_our_error(problem, where) from problem
    if unreached is not None:
        logger.warning("the Hugging Face Hub can't be reached (%s); %s is read from the cache", unreached, where)
    chosen = columns(data.column_names)
    return HubRows(_rows(data if chosen is None else data.select_columns(chosen), where), _commit(data) or revision)


def configs_of(folder: Path) -> list[str]:
    """The configs of a folder that is laid out like a data set of the Hub; none if they can't be read."""
    with naming_extras({"datasets": "qa"}, "data sets of the Hub are read with"):
        import datasets

    try:
        return list(datasets.get_dataset_config_names(str(folder.absolute())))
    except Exception:  # reading the rows will report it
        return []


@contextmanager
def _without_network() -> Iterator[None]:
    """The libraries read only their caches; otherwise they would query a Hub that doesn't answer six times."""
    import datasets
    import huggingface_hub

    places = (datasets.config, huggingface_hub.constants)
    before = [each.HF_HUB_OFFLINE for each in places]
    try:
        for each in places:
            each.HF_HUB_OFFLINE = True
        yield
    finally:
        for each, value in zip(places, before, strict=True):
            each.HF_HUB_OFFLINE = value


def _rows(data: Any, where: str) -> Iterator[DataRow]:
    """The rows, read in batches; one by one where the texts of some are no UTF-8. Raises as ``hub_rows`` does."""
    for start in range(0, len(data), _ROWS_AT_ONCE):
        places = range(start, min(start + _ROWS_AT_ONCE, len(data)))
        try:
            columns = data[places.start : places.stop]
            rows = [{name: values[n] for name, values in columns.items()} for n in range(len(places))]
        except UnicodeDecodeError:
            yield from (_row(data, place) for place in places)
        except Exception as problem:
            raise _as_our_error(problem, where) from problem
        else:
            yield from (DataRow(f"row {place + 1}", values) for place, values in zip(places, rows, strict=True))


def _row(data: Any, place: int) -> DataRow:
    try:
        return DataRow(f"row {place + 1}", data[place])
    except UnicodeDecodeError:
        return DataRow(f"row {place + 1}", None, "bytes that are no UTF-8")


def _commit(data: Any) -> str | None:
    """The commit of the files, after which the library names the folder in its cache."""
    for file in data.cache_files:
        folder = Path(file["filename"]).parent.name
        if _COMMIT.fullmatch(folder):
            return folder
    return None


def _as_our_error(problem: Exception, where: str) -> GpuherdError:
    """An error of the library as one of ours."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(problem, DatasetGenerationError) and isinstance(problem.__cause__, Exception):
        problem = problem.__cause__  # its own message has no reason
    reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
    if "script" in reason.lower() and isinstance(problem, RuntimeError):
        return BadQuestions(f"{where}: it would have to run code of its own to be read, which gpuherd never does")
    if isinstance(problem, DatasetNotFoundError | FileNotFoundError | ConnectionError | HfHubHTTPError):
        return MissingQuestions(f"{where}: {reason}")
    if isinstance(problem, ValueError) and ("split" in reason.lower() or "config" in reason.lower()):
        return MissingQuestions(f"{where}: {reason}")
    return BadQuestions(f"{where} can't be read: {type(problem).__name__}: {reason}")
