"""Reductions and scans of a stage as Triton text.

Takes the emitter's state and a statement; emits lines. Always holds: positions that do not exist contribute the
identity; a reduction of a row that is one block has its result at once, one that is a loop keeps a block of
accumulators and is closed after the loop.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import torch

from fusewright.codegen.analysis import Shape
from fusewright.codegen.device_kernel import Unsupported
from fusewright.codegen.triton.operations import language_type
from fusewright.codegen.triton.values import Value
from fusewright.schedule.plan import Reduce, ScanStep
from fusewright.sizes import expressions as sizes
from fusewright.sizes.estimate import estimate

if TYPE_CHECKING:
    from fusewright.codegen.triton.values import Emitter

_LAST = str((1 << 31) - 1)
_LAST_WIDE = str((1 << 63) - 1)


def streamed(shape: Shape, joined: Container[int]) -> frozenset[str]:
    """Memory of which a kernel that walks its rows in steps reads each element once: it need not take the place of what
    others will read in the cache (means of 8192 rows of 4096 halves on an H100: 27 us instead of 35). joined: places of
    stages that run in the loop of another one."""
    readers: dict[str, int] = {}
    once: set[str] = set()
    for view in (view for place, view in enumerate(shape.views) if place not in joined):
        axes = [axis for axis in (*shape.outer, *view.axes) if estimate(axis.extent) > 1]
        for access in view.accesses:
            memory = shape.aliases.get(access.buffer, access.buffer)
            readers[memory] = readers.get(memory, 0) + 1
            steps = [sizes.coefficient(access.index, axis.symbol) for axis in axes]
            if view.axes and not access.store and not access.bound and 0 not in steps:
                once.add(memory)
    return frozenset(memory for memory in once if readers[memory] == 1)


def _extreme(dtype: torch.dtype, largest: bool) -> str:
    if dtype.is_floating_point:
        return 'float("inf")' if largest else 'float("-inf")'
    limits = torch.iinfo(dtype)
    return str(limits.max if largest else limits.min)


def identity(kind: str, dtype: torch.dtype) -> str:
    """What changes nothing when combined, as text."""
    if kind in ("sum", "xor_sum"):
        return "0"
    if kind == "prod":
        return "1"
    if dtype is torch.bool or kind in ("any", "all"):
        return "True" if kind in ("all", "min") else "False"
    if kind == "logaddexp":
        return 'float("-inf")'
    return _extreme(dtype, kind in ("min", "argmin"))


def _combine(kind: str, dtype: torch.dtype, a: str, b: str) -> str:
    if dtype is torch.bool:
        return f"({a} & {b})" if kind in ("all", "min") else f"({a} | {b})"
    return {
        "sum": f"({a} + {b})", "prod": f"({a} * {b})", "xor_sum": f"({a} ^ {b})",
        "max": f"lib.{_extreme_name('max', dtype)}({a}, {b})",
        "min": f"lib.{_extreme_name('min', dtype)}({a}, {b})", "logaddexp": f"lib.log_add_exp({a}, {b})",
    }[kind]  # fmt: skip


def _extreme_name(kind: str, dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "maximum" if kind == "max" else "minimum"
    return "greater" if kind == "max" else "lesser"


def _collapse(kind: str, dtype: torch.dtype, text: str, type_name: str) -> str:
    """The reduction of a block along its rows, as [X, 1]."""
    if dtype is torch.bool:
        function = "min" if kind in ("all", "min") else "max"
        return f"(tl.{function}({text}.to(tl.int32), 1)[:, None] != 0)"
    if kind == "sum":
        return f"tl.sum({text}, 1)[:, None].to({type_name})"
    if kind == "xor_sum":
        return f"tl.xor_sum({text}, 1)[:, None]"
    if kind == "prod":
        return f"tl.reduce({text}, 1, lib.multiply)[:, None]"
    return f"tl.reduce({text}, 1, lib.{_extreme_name(kind, dtype)})[:, None]"


def _function(kind: str) -> str:
    return "lib.first_maximum" if kind == "argmax" else "lib.first_minimum"


def check_reduction(kind: str, dtype: torch.dtype) -> None:
    """Raises Unsupported."""
    if kind in ("any", "all") and dtype is not torch.bool:
        raise Unsupported(f"{kind} of {dtype}")


def check_scan(dtype: torch.dtype) -> None:
    """Raises Unsupported."""
    if dtype is torch.bool:
        raise Unsupported("a running extreme of bools")


def reduce(e: Emitter, statement: Reduce) -> Value | None:
    """Emits a reduction; its result when it is known at once."""
    dtype, kind = statement.value.dtype, statement.kind
    check_reduction(kind, dtype)
    positional = kind in ("argmax", "argmin")
    if e.row is None:  # all its axes have one point
        if positional:
            return e.bind(f"tl.zeros({e.shape_text(frozenset('x'))}, tl.int64)", frozenset("x"), 0)
        return e.evaluate(statement.value)
    value = e.filled(e.evaluate(statement.value))
    type_name = language_type(dtype)
    neutral = identity(kind, dtype)
    row, row_mask = e.row, e.row_mask
    if positional and dtype is torch.bool:
        value, type_name, neutral = (
            e.bind(f"{value.text}.to(tl.int32)", value.dims, value.level),
            "tl.int32",
            "-1" if kind == "argmax" else "2",
        )
    masked = value
    if row_mask is not None:
        masked = e.bind(
            f"tl.where({row_mask.text}, {value.text}, {neutral}).to({type_name})",
            value.dims,
            e.level_of(value, row_mask),
        )
    position_type, last = ("tl.int64", _LAST_WIDE) if e.wide else ("tl.int32", _LAST)  # of a position along the row
    position = f"tl.broadcast_to({row.text}, {e.shape_text(frozenset('xr'))})"
    if e.level == 0:
        if positional:
            name = f"position{e.count}"
            e.count += 1
            e.lines[0].append(f"_, {name} = tl.reduce(({masked.text}, {position}), 1, {_function(kind)})")
            return e.bind(f"{name}[:, None].to(tl.int64)", frozenset("x"), 0)
        return e.bind(_collapse(kind, dtype, masked.text, type_name), frozenset("x"), 0)
    name = f"{statement.local}_sum" if kind == "sum" else f"{statement.local}_so_far"
    shape = e.shape_text(frozenset("xr"))
    e.lines[0].append(f"{name} = tl.full({shape}, {neutral}, {type_name})")
    if positional:
        e.lines[0].append(f"{name}_position = tl.full({shape}, {last}, {position_type})")
        where = position
        if row_mask is not None:
            where = f"tl.where({row_mask.text}, {position}, {last})"
        e.lines[1].append(
            f"{name}, {name}_position = {_function(kind)}({name}, {name}_position, {masked.text}, {where})"
        )
    else:
        e.lines[1].append(f"{name} = {_combine(kind, dtype, name, masked.text)}")
    e.locals[f"{statement.local} so far"] = Value(name, frozenset("xr"), 0)
    return None


def close(e: Emitter, statement: Reduce) -> Value:
    """The result of a reduction whose loop has ended."""
    name = e.locals.pop(f"{statement.local} so far").text
    if statement.kind in ("argmax", "argmin"):
        position = f"position{e.count}"
        e.count += 1
        e.lines[0].append(f"_, {position} = tl.reduce(({name}, {name}_position), 1, {_function(statement.kind)})")
        return e.bind(f"{position}[:, None].to(tl.int64)", frozenset("x"), 0)
    return e.bind(
        _collapse(statement.kind, statement.value.dtype, name, language_type(statement.value.dtype)), frozenset("x"), 0
    )


_SCANS = {"sum": "lib.add", "prod": "lib.multiply", "logaddexp": "lib.log_add_exp"}


def scan(e: Emitter, statement: ScanStep) -> None:
    """Emits a running accumulation; its locals are the value and, for extremes, its last position."""
    dtype, kind = statement.value.dtype, statement.kind
    full = frozenset("xr")
    if e.row is None:
        e.locals[statement.local] = e.evaluate(statement.value)
        if statement.position is not None:
            e.locals[statement.position] = e.bind(
                f"tl.zeros({e.shape_text(frozenset('x'))}, tl.int64)", frozenset("x"), 0
            )
        return
    check_scan(dtype)
    value = e.filled(e.evaluate(statement.value))
    out = e.lines[e.level]
    name = f"{statement.local}_running"
    looped = e.level == 1
    row = e.row
    block = e.row_block()
    last = "base + R - 1" if looped else ""
    neutral = identity(kind, dtype)
    column = e.shape_text(frozenset("x"))
    type_name = language_type(dtype)
    if statement.position is None:
        function = _SCANS.get(kind) or f"lib.{_extreme_name(kind, dtype)}"
        out.append(f"{name} = tl.associative_scan({value.text}, 1, {function})")
        if looped:
            e.lines[0].append(f"{name}_before = tl.full({column}, {neutral}, {type_name})")
            out.append(f"{name} = {function}({name}_before, {name})")
            out.append(f"{name}_before = tl.sum(tl.where({row.text} == {last}, {name}, 0), 1)[:, None].to({type_name})")
        e.locals[statement.local] = Value(name, full, e.level)
        return
    function = "lib.last_maximum" if kind == "max" else "lib.last_minimum"
    where = f"{statement.position}_running"
    position = f"tl.broadcast_to({row.text}.to(tl.int64), [X, {block}])"
    out.append(f"{name}, {where} = tl.associative_scan(({value.text}, {position}), 1, {function})")
    if looped:
        e.lines[0].append(f"{name}_before = tl.full({column}, {neutral}, {type_name})")
        e.lines[0].append(f"{where}_before = tl.full({column}, 0, tl.int64)")
        before = f"tl.broadcast_to({name}_before, [X, R]), tl.broadcast_to({where}_before, [X, R])"
        out.append(f"{name}, {where} = {function}({before}, {name}, {where})")
        out.append(f"{name}_before = tl.sum(tl.where({row.text} == {last}, {name}, 0), 1)[:, None].to({type_name})")
        out.append(f"{where}_before = tl.sum(tl.where({row.text} == {last}, {where}, 0), 1)[:, None]")
    e.locals[statement.local] = Value(name, full, e.level)
    e.locals[statement.position] = Value(where, full, e.level)
