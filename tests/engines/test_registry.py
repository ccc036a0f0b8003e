"""Engines register themselves: what is found, from where, and that nothing outside of an engine's folder names it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import gpuherd
from gpuherd.engines.options import ENGINES, EngineOptions
from gpuherd.engines.registry import LOCAL, ClusterOptions, EngineSpec, LocalOptions, find, names, specs, title
from gpuherd.engines.world import NodeSide, RankStarter, node_side
from gpuherd.errors import UsageError

PACKAGE = Path(gpuherd.__file__).parent
CLUSTERS = [spec for spec in specs() if spec.name != LOCAL]

# An engine of another distribution, in full but for the connection.
_OUTSIDE = {
    "lab_engine/__init__.py": "",
    "lab_engine/spec.py": """
from dataclasses import dataclass
from gpuherd.engines.registry import ClusterOptions, EngineSpec
from gpuherd.options import option

@dataclass(frozen=True, kw_only=True)
class LabOptions(ClusterOptions):
    lab_queue: str | None = option(None, help="queue of the lab", metavar="NAME", group="engine")

class _Lab(EngineSpec):
    name, title, about, options = "lab", "Lab", "the lab's cluster", LabOptions
    examples = {"batch": "  gpuherd batch commands.txt --engine lab --lab-queue long\\n"}
    variables = ("LAB_",)

    def connect(self, options, lead, join):
        raise NotImplementedError

ENGINE = _Lab()
""",
    "lab_engine/node.py": """
from gpuherd.engines.world import NodeSide

class _Node(NodeSide):
    own_environment_wins = True

