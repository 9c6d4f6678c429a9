"""Normalisation layers and their gradients against eager."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

import fusewright
from fusewright.loops.lower import lower
from tests.loops import reference, tracing
from tests.loops.lower.checking import check, compare


def with_gradients(function, *inputs: torch.Tensor):  # type: ignore[no-untyped-def]
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = function(*leaves)
    return [y, *torch.autograd.grad((y * y).sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm(dtype: torch.dtype) -> None:
    x, w, b = torch.randn(4, 6, 8).to(dtype), torch.randn(8).to(dtype), torch.randn(8).to(dtype)
    check(lambda x, w, b: F.layer_norm(x, (8,), w, b), x, w, b)
    check(lambda x: F.layer_norm(x, (6, 8)), x)


def test_layer_norm_gradient() -> None:
    inputs = torch.randn(4, 6, 8), torch.randn(8), torch.randn(8)
    check(lambda x, w, b: with_gradients(lambda x, w, b: F.layer_norm(x, (8,), w, b), x, w, b), *inputs)


def single(target, *args):  # type: ignore[no-untyped-def]
    """A graph of one call, with a placeholder for each tensor among `args`; and the call's node."""
    graph = Graph()
    nodes = []
    for k, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            node = graph.placeholder(f"x{k}")
            node.meta["type"] = tracing.type_of(arg)
            nodes.append(node)
        else:
            nodes.append(arg)
    return graph, graph.call_function(target, tuple(nodes))


@pytest.mark.parametrize("eps", [1e-6, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_rms_norm(eps: float | None, dtype: torch.dtype) -> None:
    """The fused operators exist on GPUs only; on a CPU PyTorch breaks them down, so the graph is written by hand."""
    aten = torch.ops.aten
    x, w, g = torch.randn(4, 6, 8).to(dtype), torch.randn(8).to(dtype), torch.randn(4, 6, 8).to(dtype)
    wanted = torch.ops.aten._fused_rms_norm(x, (8,), w, eps)
    graph, node = single(aten._fused_rms_norm.default, x, (8,), w, eps)
    node.meta["type"] = tracing.type_of(wanted)
    finish(graph, node, 2)
    for found, expected in zip(reference.run(lower(graph, {}), [x, w]), wanted):
        compare(found, expected)

    leaves = [t.detach().requires_grad_() for t in (x, w)]
    gradients = torch.autograd.grad(F.rms_norm(leaves[0], (8,), leaves[1], eps), leaves, g)
    rstd = wanted[1].detach()
    graph, node = single(aten._fused_rms_norm_backward.default, g, x, (8,), rstd, w, (True, True))
    node.meta["type"] = tracing.type_of(gradients)
    finish(graph, node, 2)
    found = reference.run(lower(graph, {}), [g, x, rstd, w])
    torch.testing.assert_close(found, list(gradients), rtol=2e-2, atol=5e-2 if dtype is torch.bfloat16 else 1e-4)


def finish(graph: Graph, node: Node, results: int) -> None:
    items = []
    for k in range(results):
        item = graph.call_function(operator.getitem, (node, k))
        item.meta["type"] = node.meta["type"][k]
        items.append(item)
    graph.output(tuple(items))


def test_rms_norm() -> None:
    check(lambda x, w: F.rms_norm(x, (8,), w, 1e-6), torch.randn(4, 6, 8), torch.randn(8), mutating=True)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm(groups: int) -> None:
    inputs = torch.randn(2, 6, 4, 5), torch.randn(6), torch.randn(6)
    check(lambda x, w, b: F.group_norm(x, groups, w, b), *inputs)
    check(lambda x, w, b: with_gradients(lambda x, w, b: F.group_norm(x, groups, w, b), x, w, b), *inputs)
    check(lambda x: F.group_norm(x, groups), inputs[0].to(memory_format=torch.channels_last))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_inference(layout: torch.memory_format) -> None:
    x = torch.randn(2, 6, 4, 5).to(memory_format=layout)
    stats = torch.randn(6), torch.rand(6), torch.randn(6), torch.randn(6)
    check(lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b), x, *stats)
    check(lambda x, m, v: F.relu(F.batch_norm(x, m, v)), x, *stats[:2])


def test_batch_norm_of_batch_statistics() -> None:
    inputs = torch.randn(4, 6, 3), torch.randn(6), torch.randn(6)
    check(
        lambda x, w, b: with_gradients(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), x, w, b),
        *inputs,
    )


def test_batch_norm_functional_training() -> None:
    def function(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, m: torch.Tensor, v: torch.Tensor
    ) -> list[torch.Tensor]:
        return list(torch.ops.aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.1, 1e-5))

    check(function, torch.randn(4, 6, 3), torch.randn(6), torch.randn(6), torch.randn(6), torch.rand(6))


def test_a_batch_whose_values_are_equal_is_normalised_to_zero() -> None:
    x = torch.tensor(4.75).expand(3, 3)
    compiled = fusewright.compile(lambda x: F.batch_norm(x, None, None, training=True))
    assert torch.equal(compiled(x), torch.zeros(3, 3))
