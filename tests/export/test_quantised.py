"""Weights that are tensor subclasses over other tensors: exported, saved, packaged, replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fusewright


class Halved(torch.Tensor):
    """A matrix as its half, twice over: the rows of a wrapper subclass whose scale is one of its own."""

    inner: torch.Tensor
    factor: Any

    @staticmethod
    def __new__(cls, inner, factor, bits):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner, factor, bits):
        self.inner, self.factor, self.bits = inner, factor, bits

    def __tensor_flatten__(self):
        return ["inner", "factor"], {"bits": self.bits}

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["inner"], parts["factor"], context["bits"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner.detach(), args[0].factor.detach(), args[0].bits)
        plain = [one.plain() if isinstance(one, Halved) else one for one in args]
        return func(*plain, **(kwargs or {}))

    def plain(self):
        factor = self.factor.plain() if isinstance(self.factor, Halved) else self.factor
        return self.inner.to(torch.float32) * factor

    @classmethod
    def of(cls, weight, bits=8, nested=True):
        factor = weight.abs().amax(1, keepdim=True) / 127
        rows = (weight / factor).round().to(torch.int8)
        if nested:  # a quantised weight whose factors are quantised
            factor = cls.of(factor, bits, nested=False)
        return cls(rows, factor, bits)


def quantised(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval().requires_grad_(False)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Halved.of(layer.weight), requires_grad=False)
    return model


@pytest.mark.parametrize("standalone", [False, True])
def test_weights_that_wrap_tensors_are_stored_as_these_and_replaced(standalone, tmp_path):
    model, other, x = quantised(0), quantised(1), torch.randn(3, 8)
    program = fusewright.export(model, (x,), dynamic_shapes=({0: fusewright.Dim("batch")},))
    parts = ("bias", "weight.inner", "weight.factor.inner", "weight.factor.factor")
    names = {f"{layer}.{name}" for layer in (0, 2) for name in parts}
    assert set(program.state_dict) == names
    fusewright.save(program, tmp_path / "program.fwx")
    again = fusewright.load(tmp_path / "program.fwx")
    assert set(again.state_dict) == names and type(again.state_dict["0.weight.inner"]) is torch.Tensor
    torch.testing.assert_close(again.module()(x), model(x), rtol=0, atol=0)
    fusewright.package(again.run_decompositions(), tmp_path / "model.fwp", standalone=standalone)
    run = fusewright.load_package(tmp_path / "model.fwp")
    for size in (1, 3, 9):
        x = torch.randn(size, 8)
        torch.testing.assert_close(run(x), model(x))
    run.load_state_dict(other.state_dict())
    torch.testing.assert_close(run(x), other(x))
    inner = {name: value.clone() for name, value in run.state_dict().items()}
    run.load_state_dict(again.state_dict)
    torch.testing.assert_close(run(x), model(x))
    run.load_state_dict(inner)
    torch.testing.assert_close(run(x), other(x))
    changed = other.state_dict()
    changed["0.weight"] = Halved.of(torch.randn(16, 8), bits=4)
    with pytest.raises(fusewright.ProgramInputError, match=r"0\.weight was .*'bits': 8.*'bits': 4"):
        run.load_state_dict(changed)
    torch.testing.assert_close(run(x), other(x))


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_weights_of_torchao(name, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model, other = (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).eval() for _ in range(2))
    for one in (model, other):
        quantization.quantize_(one, getattr(quantization, name)())
    with torch.no_grad():
        x = torch.randn(4, 64)
        fusewright.package(fusewright.export(model, (x,)), tmp_path / "model.fwp")
        run = fusewright.load_package(tmp_path / "model.fwp")
        torch.testing.assert_close(run(x), model(x))
        run.load_state_dict(other.state_dict())
        torch.testing.assert_close(run(x), other(x))


class Packed(nn.Module):
    """Weights in an object of a C++ class, which PyTorch's own export refuses."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(weight, torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic(x, self.packed) + 1


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="PyTorch has no packed weights here")
def test_objects_of_cpp_classes_stay_in_the_process(tmp_path) -> None:
    model, x = Packed(), torch.randn(3, 4)
    with torch.no_grad():
        program = fusewright.export(model, (x,))
        torch.testing.assert_close(program.module()(x), model(x))
        for write in (fusewright.save, fusewright.package):
            with pytest.raises(fusewright.ExportError, match=r"LinearPackedParamsBase.*torchao.*linear_dynamic.* at test_quantised.py:\d+"):
                write(program, tmp_path / "model")


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


class Calls(nn.Module):
    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scripted(x) + 1 if self.inner is None else self.inner(x) + 1


def test_torchscript() -> None:
    """A scripted function is the function that it was made of; a scripted or traced module is an error with the line."""
    x = torch.randn(3, 4)
    torch.testing.assert_close(fusewright.export(Calls(), (x,)).module()(x), Calls()(x))
    for inner in (torch.jit.script(nn.Linear(4, 4)), torch.jit.trace(nn.Linear(4, 4), x)):
        with pytest.raises(fusewright.GraphBreakError, match=r"(?s)TorchScript.*test_quantised.py:\d+.*Python original"):
            fusewright.export(Calls(inner), (x,))
