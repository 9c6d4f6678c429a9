"""Products in standalone packages: by generated kernels where there is one, for any number of rows; else in loops."""

from __future__ import annotations

import copy
import io
import struct
import zipfile
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.codegen.call_plan_types import CallPlan, KernelCall, KernelGroup
from fusewright.exporting import package
from fusewright.runtime.artifact import load_graph
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
    return counts(monkeypatch, "product_")


@pytest.fixture
def attentions(monkeypatch):
    """The same of kernels that attend."""
    return counts(monkeypatch, "attention_")


def counts(monkeypatch, prefix: str) -> list[int]:
    found: list[int] = []
    check = package.check

    def counted(name, made, program):
        check(name, made, program)
        found.append(sum(name.startswith(prefix) for name in kernels(made.plan)))

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


def test_without_a_kernel_for_the_processor_loops_do(products):
    program = fusewright.export(Products().eval(), (torch.randn(33, 100),))
    fusewright.package(program, io.BytesIO(), targets=("x86-64-v2",), standalone=True)
    assert products == [0]


def machine_code(model: nn.Module, *given: Tensor, **more: object) -> bytes:
    file = io.BytesIO()
    fusewright.package(fusewright.export(model, given, **more), file, targets=("aarch64",), standalone=True)
    with zipfile.ZipFile(file) as archive:
        return load_graph(archive.read("forward/0.code")).code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_on_aarch64_are_vector_code(dtype):
    """Sums are in registers: a turn of the inner loop has a tile's multiply-adds (6 x 4, of halves 5 x 4; of attention
    16), of four numbers each, and nothing is multiplied and added alone. tests/export/test_c_runtime.py runs such code."""
    batch, length = {0: BATCH}, fusewright.Dim("length", min=2, max=512)
    x = torch.randn(2, 3, 40, 32, dtype=dtype)
    cases = (
        (nn.Linear(100, 70), (torch.randn(5, 100, dtype=dtype),), (batch,)),
        (nn.Conv2d(16, 32, 3, padding=1), (torch.randn(2, 16, 12, 9, dtype=dtype),), (batch,)),
        (Attend(), (x, x, x), ({2: length}, {2: length}, {2: length})),
    )
    for model, given, shapes in cases:
        code = machine_code(model.eval().to(dtype), *given, dynamic_shapes=shapes)
        words = struct.unpack(f"<{len(code) // 4}I", code[: len(code) // 4 * 4])
        # FMLA of four floats by four, and by one; FMADD of one float (Arm's manual, A64 instruction encodings).
        vectors = sum(word & 0xFFE0FC00 == 0x4E20CC00 or word & 0xFFC0F400 == 0x4F801000 for word in words)
        alone = sum(word & 0xFFE08000 == 0x1F000000 for word in words)
        assert vectors >= (16 if isinstance(model, Attend) else 24 if dtype is torch.float32 else 20)
        assert alone == 0


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


class Convolutions(nn.Module):
    """Strides, paddings, dilations, groups, one and three dimensions; a residual, a normalisation, a view behind one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, (3, 1), stride=(2, 1), padding=(2, 0), dilation=(2, 1))
        self.grouped, self.point = nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.Conv2d(16, 8, 1)
        self.line, self.volume = nn.Conv1d(8, 5, 3), nn.Conv3d(1, 4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.relu(self.norm(self.first(x)))
        y = self.second(x)
        x = self.point(self.grouped(x) + x)
        lines = self.line(x.flatten(2))  # what lies by rows in the program
        return x, y, lines, self.volume(x.unsqueeze(1)).mean(1), self.second.weight.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_are_products(dtype, products):
    model = Convolutions().eval().to(dtype)
    run = standing_alone(model, torch.randn(2, 3, 12, 9, dtype=dtype), dynamic_shapes=({0: BATCH},))
    assert products and min(products) >= 4
    for batch in (1, 2, 5):
        agrees(run, model, torch.randn(batch, 3, 12, 9, dtype=dtype))
    assert dict(model.state_dict()).keys() == run.state_dict().keys()
    other = Convolutions().eval().to(dtype)
    run.load_state_dict(other.state_dict())
    agrees(run, other, torch.randn(3, 3, 12, 9, dtype=dtype))


class Strided(nn.Module):
    """Reads the convolution's result by its place in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.layer(x).as_strided((4, 5), (7, 1)) * 2,)


def test_what_reads_memory_by_place_keeps_its_layout():
    model, x = Strided().eval(), torch.randn(2, 3, 8, 8)
    agrees(standing_alone(model, x), model, x)


class Grows(nn.Module):
    """A cache that begins without elements."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        cache = torch.cat([torch.tensor([]), x], -2)
        return torch.cat([cache, x * 2], -2), cache


def test_a_cache_that_begins_empty():
    run = standing_alone(Grows(), torch.randn(2, 3, 4), dynamic_shapes=({0: BATCH},))
    for batch in (1, 5):
        agrees(run, Grows(), torch.randn(batch, 3, 4))


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        attend = F.scaled_dot_product_attention
        turned = q.transpose(-1, -2).contiguous().transpose(-1, -2)  # features apart in memory
        return attend(q, k, v), attend(q, k, v, is_causal=True), attend(q, k, v, mask), attend(turned, k, v, scale=0.3)


@pytest.mark.parametrize("target", ["native", "x86-64-v3"])
@pytest.mark.parametrize("features", [32, 64, 12])
def test_attention(features, target, attentions):
    def given(length: int) -> list[Tensor]:
        made = [torch.randn(2, 3, length, features) for _ in range(3)]
        return [*made, torch.randn(length, length).masked_fill(torch.rand(length, length) < 0.3, -torch.inf)]

    model, length = Attends(), fusewright.Dim("length", min=2, max=512)
    sizes = ({2: length}, {2: length}, {2: length}, {0: length, 1: length})
    for shapes in (sizes, None):
        run = standing_alone(model, *given(40), dynamic_shapes=shapes, target=target)
        for size in (2, 40, 65) if shapes else (40,):
            x = given(size)
            x[3][:, 0] = 0.0  # some key is seen
            agrees(run, model, *x)
    assert set(attentions) == ({0} if features == 12 else {3})  # the fourth is products in PyTorch too
