"""Operators that PyTorch's meta kernels take with any operands: where eager refuses these, what the call has written to
before is as eager leaves it, on each backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.base.signals import GraphBreak
from fusewright.record.recorder import Recorder
from fusewright.record.traced_tensor import make_traced
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

Int, Half = torch.int64, torch.bfloat16
REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "mm": lambda: torch.zeros(2, 3, dtype=Int) @ torch.zeros(3, 4),
    "mm of halves": lambda: torch.zeros(2, 3, dtype=Half) @ torch.zeros(3, 4),
    "mm of flags": lambda: torch.zeros(2, 3, dtype=torch.bool) @ torch.zeros(3, 4, dtype=torch.bool),
    "addmm": lambda: torch.addmm(torch.zeros(4), torch.zeros(2, 3, dtype=Int), torch.zeros(3, 4)),
    "addmm, its bias": lambda: torch.addmm(torch.zeros(4, dtype=Int), torch.zeros(2, 3), torch.zeros(3, 4)),
    "linear": lambda: F.linear(torch.zeros(2, 3, dtype=Int), torch.zeros(4, 3), torch.zeros(4)),
    "mv": lambda: torch.mv(torch.zeros(2, 3, dtype=Int), torch.zeros(3)),
    "a convolution": lambda: F.conv1d(torch.zeros(1, 3, 8, dtype=Int), torch.zeros(4, 3, 3)),
    "layer norm": lambda: F.layer_norm(torch.zeros(3, 4), (4,), torch.zeros(4, dtype=Int), torch.zeros(4)),
    "group norm": lambda: F.group_norm(torch.zeros(3, 4, dtype=Int), 2),
    "a number too large": lambda: torch.full((2,), 300, dtype=torch.uint8),
    "a number of another kind": lambda: torch.zeros(2, dtype=torch.uint8).masked_fill(torch.tensor([True, False]), -1.5),
    "a half too large": lambda: torch.zeros(2, dtype=torch.float16).fill_(1e6),
    "a number for some places": lambda: torch.zeros(2, dtype=Int).scatter(0, torch.tensor([1]), 1e30),
    "a mask of another size": lambda: torch.zeros(2).index_put_((torch.ones(1, dtype=torch.bool),), torch.tensor(3.0)),
    "a dimension that a number lacks": lambda: torch.zeros(2).sum().squeeze(1),
    "an embedding by other numbers": lambda: F.embedding(torch.zeros(2, dtype=torch.int16), torch.zeros(3, 4)),
    "no probability": lambda: torch.full((2,), 1.5).bernoulli(),
    "a dimension to sort along": lambda: torch.zeros(2).sort(dim=1, stable=True)[0],
    "a dimension to order along": lambda: torch.zeros(()).argsort(dim=1, stable=True),
    "a dimension to gather along": lambda: torch.zeros(2).gather(1, torch.zeros(2, dtype=Int)),
    "a dimension to select along": lambda: torch.zeros(2).index_select(-2, torch.tensor([0])),
    "a dimension to fill along": lambda: torch.zeros(0).index_fill(0, torch.tensor([0]), 1.0),
    "a dimension named twice": lambda: torch.zeros(2, 1).squeeze((1, -1)),
    "a dimension with equal parts": lambda: torch.zeros(2).unique(dim=1),
    "batch norm": lambda: F.batch_norm(torch.zeros(3, 4, dtype=Int), torch.zeros(4), torch.zeros(4)),
}


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("uses", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_the_state_after_an_error_is_eagers(name: str, uses: bool, backend: str) -> None:
    refused = REFUSED[name]

    def run(compiles: bool) -> tuple[object, ...]:
        norm, log = nn.BatchNorm1d(4), []

        def program(x: torch.Tensor) -> torch.Tensor:
            y = norm(x)
            log.append(1)
            result = refused()
            return result + y.sum() if uses else y

        function = fusewright.compile(program, backend=backend) if compiles else program
        for factor in (1.0, 2.0):
            with pytest.raises((RuntimeError, IndexError)):
                function(torch.arange(8.0).view(2, 4) * factor)
        return log, *(value.tolist() for value in norm.buffers())

    assert run(True) == run(False)


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("detached", [lambda x: x.detach(), lambda x: x[:2].detach(), lambda x: (x * 2).detach()])
def test_a_write_gives_a_gradient_to_what_was_detached(
    detached: Callable[[torch.Tensor], torch.Tensor], backend: str
) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = detached(x)
        return y.add_(x[: len(y)])

    results = []
    for function in (program, fusewright.compile(program, backend=backend)):
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        result = function(x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        results.append((result.tolist(), gradient.tolist(), x.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_products_of_other_numbers_are_captured(backend: str) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu"):
            return a @ b, F.linear(torch.ones(2, 3, dtype=torch.complex64), torch.ones(4, 3, dtype=torch.complex64))

    inputs = torch.arange(6).view(2, 3), torch.arange(6).view(3, 2)
    found = fusewright.compile(program, backend=backend, fullgraph=True)(*inputs)
    assert all(map(torch.equal, found, program(*inputs)))


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x[...], lambda x: x.expand(3, 2, 1)])
@pytest.mark.parametrize(
    "reshape", [lambda v: v.squeeze_(), lambda v: v.unsqueeze_(0), lambda v: v.t_(), lambda v: v.swapaxes_(0, 1)]
)
def test_a_view_of_a_leaf_is_not_reshaped_in_place(
    of: Callable[[torch.Tensor], torch.Tensor], reshape: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        reshape(x.view(x.shape)[0] if x.ndim > 2 else x[:])
        return x * 2

    for function in (program, fusewright.compile(program)):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
                function(of(torch.ones(2, 1, requires_grad=True)))


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
ON_SEVERAL: dict[str, Callable[[Any, Any, Any], Any]] = {  # x on a GPU, y and a number n on the CPU
    "mm": lambda x, y, n: x @ y,
    "linear": lambda x, y, n: F.linear(x, y),
    "a sum": lambda x, y, n: x + y,
    "a number of the GPU": lambda x, y, n: y * x.sum(),
    "layer norm": lambda x, y, n: F.layer_norm(x, (4,), y[0]),
    "cat": lambda x, y, n: torch.cat([x, y]),
    "an embedding": lambda x, y, n: F.embedding(y.long(), x),
    "gather": lambda x, y, n: x.gather(0, y.long()),
}
ON_ANY: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a number of the CPU": lambda x, y, n: x * n + n,
    "an index": lambda x, y, n: torch.ops.aten.index.Tensor(x, [y[0].long()]),
    "a write by an index": lambda x, y, n: x.index_put((y[0].long(),), n),
    "a copy": lambda x, y, n: torch.ops.aten.copy.default(x, y),
    "lists": lambda x, y, n: torch._foreach_add([x, y], [x, y]),
}


@pytest.mark.parametrize("name", [*ON_SEVERAL, *ON_ANY])
def test_operands_on_several_devices_are_for_eager(name: str) -> None:
    recorder = Recorder("aten", None)

    def traced(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        type_ = TensorType(shape, contiguous_strides(shape), torch.float32, device)  # type: ignore[arg-type]
        return make_traced(recorder, recorder.graph.placeholder(name), type_)

    x, y, n = traced("x", (4, 4), GPU), traced("y", (4, 4), CPU), traced("n", (), CPU)
    with contextlib.nullcontext() if name in ON_ANY else pytest.raises(GraphBreak, match="on several devices"):
        recorder.call(lambda: (ON_ANY | ON_SEVERAL)[name](x, y, n))
