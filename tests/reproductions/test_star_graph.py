"""Which base counts, what its checkpoints are looked at by, and what the documents say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproductions.imitation import IGNORED, Example, Shape, batch, encoded, forced, imitating, small_llama
from reproductions.star_graph import tables
from reproductions.star_graph.__main__ import main
from reproductions.star_graph.base import Looked, chosen_base, graphs
from reproductions.star_graph.protocol import METHODS, PROTOCOLS

from gpuherd.posttrain.data.star_graph import make_tokenizer
from gpuherd.posttrain.types import Split
from reproductions import results

THREE = PROTOCOLS[3, 3]


@pytest.mark.parametrize(
    ("right", "edges", "passes"),
    [
        (0.333, {"3": 0.2, "4": 0.96, "5": 0.96}, True),  # its own length does not count
        (0.362, {"4": 0.96, "5": 0.96}, True),
        (0.364, {"4": 0.96, "5": 0.96}, False),  # on its way out of the shortcut
        (0.303, {"4": 0.96, "5": 0.96}, False),
        (0.333, {"4": 0.96, "5": 0.95}, False),  # edges are not followed yet
        (float("nan"), {"4": 1.0, "5": 1.0}, False),
    ],
)
def test_a_base_takes_the_shortcut_and_follows_edges(right: float, edges: dict[str, float], passes: bool) -> None:
    assert Looked(1, right, edges, 0.0).passes(THREE) is passes


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1))))
def test_the_base_is_the_last_checkpoint_that_counts(seen: list[tuple[float, float]]) -> None:
    looked = [Looked(step, right, {"4": edges}, 0.0) for step, (right, edges) in enumerate(seen)]
    counting = [each.step for each in looked if abs(each.right - 1 / 3) < 0.03 and each.edges["4"] > 0.95]
    chosen = chosen_base(THREE, looked)
    assert (None if chosen is None else chosen.step) == (counting[-1] if counting else None)


def test_the_base_never_sees_a_graph_of_the_test() -> None:
    small = replace(THREE, test=200, gate=100)
    asked = {each.id for each in graphs(small, 3, 0, 0).problems(Split.TEST, None, 0)}
    learnt = {each.id for each in graphs(small, 3, 1_000, 300).problems(Split.TRAIN, None, 0)}
    own = {each.id for each in graphs(small, 3, 0, 300).problems(Split.TRAIN, None, 0)}
    assert len(asked) == 200 and not asked & (learnt | own)
    assert learnt != own


def test_imitation_learns_the_answer_alone_and_is_looked_at_by_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, THREE.nodes)
    problems = graphs(replace(THREE, test=8, gate=8), 3, 0, 8).problems(Split.TRAIN, None, 0)
    examples = [encoded(tokenizer, each) for each in problems]
    ids, labels, mask = batch([*examples[:2], Example((5, 6), 1)], tokenizer.pad_token_id)
    assert tokenizer.decode(labels[0][labels[0] != IGNORED]).split() == [*problems[0].answers[0].split(","), "</s>"]
    assert mask.sum(dim=1).tolist() == [len(examples[0].ids), len(examples[1].ids), 2]
    assert ids[2].tolist()[2:] == [tokenizer.pad_token_id] * (ids.shape[1] - 2)

    model = small_llama(Shape(width=16, layers=1, heads=2), tokenizer, 0)
    before, _ = forced(model, examples, tokenizer.pad_token_id)
    assert model.training and (before[:, : examples[0].asked - 1] == 0).all()
    assert [*imitating(model, tokenizer.pad_token_id, [examples] * 30, 1e-2)] == [*range(1, 31)]
    after, likeliest = forced(model, examples, tokenizer.pad_token_id)
    assert after.sum() > 0.6 * before.sum()  # both are negative
    logits = model.eval()(input_ids=ids[:1], attention_mask=mask[:1]).logits[0, :-1]
    asked = examples[0].asked - 1
    assert (logits.argmax(-1) == ids[0, 1:])[asked : len(examples[0].ids) - 1].tolist() == likeliest[0, asked:].tolist()


def _point(right: float, *, eta: float | None = None, own: bool = True, kl: float = 0.0) -> dict[str, Any]:
    return {"eta": eta, "own": own, "problems": 1000, "right": {"value": right}, "kl": {"value": kl}}


def _seed(seed: int, *, valid: bool = True) -> dict[str, Any]:
    look = {"step": 250, "right": 0.5, "edges": {"3": 1.0, "4": 1.0}, "cpu_s": 31.6, "passes": valid}
    found: dict[str, Any] = {
        "protocol": {"degree": 2, "length": 3, "test": 1000},
        "seed": seed,
        "checkpoints": [look, look | {"step": 500, "right": 0.9, "passes": False}],
        "methods": {},
    }
    if valid:
        guided = [_point(0.9, eta=0.1, kl=0.7), _point(0.6, eta=1.0, own=False, kl=-1e-9)]
        points = {name: guided if name in ("Q#", "CD", "PITA") else [_point(0.5)] for name in METHODS}
        costs = {"collect_cpu_s": 1.0, "train_cpu_s": 20.0, "test_cpu_s": 3.0}
        found |= {"base": [_point(0.5)], "methods": {name: {"points": each, **costs} for name, each in points.items()}}
    return found


def test_the_document_is_written_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    document = tmp_path / "star-graph.md"
    document.write_text(
        "# Title\n<!-- star graphs: written by reproductions -->\nold\n<!-- end of star graphs -->\nend\n"
    )
    for seed in (0, 1, 2):
        found = _seed(seed, valid=seed != 1)
        if seed == 2:
            del found["methods"]["RPO"]
        results.write_result(tmp_path / "results" / f"2-3-seed{seed}.json", found)
    assert main(["--only-tables", "--results", str(tmp_path / "results")]) == 0
    text = document.read_text()
    assert text.startswith("# Title\n") and text.endswith("-->\nend\n") and "old" not in text
    assert "| Q# | .900 (.880–.917) | not valid | .900 (.880–.917) | .900 ± 0.000 | near 1 |" in text
    assert "| RPO | .500 (.469–.531) | not valid | not run |" in text
    assert "| G(2,3) | 1 | 2 | 0 | none (last: 500) | 0.900 | l=3 1.000, l=4 1.000 |" in text
    assert "| G(2,3) | 0 | 2 | 1 | 250 | 0.500 | l=3 1.000, l=4 1.000 |" in text
    assert "| 1 | .600 / 0.00 | .600 / 0.00 | .600 / 0.00 |" in text
    assert "| G(2,3) | 32 | 1, 20, 3 |" in text
    assert (tmp_path / "images" / "star-graph-eta.svg").read_text().count("PITA") >= 1
    before = text
    assert main(["--only-tables", "--results", str(tmp_path / "results")]) == 0
    assert document.read_text() == before


def test_a_document_without_its_section_is_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("<!-- star graphs: written by reproductions -->")
    with pytest.raises(ValueError, match="there is no section star graphs"):
        results.write_section(document, "star graphs", ["x"])
    assert document.read_text() == "<!-- star graphs: written by reproductions -->"


def test_a_graph_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--graphs", "7,7"])
    assert "there is 2,3 3,3 2,4 5,5" in capsys.readouterr().err


def test_the_kept_results_are_those_of_the_document() -> None:
    """What docs/star-graph.md says is what the results in the repository say."""
    document = (results.DOCS / "star-graph.md").read_text()
    kept = results.read_results(Path(tables.__file__).parent / "results")
    assert len(kept) >= 6
    for found in kept:
        for name, method in found["methods"].items():
            assert f"| {name} |" in document and results.share_cell(results.own(method["points"])) in document
