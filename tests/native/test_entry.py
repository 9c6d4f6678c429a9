"""Entry and CompiledFunction: the checks that need no torch, and calls with tensors."""

from __future__ import annotations

import pytest
import torch

from fusewright import _native
from fusewright.capture.guards import Guard, TensorGuard, build_program, capture_global_state
from fusewright.capture.guards.sources import FunctionSource, Local, TensorSize
from tests.native.native_checks import CHECKS


@pytest.mark.parametrize("name", CHECKS["entry"])
def test_without_torch(name):
    CHECKS["entry"][name]()


def tensor_guard(tensor: torch.Tensor, shape) -> TensorGuard:
    return TensorGuard(
        type(tensor), tensor.dtype, tensor.device, tensor.requires_grad, shape, (None,) * tensor.dim(), False
    )


def test_static_then_symbolic_sizes():
    def f(x, y):
        return x * 2 + y

    captures = []

    def miss(compiled, function, locals):
        x, _ = locals
        captures.append(tuple(x.shape))
        shape = tuple(x.shape) if len(captures) == 1 else (None, x.shape[1])
        sources = Local(0, "x"), Local(1, "y")
        guards = [Guard("TENSOR", source, tensor_guard(value, shape)) for source, value in zip(sources, locals)]
        guards.append(Guard("STATE", FunctionSource(), capture_global_state()))
        guards.append(Guard("SIZE", sources[0], ("==", ("sym", "a"), ("sym", "b"))))
        symbols = {"a": TensorSize(sources[0], 0), "b": TensorSize(sources[1], 0)}
        program = build_program(guards, [*sources, TensorSize(sources[0], 0)], symbols)
        return _native.Entry(
            program, lambda x, y, n: (torch.add(y, x, alpha=2), n), lambda outputs, function, x, y: outputs
        )

    compiled = _native.CompiledFunction(f, miss)
    for rows in (3, 3, 4, 5, 6, 3):
        x, y = torch.randn(rows, 4), torch.randn(rows, 4)
        result, n = compiled(x, y)
        assert n == rows
        torch.testing.assert_close(result, f(x, y))
    assert captures == [(3, 4), (4, 4)]
    with torch.no_grad():
        compiled(torch.randn(3, 4), torch.randn(3, 4))
    assert len(captures) == 3


def test_inputs_are_released_after_the_graph():
    freed = []

    def f(x):
        return x

    x = torch.ones(3)
    program = build_program([Guard("TENSOR", Local(0, "x"), tensor_guard(x, (3,)))], [Local(0, "x")])
    compiled = _native.CompiledFunction(f, None)
    compiled.append(_native.Entry(program, lambda x: (x.sum(),)))

    class Watched(list):
        def __del__(self):
            freed.append(True)

    x.watched = Watched()
    assert compiled(x).item() == 3
    del x
    assert freed == [True]
