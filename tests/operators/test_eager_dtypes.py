"""Dtypes that PyTorch's CPU kernels refuse, or answer otherwise than its meta kernels: compiled code does the same."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

import fusewright
from fusewright.operators import eager_dtypes
from fusewright.sizes.tensor_type import TensorType
from tests.ops.cases import Case
from tests.ops.running import run_case

BOOL, INT = torch.tensor([True, False]), torch.tensor([1, 2, 3])

REFUSED: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "abs of bool": (torch.abs, BOOL),
    "a list's floor of bool": (lambda x: torch._foreach_floor([x]), BOOL),
    "in place": (lambda x: torch._foreach_abs_([x]), BOOL),
    "lerp of integers": (lambda x: torch._foreach_lerp([x], [x], 0.5), INT),
    "frac of integers": (torch.frac, INT),
    "subtraction of bool": (lambda x: x - x, BOOL),
    "a number less a bool": (lambda x: torch.rsub(x, 1), BOOL),
    "deviation of integers": (lambda x: torch.std(x, 0), INT.to(torch.int16)),
    "variance of bool": (lambda x: torch.var(x, -1), BOOL),
    "softmax of integers": (lambda x: torch.softmax(x, 0), INT),
    "pooling of bool": (lambda x: torch.nn.functional.max_pool1d(x[None], 2), BOOL),
    "mean pooling of halves": (lambda x: torch.nn.functional.avg_pool3d(x.half().view(1, 1, 3, 1, 1), (2, 1, 1)), INT),
    "norms of neighbours of halves": (
        lambda x: torch.nn.functional.local_response_norm(x.half().view(1, 3, 1, 1), 2), INT
    ),
    "a reflected bool": (lambda x: torch.nn.functional.pad(x[None], (1, 1), mode="reflect"), BOOL),
    "a reflected plane of bool": (lambda x: torch.nn.functional.pad(x[None, None], (1, 1, 0, 0), mode="reflect"), BOOL),
    "sums of another dtype": (lambda x: x.index_add(0, x - 1, x.float()), INT),
    "sums of another dtype in place": (lambda x: x.clone().index_add_(0, x - 1, x.int()), INT),
    "copies of another dtype": (lambda x: x.index_copy(0, x - 1, x.float()), INT),
    "a mask of integers": (lambda x: torch.masked_select(x, x), INT),
    "counts of floats": (lambda x: torch.bincount(x.float()), INT),
    "a loss over other dtypes": (lambda x: torch.nn.functional.huber_loss(x, x.float()), BOOL),
    "a loss of integers": (lambda x: torch.nn.functional.mse_loss(x, x, reduction="none"), INT),
    "argmin of bool": (lambda x: x.argmin(0), BOOL),
    "the least of each row of bool's places": (lambda x: torch.stack([x, x]).any(0).argmax(0), BOOL),
    "logcumsumexp of integers": (lambda x: x.logcumsumexp(0), INT),
    "a histogram of integers that is overwritten": (lambda x: x.histc(3, -5, 5).zero_(), INT),
    "few elements to look for, with gaps": (
        lambda x: torch.isin(z := x.repeat(2, 2)[:, 1:-1].neg_(), z), INT
    ),
    "interpolation of integers": (lambda x: torch.nn.functional.interpolate(x[None, None], scale_factor=2), INT),
    "addcmul of bool": (lambda x: torch.addcmul(x, x, x), BOOL),
    "a bool less a tensor": (lambda x: torch.rsub(x, torch.ones(2)), BOOL),
    "layer norm with weights of another dtype": (
        lambda x: torch.nn.functional.layer_norm(x.float(), (3,), x.double(), x.double()), INT
    ),
    "group norm with weights of another dtype": (
        lambda x: torch.nn.functional.group_norm(x.float()[None], 3, x.double(), x.double()), INT
    ),
    "places of another dtype": (lambda x: x.index_put((x - 1,), torch.tensor(2.5)), INT),
    "an assignment of another dtype": (lambda x: x.clone().__setitem__(x - 1, torch.tensor(2.5)), INT),
    "a gradient of halves of another dtype": (
        lambda x: torch.ops.aten.glu_backward(x.bfloat16(), torch.cat([x.float(), x.float()]), 0), INT
    ),
    "a gradient of windows of another dtype": (
        lambda x: torch.ops.aten.avg_pool2d_backward(
            x.double()[:, None, None], x.float()[:, None, None], [1, 1], [1, 1], [0, 0], False, True, None
        ), INT
    ),
    "a gradient that a library computes of several elements": (
        lambda x: torch.ops.aten.gelu_backward(x.double(), x.float()), INT
    ),
    "a loss with weights of another dtype": (
        lambda x: torch.nn.functional.nll_loss(torch.rand(3, 4), x, torch.rand(4).double()), INT
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, x = REFUSED[name]
    assert run_case(Case(name, lambda transform: transform(lambda x: function(x)), (x,), {})).kind == "same error"


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(2, 3, 4), (4,), (2, 2, 3, 4)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_a_linear_layer_whose_bias_has_another_dtype(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], autocast: bool, batched: bool
) -> None:
    """Eager adds it in place to a product that is apart, as that of what is turned."""
    x, weight = torch.arange(96.0)[: 4 * math.prod(shape[:-1])].view(4, *shape[:-1]).movedim(0, -1) / 7, torch.ones(3, 4) / 3
    found = []
    linear = (lambda x, *rest: torch.func.vmap(lambda row: F.linear(row, *rest))(x[None])) if batched else F.linear
    for run in (linear, fusewright.compile(linear, backend=backend)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            try:
                found.append(run(x, weight, torch.full((3,), 3, dtype=dtype)))
            except RuntimeError as error:
                found.append(type(error))
    if isinstance(found[0], type):
        assert found[1] is found[0]
    else:
        torch.testing.assert_close(found[1], found[0])


WRITTEN: dict[str, Callable[[torch.Tensor], Any]] = {
    **{
        f"{kind}_pool{rank}d": lambda x, kind=kind, rank=rank: getattr(F, f"{kind}_pool{rank}d")(x[(None,) * rank], 1)
        for kind in ("avg", "max", "adaptive_avg", "adaptive_max")
        for rank in (1, 2, 3)
    },
    **{
        f"{name}{rank}d": lambda x, name=name, rank=rank: getattr(F, f"{name}{rank}d")(
            x[(None,) * rank].repeat(1, 4, *[1] * rank), x[(None,) * rank + (slice(1),)].repeat(4, 2, *[1] * rank), None, 2, 0,
            groups=2,
        )
        for name in ("conv", "conv_transpose")
        for rank in (1, 2, 3)
    },
    "bmm": lambda x: x[None, None] @ x[None, :, None].expand(2, 2, 1),
    "bilinear": lambda x: F.bilinear(x[None], x[None], x[None].expand(2, 2, 2)),
    "geqrf": lambda x: torch.geqrf(x[None]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.half])
def test_refused_behind_a_write(name: str, dtype: torch.dtype) -> None:
    """The call cannot be repeated once an argument is written to, and PyTorch's C functions do not tell an error's class."""

    def function(x: torch.Tensor) -> Any:
        x *= x
        return WRITTEN[name](x)

    found = []
    for run in (function, fusewright.compile(function)):
        x = torch.tensor([3, 1]).to(dtype)
        try:
            run(x)
            found.append((None, x.tolist()))
        except Exception as error:
            found.append((type(error), x.tolist()))
    assert found[1] == found[0]


LIBRARY: dict[str, Callable[[torch.Tensor], Any]] = {
    "kthvalue": lambda x: torch.kthvalue(x.bool(), 2)[0], "cdist": lambda x: torch.cdist(x.half(), x.half()),
    "singular values": lambda x: torch.linalg.svd(x.half())[1], "transform": lambda x: torch.fft.fft(x.half()),
    "factors": lambda x: torch.linalg.cholesky(-x), "transform of nothing": lambda x: (torch.fft.fft(x[:0]), x.sum().unbind()), "distances": lambda x: torch.pdist(x.half()), "mode": lambda x: x.half().mode()[0],
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARY)
def test_what_a_library_refuses_behind_a_write(name: str) -> None:
    """The error is of eager's class, and the write is done."""
    function = LIBRARY[name]

    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        y.scatter_(0, torch.zeros_like(y, dtype=torch.int64), 0)
        return function(x)

    outcomes: list[Any] = []
    compiled = fusewright.compile(program)
    for call in (program, compiled, compiled):
        y = torch.ones(3)
        try:
            outcome: Any = call(torch.eye(3), y)
        except RuntimeError as error:
            outcome = type(error)
        outcomes.append(outcome)
        assert y.tolist() == [0, 1, 1]
    if isinstance(outcomes[0], torch.Tensor):
        assert all(torch.equal(one, outcomes[0]) for one in outcomes)
    else:
        assert len(set(outcomes)) == 1
    assert name == "mode" or not isinstance(outcomes[0], torch.Tensor)


