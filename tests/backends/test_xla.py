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


SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, 1.5, -2.5, 1e-30, -1e-30, 1e30, -1e30, 88.0, -88.0, 100.0, 1e4, torch.inf, -torch.inf, torch.nan]
)  # fmt: skip
ONE = [
    torch.special.i0, torch.special.i0e, torch.special.i1, torch.special.i1e, torch.special.ndtri, torch.special.log_ndtr,
    torch.special.entr, torch.logit, lambda x: torch.logit(x, 0.1), lambda x: torch.polygamma(0, x), lambda x: torch.polygamma(2, x),
    lambda x: torch.polygamma(1, x.abs() + 0.5), lambda x: torch.mvlgamma(x.abs() + 2, 3), F.celu, F.softshrink, F.hardshrink,
    lambda x: torch.round(x, decimals=2), lambda x: torch.round(x, decimals=-1), torch.frexp, lambda x: torch.linalg.vector_norm(x, 3),
    lambda x: torch.linalg.vector_norm(x, 0), lambda x: torch.linalg.vector_norm(x, float("inf")), torch.nansum, torch.aminmax,
    lambda x: x.sort(), lambda x: x[2:].sort(descending=True), lambda x: x.topk(3), lambda x: x[2:].topk(4, largest=False),
    lambda x: x[2:9].topk(2)[1], lambda x: x.sort(descending=True, stable=True), lambda x: x.cummax(0), lambda x: x.cummin(0),
    lambda x: torch.logcumsumexp(x, 0), lambda x: torch.isin(x, x[:4]), lambda x: torch.bucketize(x, x[:1]),
    lambda x: x.view(3, 7).renorm(2, 0, 1.0), lambda x: torch.special.erfcx(x), lambda x: F.mish(x),
]  # fmt: skip
TWO = [
    torch.special.zeta, torch.special.gammainc, torch.special.gammaincc, torch.special.xlog1py, torch.nextafter, torch.ldexp, torch.dist,
    F.huber_loss, F.soft_margin_loss, lambda x, y: F.smooth_l1_loss(x, y, reduction="sum"), lambda x, y: F.binary_cross_entropy(x, y),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("f", [*ONE, *TWO])
def test_special_values_are_eagers(f, dtype) -> None:
    """Far values too: a row computes them as PyTorch does, or hands the call to it."""
    x = SPECIAL.to(dtype)
    args = (x,) if f in ONE else (x.repeat_interleave(len(x)), x.repeat(len(x)))
    fusewright.reset()
    expected, found = outcome(f, *args), outcome(fusewright.compile(f, backend="xla"), *args)
    if isinstance(expected, type):
        assert found is expected
        return
    torch.testing.assert_close(found, expected, equal_nan=True)


def _reduced(name, include_self):
    def f(x, index, source):
        return torch.scatter_reduce(x, 0, index, source, name, include_self=include_self)

    return f


MORE = [
    *(_reduced(name, own) for name in ("sum", "prod", "mean", "amax", "amin") for own in (True, False)),
    *(
        lambda x, index, source, name=name, own=own: torch.index_reduce(x, 0, index[:, 0], source, name, include_self=own)
        for name in ("prod", "mean", "amax", "amin")
        for own in (True, False)
    ),
    lambda x, index, source: torch.take(x, index - 3), lambda x, index, source: x.index_copy(0, index[:, 0].unique(), source[:3]),
    lambda x, index, source: x.masked_scatter(x > 0, source), lambda x, index, source: torch.diag_embed(x, 1, 0, 2),
    lambda x, index, source: torch.diagonal_scatter(x, source[0, :2], 1), lambda x, index, source: F.pad(x[None], (2, 1), "reflect"),
    lambda x, index, source: F.pad(x[None], (2, -1), "replicate"), lambda x, index, source: torch.rot90(x),
    lambda x, index, source: sum(x.split(2)) * 2,
    lambda x, index, source: torch.addbmm(source[:3], x[None].mT, x[None], beta=0.6, alpha=2.5),
    lambda x, index, source: torch.addr(x, x[:, 0], source[0], beta=0, alpha=3),
    lambda x, index, source: x[0].masked_scatter(x > 0, source), lambda x, index, source: torch.block_diag(x, source[0], source), lambda x, index, source: torch.cdist(x, source, 1.5),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("f", MORE)
def test_reductions_by_index_and_moves_are_eagers(f, dtype) -> None:
    torch.manual_seed(0)
    x, source = (torch.randn(4, 3) * 5).to(dtype), (torch.randn(5, 3) * 5).to(dtype)
    args = x, torch.tensor([[0, 3, 1], [0, 0, 2], [3, 1, 1], [0, 3, 3], [1, 1, 1]]), source
    fusewright.reset()
    expected, found = outcome(f, *args), outcome(fusewright.compile(f, backend="xla"), *args)
    if isinstance(expected, type):
        assert found is expected
    else:
        torch.testing.assert_close(found, expected)


def _well(x):
    return x @ x.mT + 3 * torch.eye(x.shape[-1])


MATRICES = [
    lambda x: torch.linalg.inv(_well(x)), lambda x: torch.linalg.solve(_well(x), x), lambda x: torch.linalg.solve(_well(x), x, left=False),
    lambda x: torch.linalg.cholesky(_well(x)), lambda x: torch.linalg.cholesky(_well(x), upper=True), torch.linalg.qr, torch.linalg.det,
    lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(_well(x))), lambda x: torch.cholesky_inverse(torch.linalg.cholesky(_well(x))),
    lambda x: torch.linalg.solve_triangular(torch.tril(_well(x)), x, upper=False), torch.linalg.slogdet, torch.linalg.lu_factor,
    lambda x: torch.linalg.qr(x, mode="complete"), torch.linalg.matrix_exp,
]  # fmt: skip


@pytest.mark.parametrize("f", MATRICES)
@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 3)], ids=str)
def test_linear_algebra_is_eagers(f, shape) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(fusewright.compile(f, backend="xla")(x), f(x))
    assert outcome(fusewright.compile(f, backend="xla"), x * torch.nan) is outcome(f, x * torch.nan) or not isinstance(outcome(f, x * torch.nan), type)


def test_a_singular_matrix_is_eagers_error() -> None:
    f = fusewright.compile(torch.linalg.inv, backend="xla")
    assert torch.equal(f(torch.eye(3)), torch.eye(3))
    with pytest.raises(torch.linalg.LinAlgError):
        f(torch.zeros(3, 3))


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
        return torch.mode(x, 0)[0] + 1

    x = torch.randn(3, 4)
    assert torch.equal(fusewright.compile(f, backend="xla")(x), f(x))
    with pytest.raises(fusewright.BackendError, match=r"no row for aten\.mode"):
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
