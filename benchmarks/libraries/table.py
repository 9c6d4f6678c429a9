"""Typical programs of other people's libraries, as their documentation shows them: small, with random weights.

A program is a function under `@program(LIBRARY)`. It takes nothing, and gives (what is compiled, the arguments of a call). What it makes
is determined by torch.manual_seed, so each peer gets its own. Under `training=True` the tensors of the result are summed and
differentiated, and gradients are compared too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Made = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Program:
    library: str
    name: str
    training: bool
    make: Callable[[], Made]


PROGRAMS: dict[str, Program] = {}


def program(library: str, training: bool = False) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Enters what it is put on under its own name."""

    def enter(make: Callable[[], Made]) -> Callable[[], Made]:
        PROGRAMS[make.__name__] = Program(library, make.__name__, training, make)
        return make

    return enter


def images(size: int = 64, count: int = 2) -> torch.Tensor:
    return torch.rand(count, 3, size, size)


def tokens(length: int = 16, most: int = 64, count: int = 2) -> torch.Tensor:
    return torch.randint(1, most, (count, length))
