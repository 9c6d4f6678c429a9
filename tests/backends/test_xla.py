"""Backend `xla`: results, gradients, writes, shared memory and errors are eager's; the texts that XLA gets and makes."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusewright
from tests.models import training_models

pytest.importorskip("jax")

POINTWISE = [torch.relu, torch.sigmoid, torch.exp, F.silu, F.gelu, torch.rsqrt, lambda x: x * 2 + x / 3, lambda x: x.clamp(-1, 1)]
MOVES = [
    lambda x: x.view(-1), lambda x: x.t() @ x, lambda x: x[1:, ::2] + 1, lambda x: torch.cat([x, x.to(torch.int64)], 1),
    lambda x: x[None].expand(2, -1, -1).clone(), lambda x: x.split(2, 1), lambda x: (x > 0).to(torch.int64).sum(0),
    lambda x: x.mean(-1, keepdim=True), lambda x: x.transpose(0, 1).contiguous(), lambda x: torch.where(x > 0, x, 0),
]  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def outcome(f, *args):
    try:
        return f(*args)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("f", [*POINTWISE, *MOVES])
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (4, 4)], ids=str)
def test_results_are_eagers(f, dtype, shape) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3).abs().to(dtype)
    fusewright.reset()
    expected, found = outcome(f, x.clone()), outcome(fusewright.compile(f, backend="xla"), x.clone())
    if isinstance(expected, type):
        assert found is expected
        return
    torch.testing.assert_close(found, expected)
    for one, other in zip(*((value,) if isinstance(value, torch.Tensor) else value for value in (found, expected))):
        assert one.stride() == other.stride()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(11, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv1d(5, 5, 3, padding=1)

    def forward(self, index):
        x = self.embedding(index)
        weights = torch.softmax(x @ x.transpose(1, 2), -1)
        x = self.conv(weights @ self.norm(x))
        return x + self.second(F.gelu(self.first(x)))


def test_training_steps_are_eagers() -> None:
    torch.manual_seed(0)
    model, index = Block(), torch.randint(11, (2, 5))
    compiled = fusewright.compile(model, backend="xla", fullgraph=True)
    for _ in range(2):
        made = []
        for run in (model, compiled):
            model.zero_grad()
            loss = run(index).square().mean()
            loss.backward()
            made.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        torch.testing.assert_close(made[1], made[0])
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.norm, self.up, self.last = nn.GroupNorm(4, 16), nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 3, 1)

    def forward(self, x):
        one = torch.relu(self.first(x))
        two = F.silu(self.norm(self.down(F.max_pool2d(one, 2))))
        return self.last(torch.cat([one, self.up(two)], 1)).square().mean()


def unet(dropout):
    return UNet(), {"x": torch.randn(2, 3, 16, 16)}


QUICK = [training_models.bert, unet]
SLOW = [getattr(training_models, name) for name in ("gpt2", "llama", "vit", "resnet", "t5", "mobilenet_v2")]


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("make", [*QUICK, *(pytest.param(make, marks=pytest.mark.sweep) for make in SLOW)])
def test_models_are_eagers_in_one_graph(make, train) -> None:
    """Every gradient beside the greatest: some are 0 but for rounding. No operator may be without a row (fullgraph)."""
    made = []
    for compiled in (False, True):
        module, inputs = training_models.build(make)
        run = fusewright.compile(module.train(train), backend="xla", fullgraph=True) if compiled else module.train(train)
        with torch.set_grad_enabled(train):
            loss = run(**inputs)
        if train:
            loss.backward()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        made.append((loss.detach(), dict(module.named_buffers()), gradients))
    (loss, buffers, gradients), (found_loss, found_buffers, found) = made
    torch.testing.assert_close((found_loss, found_buffers), (loss, buffers))
    assert bool(gradients) == train
    greatest = max((float(gradient.abs().max()) for gradient in gradients.values()), default=0)
    torch.testing.assert_close(found, gradients, rtol=1e-3, atol=1e-5 * greatest)


def test_writes_and_shared_memory_are_eagers() -> None:
    def f(x):
        x.add_(1)
        y = x * 2
        return x.view(-1), x.clone(), y, y.t()

    x = torch.zeros(2, 3)
    viewed, cloned, y, turned = fusewright.compile(f, backend="xla", fullgraph=True)(x)
    assert torch.equal(x, torch.ones(2, 3)) and viewed.data_ptr() == x.data_ptr() != cloned.data_ptr()
    y.add_(1)
    assert torch.equal(turned, y.t())


def test_an_index_out_of_range_is_eagers_error() -> None:
    table = torch.randn(4, 3)
    f = fusewright.compile(lambda index: F.embedding(index, table), backend="xla", fullgraph=True)
    assert torch.equal(f(torch.tensor([3, 0])), table[[3, 0]])
    with pytest.raises(IndexError):
        f(torch.tensor([3, 4]))
    with pytest.raises(IndexError):
        f(torch.tensor([3, -1]))


def test_what_has_no_row_is_named_under_fullgraph_and_runs_otherwise() -> None:
    def f(x):
        return torch.sort(x, 0)[0] + 1

    x = torch.randn(3, 4)
    assert torch.equal(fusewright.compile(f, backend="xla")(x), f(x))
    with pytest.raises(fusewright.BackendError, match=r"no row for aten\.sort"):
        fusewright.compile(f, backend="xla", fullgraph=True)(x)


def layer(x, weight, bias):
    return torch.relu(F.linear(x, weight, bias))


def test_texts_before_and_after_fusion() -> None:
    args = torch.ones(2, 4), torch.ones(3, 4), torch.ones(3)
    before = fusewright.stablehlo(layer, *args)
    operators = ("dot_general", "broadcast_in_dim", "add", "maximum")
    assert all(f"stablehlo.{name} " in before or f"stablehlo.{name}(" in before for name in operators)
    assert "fusion" not in fusewright.hlo(layer, *args)
    after = fusewright.hlo(layer, *args, optimized=True)
    fused = re.search(r"%fused_computation.*?\n}", after, re.S)
    assert fused is not None and " add(" in fused[0] and " maximum(" in fused[0] and " dot(" not in fused[0]
    page = Path(__file__, "../../../docs/backends.md").resolve().read_text()
    body = [line for line in before.splitlines() if "stablehlo." in line]
    assert body and all(line.strip() in page for line in body)
