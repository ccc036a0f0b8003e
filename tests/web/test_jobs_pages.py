"""Pages of queues and jobs, and their buttons, as HTTP: what is shown, what is refused, and what reaches the queue."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import pytest
from tests.web.scenes import HOSTILE, Scene, job
from tests.web.serving import Answer, Serving, ask, serving

from gpuherd.jobs import JobState
from gpuherd.web.actions import Action, Forbidden, carry_out
from gpuherd.web.log_views import PART_BYTES
from gpuherd.web.pages.queues import _LINES_ADDED, LogFollower
from gpuherd.web.queue_views import Filter, read_jobs


class Visit:
    """A browser that is logged in, and one run folder."""

    def __init__(self, page: Serving, scene: Scene):
        self.page, self.scene = page, scene
        self.cookie = ask(page.port, f"/?token={page.token}").cookie
        self.queue = f"/queues/{scene.place.key}"
        self._token = ask(page.port, "/", Cookie=self.cookie).form_token

    def get(self, path: str = "", **headers: str) -> Answer:
        return ask(self.page.port, self.queue + path, Cookie=self.cookie, **headers)

    def do(
        self, verb: str, fields: Mapping[str, str] | None = None, *, token: str | None = None, hx: bool = True
    ) -> Answer:
        form = {"do": verb, "form_token": self._token if token is None else token, **(fields or {})}
        headers = {"HX_Request": "true"} if hx else {}
        return ask(
            self.page.port,
            f"{self.queue}/do",
            method="POST",
            body=urlencode(form),
            Cookie=self.cookie,
            Origin=f"http://127.0.0.1:{self.page.port}",
            Sec_Fetch_Site="same-origin",
            **headers,
        )

    def ids(self) -> dict[str, int]:
        return {line.name: line.id for line in read_jobs(self.scene.place, Filter()).jobs}

    def states(self) -> dict[str, str]:
        return {line.name: line.state for line in read_jobs(self.scene.place, Filter()).jobs}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    made = Scene(tmp_path / "run")
    made.in_all_states()
    return made


@pytest.fixture
def visit(scene: Scene) -> Iterator[Visit]:
    with serving(runs=(scene.run.root,)) as page:
        yield Visit(page, scene)


def test_the_pages_show_the_queue_its_jobs_and_a_job_with_its_log(visit: Visit) -> None:
    listed = ask(visit.page.port, "/queues", Cookie=visit.cookie)
    assert listed.status == 200 and "1 of 7 done" in listed.text and visit.queue in listed.text
    shown = visit.get()
    assert shown.status == 200
    assert re.findall(r'<li id="job-(\d+)">', shown.text) == [str(number) for number in (3, 2, 4, 5, 7, 6, 1)]
    assert 'value="cancel:4"' in shown.text and 'value="retry:2"' in shown.text and 'value="resume:5"' in shown.text
    assert 'value="cancel:1"' not in shown.text
    only = visit.get("?state=failed")
    assert re.findall(r'<li id="job-(\d+)">', only.text) == ["2"]
    assert re.findall(r'<li id="job-(\d+)">', visit.get("?q=ood").text) == ["1"]
    one = visit.get("/jobs/3")
    assert one.status == 200 and "epoch 1\nepoch 2\n" in one.text and "true busy" in one.text
    assert "3/12" in one.text and "GPU 0" in one.text


@pytest.mark.parametrize(
    "path",
    [
        "/queues/nothing",
        "/queues/..%2f..%2fetc",
        "/queues/run-0000000000000000/jobs/1",
        "QUEUE/jobs/99",
        "QUEUE/jobs/9" + "0" * 30,
        "QUEUE/jobs/-1",
        "QUEUE/jobs/3?attempt=9",
        "QUEUE/jobs/3?attempt=../../etc/passwd",
        "QUEUE/jobs/3?before=x",
        "QUEUE/jobs/6/log",
        "/runs/nothing/report.html",
        "QUEUE/../../../etc/passwd",
    ],
)
def test_what_is_not_there_is_not_found(visit: Visit, path: str) -> None:
    found = ask(visit.page.port, path.replace("QUEUE", visit.queue), Cookie=visit.cookie)
    assert found.status == 404, found.text
    assert "root:" not in found.text


def test_nobody_sees_or_does_anything_without_a_login(visit: Visit) -> None:
    for path in ("/queues", visit.queue, f"{visit.queue}/jobs/3", f"{visit.queue}/jobs/3/events", "/runs"):
        answer = ask(visit.page.port, path)
        assert answer.status == 401 and "busy" not in answer.text
    body = urlencode({"do": "cancel:all"})
    for headers in ({}, {"Origin": f"http://127.0.0.1:{visit.page.port}"}, {"Origin": "http://evil.example"}):
        assert ask(visit.page.port, f"{visit.queue}/do", method="POST", body=body, **headers).status == 403
    assert visit.do("cancel:all", token="0" * 64).status == 403
    assert "waiting" in visit.states().values()


def test_buttons_do_what_the_commands_do(visit: Visit) -> None:
    ids = visit.ids()
    answer = visit.do(f"pause:{ids['next']}")
    assert answer.status == 200 and answer.text.strip() == '<span class="good">paused next</span>'
    assert visit.states()["next"] == "paused"
    assert "resumed next" in visit.do(f"resume:{ids['next']}").text
    assert "with another priority: next" in visit.do(f"priority:{ids['next']}", {"priority": " 7 "}).text
    assert [line.priority for line in read_jobs(visit.scene.place, Filter(text="next")).jobs] == [7]
    assert "to be tried again: bad" in visit.do(f"retry:{ids['bad']}").text
    assert visit.states()["bad"] == "waiting"
    assert "cancelled next" in visit.do(f"cancel:{ids['next']}").text
    assert (visit.states()["next"], visit.states()["later"]) == ("cancelled", "cancelled")
    ticked = {f"job-{ids['next']}": "on", f"job-{ids['gone']}": "on"}
    assert "to be tried again: next, gone" in visit.do("retry", ticked).text
    assert "no gpuherd works on" in visit.do("drain").text
    visit.scene.end(visit.scene.busy, JobState.DONE)
    assert "cancelled" in visit.do("cancel:all").text
    assert {visit.states()[name] for name in ids if name not in ("busy", "good")} == {"cancelled"}


def test_a_button_works_without_scripts(visit: Visit) -> None:
    number = visit.ids()["next"]
    answer = visit.do(f"pause:{number}", hx=False)
    assert answer.status == 200 and "paused next" in answer.text
    assert f'href="{visit.queue}/jobs/{number}"' in answer.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"do": "pause"}, "no job was chosen"),
        ({"do": "explode:3"}, "nothing that can be done here"),
        ({"do": "set:all"}, "nothing that can be done here"),
        ({"do": "pause:x"}, "no number of a job"),
        ({"do": "priority:4", "priority": "high"}, "priority"),
        ({"do": "up"}, "none of your own queues"),
        ({"do": ""}, "nothing that can be done here"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(visit: Visit, fields: dict[str, str], words: str) -> None:
    before = visit.states()
    answer = visit.do(fields["do"], fields)
    assert answer.status == 400 and words in answer.text and 'class="bad"' in answer.text
    assert visit.states() == before


def test_a_job_that_is_not_there_is_told_so(visit: Visit) -> None:
    answer = visit.do("pause:99")
    assert answer.status == 404 and "no job number 99" in answer.text


def test_a_run_that_others_may_write_is_only_looked_at(visit: Visit) -> None:
    visit.scene.run.root.chmod(0o777)
    shown = visit.get()
    assert "chmod o-w" in shown.text and 'value="cancel:' not in shown.text and 'type="checkbox"' not in shown.text
    answer = visit.do("cancel:all")
    assert answer.status == 403 and "chmod o-w" in answer.text
    assert visit.states()["next"] == "waiting"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_run_of_another_user_is_only_looked_at(visit: Visit) -> None:
    os.chown(visit.scene.run.root, 12345, 12345)
    shown = visit.get("/jobs/3")
    assert "belongs to uid 12345" in shown.text and 'name="do"' not in shown.text
    # The log is root's, in the folder of somebody else: perhaps a second name for a secret of root's.
    assert "epoch 1" not in shown.text and "no plain file of the run's owner" in shown.text
    assert visit.do("cancel:all").status == 403


def test_hostile_text_stays_text(scene: Scene, visit: Visit) -> None:
    scene.queue.add([job(HOSTILE, title=HOSTILE, argv=("sh", "-c", HOSTILE)), job("</script>" * 1000)])
    record = scene.start(HOSTILE, log=f"{HOSTILE}\n</pre><script>alert(1)</script>\n<!-- {HOSTILE}")
    scene.end(record, JobState.FAILED, HOSTILE)
    number = visit.ids()["<b onmouseover=alert(1)>'\"&{{7*7}} </b>"]
    for path in ("", "?state=failed", "?q=%3Cscript%3E%22", f"/jobs/{number}"):
        text = visit.get(path).text
        assert "<b onmouseover" not in text and "<script>" not in text and "\x1b" not in text and "\u202e" not in text
        assert "&amp;49" not in text
    assert "&lt;b onmouseover=alert(1)&gt;" in visit.get(f"/jobs/{number}").text


def test_a_log_of_10_gb_opens_at_once_at_its_end(visit: Visit) -> None:
    log = visit.scene.run.attempt_log("busy", 1)
    with log.open("r+b") as file:
        file.truncate(10 * 2**30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe last line\n")
    began = time.monotonic()
    shown = visit.get("/jobs/3")
    assert shown.status == 200 and "the last line" in shown.text and "10240.0 MB" in shown.text
    earlier = re.search(r'href="(\?[^"]*before=\d+)"', shown.text)
    assert earlier is not None
    before = visit.get(f"/jobs/3{earlier[1].replace('&amp;', '&')}")
    assert before.status == 200 and "the end of the log" in before.text and "the last line" not in before.text
    assert time.monotonic() - began < 10


def test_a_queue_that_disappears_or_is_damaged_leaves_a_page_that_says_so(visit: Visit) -> None:
    visit.scene.queue.close()
    for path in visit.scene.run.root.glob("queue.sqlite*"):
        path.unlink()
    visit.scene.run.queue.write_bytes(b"SQLite format 3\0" + os.urandom(9000))
    time.sleep(1.6)  # until what was read is old
    answer = visit.get()
    assert answer.status == 500 and "queue.sqlite" in answer.text and "Traceback" not in answer.text
    shutil.rmtree(visit.scene.run.root)
    assert visit.do("cancel:all").status == 403
    time.sleep(1.6)
    assert visit.get().status == 404
    assert visit.get("/jobs/3").status == 404
    listed = ask(visit.page.port, "/queues", Cookie=visit.cookie)
    assert listed.status == 200


def test_events_bring_what_changes_of_a_job_and_its_log(visit: Visit) -> None:
    log = visit.scene.run.attempt_log("busy", 1)
    connection = HTTPConnection("127.0.0.1", visit.page.port, timeout=30)
    connection.request("GET", f"{visit.queue}/jobs/3/events", headers={"Cookie": visit.cookie})
    response = connection.getresponse()
    assert response.status == 200

    def until(words: str) -> str:
        seen = ""
        while words not in seen:
            seen = response.readline().decode()
        return seen

    assert "epoch 1\\nepoch 2\\n" in until("log-lines")
    with log.open("a") as file:
        file.write("epoch 3\n 40%")
    added = until("epoch 3")
    assert '"append"' in added and "epoch 2" not in added and " 40%" in added
    visit.do("priority:3", {"priority": "77"})
    assert "77" in until("job-facts")
    connection.close()


def test_a_page_that_stays_open_does_not_grow(tmp_path: Path) -> None:
    log, follower = tmp_path / "log", LogFollower(os.geteuid())
    log.write_text("begin\n")
    assert [part.how for part in follower.look(1, log) if part.id == "log-lines"] == ["morph"]
    ways: list[str] = []
    for _ in range(3 * _LINES_ADDED // 1000):
        with log.open("a") as file:
            file.write("line\n" * 1000)
        ways += [part.how for part in follower.look(1, log) if part.id == "log-lines"]
    assert ways == [*["append"] * 5, "morph", *["append"] * 5, "morph"]
    assert follower.look(1, log) == []
    other = tmp_path / "other"
    other.write_text("another attempt\n")
    assert [part.how for part in follower.look(2, other) if part.id == "log-lines"] == ["morph"]
    assert follower.look(3, tmp_path / "gone") == []
    assert PART_BYTES == 65_536


def test_a_running_job_is_cancelled_where_no_dispatcher_runs(tmp_path: Path) -> None:
    """The processes that a killed dispatcher left are ended by the page itself, as by ``gpuherd cancel``."""
    root = tmp_path / "run"
    (tmp_path / "jobs.txt").write_text("sleep 300\n")
    words = [sys.executable, "-m", "gpuherd", "batch", "jobs.txt", "--output-dir", str(root), "--cpu-jobs", "1"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        scene = Scene(root)
        deadline = time.monotonic() + 60
        while not (lines := [line for line in read_jobs(scene.place, Filter()).jobs if line.state == "running"]):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
    outcome = carry_out(scene.place, Action("cancel", (lines[0].id,)))
    assert outcome.ok and "cancelled" in outcome.text
    assert [line.state for line in read_jobs(scene.place, Filter()).jobs] == ["cancelled"]


def test_nobody_acts_for_others(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run")
    scene.run.root.chmod(0o777)
    with pytest.raises(Forbidden):
        carry_out(scene.place, Action("stop"))
