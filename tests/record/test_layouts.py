"""Layouts of results that only the operator decides: what is not dense, and memory that nobody has written to."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusewright
from fusewright.base.events import STREAM, FellBack
from fusewright.loops.lower import values
from fusewright.sizes.expressions import Dim
from fusewright.sizes.proofs import Facts, prove

OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "int16": lambda x: x.to(torch.int16), "complex": lambda x: x.to(torch.complex64), "bfloat16": lambda x: x.bfloat16() + 1,
    "product": lambda x: x * 2, "index_fill": lambda x: x.index_fill(0, torch.tensor([0]), 1.0), "clone": torch.clone,
    "zeros_like": torch.zeros_like, "batch_norm": lambda x: F.batch_norm(x, None, None, training=True), "rrelu": F.rrelu,
    "batch_norm in evaluation": lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])),
    "sort": lambda x: x.sort(0), "softmax": lambda x: x.softmax(0), "flip": lambda x: x.flip(0), "roll": lambda x: x.roll(1, 0),
    "index_copy": lambda x: x.index_copy(0, torch.tensor([0]), x[:1]), "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "select_scatter": lambda x: x.select_scatter(torch.ones(x.shape[1]), 0, 0), "tril": torch.tril, "cumsum": lambda x: x.cumsum(0),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), x[0]), "group_norm": lambda x: F.group_norm(x, 1),
    "rfftn": torch.fft.rfftn, "fft2": torch.fft.fft2, "irfft2": torch.fft.irfft2,
}  # fmt: skip


def columns(rows: int, size: int) -> torch.Tensor:
    """Every second column, turned."""
    return torch.arange(2.0 * rows * size).reshape(size, 2 * rows)[:, ::2].t()


@pytest.mark.parametrize("dynamic", [False, None, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_of_what_is_not_dense(name: str, dynamic: bool | None) -> None:
    function = OPERATORS[name]
    compiled = fusewright.compile(function, dynamic=dynamic)
    for shape in ((6, 4), (8, 3), (5, 7)):
        expected, found = function(columns(*shape)), compiled(columns(*shape))
        for one, other in zip(*((made if isinstance(made, tuple) else (made,)) for made in (found, expected))):
            torch.testing.assert_close(one, other, check_stride=True, rtol=1e-4, atol=1e-4)


WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second": lambda x: x[::2], "columns": lambda x: x[..., 1:4], "both": lambda x: x[:, 1:, 1:4], "rows": lambda x: x[:, :2],
    "turned": lambda x: x[:, :2, 1:4].transpose(0, 1), "turned inside": lambda x: x[1:, :3].mT, "channels": lambda x: x[..., 1:].permute(2, 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_of_a_scatter_into_a_window(name: str, dynamic: bool, training: bool) -> None:
    """Its copy has the gaps of the window, whatever the steps are: also where the program asks for them."""

    def function(x: torch.Tensor) -> tuple[Any, ...]:
        made = (x.slice_scatter(x[1:], 0, 1), x.select_scatter(x[0], 0, 1), x.diagonal_scatter(x.diagonal() * 2))
        return *made, [(one.stride(), one.is_contiguous()) for one in made]

    compiled = fusewright.compile(function, dynamic=dynamic, recompile_limit=99)
    for shape in ((4, 3, 4), (5, 5, 6), (6, 7, 5)):
        x, y = (WINDOWS[name](torch.rand(shape).fill_(0.5)).detach().requires_grad_(training) for _ in "xy")
        ours, wanted = compiled(x), function(y)
        assert ours[3] == wanted[3] == [(one.stride(), one.is_contiguous()) for one in wanted[:3]]
        for one, other in zip(ours[:3], wanted[:3]):
            torch.testing.assert_close(one, other, check_stride=True)
        if training:
            gradients = [torch.autograd.grad(sum(map(torch.sum, made[:3])), z)[0] for made, z in ((ours, x), (wanted, y))]
            torch.testing.assert_close(*gradients)


OF_ONE: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing padded": lambda x: F.pad(x, (0, 0)), "less": lambda x: F.pad(x, (-1, 0)), "hardshrink": F.hardshrink,
    "softshrink": F.softshrink, "prelu": lambda x: F.prelu(x, torch.ones(1)), "diag_embed": lambda x: x.diag_embed(1),
    "product": lambda x: x * 2, "view": lambda x: x.reshape(*x.shape, 1), "sum": lambda x: x.sum(0, keepdim=True), "gelu": F.gelu,
    "exp": lambda x: x.exp(), "index": lambda x: x[torch.tensor([0])], "to": lambda x: x.to(torch.float64),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ONE)
def test_steps_of_dimensions_of_one_element(name: str) -> None:
    """They are eager's, too, though no element lies behind them."""
    compiled = fusewright.compile(OF_ONE[name], dynamic=False, recompile_limit=99)
    for shape in ((1, 3), (3, 1), (2, 3, 1, 1), (2, 1, 3)):
        steps = [7 if size == 1 else step for size, step in zip(shape, torch.empty(shape).stride())]
        last = torch.empty(shape[::-1]).permute(*range(len(shape))[::-1])
        for x in (torch.rand(shape), torch.rand(99).as_strided(shape, steps), last.copy_(torch.rand(shape))):
            found, expected = compiled(x), OF_ONE[name](x)
            assert found.stride() == expected.stride(), (shape, x.stride())
            torch.testing.assert_close(found, expected)


