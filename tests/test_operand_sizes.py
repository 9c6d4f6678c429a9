"""Operators whose operands must fit together: over sizes that change, 1 among them, results and errors are eager's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusewright
from fusewright.base.events import STREAM, Event, FellBack
from fusewright.loops.lower import registry

Program = Callable[..., Tensor]
Sizes = Sequence[tuple[int, ...]]


def sizes(text: str) -> Sizes:
    """One digit a size, one word a call."""
    return [tuple(map(int, word)) for word in text.split()]


def places(count: int, below: int) -> Tensor:
    return torch.arange(count) * 7 % max(below, 1)


def rows(count: int, width: int, below: int) -> Tensor:
    """Places that differ within a row, so that the order of writing does not matter."""
    return (torch.arange(width) % max(below, 1)).repeat(count, 1)


def mask(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 2 == 0


def put(x: Tensor, *arguments: Any) -> Tensor:
    """x[:, i] = v"""
    x = x.clone()
    x[:, arguments[0]] = arguments[1]
    return x


PUT = sizes("3333 4444 4414 4441 4511 4834 4384 4332 1334")
PICK = sizes("3333 4444 4425 4452 4412 1412 1422 4144")
SCATTER = sizes("333333 444444 553255 445255 444434 444443 441414 444414 142323 444141 444441")
ALONG = sizes("33333 44444 44114 44344 44434 44414 44441 44443 41441 41444 14114 14144")
PAIR = sizes("333 444 441 414 453 435 122 111")
ONE = sizes("333 444 441 419 143")
FLAT = sizes("3333 4444 4441 4414 4435 4453 1111")
MASKS = sizes("33331 44441 44141 44411 44341 44448 44447 14441")
PIXELS = sizes("244 484 464 042 484 484 444 404 440 444 432")
PART = sizes("333 444 441 443 434 133 211 413")


def into(k: int, n: int, a: int, b: int) -> tuple[Tensor, ...]:
    return torch.randn(5, k), torch.zeros(n, dtype=torch.int64) + places(n, 5), torch.ones(a, b)


def along(k: int, width: int, n: int, a: int, b: int) -> tuple[Tensor, ...]:
    return torch.randn(k, width), torch.arange(n) % max(k, 1), torch.ones(a, b)


def scattered(k: int, width: int, n: int, m: int, a: int, b: int) -> tuple[Tensor, ...]:
    return torch.randn(k, width), rows(n, m, width), torch.ones(a, b)


def picked(k: int, width: int, n: int, m: int) -> tuple[Tensor, ...]:
    return torch.randn(k, width), places(n * m, width).reshape(n, m)


def one(k: int, width: int, n: int) -> tuple[Tensor, ...]:
    return torch.randn(k, width), places(n, min(k, width))


CASES: dict[str, tuple[Program, Callable[..., tuple[Tensor, ...]], Sizes]] = {
    "index_put": (lambda x, i, v: x.index_put((i,), v), into, PUT),
    "index_put accumulating": (lambda x, i, v: x.index_put((i,), v, accumulate=True), into, PUT),
    "index_put at two": (
        lambda x, i, j, v: x.index_put((i, j), v),
        lambda k, n, m, a: (torch.randn(5, k), places(n, 5), places(m, k), torch.ones(a)),
        sizes("3333 4444 4414 4144 4551 4834 4384 4332 4113"),
    ),
    "assignment": (
        put,
        lambda k, n, a, b: (torch.randn(k, 5), places(n, 5), torch.ones(a, b)),
        [(k, n, b, a) for k, n, a, b in PUT],
    ),
    "index": (lambda x, i, j: x[i, j] + 1, lambda k, n, m: (torch.randn(5, k), places(n, 5), places(m, k)), PAIR),
    "index with a gap": (
        lambda x, i, j: x[i, :, j] + 1,
        lambda k, n, m: (torch.randn(5, 2, k), places(n, 5), places(m, k)),
        PAIR,
    ),
    "gather": (lambda x, i: x.gather(1, i) + 1, picked, PICK),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 1) + 1, picked, PICK),
    "scatter": (lambda x, i, s: x.scatter(1, i, s) + 1, scattered, SCATTER),
    "scatter of a number": (lambda x, i: x.scatter(1, i, 2.0) + 1, picked, PICK),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s) + 1, scattered, SCATTER),
    "scatter_reduce": (lambda x, i, s: x.scatter_reduce(1, i, s, "amax") + 1, scattered, SCATTER),
    "index_add": (lambda x, i, s: x.index_add(0, i, s) + 1, along, ALONG),
    "index_copy": (lambda x, i, s: x.index_copy(0, i, s) + 1, along, ALONG),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0) + 1, one, ONE),
    "index_select": (lambda x, i: x.index_select(1, i) + 1, one, ONE),
    "take": (lambda x, i: x.take(i) + 1, one, [*ONE[:3:2], *ONE]),
    "put": (
        lambda x, i, s: x.put(i, s) + 1,
        lambda k, w, n, m: (torch.randn(k, w), torch.arange(n) % (k * w), torch.ones(m)),
        FLAT,
    ),
    "masked_scatter": (
        lambda x, m, s: x.masked_scatter(m, s) + 1,
        lambda k, w, a, b, n: (torch.randn(k, w), mask(a, b), torch.ones(20 * n)),
        [*MASKS, (4, 4, 4, 4, 0)],
    ),
    "masked_fill": (lambda x, m: x.masked_fill(m, 2.0), lambda k, w, a, b, _: (torch.randn(k, w), mask(a, b)), MASKS),
    "index_put by a mask": (
        lambda x, m, v: x.index_put((m,), v),
        lambda k, w, a, b, n: (torch.randn(k, w), mask(a, b), torch.ones(n)),
        MASKS,
    ),
    "select_scatter": (
        lambda x, s: x.select_scatter(s, 0, 1) + 1,
        lambda k, w, n: (torch.randn(k, w), torch.randn(n)),
        PART,
    ),
    "slice_scatter": (
        lambda x, s: x.slice_scatter(s, 0, 1, 3) + 1,
        lambda k, w, n: (torch.randn(k, w), torch.randn(min(k - 1, 2), n)),
        PART,
    ),
    "diagonal_scatter": (
        lambda x, s: x.diagonal_scatter(s) + 1,
        lambda k, w, n: (torch.randn(k, w), torch.randn(n)),
        PART,
    ),
    "as_strided_scatter": (
        lambda x, s: x.as_strided_scatter(s, (2, 2), (1, 2)) + 1,
        lambda k, m, n: (torch.randn(k), torch.randn(m, n)),
        sizes("522 622 612 621 422 322 632"),
    ),
    "embedding": (lambda x, i: torch.nn.functional.embedding(i, x) + 1, one, ONE),
    "transposed convolution": (
        lambda x: F.conv_transpose1d(x, x.index_add_(1, torch.tensor([1]), x[:, :1].clone())),
        lambda *shape: (torch.randn(*shape),),
        sizes("228 420 477 472 336 445"),
    ),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2) + 1, lambda *shape: (torch.randn(*shape),), PIXELS),
}


def outcome(program: Program, arguments: tuple[Tensor, ...]) -> Tensor | type[BaseException]:
    try:
        return program(*[argument.clone() for argument in arguments])
    except (RuntimeError, IndexError) as error:
        return type(error)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dynamic", "order"), [(False, 1), (None, 1), (None, -1), (True, 1)])
@pytest.mark.parametrize("name", CASES)
def test_operands_fit_or_the_error_is_eagers(
    name: str, dynamic: bool | None, order: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a library call of ours that fails, of which PyTorch writes to the standard error."""
    program, make, calls = CASES[name]
    compiled = fusewright.compile(program, dynamic=dynamic, recompile_limit=100)
    torch.manual_seed(0)
    with torch.no_grad():
        for size in calls[::order]:
            arguments = make(*size)
            expected, found = outcome(program, arguments), outcome(compiled, arguments)
            if isinstance(expected, Tensor):
                assert isinstance(found, Tensor), f"{size}: {found}"
                torch.testing.assert_close(found, expected, msg=lambda text: f"{size}: {text}")
            else:
                assert found is expected, size
    # how many elements a mask selects is known to the kernel alone
    assert "aoti_torch" not in capfd.readouterr().err or name == "masked_scatter"


