"""docs/plan.md shows what ``gpuherd plan`` prints. Where figures have changed: ``python -m tests.cli.plan_page``."""

from __future__ import annotations

import re

import pytest
from tests.cli.plan_page import PAGE, output, shown

from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import parse_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import MemoryPlan, weights_bytes

TEXT = PAGE.read_text(encoding="utf-8")
_ROW = re.compile(r"^\| (\S+) \| (\S+) \| \d* ?\| ([\d.]+) \| (\S+): (.+) \|$", re.MULTILINE)


@pytest.mark.parametrize(("words", "text"), shown(TEXT), ids=[words for words, _ in shown(TEXT)])
def test_what_is_shown_is_what_is_printed(words: str, text: str) -> None:
    assert output(words) == text


def test_the_guides_table_is_right() -> None:
    rows = _ROW.findall(TEXT)
    assert len(rows) == 8
    for model, dtype, gigabytes, gpus, verdict in rows:
        architecture, precision = read_architecture(model), Precision(dtype)
        assert f"{weights_bytes(architecture, precision) / 1e9:.2f}" == gigabytes, (model, dtype)
        plan = make_plan(architecture, parse_gpus(gpus), precision, Workload(8, 512, 64))
        assert isinstance(plan, MemoryPlan)
        replicas = f", {plan.replicas} replicas" if plan.replicas > 1 else ""
        assert verdict == f"fits, {plan.gpus} GPU{'s' if plan.gpus > 1 else ''}{replicas}", (model, dtype)


def test_the_options_are_all_there() -> None:
    from gpuherd.models.place.request import PlanOptions
    from gpuherd.options import option_fields, spellings

    flags = {spellings(declared.name, spec)[0][0] for declared, spec in option_fields(PlanOptions)}
    assert not {flag for flag in flags if f"`{flag}" not in TEXT}


def test_the_python_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    block = TEXT[TEXT.index("## From Python") :].partition("```python\n")[2].partition("```")[0]
    exec(compile(block, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.split()[0] == "4"
