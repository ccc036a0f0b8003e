"""A Hydra program, not ours, swept over a real Ray that runs on this machine for as long as the sweep."""

from __future__ import annotations

import pytest
from tests.launcher.conftest import Sweeps

pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sweep_goes_through_ray_in_order_with_gpus_of_its_own(sweeps: Sweeps) -> None:
    found = sweeps.returns(4, "hydra.launcher.engine=ray", "hydra.launcher.retries=0", "fail=2", "wait=0.5")
    assert [each["num"] for each in found] == list(range(4))
    assert [each["raised"] for each in found] == [None, None, "ValueError: no fit with seed 2", None]
    values = [each["value"] for each in found if each["value"] is not None]
    for one in values:
        assert one["gpus"] in set("0123")
        for other in values:
            apart = one["began"] >= other["ended"] or other["began"] >= one["ended"]
            assert one is other or apart or one["gpus"] != other["gpus"]
    assert sweeps.times_begun() == {"0": 1, "1": 1, "2": 1, "3": 1}