def test_another_dtype() -> None:
    dropped = Case(
        "", lambda transform: transform(lambda x: torch.ops.aten.native_dropout_backward(x, x, 2.0)), (BOOL,), {}
    )
    assert run_case(dropped).kind == "captured"  # a bool gradient, and a float result
    assert run_case(Case("", lambda transform: transform(lambda x: torch.pow(x, True)), (BOOL,), {})).kind == "broke"
    assert run_case(Case("", lambda transform: transform(lambda x: torch.pow(x, 2)), (BOOL,), {})).kind == "captured"
    number = torch.tensor(2.0)
    blocks = Case("", lambda transform: transform(lambda x: torch.block_diag(x.bfloat16(), number)), (INT,), {})
    assert run_case(blocks).kind == "broke"  # its meta kernel takes a number for a matrix


# Calls of one operator that eager answers differently, for what the arguments are beside their dtypes.
DIFFERENT: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "rank": (
        lambda x: x.contiguous(memory_format=torch.channels_last) + 1,
        [(torch.ones(3, 4),), (torch.ones(2, 3, 4, 5),), (torch.ones(()),)],
    ),
    "memory format": (
        lambda x, form: x.contiguous(memory_format=form) + 1,
        [
            (torch.ones(5, 4).t(), form)
            for form in (torch.channels_last, torch.contiguous_format, torch.channels_last_3d)
        ],
    ),
    "a zero": (lambda x, n: x % n, [(INT, 0), (INT, 2), (INT, -2)]),
    "digits": (lambda x, n: torch.round(x, decimals=n), [(INT, 1), (INT, 0), (INT, -1)]),
    "a large number": (
        lambda x, n: x.masked_fill(x > 1, n),
        [(INT.half(), -1e9), (INT.half(), -1.0), (INT.half(), float("-inf"))],
    ),
    "a number out of range": (
        lambda x, n: x.clamp(max=n),
        [(INT.to(torch.uint8), 300), (INT.to(torch.uint8), 2), (INT.to(torch.uint8), -1)],
    ),
    "a bool": (lambda x, n: x + n, [(BOOL, True), (BOOL, 1), (BOOL, 1.0)]),
    "rounding": (lambda x, mode: torch.div(x, 2, rounding_mode=mode), [(INT, "no such"), (INT, "floor"), (INT, None)]),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", DIFFERENT)
