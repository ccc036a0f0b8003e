"""Names of matrices as cells of a table of layers x modules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.esd.views import LayerPlace, alpha_matrix, place_of


@pytest.mark.parametrize(
    ("longname", "place"),
    [
        ("transformer.h.11.attn.c_attn_q", ("transformer.h.11", 11, "attn.c_attn_q")),
        ("model.layers.2.mlp.experts.7.gate_proj", ("model.layers.2", 2, "mlp.experts.7.gate_proj")),
        ("encoder.block.0.layer.1.DenseReluDense.wi", ("encoder.block.0", 0, "layer.1.DenseReluDense.wi")),
        ("layer1.0.conv1", ("layer1.0", 0, "conv1")),
        ("0", ("0", 0, "weight")),
        ("0.weight.3", ("0.weight.3", 3, "weight")),
        ("lm_head", ("lm_head", None, "weight")),
        ("a.١.b", ("a.١.b", None, "weight")),
        ("a.99999999999999999999.b", ("a.99999999999999999999.b", None, "weight")),
        ("", ("", None, "weight")),
    ],
)
def test_the_place_of_a_name(longname: str, place: tuple[str, int | None, str]) -> None:
    assert place_of(longname) == LayerPlace(*place)


NAMES = st.lists(
    st.lists(st.sampled_from(["a", "layers", "0", "1", "10", "q", "weight"]), min_size=1, max_size=5).map(".".join),
    unique=True,
)


@given(NAMES)
def test_each_matrix_has_a_cell_of_its_own_but_for_one_called_weight(names: list[str]) -> None:
    """``layers.0`` and ``layers.0.weight`` would be one cell; a model's longnames have no ``.weight`` at their end."""
    names = [name for name in names if not name.endswith(".weight")]
    table = alpha_matrix((name, float(index)) for index, name in enumerate(names))
    cells = [value for row in table.values for value in row if value is not None]
    assert sorted(cells) == [float(index) for index in range(len(names))]
    for index, name in enumerate(names):
        place = place_of(name)
        row = table.values[table.layers.index(place.layer)]
        assert row[table.modules.index(place.module)] == index
    assert len(table.layers) == len(table.numbers) == len(table.values) == len(set(table.layers))


def test_layers_stand_in_order_and_what_has_no_number_behind_them() -> None:
    names = ["lm_head", "dec.h.10.q", "dec.h.2.q", "enc.h.1.q", "enc.h.1.k"]
    table = alpha_matrix(dict.fromkeys(names, 2.5))
    assert table.layers == ("dec.h.2", "dec.h.10", "enc.h.1", "lm_head")
    assert table.numbers == (2, 10, 1, None)
    assert table.modules == ("weight", "q", "k")
    assert table.values == ((None, 2.5, None), (None, 2.5, None), (None, 2.5, 2.5), (2.5, None, None))


def test_no_matrices() -> None:
    assert alpha_matrix([]).values == ()
