"""The run that the tests of scorings share with those of statistics."""

from tests.qa.statistics.conftest import facts as facts
from tests.qa.statistics.conftest import run as run
