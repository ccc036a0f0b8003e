"""``net_esd_estimator`` against the reference numbers and against its definitions written plainly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpuherd.errors import UsageError
from gpuherd.esd import net_esd_estimator
from gpuherd.esd.api import EPSILON, KEYS

Float64 = npt.NDArray[np.float64]
ONE_TO_TEN = np.arange(1.0, 11.0)
PARETO = (1 - (np.arange(100) + 0.5) / 100) ** -0.5
POWERS = 2.0 ** np.arange(8)


def net_of(*spectra: npt.NDArray[Any]) -> torch.nn.Module:
    """A network of one linear layer a spectrum."""
    layers = []
    for evals in spectra:
        layer = torch.nn.Linear(len(evals), len(evals), dtype=torch.float64)
        layer.weight.data = torch.diag(torch.from_numpy(np.sqrt(evals)))
        layers.append(layer)
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("evals", "method", "alpha", "D"),
    [
        (ONE_TO_TEN, None, 4.68155, 0.253238),
        (ONE_TO_TEN, "DKS", 4.68155, 0.253238),
        (ONE_TO_TEN, "xmin_mid", 4.681552, 0.253238),
        (ONE_TO_TEN, "xmin_peak", 1.662058, 0.31681),
        (PARETO, None, 3.017093, 0.006733),
        (PARETO, "xmin_mid", 3.034516, 0.01348),
        (POWERS, None, 1.412199, 0.200627),
        (POWERS, "xmin_mid", 1.961797, 0.236583),
    ],
)
def test_the_reference_fits(evals: Float64, method: Any, alpha: float, D: float) -> None:
    found = net_esd_estimator(net_of(evals), fix_fingers=method)
    assert found["alpha"] == [pytest.approx(alpha, abs=2e-5)]
    assert found["D"] == [pytest.approx(D, abs=2e-5)]


def test_the_reference_figures() -> None:
    found = net_esd_estimator(net_of(ONE_TO_TEN, PARETO, POWERS))
    assert list(found) == list(KEYS)
    assert found["norm"][0] == pytest.approx(55)
    assert found["stable_rank"] == pytest.approx([5.5, 13.714421, 1.992188], abs=5e-6)
    assert found["log_norm"][:2] == pytest.approx([1.740363, 2.287693], abs=1e-6)
    assert found["log_alpha_norm"][0] == pytest.approx(5.043095, abs=2e-5)
    assert found["entropy"] == pytest.approx([0.934677, 0.957536, 0.654812], abs=1e-6)
    assert found["spectral_norm"][1] == pytest.approx(14.142137, abs=5e-6)
    assert found["matrix_rank"] == [10, 100, 8]
    assert found["xmin"] == pytest.approx([1.0, PARETO[0], 1.0])
    assert found["xmax"] == found["spectral_norm"]
    assert found["longname"] == ["0", "1", "2"]
    assert found["params"] == [110, 10100, 72]
    assert found["eigs"][0] == pytest.approx(ONE_TO_TEN)


def plain(evals: Float64, method: str | None, xmin_pos: int) -> tuple[float, float]:
    """alpha and D by the definitions, candidate by candidate."""
    n = len(evals)
    logs = np.log(evals)

    def fit(i: int) -> tuple[float, float]:
        m = n - i
        alpha = 1 + m / (logs[i:].sum() - m * logs[i])
        return float(np.abs(1 - (evals[i:] / evals[i]) ** (1 - alpha) - np.arange(m) / m).max()), float(alpha)

    if method == "xmin_mid":
        D, alpha = fit(min(n // xmin_pos, n - 2))
        return alpha, D
    D, alpha = min(fit(i) for i in range(n - 1))
    return alpha, D


@pytest.mark.parametrize("method", [None, "xmin_mid"])
@pytest.mark.parametrize("filter_zeros", [False, True])
@pytest.mark.parametrize("use_svd", [False, True])
def test_every_key_by_its_definition(method: Any, filter_zeros: bool, use_svd: bool) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 20, bias=False)).double()
    threshold = 0.05
    found = net_esd_estimator(
        net, EVALS_THRESH=threshold, fix_fingers=method, xmin_pos=3, filter_zeros=filter_zeros, use_svd=use_svd
    )
    weights = [value.numpy() for name, value in net.state_dict().items() if name.endswith("weight")]
    for index, weight in enumerate(weights):
        evals = np.sort(np.linalg.svd(weight, compute_uv=False) ** 2)
        kept = evals[evals > threshold] if filter_zeros else evals
        alpha, D = plain(kept, method, 3)
        p = kept / kept.sum() + EPSILON
        rank = int((np.sqrt(kept) > math.sqrt(kept[-1]) * weight.shape[1] * np.finfo(float).eps).sum())
        wanted = {
            "D": D,
            "M": weight.shape[0],
            "N": weight.shape[1],
            "alpha": alpha,
            "alpha_weighted": alpha * math.log10(kept[-1]),
            "entropy": -(p * np.log(p)).sum() / math.log(rank + EPSILON),
            "log_alpha_norm": math.log10((kept**alpha).sum()),
            "log_norm": math.log10(kept.sum()),
            "log_spectral_norm": math.log10(kept[-1]),
            "matrix_rank": rank,
            "norm": kept.sum(),
            "num_evals": len(kept),
            "spectral_norm": kept[-1],
            "stable_rank": kept.sum() / kept[-1],
            "xmax": kept[-1],
            "xmin": kept[0],
            "params": weight.size + (40 if index == 0 else 0),
        }
        for key, value in wanted.items():
            assert found[key][index] == pytest.approx(value, rel=1e-10), key
        assert found["eigs"][index] == pytest.approx(kept, rel=1e-10, abs=1e-14)


class Zoo(torch.nn.Module):
    """One of each kind of layer, a layer that is a classifier by its shape, and a fused attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wte = torch.nn.Embedding(30, 16)
        self.second = torch.nn.Conv2d(5, 7, 3)
        self.first = torch.nn.Conv1d(5, 7, 4, bias=False)
        self.lm_head = torch.nn.Linear(16, 128)
        self.norm = torch.nn.LayerNorm(16)
        self.attn = torch.nn.MultiheadAttention(16, 2)


