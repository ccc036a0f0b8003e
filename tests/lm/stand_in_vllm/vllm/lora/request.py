"""Which adapter a request is answered with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LoRARequest:
    """By name, number and folder."""

    name: str
    number: int
    path: str
