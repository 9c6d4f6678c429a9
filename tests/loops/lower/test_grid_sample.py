"""Sampling at the positions of a grid, which is loops on a GPU: against eager, which runs on the CPU here."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.loops import reference, tracing
from tests.loops.lower.checking import called, check, compare

MODES = [
    {"mode": mode, "padding_mode": padding, "align_corners": corners}
    for mode, padding, corners in itertools.product(
        ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (False, True)
    )
]
NOT_CUBIC = [options for options in MODES if options["mode"] != "bicubic"]
SPECIAL = [float("nan"), float("inf"), float("-inf"), 1e20, -1e20, 3e9, -3e9, 1e4, 1, -1, 0, 2, -2, 3.5, -1.2, 0.2, 0.6]
IMAGES = {"plane": (2, 3, 5, 7), "a row": (1, 2, 1, 4), "a column": (2, 2, 3, 1), "one element": (1, 2, 1, 1)}


def loops_of(options: dict, image: torch.Tensor, grid: torch.Tensor, before: bool = False) -> torch.Tensor:
    """What loops on a GPU make of it; none is left to the library."""

    def function(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, g.tanh() if before else g, **options)

    program = tracing.on_a_gpu(function, [image, grid])
    assert not called(program)
    (found,) = reference.run(program, [image, grid])
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("options", MODES, ids=str)
def test_of_planes(options: dict, name: str) -> None:
    for dtype, layout in itertools.product(
        (torch.float32, torch.float64), (torch.contiguous_format, torch.channels_last)
    ):
        image = torch.randn(IMAGES[name], dtype=dtype).contiguous(memory_format=layout)
        grid = 1.3 * torch.randn(len(image), 6, 5, 2, dtype=dtype)
        compare(loops_of(options, image, grid), F.grid_sample(image, grid, **options))


@pytest.mark.parametrize("options", MODES, ids=str)
def test_of_positions_that_are_no_place(options: dict) -> None:
    """NaN, infinities and numbers that no integer holds: no load is outside, and the result is eager's."""
    image, values = torch.randn(2, 3, 5, 7), torch.tensor(SPECIAL)
    grid = torch.stack(torch.meshgrid(values, values, indexing="ij"), -1).expand(2, -1, -1, -1)
    wanted = F.grid_sample(image, grid, **options)
    if options["mode"] == "bilinear" and options["padding_mode"] == "zeros":
        # A GPU takes what is not finite as far outside; a CPU computes weights of it.
        wanted = torch.where(grid.isfinite().all(-1)[:, None], wanted, 0)
    compare(loops_of(options, image, grid), wanted)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_elements_outside_do_not_count(options: dict) -> None:
    """Not even infinity and NaN, times a weight of 0."""
    image = torch.full((1, 2, 4, 3), float("inf"))
    image[:, 1] = float("nan")
    grid = torch.tensor([-3.0, -1.5, -1.0, 0.0, 1.0, 1.5, 3.0])
    grid = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1)[None]
    compare(loops_of(options, image, grid), F.grid_sample(image, grid, **options))