LINES, IMAGES, VOLUMES = ((1, 3, 1), (2, 1, 4), (1, 1, 2)), ((2, 1, 4, 4), (1, 3, 1, 1), (1, 1, 4, 2)), ((1, 1, 4, 2, 2), (2, 3, 1, 1, 1))
OF_SINGLE: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[tuple[int, ...], ...]]] = {
    "binary_cross_entropy_with_logits": (lambda x: F.binary_cross_entropy_with_logits(x, x, reduction="none"), LINES),
    "copied": (lambda x: torch.empty(x.shape).copy_(x), IMAGES), "half": (lambda x: x.half(), LINES),
    "zeros_like": (torch.zeros_like, IMAGES), "clone": (torch.clone, LINES), "deg2rad": (torch.deg2rad, LINES),
    "unfold": (lambda x: F.unfold(x, (1, 1)), IMAGES), "channel_shuffle": (lambda x: F.channel_shuffle(x, 1), IMAGES),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), IMAGES), "group_norm": (lambda x: F.group_norm(x, 1), IMAGES),
    "max_pool1d": (lambda x: F.max_pool1d(x, 1), LINES), "max_pool3d": (lambda x: F.max_pool3d(x, 1), VOLUMES),
    "conv1d": (lambda x: F.conv1d(x, torch.ones(2, x.shape[1], 1)), LINES),
    "conv2d": (lambda x: F.conv2d(x, torch.ones(1, x.shape[1], 1, 1)), IMAGES), "sort": (lambda x: x.sort(1), LINES),
    "conv3d": (lambda x: F.conv3d(x, torch.ones(1, x.shape[1], 1, 1, 1)), VOLUMES), "rot90": (torch.rot90, IMAGES),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), IMAGES), "renorm": (lambda x: x.renorm(2, 0, 0.5), LINES),
    "dropout": (lambda x: F.dropout(x, 0.5), IMAGES), "a view": (lambda x: (x + 1).transpose(0, 1)[:1], IMAGES),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OF_SINGLE)
def test_steps_of_single_channels_and_positions(name: str, dynamic: bool) -> None:
    """A pass may exchange an operator for another: what the graph returns has the recorded strides all the same."""
    function, shapes = OF_SINGLE[name]
    compiled = fusewright.compile(function, dynamic=dynamic, recompile_limit=99)
    for shape in shapes:
        steps = [7 if size == 1 else step for size, step in zip(shape, torch.empty(shape).stride())]
        last = torch.rand(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
        narrowed = torch.rand([5 if size == 1 else size for size in shape])[tuple(slice(size) for size in shape)]
        for x in (torch.rand(shape), torch.rand(99).as_strided(shape, steps), last, narrowed):
            found, expected = compiled(x), function(x)
            for one, other in zip(*(made if isinstance(made, tuple) else (made,) for made in (found, expected)), strict=True):
                assert one.stride() == other.stride(), (shape, x.stride())


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("function", [torch.isclose, functools.partial(F.poisson_nll_loss, full=True, reduction="none")])
def test_steps_of_single_elements_of_what_is_written_in_place(function: Callable[..., torch.Tensor], backend: str) -> None:
    """Without in-place forms PyTorch's operators take other steps: only the native backend gives the recorded ones."""
    compiled = fusewright.compile(function, backend=backend, dynamic=False, recompile_limit=99)
    for x in (torch.rand(4, 1), torch.rand(1, 4).t(), torch.rand(9).as_strided((4, 1), (2, 1))):
        for y in (torch.rand(4, 1), torch.rand(1, 4).t(), torch.rand(9).as_strided((4, 1), (2, 1))):
            found, expected = compiled(x, y), function(x, y)
            torch.testing.assert_close(found, expected)
            assert found.stride() == expected.stride() or (backend != "native" and found.stride(0) == expected.stride(0))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [F.conv1d, F.conv2d, lambda x, w: F.prelu(x, w[:1].flatten()[:1]) * 1])
