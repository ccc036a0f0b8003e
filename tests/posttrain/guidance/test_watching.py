"""What a caller's hooks say comes through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.posttrain.guidance.letters import training

from gpuherd.posttrain.engine.options import Watching
from gpuherd.posttrain.guidance.watching import watching
from gpuherd.posttrain.policy_gradient.algorithm import Hooks


def test_hooks_come_through_and_without_them_the_options_say_how_often(tmp_path: Path) -> None:
    work = training("m", "v", tmp_path, [])
    assert watching(work, 7) == Watching(7)

    def stopping() -> bool:
        return False

    hooks = Hooks(
        save_every=3, keep=1, log_every=2, report_to=("tensorboard",), run_name="n", project="p", stopping=stopping
    )
    assert watching(replace(work, extra={"hooks": hooks}), 7) == Watching(3, 1, 2, ("tensorboard",), "n", "p", stopping)
