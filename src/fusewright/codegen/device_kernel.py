"""What code generation for a GPU gives: a kernel's text and how to launch it, in plain data.

Takes nothing; defines the types between codegen/triton and the runtime. A kernel's parameters are, in order: `buffers`
(pointers, or values for those in `scalars`), one pointer for each of `spills`, the values of `sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusewright.base.location import Location
from fusewright.base.records import dataclass
from fusewright.sizes.expressions import Dim, Expr


class Unsupported(Exception):
    """The kernel holds something that cannot be generated for a GPU; the message says what. Lowering has asked before
    (codegen/triton/capabilities.py); a graph that is left with such a kernel runs its operators eagerly."""


class WithoutCode(Unsupported):
    """Kernels, of a CPU too, that their compiler has refused, with all blocks that were worth a try. `kernels`: what
    was said, by the kernels' names."""

    def __init__(self, kernels: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"kernel {name}: {why}" for name, why in kernels.items()))
        self.kernels = kernels


MOST_PARAMETERS = 500
"""Of a kernel: every driver takes 4096 bytes."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The GPU that code is made for. arch: compute capability, 90 for 9.0; units: multiprocessors."""

    arch: int = 90
    units: int = 132


@dataclass(frozen=True, slots=True)
class Spill:
    """Memory of the kernel's own that does not fit registers: `elements` of `dtype`, allocated for each launch."""

    dtype: torch.dtype
    elements: Dim


@dataclass(frozen=True, slots=True)
class DeviceKernel:
    """key: hash of all that decides the machine code. symbol: the function's name in `text`. signature: Triton's type
    of each parameter. aligned: parameters whose pointers must be multiples of 16 bytes. grid: number of programs, over
    the size symbols. checks: the kernel asserts that indices are in range. scratch: bytes of a program's scratch memory
    that Triton itself uses. waits: it waits itself for the kernels before it, and may be started before they have
    ended."""

    name: str
    key: str
    symbol: str
    text: str
    signature: tuple[str, ...]
    aligned: tuple[int, ...]
    buffers: tuple[str, ...]
    scalars: frozenset[int]
    spills: tuple[Spill, ...]
    sizes: tuple[Expr, ...]
    grid: Dim
    warps: int
    stages: int
    checks: bool
    locations: tuple[Location, ...] = ()
    origins: tuple[str, ...] = ()
    scratch: int = 0
    waits: bool = False

    @property
    def source(self) -> str:
        return self.text