def test_which_layers_are_looked_at() -> None:
    net = Zoo()
    found = net_esd_estimator(net)
    assert found["longname"] == ["second", "first"]
    assert found["params"] == [5 * 7 * 9 + 7, 5 * 7 * 4]
    assert found["num_evals"] == [5 * 9, 5 * 4]
    everything = net_esd_estimator(net, filter_type=False)
    assert everything["longname"] == [
        "wte", "second", "first", "lm_head", "attn.in_proj_q", "attn.in_proj_k", "attn.in_proj_v", "attn.out_proj",
    ]  # fmt: skip


def test_convolutions_are_scaled_and_pooled() -> None:
    net = Zoo()
    found = net_esd_estimator(net, conv_norm=0.2)
    weight = net.second.weight.detach().double().numpy()
    slices = [weight[:, :, i, j] for i in range(3) for j in range(3)]
    wanted = np.sort(np.concatenate([np.linalg.svd(s, compute_uv=False) ** 2 for s in slices])) * 0.2
    assert found["eigs"][0] == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_layers_without_figures() -> None:
    zero, broken, one, thin = (torch.nn.Linear(4, 4) for _ in range(4))
    zero.weight.data.zero_()
    broken.weight.data[0, 0] = math.nan
    one.weight.data = torch.eye(4)
    thin = torch.nn.Linear(3, 1)
    found = net_esd_estimator(torch.nn.Sequential(zero, broken, one, thin))
    assert found["longname"] == ["0", "1", "2"]
    assert found["alpha"] == [None, None, None]
    assert found["norm"][:2] == [None, None]
    assert found["norm"][2] == pytest.approx(4.0)
    assert {len(values) for values in found.values()} == {3}
    numbers = [value for key, values in found.items() if key != "eigs" for value in values]
    assert not any(isinstance(value, float) and not math.isfinite(value) for value in numbers)
    assert -1 not in numbers


def test_zeros_in_the_spectrum() -> None:
    evals = np.concatenate([np.zeros(6), np.arange(1.0, 5.0)])
    found = net_esd_estimator(net_of(evals), filter_zeros=False, fix_fingers="xmin_mid")
    assert found["alpha"] == [None]
    assert found["num_evals"] == [10]
    filtered = net_esd_estimator(net_of(evals), filter_zeros=True, fix_fingers="xmin_mid")
    assert filtered["num_evals"] == [4]
    assert filtered["alpha"][0] == pytest.approx(plain(np.arange(1.0, 5.0), "xmin_mid", 2)[0])


def test_options() -> None:
    net = net_of(ONE_TO_TEN)
    assert net_esd_estimator(net, save_eigs=False)["eigs"] == [None]
    single = net_esd_estimator(net, compute_dtype="float32")
    assert single["alpha"] == [pytest.approx(4.68155, abs=1e-4)]
    assert net_esd_estimator(net, parallel=False)["alpha"] == net_esd_estimator(net)["alpha"]
    wrong: list[dict[str, Any]] = [
        {"fix_fingers": "median"},
        {"max_workers": 0},
        {"device_ids": []},
        {"conv_norm": 0.0},
        {"conv_norm": math.nan},
        {"bins": 0},
        {"compute_dtype": "float16"},
    ]
    for bad in wrong:
        with pytest.raises(UsageError):
            net_esd_estimator(net, **bad)
