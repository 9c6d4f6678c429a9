"""`fusewright.aot`: a user's compilers of functional ATen graphs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fusewright
from fusewright.autograd.joint import JointGraph, Split
from fusewright.autograd.partition import split
from fusewright.base.errors import BackendError, OptionError

aten = torch.ops.aten


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.mm(x, w))


class Printing:
    """A compiler that notes the graphs that it gets and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        assert len(example_inputs) == sum(node.op == "placeholder" for node in gm.graph.nodes)
        copies = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in example_inputs]
        assert isinstance(gm(*copies), tuple)
        self.graphs.append(gm)
        return gm.forward

    def targets(self) -> list[Any]:
        (gm,) = self.graphs
        return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def test_one_forward_and_one_backward_graph() -> None:
    """Example program 8 of the semantics."""
    forward, backward = Printing(), Printing()
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    compiled = fusewright.compile(layer, backend=fusewright.aot(fw_compiler=forward, bw_compiler=backward))
    y = compiled(x, w)
    y.sum().backward()
    assert forward.targets() == [aten.mm.default, aten.relu.default]
    assert backward.targets().count(aten.mm.default) == 2 and aten.threshold_backward.default in backward.targets()
    a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
    expected = layer(a, b)
    expected.sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close((x.grad, w.grad), (a.grad, b.grad))


def test_without_gradients_only_the_forward_compiler_is_called() -> None:
    forward, backward = Printing(), Printing()
    compiled = fusewright.compile(layer, backend=fusewright.aot(forward, backward))
    x, w = torch.randn(4, 3), torch.randn(3, 5)
    torch.testing.assert_close(compiled(x, w), layer(x, w))
    assert len(forward.graphs) == 1 and not backward.graphs


def test_the_forward_compiler_serves_both_directions_and_any_size() -> None:
    compiler = Printing()
    compiled = fusewright.compile(lambda x: (x * x).sin(), backend=fusewright.aot(compiler), dynamic=True)
    for size in (3, 7):
        x = torch.randn(size, 4, requires_grad=True)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, (x * x).cos().mul(2 * x).detach())
    assert len(compiler.graphs) == 2


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
def test_a_backward_gets_the_sizes_that_no_saved_tensor_has(backend: str) -> None:
    compiled = fusewright.compile(
        lambda x: (x.view(-1) * x.shape[0]).expand(3, -1).sum(), backend=backend, dynamic=True, fullgraph=True
    )
    for rows in (3, 5):
        x = torch.randn(rows, 2, requires_grad=True)
        compiled(x).backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((rows, 2), 3.0 * rows))


def test_writes_into_inputs_are_kept() -> None:
    def step(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        total.add_(x.detach())
        return (x * total).exp()

    compiled = fusewright.compile(step, backend=fusewright.aot(Printing()))
    x, total, same = torch.randn(4, requires_grad=True), torch.zeros(4), torch.zeros(4)
    torch.testing.assert_close(compiled(total, x), step(same, x))
    torch.testing.assert_close(total, same)


def test_a_partition_of_ones_own() -> None:
    seen: list[JointGraph] = []

    def save_everything(joint: JointGraph) -> Split:
        seen.append(joint)
        return split(joint, recompute=False)

    x = torch.randn(8, requires_grad=True)
    compiled = fusewright.compile(
        lambda x: x.sin().cos().exp(), backend=fusewright.aot(Printing(), partition=save_everything)
    )
    compiled(x).sum().backward()
    (expected,) = torch.autograd.grad(x.sin().cos().exp().sum(), x)
    torch.testing.assert_close(x.grad, expected)
    assert len(seen) == 1 and seen[0].tangents == (0,) and seen[0].gradients == (0,)


def test_errors_name_the_compiler() -> None:
    with pytest.raises(OptionError, match="bw_compiler"):
        fusewright.aot(Printing(), bw_compiler="inductor")

    def fails(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise ValueError("no")

    with pytest.raises(BackendError, match=r"backward compiler given to aot failed.*ValueError: no"):
        fusewright.compile(layer, backend=fusewright.aot(Printing(), fails))(
            torch.randn(2, 2, requires_grad=True), torch.randn(2, 2)
        )
    with pytest.raises(BackendError, match="must return a callable"):
        fusewright.compile(layer, backend=fusewright.aot(lambda gm, inputs: None))(torch.randn(2, 2), torch.randn(2, 2))


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
def test_joint_forward_and_backward_graphs_are_logged(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    fusewright.set_logs(aot_graphs=True)
    try:
        with caplog.at_level(logging.INFO, logger="fusewright.aot_graphs"):
            fusewright.compile(layer, backend=backend)(torch.randn(2, 3, requires_grad=True), torch.randn(3, 2))
    finally:
        fusewright.set_logs(aot_graphs=False)
    titles = [record.getMessage().splitlines()[0] for record in caplog.records]
    assert [title.partition(" of ")[0] for title in titles if "graph" in title] == [
        "joint graph",
        "forward graph",
        "backward graph",
    ]
    assert "threshold_backward" in caplog.records[-1].getMessage()
