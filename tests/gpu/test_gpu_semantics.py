"""What eager does on a GPU and not on a CPU: dtypes that it refuses, layouts of results, cuDNN's recurrent layers; and random programs.
Skipped where there is none."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.base import events
from tests.gpu.test_gpu import quiet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

Result = tuple[torch.Tensor, ...] | type[Exception]


def outcome(function: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> Result:
    """Results and gradients, or the class of the error."""
    given = tuple(one.detach().requires_grad_(one.is_floating_point()) for one in given)
    try:
        results = torch.utils._pytree.tree_leaves(function(*given))
        wanted = [one for one in given if one.requires_grad]
        total = sum(one.double().square().sum() for one in results if one.requires_grad)
        gradients = torch.autograd.grad(total, wanted, allow_unused=True) if isinstance(total, torch.Tensor) else ()
    except Exception as error:
        return type(error)
    return *results, *gradients


def as_eager(function: Callable[..., Any], given: tuple[torch.Tensor, ...], tolerance: float = 1e-4, **settings: Any) -> None:
    """Values, dtypes and strides, without a call that is repeated."""
    heard: list[events.Event] = []
    compiled = fusewright.compile(function, **settings)
    with events.STREAM.listening(heard.append):
        ours, eager = outcome(compiled, given), outcome(function, given)
    if isinstance(eager, type):
        assert ours is eager
        return
    quiet(heard)
    assert isinstance(ours, tuple)
    for one, other in zip(ours, eager, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
            steps = [(a, b) for a, b, size in zip(one.stride(), other.stride(), one.shape) if size > 1 and one.numel()]
            assert all(a == b for a, b in steps), (one.shape, one.stride(), other.stride())


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MIXED: dict[str, Callable[..., Any]] = {
    "layer norm": lambda x, w, b: F.layer_norm(x, (4,), w, b),
    "group norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "batch norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "instance norm": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "squared error": lambda x, w, b: F.mse_loss(x, w.expand(x.shape)),
    "absolute error": lambda x, w, b: F.l1_loss(x, w.expand(x.shape)),
    "Huber's loss": lambda x, w, b: F.huber_loss(x, w.expand(x.shape)),
}


@pytest.mark.parametrize("name", MIXED)
def test_dtypes_together(name: str) -> None:
    for one, other in itertools.product(FLOATS, FLOATS):
        x, w = torch.randn(3, 4, 4, device="cuda", dtype=one), torch.ones(4, device="cuda", dtype=other)
        as_eager(MIXED[name], (x, w, w / 2), 2e-2)


@pytest.mark.parametrize("function", [F.softplus, F.gelu, F.silu, F.elu, F.hardswish, F.leaky_relu, F.logsigmoid, torch.tanh, F.relu6])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_integers(function: Callable[..., Any], dtype: torch.dtype) -> None:
    as_eager(lambda x: function(x), (torch.ones(5, device="cuda", dtype=dtype),))


def test_a_generator_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    as_eager(lambda x: (x + torch.rand(2, generator=generator, device="cuda"), x), (torch.ones(2, device="cuda"),))
    as_eager(lambda x: (torch.empty_like(x).normal_(generator=generator), x), (torch.ones(2, device="cuda"),))


SHAPES = ((2, 1, 3, 4), (2, 4, 1, 1), (1, 4, 3, 3), (2, 3, 1, 5), (3, 8, 2, 2))


@pytest.mark.parametrize("layer", [
    lambda: nn.TransformerEncoderLayer(4, 2, dropout=0.0, device="cpu"), lambda: nn.Linear(4, 4, device="cpu"), lambda: nn.LayerNorm(4, device="cpu"),
    lambda: nn.Embedding.from_pretrained(torch.ones(3, 4)),
])  # fmt: skip
def test_a_layer_of_the_cpu(layer: Callable[[], nn.Module]) -> None:
    """Its error is the program's to catch, where only the shape is asked for."""
    made = layer()
    for training, gradients in itertools.product((False, True), repeat=2):
        made.train(training)

        def program(x: torch.Tensor) -> Any:
            try:
                return made(x if not isinstance(made, nn.Embedding) else x[0].long()).shape
            except RuntimeError as error:
                return str(error), x + 1

        with torch.set_grad_enabled(gradients):
            x = torch.ones(2, 4, device="cuda")
            ours, eager = fusewright.compile(program)(x), program(x)
        assert type(ours) is type(eager) and ours[0] == eager[0]


