"""Products in standalone packages: by generated kernels where there is one, for any number of rows; else in loops."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.codegen.call_plan_types import CallPlan, KernelCall, KernelGroup
from fusewright.exporting import package
from tests.backends.rounding import assert_as_near_as_eager

BATCH = fusewright.Dim("batch", min=1, max=2048)


class Products(nn.Module):
    """Products that activations follow, that are read twice, with a residual, with factors, of weights by inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(100, 70), nn.Linear(70, 33, bias=False), nn.Linear(33, 100)
        self.weight = nn.Parameter(torch.randn(100, 50) / 10)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.two(F.gelu(self.one(x)))
        z = self.three(y * torch.sigmoid(y)) + x
        return z, torch.addmm(z[0, :50], z, self.weight, beta=0.5, alpha=2.0), torch.softmax(z, -1)


def standing_alone(model: nn.Module, *given: Tensor, **more: object) -> Callable[..., object]:
    target = more.pop("target", "native")
    file = io.BytesIO()
    fusewright.package(fusewright.export(model, given, **more), file, targets=(target,), standalone=True)
    return fusewright.load_package(file.getvalue(), target=target)


@pytest.fixture
def products(monkeypatch):
    """How many kernels that multiply matrices each plan has that stands alone."""
    found: list[int] = []
    check = package.check

    def counted(name, made, program):
        check(name, made, program)
        found.append(sum(name.startswith("product_") for name in kernels(made.plan)))

    monkeypatch.setattr(package, "check", counted)
    return found


def kernels(plan: CallPlan) -> list[str]:
    groups = [step.calls if isinstance(step, KernelGroup) else (step,) for step in plan.steps]
    return [step.name for steps in groups for step in steps if isinstance(step, KernelCall)]


def agrees(run: Callable[..., object], model: nn.Module, *given: Tensor) -> None:
    exact = copy.deepcopy(model).double()(*(one.double() if one.is_floating_point() else one for one in given))
    for found, eager, reference in zip(run(*given), model(*given), exact, strict=True):
        assert found.shape == eager.shape and found.stride() == eager.stride() and found.dtype is eager.dtype
        if eager.dtype is torch.float64:
            torch.testing.assert_close(found, eager)
        else:
            assert_as_near_as_eager(found, eager, reference, 2e-6)


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("target", ["native", "x86-64-v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_known_rows(dtype, target, products):
    model = Products().eval().to(dtype)
    for rows in (1, 7, 16, 17, 33, 65, 193, 512):
        x = torch.randn(rows, 100, dtype=dtype)
        agrees(standing_alone(model, x, target=target), model, x)
    assert products == [4] * 8


@pytest.mark.parametrize("target", ["native", "x86-64-v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_known_at_run_time(dtype, target, products):
    model = Products().eval().to(dtype)
    run = standing_alone(model, torch.randn(5, 100, dtype=dtype), dynamic_shapes=({0: BATCH},), target=target)
    assert products and set(products) == {4}
    for rows in (1, 2, 5, 6, 7, 16, 17, 33, 63, 64, 65, 66, 127, 512, 2048):
        agrees(run, model, torch.randn(rows, 100, dtype=dtype))


class Layouts(nn.Module):
    """Operands that are turned, sliced, and spread, or too short."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        doubled = torch.cat([x, y], 1)
        return (
            x.t() @ y, x @ y.t(), doubled[:, ::2] @ doubled[:, 1::2].t(), doubled[:, 3:] @ doubled[:, 3:].t(),
            x[:, :3] @ y[:, :3].t(), x[:1].expand(9, -1) @ y.t(), x @ x[:1].expand(9, -1).t(),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_operands_lie_as_they_may(dtype):
    x, y = torch.randn(40, 48, dtype=dtype), torch.randn(40, 48, dtype=dtype)
    agrees(standing_alone(Layouts(), x, y), Layouts(), x, y)
    run = standing_alone(Layouts(), x, y, dynamic_shapes=({0: BATCH}, {0: BATCH}))
    for rows in (2, 15, 70):  # an inner dimension that varies, too
        agrees(run, Layouts(), *(torch.randn(rows, 48, dtype=dtype) for _ in range(2)))


@pytest.mark.parametrize("target", ["x86-64-v2", "aarch64"])
def test_without_a_kernel_for_the_processor_loops_do(target, products):
    program = fusewright.export(Products().eval(), (torch.randn(33, 100),))
    fusewright.package(program, io.BytesIO(), targets=(target,), standalone=True)
    assert products == [0]


def test_a_product_that_is_left_to_the_library_is_written_out(monkeypatch):
    """What the choice of kernels did not foresee costs time, not the package."""
    monkeypatch.setattr("fusewright.select.generated_gemm.is_supported", lambda *given: False)
    model, x = Products().eval(), torch.randn(33, 100)
    agrees(standing_alone(model, x), model, x)
    asked = []
    monkeypatch.setattr(package, "in_loops", lambda node: asked.append(node) or node.target)
    with pytest.raises(fusewright.ExportError, match=r"no generated kernel for .*addmm"):
        standing_alone(model, x)
    assert asked
