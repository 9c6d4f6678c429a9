"""Call plans as bytes: what is written comes back, what is damaged is refused."""

from __future__ import annotations

import pytest
import torch

from fusewright.base.records import fields
from fusewright.codegen.call_plan import describe
from fusewright.codegen.call_plan_types import CallPlan, Guarded, LaunchCall, PythonCall, SlotSpec
from fusewright.graph.freezing import Prepacking, Ref, Step
from fusewright.loops.ir import BufferRef, Output
from fusewright.runtime import launch
from fusewright.runtime.artifact import (
    _RECORDS,
    ArtifactError,
    CompiledGraph,
    NotSerialisable,
    dump,
    load_graph,
    load_plan,
    on_gpus,
)
from fusewright.sizes.expressions import symbol
from fusewright.sizes.tensor_type import TensorType
from tests.runtime.plans import Schedule, elementwise, whole

aten = torch.ops.aten
double = elementwise(lambda a: a * 2)


def schedule() -> Schedule:
    n = symbol("n")
    s = Schedule()
    x = s.input("x", n, 3)
    s.plan.size_symbols[n] = (0, 0)
    w = s.constant("w", torch.arange(6.0).reshape(2, 3).T)
    b = s.constant("b", torch.tensor([1.5, float("nan")]))
    t = s.temporary("t", n, 3)
    s.run("k", double, [x, t], n * 3)
    s.call(aten.addmm.default, b, t, w, beta=2, out=[s.output("o", n, 2)])
    image = BufferRef("x", (1, 1, n, 3), (0, 0, 3, 1), 0, torch.float32)
    weight = BufferRef("w", (1, 1, 1, 1), (1, 1, 1, 1), 1, torch.float32)
    s.call(aten.convolution.default, image, weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, out=[s.output("c", 1, 1, n, 3)])  # fmt: skip
    s.call(aten._to_copy.default, t, dtype=torch.float64, layout=torch.strided, device=torch.device("cpu"),
           memory_format=torch.contiguous_format, out=[s.output("d", n, 3, dtype=torch.float64)])  # fmt: skip
    s.call(aten.stack.default, (whole(t), whole(x)), -1, out=[s.output("s", n, 3, 2)])
    s.plan.outputs += (Output("size", value=n * 2), Output("value", value=(None, 2.5, -3, 1j, "text", b"\0")))
    return s


def test_a_plan_survives_its_bytes() -> None:
    s = schedule()
    plan = s.build(name="survivor")
    data = dump(plan)
    again = load_plan(data)
    assert describe(again) == describe(plan) and dump(again) == data
    assert again.constants[0].stride() == plan.constants[0].stride() and torch.equal(
        again.constants[0], plan.constants[0]
    )
    x = torch.randn(5, 3)
    first, second = launch.load(plan, s.addresses())(x), launch.load(again, s.addresses())(x)
    torch.testing.assert_close(second[:4], first[:4], equal_nan=True, rtol=0, atol=0)
    assert second[4:] == first[4:] == (10, (None, 2.5, -3, 1j, "text", b"\0"))


def test_what_was_measured_is_kept_with_the_graph() -> None:
    autotuned = (
        ("mm 16x32x64", "fused", (("library", 1.5e-5), ("fused", 1e-5)), "fused (1.50 times as quick as library)"),
    )
    compiled = CompiledGraph(schedule().build(name="autotuned"), b"", (), (), None, autotuned)
    assert load_graph(dump(compiled)).autotuned == autotuned


def test_integers_of_any_size_and_sign() -> None:
    values = (0, -1, 63, -64, 64, 2**63 - 1, -(2**63), 2**100)
    plan = CallPlan("n", "", values, (), (), (), (), (), 0, False)
    assert load_plan(dump(plan)).values == values


def test_what_has_no_bytes_is_refused() -> None:
    s = Schedule()
    s.call(lambda x: x, s.input("x", 3), out=[s.output("o", 3)])
    with pytest.raises(NotSerialisable):
        dump(s.build())
    opaque = CallPlan("n", "", (0,), (), (), (), (), (), 0, False, (torch.randn(2, 2).to_mkldnn(),))
    with pytest.raises(NotSerialisable, match="mkldnn"):
        dump(opaque)


def test_damage_is_refused() -> None:
    data = dump(schedule().build())
    for broken in (
        b"",
        data[:20],
        data[:-1],
        data + b"\0",
        b"XXXX" + data[4:],
        data[:40] + bytes([data[40] ^ 1]) + data[41:],
    ):
        with pytest.raises(ArtifactError):
            load_plan(broken)


def test_a_missing_kernel_or_function_is_an_error_at_load() -> None:
    s = schedule()
    with pytest.raises(launch.LoadError, match="kernel k"):
        launch.load(s.build(), {})
    unknown = Schedule()
    unknown.call(aten.mm.default, unknown.input("a", 2, 2), unknown.input("b", 2, 2), out=[unknown.output("o", 2, 2)])
    data = dump(unknown.build()).replace(b"aoti_torch_cpu_mm_out", b"aoti_torch_cpu_mm_XXX")
    with pytest.raises(ArtifactError):
        load_plan(data)
    assert not launch.is_available("aoti_torch_cpu_mm_XXX")


def on_two_gpus(first: int, second: int) -> CompiledGraph:
    """A graph's plan in which each kind of record that names a GPU does."""
    a, b = torch.device("cuda", first), torch.device("cuda", second)
    slots = tuple(
        SlotSpec(name, "input", True, at, torch.float32, device.type, index, 0, 0, 0, 0)
        for at, (name, device, index) in enumerate((("x", a, first), ("y", b, second), ("z", torch.device("cpu"), -1)))
    )
    copy = PythonCall("copy", aten._to_copy.default, (("tensor", 0), ("constant", 0)), ((b, {"device": a}),), (), (2,))
    steps = (
        LaunchCall("k", "key", first, (0,), (False,), (True,), 0, ()),
        Guarded(0, (copy,)),
        PythonCall("current", aten.add.Tensor, (("constant", 0),), (torch.device("cuda"), [a, 1]), (), (-1,)),
    )
    kind = TensorType((2,), (1,), torch.float32, b)
    prepacking = Prepacking((0,), (Step(aten._to_copy.default, (Ref(0),), (("device", a),)),), (Ref(1),), (kind,))
    plan = CallPlan("two", "ttt", (1,), (), (), slots, steps, (), 0, False)
    return CompiledGraph(plan, b"", (), (), prepacking)


def test_a_plan_is_moved_to_other_gpus() -> None:
    for numbers in ((0, 1), (1, 0), (3, 7)):
        moved = on_gpus(on_two_gpus(1, 0), {1: numbers[0], 0: numbers[1]})
        assert moved == on_two_gpus(*numbers)
        assert on_gpus(moved, {numbers[0]: 1, numbers[1]: 0}) == on_two_gpus(1, 0)
    with pytest.raises(ArtifactError, match="GPU 0"):
        on_gpus(on_two_gpus(1, 0), {1: 2})
    plan = schedule().build()
    assert on_gpus(plan, {0: 1}) == plan


def test_every_record_that_names_a_device_is_moved() -> None:
    """`on_gpus` knows these; devices among arguments are objects, which it finds anywhere."""
    named = {(kind.__name__, field.name) for kind in _RECORDS for field in fields(kind) if "device" in field.name}
    assert named == {("SlotSpec", "device"), ("SlotSpec", "device_index"), ("LaunchCall", "device"), ("TensorType", "device")}  # fmt: skip
