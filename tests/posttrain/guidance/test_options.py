"""What algorithms are told, read from configurations."""

from __future__ import annotations

from typing import Any

import pytest

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Guide, Mode
from gpuherd.posttrain.algos.cd import ControlledDecoding
from gpuherd.posttrain.algos.pita import PITA
from gpuherd.posttrain.algos.qsharp import QSharp
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.guidance.options import Guidance, Loss, ValueOptions
from gpuherd.runs.records import jsonable


def test_a_block_of_the_papers_configuration_is_read() -> None:
    told = {
        "epochs": 10,
        "batch_size": 32,
        "max_batch_num_tokens": 16384,
        "num_workers": 2,
        "lr": 2e-5,
        "weight_decay": 0,
        "grad_clip": 1,
        "loss_type": "bce",
        "num_atoms": 11,
        "V_min": 0,
        "V_max": 1,
        "guidance": {"eta": 1, "mode": "bernoulli", "top_k": 20, "use_cache": True},
    }
    for name in ("PITA", "QSharp"):
        options = read(algorithm_class(name).Options, told, f"algos.{name}")
        assert (options.batch_size, options.loss_type, options.guidance.mode) == (32, Loss.BCE, Mode.BERNOULLI)
        assert read(type(options), jsonable(options)) == options


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_batch_num_tokens": 0}, "max_batch_num_tokens=0"),
        ({"samples_per_example": 0}, "samples_per_example=0"),
        ({"save_every": 0}, "save_every=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"lr": 0}, "lr="),
        ({"lr": float("inf")}, "lr"),
        ({"weight_decay": -1}, "weight_decay="),
        ({"grad_clip": 0}, "grad_clip="),
        ({"validation_share": 1}, "validation_share="),
        ({"num_atoms": 1}, "num_atoms=1; the least is 2"),
        ({"V_min": 1, "V_max": 0}, "V_min=1.0, V_max=0.0"),
        ({"V_max": 2, "loss_type": "bce"}, "V_max=2"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"guidance": {"eta": 0}}, "eta"),
        ({"guidance": {"top_k": 0}}, "top_k"),
        ({"guidance": {"use_cache": False}}, "use_cache=false"),
        ({"guidance": {"mode": "distributional"}, "loss_type": "bce"}, "for loss_type=mle"),
        ({"guidance": {"mode": "bernoulli"}, "loss_type": "mle"}, "loss_type is mle"),
        ({"gidance": {}}, "did you mean"),
    ],
)
def test_what_can_not_be_is_refused_with_its_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        read(QSharp.Options, values, "algos.QSharp")
    assert "algos.QSharp" in str(refused.value)


def test_each_algorithms_own() -> None:
    assert QSharp.Options().loss_type is None and not QSharp.Options().warm_start
    assert PITA.Options().warm_start and PITA.Options().loss_type is Loss.BCE
    assert ControlledDecoding.Options().loss_type is Loss.MSE
    with pytest.raises(UsageError, match="it is mse or bce"):
        ControlledDecoding.Options(loss_type=Loss.MLE)
    with pytest.raises(UsageError, match="guided by the expectation"):
        ControlledDecoding.Options(guidance=Guidance(mode=Mode.BERNOULLI))
    with pytest.raises(UsageError, match="bradley_terry_beta=0"):
        PITA.Options(bradley_terry_beta=0.0)


def test_guides_have_the_mode_of_their_loss_unless_told() -> None:
    options = ValueOptions(guidance=Guidance(eta=0.5, top_k=7))
    assert options.guide("c", Loss.BCE) == Guide("c", 0.5, Mode.BERNOULLI, 7)
    assert options.guide("c", Loss.MLE).mode is Mode.DISTRIBUTIONAL
    assert ControlledDecoding.Options().guide("c", Loss.MSE).mode is Mode.EXPECTATION
    told = ValueOptions(loss_type=Loss.MLE, guidance=Guidance(mode=Mode.EXPECTATION))
    assert told.guide("c", Loss.MLE).mode is Mode.EXPECTATION
