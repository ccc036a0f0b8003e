"""``--engine`` on every command that starts jobs, and ``engine:`` in their YAML files."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.remote.conftest import Cluster, cluster
from tests.patience import wait_until
from tests.posttrain import tiny
from tests.qa.conftest import made_once
from tests.qa.grading.conftest import capitals_run

from gpuherd.batch.options import RunOptions
from gpuherd.batch.run_remote import refuse_if_never
from gpuherd.cli.main import run
from gpuherd.engines.slurm.commands import Slurm
from gpuherd.errors import ExitCode, JobCannotFit, UsageError
from gpuherd.jobs.control.client import send
from gpuherd.jobs.control.messages import ControlKind, Request
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.settings import user_file

__all__ = ["cluster"]

STARTING = ("esd", "batch", "run", "up", "generate", "judge", "score", "posttrain", "train")
OF_OWN_QUEUES = ("submit", "status", "logs", "top", "cancel", "retry", "pause", "resume", "drain", "set", "down")


@pytest.mark.parametrize("command", STARTING)
def test_a_command_that_starts_jobs_takes_an_engine(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    group = told.partition(" engine: ")[2]
    assert group.startswith("--engine local|slurm|ray|gridengine what runs the jobs"), told
    # What goes for any cluster first, then SLURM's own, then Ray's, then Grid Engine's.
    places = [
        group.index(flag) for flag in ("--time-limit", "--node-gpus", "--partition", "--ray-address", "--sge-queue")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("command", OF_OWN_QUEUES)
def test_a_command_about_the_own_queue_takes_its_engine(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([command, "--help"])
    assert "--engine local|slurm|ray" in capsys.readouterr().out


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "commands.txt"
    asks = ("gpus=2 cpus=4 name=first", "nodes=2", "gpus=9 name=large")
    path.write_text("".join(f"#gpuherd {words}\ntrue\n" for words in asks))
    return path


def test_simulated_gpus_are_none_of_a_clusters(
    commands: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--simulate", "2x40GB", "batch", str(commands)]
    with pytest.raises(UsageError, match="--simulate simulates GPUs of this machine, and --engine slurm would submit"):
        run([*words, "--engine=slurm", "--json"])
    assert json.loads(capsys.readouterr().out)["exit_code"] == ExitCode.USAGE
    user_file().parent.mkdir(parents=True)
    user_file().write_text("[defaults]\nengine = 'slurm'\npartition = 'gpu'\n")
    assert run([*words, "--dry-run"]) == ExitCode.FAILED  # whatever the settings say, they are looked for here
    assert "asks for 9 GPUs; there are 2 to use" in capsys.readouterr().out
    assert cluster.engines == []


def test_a_dry_run_tells_what_a_cluster_would_be_asked_for(
    commands: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = ["batch", str(commands), "--engine=slurm", "--dry-run", "--host-mem=2GB", "--time-limit=1h"]
    assert run(words) == ExitCode.FAILED
    told = capsys.readouterr().out
    assert "asks slurm for" in told and "2 GPUs, 4 cores, 2 GB, 60 min" in told
    assert "1 GPU, 2 GB, 60 min on each of 2 nodes" in told
    assert "refused  large asks for 9 GPUs on a node; the largest has 4" in told
    assert run([*words, "--json"]) == ExitCode.FAILED
    plan = json.loads(capsys.readouterr().out)
    assert plan["engine"] == "slurm"
    assert [(job["nodes"], job["cpus"], job["state"]) for job in plan["jobs"]] == [
        (1, 4, "to do"),
        (2, None, "to do"),
        (1, None, "refused"),
    ]
    assert cluster.orders.batches() == []


def test_a_job_file_may_name_the_engine(commands: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Less than a flag, more than the settings; simulated GPUs are this machine's."""
    user_file().parent.mkdir(parents=True)
    user_file().write_text("[defaults]\nengine = 'ray'\nhost-mem = '2GB'\n")
    (commands.parent / "jobs.yaml").write_text("engine: {name: slurm, cpus-per-job: 3}\njobs: ['true']\n")
    for more, told in (
        ([], ("slurm", "1 GPU, 3 cores, 2 GB")),
        (["--cpus-per-job=4"], ("slurm", "1 GPU, 4 cores, 2 GB")),
        (["--gpus-per-job=0"], ("slurm", "no GPU, 3 cores, 2 GB")),
        (["--engine=ray"], ("ray", "1 GPU, 2 GB")),
        (["--engine=local"], ("local", None)),
    ):
        assert run(["batch", "jobs.yaml", "--dry-run", "--json", *more]) == ExitCode.OK, more
        plan = json.loads(capsys.readouterr().out)
        assert (plan["engine"], plan["jobs"][0]["asks"]) == told, more
    assert run(["--simulate", "2x40GB", "batch", "jobs.yaml", "--dry-run", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["engine"] == "local"
    assert run(["batch", "jobs.yaml"]) == ExitCode.OK
    assert [batch["cpus"] for batch in cluster.orders.batches()] == [3]


def test_the_same_file_runs_there(commands: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    commands.write_text("#gpuherd gpus=2 cpus=4\ntrue\n#gpuherd host-mem=2GB\nfalse\n")
    assert run(["batch", str(commands), "--engine=ray", "--json", "--retries=0"]) == ExitCode.FAILED
    assert json.loads(capsys.readouterr().out)["counts"] == {"done": 1, "failed": 1, "waiting": 0, "cancelled": 0}
    asked = [(batch["gpus"], batch["cpus"], batch["memory_mb"]) for batch in cluster.orders.batches()]
    assert sorted(asked, key=str) == [(1, None, 2048), (2, 4, None)]


def test_a_dry_run_of_run(commands: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--engine=ray", "--num-gpus=2", "--dry-run", "--", "true"]) == ExitCode.OK
    assert capsys.readouterr().out == "would ask ray for 2 GPUs\n"
    assert run(["run", "--engine=slurm", "--cpus=2", "--dry-run", "--json", "--", "a b"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told["asks"]["cpus"] == 2 and told["becomes"][0] == "srun" and told["becomes"][-1] == "a b"
    with pytest.raises(JobCannotFit, match="the command can never run there: asks for 9 GPUs"):
        refuse_if_never(RunOptions(engine="slurm", num_gpus=9))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "tiny-policy", tiny.tiny_llama)


@pytest.fixture
def training(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A training's configuration that names an engine."""
    monkeypatch.chdir(tmp_path)
    config = {
        "training": {"algorithm": "grpo", "num_rollouts_per_iteration": 8, "batch_size": 8},
        "model": {"model_name_or_path": str(model), "max_new_tokens": 4, "torch_dtype": "float32"},
        "policy_env": {
            "env_type": "math",
            "problems": [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(12)],
        },
        "engine": {"name": "slurm", "cpus-per-job": 3, "node-gpus": "4x40GB"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def test_a_trainings_file_may_name_the_engine(
    training: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Less than a flag, more than the settings; and words over the file count."""
    user_file().parent.mkdir(parents=True)
    user_file().write_text("[defaults]\nengine = 'ray'\nhost-mem = '2GB'\n")
    words = ["train", "--config", str(training), "--dry-run"]
    for more, told in (
        ([], "asks slurm for 1 GPU, 3 cores, 2 GB"),
        (["engine.cpus-per-job=2"], "asks slurm for 1 GPU, 2 cores, 2 GB"),
        (["--cpus-per-job=4"], "asks slurm for 1 GPU, 4 cores, 2 GB"),
        (["--engine=ray", "--node-gpus=4x40GB"], "asks ray for 1 GPU, 2 GB"),
        (["engine=ray", "--node-gpus=4x40GB"], "asks ray for 1 GPU, 2 GB"),
    ):
        assert run([*words, *more]) == ExitCode.OK, more
        assert told in capsys.readouterr().out, more
    with pytest.raises(UsageError, match=r"engine\.partitoin is no option of an engine; did you mean partition"):
        run([*words, "engine.partitoin=x"])
    assert run([*words, "--engine=local", "--device=cpu"]) == ExitCode.OK
    assert "asks" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_training_that_was_cancelled_has_not_failed(
    training: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.orders.hold()

    def cancel() -> None:
        wait_until(lambda: bool(cluster.orders.handles()))
        send(RunDirectory(training.parent / "out"), Request(ControlKind.CANCEL, jobs=("train",)))

    somebody = threading.Thread(target=cancel)
    somebody.start()
    assert run(["train", "--config", str(training), "--output", "out"]) == ExitCode.FAILED
    somebody.join()
    told = " ".join(capsys.readouterr().out.split())
    assert "cancelled by" in told and "failed" not in told
    assert "cancelled: gpuherd train --resume --output" in told and "out --engine slurm goes on from there" in told


def experiment(tmp_path: Path, model: Path) -> list[str]:
    return [
        "posttrain", "experiment.name=first", f"output_dir={tmp_path / 'out'}", "models=[]", "datasets=[]",
        f"models.tiny.reference={model}", "datasets.sums={task:arithmetic,settings:{digits:1,train:8,test:4}}",
        "algos=[GRPO]", "system.dtype=fp32", "evaluation.num_samples=2",
        "generation={max_new_tokens:4,temperature:1,top_p:1,batch_size:8}",
    ]  # fmt: skip


def test_an_experiments_file_may_name_the_engine(
    tmp_path: Path, model: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("engine: {name: slurm, node-gpus: 4x40GB, time-limit: 2h}\n")
    words = [*experiment(tmp_path, model), "--dry-run"]
    assert run([*words, "--config", str(mine)]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "engine: slurm; the jobs would ask for" in told and "1 GPU, 120 min" in told
    assert run([*words, "engine={name:ray,node-gpus:4x40GB}"]) == ExitCode.OK
    assert "engine: ray" in capsys.readouterr().out
    assert run([*words, "--config", str(mine), "--json"]) == ExitCode.OK
    plan = json.loads(capsys.readouterr().out)
    assert plan["engine"] == "slurm" and {job["asks"] for job in plan["jobs"]} == {"1 GPU, 120 min"}
    assert run([*words, "--config", str(mine), "--engine=local"]) == ExitCode.OK
    assert "engine:" not in capsys.readouterr().out


def test_dry_runs_as_json_name_the_engine_and_what_it_is_asked(
    tmp_path: Path, model: Path, training: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "sums.jsonl"
    questions.write_text("".join(f'{{"question": "{n}+1=", "answers": ["{n + 1}"]}}\n' for n in range(4)))
    capitals_run(tmp_path / "runs" / "capitals")
    on_it = ["--engine=slurm", "--time-limit=1h", "--dry-run", "--json"]

    def told(*words: str) -> dict[str, Any]:
        assert run([*words, *on_it]) == ExitCode.OK
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (found["plan"] if words[0] == "train" else found)["engine"] == "slurm"
        return found

    asks = "1 GPU, 60 min"
    esd = ["esd", "--single-model", str(model), f"--output-dir={tmp_path / 'esd'}"]
    assert [each["asks"] for each in told(*esd)["plan"]] == [asks]
    assert [each["asks"] for each in told(*esd, "--gpus-per-job=0")["plan"]] == ["no GPU, 60 min"]
    assert told(*esd)["never"] == []
    gpus = "--node-gpus=4x40GB"
    assert told("generate", f"--model={model}", f"--dataset={questions}", gpus)["engine_asks"] == asks
    assert told("judge", "capitals", str(model), gpus)["engine_asks"] == asks
    assert told("train", f"--config={training}", gpus)["plan"]["asks"] == "1 GPU, 3 cores, 60 min"
    assert cluster.orders.batches() == []
    assert run([*esd, "--dry-run", "--json"]) == ExitCode.OK
    here = json.loads(capsys.readouterr().out)
    assert here["engine"] == "local" and here["plan"][0]["asks"] is None
    with pytest.raises(UsageError, match="--device-map cuda needs a GPU, and --gpus-per-job 0 gives none"):
        run([*esd, "--gpus-per-job=0", "--device-map=cuda"])


def test_a_dry_run_ends_with_1_where_a_job_can_never_be_had(
    tmp_path: Path, model: Path, training: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "sums.jsonl"
    questions.write_text('{"question": "1+1=", "answers": ["2"]}\n')
    capitals_run(tmp_path / "runs" / "capitals")
    cluster.settings = {"gpus": 0}
    there, gpus = ["--engine=slurm", "--dry-run"], "--node-gpus=4x40GB"
    reason = "never: asks for 1 GPUs on a node; the largest has 0"
    for words in (
        ["esd", "--single-model", str(model), f"--output-dir={tmp_path / 'esd'}"],
        ["generate", f"--model={model}", f"--dataset={questions}", gpus],
        ["judge", "capitals", str(model), gpus],
        ["train", f"--config={training}", gpus],
        [*experiment(tmp_path, model), gpus],
        ["run"],
    ):
        command = ["--", "true"] if words == ["run"] else []
        assert run([*words, *there, *command]) == ExitCode.FAILED, words
        assert reason in capsys.readouterr().out, words
        assert run([*words, *there, "--json", *command]) == ExitCode.FAILED, words
        told = json.loads(capsys.readouterr().out)
        never = told["plan"]["never"] if words[0] == "train" else told["never"]
        assert never in (reason[7:], [reason[7:]]), words
    assert cluster.orders.batches() == []


def test_so_does_one_on_this_machine(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--simulate", "2x40GB"]
    esd = [*here, "esd", "--single-model", str(model), f"--output-dir={tmp_path / 'esd'}", "--dry-run"]
    assert run([*esd, "--gpus-per-job=2"]) == ExitCode.OK
    assert run([*esd, "--gpus-per-job=3"]) == ExitCode.FAILED
    assert "never: asks for 3 GPUs; there are 2 to use" in capsys.readouterr().out
    words = [*here, "run", "--num-gpus=3", "--dry-run"]
    assert run([*words, "--", "true"]) == ExitCode.FAILED
    assert capsys.readouterr().out == "never: the command asks for 3 GPUs; there are 2 to use\n"
    assert run([*words, "--json", "--", "true"]) == ExitCode.FAILED
    told = json.loads(capsys.readouterr().out)
    assert told["never"] and told["engine"] == "local" and told["gpus"] == []


@pytest.mark.parametrize(
    "words",
    [
        ["esd", "--single-model=m"],
        ["generate", "--model=m", "--dataset=trivia_qa"],
        ["judge", "run", "m"],
        ["score", "run"],
        ["posttrain"],
        ["train", "--config=config.yaml"],
    ],
)
def test_processes_that_srun_starts_are_refused_where_a_job_starts_its_own(
    words: list[str], training: Path, cluster: Cluster
) -> None:
    for option in ("--ntasks-per-node=2", "--mpi=pmix"):
        with pytest.raises(UsageError, match=rf"{option[:5]}.* is for programs whose processes srun starts"):
            run([*words, "--engine=slurm", option])
    assert cluster.engines == []


@pytest.mark.parametrize("words", [["batch", "commands.txt", "--dry-run"], ["run", "--dry-run", "--", "true"], ["up"]])
def test_gpus_of_a_node_that_make_no_sense_are_refused_also_where_no_model_is_planned(
    words: list[str], commands: Path, cluster: Cluster
) -> None:
    with pytest.raises(UsageError, match="--node-gpus"):
        run([words[0], "--engine=slurm", "--node-gpus=nonsense", *words[1:]])
    assert cluster.engines == []
    with pytest.raises(UsageError, match="--node-gpus"):
        run(["submit", "--engine=slurm", "--node-gpus=nonsense", "--dry-run", "--", "true"])


IN_JOB = """\
JobId=105 JobName=mine
   JobState=RUNNING Reason=None Dependency=(null)
   RunTime=00:10:00 TimeLimit=01:00:00 TimeMin=N/A
   Partition=main AllocNode:Sid=login:6829
     Nodes=n1 CPU_IDs=0-3 Mem=8000 GRES=gpu:a100:2(IDX:0-1)
"""


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the only node of a SLURM job."""
    monkeypatch.setattr(Slurm, "job", lambda _, number: IN_JOB.replace("105", number))
    monkeypatch.setenv("SLURM_JOB_ID", "105")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("in_job")
def test_inside_an_allocation_jobs_run_in_it_where_that_is_wanted(
    commands: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of its own could wait there for ever: all that it asks for may be in this allocation's hands."""
    commands.write_text("#gpuherd gpus=0\ntrue\n")
    words = ["batch", str(commands), "--engine=slurm", "--json"]
    asks = ["--partition=gpu", "--account=lab", "--time-limit=1h", "--cpus-per-job=2", "--host-mem=2GB"]
    assert run([*words, *asks, "--in-allocation", "--output-dir=here"]) == ExitCode.OK
    assert "gpuherd: the jobs run in SLURM job 105, on n1\n" in capsys.readouterr().err
    assert cluster.engines == []
    with pytest.raises(UsageError, match=r"--in-allocation: too few of its nodes .* 4 CPUs and 8000 MB; leave"):
        run([*words, "--cpus-per-job=5", "--in-allocation", "--output-dir=there"])


@pytest.mark.usefixtures("in_job")
def test_inside_an_allocation_jobs_run_in_it_by_themselves_where_all_fit(
    commands: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.write_text("#gpuherd gpus=0 cpus=2\ntrue\n#gpuherd gpus=0 name=second\ntrue\n")
    words = ["batch", str(commands), "--engine=slurm", "--json"]

    def told(*more: str) -> tuple[str, str]:
        assert run([*words, *more]) == ExitCode.OK
        shown = capsys.readouterr()
        lines = [line for line in shown.err.splitlines() if line.startswith("gpuherd: ") and "SLURM job" in line]
        return shown.out, "\n".join(lines)

    inside = "gpuherd: the jobs run in SLURM job 105, on n1 (--no-in-allocation submits them)"
    submitted = "gpuherd: inside of SLURM job 105: new jobs are submitted, and wait in SLURM's queue: "
    assert json.loads(told("--dry-run", "--output-dir=here")[0])["engine"] == "local"
    assert told("--output-dir=here", "--time-limit=20m", "--cpus-per-job=4", "--host-mem=8000MB")[1] == inside
    assert cluster.engines == []
    for more, reason in (
        (["--cpus-per-job=5"], "too few of its nodes have all that is asked for; n1 gives it 0 GPUs, 4 CPUs and "),
        (["--gpus-per-job=1", "--partition=other"], "--partition other is not the job's"),
        (["--time-limit=51m"], "51 minutes are asked for, and 50 are left"),
        (["--time-limit=30m", "--cpus-per-job=4"], None),
        (["--time-limit=40m", "--host-mem=8000MB"], "all jobs together ask for 80 minutes of all that it has, and 50"),
        (["--setup", "true"], "--setup is for SLURM jobs of their own"),
    ):
        line = told(*more, f"--output-dir=there-{len(more)}-{reason is None}", "--dry-run")[1]
        assert line == inside if reason is None else line.startswith(submitted + reason), line
    assert told("--no-in-allocation", "--output-dir=there")[1] == ""
    assert len(cluster.orders.batches()) == 2
    # What was begun with jobs of their own goes on so.
    commands.write_text("#gpuherd gpus=0\nexit 0\n")
    assert "there were submitted before (--in-allocation " in told("--output-dir=there", "--shell")[1]
    assert len(cluster.orders.batches()) == 3


@pytest.mark.usefixtures("in_job")
def test_so_do_those_of_the_other_commands(
    tmp_path: Path, model: Path, training: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "sums.jsonl"
    questions.write_text('{"question": "1+1=", "answers": ["2"]}\n')
    capitals_run(tmp_path / "runs" / "capitals")
    on_the_cpu = ["--device-map=cpu", "--engine=slurm"]
    for words in (
        ["esd", "--single-model", str(model), f"--output-dir={tmp_path / 'esd'}", "--gpus-per-job=0", on_the_cpu[1]],
        ["generate", f"--model={model}", f"--dataset={questions}", *on_the_cpu],
        ["judge", "capitals", str(model), *on_the_cpu],
        ["train", f"--config={training}", "--device=cpu"],
    ):
        assert run([*words, "--dry-run", "--json"]) == ExitCode.OK, words
        shown = capsys.readouterr()
        told = json.loads(shown.out)
        assert (told["plan"] if words[0] == "train" else told)["engine"] == "local", words
        assert shown.err.count("the jobs run in SLURM job 105, on n1 (--no-in-allocation submits them)") == 1
        assert run([*words, "--dry-run", "--json", "--no-in-allocation"]) == ExitCode.OK, words
        shown = capsys.readouterr()
        told = json.loads(shown.out)
        assert (told["plan"] if words[0] == "train" else told)["engine"] == "slurm", words
        assert "SLURM job 105" not in shown.err


@pytest.mark.usefixtures("in_job")
def test_the_own_queue_says_why_its_jobs_are_submitted(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuherd.batch.daemon.up", lambda *_: 17)
    assert run(["up", "--engine=slurm"]) == ExitCode.OK
    told = capsys.readouterr().err
    assert told.startswith("gpuherd: inside of SLURM job 105: jobs are submitted") and "up --engine local" in told
    assert run(["up", "--engine=slurm", "--no-in-allocation"]) == ExitCode.OK
    assert capsys.readouterr().err == ""
    with pytest.raises(UsageError, match=r"--in-allocation: what will be added .*: gpuherd up --engine local"):
        run(["up", "--engine=slurm", "--in-allocation"])


@pytest.mark.usefixtures("in_job")
@pytest.mark.parametrize("command", [each for each in STARTING if each not in ("run", "up")])
def test_what_would_not_be_followed_inside_an_allocation_is_refused(command: str, cluster: Cluster) -> None:
    named = {
        "batch": ["commands.txt"],
        "generate": ["--model=m", "--dataset=trivia_qa"],
        "judge": ["run", "squad"],
        "score": ["run"],
    }
    words = [command, *named.get(command, []), "--in-allocation"]
    with pytest.raises(UsageError, match="--in-allocation: --setup is for SLURM jobs of their own; leave"):
        run([*words, "--engine=slurm", "--setup", "module load cuda"])
    with pytest.raises(UsageError, match="--in-allocation is for --engine slurm, and this is local"):
        run([*words, "--engine=local"])
    assert cluster.engines == []


@pytest.mark.usefixtures("in_job")
def test_where_no_job_can_run_in_an_allocation_it_says_what_to_do(
    commands: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["batch", str(commands), "--engine=slurm", "--in-allocation"]
    monkeypatch.setattr(Slurm, "job", lambda *_: IN_JOB.replace("Nodes=n1", "Nodes=n[1-2]"))
    with pytest.raises(UsageError, match=r"has 2 nodes, .*--engine local on each .*; leave --in-allocation out to sub"):
        run(words)
    monkeypatch.setattr(Slurm, "job", lambda *_: IN_JOB.replace("RUNNING", "COMPLETED"))
    with pytest.raises(UsageError, match=r"SLURM job 105, .*does not run any more; leave --in-allocation out"):
        run(words)
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(UsageError, match=r"--in-allocation: this is not typed in a SLURM job .*salloc starts one"):
        run(words)
    assert cluster.engines == []
