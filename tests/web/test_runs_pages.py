"""Runs and their reports: served from the run folder alone, in a sandbox, and made on request."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from tests.web.scenes import place_of
from tests.web.serving import Answer, Serving, ask, serving

from gpuherd.web.actions import Forbidden
from gpuherd.web.places import Place, key_of
from gpuherd.web.reports import MOST_BYTES, ReportFile, ReportMaker

REPORT = "<!doctype html><title>r</title><script>document.title = document.cookie</script>" + "x" * 300_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "answers"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"kind": "qa", "format": 1}))
    return folder


@pytest.fixture
def page(run: Path) -> Iterator[Serving]:
    with serving(runs=(run,)) as made:
        yield made


def cookie_of(page: Serving) -> str:
    return ask(page.port, f"/?token={page.token}").cookie


def fetch(page: Serving, run: Path, path: str = "", **headers: str) -> Answer:
    return ask(page.port, f"/runs/{key_of(run)}{path}", Cookie=cookie_of(page), **headers)


def test_a_run_is_listed_and_its_report_opened_in_place(page: Serving, run: Path) -> None:
    (run / "report.html").write_text(REPORT)
    listed = ask(page.port, "/runs", Cookie=cookie_of(page))
    assert listed.status == 200 and "With a report." in listed.text and "answers" in listed.text
    shown = fetch(page, run)
    assert f'src="/runs/{key_of(run)}/report.html?of=' in shown.text and 'sandbox="allow-scripts"' in shown.text
    # Within the frame: same site, and not a page of its own.
    report = fetch(page, run, "/report.html", Sec_Fetch_Site="same-origin", Sec_Fetch_Dest="iframe")
    assert report.status == 200 and report.text == REPORT


def test_a_report_is_in_a_sandbox_that_reaches_nothing(page: Serving, run: Path) -> None:
    (run / "report.html").write_text(REPORT)
    headers = fetch(page, run, "/report.html").headers
    policy = {rule.partition(" ")[0]: rule.partition(" ")[2] for rule in headers["content-security-policy"].split("; ")}
    assert policy["sandbox"] == "allow-scripts"
    assert policy["default-src"] == policy["connect-src"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'self'" and headers["x-frame-options"] == "SAMEORIGIN"
    assert headers["x-content-type-options"] == "nosniff"
    # All other pages may not be framed.
    assert "frame-ancestors 'none'" in fetch(page, run).headers["content-security-policy"]
    # What a script of the report could ask of this server comes from nowhere: it is refused, cookie or not.
    asks = {"Origin": "null", "Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"}
    assert ask(page.port, "/queues", Cookie=cookie_of(page), **asks).status == 403


def test_only_a_plain_file_of_the_run_is_a_report(page: Serving, run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0")
    report = run / "report.html"

    def asked() -> Answer:
        return fetch(page, run, "/report.html")

    assert asked().status == 404
    for kind in ("link", "fifo", "folder"):
        if kind == "link":
            report.symlink_to(secret)
        elif kind == "fifo":
            os.mkfifo(report)
        else:
            report.mkdir()
        answer = asked()
        assert answer.status == 404 and "root:x" not in answer.text
        assert fetch(page, run).status == 200
        if kind == "folder":
            report.rmdir()
        else:
            report.unlink()
    with report.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    assert asked().status == 404
    for path in ("/../secret", "/..%2fsecret", "/report.html/../../secret", "/run.json", "/%2e%2e/secret"):
        answer = fetch(page, run, path)
        assert answer.status in (400, 404) and "root:x" not in answer.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_strangers_second_name_for_our_file_is_no_report_of_theirs(page: Serving, run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0")
    os.chown(run, 12345, 12345)
    os.link(secret, run / "report.html")
    assert fetch(page, run, "/report.html").status == 404
    os.chown(secret, 12345, 12345)
    assert fetch(page, run, "/report.html").status == 200
    shown = fetch(page, run)
    assert "<button>Make" not in shown.text and "uid 12345" in shown.text
    answer = make(page, run)
    assert answer.status == 403 and "belongs to uid 12345" in answer.text


def make(page: Serving, run: Path, *, hx: bool = True) -> Answer:
    cookie = cookie_of(page)
    body = urlencode({"form_token": ask(page.port, "/", Cookie=cookie).form_token})
    headers = {"HX_Request": "true"} if hx else {}
    origin = f"http://127.0.0.1:{page.port}"
    path = f"/runs/{key_of(run)}/report"
    return ask(page.port, path, method="POST", body=body, Cookie=cookie, Origin=origin, **headers)


def test_a_folder_without_results_has_no_page_of_results(tmp_path: Path) -> None:
    with serving(runs=(tmp_path,)) as page:
        assert fetch(page, tmp_path).status == 404
        assert make(page, tmp_path).status == 404
        assert "There are no results here" in ask(page.port, "/runs", Cookie=cookie_of(page)).text


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Another program in place of Python: what it does is what ``gpuherd report`` would."""

    def put(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))

    return put