@pytest.mark.parametrize("draw", [
    torch.poisson, lambda x: torch.normal(0.5, x), lambda x: torch.normal(x, x), lambda x: torch.normal(x, 0.5), lambda x: torch.bernoulli(x / 9),
    lambda x: F.dropout(x), torch.rand_like, lambda x: torch.empty_like(x).exponential_(), lambda x: torch.distributions.Gamma(x, x).sample(),
])  # fmt: skip
def test_layouts_of_random_numbers(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    same_strides(draw)


@pytest.mark.parametrize("angle", [torch.angle, lambda x: torch.complex(x, x).angle(), lambda x: torch.complex(x, x).abs()])
def test_layouts_of_angles(angle: Callable[[torch.Tensor], torch.Tensor]) -> None:
    same_strides(angle)


def same_strides(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    compiled = fusewright.compile(function)
    for x in (torch.ones(3, 4, device="cuda").t(), torch.ones(3, 8, device="cuda")[:, ::2], torch.ones(1, 4, device="cuda").expand(3, 4)):
        assert compiled(x).stride() == function(x).stride()


@pytest.mark.parametrize("shown", [lambda x: x.sum().expand(2), lambda x: x[:, :1].expand(2, 5), lambda x: x.sum(0).unfold(0, 2, 1)])
def test_strides_of_what_cuda_graphs_give(shown: Callable[[torch.Tensor], torch.Tensor]) -> None:
    compiled = fusewright.compile(shown, mode="reduce-overhead")
    for _ in range(5):
        x = torch.rand(2, 4, device="cuda")
        ours, eager = compiled(x), shown(x)
        torch.testing.assert_close(ours, eager)
        assert ours.stride() == eager.stride()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [
    lambda x: F.conv2d(x, torch.ones(4, x.shape[1], 3, 3, device="cuda"), padding=1),
    lambda x: F.conv_transpose2d(x, torch.ones(x.shape[1], 2, 1, 1, device="cuda")),
    lambda x: F.interpolate(x, scale_factor=2), lambda x: F.interpolate(x, size=(3, 5), mode="bicubic"),
    lambda x: F.batch_norm(x, None, None, training=True), lambda x: F.pixel_unshuffle(F.interpolate(x, scale_factor=2), 2),
    lambda x: F.adaptive_avg_pool2d(x, (2, 3)), lambda x: F.pad(x, (1, 1, 0, 1)), lambda x: F.logsigmoid(x),
    lambda x: F.hardswish(x), lambda x: x.slice_scatter(x[:1], 0, 0, 1), lambda x: torch.isin(x.detach(), x.detach()),
    lambda x: F.smooth_l1_loss(x, x.detach().contiguous() * 0.5),
])  # fmt: skip
def test_layouts_of_images(shape: tuple[int, ...], function: Callable[..., Any]) -> None:
    plain = torch.linspace(-1, 1, torch.Size(shape).numel(), device="cuda").view(shape)
    images = plain.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    for x in (plain, images, plain.to(memory_format=torch.channels_last), torch.stack([plain, plain], -1)[..., 0]):
        as_eager(function, (x,))


@pytest.mark.parametrize("function", [
    lambda x: F.interpolate(x[None], scale_factor=2), lambda x: F.max_pool2d(x[None], 2), lambda x: x.cummax(-2)[0],
    lambda x: x.index_select(0, torch.arange(2, device="cuda")), lambda x: F.grid_sample(x[None], x[None, :, :, :2], align_corners=True),
    lambda x: x.index_add(0, torch.zeros(2, dtype=torch.int64, device="cuda"), x[:2]), lambda x: x.sort(0)[0],
])  # fmt: skip
def test_gradients_that_scatter_over_any_sizes(function: Callable[..., Any]) -> None:
    compiled = fusewright.compile(function, dynamic=True)
    heard: list[events.Event] = []
    with events.STREAM.listening(heard.append):
        for rows, columns in ((4, 6), (5, 9), (33, 2)):
            x = torch.linspace(-1, 1, 3 * rows * columns, device="cuda").view(3, rows, columns)
            ours, eager = outcome(compiled, (x,)), outcome(function, (x,))
            assert isinstance(ours, tuple) and isinstance(eager, tuple)
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    quiet(heard)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_of_any_length(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    layer = kind(4, 4, 2).cuda()
    for autocast, grad in itertools.product((False, True), (False, True)):
        compiled = fusewright.compile(lambda x: layer(x * 2)[0] + 1)
        for length in (3, 5, 6):
            x = torch.randn(length, 2, 4, device="cuda")
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(grad):
                ours, eager = compiled(x), layer(x * 2)[0] + 1
            torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("generator", ["modules", "images", "tensors", "state"])
def test_random_programs(generator: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz.run", generator, "--programs", "20", "--seed", "7", "--shrink", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "FUZZ_DEVICE": "cuda"})
    assert done.returncode == 0, done.stdout + done.stderr
