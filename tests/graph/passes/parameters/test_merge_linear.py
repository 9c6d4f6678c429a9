"""Linear layers that read one input become one product: what joins, what does not, and the values, as eager gives them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fusewright
from tests.listening import stage_texts


class Attention(torch.nn.Module):
    """Query, key and value of one input; fewer heads of keys than of queries when `groups` is above 1."""

    def __init__(self, width: int = 48, heads: int = 4, groups: int = 1, bias: bool = True, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.groups, self.fused = heads, groups, fused
        self.q = torch.nn.Linear(width, width, bias=bias)
        self.k = torch.nn.Linear(width, width // groups, bias=bias)
        self.v = torch.nn.Linear(width, width // groups, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape

        def split(t: torch.Tensor, heads: int) -> torch.Tensor:
            return t.view(batch, length, heads, -1).transpose(1, 2)

        q, k, v = (
            split(self.q(x), self.heads),
            split(self.k(x), self.heads // self.groups),
            split(self.v(x), self.heads // self.groups),
        )
        if self.groups > 1:
            k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        found = (
            F.scaled_dot_product_attention(q, k, v)
            if self.fused
            else torch.softmax(q @ k.transpose(-1, -2) / 3, -1) @ v
        )
        return found.transpose(1, 2).reshape(batch, length, width) + x


def products(program: Callable[..., Any], *args: torch.Tensor) -> tuple[int, Any]:
    """How many matrix products by parameters the compiled program has, and its result."""
    with stage_texts("parameters") as graphs, torch.no_grad():
        result = fusewright.compile(program, fullgraph=True, options={"disk_cache": False})(*args)
    assert len(graphs) == 1
    return len(re.findall(r"addmm|\bmm\b|_mkl_linear|_linear_pointwise", graphs[0])), result


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if found.dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("groups", "bias", "length"), [(1, True, 1), (1, False, 7), (2, True, 9), (4, False, 33)])
def test_query_key_and_value_are_one_product(dtype, fused, groups, bias, length):
    torch.manual_seed(0)
    module = Attention(groups=groups, bias=bias, fused=fused).to(dtype).eval()
    x = torch.randn(2, length, 48, dtype=dtype)
    with torch.no_grad():
        count, found = products(module, x)
        assert count == (3 if length == 1 else 1)  # too little work for a layout of its own
        assert_equal(found, module(x))
        compiled = fusewright.compile(module)
        for value in (float("nan"), float("inf"), -float("inf")):
            odd = x.clone()
            odd[0, 0, 3] = value
            assert_equal(compiled(odd), module(odd))
        assert_equal(compiled(x.transpose(0, 1).contiguous().transpose(0, 1)), module(x))
        module.k.weight.mul_(-2)
        if bias:
            module.v.bias.add_(1)
        assert_equal(compiled(x), module(x))


def test_rows_that_are_a_sum_of_products():
    """As in a vision transformer over any image: a class token and the patches, so many rows as no size of a view divides for certain."""
    torch.manual_seed(0)
    module = Attention().eval()

    def program(x: torch.Tensor) -> torch.Tensor:
        patches = F.avg_pool2d(x, 4).flatten(2).transpose(1, 2)
        return module(torch.cat((patches[:, :1], patches), 1))

    with torch.no_grad():
        compiled = fusewright.compile(program, fullgraph=True, dynamic=True, options={"disk_cache": False})
        with stage_texts("parameters") as graphs:
            for batch, height, width in ((3, 40, 48), (2, 33, 31), (1, 8, 8), (5, 4, 4)):
                x = torch.randn(batch, 48, height, width)
                assert_equal(compiled(x), program(x))
    assert len(re.findall(r"addmm|\bmm\b|_mkl_linear|_linear_pointwise", graphs[0])) == 1


def test_what_stays_apart():
    torch.manual_seed(0)
    a, b, c = (torch.nn.Linear(48, 32) for _ in range(3))
    x = torch.randn(50, 48)

    def returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a(x), b(x)

    def returned_as_views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a(x).t(), b(x)[1:]

    def of_other_inputs(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(a(x)) * torch.tanh(b(x + 1))

    def split(x: torch.Tensor) -> torch.Tensor:
        return sum(map(torch.sigmoid, a(x).split(8, 1))) * b(x).chunk(4, 1)[2].exp()  # type: ignore[return-value]

    def read_across_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sigmoid(a(x).view(-1)), torch.tanh(b(x).view(25, 64))

    for program in (returned, returned_as_views, of_other_inputs, read_across_rows):
        count, found = products(program, x)
        with torch.no_grad():
            expected = program(x)
        assert count == 2
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
    with torch.no_grad():
        torch.testing.assert_close(products(split, x)[1], split(x))

    def two_of_three(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sigmoid(a(x)) * b(x), c(x)

    count, found = products(two_of_three, x)
    with torch.no_grad():
        expected = two_of_three(x)
    assert count == 2
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)

    many = torch.randn(600, 48)
    assert products(lambda x: torch.sigmoid(a(x)) * b(x), many)[0] == 2
