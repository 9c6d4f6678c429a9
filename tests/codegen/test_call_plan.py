"""Building call plans: order of steps, value tables, how arguments are passed, the text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.torch_version import TorchVersion

from fusewright.codegen.call_plan import describe
from fusewright.codegen.call_plan_types import CCall, Gather, KernelCall, PythonCall, SlotStep
from fusewright.codegen.size_values import SIZE_OPERATIONS, ValueTable
from fusewright.loops.ir import BufferRef, Output
from fusewright.sizes.expressions import Dim, evaluate, maximum, minimum, symbol
from tests.runtime.plans import Schedule, elementwise, whole

aten = torch.ops.aten
double = elementwise(lambda a: a * 2)


def run_table(table: ValueTable, inputs: dict[tuple[int, int], int]) -> list[int]:
    """The table's contents as native code computes them."""
    values = list(table.initial)
    for entry, position, dim in table.symbols:
        values[entry] = inputs[position, dim]
    operators = {
        "+": lambda a, b: a + b, "*": lambda a, b: a * b, "//": lambda a, b: a // b, "%": lambda a, b: a % b, "min": min, "max": max,
    }  # fmt: skip
    for operation, target, left, right in table.program:
        values[target] = operators[SIZE_OPERATIONS[operation]](values[left], values[right])
    return values


def test_value_table_computes_what_the_algebra_says() -> None:
    n, m = symbol("n"), symbol("m")
    table = ValueTable({n: (0, 1), m: (2, -1)})
    dims: list[Dim] = [
        7,
        n,
        n * m + 3,
        (n + 5) // 4,
        (n * 3) % (m + 1),
        minimum(n, m),
        maximum(n * 2, m),
        (n + 5) // 4 * 64,
    ]
    entries = [table.of(dim) for dim in dims]
    first = table.run(dims)
    assert table.run(dims) == first and [table.of(dim) for dim in dims] == entries
    for a, b in ((1, 1), (10, 3), (129, 64)):
        values = run_table(table, {(0, 1): a, (2, -1): b})
        wanted = [evaluate(dim, {n: a, m: b}) for dim in dims]
        assert [values[entry] for entry in entries] == wanted == values[first : first + len(dims)]


def test_a_size_that_no_input_gives_is_an_error() -> None:
    with pytest.raises(ValueError, match="given by no input"):
        ValueTable({}).of(symbol("n") + 1)


def test_static_plans_compute_nothing() -> None:
    s = Schedule()
    s.run("k", double, [s.input("x", 4), s.output("o", 4)], 4)
    plan = s.build()
    assert not plan.symbols and not plan.instructions


def test_steps_and_text() -> None:
    s = Schedule()
    x, w, b = s.input("x", 4, 8), s.input("w", 8, 3), s.input("b", 3)
    t, r = s.temporary("t", 4, 8), s.temporary("r", 4, 3)
    s.run("k0", double, [x, t], 32)
    s.call(aten.addmm.default, b, t, w, out=[r])
    c = s.temporary("c", 4, 3, placed=False)
    s.call(aten.flip.default, r, (0, 1), out=[c])
    s.run("k1", double, [c, s.output("o", 4, 3)], 12, grain=100)
    s.run("k2", double, [x, x], 32)
    assert (
        describe(s.build(name="layer"))
        == """\
plan layer: 3 inputs, 192 bytes of temporary memory
  memory    t at 0: float32 (4, 8) stride (8, 1)
  memory    r at 128: float32 (4, 3) stride (3, 1)
  kernel    k0(x, t)  extent 32, grain 1073741824
  window    r: float32 (4, 3) stride (3, 1)
  window    t: float32 (4, 8) stride (8, 1)
  operator  aten::addmm(r, b, t, w, 1.0, 1.0)  by aoti_torch_cpu_addmm_out
  window    r: float32 (4, 3) stride (3, 1)
  operator  c = aten::flip(r, [0, 1])  by Python
  check     c: float32 (4, 3) stride (3, 1)
  allocate  o: float32 (4, 3) stride (3, 1)
  kernel    k1(c, o)  extent 12, grain 100
  release   c
  mutate    x
  kernel    k2(x, x)  extent 32, grain 1073741824
  return    o"""
    )


def test_symbolic_text() -> None:
    n = symbol("n")
    s = Schedule()
    x = s.input("x", n, 8)
    s.plan.size_symbols[n] = (0, 0)
    t = s.temporary("t", n, 8)
    s.run("k0", double, [x, t], n * 8, sizes=(n,))
    s.call(aten.view_copy.default, t, (n * 8,), out=[s.output("o", n * 8)])
    s.plan.outputs += (Output("size", value=n * 8), Output("view", ref=BufferRef("x", (n,), (8,), 0, torch.float32)))
    text = describe(s.build())
    for line in (
        "size      n = size 0 of input 0",
        "memory    t at 0: float32 (n, 8) stride (8, 1)",
        f"kernel    k0(x, t)  extent {n * 8}, grain 1073741824  sizes [n]",
        f"return    o, {n * 8}, x[(n) stride (8) at 0]",
    ):
        assert line in text


