"""``gpuherd posttrain`` as users meet it: the plan, what is refused, a run that is killed and goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain import tiny
from tests.posttrain.prefork import Prefork
from tests.posttrain.runs import small
from tests.qa.conftest import made_once

from gpuherd.cli.main import run
from gpuherd.engines.process_tree import tagged
from gpuherd.errors import ExitCode, UsageError
from gpuherd.jobs.queue.store import Queue
from gpuherd.posttrain.runs.folder import RoundsDirectory, read_record
from gpuherd.posttrain.runs.plan import Phase
from gpuherd.standin.machine import SimulatedMachine

FAST = ("--check-interval=0.02", "--max-checks=1")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Random models with one tokenizer: a reference and one for classifiers."""
    reference = made_once(tmp_path_factory, "tiny-policy", tiny.tiny_llama)
    value = made_once(tmp_path_factory, "tiny-value", lambda folder: tiny.tiny_llama(folder, seed=1, width=16))
    return str(reference), str(value)


def words(models: tuple[str, str], output: Path, *more: str) -> list[str]:
    return [
        "posttrain",
        "experiment.name=first",
        f"output_dir={output}",
        "models=[]",
        f"models.tiny.reference={models[0]}",
        f"models.tiny.value={models[1]}",
        "datasets=[]",
        "datasets.sums={task:arithmetic,settings:{digits:1,train:24,test:8}}",
        "system.dtype=fp32",
        "training.gradient_checkpointing=false",
        "generation={max_new_tokens:4,temperature:1,top_p:1,batch_size:8}",
        "evaluation.etas=[1,0.1]",
        "evaluation.num_samples=2",
        *more,
    ]


def test_the_plan_as_a_tree(
    models: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    standin: Callable[..., SimulatedMachine],
) -> None:
    machine = ["--simulate", str(standin("4x40GB").path)]
    command = [*machine, *words(models, tmp_path / "out", "--dry-run", "algos=[QSharp,GRPO]", *FAST)]
    assert run(command) == ExitCode.OK
    told = capsys.readouterr().out
    assert "first: 2 algorithms x 1 data set x 1 pair of models x 2 rounds: 15 jobs" in told
    assert "GRPO / sums / tiny" in told and "QSharp / sums / tiny" in told and "reference / sums / tiny" in told
    assert "collect: 24 problems, 3 jobs, each 1 GPU with" in told and "round 1" in told
    assert "nothing was started; it would go to" in told
    assert not (tmp_path / "out").exists()


def test_the_plan_as_json(models: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words(models, tmp_path / "out", "--json", "algos=[GRPO]"), "--dry-run"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    names = [job["name"] for job in told["jobs"]]
    assert names == [
        "reference_sums_tiny_evaluate",
        "GRPO_sums_tiny_r0_train",
        "GRPO_sums_tiny_r0_evaluate",
        "GRPO_sums_tiny_r1_train",
        "GRPO_sums_tiny_r1_evaluate",
    ]
    assert told["jobs"][3]["needs"] == ["GRPO_sums_tiny_r0_train"]
    assert told["jobs"][1]["priority"] > told["jobs"][3]["priority"]


def test_a_plan_and_a_refusal_need_no_torch(models: tuple[str, str], tmp_path: Path) -> None:
    script = (
        "import sys\nfrom gpuherd.cli.main import run\nassert run(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules), sorted(sys.modules)\n"
    )
    command = words(models, tmp_path / "out", "--dry-run", "algos=[PITA,GRPO,DPO,SFT,GRPO-HF]")
    done = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["algos.PITA.lrr=1"], "there is no key algos.PITA.lrr; did you mean algos.PITA.lr?"),
        (["models=gpt3"], "did you mean gpt2?"),
        (["data_collection.max_examples=100"], "data_collection.max_examples, sums: .*24"),
        (["--gpus-per-job=2"], "computes on 1 GPU"),
        (["--resume=x", "--config=y"], "leave --config out"),
        (["--resume=no-such-run"], "a run that goes on has its own configuration"),
        (["--test-setup"], "has a small experiment of its own"),
        (["job_priority=nothing"], "a dotted name"),
    ],
)
def test_what_is_refused(models: tuple[str, str], tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run([*words(models, tmp_path / "out"), *more])
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["--resume", str(tmp_path)], [f"resume_from={tmp_path}"]):
        with pytest.raises(Exception, match="is no run of gpuherd posttrain"):
            run(["posttrain", *command])
    with pytest.raises(UsageError, match="name two runs"):
        run(["posttrain", "--resume", "a", "resume_from=b"])
    with pytest.raises(SystemExit):
        run(["posttrain", "a=1", "--dry-rum"])
    assert "did you mean --dry-run?" in capsys.readouterr().err


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def adders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model that adds, half of the time, and one for classifiers."""
    reference = made_once(tmp_path_factory, "adder", small.adder)
    return str(reference), str(made_once(tmp_path_factory, "adder-value", small.classifier_base))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """A simulated machine of four GPUs, which outlives the commands that are killed on it."""
    made = SimulatedMachine.create(tmp_path / "machine", "4x40GB", attribute=True)
    yield made.path


def start(machine: Path, *command: str, python: Path | None = None) -> subprocess.Popen[str]:
    """Starts a command; ``python``: what its jobs run by."""
    by = "import sys; sys.executable = sys.argv.pop(1); from gpuherd.cli.main import main; main()"
    words = ["-m", "gpuherd"] if python is None else ["-c", by, str(python)]
    whole = [sys.executable, *words, "--simulate", str(machine), *command]
    env = os.environ | {"COLUMNS": "160", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def ended(process: subprocess.Popen[str]) -> str:
    told, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, told
    return told


def finished(root: Path) -> int:
    """How many jobs of an experiment's one run have succeeded so far."""
    queues = list(root.glob("*/queue.sqlite"))
    if not queues:
        return 0
    with closing(Queue(queues[0])) as queue:
        return sum(each.state == "done" for each in queue.attempts())


