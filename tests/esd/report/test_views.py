"""The declared views of a page of spectra: which models stand below which, and what a large family is folded to."""

from __future__ import annotations

from typing import Any

from gpuherd.esd.report.views import VERDICTS, _families, first_state


def model(parent: int | None = None, source: str | None = None, verdict: str | None = None) -> dict[str, Any]:
    return {"parent": parent, "source": source, "verdict": verdict}


def test_members_stand_below_their_base_and_alone_ones_nowhere() -> None:
    models = [model(), model(0, "org/0"), model(1, "org/1"), model(), model(None, "org/absent")]
    base, absent = _families(models)
    assert base == [0, [[1, [[2]], None]], None]
    assert absent[1:] == [[[4]], None]
    assert "org/absent" in str(absent[0]) and "not in this run" in str(absent[0])


def test_a_circle_in_the_list_is_shown_once() -> None:
    models = [model(1, "org/1"), model(0, "org/0")]
    assert _families(models) == [[0, [[1, [], None]], None]]


def test_a_large_family_is_folded_with_its_doubts_in_front() -> None:
    models = [model(), *(model(0, "org/0", "other" if at == 11 else "as stated") for at in range(13))]
    [[base, members, words]] = _families(models)
    assert (base, members[0], len(members)) == (0, [12], 13)
    assert "13 models" in str(words) and "1 nearer to another base" in str(words)
    [[_, _, few]] = _families(models[:12])
    assert few is None


def test_families_with_doubts_come_first() -> None:
    models = [model(), model(), model(0, "org/0", "as stated"), model(1, "org/1", "other")]
    assert [family[0] for family in _families(models)] == [1, 0]


def test_all_of_few_models_are_drawn_at_first() -> None:
    assert first_state({"models": [model()] * 4})["drawn"] == [0, 1, 2, 3]
    assert first_state({"models": [model()] * 5})["drawn"] == []
    assert next(iter(VERDICTS)) == "other"  # what a reader should see first