@pytest.mark.parametrize("dynamic", [False, None, True])
def test_eager_refuses_the_gradient_of_a_shuffle_without_elements(dynamic: bool | None) -> None:
    def trained(function: Program, *shape: int) -> Any:
        x = torch.zeros(shape, requires_grad=True)
        function(x).sum().backward()
        return x.grad

    def shuffled(x: Tensor) -> Tensor:
        return F.pixel_shuffle(torch.kron(x, torch.ones(1)), 2)

    compiled = fusewright.compile(shuffled, dynamic=dynamic)
    for shape in [(4, 4, 3), (8, 4, 5), (0, 4, 3), (4, 8, 3)]:
        with pytest.raises(RuntimeError, match="invalid gradient") if 0 in shape else contextlib.nullcontext():
            torch.testing.assert_close(trained(compiled, *shape), torch.ones(shape))


SAME_PLACE: dict[str, Program] = {
    "scatter": lambda a: a.scatter(1, torch.full(a.shape, 2), 63.0),
    "scatter rows": lambda a: a.scatter(0, torch.full(a.shape, 0), 63.0),
    "index_fill": lambda a: a.index_fill(1, torch.full((a.shape[1],), 2), 5.0),
    "index_put": lambda a: a.index_put((torch.full((a.shape[0],), 0),), torch.tensor(5.0)),
    "index_put at two": lambda a: a.index_put(
        (torch.full((a.shape[0],), 0), torch.full((a.shape[0],), 2)), torch.tensor(5.0)
    ),
    "every second": lambda a: a.scatter(1, (torch.arange(a.shape[1]) // 2).expand(a.shape), 63.0),
    "in place": lambda a: a.clone().scatter_(1, torch.full(a.shape, 2), 63.0),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(1, 5), (4, 3), (64, 300)])
@pytest.mark.parametrize("name", SAME_PLACE)
def test_as_many_writes_as_elements_need_not_reach_them_all(name: str, shape: tuple[int, int], dynamic: bool) -> None:
    def program(a: Tensor) -> Tensor:
        return SAME_PLACE[name](a) + 1

    a = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(fusewright.compile(program, dynamic=dynamic)(a), program(a))


BROADCASTS = (
    ((2, 2), (2, 2, 2)),
    ((2, 2, 2), (2, 2)),
    ((1, 2), (2, 2, 2)),
    ((2, 2, 2), (2, 1)),
    ((), (2, 2)),
    ((2, 2), ()),
    ((2, 1), (1, 2)),
)


def needed(op: torch._ops.OpOverload) -> list[Any]:
    return [argument for argument in op._schema.arguments if not argument.has_default_value()]


SEVERAL = [
    op
    for op in registry._ROWS
    if all(str(argument.type) in ("Tensor", "number", "float", "bool") for argument in needed(op))
    and sum(str(argument.type) == "Tensor" for argument in needed(op)) > 1
    and "log_sigmoid_backward" not in op._schema.name  # one operand holds what another decides
]


def broadcasts(op: torch._ops.OpOverload) -> list[tuple[Any, ...]]:
    """Operands of other shapes that eager accepts, in the first dtype in which there are any."""
    kinds = [str(argument.type) for argument in needed(op)]
    for dtype in (torch.float32, torch.bool, torch.int64):
        found = []
        for first, second in BROADCASTS:
            shapes = iter((first, second, *[first] * len(kinds)))
            operands = tuple(
                (torch.rand(next(shapes)) * 3).to(dtype) if kind == "Tensor" else kind != "bool" and 0.5 for kind in kinds
            )
            with contextlib.suppress(RuntimeError, IndexError):
                op(*operands)
                found.append(operands)
        if found:
            return found
    return []


@pytest.mark.parametrize("op", SEVERAL, ids=str)
def test_operands_of_lower_rank_are_repeated(op: torch._ops.OpOverload) -> None:
    cases = broadcasts(op)
    for dynamic in (False, True):
        compiled = fusewright.compile(lambda cases: [op(*operands) for operands in cases], dynamic=dynamic)
        torch.testing.assert_close(compiled(cases), [op(*operands) for operands in cases], equal_nan=True)


def test_most_operators_repeat_operands() -> None:
    assert sum(len(broadcasts(op)) > 3 for op in SEVERAL) > 45


NUMBERS: dict[str, Callable[[Tensor, Any], Any]] = {
    "alpha": lambda x, n: torch.add(x, x.sin(), alpha=n) + torch.sub(x, x * 2, alpha=n),
    "value": lambda x, n: torch.addcmul(x, x, x, value=n) + torch.addcdiv(x, x, x + 9, value=n),
    "beta": lambda x, n: torch.addmm(x, x @ x.T, x, beta=n, alpha=n) + torch.addr(x, x[:, 0], x[0], beta=n, alpha=n),
    "lerp": lambda x, n: torch.lerp(x, x + 1, n),
    "limits": lambda x, n: x.clamp(-n, n) + F.hardtanh(x * 9, -n, n) + x.clamp_max(n),
    "slopes": lambda x, n: F.leaky_relu(x, n) + F.elu(x, n) + F.celu(x, n) + F.softplus(x, n, n),
    "thresholds": lambda x, n: F.threshold(x, n, n + 1) + F.softshrink(x * 9, n) + F.hardshrink(x * 9, n),
    "losses": lambda x, n: F.huber_loss(x, x * 9, delta=n) + F.smooth_l1_loss(x, x * 9, beta=n),
    "eps": lambda x, n: F.layer_norm(x, x.shape[1:], eps=n) + F.normalize(x, eps=n) + F.group_norm(x, 1, eps=n),
    "batch_norm": lambda x, n: F.batch_norm(x, None, None, None, None, True, 1 / n, n),
    "fills": lambda x, n: x.masked_fill(x > 0, n) + torch.where(x > 0, x, n) + torch.full_like(x, n),
    "compared": lambda x, n: (x > n, x != n, x.long() == n, torch.isclose(x, x + 1, atol=n, rtol=n)),
    "division": lambda x, n: x / n + x % n + x.detach() // n + x.fmod(n) + torch.div(x, n, rounding_mode="trunc"),
    "nan_to_num": lambda x, n: x.log().nan_to_num(n, n, n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "scatter": lambda x, n: x.scatter(1, torch.zeros(3, 1, dtype=torch.int64), n),
    "attention": lambda x, n: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=1 / n),
}
LABELS: dict[str, Callable[[Tensor, int], Any]] = {  # a whole number, as models that answer questions have it
    "ignore_index": lambda x, n: F.cross_entropy(x, torch.tensor([1, 0, n]).clamp(0, n), ignore_index=n),
    "ignore_index of images": lambda x, n: F.nll_loss(
        x[None, :, :, None].expand(1, 3, n, 2), torch.ones(1, n, 2, dtype=torch.int64), ignore_index=n
    ),
    "bits": lambda x, n: (x.long() & n, x.long() ^ n, x.long() << (n - 4)),
}


@pytest.mark.parametrize("scale", [1, 0.5])
@pytest.mark.parametrize("name", [*NUMBERS, *LABELS])
def test_a_size_is_a_number_of_an_operator(name: str, scale: float) -> None:
    function = NUMBERS.get(name) or LABELS[name]
    if name in LABELS and scale != 1:
        pytest.skip("it takes whole numbers only")

    def program(x: Tensor) -> Any:
        return function(x, x.shape[1] * scale)

    compiled = fusewright.compile(program, fullgraph=True, dynamic=True)
    for width in (5, 7, 8):
        for training in (False, True):
            x = torch.randn(3, width, requires_grad=training)
            found, expected = compiled(x), program(x)
            torch.testing.assert_close(found, expected)
            if training and isinstance(expected, Tensor) and expected.requires_grad:
                weights = torch.randn_like(expected)
                mine, theirs = (torch.autograd.grad(result, x, weights) for result in (found, expected))
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


CONVOLUTION = torch.randn(4, 4, 3, 3)
SETTINGS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "padding": lambda x, n: F.conv2d(x, CONVOLUTION, padding=n),
    "stride": lambda x, n: F.conv2d(x, CONVOLUTION, stride=(n, 3), padding=(0, n)),
    "dilation": lambda x, n: F.conv2d(x, CONVOLUTION, dilation=n),
    "transposed": lambda x, n: F.conv_transpose2d(x, CONVOLUTION, stride=n, padding=n),
    "window": lambda x, n: F.max_pool2d(x, n, stride=n) + F.avg_pool2d(x, n),
    "patches": lambda x, n: F.unfold(x, 3, dilation=n, padding=n, stride=n),
    "scale": lambda x, n: F.interpolate(x, scale_factor=n, mode="bilinear"),
    "scale of one side": lambda x, n: F.interpolate(x, scale_factor=(n / 2, 1), mode="bicubic", antialias=True),
    "groups": lambda x, n: F.channel_shuffle(x.repeat(1, 3, 1, 1), n),
    "border": lambda x, n: F.pad(x, (n, 0, 1, n), mode="reflect"),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_an_operator_varies(name: str, training: bool) -> None:
    events: list[Event] = []
    compiled = fusewright.compile(lambda x, n: SETTINGS[name](x, n), fullgraph=True)
    with STREAM.listening(events.append):
        for n in (1, 2, 3, 2):
            x = torch.randn(2, 4, 13, 13, requires_grad=training)
            found, expected = compiled(x, n), SETTINGS[name](x, n)
            torch.testing.assert_close(found, expected)
            assert found.stride() == expected.stride()
            if training:
                mine, theirs = (torch.autograd.grad(result.square().sum(), x)[0] for result in (found, expected))
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert not [event for event in events if isinstance(event, FellBack)]


def test_one_function_over_layers_of_other_shapes() -> None:
    layers = [torch.nn.Conv2d(3, 8, 7, 4, 3), torch.nn.Conv2d(8, 16, 3, 2, 1), torch.nn.Conv2d(16, 24, 3, 2, 1)]
    compiled = fusewright.compile(lambda layer, x: layer(x).relu(), fullgraph=True)
    events: list[Event] = []
    with torch.no_grad(), STREAM.listening(events.append):
        for batch in (2, 3, 2):
            x = torch.randn(batch, 3, 64, 64)
            for layer in layers:
                expected = layer(x).relu()
                torch.testing.assert_close(compiled(layer, x), expected)
                x = expected
    assert not [event for event in events if isinstance(event, FellBack)]
