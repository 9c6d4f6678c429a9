"""Loop programs built by hand, one tensor operation at a time and nothing inlined: the hardest diet for the scheduler.

`Builder` keeps, beside each buffer, a function that computes it with torch: running the program must give what these give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusewright.base.location import Location
from fusewright.loops import ir
from fusewright.loops.ir import (
    Axis,
    Buffer,
    BufferRef,
    Expression,
    Extern,
    LoopProgram,
    Output,
    Pointwise,
    Reduction,
    Scan,
    Store,
)
from fusewright.sizes.expressions import Dim, loop_symbol
from fusewright.sizes.tensor_type import contiguous_strides

CPU = torch.device("cpu")


@dataclass(frozen=True)
class View:
    """A strided window on a buffer."""

    buffer: str
    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    offset: Dim = 0
    dtype: torch.dtype = torch.float32

    def permute(self, *dims: int) -> View:
        return View(
            self.buffer,
            tuple(self.shape[d] for d in dims),
            tuple(self.stride[d] for d in dims),
            self.offset,
            self.dtype,
        )

    def reshape(self, *shape: Dim) -> View:
        """Of a contiguous view."""
        assert self.stride == contiguous_strides(self.shape), "reshape of a strided view"
        return View(self.buffer, shape, contiguous_strides(shape), self.offset, self.dtype)

    def expand(self, *shape: Dim) -> View:
        stride = tuple(0 if a == 1 and b != 1 else s for a, b, s in zip(self.shape, shape, self.stride))
        return View(self.buffer, shape, stride, self.offset, self.dtype)

    def narrow(self, dim: int, start: int, length: Dim) -> View:
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return View(self.buffer, shape, self.stride, self.offset + self.stride[dim] * start, self.dtype)

    def at(self, symbols: Sequence[Dim]) -> Expression:
        index = self.offset
        for sym, stride in zip(symbols, self.stride):
            index = index + sym * stride
        return ir.load(self.buffer, index, self.dtype)


@dataclass
class Builder:
    program: LoopProgram = field(default_factory=LoopProgram)
    count: int = 0

    def input(self, *shape: Dim, dtype: torch.dtype = torch.float32) -> View:
        position = len(self.program.inputs)
        name = f"in{position}"
        self.program.inputs = (*self.program.inputs, name)
        stride = contiguous_strides(shape)
        self.program.buffers[name] = Buffer(name, shape, stride, dtype, CPU, "input", position)
        return View(name, shape, stride, 0, dtype)

    def buffer(
        self, shape: tuple[Dim, ...], dtype: torch.dtype = torch.float32, stride: tuple[Dim, ...] | None = None
    ) -> View:
        name = f"t{self.count}"
        self.count += 1
        stride = contiguous_strides(shape) if stride is None else stride
        self.program.buffers[name] = Buffer(name, shape, stride, dtype, CPU, "temporary")
        return View(name, shape, stride, 0, dtype)

    def pointwise(
        self, name: str, value: Callable[..., Expression], *operands: View, out: View | None = None, line: int = 0
    ) -> View:
        """value(*loads) over the broadcast shape of the operands."""
        rank = max(len(v.shape) for v in operands)
        padded = [
            View(
                v.buffer,
                (1,) * (rank - len(v.shape)) + v.shape,
                (0,) * (rank - len(v.shape)) + v.stride,
                v.offset,
                v.dtype,
            )
            for v in operands
        ]
        shape = tuple(next((v.shape[d] for v in padded if v.shape[d] != 1), 1) for d in range(rank))
        symbols = tuple(loop_symbol(f"i{k}", n) for k, n in enumerate(shape))
        made = value(*(v.expand(*shape).at(symbols) for v in padded))
        out = self.buffer(shape, made.dtype) if out is None else out
        index = out.offset
        for sym, stride in zip(symbols, out.stride):
            index = index + sym * stride
        axes = tuple(Axis(s, n) for s, n in zip(symbols, shape))
        locations = (Location("model.py", line, "forward"),) if line else ()
        self.program.operations.append(Pointwise(name, axes, (Store(out.buffer, index, made),), locations))
        return out

    def divided(self, name: str, whole: View, pairs: View) -> View:
        """whole[..., i] - pairs[..., i // 2, 0]: an index that is affine only once the last axis is split."""
        symbols = tuple(loop_symbol(f"i{k}", n) for k, n in enumerate(whole.shape))
        out = self.buffer(whole.shape, whole.dtype)
        value = sub(whole.at(symbols), pairs.at((*symbols[:-1], symbols[-1] // 2, 0)))
        index: Dim = 0
        for sym, stride in zip(symbols, out.stride):
            index = index + sym * stride
        axes = tuple(Axis(s, n) for s, n in zip(symbols, whole.shape))
        self.program.operations.append(Pointwise(name, axes, (Store(out.buffer, index, value),)))
        return out

    def reduce(
        self, name: str, kind: str, source: View, dims: Sequence[int], scale: float | None = None, line: int = 0
    ) -> View:
        """Keeps the reduced dimensions with size 1; the sum is multiplied by `scale`."""
        symbols = tuple(loop_symbol(f"i{k}", n) for k, n in enumerate(source.shape))
        shape = tuple(1 if d in dims else n for d, n in enumerate(source.shape))
        positional = kind in ("argmax", "argmin")
        dtype = torch.int64 if positional else source.dtype
        out = self.buffer(shape, dtype)
        axes = tuple(Axis(s, n) for d, (s, n) in enumerate(zip(symbols, source.shape)) if d not in dims)
        reduced = tuple(Axis(symbols[d], source.shape[d]) for d in dims)
        index: Dim = 0
        for d, (sym, stride) in enumerate(zip(symbols, out.stride)):
            if d not in dims:
                index = index + sym * stride
        finish: Expression = ir.local_value("acc", dtype)
        if scale is not None:
            finish = ir.apply("mul", finish, ir.constant(scale, dtype), dtype=dtype)
        locations = (Location("model.py", line, "forward"),) if line else ()
        value = source.at(symbols)
        self.program.operations.append(
            Reduction(name, axes, reduced, kind, value, out.buffer, index, finish, locations)
        )  # type: ignore[arg-type]
        return out

    def scan(self, name: str, kind: str, source: View, dim: int, positions: bool = False) -> tuple[View, View | None]:
        symbols = tuple(loop_symbol(f"i{k}", n) for k, n in enumerate(source.shape))
        out = self.buffer(source.shape, source.dtype)
        position = self.buffer(source.shape, torch.int64) if positions else None
        axes = tuple(Axis(s, n) for d, (s, n) in enumerate(zip(symbols, source.shape)) if d != dim)
        index: Dim = 0
        for sym, stride in zip(symbols, out.stride):
            index = index + sym * stride
        self.program.operations.append(
            Scan(
                name,
                axes,
                Axis(symbols[dim], source.shape[dim]),
                kind,
                source.at(symbols),
                out.buffer,
                index,
                ir.local_value("acc", source.dtype),
                position.buffer if position else None,
            )
        )
        return out, position

    def extern(
        self,
        name: str,
        target: torch._ops.OpOverload,
        *operands: View,
        shape: tuple[Dim, ...],
        placement: str = "returned",
    ) -> View:
        out = self.buffer(shape)
        refs = tuple(BufferRef(v.buffer, v.shape, v.stride, v.offset, v.dtype) for v in operands)
        self.program.operations.append(Extern(name, target, refs, (), (out.buffer,), placement))  # type: ignore[arg-type]
        return out

    def done(self, *outputs: View) -> LoopProgram:
        """Outputs that are whole temporaries become buffers of the user's."""
        results = []
        for view in outputs:
            buffer = self.program.buffers[view.buffer]
            if buffer.role == "temporary":
                self.program.buffers[view.buffer] = Buffer(
                    buffer.name, buffer.shape, buffer.stride, buffer.dtype, CPU, "output"
                )
            ref = BufferRef(view.buffer, view.shape, view.stride, view.offset, view.dtype)
            results.append(Output("view", view.buffer, ref))
        self.program.outputs = tuple(results)
        return self.program


def op(name: str) -> Callable[..., Expression]:
    """A loop operation on expressions and numbers, with the dtype of the first expression."""

    def build(*args: Expression | float) -> Expression:
        dtype = next(a.dtype for a in args if isinstance(a, Expression))
        values = [a if isinstance(a, Expression) else ir.constant(a, dtype) for a in args]
        return ir.apply(name, *values, dtype=torch.bool if name in ("lt", "le", "gt", "ge", "eq", "ne") else dtype)

    return build


add, sub, mul, div = op("add"), op("sub"), op("mul"), op("div")
exp, rsqrt, tanh, maximum, erf = op("exp"), op("rsqrt"), op("tanh"), op("maximum"), op("erf")


def relu(x: Expression) -> Expression:
    return maximum(x, 0.0)


def gelu(x: Expression) -> Expression:
    return mul(mul(x, 0.5), add(erf(mul(x, 0.7071067811865476)), 1.0))


def layer_norm(b: Builder, x: View, weight: View, bias: View, line: int = 0) -> View:
    width = x.shape[-1]
    last = len(x.shape) - 1
    assert isinstance(width, int)
    mean = b.reduce("mean", "sum", x, [last], 1 / width, line)
    centred = b.pointwise("sub", sub, x, mean, line=line)
    square = b.pointwise("square", lambda v: mul(v, v), centred, line=line)
    variance = b.reduce("var", "sum", square, [last], 1 / width, line)
    scale = b.pointwise("rsqrt", lambda v: rsqrt(add(v, 1e-5)), variance, line=line)
    return b.pointwise(
        "layer_norm", lambda v, s, w, z: add(mul(mul(v, s), w), z), centred, scale, weight, bias, line=line
    )


def softmax(b: Builder, x: View, line: int = 0) -> View:
    last = len(x.shape) - 1
    top = b.reduce("amax", "max", x, [last], line=line)
    powers = b.pointwise("exp", lambda v, m: exp(sub(v, m)), x, top, line=line)
    total = b.reduce("sum", "sum", powers, [last], line=line)
    return b.pointwise("softmax", div, powers, total, line=line)


def inputs_for(program: LoopProgram, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for name in program.inputs:
        buffer = program.buffers[name]
        shape = [int(n) for n in buffer.shape]  # type: ignore[call-overload]
        if buffer.dtype.is_floating_point:
            made.append(torch.randn(shape, generator=generator).to(buffer.dtype))
        else:
            made.append(torch.randint(0, 4, shape, generator=generator).to(buffer.dtype))
    return made