def test_no_answer_serves_another_question(name: str, backward: bool) -> None:
    function, calls = DIFFERENT[name]
    eager_dtypes._answer.cache_clear()
    for args in calls[::-1] if backward else calls:
        fixed = args[1:]
        kind = run_case(
            Case(name, lambda transform, fixed=fixed: transform(lambda x: function(x, *fixed)), args[:1], {})
        ).kind
        try:
            function(*args)
        except Exception:
            assert kind == "same error"
        else:
            assert kind == "captured"


def test_a_failure_of_the_moment_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = TensorType((2,), (1,), torch.float32, torch.device("cpu"))
    eager_dtypes._answer.cache_clear()
    for error in (MemoryError, RecursionError):
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(eager_dtypes, "_made", Mock(side_effect=error))
            eager_dtypes.disagreement(torch.ops.aten.sin.default, (kind,), {}, kind)
    assert eager_dtypes.disagreement(torch.ops.aten.sin.default, (kind,), {}, kind) == ""


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_the_question_gives_no_warning(name: str) -> None:
    """What warns inside the call of a recorded function is told when that function ends."""
    function = getattr(torch, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = fusewright.compile(lambda x: function(x, 1))(torch.arange(6.0).view(2, 3))
    torch.testing.assert_close(got, function(torch.arange(6.0).view(2, 3), 1))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_a_transform_that_is_active_changes_no_answer(mode: str) -> None:
    """Answers are kept for the whole process."""

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: F.interpolate(y, scale_factor=2, mode=mode).sin().sum())(x)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: gradient(y).sin().sum())(x)

    eager_dtypes._answer.cache_clear()
    x = torch.rand(2, 3, 5)
    torch.testing.assert_close(fusewright.compile(function, dynamic=True)(x), function(x))
    kind = TensorType((), (), torch.float64, torch.device("cpu"))
    for number in (1.0, 2.0, 0.5):
        assert eager_dtypes.disagreement(torch.ops.aten.mul.Tensor, (kind, number), {}, kind) == ""
    assert not fusewright.explain(lambda x: (x * 2, random.random() * 2.0))(x).break_reasons