def test_steps_of_gradients_of_single_channels(function: Callable[..., torch.Tensor], dynamic: bool) -> None:
    compiled = fusewright.compile(function, dynamic=dynamic, recompile_limit=99)
    for shape in LINES if function is F.conv1d else IMAGES:
        for x in (torch.rand(shape), torch.rand(shape[0], *shape[2:], shape[1]).movedim(-1, 1)):
            weight, found = torch.rand(3, shape[1], *(1 for _ in shape[2:])), []
            for call in (compiled, function):
                leaves = [one.detach().requires_grad_() for one in (x, weight)]
                gradients = torch.autograd.grad(call(*leaves).sin().sum(), leaves)
                found.append([gradient.stride() for gradient in gradients])
            assert found[0] == found[1], (shape, x.stride())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_of_halves_that_share_elements(dtype: torch.dtype, dynamic: bool) -> None:
    compiled = fusewright.compile(lambda x: F.glu(x, 0), dynamic=dynamic)
    for steps in ((1, 1), (3, 1), (1, 4), (2, 1), (0, 1)):
        x = torch.arange(16).to(dtype).as_strided((4, 3), steps)
        torch.testing.assert_close(compiled(x), F.glu(x, 0), check_stride=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["index_add", "index_copy"])
def test_of_a_copy_of_what_shares_elements(name: str, dynamic: bool) -> None:
    """It is contiguous, by which later operators choose their format."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool1d(getattr(x, name)(1, torch.tensor([0, 1]), x.narrow(1, 0, 2)), 2)

    compiled = fusewright.compile(function, dynamic=dynamic, recompile_limit=99)
    for shape, steps in (((2, 16, 1), (0, 1, 16)), ((4, 4, 1), (0, 4, 16)), ((1, 4, 4), (1, 4, 0)), ((2, 3, 4), (0, 1, 3))):
        x = torch.rand(99).as_strided(shape, steps)
        torch.testing.assert_close(compiled(x), function(x), check_stride=True)


@pytest.mark.parametrize("operator", ["add", "hypot", "fmax", "remainder", "lerp", "copysign"])
def test_of_equal_strides_whose_order_is_that_of_unknown_sizes(operator: str) -> None:
    """Of two dimensions with one stride, the larger is the outer one; sizes of 1 have no stride at all."""
    more = {"lerp": (0.5,)}.get(operator, ())
    for options in ({}, {"alpha": 2}) if operator == "add" else ({},):
        function = functools.partial(getattr(torch, operator), **options)
        compiled = fusewright.compile(lambda x, y: function(x, y, *more), dynamic=True, recompile_limit=99)
        for rows, size in ((7, 17), (17, 7), (8, 9), (3, 3)):
            x = torch.rand(1, rows, 1, 5).permute(3, 0, 1, 2)
            for y in (torch.rand(99).as_strided((rows, size), (1, 1)), torch.rand(rows, size), torch.rand(size, rows).t()):
                for one in (x, x.transpose(1, 2), torch.rand(5, 1, 1, size).permute(2, 0, 1, 3)):
                    if one.shape[2] in (1, rows):
                        torch.testing.assert_close(compiled(one, y), function(one, y, *more), check_stride=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_of_what_is_rolled(dynamic: bool) -> None:
    """Two parts, put together in their memory format; no part at all is dense."""
    compiled = fusewright.compile(lambda x, shift, dim: x.roll(shift, dim), dynamic=dynamic, recompile_limit=99)
    for shape in ((3, 5, 2, 5), (3, 5, 1, 5), (2, 3, 4, 3)):
        for x in (torch.rand(shape), torch.rand(shape).to(memory_format=torch.channels_last)):
            for shift, dim in ((1, 0), (3, 0), (1, 1), (-1, 2), (2, -1), ((1, 2), (0, 3)), ((1, 5), (-1, 1))):
                torch.testing.assert_close(compiled(x, shift, dim), x.roll(shift, dim), check_stride=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_of_images_with_single_positions(dynamic: bool) -> None:
    compiled = fusewright.compile(lambda x: F.batch_norm(x, None, None, training=True), dynamic=dynamic)
    for shape in ((33, 16, 1, 1), (33, 1, 16, 1), (5, 3, 4, 2), (1, 16, 33, 1)):
        x = torch.rand(shape).transpose(0, -1)
        expected = F.batch_norm(x, None, None, training=True)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
        steps = zip(x.shape, compiled(x).stride(), expected.stride(), strict=True)
        assert all(size == 1 or own == one for size, own, one in steps)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("convolve", [F.conv1d, F.conv_transpose1d])
def test_of_a_convolution_over_a_line(convolve: Callable[..., torch.Tensor], dynamic: bool) -> None:
    """The weight's layout is the result's, whatever that of the input."""
    compiled = fusewright.compile(lambda x, weight: convolve(x, weight), dynamic=dynamic, recompile_limit=99)
    for size in (1, 2):
        for x in (torch.rand(2, 3, 7), torch.rand(2, 7, 3).mT, torch.rand(2, 3, 14)[..., ::2], torch.rand(3, 7)):
            for weight in (torch.rand(3, 3, size), torch.rand(3, size, 3).mT, torch.rand(size, 3, 3).permute(2, 1, 0)):
                torch.testing.assert_close(compiled(x, weight), convolve(x, weight), check_stride=True)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("convolve", [F.conv3d, F.conv_transpose3d])
def test_of_volumes_of_varying_sizes(convolve: Callable[..., torch.Tensor], groups: int, dynamic: bool | None) -> None:
    """With and without a batch; the strides of gradients too."""
    compiled = fusewright.compile(lambda x, w: convolve(x, w, groups=groups), dynamic=dynamic, recompile_limit=99)
    kernels = torch.rand(4, 4 // groups, 2, 2, 2)
    for depth in (3, 4, 5):
        x = torch.rand(2, 4, depth, 5, 6)
        last = x.to(memory_format=torch.channels_last_3d)
        for own, weight in ((x, kernels), (last, kernels), (x[1], kernels), (last[1], kernels),
                            (x, kernels.to(memory_format=torch.channels_last_3d))):  # fmt: skip
            found, layouts = [], []
            for call in (compiled, functools.partial(convolve, groups=groups)):
                leaves = [one.detach().requires_grad_() for one in (own, weight)]
                result = call(*leaves)
                found.append([result, *torch.autograd.grad(result.sin().sum(), leaves)])
                layouts.append([one.stride() for one in found[-1]])
            torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)
            assert layouts[0] == layouts[1], (own.stride(), weight.stride())


OUTPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: x * 3, "clone": torch.clone, "a part": lambda x: (x * 2)[:, ::2], "copied": lambda x: torch.empty_like(x).copy_(x),
    "in memory with gaps": lambda x: torch.empty_strided((5, 4, 3, 3), (90, 18, 6, 2)).copy_(x[:5, :4, :3, :3]),
    "resized": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), "repeated": lambda x: F.interpolate(x, scale_factor=2),
    "one channel": lambda x: F.interpolate(x[:, :1], scale_factor=2, mode="bicubic"), "turned": lambda x: x.permute(3, 0, 1, 2).sin(),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, None, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_of_gradients(name: str, dynamic: bool | None) -> None:
    """A gradient arrives as what is made like the output: dense, in the order of its strides."""
    function = OUTPUTS[name]
    compiled = fusewright.compile(function, dynamic=dynamic, recompile_limit=99)
    for rows in (5, 6, 8):
        x = torch.rand(rows, 4, 6, 6)
        for own in (x, x.to(memory_format=torch.channels_last), x[..., ::2], x.permute(2, 1, 3, 0)[:, :, ::2]):
            found = []
            for call in (compiled, function):
                leaf = torch.empty_strided(own.shape, own.stride()).copy_(own).requires_grad_()
                torch.manual_seed(0)
                made = call(leaf)
                found.append(torch.autograd.grad(made, leaf, torch.rand_like(made))[0])
            torch.testing.assert_close(found[0], found[1], check_stride=True)


def rows(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided((4, 3), (6, 2))
    made.copy_(x)
    return made


def turned(x: torch.Tensor) -> torch.Tensor:
    made = x.new_empty_strided((4, 3), (1, 9))
    made.fill_(1)
    made[0] = x[0]
    return made


def expanded(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided((4, 3), (3, 0), dtype=torch.float64).zero_()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("function", [rows, turned, expanded])
def test_memory_with_gaps(function: Any, requires_grad: bool) -> None:
    x = torch.randn(4, 3, requires_grad=requires_grad)
    expected, found = function(x), fusewright.compile(function)(x)
    torch.testing.assert_close(found, expected, check_stride=True)
    assert found.untyped_storage().size() == expected.untyped_storage().size()
    assert found.requires_grad == expected.requires_grad


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("grad", [False, True])
def test_memory_with_gaps_of_varying_sizes(grad: bool, dynamic: bool | None) -> None:
    for function in (
        lambda x: torch.empty_strided((x.shape[0], 3), (6, 2)).copy_(x),
        lambda x: torch.empty_strided(x.shape, (1, 2 * x.shape[0])).copy_(x) * 2,
        lambda x: x.new_empty_strided((2, *x.shape), (9 * x.shape[0], 9, 3)).copy_(x)[1],
        lambda x: torch.empty_strided(x.shape, (3, 1)).copy_(x),
    ):
        compiled = fusewright.compile(function, dynamic=dynamic)
        for size in (5, 6, 8, 1, 2):
            x = torch.randn(size, 3, requires_grad=grad)
            expected, found = function(x), compiled(x)
            torch.testing.assert_close(found, expected, check_stride=True)
            assert found.requires_grad == expected.requires_grad


PARTS: list[Callable[[int], torch.Tensor]] = [
    lambda n: torch.rand(n, 12)[:, 2:-1], lambda n: torch.rand(n + 1, 9).t(), lambda n: torch.rand(9, n).t()[::2],
    lambda n: torch.rand(4 * n, 9)[::4], lambda n: torch.rand(n, 20)[::2, ::3],
]  # fmt: skip
SCATTERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda x: (part := x.t()[::2]).slice_scatter(part * 2, 1), "rows": lambda x: (part := x[::2]).slice_scatter(part * 2, 1),
    "margins": lambda x: (part := x[:, 1:-1]).select_scatter(part[0] * 2, 0, 0), "far": lambda x: (part := x[:, ::3]).slice_scatter(part * 2),
    "a square": lambda x: (part := x.t()[1:, ::3]).diagonal_scatter(part.diagonal() * 2), "all": lambda x: x.select_scatter(x[0] * 2, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", SCATTERS)
def test_scatters_into_parts_of_varying_sizes(name: str, dynamic: bool | None, requires_grad: bool) -> None:
    """Their copies have the gaps of what they are copies of, whether a step is a number, a size, or free."""
    function = SCATTERS[name]
    for make in PARTS:
        compiled = fusewright.compile(function, dynamic=dynamic, recompile_limit=99)
        for n in (4, 6, 12, 5, 7):
            x = make(n).requires_grad_(requires_grad)
            torch.testing.assert_close(compiled(x), function(x), check_stride=True)


def test_a_copy_whose_elements_are_not_shown_to_lie_apart_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (part := x[::2]).slice_scatter(part * 7, 1)

    monkeypatch.setattr(values, "lie_apart", lambda *_: False)
    compiled = fusewright.compile(function, dynamic=True)
    for n in (6, 5, 7):
        x = torch.rand(9, n).t()[::2]
        torch.testing.assert_close(compiled(x), function(x), check_stride=True)


def test_a_part_of_one_column_is_broadcast_whatever_is_learnt_after_it() -> None:
    """Its size is 1 by a guard that speaks of an uneven half, and another one says that there is none."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.copysign(x.chunk(2, -1)[-1], x), x.tensor_split(2, -1)[0]

    compiled, heard = fusewright.compile(function, dynamic=True, options={"checked": True}), []
    with STREAM.listening(lambda event: heard.append(event) if isinstance(event, FellBack) else None):
        for rows in (3, 4, 6):
            x = torch.randn(rows, 2).t().contiguous().t()
            torch.testing.assert_close(compiled(x), function(x), check_stride=True)
    assert not heard


