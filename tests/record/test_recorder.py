"""The recorder: both levels, autograd, modes, symbolic sizes, and what it refuses."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fusewright
from fusewright.base.location import Location
from fusewright.base.signals import GraphBreak
from fusewright.graph import passes
from fusewright.graph.printer import print_graph
from fusewright.graph.verify import verify
from fusewright.operators import meta_kernels
from fusewright.record.recorder import Recorder
from fusewright.record.traced_tensor import TracedTensor
from fusewright.sizes.shape_env import ShapeEnv


def module_of(recorder: Recorder) -> torch.fx.GraphModule:
    root = torch.nn.Module()
    for name, tensor in recorder.constants.items():
        root.register_buffer(name, tensor)
    return torch.fx.GraphModule(root, recorder.graph)


def attention(r: Recorder, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    c = r.call
    h = c(F.linear, (c(F.layer_norm, (x, (16,))), w))
    q, k, v = c(h.chunk, (3, -1))
    batch, length = x.shape[0], x.shape[1]
    q, k, v = [c(c(t.view, (batch, length, 2, 8)).transpose, (1, 2)) for t in (q, k, v)]
    a = c(F.scaled_dot_product_attention, (q, k, v))
    a = c(c(a.transpose, (1, 2)).reshape, (batch, length, 16))
    return c(F.gelu, (c(torch.add, (x, a)),))


class Eager:
    call = staticmethod(lambda fn, args=(), kwargs=None: fn(*args, **(kwargs or {})))


def test_aten_level_has_types_and_locations() -> None:
    here = (Location("model.py", 7, "forward"),)
    r = Recorder("aten", location=lambda: here)
    x, w = torch.randn(2, 5, 16), torch.randn(48, 16, requires_grad=True)
    out = attention(r, r.input(x, "x"), r.input(w, "w"))
    assert isinstance(out, TracedTensor) and out.requires_grad and not out.is_leaf
    graph = r.finish([out])
    verify(graph, rederive=True)
    assert all(node.meta["location"] == here for node in graph.nodes if node.op == "call_function")
    assert "# model.py:7" in print_graph(graph)
    torch.testing.assert_close(module_of(r)(x, w)[0], attention(Eager, x, w))


def test_backward_is_recorded_by_the_engine() -> None:
    r = Recorder("aten")
    x, w = torch.randn(2, 5, 16, requires_grad=True), torch.randn(48, 16, requires_grad=True)
    traced = [r.input(x, "x"), r.input(w, "w")]
    loss = r.call(torch.sum, (attention(r, *traced),))
    graph = r.finish([loss, *r.call(torch.autograd.grad, (loss, traced))])
    verify(passes.run(graph), functional=True, rederive=True)
    got = module_of(r)(x.detach(), w.detach())
    eager = attention(Eager, x, w).sum()
    for a, b in zip(got, [eager, *torch.autograd.grad(eager, [x, w])], strict=True):
        torch.testing.assert_close(a, b)


def test_torch_level() -> None:
    r = Recorder("torch")
    x = r.input(torch.randn(4, 3), "x")
    y = r.call(torch.Tensor.add, (x, 1))
    first, second = r.call(torch.split, (y, 2))
    shape = r.call(torch.Tensor.T.__get__, (first,))
    z = r.call(F.linear, (second, r.call(torch.ones, (3, 3))))
    graph = r.finish([z, shape])
    kinds = [(node.op, str(node.target)) for node in graph.nodes]
    assert (
        ("call_method", "add") in kinds
        and any("split" in target for _, target in kinds)
        and any("linear" in t for _, t in kinds)
    )
    assert not any("aten" in target for _, target in kinds)
    assert all("example_value" in node.meta for node in graph.nodes if node.op.startswith("call"))
    real = torch.randn(4, 3)
    got = module_of(r)(real)
    torch.testing.assert_close(got[0], F.linear((real + 1).split(2)[1], torch.ones(3, 3)))
    torch.testing.assert_close(got[1], (real + 1)[:2].T)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu")]
)
def test_modes(mode) -> None:
    x, w = torch.randn(2, 5, 16), torch.randn(48, 16, requires_grad=True)
    with mode():
        r = Recorder("aten")
        out = attention(r, r.input(x, "x"), r.input(w, "w"))
        r.finish([out])
        expected = attention(Eager, x, w)
        assert (out.dtype, out.requires_grad, out.is_inference()) == (
            expected.dtype,
            expected.requires_grad,
            expected.is_inference(),
        )
        assert not any(node.target is torch.ops.aten.linear.default for node in r.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(module_of(r)(x, w)[0], expected)


def test_autocast_casts_what_a_parameter_holds_now() -> None:
    layer, x = torch.nn.Linear(3, 3, bias=False), torch.ones(2, 3)
    compiled = fusewright.compile(layer)
    with torch.autocast("cpu", torch.bfloat16):
        for number in (1.0, 5.0):  # eager's cache keeps the first cast
            with torch.no_grad():
                layer.weight.fill_(number)
            assert torch.equal(compiled(x), torch.full((2, 3), 3 * number, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: torch.einsum("ij,kj,kl->il", x, x, x),
        lambda x: torch.inner(x, x),
        lambda x: torch.tensordot(x, x, ([1], [1])),
        lambda x: torch.linalg.multi_dot([x, x.t(), x]),
        lambda x: F.linear(x, x),
        lambda x: torch.matmul(x, x[0]),
        lambda x: F.cosine_similarity(x, x),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x: F.cross_entropy(x, torch.tensor([0, 1])),
    ],
)
def test_autocast_of_composite_operators_in_inference_mode(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """There they are broken down by the recorder: their parts are cast, unless the operator itself has been."""
    x = torch.randn(2, 3)
    compiled = fusewright.compile(fn, fullgraph=True)
    for casts in (True, False):
        with torch.inference_mode(), torch.autocast("cpu", enabled=casts):
            expected, got = fn(x), compiled(x)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_what_the_recorder_itself_calls_in_inference_mode() -> None:
    """A number is read of a tensor without dimensions, which the recorder makes."""
    compiled = fusewright.compile(
        lambda x: x * x.flatten()[:1].item(), fullgraph=True, options={"capture_scalar_outputs": True}
    )
    with torch.inference_mode():
        assert compiled(torch.full((2, 3), 3.0)).eq(9).all()


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_the_pseudo_inverse_is_cast_inside(mode: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    x = torch.randn(3, 2)
    compiled = fusewright.compile(lambda x: torch.linalg.pinv(x) * 2)
    for casts in (True, False):
        with mode(), torch.autocast("cpu", enabled=casts):
            assert compiled(x).dtype == (torch.linalg.pinv(x) * 2).dtype


def test_views_of_inference_tensors_are_inference_tensors() -> None:
    with torch.inference_mode():
        x = torch.ones(2, 3)
    r = Recorder("aten")
    traced = r.input(x, "x")
    views = [traced[0], traced.detach(), traced.t(), traced.split(1)[1]]
    assert all(view.is_inference() for view in views) and not (traced + 1).is_inference()
    compiled = fusewright.compile(lambda x: x.detach().requires_grad_().exp())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="requires_grad=True on inference tensor"):
            compiled(x)


def test_leaves_and_parameters() -> None:
    r = Recorder("aten")
    p = r.input(torch.nn.Parameter(torch.ones(3)), "p")
    assert p.original_class is torch.nn.Parameter and p.is_leaf and p.requires_grad
    inner = r.input(torch.ones(3, requires_grad=True) * 2, "inner")
    assert not inner.is_leaf and inner.requires_grad
    r.call(torch.Tensor.relu_, (inner,))  # eager allows it for what is not a leaf
    with pytest.raises(GraphBreak, match="leaf"):
        r.call(torch.Tensor.relu_, (p,))


def test_late_inputs_stand_in_order() -> None:
    r = Recorder("aten")
    x = r.input(torch.ones(3), "x")
    y = r.call(torch.neg, (x,))
    z = r.input(torch.ones(3), "z")
    r.input(torch.ones(3), "never")
    graph = r.finish([r.call(torch.add, (y, z))])
    assert [node.name for node in graph.nodes][:3] == ["x", "z", "never"]
    assert [node.meta.get("unused", False) for node in graph.nodes][:3] == [False, False, True]
    assert [node for node, _ in r.inputs] == list(graph.nodes)[:3]


def test_constants() -> None:
    r = Recorder("aten")
    x = r.input(torch.ones(3), "x")
    table = torch.arange(3.0)
    a = r.call(torch.add, (x, table))
    b = r.call(torch.mul, (a, table))
    c = r.call(torch.tensor, ([1.0, 2.0, 3.0],))
    r.finish([r.call(torch.add, (b, c))])
    assert [t is table for t in r.constants.values()] == [True, False]
    torch.testing.assert_close(module_of(r)(torch.ones(3))[0], (1 + table) * table + torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(GraphBreak, match="gradient"):
        r.call(torch.add, (x, torch.ones(3, requires_grad=True)))


def test_in_place_views_follow() -> None:
    def program(r, x):
        y = r.call(torch.mul, (x, 2))
        r.call(torch.Tensor.unsqueeze_, (y, 0))
        r.call(torch.Tensor.transpose_, (y, 1, 2))
        r.call(torch.Tensor.add_, (y, 1))
        return y

    r = Recorder("aten")
    x = torch.randn(2, 3)
    y = program(r, r.input(x, "x"))
    expected = program(Eager, x)
    assert y.shape == expected.shape and y.stride() == expected.stride() and y.tensor_type.shape == (1, 3, 2)
    r.finish([y])
    torch.testing.assert_close(module_of(r)(x)[0], expected)
    torch.testing.assert_close(torch.fx.GraphModule(torch.nn.Module(), passes.run(r.graph))(x)[0], expected)


@pytest.mark.parametrize(
    ("code", "action"),
    [
        ("data-dependent-scalar", lambda r, x: r.call(torch.Tensor.item, (r.call(torch.argmax, (x,)),))),
        ("data-dependent-scalar", lambda r, x: float(r.call(torch.Tensor.item, (r.call(torch.sum, (x,)),)))),
        ("data-dependent-scalar", lambda r, x: r.call(torch.Tensor.tolist, (x,)) or x.tolist()),
        ("data-dependent-scalar", lambda r, x: bool(r.call(torch.sum, (x,)))),
        ("data-dependent-scalar", lambda r, x: r.call(torch.equal, (x, x))),
        ("data-dependent-shape", lambda r, x: r.call(torch.nonzero, (x,))),
        ("data-dependent-shape", lambda r, x: r.call(torch.Tensor.__getitem__, (x, r.call(torch.gt, (x, 0))))),
        ("data-dependent-shape", lambda r, x: r.call(torch.unique, (x,))),
        ("inplace-metadata", lambda r, x: r.call(torch.Tensor.t_, (x,))),
        ("inplace-metadata", lambda r, x: r.call(torch.Tensor.resize_, (x, (9,)))),
        ("inplace-metadata", lambda r, x: r.call(torch.Tensor.set_, (x, x))),
        ("print-tensor", lambda r, x: repr(x)),
        ("print-tensor", lambda r, x: f"{x}"),
        ("operator-failed", lambda r, x: r.call(torch.mm, (x, r.call(torch.ones, (5, 5))))),
        ("operator-failed", lambda r, x: r.call(torch.add, (x, r.call(torch.ones, (7,))))),
        ("operator-failed", lambda r, x: r.call(torch.relu, (1,))),
        ("operator-failed", lambda r, x: r.call(torch.Tensor.add_, (r.call(torch.Tensor.expand, (x, (4, 2, 3))), 1))),
        ("operator-failed", lambda r, x: r.call(torch.rand, (3,), {"generator": torch.Generator()})),
        ("operator-failed", lambda r, x: r.call(torch.as_strided, (x, (2,), (1,), 1))),
    ],
)
def test_breaks(code: str, action) -> None:
    for level in ("aten", "torch"):
        r = Recorder(level)
        with torch.no_grad(), pytest.raises(GraphBreak) as caught:
            action(r, r.input(torch.randn(2, 3), "x"))
        assert caught.value.code == code


def test_symbolic_sizes_serve_other_sizes() -> None:
    env = ShapeEnv()
    batch, length = env.create("s0", 3, None), env.create("s1", 5, None)
    r = Recorder("aten", env)
    r.size_input(batch, "s0")
    r.size_input(length, "s1")
    x = r.input(torch.randn(3, 5, 16), "x", {0: batch, 1: length}, requires_grad=True)
    w = r.input(torch.randn(48, 16), "w", requires_grad=True)
    assert [str(d) for d in x.tensor_type.stride] == ["s1*16", "16", "1"]
    y = attention(r, x, w)
    position = r.call(torch.arange, (x.shape[1],))
    y = r.call(torch.cat, ([y, r.call(torch.mul, (y, r.call(position.view, (1, -1, 1))))], 1))
    y = r.call(torch.Tensor.__getitem__, (y, (slice(None), slice(1, None))))
    gradients = r.call(torch.autograd.grad, (r.call(torch.sum, (y,)), [x, w]))
    graph = passes.run(r.finish([y, *gradients, y.shape[1]]))
    verify(graph, functional=True, rederive=True, env=env)
    assert env.guards == []
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    for b, n in [(3, 5), (2, 9), (7, 2)]:
        real, weight = torch.randn(b, n, 16, requires_grad=True), torch.randn(48, 16, requires_grad=True)
        expected = attention(Eager, real, weight)
        expected = torch.cat([expected, expected * torch.arange(n).view(1, -1, 1)], 1)[:, 1:]
        wanted = [expected, *torch.autograd.grad(expected.sum(), [real, weight]), 2 * n - 1]
        for a, e in zip(module(b, n, real.detach(), weight.detach()), wanted, strict=True):
            torch.testing.assert_close(a, e)


def test_symbolic_sizes_are_guarded() -> None:
    env = ShapeEnv()
    rows = env.create("s0", 4, None)
    r = Recorder("aten", env)
    r.size_input(rows, "s0")
    x = r.input(torch.randn(4, 6), "x", {0: rows})
    r.call(torch.mm, (r.call(torch.Tensor.t, (x,)), r.call(torch.ones, (4, 2))))
    assert [str(g) for g in env.guards] == ["s0 == 4"]
    assert int(x.shape[0]) == 4 and len(env.guards) == 1


def test_symbolic_sizes_at_torch_level() -> None:
    env = ShapeEnv()
    rows = env.create("s0", 4, None)
    r = Recorder("torch", env)
    r.size_input(rows, "s0")
    x = r.input(torch.randn(4, 6), "x", {0: rows})
    y = r.call(torch.Tensor.view, (x, x.shape[0] * 2, 3))
    r.finish([y, (y.shape[0] + 4) // 2])
    got = module_of(r)(8, torch.ones(8, 6))
    assert got[0].shape == (16, 3) and got[1] == 10


PROGRAM = """
import sys, torch
import torch.nn.functional as F
from fusewright.graph import passes
from fusewright.operators import meta_kernels
from fusewright.record.recorder import Recorder
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
for level in ("aten", "torch"):
    r = Recorder(level)
    x = r.input(torch.randn(2, 3, 16), "x", requires_grad=True)
    traced = {n: r.input(p, n.replace(".", "_")) for n, p in layer.named_parameters()}
    with torch.enable_grad():
        y = r.call(torch.func.functional_call, (layer, traced, (x,)))
        y = r.call(torch.erfinv, (r.call(torch.special.log_ndtr, (y,)),))  # through PyTorch's reference kernels
        if level == "aten":
            loss = r.call(F.cross_entropy, (r.call(y.flatten, (0, 1)), r.call(torch.zeros, (6,), {"dtype": torch.long})))
            out = [loss, *r.call(torch.autograd.grad, (loss, [x, *traced.values()]))]
            passes.run(r.finish(out))
