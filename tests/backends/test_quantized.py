"""Linear layers with quantised weights are captured whole and run by the library's kernels: eager's values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusewright
from fusewright.base import events


def network() -> nn.Module:
    """Nothing between the layers that rounds: a last digit that differs would choose another integer."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).eval()


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamically_quantised_layers_are_one_graph(dtype: torch.dtype) -> None:
    net = torch.ao.quantization.quantize_dynamic(network(), {nn.Linear}, dtype=dtype)
    compiled = fusewright.compile(net, fullgraph=True)
    with torch.no_grad():
        for shape in ((8, 64), (2, 5, 64), (3, 7, 64)):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), net(x), rtol=0, atol=0)
        if dtype is torch.qint8:
            net[2].set_weight_bias(
                torch.quantize_per_tensor(torch.randn(32, 128), 0.1, 0, torch.qint8), torch.randn(32)
            )
        torch.testing.assert_close(compiled(x), net(x), rtol=0, atol=0)


def test_a_wrong_size_raises_eagers_error() -> None:
    net = torch.ao.quantization.quantize_dynamic(network(), {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        with pytest.raises(RuntimeError) as eager:
            net(torch.randn(4, 63))
        with pytest.raises(RuntimeError) as ours:
            fusewright.compile(net)(torch.randn(4, 63))
    assert str(ours.value) == str(eager.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_int8_with_a_scale_for_each_row(dtype: torch.dtype) -> None:
    weight = torch.randn(128, 64)
    scale = weight.abs().amax(1) / 127
    packed = (weight / scale[:, None]).round().to(torch.int8)

    def by_operator(x: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(x, packed, scale.to(x.dtype))

    def by_cast(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, packed.to(x.dtype)) * scale.to(x.dtype)

    x = torch.randn(8, 64, dtype=dtype)
    with torch.no_grad():
        for function in (by_operator, by_cast):
            torch.testing.assert_close(fusewright.compile(function, fullgraph=True)(x), function(x))


class WeightOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (768, 512), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(768, 1) / 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 32])
def test_large_weights_in_int8_are_not_kept_in_full_precision(dtype: torch.dtype, rows: int) -> None:
    """Four times the memory of the parameters is not taken; the call must not run eagerly for it."""
    fallbacks: list[events.Event] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.FellBack):
            fallbacks.append(event)

    x = torch.randn(rows, 512, dtype=dtype)
    tolerance = {"rtol": 2e-2, "atol": 0.5} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
    function = WeightOnly()
    compiled = fusewright.compile(function, fullgraph=True)
    with torch.no_grad(), events.STREAM.listening(listen):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), function(x), **tolerance)
    assert not fallbacks
