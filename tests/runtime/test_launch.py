"""The native call plan: kernels, operators, memory, outputs, errors, threads."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from fusewright import _native
from fusewright.base.errors import RuntimeFallback
from fusewright.base.signals import memory_was_short
from fusewright.loops.ir import BufferRef, Output
from fusewright.runtime import launch, torch_c
from fusewright.sizes.expressions import minimum, symbol
from tests.runtime.plans import SIGNATURE, Schedule, elementwise, whole

aten = torch.ops.aten
double = elementwise(lambda a: a * 2)
plus = elementwise(lambda a, b: a + b)


@pytest.fixture(params=["measured layout and symbols", "Python entry points"])
def any_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test twice: with what this PyTorch offers, and as if it had neither the symbols nor a known layout."""
    if request.param == "Python entry points":
        torch_c.configure(without=("wrap", "wrap_move", "bump_version", "error_text"), handle_offset=-1)
    yield
    torch_c.configure()


def test_kernel_writes_a_fresh_output(any_path: None) -> None:
    s = Schedule()
    x, y = s.input("x", 4, 4), s.input("y", 4, 4)
    s.run("add", plus, [x, y, s.output("o", 4, 4)], 16)
    plan = s.load(single=True)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    first, second = plan(a, b), plan(b, b)
    assert torch.equal(first, a + b) and torch.equal(second, b + b)
    assert first.data_ptr() != second.data_ptr() and type(first) is torch.Tensor and not first.requires_grad


def test_outputs_are_freed_with_their_last_reference(any_path: None) -> None:
    s = Schedule()
    s.run("double", double, [s.input("x", 8), s.output("o", 8)], 8)
    plan = s.load()
    x = torch.randn(8)
    gone = weakref.ref(plan(x)[0])
    gc.collect()
    assert gone() is None
    del plan
    assert torch.equal(x, x.clone())


def test_input_that_is_a_view_is_read_from_its_own_start() -> None:
    s = Schedule()
    s.run("double", double, [s.input("x", 4), s.output("o", 4)], 4)
    base = torch.arange(10.0)
    assert s.load(single=True)(base[3:7]).tolist() == [6, 8, 10, 12]


def test_temporaries_share_the_arena_and_windows_follow_it(any_path: None) -> None:
    s = Schedule()
    x, w = s.input("x", 4, 8), s.input("w", 8, 3)
    t, r = s.temporary("t", 4, 8), s.temporary("r", 4, 3)
    s.run("k0", double, [x, t], 32)
    s.call(aten.mm.default, t, w, out=[r])
    s.run("k1", double, [r, s.output("o", 4, 3)], 12)
    plan = s.load(single=True)
    a, b = torch.randn(4, 8), torch.randn(8, 3)
    for _ in range(2):
        torch.testing.assert_close(plan(a, b), (a * 2) @ b * 2)
        held = _native.memory_held()
        plan(a, b)
        assert _native.memory_held() == held > 0
        assert _native.release_memory() == held
    assert _native.memory_held() == 0


def test_a_call_over_the_memory_limit_keeps_nothing() -> None:
    s = Schedule()
    x, t = s.input("x", 64), s.temporary("t", 64)
    s.run("k0", double, [x, t], 64)
    s.run("k1", double, [t, s.output("o", 64)], 64)
    plan = launch.load(s.build(single=True), s.addresses(), arena_limit=16)
    _native.release_memory()
    assert torch.equal(plan(torch.ones(64)), torch.full((64,), 4.0))
    assert _native.memory_held() == 0


def test_large_arena() -> None:
    s = Schedule()
    x, t = s.input("x", 4), s.temporary("t", 1 << 20)
    s.run("k0", double, [x, t], 4)
    s.run("k1", double, [t, s.output("o", 4)], 4)
    assert s.load(single=True)(torch.ones(4)).tolist() == [4, 4, 4, 4]
    assert _native.memory_held() >= 4 << 20
    _native.release_memory()