def at_work(root: Path) -> list[int]:
    """Processes of the jobs of an experiment's one run."""
    found: list[int] = []
    for path in root.glob("*/queue.sqlite"):
        with closing(Queue(path)) as queue:
            found += [each.process.pid for each in tagged(f"{queue.tag}/")]
    return found


def kill_at(
    process: subprocess.Popen[str],
    root: Path,
    jobs: int,
    wait_s: float,
    *,
    workers: bool,
    dispatcher: bool = True,
) -> None:
    """Kills the command, what it has started (else the next start takes that over), or both, once so many jobs have
    succeeded, one is at work, and a moment has gone by."""
    deadline = time.monotonic() + 1200
    while finished(root) < jobs or not at_work(root):
        assert process.poll() is None, f"it ended before it could be killed: {process.communicate()[0]}"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(wait_s)
    assert process.poll() is None
    if dispatcher:
        process.kill()
        process.communicate(timeout=60)
    for pid in at_work(root) if workers else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def two_by_two(models: tuple[str, str], output: Path) -> list[str]:
    return words(
        models,
        output,
        "algos=[QSharp,GRPO]",
        "algos.QSharp={epochs:4,samples_per_example:4,lr:1e-2}",  # so that it guides, and rounds differ
        "algos.GRPO={batch_size:8,lr:1e-3}",
        "datasets.more={task:arithmetic,settings:{digits:1,train:16,test:8,seed:1}}",
        "data_collection.shards=2",
        "--max-gpus=4",
        "--max-concurrent=4",
        *FAST,
    )


def made(root: Path) -> dict[str, Any]:
    """All that a run has made, its last table included, without places and what a clock says."""
    from safetensors.numpy import load_file

    from gpuherd.posttrain.eval.summary import json_values
    from gpuherd.posttrain.eval.tables import gather
    from gpuherd.posttrain.runs.render import result_lines

    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        rows = name.startswith("datasets/") and path.suffix == ".jsonl"
        if rows or path.name == "policy.json" or path.name.startswith("scores"):
            found[name] = path.read_bytes()
        elif name.startswith("models/") and path.suffix == ".safetensors":
            found[name] = {key: value.tobytes() for key, value in load_file(path).items()}
        elif path.name == "result.json":
            found[name] = unclocked(json.loads(path.read_text().replace(str(root), "")))
    gathered = gather(root / "results")
    untimed = tuple(replace(each, tokens_per_second=None, gpu_hours=None) for each in gathered.rows)
    found["table"] = result_lines(replace(gathered, rows=untimed), None)
    found["done.json"] = unclocked(json.loads((root / "done.json").read_bytes())["results"])
    assert found["done.json"] == unclocked(json.loads(json.dumps(json_values(gathered))))
    return found