@pytest.mark.parametrize("size", [4, 6, 9])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_of_every_other_element(options: dict, size: int) -> None:
    """Positions half way between two elements: the nearest is the even one."""
    image = torch.randn(1, 1, size, size)
    grid = F.affine_grid(torch.eye(2, 3)[None], [1, 1, size // 2, 2 * size], align_corners=False)
    compare(loops_of(options, image, grid), F.grid_sample(image, grid, **options))


@pytest.mark.parametrize("options", NOT_CUBIC, ids=str)
def test_of_volumes(options: dict) -> None:
    image, grid = torch.randn(2, 2, 4, 5, 6), 1.3 * torch.randn(2, 3, 4, 2, 3)
    compare(loops_of(options, image, grid), F.grid_sample(image, grid, **options))
    image = image.contiguous(memory_format=torch.channels_last_3d)
    compare(loops_of(options, image, grid), F.grid_sample(image, grid, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", NOT_CUBIC, ids=str)
def test_halves_are_computed_in_float32(options: dict, dtype: torch.dtype) -> None:
    """As a GPU's eager does; the grid is a half, also one that was just computed."""
    image, grid = torch.randn(2, 3, 40, 50).to(dtype), torch.randn(2, 6, 5, 2).to(dtype)
    for before in (False, True):
        wanted = F.grid_sample(image.float(), (grid.tanh() if before else grid).float(), **options).to(dtype)
        compare(loops_of(options, image, grid, before), wanted)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("sizes", [(2, 3, 5, 7, 4), (3, 2, 1, 9, 2)], ids=str)
def test_of_sizes_that_are_not_known(options: dict, sizes: tuple[int, ...]) -> None:
    symbolic = {0: {0: "n", 1: "c", 2: "h", 3: "w"}, 1: {0: "n", 1: "p"}}

    def function(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, g, **options)

    program = tracing.on_a_gpu(function, [torch.randn(4, 5, 8, 6), torch.randn(4, 3, 2, 2)], symbolic)
    assert not called(program)
    n, c, h, w, p = sizes
    inputs = [torch.randn(n, c, h, w), 1.3 * torch.randn(n, p, 2, 2)]
    (found,) = reference.run(program, inputs)
    compare(found, function(*inputs))


def test_what_stays_the_librarys() -> None:
    """On a CPU all of it; elsewhere what eager refuses, and bicubic positions, which it rounds to halves."""
    image, grid = torch.randn(1, 2, 4, 5), torch.randn(1, 3, 3, 2)
    check(lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False) * 2, image, grid, externs=["grid_sampler_2d.default"])

    def cubic(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, g, mode="bicubic", align_corners=False)

    assert called(tracing.on_a_gpu(cubic, [image.half(), grid.half()])) == ["grid_sampler_2d.default"]
    whole = tracing.on_a_gpu(lambda x, g: F.grid_sample(x, g, align_corners=False), [image.int(), grid.int()])
    assert called(whole) == ["grid_sampler_2d.default"]


def test_nothing_is_sampled() -> None:
    for shape, places in (((0, 2, 4, 5), (0, 3, 3, 2)), ((1, 0, 4, 5), (1, 3, 3, 2)), ((1, 2, 4, 5), (1, 0, 3, 2))):
        image, grid = torch.randn(shape), torch.randn(places)
        program = tracing.on_a_gpu(lambda x, g: F.grid_sample(x, g, align_corners=False), [image, grid])
        (found,) = reference.run(program, [image, grid])
        compare(found, F.grid_sample(image, grid, align_corners=False))


def test_the_grid_and_what_follows_are_one_loop() -> None:
    def function(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, g.tanh(), align_corners=False).relu() * 2

    program = tracing.on_a_gpu(function, [torch.randn(2, 3, 5, 7), torch.randn(2, 4, 4, 2)])
    assert len(program.operations) == 1


def test_what_cudnn_samples_is_recorded_in_general() -> None:
    """PyTorch chooses cuDNN where there is one, for aligned corners."""
    image, grid, gradient = torch.randn(1, 2, 4, 5), torch.randn(1, 3, 3, 2), torch.randn(1, 2, 3, 3)
    aten = torch.ops.aten
    graph, _ = tracing.record(
        lambda x, g, d: [aten.cudnn_grid_sampler(x, g), *aten.cudnn_grid_sampler_backward(x, g, d)], [image, grid, gradient]
    )
    sampled, changed = [node for node in graph.nodes if "grid" in str(node.target)]
    assert sampled.target is aten.grid_sampler_2d.default and changed.target is aten.grid_sampler_2d_backward.default
    tensors = {"x0": image.requires_grad_(), "x1": grid.requires_grad_(), "x2": gradient}
    result, gradients = (
        node.target(*(tensors[arg.name] if isinstance(arg, torch.fx.Node) else arg for arg in node.args))
        for node in (sampled, changed)
    )
    wanted = F.grid_sample(image, grid, align_corners=True)
    compare(result, wanted)
    for one, other in zip(gradients, torch.autograd.grad(wanted, (image, grid), gradient), strict=True):
        compare(one, other)
