"""Kernels made by hand, each of one shape of work, against eager."""

from __future__ import annotations

import math

import pytest
import torch

from fusewright.loops.ir import (
    Axis,
    Expression,
    Store,
    apply,
    checked_index,
    constant,
    index_value,
    load,
    local_value,
    masked,
)
from fusewright.schedule.plan import Define, Kernel, Reduce, ScanStep, Scratch, Stage
from fusewright.sizes.expressions import loop_symbol, symbol
from tests.codegen.llvm.harness import Guarded, kernel_of, run_kernel

F32, F64, I64, BF16, BOOL = torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool


def f(op: str, *args: Expression) -> Expression:
    return apply(op, *args, dtype=args[-1].dtype)


def c(value: float) -> Expression:
    return constant(value, F32)


def check(
    kernel: Kernel,
    tensors: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    status: int = 0,
    tolerance: float = 1e-5,
) -> None:
    """Runs over memory that ends at unreadable pages."""
    guard = Guarded()
    placed = {name: guard.copy(tensor) for name, tensor in tensors.items()}
    assert run_kernel(kernel, placed, parts=3) == status
    for name, tensor in expected.items():
        torch.testing.assert_close(placed[name], tensor, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("target", [torch.int8, torch.uint8, torch.int16, BF16, torch.float16, BOOL, torch.int32])
@pytest.mark.parametrize("source", [F32, F64, torch.int32, I64])
@pytest.mark.parametrize("count", [5, 9, 17, 33, 1025, 3073])
def test_narrowing_writes_no_byte_beyond_the_end(source: torch.dtype, target: torch.dtype, count: int) -> None:
    """LLVM stored four bytes where one lane of int16 was left."""
    i = loop_symbol("o0", count)
    kernel = kernel_of("flat", [Axis(i, count)], [Stage((), (Store("z", i, apply("cast", load("x", i, source), dtype=target)),))], {"x": source, "z": target}, "z")  # fmt: skip
    x = torch.arange(count).to(source)
    check(kernel, {"x": x, "z": torch.zeros(count, dtype=target)}, {"z": x.to(target)})


@pytest.mark.parametrize("dtype", [F32, F64, BF16, torch.float16, torch.int8, torch.int32, I64])
@pytest.mark.parametrize("count", [1, 3, 15, 16, 17, 31, 33, 64, 100, 1024, 1025, 2500])
def test_flat_pointwise(dtype: torch.dtype, count: int) -> None:
    i = loop_symbol("o0", count)
    compute = F32 if dtype in (BF16, torch.float16) else dtype
    x, y = (
        apply("cast", load(name, i, dtype), dtype=compute) if compute != dtype else load(name, i, dtype)
        for name in "xy"
    )
    value = f("add", f("mul", x, y), x)
    stored = apply("cast", value, dtype=dtype) if compute != dtype else value
    kernel = kernel_of(
        "flat", [Axis(i, count)], [Stage((), (Store("z", i, stored),))], dict.fromkeys("xyz", dtype), "z"
    )
    a, b = torch.randint(-5, 6, (count,)).to(dtype), torch.randint(-5, 6, (count,)).to(dtype)
    check(kernel, {"x": a, "y": b, "z": torch.zeros(count, dtype=dtype)}, {"z": a * b + a})


@pytest.mark.parametrize("columns", [1, 5, 16, 77, 128, 768])
def test_layer_norm(columns: int) -> None:
    rows = 7
    i, j = loop_symbol("o0", rows), loop_symbol("i0", columns)
    x = load("x", i * columns + j, F32)
    centred = f("sub", x, f("div", local_value("total", F32), c(columns)))
    scale = f("rsqrt", f("add", f("div", local_value("squares", F32), c(columns)), c(1e-5)))
    value = f("add", f("mul", f("mul", centred, scale), load("w", j, F32)), load("b", j, F32))
    stages = [
        Stage((Axis(j, columns),), (Reduce("total", "sum", x),)),
        Stage((Axis(j, columns),), (Reduce("squares", "sum", f("mul", centred, centred)),)),
        Stage((Axis(j, columns),), (Store("z", i * columns + j, value),)),
    ]
    kernel = kernel_of("layer_norm", [Axis(i, rows)], stages, dict.fromkeys("xwbz", F32), "z")
    a, w, b = torch.randn(rows, columns), torch.randn(columns), torch.randn(columns)
    expected = torch.nn.functional.layer_norm(a, (columns,), w, b)
    check(kernel, {"x": a, "w": w, "b": b, "z": torch.zeros_like(a)}, {"z": expected})


@pytest.mark.parametrize("dtype", [F32, I64])
@pytest.mark.parametrize("columns", [1000, 1024, 2048, 2049, 4000, 4173])
def test_sums_over_columns(dtype: torch.dtype, columns: int) -> None:
    rows = 9
    j, i = loop_symbol("o0", columns), loop_symbol("i0", rows)
    stages = [
        Stage((Axis(i, rows),), (Reduce("total", "sum", load("x", i * columns + j, dtype)),)),
        Stage((), (Store("z", j, local_value("total", dtype)),)),
    ]
    kernel = kernel_of("column_sum", [Axis(j, columns)], stages, dict.fromkeys("xz", dtype), "z")
    a = (torch.randn(rows, columns) * 5).to(dtype)
    if dtype is F32:
        a[3, -1], a[4, 0] = math.nan, math.inf
    check(kernel, {"x": a, "z": torch.zeros(columns, dtype=dtype)}, {"z": a.sum(0)})


def softmax_stages(x: Expression, place: object, axis: Axis) -> list[Stage]:
    shifted = f("exp", f("sub", x, local_value("top", F32)))
    return [
        Stage((axis,), (Reduce("top", "max", x),)),
        Stage((axis,), (Reduce("total", "sum", shifted),)),
        Stage((axis,), (Store("z", place, f("div", shifted, local_value("total", F32))),)),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("columns", [3, 16, 100, 128])
def test_softmax_of_rows(columns: int) -> None:
    i, j = loop_symbol("o0", 9), loop_symbol("i0", columns)
    x = load("x", i * columns + j, F32)
    kernel = kernel_of(
        "softmax", [Axis(i, 9)], softmax_stages(x, i * columns + j, Axis(j, columns)), dict.fromkeys("xz", F32), "z"
    )
    a = torch.randn(9, columns) * 5
    a[2, 0] = math.nan
    a[3, -1] = math.inf
    check(kernel, {"x": a, "z": torch.zeros_like(a)}, {"z": torch.softmax(a, -1)})


@pytest.mark.parametrize("columns", [1, 16, 64, 77, 200])
def test_softmax_of_columns_runs_lanes_over_the_outer_axis(columns: int) -> None:
    rows = 12
    i, j = loop_symbol("i0", rows), loop_symbol("o0", columns)
    x = load("x", i * columns + j, F32)
    kernel = kernel_of(
        "softmax", [Axis(j, columns)], softmax_stages(x, i * columns + j, Axis(i, rows)), dict.fromkeys("xz", F32), "z"
    )
    a = torch.randn(rows, columns)
    check(kernel, {"x": a, "z": torch.zeros_like(a)}, {"z": torch.softmax(a, 0)})


KINDS = {
    "sum": lambda t: t.sum(1), "prod": lambda t: t.prod(1), "max": lambda t: t.amax(1), "min": lambda t: t.amin(1),
    "argmax": lambda t: t.argmax(1), "argmin": lambda t: t.argmin(1),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [F32, F64, torch.int32, I64])
@pytest.mark.parametrize("columns", [1, 16, 70, 130])
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_reductions(kind: str, dtype: torch.dtype, columns: int, along: str) -> None:
    rows = 20
    i, j = loop_symbol("o0", rows), loop_symbol("i0", columns)
    place = i * columns + j if along == "rows" else j * rows + i
    result = I64 if kind.startswith("arg") else dtype
    stages = [
        Stage((Axis(j, columns),), (Reduce("r", kind, load("x", place, dtype)),)),  # type: ignore[arg-type]
        Stage((), (Store("z", i, local_value("r", result)),)),
    ]
    kernel = kernel_of("reduce", [Axis(i, rows)], stages, {"x": dtype, "z": result}, "z")
    a = torch.randint(-3, 4, (rows, columns)).to(dtype)
    if dtype.is_floating_point:
        a[1, columns // 2] = math.nan
        a[2, columns // 3 :] = math.nan
        a[3] = -math.inf
        a[4] = math.inf
        a[5, -1] = -math.inf
    stored = a if along == "rows" else a.t().contiguous()
    check(kernel, {"x": stored, "z": torch.zeros(rows, dtype=result)}, {"z": KINDS[kind](a).to(result)})


@pytest.mark.parametrize(("kind", "eager"), [("any", torch.any), ("all", torch.all)])
@pytest.mark.parametrize("columns", [5, 64, 150])
def test_boolean_reductions(kind: str, eager: object, columns: int) -> None:
    i, j = loop_symbol("o0", 11), loop_symbol("i0", columns)
    stages = [
        Stage((Axis(j, columns),), (Reduce("r", kind, load("x", i * columns + j, BOOL)),)),  # type: ignore[arg-type]
        Stage((), (Store("z", i, local_value("r", BOOL)),)),
    ]
    kernel = kernel_of("reduce", [Axis(i, 11)], stages, {"x": BOOL, "z": BOOL}, "z")
    a = torch.rand(11, columns) < (0.02 if kind == "any" else 0.98)
    check(kernel, {"x": a, "z": torch.zeros(11, dtype=BOOL)}, {"z": eager(a, 1)})  # type: ignore[operator]


def test_full_sum_over_two_axes() -> None:
    i, j = loop_symbol("i0", 50), loop_symbol("i1", 33)
    stages = [
        Stage(
            (Axis(i, 50), Axis(j, 33)), (Reduce("r", "sum", load("x", i * 40 + j, F32)),)
        ),  # rows with a gap: not one axis
        Stage((), (Store("z", 0, local_value("r", F32)),)),
    ]
    kernel = kernel_of("total", [], stages, {"x": F32, "z": F32}, "z")
    a = torch.randn(50, 40)
    check(kernel, {"x": a, "z": torch.zeros(1)}, {"z": a[:, :33].sum().reshape(1)}, tolerance=1e-4)


SCANS = {
    "sum": lambda t: torch.cumsum(t, 1), "prod": lambda t: torch.cumprod(t, 1), "max": lambda t: torch.cummax(t, 1).values,
    "min": lambda t: torch.cummin(t, 1).values, "logaddexp": lambda t: torch.logcumsumexp(t, 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCANS)
@pytest.mark.parametrize(("rows", "columns"), [(3, 17), (40, 9)])
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_scans(kind: str, rows: int, columns: int, along: str) -> None:
    i, j = loop_symbol("o0", rows), loop_symbol("i0", columns)
    place = i * columns + j if along == "rows" else j * rows + i
    positions = kind in ("max", "min")
    statements: list[object] = [
        ScanStep("r", kind, load("x", place, F32), "at" if positions else None),  # type: ignore[arg-type]
        Store("z", place, local_value("r", F32)),
    ]
    buffers = {"x": F32, "z": F32}
    if positions:
        statements.append(Store("p", place, local_value("at", I64)))
        buffers["p"] = I64
    kernel = kernel_of(
        "scan", [Axis(i, rows)], [Stage((Axis(j, columns),), tuple(statements))], buffers, [*buffers][1:]
    )  # type: ignore[arg-type]
    a = torch.randn(rows, columns).round(decimals=1)
    a[0, 3], a[1, 2], a[2, 0] = math.nan, math.inf, -math.inf

    def stored(t: torch.Tensor) -> torch.Tensor:
        return t if along == "rows" else t.t().contiguous()

    tensors = {"x": stored(a), "z": stored(torch.zeros_like(a))}
    expected = {"z": stored(SCANS[kind](a))}
    if positions:
        tensors["p"] = stored(torch.zeros_like(a, dtype=I64))
        expected["p"] = stored(getattr(torch, f"cum{kind}")(a, 1).indices)
    check(kernel, tensors, expected)


@pytest.mark.parametrize("dtype", [F32, F64, BF16, I64, BOOL])
@pytest.mark.parametrize(
    ("rows", "columns"), [(64, 64), (65, 63), (16, 200), (200, 17), (3, 5), (1, 70), (2049, 2065), (2304, 2048)]
)
def test_transpose(dtype: torch.dtype, rows: int, columns: int) -> None:
    i, j = loop_symbol("o0", rows), loop_symbol("o1", columns)
    x, y = load("x", j * rows + i, dtype), load("y", i * columns + j, dtype)
    value = apply("bitwise_or", x, y, dtype=dtype) if dtype is BOOL else x if dtype is BF16 else f("add", x, y)
    axes = [Axis(i, rows), Axis(j, columns)]
    kernel = kernel_of(
        "transpose", axes, [Stage((), (Store("z", i * columns + j, value),))], dict.fromkeys("xyz", dtype), "z"
    )
    a, b = (torch.randn(columns, rows) * 3).to(dtype), (torch.randn(rows, columns) * 3).to(dtype)
    expected = (a.t() | b) if dtype is BOOL else a.t().contiguous() if dtype is BF16 else a.t() + b
    check(kernel, {"x": a, "y": b, "z": torch.zeros(rows, columns, dtype=dtype)}, {"z": expected})


@pytest.mark.parametrize("width", [1, 6, 16, 40])
def test_embedding_and_an_index_out_of_range(width: int) -> None:
    count, entries = 21, 10
    i, j, t = loop_symbol("o0", count), loop_symbol("o1", width), symbol("t0", None)
    row = checked_index(load("index", i, I64), entries)
    value = f("mul", load("table", t * width + j, F32, ((t, row),)), c(2.0))
    axes = [Axis(i, count), Axis(j, width)]
    buffers = {"index": I64, "table": F32, "z": F32}
    kernel = kernel_of("embedding", axes, [Stage((), (Store("z", i * width + j, value),))], buffers, "z")
    index, table = torch.randint(-entries, entries, (count,)), torch.randn(entries, width)
    zeros = torch.zeros(count, width)
    check(kernel, {"index": index, "table": table, "z": zeros}, {"z": table[index] * 2})
    index[count - 1] = entries
    check(kernel, {"index": index, "table": table, "z": zeros}, {}, status=1)
    index[count - 1] = -entries - 1
    check(kernel, {"index": index, "table": table, "z": zeros}, {}, status=1)


def test_gather_from_an_empty_table_fails_without_touching_it() -> None:
    i, t, n = loop_symbol("o0", 5), symbol("t0", None), symbol("s0", 0)
    value = load("table", t, F32, ((t, checked_index(load("index", i, I64), n)),))
    kernel = kernel_of(
        "gather",
        [Axis(i, 5)],
        [Stage((), (Store("z", i, value),))],
        {"index": I64, "table": F32, "z": F32},
        "z",
        sizes=(n,),
    )
    tensors = {"index": torch.zeros(5, dtype=I64), "table": torch.empty(0), "z": torch.zeros(5)}
    assert run_kernel(kernel, tensors, {n: 0}) == 1


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("count", [2, 21])
def test_in_a_loop_that_is_empty_no_place_to_write_is_checked(count: int, known: bool, within: bool) -> None:
    """The check does not depend on the inner loop, so that it is made outside of it. within: a stage's own loop."""
    n = symbol("s0", 0)
    i, j, t = loop_symbol("o0", count), loop_symbol("o1", n), symbol("t0", None)
    row = checked_index(index_value(0) if known else load("index", i, I64), n)
    store = Store("z", t * count + i, c(2.0), "write", ((t, row),))
    axes = [Axis(i, count), Axis(j, n)]
    buffers = {"index": I64, "z": F32}
    stage = Stage((axes.pop(),) if within else (), (store,))
    kernel = kernel_of("loop", axes, [stage], buffers, "z", sizes=(n,))
    for index, size, status in ((7, 0, 0), (0, 0, 0), (0, 8, 0), (7, 8, 0), (8, 8, 0 if known else 1)):
        tensors = {"index": torch.full((count,), index), "z": torch.zeros(size, count)}
        assert run_kernel(kernel, tensors, {n: size}) == status


@pytest.mark.parametrize("width", [1, 16, 30])
@pytest.mark.parametrize("mode", ["add", "max", "min"])
def test_scatter_with_colliding_indices(width: int, mode: str) -> None:
    count, entries = 50, 4
    i, j, t = loop_symbol("o0", count), loop_symbol("o1", width), symbol("t0", None)
    row = checked_index(load("index", i, I64), entries)
    store = Store("z", t * width + j, load("x", i * width + j, F32), mode, ((t, row),))  # type: ignore[arg-type]
    kernel = kernel_of(
        "scatter", [Axis(i, count), Axis(j, width)], [Stage((), (store,))], {"index": I64, "x": F32, "z": F32}, "z"
    )
    index, x, z = torch.randint(0, entries, (count,)), torch.randn(count, width), torch.randn(entries, width)
    how = {"add": "sum", "max": "amax", "min": "amin"}[mode]
    expected = z.scatter_reduce(0, index[:, None].expand(count, width), x, how)
    check(kernel, {"index": index, "x": x, "z": z}, {"z": expected})


def test_the_last_of_colliding_writes_wins_as_in_a_loop() -> None:
    i, t = loop_symbol("o0", 100), symbol("t0", None)
    store = Store("z", t, load("x", i, F32), "write", ((t, load("index", i, I64)),))
    kernel = kernel_of("put", [Axis(i, 100)], [Stage((), (store,))], {"index": I64, "x": F32, "z": F32}, "z")
    index, x, expected = torch.randint(0, 7, (100,)), torch.randn(100), torch.zeros(7)
    for at, value in zip(index.tolist(), x.tolist()):
        expected[at] = value
    check(kernel, {"index": index, "x": x, "z": torch.zeros(7)}, {"z": expected})


@pytest.mark.parametrize("columns", [5, 16, 50])
def test_padding_does_not_touch_what_is_outside(columns: int) -> None:
    """z[i, j] = x[i-1, j-2] inside, else 7."""
    rows, high, wide = 4, 6, columns + 4
    i, j = loop_symbol("o0", high), loop_symbol("o1", wide)
    at_i, at_j = index_value(i - 1), index_value(j - 2)
    inside = constant(True, BOOL)
    for value, extent in ((at_i, rows), (at_j, columns)):
        for op, limit in (("ge", 0), ("lt", extent)):
            inside = apply("logical_and", inside, apply(op, value, constant(limit, I64), dtype=BOOL), dtype=BOOL)
    value = masked(inside, load("x", (i - 1) * columns + j - 2, F32), c(7.0))
    kernel = kernel_of(
        "pad",
        [Axis(i, high), Axis(j, wide)],
        [Stage((), (Store("z", i * wide + j, value),))],
        {"x": F32, "z": F32},
        "z",
    )
    a = torch.randn(rows, columns)
    expected = torch.nn.functional.pad(a, (2, 2, 1, 1), value=7.0)
    check(kernel, {"x": a, "z": torch.zeros(high, wide)}, {"z": expected})


@pytest.mark.parametrize("count", [5, 16, 40])
def test_flip_and_strides(count: int) -> None:
    i = loop_symbol("o0", count)
    value = f("add", load("x", count - 1 - i, F32), load("y", 3 * i + 1, F32))
    stores = (Store("z", count - 1 - i, value), Store("w", 2 * i, value))
    kernel = kernel_of("flip", [Axis(i, count)], [Stage((), stores)], dict.fromkeys("xyzw", F32), "zw")
    a, b = torch.randn(count), torch.randn(3 * count - 1)
    expected = a.flip(0) + b[1::3]
    spread = torch.zeros(2 * count - 1)
    spread[::2] = expected
    check(
        kernel,
        {"x": a, "y": b, "z": torch.zeros(count), "w": torch.zeros(2 * count - 1)},
        {"z": expected.flip(0), "w": spread},
    )


@pytest.mark.parametrize(("heads", "width"), [(4, 32), (3, 16), (5, 6), (2, 7)])
def test_indices_with_division(heads: int, width: int) -> None:
    """Reading (rows, heads*width) as (heads, rows, width) through i // k and i % k."""
    rows, columns = 6, heads * width
    i, j = loop_symbol("o0", rows), loop_symbol("o1", columns)
    value = load("x", (j // width) * (rows * width) + i * width + j % width, F32)
    axes = [Axis(i, rows), Axis(j, columns)]
    kernel = kernel_of("heads", axes, [Stage((), (Store("z", i * columns + j, value),))], {"x": F32, "z": F32}, "z")
    a = torch.randn(heads, rows, width)
    check(kernel, {"x": a, "z": torch.zeros(rows, columns)}, {"z": a.permute(1, 0, 2).reshape(rows, columns)})


def test_division_that_does_not_divide_the_extent() -> None:
    i = loop_symbol("o0", 100)
    value = f("add", load("x", i // 7, F32), load("y", (i + 3) % 11, F32))
    kernel = kernel_of("upsample", [Axis(i, 100)], [Stage((), (Store("z", i, value),))], dict.fromkeys("xyz", F32), "z")
    a, b, at = torch.randn(15), torch.randn(11), torch.arange(100)
    check(kernel, {"x": a, "y": b, "z": torch.zeros(100)}, {"z": a[at // 7] + b[(at + 3) % 11]})


@pytest.mark.parametrize("size", [6, 40_000])
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_scratch_on_the_stack_and_from_the_heap(size: int, along: str) -> None:
    """A row's values kept between stages: z = exp(x) / sum(exp(x)), the exponentials stored once."""
    rows = 17
    i, j = loop_symbol("o0", rows), loop_symbol("i0", size)
    place = i * size + j if along == "rows" else j * rows + i
    stages = [
        Stage(
            (Axis(j, size),), (Define("e", f("exp", load("x", place, F32))), Store("kept", j, local_value("e", F32)))
        ),
        Stage((Axis(j, size),), (Reduce("total", "sum", load("kept", j, F32)),)),
        Stage((Axis(j, size),), (Store("z", place, f("div", load("kept", j, F32), local_value("total", F32))),)),
    ]
    kernel = kernel_of(
        "kept", [Axis(i, rows)], stages, dict.fromkeys("xz", F32), "z", scratch=(Scratch("kept", F32, size),)
    )
    a = torch.randn(rows, size)
    expected = torch.softmax(a, 1)

    def stored(t: torch.Tensor) -> torch.Tensor:
        return t if along == "rows" else t.t().contiguous()

    check(kernel, {"x": stored(a), "z": stored(torch.zeros_like(a))}, {"z": stored(expected)})


def test_in_place_updates_read_before_they_write() -> None:
    i = loop_symbol("o0", 100)
    x = load("x", i, F32)
    stores = (Store("z", i, f("mul", x, c(3.0))), Store("w", i, f("add", x, c(1.0))))
    kernel = kernel_of(
        "update", [Axis(i, 100)], [Stage((), stores)], dict.fromkeys("xzw", F32), "zw", inplace=(("x", "z"),)
    )
    a = torch.randn(100)
    shared, w = a.clone(), torch.zeros(100)
    assert run_kernel(kernel, {"x": shared, "z": shared, "w": w}) == 0
    torch.testing.assert_close(shared, a * 3)
    torch.testing.assert_close(w, a + 1)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 16), (4, 37), (7, 200), (3, 0)])
def test_symbolic_sizes(rows: int, columns: int) -> None:
    m, n = symbol("s0", 0), symbol("s1", 0)
    i, j = loop_symbol("o0", m), loop_symbol("i0", n)
    x = load("x", i * n + j, F32)
    stages = [
        Stage((Axis(j, n),), (Reduce("total", "sum", x),)),
        Stage((Axis(j, n),), (Store("z", i * n + j, f("sub", x, local_value("total", F32))),)),
        Stage((), (Store("t", i, local_value("total", F32)),)),
    ]
    kernel = kernel_of("rows", [Axis(i, m)], stages, dict.fromkeys("xzt", F32), "zt", sizes=(m, n))
    a = torch.randn(rows, columns)
    z, t = torch.zeros_like(a), torch.full((rows,), 9.0)
    assert run_kernel(kernel, {"x": a, "z": z, "t": t}, {m: rows, n: columns}) == 0
    torch.testing.assert_close(t, a.sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(z, a - a.sum(1, keepdim=True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 16), (33, 37), (64, 200)])
@pytest.mark.parametrize("turned", [False, True])
def test_symbolic_pointwise(rows: int, columns: int, turned: bool) -> None:
    m, n = symbol("s0", 1), symbol("s1", 1)
    i, j = loop_symbol("o0", m), loop_symbol("o1", n)
    value = f("add", load("x", j * m + i if turned else i * n + j, F32), load("b", j, F32))
    kernel = kernel_of(
        "bias",
        [Axis(i, m), Axis(j, n)],
        [Stage((), (Store("z", i * n + j, value),))],
        dict.fromkeys("xbz", F32),
        "z",
        sizes=(m, n),
    )
    a, b = torch.randn(rows, columns), torch.randn(columns)
    z = torch.zeros_like(a)
    assert run_kernel(kernel, {"x": a.t().contiguous() if turned else a, "b": b, "z": z}, {m: rows, n: columns}) == 0
    torch.testing.assert_close(z, a + b)


def test_no_work_is_no_access() -> None:
    m = symbol("s0", 0)
    i = loop_symbol("o0", m)
    kernel = kernel_of(
        "empty",
        [Axis(i, m)],
        [Stage((), (Store("z", i, load("x", i, F32)),))],
        dict.fromkeys("xz", F32),
        "z",
        sizes=(m,),
    )
    assert run_kernel(kernel, {"x": torch.empty(0), "z": torch.empty(0)}, {m: 0}) == 0