NODE = _Node()
""",
    "lab_engine-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: lab-engine\nVersion: 1\n",
    "lab_engine-1.dist-info/entry_points.txt": "[gpuherd.engines]\nlab = lab_engine.spec:ENGINE\n",
}


def python(program: str, *words: str, path: Path | None = None) -> str:
    environment = dict(os.environ) | ({} if path is None else {"PYTHONPATH": str(path)})
    done = subprocess.run([sys.executable, "-c", program, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    for name, text in _OUTSIDE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_this_machine_is_the_first_of_them() -> None:
    assert names() == ENGINES and names()[:3] == ("local", "slurm", "ray")
    assert [spec.name for spec in specs()] == list(names())
    assert title("slurm") == "SLURM" and title("pbs") is None
    with pytest.raises(UsageError, match="engine='pbs'; possible: local, slurm, ray"):
        find("pbs")


@pytest.mark.parametrize("spec", specs(), ids=names())
def test_an_engines_options_are_part_of_all(spec: EngineSpec) -> None:
    assert issubclass(EngineOptions, spec.options)
    options = EngineOptions(engine=spec.name)
    assert options.spec is spec and options.of(spec.options) is options
    known = {each.name: each for each in fields(EngineOptions)}
    for name, declared in spec.fields.items():
        assert declared.default == known[name].default
        assert name == "engine" or declared.metadata["option"].group == "engine", name
    assert spec.exporter is None or spec.exporter.ignores - spec.fields.keys() <= {"at_most"}
    assert set(spec.doctor_options) <= spec.fields.keys()
    assert issubclass(spec.options, ClusterOptions) == (spec.name != LOCAL)
    with pytest.raises(TypeError, match="LocalOptions has no"):
        LocalOptions().of(ClusterOptions)


@pytest.mark.parametrize("spec", CLUSTERS, ids=names()[1:])
def test_an_engine_is_named_by_nothing_outside_of_its_folder(spec: EngineSpec) -> None:
    own = Path(sys.modules[type(spec).__module__].__file__ or "").parent
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if own in path.parents or not (f'"{spec.name}"' in text or f"engines.{spec.name}" in text):
            continue
        for node in ast.walk(ast.parse(text)):
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            found = {each.value for each in compared if isinstance(each, ast.Constant)}
            assert spec.name not in found, f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom) and path != PACKAGE / "engines" / "options.py":
                module = getattr(node, "module", None) or " ".join(each.name for each in getattr(node, "names", ()))
                assert f"engines.{spec.name}" not in module, f"{path}:{node.lineno}"


def test_finding_them_is_light() -> None:
    program = (
        "import sys, gpuherd.engines.options\n"
        "heavy = ['importlib.metadata', 'subprocess', 'sqlite3', 'psutil', 'ray', 'socket']\n"
        "print([name for name in sys.modules if name in heavy or name.endswith(('.engine', '.process', '.commands'))])"
    )
    assert python(program).strip() == "[]"


def test_the_dispatcher_imports_no_ray() -> None:
    """Ray sets signal handlers, takes a second to import, and may not be installed: a process next to it has it."""
    program = "import sys, gpuherd.engines.ray.engine, gpuherd.engines.ray.cluster; print('ray' in sys.modules)"
    assert python(program).strip() == "False"


def test_a_node_loads_the_module_for_nodes_alone() -> None:
    program = (
        "import sys\nfrom gpuherd.engines.world import node_side\n"
        "print(node_side('slurm').starts_ranks, node_side('ray').starts_ranks, node_side('pbs').starts_ranks)\n"
    )
    assert python(program).split() == ["True", "False", "False"]
    loaded = "import sys, gpuherd.engines.world as w; w.node_side('slurm'); print('gpuherd.options' in sys.modules)"
    assert python(loaded).strip() == "False"
    assert type(node_side("local")) is NodeSide


def test_an_engine_of_another_distribution_takes_part(outside: Path, tmp_path: Path) -> None:
    program = (
        "from gpuherd.engines.options import ENGINES, read_block\n"
        "from gpuherd.engines.world import node_side\n"
        "from gpuherd.jobs.options import DispatchOptions\n"
        "from gpuherd.jobs.remote.protocol import portable\n"
        "from gpuherd.jobs.dispatcher_state import engine_name\n"
        "print(ENGINES[-1], engine_name('lab'), node_side('lab').own_environment_wins)\n"
        "print(DispatchOptions(engine='lab', lab_queue='long', cpus_per_job=2).lab_queue)\n"
        "print(read_block({'name': 'lab', 'lab-queue': 'short'})['lab_queue'], portable({'LAB_JOB': '1', 'A': '2'}))\n"
    )
    assert python(program, path=outside).splitlines() == ["lab Lab True", "long", "short {'A': '2'}"]
    shown = python("import sys\nfrom gpuherd.cli.main import main\nmain()", "batch", "--help", path=outside)
    assert "--engine local|slurm|ray" in shown and "|lab" in shown and "--lab-queue NAME" in shown
    assert "--engine lab --lab-queue long" in shown and "or the lab's cluster" in " ".join(shown.split())


def test_an_engine_without_a_connection_is_refused_when_it_is_loaded(outside: Path) -> None:
    spec = outside / "lab_engine/spec.py"
    spec.write_text(spec.read_text().replace("def connect", "def other"))
    program = "try:\n    import gpuherd.engines.options\nexcept TypeError as problem:\n    print(problem)"
    assert "abstract class _Lab" in python(program, path=outside)


@pytest.mark.parametrize("missing", ["start_ranks", "rank"])
def test_a_node_side_that_starts_ranks_has_all_of_it(missing: str) -> None:
    side = type("_Side", (RankStarter,), {name: None for name in ("start_ranks", "rank") if name != missing})
    with pytest.raises(TypeError, match=f"abstract class _Side.*{missing}"):
        side()


def test_two_engines_agree_on_an_option_of_both(outside: Path) -> None:
    text = (outside / "lab_engine/spec.py").read_text()
    (outside / "lab_engine/spec.py").write_text(
        text.replace("lab_queue: str | None = option(None", "setup: str = option('x'")
    )
    program = "try:\n    import gpuherd.engines.options\nexcept TypeError as problem:\n    print(problem)"
    assert "engine lab: option setup has another default in another engine" in python(program, path=outside)