def test_whole_buffers_are_passed_as_they_are_and_lists_are_gathered() -> None:
    s = Schedule()
    x, y = s.input("x", 2, 3), s.input("y", 4, 3)
    s.call(aten.cat.default, (whole(x), whole(y)), 0, out=[s.output("o", 6, 3)])
    steps = s.build().steps
    assert [type(step) for step in steps] == [Gather, CCall, SlotStep]
    assert isinstance(steps[0], Gather) and steps[0].sources == (0, 1)


def test_a_tensor_is_released_after_the_call_that_reads_the_list_it_is_in() -> None:
    s = Schedule()
    x, y = s.input("x", 2, 3), s.input("y", 4, 3)
    t = s.temporary("t", 6, 3, placed=False)
    s.call(aten.cat.default, (whole(x), whole(y)), 0, out=[t])
    s.call(aten.cat.default, (whole(t), whole(x)), 0, out=[s.output("o", 8, 3)])
    plan = s.build()
    reader = max(place for place, step in enumerate(plan.steps) if isinstance(step, CCall))
    released = [place for place, step in enumerate(plan.steps) if isinstance(step, SlotStep) and step.kind == "release"]
    assert released and min(released) > reader


def test_what_a_c_function_cannot_take_goes_through_python() -> None:
    def kind(*args: object, target: object = aten.topk.default, available: bool = True, **kwargs: object) -> type:
        s = Schedule()
        x = s.input("x", 4, 3)
        s.call(target, x, *args, out=[s.output("v", 4, 2), s.output("i", 4, 2, dtype=torch.int64)], **kwargs)
        plan = s.build(available=lambda symbol: available)
        return next(type(step) for step in plan.steps if isinstance(step, (CCall, PythonCall)))

    assert kind(2) is CCall
    assert kind(2, available=False) is PythonCall
    assert kind(2.5) is PythonCall
    s = Schedule()
    s.call(aten.cumsum.default, s.input("x", 4), 0, dtype=torch.float64, out=[s.output("o", 4, dtype=torch.float64)])
    call = s.build().steps[0]
    assert isinstance(call, PythonCall)
    assert s.load(single=True)(torch.ones(4)).tolist() == [1, 2, 3, 4]


def test_sizes_that_a_c_function_would_read_when_they_are_freed_go_through_python() -> None:
    s = Schedule()
    x, w, gradient = s.input("x", 0, 4, 6, 6), s.input("w", 4, 4, 3, 3), s.input("g", 0, 4, 4, 4)
    how = ([4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
    s.call(aten.convolution_backward.default, gradient, x, w, *how, out=[None, s.output("dw", 4, 4, 3, 3), s.output("db", 4)])
    assert isinstance(s.build().steps[0], CCall if TorchVersion(torch.__version__) >= "2.13" else PythonCall)
    found = s.load()(torch.empty(0, 4, 6, 6), torch.ones(4, 4, 3, 3), torch.empty(0, 4, 4, 4))
    torch.testing.assert_close(found, (torch.zeros(4, 4, 3, 3), torch.zeros(4)))


def test_without_the_c_function_an_out_operator_still_writes_into_its_place() -> None:
    s = Schedule()
    x, w = s.input("x", 4, 8), s.input("w", 8, 3)
    r = s.temporary("r", 4, 3)
    s.call(aten.mm.default, x, w, out=[r])
    s.run("k", double, [r, s.output("o", 4, 3)], 12)
    plan = s.build(available=lambda symbol: False)
    assert any(isinstance(step, PythonCall) and step.keywords == ("out",) for step in plan.steps)
    a, b = torch.randn(4, 8), torch.randn(8, 3)
    torch.testing.assert_close(s.load(single=True, available=lambda symbol: False)(a, b), a @ b * 2)


def test_returning_temporary_memory_is_an_error() -> None:
    s = Schedule()
    s.run("k", double, [s.input("x", 4), s.temporary("t", 4)], 4)
    s.plan.outputs = (Output("buffer", "t"),)
    with pytest.raises(ValueError, match="planned as temporary"):
        s.build()


def test_an_output_without_elements_is_made() -> None:
    s = Schedule()
    s.input("x", 4)
    s.output("o", 0, 4)
    assert s.load(single=True)(torch.ones(4)).shape == (0, 4)


def test_kernel_parameters_follow_the_code_not_the_schedule() -> None:
    s = Schedule()
    x, o = s.input("x", 4), s.output("o", 4)
    s.run("k", double, [x, o], 4)
    s.codes["k"] = replace(s.codes["k"], buffers=("o", "x"))
    plan = s.build()
    step = next(step for step in plan.steps if isinstance(step, KernelCall))
    assert [plan.slots[slot].name for slot in step.buffers] == ["o", "x"]
