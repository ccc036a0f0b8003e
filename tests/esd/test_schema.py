"""Columns from buffers are those that pyarrow makes itself, and no worker pays for pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.esd.schema import column, lists

TYPES = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "str": pa.string()}
NUMBERS = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
COLUMNS = st.one_of(
    st.tuples(st.just("int"), st.lists(st.none() | NUMBERS)),
    st.tuples(st.just("float"), st.lists(st.none() | st.floats(allow_nan=False))),
    st.tuples(st.just("bool"), st.lists(st.none() | st.booleans())),
    st.tuples(st.just("str"), st.lists(st.none() | TEXT)),
)


@given(COLUMNS)
def test_a_column_is_pyarrows(found: tuple[str, list[Any]]) -> None:
    kind, values = found
    made = column(kind, values)
    made.validate(full=True)
    assert made.equals(pa.array(values, TYPES[kind]))
    assert made.null_count == values.count(None)


@given(st.lists(st.lists(st.floats(0, 1e300))))
def test_lists_are_pyarrows(rows: list[list[float]]) -> None:
    kind = pa.list_(pa.field("element", pa.float64(), nullable=False))
    made = lists([np.array(row, np.float64) for row in rows], kind)
    made.validate(full=True)
    assert made.equals(pa.array(rows, kind))


def test_a_number_of_more_than_64_bits_is_told() -> None:
    with pytest.raises(OverflowError):
        column("int", [2**63])


def test_a_model_is_written_without_pandas(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    program = (
        "import sys\n"
        "import numpy as np\n"
        "from gpuherd.esd.config import AnalysisOptions\n"
        "from gpuherd.esd.folder import ESDDirectory\n"
        "from gpuherd.esd.schema import LayerRow\n"
        "from gpuherd.esd.spectra.pooled import LayerSpectrum\n"
        "from gpuherd.esd.model_files import ModelResultFiles\n"
        "from gpuherd.esd.views import Origin\n"
        f"folder = ESDDirectory({str(tmp_path)!r})\n"
        "with ModelResultFiles(folder, 'm', ['a'], evals_thresh=0.0, save_eigs=True) as files:\n"
        "    files.keep_spectrum(0, LayerSpectrum(np.arange(1.0, 9.0)))\n"
        "    origin = Origin('m', None, '', AnalysisOptions().convention_columns, '1')\n"
        "    files.write(origin, [LayerRow(longname='a', M=8, N=8, params=64, alpha=2.0, fit_status='ok')], 'tensor')\n"
        "print('pandas' in sys.modules, len(list(folder.eigs.iterdir())))\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "False 1\n"
