"""Queues, jobs, logs and reports in a real browser: what a user clicks, sees change, and may not be harmed by."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import browsing
from tests.web.scenes import HOSTILE, Scene, job
from tests.web.serving import Serving, serving
from tests.web.visiting import Visit

from gpuherd.batch import daemon, user_queue
from gpuherd.jobs import JobState
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.standin.machine import SimulatedMachine
from gpuherd.web.places import key_of

pytestmark = browsing.IN_A_BROWSER


@pytest.fixture(scope="module")
def window() -> Iterator[browsing.Window]:
    yield from browsing.one_window(offline=False)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    made = Scene(tmp_path / "run")
    made.in_all_states()
    made.queue.add([job(HOSTILE, title=HOSTILE), job("x" * 190)])
    return made


@pytest.fixture
def server(scene: Scene) -> Iterator[Serving]:
    with serving(runs=(scene.run.root,)) as made:
        yield made


def open_queue(window: browsing.Window, server: Serving, scene: Scene, path: str = "", **how: object) -> Visit:
    visit = Visit(window, server, **how)  # type: ignore[arg-type]
    visit.go(f"/queues/{scene.place.key}{path}")
    visit.connected()
    return visit


@pytest.mark.slow
def test_jobs_are_paused_by_button_while_the_list_changes_under_the_hand(
    window: browsing.Window, server: Serving, scene: Scene
) -> None:
    visit = open_queue(window, server, scene)
    page = visit.page
    assert page.locator("ul.jobs li").count() == 9
    assert page.get_by_role("link", name="<b onmouseover").count() == 1
    page.get_by_label("Tick held").check()
    page.get_by_role("button", name="Retry bad").focus()
    scene.end(scene.start("next"), JobState.DONE)
    page.wait_for_selector("#job-4 .state-done", timeout=20_000)
    # What was ticked and where the focus was stays, whatever the list has become.
    assert page.get_by_label("Tick held").is_checked()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Retry bad"
    page.keyboard.press("Enter")
    page.wait_for_selector("#said .good")
    assert page.locator("#said").inner_text() == "to be tried again: bad"
    page.wait_for_selector("#job-2 .state-waiting", timeout=20_000)
    # The button that has the focus has become another one, in word and deed.
    assert page.evaluate("document.activeElement.textContent") == "Pause"
    page.keyboard.press("Enter")
    page.wait_for_selector("#job-2 .state-paused", timeout=20_000)
    page.keyboard.press("Enter")
    page.wait_for_selector("#job-2 .state-waiting", timeout=20_000)
    page.get_by_role("button", name="Resume ticked").click()
    page.wait_for_selector("#job-5 .state-waiting", timeout=20_000)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel ticked").click()
    page.wait_for_selector("#job-5 .state-cancelled", timeout=20_000)
    assert visit.accessible()
    assert visit.fine()


@pytest.mark.slow
def test_a_job_with_its_log_on_a_phone_in_the_dark(window: browsing.Window, server: Serving, scene: Scene) -> None:
    log = scene.run.attempt_log("busy", 1)
    log.write_text("".join(f"{number} {'long ' * 30}\n" for number in range(200)))
    visit = open_queue(window, server, scene, "/jobs/3", width=360, scheme="dark")
    page = visit.page
    assert page.locator("#log-lines").inner_text().rstrip().endswith("long")

    # The box begins at its end, and stays there.
    at_end = "box => box.scrollHeight > box.clientHeight && Math.abs(box.scrollTop) < 2"
    assert page.locator(".log").evaluate(at_end)
    with log.open("a") as file:
        file.write("<img src=x onerror=alert(1)>\nthe newest line\n 50%|#####")
    page.locator("#log-rest", has_text="50%").wait_for(timeout=20_000)
    assert page.locator(".log").evaluate(at_end)
    assert page.locator("#log-lines").inner_text().rstrip().endswith("the newest line")
    # Who has scrolled up reads on undisturbed.
    page.locator(".log").evaluate("box => { box.scrollTop = -300; }")
    with log.open("a") as file:
        file.write("\neven newer\n")
    page.locator("#log-lines", has_text="even newer").wait_for(timeout=20_000)
    assert page.locator(".log").evaluate("box => box.scrollTop") < -200
    assert page.locator("#log-lines img").count() == 0
    assert visit.fits()
    assert visit.accessible()
    assert visit.fine()


# --- slow -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 700, 1280, 1920])
def test_at_any_width(window: browsing.Window, server: Serving, scene: Scene, width: int, scheme: str) -> None:
    (scene.run.root / "run.json").write_text(json.dumps({"kind": "qa"}))
    key = scene.place.key
    (scene.run.root / "report.html").write_text("<!doctype html><title>x</title><p>report")
    visit = Visit(window, server, width=width, scheme=scheme)
    for path in (
        "/queues",
        f"/queues/{key}",
        f"/queues/{key}/jobs/2",
        f"/queues/{key}/jobs/7",
        "/runs",
        f"/runs/{key}",
    ):
        visit.go(path)
        assert visit.fits(), path
        assert visit.accessible()
    assert visit.fine()


@pytest.mark.slow
def test_a_hostile_report_reaches_nothing(window: browsing.Window, server: Serving, scene: Scene) -> None:
    root, key = scene.run.root, scene.place.key
    (root / "run.json").write_text(json.dumps({"kind": "qa"}))
    (root / "report.html").write_text(
        """<!doctype html><title>t</title><p id="found">nothing</p><form id="f" method="post"></form><script>
        const found = [];
        const attempt = (name, what) => { try { what(); found.push(name); } catch (problem) { } };
        attempt("cookie", () => { if (document.cookie) return; throw 0; });
        attempt("storage", () => localStorage.getItem("x"));
        attempt("parent", () => parent.document.body.innerHTML);
        attempt("top", () => { top.location = "/queues"; });
        attempt("eval", () => eval("1"));
        const image = new Image(); image.src = "/queues/KEY"; image.onload = () => found.push("image");
        const end = () => { document.getElementById("found").textContent = "found: " + found.join(" "); };
        fetch("/queues/KEY").then(() => found.push("fetch")).catch(() => { }).finally(() => setTimeout(end, 500));
        document.getElementById("f").action = "/queues/KEY/do"; document.getElementById("f").submit();
        </script>""".replace("KEY", key)
    )
    visit = Visit(window, server)
    visit.go(f"/runs/{key}")
    within = visit.page.frame_locator("iframe.report")
    within.get_by_text("found:").wait_for(timeout=30_000)
    assert within.locator("#found").inner_text().strip() == "found:"
    assert visit.page.url.endswith(f"/runs/{key}")
    # Alone in a tab it can leave for another page, but not as the user: the browser sends no cookie along.
    visit.go(f"/runs/{key}/report.html")
    visit.page.wait_for_url("**/queues", timeout=30_000)
    visit.page.wait_for_selector("#secret")
    visit.go("/queues")
    assert visit.page.locator("#secret").count() == 0


@pytest.mark.slow
def test_a_report_of_ours_draws_its_charts_in_the_sandbox(window: browsing.Window, tmp_path: Path) -> None:
    from tests.esd.report.runs import put_small_run

    run = tmp_path / "spectra"
    run.mkdir()
    put_small_run(run)
    with serving(runs=(run,)) as server:
        visit = Visit(window, server)
        visit.go(f"/runs/{key_of(run)}")
        visit.connected()
        visit.page.get_by_role("button", name="Make the report").click()
        visit.page.wait_for_selector("iframe.report", timeout=100_000)
        within = visit.page.frame_locator("iframe.report")
        within.locator("body[data-ready]").wait_for(timeout=60_000)
        within.get_by_role("link", name="Models").first.wait_for(timeout=20_000)
        assert visit.complaints == []


@pytest.mark.slow
def test_100_000_jobs_are_painted_at_once(window: browsing.Window, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "many")
    scene.queue.submit([job(f"job-{number:06d}") for number in range(100_000)])
    with serving(runs=(scene.run.root,)) as server:
        visit = open_queue(window, server, scene)
        page = visit.page
        assert page.locator("ul.jobs li").count() == 50
        assert "page 1 of 2000" in page.locator("nav.pager").inner_text()
        page.get_by_role("link", name="Next").click()
        page.wait_for_url("**page=2*")
        took = []
        for _ in range(5):
            page.reload()
            page.wait_for_selector("ul.jobs li")
            entry = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
            took.append(entry)
            time.sleep(0.3)
        assert min(took) < 200, took
        page.locator("#q").fill("99999")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=99999*")
        assert page.locator("ul.jobs li").count() == 1


@pytest.fixture
def own_queue(standin: Callable[..., SimulatedMachine]) -> Iterator[Path]:
    """Two simulated GPUs, and a user who has no queue yet."""
    standin("2x40GB")
    yield user_queue.folder()
    daemon.down(now=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_action_with_a_dispatcher_and_jobs_that_run(window: browsing.Window, own_queue: Path) -> None:
    count = "i=0; while [ $i -lt 900 ]; do i=$((i+1)); echo line $i; sleep 0.2; done"
    for name, command in (("bad", "echo it breaks; exit 65"), ("one", count), ("two", count), ("three", count)):
        made = job(name, argv=("sh", "-c", command), env={"PATH": os.environ["PATH"]}, cwd="/")
        user_queue.submit(made, named=True)
    with serving() as server:
        visit = Visit(window, server)
        page = visit.page
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("link", name="Queues").click()
        page.get_by_role("link", name="My queue").click()
        visit.connected()
        assert "0 of 4 done" in page.locator("#summary").inner_text()
        page.get_by_role("button", name="Start working").click()
        page.wait_for_selector("#said .good", timeout=90_000)
        page.wait_for_selector("#job-2 .state-running", timeout=60_000)
        page.wait_for_selector("#job-1 .state-failed", timeout=90_000)
        assert page.locator("#job-1 .job-what").inner_text().startswith("bad input, exit code 65")
        page.get_by_role("link", name="one", exact=True).click()
        visit.connected()
        page.locator("#log-lines", has_text="line 3").wait_for(timeout=30_000)
        page.get_by_role("button", name="Pause one").click()
        page.wait_for_selector("#job-status .state-paused", timeout=30_000)
        page.get_by_role("button", name="Resume one").click()
        page.wait_for_selector("#job-status .state-running", timeout=30_000)
        page.get_by_label("Priority").fill("5")
        page.get_by_role("button", name="Set").click()
        page.locator("#job-facts", has_text="5").wait_for(timeout=30_000)
        page.get_by_role("button", name="Cancel one").click()
        page.wait_for_selector("#job-status .state-cancelled", timeout=60_000)
        page.get_by_role("button", name="Retry one").click()
        page.wait_for_selector("#job-status .state-running, #job-status .state-waiting", timeout=60_000)
        page.get_by_role("link", name="My queue").click()
        visit.connected()
        page.locator("summary", has_text="All jobs").click()
        page.get_by_role("button", name="Retry all failed and cancelled").click()
        page.locator("#said", has_text="bad").wait_for(timeout=30_000)
        page.get_by_role("button", name="Drain").click()
        page.locator("#summary", has_text="draining").wait_for(timeout=60_000)
        assert visit.accessible()
        page.get_by_role("button", name="Stop now").click()
        page.get_by_role("button", name="Start working").wait_for(timeout=90_000)
        assert visit.fine()
    deadline = time.monotonic() + 30
    while DispatcherLock.holder(user_queue.open_folder().lock) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
