"""``gpuherd simulate``: what it prints, refuses and writes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuherd.cli.main import run
from gpuherd.errors import CannotWrite, ExitCode, JobCannotFit, QueueUnreadable, UsageError
from gpuherd.jobs import Job, Queue

EIGHT = ("--machine", "8x80GB")
PAIR = ("--users", "alice:2,bob", "--jobs", "20", "--seconds", "5m")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["simulate", *words]) == ExitCode.OK
    return capsys.readouterr().out


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told(capsys, *words, "--json"))
    return found


def test_64_jobs_on_8_gpus_beside_the_guides(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--jobs", "64", "--seconds", "300", *EIGHT, "--compare", "policy=gpuherd,guides")
    ours, guides = found["runs"]
    assert (found["jobs"], found["gpus"], found["machines"]) == (64, 8, 1)
    assert ours["over_least_possible"] <= 1.01
    assert guides["over_least_possible"] == pytest.approx(2.67, abs=0.01)


def test_the_table_and_the_timeline_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "--jobs", "64", "--seconds", "300", *EIGHT, "--compare", "policy=gpuherd,guides")
    assert "GPU 7 " in shown and "policy=guides" in shown
    assert "Shortest: policy=gpuherd, 2.67 times as fast as policy=guides" in shown
    assert "…" not in shown, "no figure is cut"
    assert max(map(len, shown.splitlines())) <= 100


def test_the_same_seed_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--jobs",
        "200",
        "--seconds",
        "lognormal:5m,1",
        *EIGHT,
        "--background",
        "busy=0.3",
        "--failures",
        "crash=0.1",
    )
    assert figures(capsys, *words) == figures(capsys, *words)
    assert figures(capsys, *words) != figures(capsys, *words, "--seed", "1")


def test_all_rules_have_an_effect(capsys: pytest.CaptureFixture[str]) -> None:
    words: tuple[str, ...] = (
        "--jobs",
        "120",
        "--seconds",
        "lognormal:10m,1",
        "--num-gpus",
        "1:8,4:2",
        "--mem",
        "20GB:3,70GB:1",
    )
    words += (*EIGHT, "--background", "busy=0.3,mean=1h,barge=0.5", "--begin", "Mon 07:00")
    plain = figures(capsys, *words)["runs"][0]
    for rule in (
        "max_gpus=4",
        "max_checks=200",
        "check_interval=60",
        "max_concurrent=3",
        "order=longest",
        "share=on",
        "yield=pause",
        "yield=requeue",
        "timeout=5m",
        "quiet_hours=Mon 09:00-18:00",
        "policy=guides",
    ):
        assert figures(capsys, *words, "--compare", rule)["runs"][0] != {**plain, "name": rule}, rule
    cpu = ("--jobs", "40", "--seconds", "60", "--num-gpus", "0", *EIGHT)
    assert figures(capsys, *cpu, "--cpu-jobs", "1")["runs"][0]["makespan_seconds"] == 2400
    assert figures(capsys, *cpu, "--cpu-jobs", "8")["runs"][0]["makespan_seconds"] == 300


def test_jobs_that_come_one_after_another_wait_less(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--jobs", "100", "--seconds", "5m", *EIGHT)
    together = figures(capsys, *words)["runs"][0]["wait_seconds"]["mean"]
    apart = figures(capsys, *words, "--every", "exponential:1m")["runs"][0]["wait_seconds"]["mean"]
    assert apart < together / 5


def test_a_job_file_is_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "commands.txt"
    file.write_text("#gpuherd cost=100 gpus=2 name=first\na\n#gpuherd cost=50 needs=first\nb\n")
    found = figures(capsys, str(file), "--seconds", "cost", "--machine", "2x80GB", "--max-checks", "1")
    assert found["runs"][0]["makespan_seconds"] == pytest.approx(150, abs=0.1)
    assert figures(capsys, str(file), "--seconds", "cost:2", "--machine", "2x80GB")["runs"][0]["makespan_seconds"] > 300
    with pytest.raises(UsageError, match="--seconds"):
        run(["simulate", str(file), *EIGHT])


def test_a_run_folder_needs_lengths_until_something_has_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    queue = Queue(tmp_path / "queue.sqlite")
    queue.submit([Job(name="a", argv=("x",)), Job(name="b", argv=("x",), needs=("a",))])
    queue.close()
    with pytest.raises(UsageError, match="has not run yet"):
        run(["simulate", str(tmp_path), *EIGHT])
    found = figures(capsys, str(tmp_path), *EIGHT, "--seconds", "1m", "--max-checks", "1")
    assert found["runs"][0]["makespan_seconds"] == pytest.approx(120, abs=0.1)
    assert run(["simulate", str(tmp_path / "queue.sqlite"), *EIGHT, "--seconds", "1m"]) == ExitCode.OK


def test_a_folder_without_a_queue_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no queue in"):
        run(["simulate", str(tmp_path), *EIGHT])
    (tmp_path / "queue.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(QueueUnreadable, match=r"queue\.sqlite"):
        run(["simulate", str(tmp_path), *EIGHT])


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ((*EIGHT,), "say --jobs"),
        (("--jobs", "5", "--seconds", "5m"), "which GPUs"),
        (("--jobs", "5", *EIGHT), "needs --seconds"),
        (("--jobs", "5", "--seconds", "cost", *EIGHT), "no cost"),
        (("--jobs", "5", "--seconds", "5m", *EIGHT, "--machines", "2x8x80GB"), "which GPUs"),
        (("results", "--jobs", "5", "--seconds", "5m", *EIGHT), "one of them"),
        (("--jobs", "5", "--seconds", "5m", *EIGHT, "--compare", "ordre=age"), "did you mean order="),
        (("results", "--mem", "5GB", *EIGHT), "--mem is for drawn jobs"),
        (("--jobs", "9999999", "--seconds", "5m", *EIGHT), "can be simulated"),
        (("a.txt", "b.txt", *EIGHT), "whose jobs are these"),
        (("alice=a.txt", "b.txt", *EIGHT), "write alice=b.txt"),
        (("a.txt", *PAIR, *EIGHT), "With --users write alice=a.txt"),
        (("alice=a.txt", "alice=b.txt", *EIGHT), "two sources"),
        (("al ice=a.txt", *EIGHT), "no name of a user"),
        (("alcie=a.txt", "--users", "alice,bob", *EIGHT), "did you mean alice"),
        (("--users", "alice,bob", *EIGHT), "how many jobs each user has"),
        (("--users", "alice,bob", "--jobs", "5", *EIGHT), "needs --seconds"),
        (("alice=a.txt", "--jobs", "5", "--seconds", "5m", *EIGHT), "has a source of jobs already"),
        (("--jobs", "5", "--seconds", "5m", "--user-arrives", "bob=5m", *EIGHT), "name them: --users"),
        (("--jobs", "5", "--seconds", "5m", "--no-turns", *EIGHT), "for several users: --users"),
        (("--jobs", "5", "--seconds", "5m", "--grace", "5s", *EIGHT), "for several users: --users"),
        ((*PAIR, "--user-arrives", "bbo=5m", *EIGHT), "did you mean bob"),
        ((*PAIR, "--user-hours", "dave=5", *EIGHT), "there are alice, bob"),
        ((*PAIR, "--machines", "2x8x80GB"), "share one machine"),
        ((*PAIR, *EIGHT, "--policy", "guides"), "knows no users"),
        ((*PAIR, *EIGHT, "--num-nodes", "2"), "spans several nodes"),
    ],
)
def test_what_does_not_go_together_is_refused(words: tuple[str, ...], match: str) -> None:
    with pytest.raises((UsageError, JobCannotFit), match=match):
        run(["simulate", *words])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--machine", "8"), "write 8x80GB"),
        ((*EIGHT, "--seconds", "lognormol:1,2"), "did you mean lognormal"),
        ((*EIGHT, "--ordre", "age"), "did you mean --order"),
        ((*EIGHT, "--background", "bussy=1"), "did you mean busy"),
        ((*EIGHT, "--users", "alice:0"), "a weight is a number above 0"),
        ((*EIGHT, "--user-arrives", "bob"), "gives no user a value"),
        ((*EIGHT, "--keep-share", "2"), "not a share from 0 to 1"),
    ],
)
def test_words_that_do_not_parse_are_answered(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["simulate", *words])
    assert ended.value.code == ExitCode.USAGE
    assert told in capsys.readouterr().err


def test_the_picture_is_written_whole_or_not_at_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--jobs", "9", "--seconds", "5m", *EIGHT, "--plot")
    told(capsys, *words, str(tmp_path / "run.svg"))
    assert (tmp_path / "run.svg").read_text().startswith("<svg ")
    with pytest.raises(CannotWrite, match="--plot"):
        run(["simulate", *words, str(tmp_path / "no" / "folder" / "run.svg")])


def test_what_went_wrong_is_said_under_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(
        capsys, "--jobs", "30", "--seconds", "5m", "--num-gpus", "1:2,9:1", *EIGHT, "--failures", "missing=0.3"
    )
    assert "attempts that failed: " in shown and " missing; jobs failed: " in shown
    assert "asks for 9 GPUs; there are 8 to use" in shown


def test_plain_signs_where_the_output_is_no_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", errors="strict"))
    assert run(["simulate", "--jobs", "9", "--seconds", "5m", *EIGHT, "--background", "busy=0.2"]) == ExitCode.OK
    sys.stdout.flush()
    assert b"GPU 1  ####" in written.getvalue()


def test_jobs_that_name_a_model_get_the_gpus_of_its_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "jobs.txt"
    path.write_text("#gpuherd model=llama-3.1-70b batch=8 name=large\na\n#gpuherd model=llama-3.2-1b name=small\nb\n")
    assert run(["simulate", str(path), "--seconds", "100", "--machine", "4x40GB"]) == ExitCode.OK
    assert "asks for 4 GPUs" in capsys.readouterr().err
    # The large one takes all four GPUs, so that the small one comes after it.
    (result,) = figures(capsys, str(path), "--seconds", "100", "--machine", "4x40GB")["runs"]
    assert result["makespan_seconds"] >= 200


def test_several_users_with_their_shares(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, *PAIR, "--machine", "3x80GB", "--user-arrives", "bob=20m")
    assert found["jobs"] == 40
    (result,) = found["runs"]
    alice, bob = result["users"]
    assert (alice["name"], alice["weight"], alice["jobs"], alice["done"]) == ("alice", 2.0, 20, 20)
    assert bob["arrives_seconds"] == 1200.0
    assert bob["first_gpu_seconds"] == pytest.approx(bob["predicted_seconds"], abs=1)
    assert alice["share"] + bob["share"] == pytest.approx(1, abs=0.001)
    assert alice["gpu_hours"] + bob["gpu_hours"] == pytest.approx(result["gpu_hours"])
    assert alice["wait_seconds"]["mean"] > 0
    assert "users" not in figures(capsys, "--jobs", "9", "--seconds", "5m", *EIGHT)["runs"][0]


def test_one_user_more_changes_no_job_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def hours(who: str) -> dict[str, float]:
        words = ("--users", who, "--jobs", "20", "--seconds", "lognormal:5m,1", *EIGHT)
        return {user["name"]: user["gpu_hours"] for user in figures(capsys, *words)["runs"][0]["users"]}

    two, three = hours("alice,bob"), hours("alice,bob,carol")
    assert three == {**two, "carol": three["carol"]}
    assert len(set(three.values())) == 3


def test_each_user_may_have_a_source_of_jobs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "commands.txt"
    file.write_text("#gpuherd cost=100 gpus=2 name=first\na\n#gpuherd cost=50 needs=first\nb\n")
    (tmp_path / "run").mkdir()
    queue = Queue(tmp_path / "run" / "queue.sqlite")
    queue.submit([Job(name="first", argv=("x",))])
    queue.close()
    words = (f"alice={file}", f"bob={tmp_path / 'run'}", "--seconds", "1m", "--machine", "2x80GB")
    (result,) = figures(capsys, *words)["runs"]
    assert [(user["name"], user["weight"], user["done"]) for user in result["users"]] == [
        ("alice", 1.0, 2),
        ("bob", 1.0, 1),
    ]
    # Those without a source have drawn jobs.
    more = ("--users", "alice:3,carol", "--jobs", "5")
    (result,) = figures(capsys, *words[:1], *words[2:], *more)["runs"]
    assert [(user["name"], user["weight"], user["jobs"]) for user in result["users"]] == [
        ("alice", 3.0, 2),
        ("carol", 1.0, 5),
    ]


def test_a_file_whose_name_has_an_equals_sign_is_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "lr=3.txt"
    file.write_text("a\nb\n")
    (result,) = figures(capsys, str(file), "--seconds", "1m", *EIGHT)["runs"]
    assert result["done"] == 2 and "users" not in result


def test_users_have_rows_in_the_table_and_lines_in_the_timeline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = told(capsys, *PAIR, *EIGHT, "--compare", "turns=on,off", "--plot", str(tmp_path / "run.svg"))
    assert max(map(len, shown.splitlines())) <= 100
    assert sum(line.lstrip().startswith(("alice ", "bob ")) for line in shown.splitlines()) >= 4
    assert "Of due" in shown and "Predicted" in shown and "…" not in shown
    picture = (tmp_path / "run.svg").read_text()
    assert ">alice</text>" in picture and "bob: job-1: " in picture


def test_the_rules_of_turns_have_an_effect(capsys: pytest.CaptureFixture[str]) -> None:
    words: tuple[str, ...] = ("--users", "alice:3,bob,carol", "--jobs", "40", "--seconds", "lognormal:10m,1")
    words += ("--num-gpus", "1:8,3:2", "--machine", "4x80GB", "--user-arrives", "carol=1h", "--seed", "3")
    plain = figures(capsys, *words)["runs"][0]
    for rule in ("turns=off", "half_life=20m", "grace=5m", "slice=1h", "keep_share=0.5"):
        assert figures(capsys, *words, "--compare", rule)["runs"][0] != {**plain, "name": rule}, rule
    assert figures(capsys, *words, "--user-hours", "bob=5")["runs"][0]["users"] != plain["users"]
