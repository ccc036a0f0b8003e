"""What is told of the models behind statistics."""

from __future__ import annotations

from gpuherd.qa.statistics.language_model import mass_remarks, mass_seen
from gpuherd.qa.statistics.similarity import self_similarity_remarks


def test_nothing_is_told_of_a_model_that_fits() -> None:
    assert mass_remarks([]) == self_similarity_remarks([]) == mass_remarks([{}]) == self_similarity_remarks([{}]) == ()
    assert self_similarity_remarks([{"self_similarity": 0.98}]) == ()
    assert mass_remarks([mass_seen("both options", [0.9, 0.8])]) == ()


def test_what_all_jobs_saw_is_told_once() -> None:
    jobs = [mass_seen("both options", [0.1]), {}, mass_seen("both options", [0.3, 0.5])]
    (sentence,) = mass_remarks(jobs)
    assert sentence.startswith("both options had 0.3 of the probability")
    (sentence,) = self_similarity_remarks([{"self_similarity": value} for value in (0.95, 0.41, None)])
    assert "as little as 0.41" in sentence


def test_what_jobs_of_an_earlier_gpuherd_saw_is_read() -> None:
    earlier = {"self_similarity": None, "words": "both options", "mass": 0.1, "weighed": 1}
    assert self_similarity_remarks([earlier]) == () and len(mass_remarks([earlier])) == 1
