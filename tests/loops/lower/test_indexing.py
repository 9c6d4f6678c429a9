"""Gathers and scatters against eager; indices out of range."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusewright
from fusewright.loops.ir import CheckedIndex, Pointwise
from fusewright.loops.lower import expressions as ex
from tests.loops import reference, tracing
from tests.loops.lower.checking import check

X = torch.randn(5, 6, 7)
I = torch.tensor([4, 0, -1, 2])
P = torch.tensor([4, 0, 1, 2])


def test_gathers() -> None:
    def function(x: torch.Tensor, i: torch.Tensor, p: torch.Tensor) -> list[torch.Tensor]:
        return [
            x[i], x[:, i], x[i, :, p], x[i, p], x[:, i, p], x[i[:, None], p[None]], x[..., p.int()], x.index_select(1, p),
            torch.take(x, i * 20), (x * 2)[:, p], x.exp()[i], x.permute(2, 0, 1)[p, :, i],
        ]  # fmt: skip

    check(function, X, I, P)


def test_gather_and_embedding() -> None:
    index = torch.randint(0, 5, (3, 6, 7))
    check(lambda x, i: [x.gather(0, i), torch.take_along_dim(x, i % 5, 0)], X, index)
    check(
        lambda w, i: [F.embedding(i, w), F.embedding(i, w, padding_idx=1)],
        torch.randn(9, 4),
        torch.randint(0, 9, (2, 3)),
    )
    check(lambda w, i: F.embedding(i, w) * 2 + 1, torch.randn(9, 4).bfloat16(), torch.randint(0, 9, (2, 3)))


def test_known_indices_need_no_check() -> None:
    program = check(lambda x: x[torch.arange(4)[:, None], torch.arange(3) + 1], torch.randn(5, 6))
    expressions = [store.value for op in program.operations if isinstance(op, Pointwise) for store in op.stores]
    assert not any(isinstance(node, CheckedIndex) for e in expressions for node in ex.walk(e))


@pytest.mark.parametrize("bad", [5, -6])
def test_out_of_range_is_noticed(bad: int) -> None:
    inputs = [X, torch.tensor([0, 1])]
    program = tracing.lowered(lambda x, i: x[i], inputs)
    with pytest.raises(reference.OutOfRange):
        reference.run(program, [X, torch.tensor([0, bad])])


def test_negative_embedding_index_is_an_error() -> None:
    program = tracing.lowered(lambda w, i: F.embedding(i, w), [torch.randn(9, 4), torch.tensor([1, 2])])
    with pytest.raises(reference.OutOfRange):
        reference.run(program, [torch.randn(9, 4), torch.tensor([1, -1])])


def test_index_put() -> None:
    def function(x: torch.Tensor, i: torch.Tensor, p: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.index_put((i,), v[:4]), x.index_put((i, p), v[0, 0]), x.index_put((i, p), v[:4, 0], accumulate=True),
            torch.ops.aten.index_put(x, [None, p], v[:, :4]), x.index_put((i,), torch.tensor(3.0)),
            x.index_put((x > 0,), torch.tensor(9.0)),
        ]  # fmt: skip

    check(function, X, I, P, torch.randn(5, 6, 7))


def test_accumulation_over_equal_indices() -> None:
    i = torch.tensor([1, 1, 0, 1])
    check(
        lambda x, i, v: [x.index_put((i,), v, True), x.index_add(0, i, v, alpha=2)],
        torch.randn(3, 4),
        i,
        torch.randn(4, 4),
    )
    check(lambda x, i, v: x.scatter_add(0, i, v), torch.randn(3, 4), torch.randint(0, 3, (4, 4)), torch.randn(4, 4))
    check(lambda x, i, v: x.index_add(0, i, v), torch.zeros(3, 4, dtype=torch.int64), i, torch.randint(0, 9, (4, 4)))


def test_scatters() -> None:
    index = torch.stack([torch.randperm(6)[:4] for _ in range(5)])

    def function(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor, p: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.scatter(1, i, v), x.scatter(1, i, 2.5), x.index_copy(1, p, v), x.index_fill(0, p, 7.0),
            x.scatter_reduce(1, i, v, "amax"), x.scatter_reduce(1, i, v, "sum"), x.scatter_reduce(1, i, v, "amin"),
        ]  # fmt: skip

    check(function, torch.randn(5, 6), index, torch.randn(5, 4), P)


def test_scatters_of_one_number_without_dimensions() -> None:
    def function(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [x.scatter_add(0, i, v), x.scatter(0, i, v), x.scatter_reduce(0, i, v, "sum"), x.gather(0, i)]

    compiled, index = fusewright.compile(function), torch.zeros(1, dtype=torch.int64)
    for i, v in ((index, torch.tensor(2.0)), (index[0], torch.ones(1)), (index[0], torch.tensor(2.0)), (index, torch.ones(1))):
        torch.testing.assert_close(compiled(torch.ones(1), i, v), function(torch.ones(1), i, v))


def test_what_loops_do_not_express_stays_a_library_call() -> None:
    x = torch.randn(5, 6)
    index = torch.randint(0, 5, (5, 6))
    check(lambda x, i: x.scatter_reduce(0, i, x, "mean"), x, index, externs=["scatter_reduce.two"])
    check(lambda x, i: x.scatter_add(0, i, x), x.bfloat16(), index, externs=["scatter_add.default"])
    check(lambda x: x.sort(1), x, externs=["sort.default"])


def assigned(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x > 1] = value
    return x


FILLS = {
    "masked_fill": lambda x, value: x.masked_fill(x > 1, value),
    "nowhere": lambda x, value: x.masked_fill(x > 100, value),
    "index_fill": lambda x, value: x.index_fill(0, torch.tensor([0, 2]), value),
    "assignment": assigned,
    "full_like": lambda x, value: torch.full_like(x, value.item()),
}


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float16])
def test_a_number_that_the_dtype_cannot_hold_is_an_error(name: str, dtype: torch.dtype) -> None:
    function = FILLS[name]
    compiled = fusewright.compile(function)
    for number in (3.0, 3.5, -5.75, 1e6, float("nan"), 7, 1 << 40, -3):
        given, value = torch.tensor([1, 4, 7]).to(dtype), torch.tensor(number)
        try:
            expected = function(given, value)
        except RuntimeError as error:
            with pytest.raises(RuntimeError) as raised:
                compiled(given, value)
            assert str(raised.value) == str(error)
        else:
            torch.testing.assert_close(compiled(given, value), expected, equal_nan=True)