@pytest.mark.parametrize("requires_grad", [False, True])
def test_windows_of_images_of_varying_sizes_lie_apart_without_a_search(
    requires_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides speak of a side, sizes of how many windows it has."""

    def proved(d: Dim, facts: Facts, search: bool = True) -> bool:
        assert not search
        return prove(d, facts, search=False)

    def windows(x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        return x.sin().view(b, h // 7, 7, w // 7, 7, c).permute(0, 1, 3, 2, 4, 5).exp()

    monkeypatch.setattr("fusewright.loops.lower.values.prove", proved)
    compiled = fusewright.compile(windows, dynamic=True)
    for size in ((2, 14, 21, 4), (3, 28, 14, 4)):
        x = torch.randn(size, requires_grad=requires_grad)
        torch.testing.assert_close(compiled(x), windows(x), check_stride=True)


@pytest.mark.parametrize("part", [lambda x: x.chunk(2, 2)[1], lambda x: x[..., 1:], lambda x: x[:, : x.shape[1] // 2]])
def test_of_parts_where_the_program_knows_how_many_elements_there_are(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A product of sizes is a number then, from which sizes are taken away."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return part(x.repeat(2, 1, 1)).frac() if x.numel() in (40, 42) else x

    compiled = fusewright.compile(function, dynamic=True)
    for shape in ((8, 5), (5, 8), (6, 7), (10, 4)):
        x = torch.rand(shape)
        torch.testing.assert_close(compiled(x), function(x), check_stride=True)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("backend", ["native", "eager"])
def test_memory_that_nobody_has_written_to(backend: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [make for dtype in dtypes for make in (torch.empty(4, dtype=dtype), x.new_empty((2, 3), dtype=dtype))]
        return *made, torch.empty_like(x), torch.empty_strided((2, 3), (1, 2)), torch.empty(0), x.new_empty_strided((2,), (3,))

    found = fusewright.compile(function, backend=backend)(torch.ones(3))
    torch.testing.assert_close(found, function(torch.ones(3)), equal_nan=True, rtol=0, atol=0, check_stride=True)


def test_a_tensor_of_one_element_is_no_part_of_itself() -> None:
    """Eager compares the steps of both operands: those of a number that stands for a part are others than the part's."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y[0] = y
        return x + 1

    compiled = fusewright.compile(function)
    for x, y in ((torch.rand(2, 2), torch.rand(1, 2)), (torch.rand(2, 1), torch.rand(1, 1)), (torch.rand(3, 1), torch.rand(1, 1))):
        if y.numel() > 1:
            torch.testing.assert_close(compiled(x, y), x + 1)
            continue
        for run in (function, compiled):
            with pytest.raises(RuntimeError, match="refer to a single memory location"):
                run(x, y)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_of_maxima_over_a_line(dynamic: bool, requires_grad: bool) -> None:
    """Without gradients eager has a kernel of its own, whose results are contiguous."""
    for x in (torch.randn(2, 6, 4).transpose(1, 2), torch.randn(6, 4).t()):
        x.requires_grad_(requires_grad)
        for pool in (F.max_pool1d, torch.max_pool1d):
            compiled = fusewright.compile(lambda x: (pool(x, 2), pool(x, 3, padding=1) * 2), dynamic=dynamic)
            torch.testing.assert_close(compiled(x), (pool(x, 2), pool(x, 3, padding=1) * 2), check_stride=True)


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 2, 3), (1, 8, 1, 2), (2, 8, 1, 1), (2, 8, 3, 2), (1, 8, 2, 1, 3)])
def test_group_norms_of_images_whose_channels_lie_side_by_side(shape: tuple[int, ...], parameters: bool) -> None:
    """The steps of dimensions of one element are eager's too, in the result and in the gradient."""
    weight = torch.rand(8, requires_grad=True) if parameters else None
    compiled = fusewright.compile(lambda x: F.group_norm(x, 2, weight, weight), fullgraph=True)
    batch, channels, *image = shape
    ends = []
    for function in (compiled, lambda x: F.group_norm(x, 2, weight, weight)):
        x = torch.linspace(0, 1, math.prod(shape)).view(batch, *image, channels).movedim(-1, 1).requires_grad_()
        result = function(x)
        weighted = result * torch.linspace(1, 2, result.numel()).view(shape)  # that of a plain sum is rounding only
        gradients = torch.autograd.grad(weighted.sum(), [x, weight] if parameters else [x])
        ends.append((result.detach(), *gradients))
    torch.testing.assert_close(*ends, check_stride=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["product", "softmax", "clone", "mm"])
