"""The state of all random number generators of a process, as plain values and back: Python's, numpy's, torch's, CUDA's.

Exact: what is drawn after ``restore`` is what was drawn after ``capture``.
"""

from __future__ import annotations

import base64
from typing import Any


def seed_all(seed: int) -> None:
    """Seeds all of them. Draws that results depend on have keys of their own; dropout has not."""
    import random

    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture(device: str) -> dict[str, Any]:
    """Their states, for JSON. ``device``: the GPU whose generator is kept too."""
    import random

    import numpy
    import torch

    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = numpy.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(each) for each in keys], int(place), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
    }
    if device.startswith("cuda"):
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    return states


def restore(states: dict[str, Any], device: str) -> None:
    """Puts them back; CUDA's where both then and now a GPU is used."""
    import random

    import numpy
    import torch

    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, place, has_gauss, cached = states["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), place, has_gauss, cached))
    torch.set_rng_state(_bytes(states["torch"]))
    if "cuda" in states and device.startswith("cuda"):
        torch.cuda.set_rng_state(_bytes(states["cuda"]), device)


def _text(state: Any) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _bytes(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