def unclocked(values: Any) -> Any:
    """JSON values without seconds, and what is computed of them."""
    if isinstance(values, dict):
        clock = {"seconds", "tokens_per_second", "gpu_hours"}
        return {name: unclocked(value) for name, value in values.items() if name not in clock}
    return [unclocked(each) for each in values] if isinstance(values, list) else values


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_five_times_equals_undisturbed(adders: tuple[str, str], machine: Path, tmp_path: Path) -> None:
    """2 algorithms x 2 data sets x 2 rounds on four simulated GPUs: order right, no job twice, all results there."""
    told = ended(start(machine, *two_by_two(adders, tmp_path / "quiet")))
    (quiet,) = (tmp_path / "quiet" / "first").iterdir()
    assert "GPU Memory Summary:" in told and "QSharp" in told
    log = RoundsDirectory(quiet).run_log.read_text()
    for wanted in ("GPU Memory Summary:", "GPU utilization", "40.00 GB total"):
        assert wanted in log
    chance, command = random.Random(0), two_by_two(adders, tmp_path / "killed")
    # Five kills, over the whole of the run: so many of its 26 jobs are done, and do its workers die too?
    for jobs, workers in ((0, True), (4, False), (9, True), (14, True), (19, False)):
        process = start(machine, *command)
        kill_at(process, tmp_path / "killed" / "first", jobs, chance.uniform(0, 3), workers=workers)
    ended(start(machine, *command))
    (killed,) = (tmp_path / "killed" / "first").iterdir()
    one, other = made(quiet), made(killed)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
    assert sum(name.endswith("result.json") for name in one) == 2 * 2 * 2 + 2
    # Each classifier guides: how far depends on what a few hundred steps made of a base of some thousand weights.
    assert max(divergences(killed, "sums")) > 1e-4
    assert max(divergences(killed, "more")) > 1e-4
    in_order(killed)
    # Once more: nothing is left to do, and another start of the experiment is a new run.
    assert "is complete; nothing is left to do" in ended(start(machine, "posttrain", "--resume", str(killed)))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_run_in_shards_that_goes_on_in_others_equals_an_undivided_one(
    adders: tuple[str, str], machine: Path, tmp_path: Path
) -> None:
    """One run whose collections and evaluations are a job each; and one in three shards each, which is killed with its
    workers and goes on by the same command in two."""
    training = ["algos=[GRPO,QSharp]", "algos.GRPO={batch_size:8,lr:1e-3}", "rounds_of_training=1"]
    training += ["algos.QSharp={epochs:2,samples_per_example:4,lr:1e-2}", "evaluation.etas=[1]"]
    training += ["generation.batch_size=2", "--max-gpus=4", *FAST]  # a problem a batch

    def command(output: str, shards: int) -> list[str]:
        divided = [f"data_collection.shards={shards}", f"evaluation.shards={shards}"]
        return words(adders, tmp_path / output, *training, *divided)

    ended(start(machine, *command("whole", 1)))
    with Prefork(tmp_path) as prefork:
        process = start(machine, *command("shards", 3), python=prefork.python)
        kill_at(process, tmp_path / "shards" / "first", 2, 0, workers=True)
        ended(start(machine, *command("shards", 2), python=prefork.python))
    (whole,), (shards,) = ((tmp_path / name / "first").iterdir() for name in ("whole", "shards"))
    one, other = made(whole), made(shards)
    rows = [name for name in other if name.startswith("datasets/")]
    assert len(rows) > 1 and sum(name.endswith("result.json") for name in one) == 3
    assert {*one} - {*rows} == {*other} - {*rows}  # where rows are depends on the shards; what was learnt of them not
    assert [name for name in {*one} - {*rows} if one[name] != other[name]] == []
    in_order(shards)
    steps = [step for step in read_record(RoundsDirectory(shards)).steps() if not step.joins]
    assert {step.shards for step in steps if step.phase is not Phase.TRAIN} == {2, 3}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_trainings_on_two_gpus_killed_equal_undisturbed(adders: tuple[str, str], machine: Path, tmp_path: Path) -> None:
    """Two processes a training: none outlives a kill, and weights, scores and figures are the same to the bit."""

    def command(output: str) -> list[str]:
        grpo = "algos.GRPO={batch_size:8,lr:1e-3,epochs:4,save_every:2,gpus:2}"
        return words(adders, tmp_path / output, "algos=[GRPO]", grpo, "--max-gpus=4", *FAST)

    assert "started on GPU 0, 1" in ended(start(machine, *command("quiet")))
    for jobs, workers in ((0, True), (2, False)):
        kill_at(start(machine, *command("killed")), tmp_path / "killed" / "first", jobs, 1.0, workers=workers)
    ended(start(machine, *command("killed")))
    (quiet,), (killed,) = ((tmp_path / each / "first").iterdir() for each in ("quiet", "killed"))
    one, other = made(quiet), made(killed)
    assert one.keys() == other.keys() and any(name.endswith("result.json") for name in one)
    assert [name for name in one if one[name] != other[name]] == []
    in_order(killed)


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_ten_kills_at_random_instants_change_nothing(adders: tuple[str, str], tmp_path: Path) -> None:
    """3 algorithms x 2 data sets x 2 rounds on eight GPUs, two for each training, evaluations in eight shards, the
    dispatcher, its workers or both killed ten times, is to the bit the undisturbed run; that one's evaluations are not
    even divided, and a job each, and all its workers have begun by themselves."""
    machine = SimulatedMachine.create(tmp_path / "machine", "8x80GB", attribute=True).path

    def command(output: str, shards: int) -> list[str]:
        return words(
            adders,
            tmp_path / output,
            "algos=[QSharp,GRPO,SFT]",
            "algos.QSharp={epochs:4,batch_size:8,samples_per_example:4,lr:1e-2,gpus:2}",
            "algos.GRPO={batch_size:8,lr:1e-3,epochs:2,save_every:2,gpus:2}",
            "algos.SFT={batch_size:4,lr:1e-3,epochs:2,gpus:2}",
            "datasets.more={task:arithmetic,settings:{digits:1,train:16,test:8,seed:1}}",
            "generation.batch_size=2",  # a problem a batch, so that there are eight to divide
            "data_collection.shards=1",
            f"evaluation.shards={shards}",
            "evaluation.base=false",
            "evaluation.etas=[1]",
            "--max-gpus=8",
            "--max-concurrent=8",
            "--retries=9",  # a job may be killed again and again
            *FAST,
        )

    told = ended(start(machine, *command("quiet", 1)))
    assert "GRPO_sums_tiny_r0_train: started on GPU" in told
    (quiet,) = (tmp_path / "quiet" / "first").iterdir()
    jobs = 2 * 2 * 3 * 10 + 2 * 2 * 2  # trainings, shards and joins; what QSharp and SFT collect
    chance, killed = random.Random(0), tmp_path / "killed" / "first"
    instants = sorted(chance.sample(range(jobs - 20), 10))
    kinds = [(True, True)] * 4 + [(True, False)] * 3 + [(False, True)] * 3
    chance.shuffle(kinds)
    with Prefork(tmp_path) as prefork:

        def start_divided() -> subprocess.Popen[str]:
            return start(machine, *command("killed", 8), python=prefork.python)

        process = start_divided()
        for instant, (dispatcher, workers) in zip(instants, kinds, strict=True):
            kill_at(process, killed, instant, chance.random(), dispatcher=dispatcher, workers=workers)
            if dispatcher:
                process = start_divided()
        ended(process)
    (folder,) = killed.iterdir()
    one, other = made(quiet), made(folder)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
    assert sum(name.endswith("result.json") for name in one) == 3 * 2 * 2
    in_order(folder)
    with closing(Queue(folder / "queue.sqlite")) as queue:
        assert len(list(queue.attempts())) > jobs  # some had to be done again


