"""A run's own log file, and what of it reaches standard error."""

from __future__ import annotations

import logging
import sys
from datetime import datetime
from pathlib import Path

import pytest

from gpuherd.errors import CannotWrite
from gpuherd.runs.console import configure_console, logged_to, run_log


def test_the_runs_own_log(tmp_path: Path) -> None:
    with run_log(tmp_path, datetime(2026, 11, 21, 9, 8, 7), "esd_experiment") as path:
        logging.getLogger("gpuherd.jobs").info("something happened")
    logging.getLogger("gpuherd.jobs").warning("after the end")
    assert path.name == "esd_experiment_20261121_090807.log"
    assert "INFO gpuherd.jobs: something happened" in path.read_text()
    assert "after the end" not in path.read_text()
    with pytest.raises(CannotWrite), run_log(tmp_path / "no", datetime.now(), "esd_experiment"):
        pass


def test_the_runs_log_makes_standard_error_no_louder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOG_LEVEL", "WARNING")
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(sys.stderr)])
    try:
        configure_console()
        with run_log(tmp_path, datetime.now(), "esd_experiment") as path:
            logging.getLogger("gpuherd.jobs").info("quiet")
            logging.getLogger("gpuherd.jobs").warning("loud")
    finally:
        logging.getLogger("gpuherd").setLevel(logging.NOTSET)
    assert capsys.readouterr().err == "loud\n"
    assert "quiet" in path.read_text()


def test_warnings_are_shown_where_no_display_tells_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(sys.stderr)])
    try:
        configure_console()
        for shown in (True, False):
            with logged_to(tmp_path / "run.log", shown=shown):
                logging.getLogger("gpuherd.posttrain").warning("shown: %s", shown)
    finally:
        logging.getLogger("gpuherd").setLevel(logging.NOTSET)
    assert capsys.readouterr().err == "shown: True\n"
    assert "shown: True" in (said := (tmp_path / "run.log").read_text()) and "shown: False" in said
