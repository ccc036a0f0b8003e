"""What a node is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.jobs.remote.orders import order, shell, written

from gpuherd.errors import UsageError
from gpuherd.jobs.job import Job
from gpuherd.jobs.remote.protocol import Manifest, Order, order_of, portable, to_json

_WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=12)
_ENVIRONMENTS = st.dictionaries(_WORDS, _WORDS, max_size=3)
_LIMITS = st.none() | st.floats(0.001, 1e9)
JOBS = st.builds(
    Job,
    name=st.just("j"),
    argv=st.lists(_WORDS, min_size=1, max_size=3).map(tuple),
    env=_ENVIRONMENTS,
    cwd=st.none() | _WORDS,
    result=st.none() | _WORDS,
    nodes=st.integers(1, 9),
    timeout_s=_LIMITS,
)
ORDERS = st.builds(
    Order,
    attempt=st.integers(1, 10**9),
    tag=_WORDS,
    job=JOBS,
    log=_WORDS,
    progress=_WORDS,
    claim=_WORDS,
    ended=_WORDS,
    gpus=st.none() | st.integers(0, 8),
    threads=st.none() | st.integers(1, 99),
)


@given(
    st.builds(
        Manifest, batch=_WORDS, engine=_WORDS, environment=_ENVIRONMENTS, orders=st.lists(ORDERS, min_size=1).map(tuple)
    )
)
def test_as_it_was_told(tmp_path_factory: pytest.TempPathFactory, manifest: Manifest) -> None:
    """Also words that are no UTF-8, which Linux allows in names and environments."""
    path = tmp_path_factory.mktemp("manifest") / "b.json"
    path.write_text(to_json(manifest))
    for index, told in enumerate(manifest.orders):
        assert order_of(path, index) == (replace(manifest, orders=(told,)), told)


@pytest.mark.parametrize(
    "text", ["", "{", "[]\n[]", "{}\n{}", '{"batch": 1}\n{"argv": ["a"]}', '{"batch": "b"}\n1', "[" * 100_000]
)
def test_what_is_no_manifest(tmp_path: Path, text: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="is no manifest of a batch"):
        order_of(path, 0)


def test_order_of(tmp_path: Path) -> None:
    orders = (shell(tmp_path, "a"), shell(tmp_path, "b", 2))
    path = Path(written(tmp_path, *orders))
    assert order_of(path, 1)[1] == orders[1]
    with pytest.raises(UsageError, match="holds 2 orders, and none with the index 2"):
        order_of(path, 2)


def test_an_order_that_can_not_be_read_keeps_no_other_from_beginning(tmp_path: Path) -> None:
    """A leader looks at its own alone."""
    path = Path(written(tmp_path, shell(tmp_path, "a"), shell(tmp_path, "b", 2)))
    head, _, second = path.read_text().splitlines()
    path.write_text(f"{head}\n{{nonsense\n{second}\n")
    assert order_of(path, 1)[1].attempt == 2
    with pytest.raises(UsageError, match="is no manifest of a batch"):
        order_of(path, 0)


def test_files_of_one_attempt(tmp_path: Path) -> None:
    """No two of an attempt's files have one name, nor have those of another node of it."""
    job = order(tmp_path, ("a",), result="r")
    nodes = [job, job.on_node(1), job.on_node(2)]
    names = [name for each in nodes for name in (each.log, each.progress, each.ended, each.tag)]
    names += [str(path) for each in nodes for path in (each.status, each.first_failure)]
    assert len(set(names)) == len(names)
    assert {str(Path(name).parent) for name in names if name not in {each.tag for each in nodes}} == {str(tmp_path)}
    assert [each.job.result for each in nodes] == ["r", None, None]  # the first node makes it


def test_portable() -> None:
    """What belongs to a machine or to an engine stays there; secrets and paths go with the job."""
    here = {"HF_TOKEN": "s", "PATH": "/bin", "SLURM_JOB_ID": "1", "RAY_ADDRESS": "a", "CUDA_VISIBLE_DEVICES": "0"}
    assert portable({**here, "TMPDIR": "/t", "GPUHERD_ATTEMPT": "q/1", "GPUHERD_CONFIG": "c"}) == {
        "HF_TOKEN": "s",
        "PATH": "/bin",
        "GPUHERD_CONFIG": "c",
    }


def test_an_order_of_an_earlier_version_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text('{"batch":"b","engine":"slurm","environment":{}}\n{"attempt":1,"argv":["true"]}\n')
    with pytest.raises(UsageError, match="an earlier version of gpuherd wrote it; cancel the jobs"):
        order_of(path, 0)