def divergences(root: Path, dataset: str) -> list[float]:
    """KL of the guided policies to their base, of all rounds and etas."""
    results = [json.loads(path.read_bytes()) for path in root.glob(f"results/QSharp/tiny/{dataset}/*/result.json")]
    assert len(results) == 2
    return [point["metrics"]["kl"]["sequence"]["value"] for result in results for point in result["points"]]


def in_order(root: Path) -> None:
    """No job has succeeded twice, and none began before those that it needs had ended."""
    with closing(Queue(root / "queue.sqlite")) as queue:
        attempts = list(queue.attempts())
    done = [each for each in attempts if each.state == "done"]
    ends = {each.job: each.ended_at for each in done}
    assert len(ends) == len(done)
    steps = read_record(RoundsDirectory(root)).steps()
    assert sorted(ends) == sorted(step.name for step in steps)
    begins = {each.job: each.started_at for each in done}
    for step in steps:
        for need in step.needs:
            end = ends[need]
            assert end is not None and begins[step.name] >= end - 0.05


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_guides_tests_of_a_setup(machine: Path) -> None:
    told = ended(start(machine, "posttrain", "--test-setup", *FAST))
    for line in ("ok      GPU detection", "ok      parallel data generation", "ok      worker assignments"):
        assert line in told