def test_of_no_elements_of_varying_sizes(name: str, dynamic: bool) -> None:
    """Their strides are eager's where the sizes are fixed; over varying ones no step is taken, but all else is."""
    function = {**OPERATORS, "mm": lambda x: x @ x.mT}[name]
    compiled = fusewright.compile(function, dynamic=dynamic, recompile_limit=99)
    for shape in ((2, 3), (0, 3), (3, 0), (0, 0)):
        for x in (torch.rand(shape), torch.rand(shape[::-1]).t()):
            found, expected = compiled(x), function(x)
            torch.testing.assert_close(found, expected, check_stride=not dynamic or x.numel() > 0)
            assert found.is_contiguous() == expected.is_contiguous()


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("inside", [False, True])
def test_of_gradients_that_are_added_up(inside: bool, backend: str) -> None:
    """In place or not: then steps of single elements are others."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.movedim(0, -1)
        result = (y * y).sum()
        return torch.autograd.grad(result, x)[0] if inside else result

    compiled = fusewright.compile(function, backend=backend, recompile_limit=99)
    for shape in ((1, 2, 3), (2, 1, 3), (3, 2, 1), (4, 3), (2, 3, 4)):
        for given in (torch.rand(shape), torch.rand(shape[::-1]).permute(*range(len(shape))[::-1])):
            found = []
            for run in (function, compiled):
                x = given.detach().requires_grad_()
                found.append(run(x) if inside else torch.autograd.grad(run(x), x)[0])
            torch.testing.assert_close(found[1], found[0])
            steps = [[step for size, step in zip(shape, one.stride()) if size > 1] for one in found]
            assert steps[0] == steps[1], (shape, given.stride())


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("shuffled", [lambda x: F.pixel_shuffle(x, 2), lambda x: F.pixel_unshuffle(x, 4)], ids=["pixel_shuffle", "pixel_unshuffle"])
def test_of_gradients_that_are_added_up_and_shuffled(shuffled: Callable[[torch.Tensor], torch.Tensor], backend: str) -> None:
    """They go by the steps of single elements. With `create_graph` the engine adds to new tensors, and nothing differs."""

    def function(x: torch.Tensor, to_new: bool) -> torch.Tensor:
        z = shuffled(x)
        return torch.autograd.grad((z.sin() * F.group_norm(z, 1)).sum(), x, create_graph=to_new)[0]

    compiled = fusewright.compile(function, backend=backend, dynamic=False, recompile_limit=99)
    for form, to_new in itertools.product((torch.contiguous_format, torch.channels_last), (False, True)):
        x = torch.rand(2, 4, 4, 4).to(memory_format=form).requires_grad_()
        found, expected = compiled(x, to_new), function(x, to_new)
        torch.testing.assert_close(found, expected, check_stride=to_new or form is torch.contiguous_format)


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
def test_of_gradients_through_what_a_guard_has_made_a_number_of(backend: str) -> None:
    """The weight that the flattened images meet fixes the product of their sizes, which are channels-last before."""
    weight, norm = torch.rand(4, 4, 3, 3).requires_grad_(), torch.nn.GroupNorm(2, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        x = norm(F.conv2d(F.conv2d(x.contiguous(memory_format=torch.channels_last), weight), weight))
        return x.flatten(1) @ torch.ones(144, 2)

    compiled = fusewright.compile(function, backend=backend, dynamic=True)
    for images in (2, 3):
        x, found = torch.rand(images, 4, 10, 10).requires_grad_(), []
        for run in (function, compiled):
            found.append(torch.autograd.grad(run(x).sin().sum(), (x, weight)))
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
        assert [one.stride() for one in found[1]] == [one.stride() for one in found[0]]


OTHER_FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": torch.max, "min": torch.min, "prod": torch.prod, "norm": lambda x: x.norm(p=float("inf")),
    "householder_product": lambda x: torch.linalg.householder_product(x, x[0]).sum(),
}  # fmt: skip


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", OTHER_FORMULAS)
def test_of_gradients_by_other_formulas(name: str, turned: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(OTHER_FORMULAS[name](x), x)[0]

    compiled = fusewright.compile(function)
    for size in (4, 5, 3):
        given, found = torch.rand(size, size), []
        for run in (function, compiled):
            found.append(run((given.t() if turned else given).detach().requires_grad_()))
        torch.testing.assert_close(found[1], found[0])
        assert {found[0].stride(), found[1].stride()} <= {(size, 1), (1, size)}
        assert turned or found[0].stride() == found[1].stride()
