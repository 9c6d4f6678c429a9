"""Views: index maps against eager, windows without copies, scatters into parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fusewright
from fusewright.loops.ir import Pointwise
from fusewright.loops.lower.views import reshape_indices
from fusewright.sizes.expressions import loop_symbol
from tests.loops.lower.checking import check

X = torch.randn(2, 3, 4, 5)
VIEWS: dict[str, Callable] = {
    "permute": lambda x: x.permute(2, 0, 3, 1),
    "transpose": lambda x: x.transpose(1, -1),
    "expand": lambda x: x[:, :1].expand(2, 6, 4, 5),
    "unsqueeze": lambda x: x.unsqueeze(-1).unsqueeze(0),
    "squeeze": lambda x: x[:1, :, :1].squeeze(),
    "squeeze_dim": lambda x: x[:1].squeeze(0).unsqueeze(1).squeeze((1,)),
    "view_merge": lambda x: x.view(6, 20),
    "view_split": lambda x: x.view(2, 3, 2, 2, 5, 1),
    "view_mixed": lambda x: x.view(3, 2, 10, 2),
    "reshape_copy": lambda x: x.transpose(1, 2).reshape(8, 15),
    "slice": lambda x: x[:, 1:, ::2, -3:],
    "select": lambda x: x[1, :, -1],
    "diagonal": lambda x: x.diagonal(1, 2, 3),
    "diagonal_below": lambda x: x.diagonal(-1, 2, 3),
    "unfold": lambda x: x.unfold(3, 3, 2),
    "as_strided": lambda x: x.as_strided((3, 4), (5, 2), 7),
    "bits": lambda x: x.view(torch.int32),
    "flatten": lambda x: x.flatten(1, 2).unflatten(1, (4, 3)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_of_an_input_is_no_work(name: str) -> None:
    program = check(VIEWS[name], X)
    if name not in ("reshape_copy", "bits"):
        assert program.operations == [] and program.outputs[0].kind == "view"


@pytest.mark.parametrize("name", VIEWS)
def test_view_of_a_computed_value_composes(name: str) -> None:
    program = check(lambda x: VIEWS[name](x * 2 + 1) - 1, X)
    assert len(program.operations) <= 2


@pytest.mark.parametrize("name", VIEWS)
def test_view_of_a_non_contiguous_input(name: str) -> None:
    if name in ("view_merge", "view_split", "view_mixed", "bits"):
        check(lambda x: VIEWS[name](x.contiguous()), X.transpose(0, 1).contiguous().transpose(0, 1))
    else:
        check(VIEWS[name], X.transpose(0, 1).contiguous().transpose(0, 1))


def test_parts() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [*x.split(2, 2), *x.split([1, 2], 1), *x.chunk(3, 3), *x.unbind(1), *x.tensor_split(2, 3)]

    assert check(function, X).operations == []


def test_views_with_one_base_share_memory() -> None:
    program = check(lambda x: [(x * 2).view(6, 20), x.view(-1)], X)
    assert len(program.operations) == 1

    def both(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.exp()
        return [y, y.t(), y]

    program = check(both, torch.randn(3, 4))
    assert len({output.buffer for output in program.outputs}) == 1


def test_matmul_reads_windows() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, w, b)

    program = check(function, torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5), externs=["addmm.default"])
    assert not any(isinstance(op, Pointwise) for op in program.operations)


def test_scatter_into_parts() -> None:
    def function(x: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.slice_scatter(x, v, 1, 1, 5, 2), torch.select_scatter(x, v[:, 0], 1, -2), torch.diagonal_scatter(x, v[0], 3),
            torch.slice_scatter(x, x + 1), torch.diagonal_scatter(x, v[:3, 0], -1),
        ]  # fmt: skip

    check(function, torch.randn(4, 5), torch.randn(4, 2)[:3].new_ones(4, 2))


def test_copies() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.permute_copy(x, (1, 0)),
            torch.slice_copy(x, 1, 1, 3),
            torch.expand_copy(x, (2, 3, 4)),
            *torch.unbind_copy(x, 1),
        ]

    check(function, torch.randn(3, 4))


def test_reshape_indices_divide_only_where_dimensions_split() -> None:
    i0, i1, i2 = loop_symbol("i0", 8), loop_symbol("i1", 12), loop_symbol("i2", 64)
    assert reshape_indices((8, 768), (8, 12, 64), (i0, i1, i2)) == (i0, i1 * 64 + i2)
    k = loop_symbol("i1", 768)
    assert reshape_indices((8, 12, 64), (8, 768), (i0, k)) == (i0, k // 64, k % 64)
    assert reshape_indices((8, 1, 12), (8, 12, 1), (i0, i1, 0)) == (i0, 0, i1)


@pytest.mark.parametrize("order", [(1, 0), (0, 2, 1), (2, 0, 1), (2, 1, 0), (1, 3, 0, 2)])
def test_symbolic_strides_keep_their_order(order: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 4, 5)[(0,) * (4 - len(order))].permute(order)
    expected = torch.sigmoid(x)
    got = fusewright.compile(torch.sigmoid, dynamic=True)(x)
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 1)])
@pytest.mark.parametrize("program", [lambda x, y: x * torch.complex(y, y), lambda x, y: torch.polar(x, y) * x])
def test_the_real_part_is_not_the_number(program: Callable, shape: tuple[int, ...]) -> None:
    """A gradient is the real part of an operator's result: it may have that one's shape and strides, and begin there."""
    x, y = torch.rand(shape, requires_grad=True), torch.rand(shape, requires_grad=True)
    expected, found = program(x, y), fusewright.compile(program)(x, y)
    grads = [torch.autograd.grad(result, (x, y), torch.ones_like(expected) * 2j) for result in (found, expected)]
    torch.testing.assert_close(*grads)