def test_symbolic_sizes_are_computed_at_every_call(any_path: None) -> None:
    n, m = symbol("n"), symbol("m", None)
    s = Schedule()
    x = s.input("x", n, 2)
    s.plan.size_symbols[n] = (0, 0)
    s.integer(m)
    t = s.temporary("t", n * 2)
    s.run("k0", double, [x, t], n * 2)
    o = s.output("o", n, 2)
    s.run("k1", double, [t, o], n * 2)
    s.plan.outputs += (
        Output("size", value=n * 3 + m // 2 - m % 3),
        Output("size", value=minimum(n, m)),
        Output("value", value=None),
    )
    plan = s.load()
    for rows, other in ((3, 7), (3, 7), (0, -5), (9, -5), (1, 2)):
        a = torch.randn(rows, 2)
        result = plan(a, other)
        assert torch.equal(result[0], a * 4)
        assert result[1:] == (rows * 3 + other // 2 - other % 3, min(rows, other), None)


def test_symbolic_window_is_remade_when_a_size_changes() -> None:
    n = symbol("n")
    s = Schedule()
    x, w = s.input("x", n, 4), s.input("w", 4, 2)
    s.plan.size_symbols[n] = (0, 0)
    t = s.temporary("t", n, 4)
    s.run("k0", double, [x, t], n * 4)
    s.call(aten.mm.default, t, w, out=[s.output("o", n, 2)])
    plan = s.load(single=True)
    weight = torch.randn(4, 2)
    for rows in (5, 2, 7, 7, 1):
        a = torch.randn(rows, 4)
        torch.testing.assert_close(plan(a, weight), a * 2 @ weight)


# --- operators ---------------------------------------------------------------------------------------------------------------


def test_strided_window_on_an_input(any_path: None) -> None:
    s = Schedule()
    x = s.input("x", 4, 8)
    s.input("w", 3, 8)
    transposed = BufferRef("w", (8, 3), (1, 8), 0, torch.float32)
    s.call(aten.mm.default, x, transposed, out=[s.output("o", 4, 3)])
    half = BufferRef("x", (2, 8), (8, 1), 16, torch.float32)
    s.call(aten.mm.default, half, transposed, out=[s.output("h", 2, 3)])
    plan = s.load()
    for _ in range(3):
        a, b = torch.randn(4, 8), torch.randn(3, 8)
        o, h = plan(a, b)
        torch.testing.assert_close(o, a @ b.T)
        torch.testing.assert_close(h, a[2:] @ b.T)


def test_out_placement_keeps_the_planned_strides() -> None:
    s = Schedule()
    x, w = s.input("x", 4, 8), s.input("w", 8, 3)
    s.call(aten.mm.default, x, w, out=[s.output("o", 4, 3, stride=(1, 4))])
    a, b = torch.randn(4, 8), torch.randn(8, 3)
    result = s.load(single=True)(a, b)
    torch.testing.assert_close(result, a @ b)
    assert result.stride() == (1, 4)


def test_returned_strides_are_made_what_the_plan_assumed(any_path: None) -> None:
    s = Schedule()
    s.call(aten.cumsum.default, s.input("x", 4, 3), 0, out=[s.output("o", 4, 3, stride=(1, 4))])
    a = torch.randn(4, 3)
    result = s.load(single=True)(a)
    assert torch.equal(result, a.cumsum(0)) and result.stride() == (1, 4)


def test_another_shape_than_assumed_is_a_fallback() -> None:
    s = Schedule()
    s.call(aten.nonzero.default, s.input("x", 4), out=[s.output("o", 2, 1, dtype=torch.int64)])
    plan = s.load(single=True)
    assert plan(torch.tensor([0.0, 1, 0, 2])).tolist() == [[1], [3]]
    with pytest.raises(RuntimeFallback, match="the graph says"):
        plan(torch.ones(4))


def test_every_kind_of_argument_through_python(any_path: None) -> None:
    s = Schedule()
    x, index = s.input("x", 4, 3), s.input("i", 2, dtype=torch.int64)
    t = s.temporary("t", 4, 3)
    s.run("k", double, [x, t], 12)
    s.call(aten.index.Tensor, t, (whole(index), None), out=[s.output("picked", 2, 3)])
    s.call(
        aten._to_copy.default,
        t,
        dtype=torch.float64,
        memory_format=None,
        out=[s.output("wide", 4, 3, dtype=torch.float64)],
    )
    s.call(
        aten.full.default,
        (2, 2),
        7.5,
        dtype=torch.float32,
        device=torch.device("cpu"),
        pin_memory=False,
        out=[s.output("full", 2, 2)],
    )
    s.call(aten.split_with_sizes_copy.default, t, (1, 3), out=[None, s.output("tail", 3, 3)])
    s.call(aten.stack.default, (whole(x), whole(t)), -1, out=[s.output("stacked", 4, 3, 2)])
    s.call(aten.var_mean.correction, t, (0,), correction=0, out=[s.output("var", 3), s.output("mean", 3)])
    plan = s.load()
    a, i = torch.randn(4, 3), torch.tensor([2, 0])
    for _ in range(2):
        picked, wide, full, tail, stacked, var, mean = plan(a, i)
        b = a * 2
        assert (
            torch.equal(picked, b[i]) and torch.equal(wide, b.double()) and torch.equal(full, torch.full((2, 2), 7.5))
        )
        assert torch.equal(tail, b[1:]) and torch.equal(stacked, torch.stack((a, b), -1))
        torch.testing.assert_close((var, mean), torch.var_mean(b, (0,), correction=0))


def test_any_callable_can_be_a_target() -> None:
    seen: list[Any] = []

    def scale(x: torch.Tensor, factor: int, *, pair: tuple[int, int]) -> torch.Tensor:
        seen.append((x, pair))
        return x * factor

    n = symbol("n")
    s = Schedule()
    x = s.input("x", n)
    s.plan.size_symbols[n] = (0, 0)
    t = s.temporary("t", n)
    s.run("k", double, [x, t], n)
    s.call(scale, t, n, pair=(n, 3), out=[s.output("o", n)])
    plan = s.load(single=True)
    assert plan(torch.ones(3)).tolist() == [6, 6, 6]
    assert plan(torch.ones(2)).tolist() == [4, 4]
    # What foreign code kept is not overwritten by later calls.
    assert [(kept.tolist(), pair) for kept, pair in seen] == [([2, 2, 2], (3, 3)), ([2, 2], (2, 3))]


def test_a_result_that_is_its_argument_gets_memory_of_its_own(any_path: None) -> None:
    s = Schedule()
    x, t = s.input("x", 4), s.temporary("t", 4)
    s.run("k", double, [x, t], 4)
    s.call(aten.contiguous.default, t, out=[s.output("same", 4)])
    s.run("again", double, [x, t], 4)
    plan = s.load(single=True)
    first = plan(torch.ones(4))
    plan(torch.zeros(4))
    assert first.tolist() == [2, 2, 2, 2]


RESULTS = {
    "whole": lambda x: x + 1,
    "part": lambda x: torch.cat([x, x + 1])[4:],
    "beginning": lambda x: torch.cat([x + 1, x])[:4],
    "strides of one element": lambda x: (x + 1).as_strided((4, 1), (1, 7)),
    "other strides": lambda x: torch.cat([x + 1, x], 1)[:, :1],
}


@pytest.mark.parametrize("made", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("shape", [(4, 1), (2, 2)])
def test_an_output_in_memory_that_an_operator_returned(made: Any, shape: tuple[int, int], any_path: None) -> None:
    """It is the whole of its storage, in its own shape and strides, whatever the operator returned a part of."""
    s = Schedule()
    x, t, o = s.input("x", 4, 1), s.temporary("t", 4, 1, placed=False), s.output("o", *shape)
    s.call(made, x, out=[t])
    s.run("k", double, [t, o], 4)
    s.plan.takes_over["o"] = "t"
    plan, given = s.load(single=True), torch.arange(4.0).reshape(4, 1)
    first, second = plan(given), plan(given + 1)
    assert torch.equal(first, (given + 1).reshape(shape) * 2) and torch.equal(second, (given + 2).reshape(shape) * 2)
    for result in (first, second):
        assert result.stride() == (shape[1], 1) and result.storage_offset() == 0 and not result._is_view()
        assert result.untyped_storage().nbytes() == 16
    assert first.data_ptr() != second.data_ptr()


def test_operators_run_below_autograd_and_autocast_and_leave_the_state_alone() -> None:
    s = Schedule()
    x, w = s.input("x", 4, 8), s.input("w", 8, 8)
    s.call(aten.mm.default, x, w, out=[s.output("o", 4, 8)])
    s.call(aten.linalg_vector_norm.default, x, 2, (1,), out=[s.output("n", 4)])
    s.call(aten.sum.dim_IntList, x, (9,), out=[s.output("bad", 4)])
    good = Schedule()
    y, v = good.input("x", 4, 8), good.input("w", 8, 8)
    good.call(aten.mm.default, y, v, out=[good.output("o", 4, 8)])
    good.call(aten.linear.default, y, v, out=[good.output("l", 4, 8)])
    a, b = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, linear = good.load()(a, b)
        with pytest.raises(RuntimeFallback):
            s.load()(a, b)
        assert torch.is_autocast_enabled("cpu") and torch.mm(a, b).dtype is torch.bfloat16
    assert o.dtype is linear.dtype is torch.float32 and not o.requires_grad and not linear.requires_grad
    assert torch.is_grad_enabled() and (a * 2).requires_grad


def test_inference_mode_and_back() -> None:
    s = Schedule()
    x, t = s.input("x", 4, 4), s.temporary("t", 4, 4)
    s.run("k", double, [x, t], 16)
    s.call(aten.cumsum.default, t, 0, out=[s.output("o", 4, 4)])
    plan = s.load(single=True)
    a = torch.randn(4, 4)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            result = plan(a)
        assert torch.equal(result, (a * 2).cumsum(0)) and result.is_inference() == inference


def test_temporaries_made_by_operators_are_freed_after_their_last_reader() -> None:
    s = Schedule()
    x = s.input("x", 4, 4)
    t = s.temporary("t", 4, 4, placed=False)
    s.call(aten.cumsum.default, x, 0, out=[t])
    s.run("k", double, [t, s.output("o", 4, 4)], 16)
    plan = s.build(single=True)
    kinds = [getattr(step, "kind", "") for step in plan.steps]
    assert kinds.count("release") == 1 and kinds[-1] == "release"
    a = torch.randn(4, 4)
    assert torch.equal(launch.load(plan, s.addresses())(a), a.cumsum(0) * 2)


# --- outputs -----------------------------------------------------------------------------------------------------------------


def test_inputs_constants_and_repeated_outputs_are_the_same_objects(any_path: None) -> None:
    constant = torch.randn(3)
    s = Schedule()
    x, c = s.input("x", 3), s.constant("c", constant)
    s.run("add", plus, [x, c, s.output("o", 3)], 3)
    s.plan.outputs += (Output("buffer", "x"), Output("buffer", "c"), Output("buffer", "o"))
    a = torch.randn(3)
    o, same, kept, again = s.load()(a)
    assert same is a and kept is constant and again is o and torch.equal(o, a + constant)


def test_views_of_inputs_are_true_views(any_path: None) -> None:
    s = Schedule()
    s.input("x", 4, 3)
    s.plan.outputs = (
        Output("view", ref=BufferRef("x", (3, 4), (1, 3), 0, torch.float32)),
        Output("view", ref=BufferRef("x", (3,), (1,), 6, torch.float32)),
        Output("view", ref=BufferRef("x", (2, 6), (6, 1), 0, torch.int32)),
    )
    base = torch.randn(5, 3)
    a = base[1:]
    turned, row, bits = s.load()(a)
    assert torch.equal(turned, a.T) and torch.equal(row, a[2]) and torch.equal(bits, a.view(torch.int32).view(2, 6))
    assert turned._base is base and turned._version == a._version
    row.add_(1)
    assert turned._version == a._version == base._version == 1 and torch.equal(a[2], row)


def test_views_of_outputs(any_path: None) -> None:
    s = Schedule()
    x = s.input("x", 4, 3)
    s.run("k0", double, [x, s.output("seen", 4, 3)], 12)
    s.run("k1", double, [x, s.output("hidden", 4, 3)], 12)
    s.plan.outputs = (
        Output("view", ref=BufferRef("seen", (3, 4), (1, 3), 0, torch.float32)),
        Output("buffer", "seen"),
        Output("view", ref=BufferRef("hidden", (2, 3), (3, 1), 3, torch.float32)),
    )
    a = torch.randn(4, 3)
    view, seen, hidden = s.load()(a)
    assert torch.equal(view, a.T * 2) and torch.equal(seen, a * 2) and torch.equal(hidden, a[1:3] * 2)
    seen.zero_()
    assert not view.any() and view._base is seen


# --- changed inputs and errors -----------------------------------------------------------------------------------------------


def failing(where: int) -> Any:
    """Copies, and reports a bad index at element `where`."""

    def body(buffers: Any, sizes: Any, begin: int, end: int, status: Any) -> None:
        if begin <= where < end:
            status[0] = 1

    return SIGNATURE(body)


def test_bad_index_before_any_change_is_a_fallback(any_path: None) -> None:
    s = Schedule()
    x = s.input("x", 8)
    s.run("pick", failing(5), [x, s.output("o", 8)], 8)
    s.run("update", double, [x, x], 8)
    a = torch.ones(8)
    with pytest.raises(RuntimeFallback, match="index out of range in pick"):
        s.load()(a)
    assert a._version == 0 and a.tolist() == [1] * 8


def test_errors_after_a_change_are_raised_as_they_are(any_path: None) -> None:
    s = Schedule()
    x = s.input("x", 8)
    s.run("update", double, [x, x], 8)
    s.run("pick", failing(5), [x, s.output("o", 8)], 8)
    a = torch.ones(8)
    with pytest.raises(IndexError, match="index out of range in pick"):
        s.load()(a)
    assert a._version == 1


def test_changed_input_counts_a_version_once_a_call(any_path: None) -> None:
    s = Schedule()
    x = s.input("x", 8)
    s.run("update", double, [x, x], 8)
    s.run("twice", double, [x, x], 8)
    s.plan.outputs = (Output("buffer", "x"),)
    a = torch.ones(8)
    plan = s.load(single=True)
    assert plan(a) is a and a.tolist() == [4] * 8 and a._version == 1
    plan(a)
    assert a._version == 2


def test_changing_an_inference_tensor_outside_inference_mode_is_a_fallback(any_path: None) -> None:
    s = Schedule()
    x = s.input("x", 8)
    s.run("update", double, [x, x], 8)
    with torch.inference_mode():
        a = torch.ones(8)
    with pytest.raises(RuntimeFallback, match="inference tensor"):
        s.load()(a)
    assert a.tolist() == [1] * 8
    with torch.inference_mode():
        s.load()(a)
    assert a.tolist() == [2] * 8


def test_operator_that_writes_its_argument(any_path: None) -> None:
    s = Schedule()
    x, i, v = s.input("x", 4), s.input("i", 2, dtype=torch.int64), s.input("v", 2)
    s.call(aten.index_put_.default, x, (whole(i),), v, out=[None], mutates=("x",))
    t = s.temporary("t", 4)
    s.run("k", double, [x, t], 4)
    s.call(aten.index_put_.default, t, (whole(i),), v, True, out=[None], mutates=("t",))
    s.run("copy", double, [t, s.output("o", 4)], 4)
    a, index, values = torch.zeros(4), torch.tensor([3, 1]), torch.tensor([5.0, 6])
    result = s.load(single=True)(a, index, values)
    assert a.tolist() == [0, 6, 0, 5] and a._version == 1 and result.tolist() == [0, 36, 0, 30]


def test_an_operators_exception_is_the_cause_of_the_fallback(any_path: None) -> None:
    s = Schedule()
    x, i = s.input("x", 4), s.input("i", 1, dtype=torch.int64)
    s.call(aten.index_select.default, x, 0, i, out=[s.output("o", 1)])
    square, column = (
        BufferRef("x", shape, stride, 0, torch.float32) for shape, stride in (((2, 2), (2, 1)), ((4, 1), (1, 1)))
    )
    s.call(aten.mm.default, square, column, out=[s.output("m", 2, 1)])
    plan = s.load()
    with pytest.raises(RuntimeFallback, match="index_select") as caught:
        plan(torch.ones(4), torch.tensor([9]))
    assert isinstance(caught.value.__cause__, IndexError)
    with pytest.raises(RuntimeFallback, match="aten::mm"):
        plan(torch.ones(4), torch.tensor([0]))


def test_an_allocation_that_fails_is_told_from_other_errors(any_path: None) -> None:
    """Also where this PyTorch does not say why it failed."""
    s = Schedule()
    n = symbol("n")
    s.integer(n)
    s.run("fill", elementwise(lambda: 1.0), [s.output("o", n)], 0)
    with pytest.raises(RuntimeFallback, match="can't allocate memory") as error:
        s.load()(1 << 57)
    assert memory_was_short(error.value)


def test_an_interrupt_is_not_turned_into_a_fallback() -> None:
    def interrupted(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    s = Schedule()
    s.call(interrupted, s.input("x", 4), out=[s.output("o", 4)])
    with pytest.raises(KeyboardInterrupt):
        s.load()(torch.ones(4))


def test_wrong_inputs_are_refused() -> None:
    s = Schedule()
    s.run("double", double, [s.input("x", 8), s.output("o", 8)], 8)
    plan = s.load()
    with pytest.raises(TypeError, match="takes 1 inputs, got 2"):
        plan(torch.ones(8), torch.ones(8))
    with pytest.raises(TypeError, match="expected a tensor, got list"):
        plan([1.0])
    with pytest.raises(TypeError, match="keyword"):
        plan(x=torch.ones(8))


def test_wrong_results_are_refused() -> None:
    for result, message in (
        (3, "returned int"),
        ((), "fewer results"),
        (torch.ones(4, dtype=torch.int32), "the graph says"),
    ):
        s = Schedule()
        s.call(lambda x, r=result: r, s.input("x", 4), out=[s.output("o", 4)])
        with pytest.raises(RuntimeFallback, match=message):
            s.load()(torch.ones(4))


# --- threads and nesting -----------------------------------------------------------------------------------------------------


def test_parallel_chunks_cover_the_extent_once() -> None:
    chunks: list[tuple[int, int]] = []

    def body(buffers: Any, sizes: Any, begin: int, end: int, status: Any) -> None:
        chunks.append((begin, end))

    s = Schedule()
    s.run("k", SIGNATURE(body), [s.input("x", 8), s.output("o", 8)], 1001, grain=100)
    s.load()(torch.ones(8))
    covered = sorted(chunks)
    assert (
        covered[0][0] == 0 and covered[-1][1] == 1001 and all(left[1] == right[0] for left, right in pairwise(covered))
    )
    assert len(chunks) <= torch.get_num_threads()
    chunks.clear()
    small = Schedule()
    small.run("k", SIGNATURE(body), [small.input("x", 8), small.output("o", 8)], 199, grain=100)
    small.load()(torch.ones(8))
    assert chunks == [(0, 199)]


def test_status_of_any_chunk_is_seen() -> None:
    s = Schedule()
    s.run("pick", failing(999), [s.input("x", 8), s.output("o", 8)], 1000, grain=10)
    with pytest.raises(RuntimeFallback):
        s.load()(torch.ones(8))


def nested_plan() -> tuple[Any, Any]:
    inner = Schedule()
    x, t = inner.input("x", 16), inner.temporary("t", 16)
    inner.run("k0", double, [x, t], 16)
    inner.run("k1", double, [t, inner.output("o", 16)], 16)
    inner_plan = inner.load(single=True)
    outer = Schedule()
    y, u = outer.input("x", 16), outer.temporary("u", 16)
    r = outer.temporary("r", 16, placed=False)
    outer.run("k0", double, [y, u], 16)
    outer.call(lambda z: inner_plan(z), u, out=[r])
    outer.run("k1", plus, [u, r, outer.output("o", 16)], 16)
    return inner_plan, outer.load(single=True)


def test_a_plan_inside_a_step_of_another_has_its_own_memory() -> None:
    _, plan = nested_plan()
    for _ in range(3):
        a = torch.randn(16)
        torch.testing.assert_close(plan(a), a * 10)


def test_a_plan_that_calls_itself() -> None:
    holder: list[Any] = []

    def recurse(x: torch.Tensor) -> torch.Tensor:
        return holder[0](x) if x[0] < 100 else x.clone()

    s = Schedule()
    x, t = s.input("x", 4), s.temporary("t", 4)
    r = s.temporary("r", 4, placed=False)
    s.run("k0", double, [x, t], 4)
    s.call(recurse, t, out=[r])
    s.run("k1", plus, [t, r, s.output("o", 4)], 4)
    holder.append(s.load(single=True))

    def expected(a: torch.Tensor) -> torch.Tensor:
        b = a * 2
        return b + (expected(b) if b[0] < 100 else b)

    a = torch.ones(4)
    assert torch.equal(holder[0](a), expected(a))


def test_two_threads_share_a_plan() -> None:
    s = Schedule()
    x, w = s.input("x", 16, 16), s.input("w", 16, 16)
    t, r = s.temporary("t", 16, 16), s.temporary("r", 16, 16)
    s.run("k0", double, [x, t], 256, grain=256)
    s.call(aten.mm.default, t, w, out=[r])
    s.call(aten.cumsum.default, r, 0, out=[s.output("o", 16, 16)])
    plan = s.load(single=True)
    failures: list[object] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            a, b = torch.randn(16, 16, generator=generator), torch.randn(16, 16, generator=generator)
            if not torch.allclose(plan(a, b), (a * 2 @ b).cumsum(0), atol=1e-4):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_other_threads_run_while_an_operator_computes() -> None:
    """A Python thread must be able to take the GIL inside a step: the kernel waits for it (a deadlock, hence the timeout, otherwise)."""
    entered, seen = threading.Event(), threading.Event()

    def body(buffers: Any, sizes: Any, begin: int, end: int, status: Any) -> None:
        entered.set()
        assert seen.wait(10)

    def other() -> None:
        entered.wait(10)
        seen.set()

    s = Schedule()
    s.run("k", SIGNATURE(body), [s.input("x", 8), s.output("o", 8)], 8, grain=8)
    thread = threading.Thread(target=other)
    thread.start()
    s.load()(torch.ones(8))
    thread.join()
    assert seen.is_set()


def test_references_are_balanced(any_path: None) -> None:
    s = Schedule()
    x, i = s.input("x", 4, 3), s.input("i", 2, dtype=torch.int64)
    t = s.temporary("t", 4, 3)
    s.run("k", double, [x, t], 12)
    s.call(aten.index.Tensor, t, (whole(i),), out=[s.output("o", 2, 3)])
    s.call(aten.cumsum.default, t, 0, out=[s.output("c", 4, 3)])
    s.plan.outputs += (Output("buffer", "x"), Output("view", ref=BufferRef("x", (3, 4), (1, 3), 0, torch.float32)))
    plan = s.load()
    a, index = torch.randn(4, 3), torch.tensor([2, 0])
    plan(a, index)
    before = sys.getrefcount(a), sys.getrefcount(index), sys.getrefcount(plan), len(gc.get_objects())
    for _ in range(50):
        plan(a, index)
    gc.collect()
    after = sys.getrefcount(a), sys.getrefcount(index), sys.getrefcount(plan), len(gc.get_objects())
    assert before[:3] == after[:3] and after[3] - before[3] < 20