assert "torch._dynamo" not in sys.modules
assert "torch._inductor" not in sys.modules
print("nodes", len(r.graph.nodes))
"""


def test_tracing_never_imports_dynamo() -> None:
    """PyTorch imports torch._dynamo (a second) on the first use of some paths; none of them may be met here."""
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "nodes" in found.stdout


def test_nothing_is_recorded_outside_of_calls() -> None:
    r = Recorder("aten")
    r.input(torch.ones(3), "x")
    with contextlib.suppress(GraphBreak):
        r.call(torch.nonzero, (r.input(torch.ones(3), "y"),))
    torch.ones(3)
    assert [node.op for node in r.graph.nodes] == ["placeholder", "placeholder"]


def test_a_meta_kernel_is_asked_once_for_equal_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    infer = meta_kernels.infer
    monkeypatch.setattr(meta_kernels, "infer", lambda op, *rest: (asked.append(op), infer(op, *rest))[1])
    r = Recorder("aten")
    x, whole = r.input(torch.randn(3, 4), "x"), r.input(torch.arange(4), "n")
    made = [r.call(torch.logaddexp, (x, x)) for _ in range(3)]
    assert len(asked) == 1 and len({t.node for t in made}) == 3 and all(t.shape == (3, 4) for t in made)
    r.call(torch.logaddexp, (x, r.call(x.t().contiguous().t, ())))
    assert len(asked) > 1  # another layout is another question
    before = len(asked)
    kinds = [r.call(torch.special.entr, (whole,)).dtype, r.call(torch.special.entr, (whole,)).dtype]
    assert len(asked) == before + 1 and kinds == [torch.float32] * 2
    torch.set_default_dtype(torch.float64)
    try:
        assert r.call(torch.special.entr, (whole,)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_operator_s_overload_is_chosen_by_its_arguments() -> None:
    """PyTorch writes the arguments' text for each overload that does not fit."""
    aten = torch.ops.aten

    def fn(x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        return [aten.masked_fill(x, mask, torch.tensor(3.5)), aten.pow(2, x), aten.sum(x, [0]), aten.div(42, x)]

    x, mask = torch.randn(5), torch.tensor([True, False, True, False, True])
    for found, expected in zip(fusewright.compile(fn, fullgraph=True)(x, mask), fn(x, mask)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["sgn", "cat"])
def test_a_backward_of_sizes_that_vary_is_whole(name: str) -> None:
    """Native code asks for sizes as numbers; a gradient is a slice whose begin is a difference of sizes."""
    fn = {"sgn": lambda x, y, z: x.sgn().sum() + y.sum() + z, "cat": lambda x, y, z: torch.cat([x, y], 1) + z}[name]
    compiled = fusewright.compile(fn, fullgraph=True, dynamic=True)
    for rows in (3, 4):
        given = [torch.randn(rows, columns, dtype=torch.float64, requires_grad=True) for columns in (5, 6, 11)]
        found, expected = compiled(*given), fn(*given)
        assert "Compiled" in type(found.grad_fn).__name__
        for one, other in zip(*(torch.autograd.grad(y.square().sum(), given) for y in (found, expected))):
            assert torch.allclose(one, other)
