"""Memory beside which nothing may be read: tensors that begin, or end, at the border of pages without access. A program, since reading beyond
ends the process: `python -m tests.codegen.fenced` runs the programs below; `python -m tests.codegen.fenced --operators 0/4` PyTorch's samples
of every operator (a quarter of them).

Always holds: a fenced tensor is contiguous and holds the values of the one that it stands for.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fusewright

_LIBC = ctypes.CDLL(None, use_errno=True)
_KEPT: list[mmap.mmap] = []


def fenced(tensor: Tensor, at_end: bool) -> Tensor:
    """A copy with a page without access right before its first byte (or behind its last)."""
    page = mmap.PAGESIZE
    size = max(tensor.numel() * tensor.element_size(), 1)
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + 2 * page)
    _KEPT.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for border in (start, start + page + room):
        if _LIBC.mprotect(ctypes.c_void_p(border), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = page + (room - size if at_end else 0)
    made = (
        torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
        .view(tensor.dtype)[: tensor.numel()]
        .view(tensor.shape)
    )
    made.copy_(tensor)
    return made.requires_grad_(tensor.requires_grad)


def fence(values: Any, at_end: bool) -> Any:
    """The same arguments, their dense tensors fenced."""

    def one(value: Any) -> Any:
        plain = type(value) is Tensor and value.layout is torch.strided and not value.is_conj() and not value.is_neg()
        return fenced(value.detach(), at_end) if plain and value.numel() else value

    return pytree.tree_map(one, values)


def rotated(x: Tensor, cos: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1)


def shifted(x: Tensor, y: Tensor) -> Tensor:
    return x.roll(3, -1) + y.roll((-2, 5), (0, -1)) * torch.nn.functional.pad(x, (2, -2))


def joined(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((x, y * 2, x + y), 0).sin() + torch.stack((x, y, x)).flatten(0, 1)


def put_in(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[..., 3:-2] = y[..., 3:-2] * 2
    return torch.slice_scatter(x, y[:, 1:5], 1, 2, 6).flip(-1) + x.tril(1)


def pooled(x: Tensor, y: Tensor) -> Tensor:
    images = x[None, None]
    return torch.nn.functional.max_pool2d(images, 3, 2, 1).relu() + torch.nn.functional.avg_pool2d(images, 3, 2, 1)


PROGRAMS: list[Callable[[Tensor, Tensor], Tensor]] = [rotated, shifted, joined, put_in, pooled]
SHAPES = ((16, 64), (3, 37), (64, 16), (128, 128))


def run_programs() -> None:
    for program in PROGRAMS:
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
                for at_end in (False, True):
                    compiled = fusewright.compile(program, fullgraph=True, dynamic=False)
                    with torch.no_grad():
                        error = (compiled(*fence((x, y), at_end)).double() - program(x, y).double()).norm()
                        assert error <= (1e-2 if dtype == torch.bfloat16 else 1e-6) * program(x, y).double().norm(), (
                            program,
                            dtype,
                        )
                fusewright.reset()
    print("in bounds")


def run_operators(index: int, count: int) -> None:
    from tests.ops.cases import operator_cases
    from tests.ops.opinfo import op_db

    for op in op_db[index::count]:
        if torch.float32 not in op.dtypes:
            continue
        for case in operator_cases(op, torch.float32, "function", 4):
            print(case.name, file=sys.stderr, flush=True)  # the last one is what ended the process
            for at_end in (False, True):
                args, kwargs = fence((case.args, case.kwargs), at_end)
                with torch.no_grad():
                    try:
                        case.make(fusewright.compile)(*args, **kwargs)
                    except Exception as error:
                        print(f"{case.name}: {type(error).__name__}", file=sys.stderr)
        fusewright.reset()
        _KEPT.clear()
    print("in bounds")


if __name__ == "__main__":
    if "--operators" in sys.argv:
        part, _, whole = sys.argv[sys.argv.index("--operators") + 1].partition("/")
        run_operators(int(part), int(whole))
    else:
        run_programs()
