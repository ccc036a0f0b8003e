"""Parts of logs for the page: any size, any content, any kind of file, and always little to read."""

from __future__ import annotations

import os
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuherd.jobs.monitor.logs import terminal_line
from gpuherd.web.log_views import PART_BYTES, LogPart, read_end, read_on

ME = os.geteuid()


def end_of(path: Path, before: int | None = None) -> LogPart:
    part = read_end(path, ME, before)
    assert part is not None
    return part


def test_a_short_log_is_shown_whole_with_the_line_that_has_no_end_yet(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\n\n  two\n 10%|#  \r 20%|## ")
    part = end_of(log)
    assert part.lines == ("one", "", "  two") and part.rest == " 20%|##"
    assert (part.start, part.end, part.size) == (0, 11, 28)
    assert part.text == "one\n\n  two\n"


def test_of_a_log_of_10_gb_no_more_is_read_than_a_part(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(10 * 2**30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe end\n")
    began = time.monotonic()
    part = end_of(log)
    assert part.lines[-1] == "the end" and part.size == 10 * 2**30 + 9
    assert len(part.text) < 3 * PART_BYTES
    before = end_of(log, part.start)
    assert before.end <= part.start and before.size == part.size
    assert time.monotonic() - began < 2


def test_binary_noise_and_escapes_come_as_harmless_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(os.urandom(200_000) + b"\n\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m\x00\x9b\xe2\x80\xae<b>\n")
    part = end_of(log)
    assert part.lines[-1] == "red � <b>"
    signs = {sign for line in part.lines for sign in line}
    assert not [
        sign for sign in signs if unicodedata.category(sign) in ("Cc", "Cs") or sign in "\u2028\u2029\u202e\u2066"
    ]
    assert all(len(line) <= 4096 for line in part.lines)


def test_a_line_without_end_is_cut_and_replaced_as_it_grows(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 300_000)
    part = end_of(log)
    assert part.lines == () and len(part.rest) == 4096
    with log.open("ab") as file:
        file.write(b"y" * 10)
    further = read_on(log, ME, part)
    assert further is not None and further.is_whole and further.lines == ()


def test_what_is_added_comes_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntw")
    part = end_of(log)
    assert read_on(log, ME, part) is None
    with log.open("ab") as file:
        file.write(b"o\nthree\nfo")
    further = read_on(log, ME, part)
    assert further is not None and not further.is_whole
    assert further.lines == ("two", "three") and further.rest == "fo"
    assert read_on(log, ME, further) is None


def test_of_a_burst_the_end_is_shown_and_what_was_passed_over_is_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\n")
    part = end_of(log)
    with log.open("ab") as file:
        file.write(b"".join(b"%08d\n" % number for number in range(100_000)))
    further = read_on(log, ME, part)
    assert further is not None and further.is_whole and further.lines[-1] == "00099999"
    assert further.skipped == further.start - 4 > 800_000


@pytest.mark.parametrize("how", ["shorter", "another"])
def test_a_log_that_was_cut_or_replaced_begins_again(tmp_path: Path, how: str) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo\n")
    part = end_of(log)
    if how == "shorter":
        log.write_bytes(b"new\n")
    else:
        other = tmp_path / "other"
        other.write_bytes(b"new\n" + b"more\n" * 5)
        other.replace(log)
    further = read_on(log, ME, part)
    assert further is not None and further.is_whole and further.lines[0] == "new"


def test_only_a_plain_file_of_the_owner_is_shown(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("link", "fifo", "folder", "gone", "no\0name"):
        assert read_end(tmp_path / name, ME) is None, name
    assert read_end(Path("/dev/zero"), ME) is None
    assert read_end(secret, ME + 1) is None  # another user's, by way of a hard link
    part = end_of(secret)
    secret.unlink()
    assert read_on(secret, ME, part) is None


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40).filter(lambda piece: b"\x1b" not in piece), max_size=8))
def test_however_it_grows_its_lines_are_those_of_the_file(tmp_path: Path, pieces: list[bytes]) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"")
    part, lines = end_of(log), list[str]()
    for piece in pieces:
        with log.open("ab") as file:
            file.write(piece)
        further = read_on(log, ME, part)
        if further is not None:
            lines += further.lines
            part = further
    whole = log.read_bytes().decode("utf-8", "replace").split("\n")
    # A sign that lies across the end of a line is read as two broken ones, as any terminal does.
    assert lines == [terminal_line(line) for line in whole[:-1]]
    assert part.rest == terminal_line(whole[-1])
