"""A statistic is one object in one file, which is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuherd.qa.measures.evidence import EvidenceNeed
from gpuherd.qa.measures.registry import measures
from gpuherd.qa.statistics.files import BadStatistic, StatisticSpec
from gpuherd.qa.statistics.registry import register, statistic_of, statistics
from gpuherd.qa.statistics.similarity import SIMILARITY

OF_ANSWERS = {EvidenceNeed.GREEDY, EvidenceNeed.SAMPLES}

NEW = """
from dataclasses import dataclass

from gpuherd.options import option
from gpuherd.qa.measures.evidence import Evidence, Undefined
from gpuherd.qa.measures.registry import measure
from gpuherd.qa.statistics.files import StatisticSpec
from gpuherd.qa.statistics.registry import (
    BatchMeasurer,
    CommonOptions,
    Statistic,
    StatisticCost,
    Values,
    planned_or_there,
    register,
)


@dataclass(frozen=True, kw_only=True)
class TopicOptions(CommonOptions):
    topic_model: str | None = option(None, help="compares question and answer", metavar="ID", group="models")


class OnTopic(Statistic[TopicOptions]):
    kind, options, needs = "topic", TopicOptions, ("topic",)

    def plan(self, options, planning):
        return {} if options.topic_model is None else {"topic": StatisticSpec(self.kind, options.topic_model, "0")}

    def source(self, need, options, has, planned):
        return planned_or_there(planned.get("topic"), has.latest(self.kind, "both"), "name --topic-model")

    def cost(self, spec, answers):
        return StatisticCost(tuple(1 for _ in answers))

    def job(self, spec, inputs):
        return BatchMeasurer(lambda batch: ["{}" for _ in batch])

    def values(self, given):
        return Values([row["g"] for row in given.rows])


ON_TOPIC = register(OnTopic())


@measure("off-topic", needs=["topic"], source="here")
def off_topic(evidence: Evidence) -> float:
    "1 - g."
    if evidence.others.get("topic") is None:
        raise Undefined("not measured")
    return 1 - evidence.others["topic"]
"""
PROGRAM = """
import sys
import gpuherd.qa.statistics
gpuherd.qa.statistics.__path__.append(sys.argv[1])
from gpuherd.options import option_fields
from gpuherd.qa.measures.evidence import Evidence
from gpuherd.qa.measures.registry import compute, measures
from gpuherd.qa.scoring.options import ScoreOptions, choose, selected_measures, planned_specs, requested_needs, sources
from gpuherd.qa.statistics.registry import Has, Planning, ValueInputs, statistic_of

assert "topic_model" in {field.name for field, _ in option_fields(ScoreOptions)}
assert not {"torch", "numpy", "transformers", "scipy"} & set(sys.modules), "options are loaded at every start"
has = Has(greedy=True, samples=3)


def choice(options):
    chosen, must = selected_measures(options.measures, measures())
    planned = planned_specs(options, Planning(requested_needs(options, chosen), None))
    return choose(chosen, sources(options, has, planned), must=must)


assert dict(choice(ScoreOptions()).left_out)["off-topic"] == "not measured; name --topic-model"
options = ScoreOptions(topic_model="m", measures=("off-topic",))
found = choice(options)
(spec,) = found.statistics
assert spec.name.startswith("topic-") and found.sources["topic"].said == spec.name
given = ValueInputs("topic", found.sources["topic"], [{"g": 0.25}, {"g": None}], [], [], options)
column = statistic_of(spec).values(given).column
evidences = [Evidence(str(at)).with_values({"topic": value}) for at, value in enumerate(column)]
assert compute(["off-topic"], evidences).columns["off-topic"] == (0.75, None)
"""


def test_each_need_is_given_by_one_statistic() -> None:
    given = [need for each in statistics() for need in each.needs]
    assert len(given) == len(set(given)) and OF_ANSWERS | set(given) == set(EvidenceNeed)
    assert all(each.needs <= OF_ANSWERS | set(given) for each in measures())
    with pytest.raises(ValueError, match="already"):
        register(SIMILARITY)


def test_a_kind_that_is_not_known_is_refused() -> None:
    assert statistic_of(StatisticSpec("similarity", "m", "0")) is SIMILARITY
    with pytest.raises(BadStatistic, match="doesn't know"):
        statistic_of(StatisticSpec("../weather", "m", "0"))


def test_a_new_statistic_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "on_topic.py").write_text(NEW)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True, text=True, env=os.environ, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