def test_a_report_that_can_not_be_made_says_why(page: Serving, run: Path, program: Callable[[str], None]) -> None:
    program('sleep 0.5; echo "answers.jsonl is damaged" >&2; exit 65')
    assert "There is no report of this run yet." in fetch(page, run).text
    assert make(page, run, hx=False).status == 303
    assert "is being made" in fetch(page, run).text
    deadline = time.monotonic() + 90
    while "is being made" in (text := fetch(page, run).text):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert 'class="bad"' in text and "<button>Make the report" in text
    assert "answers.jsonl is damaged" in text


def wait_for(maker: ReportMaker, place: Place) -> None:
    deadline = time.monotonic() + 20
    while maker.look(place).making_since is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_report_is_made_at_a_time_and_once(run: Path, program: Callable[[str], None]) -> None:
    program('sleep 0.3; echo made > "$4/report.html"')
    maker, place = ReportMaker(), place_of(run)
    assert maker.look(place).made_at is None
    assert maker.make(place) and not maker.make(place)
    assert maker.look(place).making_since is not None
    wait_for(maker, place)
    look = maker.look(place)
    assert look.made_at is not None and not look.is_old and look.problem is None
    os.utime(run / "run.json", (time.time() + 60, time.time() + 60))
    assert maker.look(place).is_old


def test_what_ends_badly_is_told_in_a_harmless_line(run: Path, program: Callable[[str], None]) -> None:
    program("printf 'x\\n\\033[31mno \\033]0;t\\007results\\n' >&2; exit 3")
    maker, place = ReportMaker(), place_of(run)
    assert maker.make(place)
    wait_for(maker, place)
    assert maker.look(place).problem == "no results"
    assert maker.make(place) and maker.look(place).problem is None
    wait_for(maker, place)
    program("exit 4")
    assert maker.make(place)
    wait_for(maker, place)
    assert maker.look(place).problem == "gpuherd report ended with exit code 4"


def test_the_process_ends_with_the_page(run: Path, program: Callable[[str], None]) -> None:
    program("exec sleep 600")
    maker, place = ReportMaker(), place_of(run)
    assert maker.make(place)
    deadline = time.monotonic() + 20
    while maker._process is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    maker.close()
    wait_for(maker, place)
    assert maker.look(place).problem is not None


def test_no_report_is_made_in_a_folder_that_others_may_write(run: Path) -> None:
    run.chmod(0o777)
    with pytest.raises(Forbidden, match="chmod o-w"):
        ReportMaker().make(place_of(run))


def test_a_report_that_shrinks_while_it_is_sent_ends_early(run: Path) -> None:
    (run / "report.html").write_bytes(b"x" * 600_000)
    file = ReportFile(place_of(run))
    blocks = file.blocks()
    first = next(blocks)
    (run / "report.html").write_bytes(b"")
    assert first == b"x" * len(first) and list(blocks) == []
