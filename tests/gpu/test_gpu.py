"""Compiled programs on a GPU against eager: forward, backward, streams, devices, odd memory. Skipped where there is none."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.base import events
from fusewright.codegen.triton import operations
from tests.listening import stage_texts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def quiet(events_heard: list[events.Event]) -> None:
    """No call was repeated eagerly."""
    assert not [event for event in events_heard if isinstance(event, (events.FellBack, events.InternalError))]


class Block(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_transformer_block(dtype: torch.dtype, mode: str) -> None:
    torch.manual_seed(0)
    model = Block().to("cuda", dtype).eval()
    heard: list[events.Event] = []
    compiled = fusewright.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad(), events.STREAM.listening(heard.append):
        for _ in range(5):
            x = torch.randn(2, 16, 64, device="cuda", dtype=dtype)
            torch.testing.assert_close(
                compiled(x), model(x), rtol=2e-2 if dtype is not torch.float32 else 1e-4, atol=2e-2
            )
    quiet(heard)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_gives_eagers_gradients(dropout: float) -> None:
    torch.manual_seed(0)
    model = Block(dropout=dropout).cuda()
    compiled = fusewright.compile(model, options={"fallback_random": True})
    x = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
    heard: list[events.Event] = []

    def gradients(function: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(5)
        loss = function(x).square().mean()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    with events.STREAM.listening(heard.append):
        for _ in range(2):
            torch.testing.assert_close(gradients(compiled), gradients(model), rtol=1e-3, atol=1e-5)
    quiet(heard)


def test_a_convolution_net_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 10),
    ).cuda()  # fmt: skip
    compiled = fusewright.compile(model)
    x, y = torch.randn(4, 3, 16, 16, device="cuda"), torch.randint(0, 10, (4,), device="cuda")
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    actual = torch.autograd.grad(F.cross_entropy(compiled(x), y), list(model.parameters()))
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=1e-5)


def test_memory_that_starts_anywhere() -> None:
    compiled = fusewright.compile(lambda x: torch.relu(x) * 2)
    whole = torch.randn(1025, device="cuda")
    for start in (0, 1, 3):
        x = whole[start : start + 1000]
        torch.testing.assert_close(compiled(x), torch.relu(x) * 2)
    in_place = fusewright.compile(lambda x: x.add_(1))
    for start in (0, 1):
        x = whole.clone()[start:]
        expected = x + 1
        in_place(x)
        torch.testing.assert_close(x, expected)


def test_numbers_in_cpu_memory_and_several_streams() -> None:
    factor = torch.tensor(3.0)
    compiled = fusewright.compile(lambda x: (x * factor).sum(-1))
    x = torch.randn(300, 70, device="cuda")
    torch.testing.assert_close(compiled(x), (x * factor).sum(-1))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = compiled(x + 1)
    stream.synchronize()
    torch.testing.assert_close(y, ((x + 1) * factor).sum(-1))


def test_sizes_that_change() -> None:
    compiled = fusewright.compile(lambda x: torch.softmax(x, -1) @ x.mT, dynamic=True)
    for rows, columns in ((4, 30), (7, 65), (130, 2000), (1, 1)):
        x = torch.randn(rows, columns, device="cuda")
        torch.testing.assert_close(compiled(x), torch.softmax(x, -1) @ x.mT, rtol=1e-4, atol=1e-4)


def test_gathers_scatters_and_scans() -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x[index],
            x.index_add(0, index, x[index]),
            x.cumsum(0),
            x.argmax(-1),
            F.embedding(index, x),
            x.sort(-1)[0],
        )

    x, index = torch.randn(40, 9, device="cuda"), torch.randint(0, 40, (40,), device="cuda")
    torch.testing.assert_close(fusewright.compile(function)(x, index), function(x, index))


def test_what_cannot_be_generated_is_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between kernels of one plan, forward and backward."""
    monkeypatch.delitem(operations.OPERATIONS, "erf")
    monkeypatch.delitem(operations.OPERATIONS, "exp")
    function = lambda x: (x.abs() + 1).erf() * 2
    x = torch.randn(100, device="cuda", requires_grad=True)
    compiled = fusewright.compile(function, fullgraph=True, options={"disk_cache": False})
    heard: list[events.Event] = []
    with events.STREAM.listening(heard.append):
        (ours,) = torch.autograd.grad(compiled(x).sum(), x)
    (eager,) = torch.autograd.grad(function(x).sum(), x)
    torch.testing.assert_close((compiled(x), ours), (function(x), eager))
    quiet(heard)
    assert sum(isinstance(event, events.KernelMade) for event in heard) > 1
    hints = [event.text for event in heard if isinstance(event, events.Hint)]
    assert [text for text in hints if "the operation erf" in text] and not [text for text in hints if "by operator" in text]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_digamma_everywhere(dtype: torch.dtype) -> None:
    places = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-30, -1e-30, 1e-45, 3e38])
    near = torch.cat([torch.arange(-20, 20.0), torch.linspace(-40, 40, 4001), torch.logspace(-37, 37, 149), places])
    x = near.to("cuda", dtype)
    ours, exact = fusewright.compile(torch.digamma)(x), torch.digamma(x.cpu().double()).to(dtype)
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-7}.get(dtype, 0.0)
    torch.testing.assert_close(ours.cpu(), exact, rtol=tolerance, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize("how", ["sum", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32])
def test_extremes_and_short_sums_at_places(dtype: torch.dtype, how: str) -> None:
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -float("nan"), 3e38, -3e38])
    numbers, start = torch.cat([torch.randn(5000) * 90, odd]), torch.cat([torch.randn(1200) * 90, odd])
    if not dtype.is_floating_point:
        numbers, start = (one.nan_to_num(7.0).clamp(-1e4, 1e4).int() for one in (numbers, start))
    x, i, v = start.to("cuda", dtype), torch.randint(0, 1208, (5008,), device="cuda"), numbers.to("cuda", dtype)
    heard: list[events.Event] = []
    with events.STREAM.listening(heard.append):
        ours = fusewright.compile(lambda x, i, v: x.scatter_reduce(0, i, v, how) * 2)(x, i, v)
    torch.testing.assert_close(ours, x.scatter_reduce(0, i, v, how) * 2, rtol=1e-4, atol=1e-3, equal_nan=True)
    quiet(heard)
    assert not [event.text for event in heard if isinstance(event, events.Hint) and "no kernel" in event.text]


def test_temporaries_are_given_back() -> None:
    compiled = fusewright.compile(lambda x: torch.softmax(x @ x, -1) @ x)
    x = torch.randn(512, 512, device="cuda")
    for _ in range(3):
        compiled(x)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        compiled(x)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu() -> None:
    compiled = fusewright.compile(lambda x: torch.softmax(x, -1) + 1)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x = torch.randn(50, 50, device=device)
        torch.testing.assert_close(compiled(x), torch.softmax(x, -1) + 1)


def test_questions_about_the_gpu_are_answered() -> None:
    def asking(x: torch.Tensor) -> torch.Tensor:
        properties = torch.cuda.get_device_properties(x.device)
        scale = torch.cuda.get_device_capability()[0] + torch.cuda.current_device() + properties.multi_processor_count
        return x * scale + (1 if torch.cuda.is_bf16_supported() else 2) + len(torch.cuda.get_device_name(0))

    x = torch.randn(50, device="cuda")
    torch.testing.assert_close(fusewright.compile(asking, fullgraph=True)(x), asking(x))


def test_a_thread_that_never_called_cuda() -> None:
    """The runtime says that its device is the first one, but it has no context yet."""
    compiled = fusewright.compile(lambda x: torch.relu(x) * 2)
    x = torch.randn(1000, device="cuda")
    expected = compiled(x)
    found: list[object] = []

    def work() -> None:
        try:
            found.append(compiled(x))
        except Exception as error:
            found.append(error)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(found) == 3
    for result in found:
        assert isinstance(result, torch.Tensor), result
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_numbers_on_the_cpu_are_handed_over_by_value(dtype: torch.dtype) -> None:
    """A pointwise operator may take a tensor without dimensions that lies on the CPU: an argument, a part of a larger
    tensor, a number that is computed there."""

    def program(x: torch.Tensor, number: torch.Tensor, several: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * number, (x + several[1]).relu() / (number + 1), torch.where(number > 0, x, several[2] * x)

    x = torch.randn(64, 33, device="cuda")
    number, several = torch.tensor(3).to(dtype), torch.tensor([0, 2, 1]).to(dtype)
    compiled = fusewright.compile(program, fullgraph=True)
    for _ in range(2):
        for got, expected in zip(compiled(x, number, several), program(x, number, several)):
            torch.testing.assert_close(got, expected)
        number = number + 1


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_step_of_an_optimizer_is_kernels_only(kind: type[torch.optim.Optimizer]) -> None:
    parameters = [torch.nn.Parameter(torch.randn(40, 30, device="cuda")) for _ in range(5)]
    twins = [torch.nn.Parameter(one.detach().clone()) for one in parameters]
    ours, theirs = kind(parameters, lr=1e-2), kind(twins, lr=1e-2)
    step = fusewright.compile(lambda: ours.step())
    for turn in range(4):
        for one, twin in zip(parameters, twins):
            one.grad = torch.full_like(one, 0.1 * (turn + 1))
            twin.grad = one.grad.clone()
        with stage_texts("memory") as plans:
            step()
        theirs.step()
        assert all(" 0 library calls" in plan for plan in plans)
        torch.testing.assert_close([p.detach() for p in parameters], [p.detach() for p in twins])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_conversions_of_eight_bits_are_eagers(dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the processor has no such instructions")
    every = torch.arange(256, dtype=torch.uint8, device="cuda").view(dtype)
    halves = [torch.arange(1 << 16, device="cuda").to(torch.uint16).view(half) for half in (torch.float16, torch.bfloat16)]
    exact = every.float()[every.float().isfinite()].sort()[0]
    ties = (exact[1:] + exact[:-1]) / 2
    floats = torch.cat([exact, ties, ties.nextafter(exact[1:]), ties.nextafter(exact[:-1]), exact * 1e4, exact * 1e-4])
    for source in (*halves, floats, floats.double(), torch.arange(-600, 600, device="cuda")):
        convert = fusewright.compile(lambda x: (x + 0).to(dtype), fullgraph=True)
        with stage_texts("schedule") as texts:
            got = convert(source)
        assert "0 library calls" in texts[-1]
        torch.testing.assert_close(got.float(), source.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
    for wide in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        got = fusewright.compile(lambda x: x.to(wide) * 2, fullgraph=True)(every)
        torch.testing.assert_close(got, every.to(wide) * 2, rtol=0, atol=0, equal_nan=True)
    both = fusewright.compile(lambda x: x.to(dtype).view(-1, 4).t().float().sum(0), fullgraph=True)
    torch.testing.assert_close(both(floats[:400] / 1e4), (floats[:400] / 1e4).to(dtype).view(-1, 4).t().float().sum(0))


@pytest.mark.parametrize("by", [1e2, 1e6, 1e10])
def test_products_are_rounded_before_they_are_added_to(by: float) -> None:
    """Else scaled scores lie above their maximum: exp(6000) where eager has 1; and equal products do not cancel."""
    x = torch.randn(64, 333, device="cuda") * by
    with torch.no_grad():
        for function in (lambda x: torch.softmax(x * 0.7, -1), lambda x: torch.log_softmax(x * 0.7, -1)):
            exact, eager, found = function(x.double()), function(x), fusewright.compile(function)(x)
            assert (found - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6
        assert not fusewright.compile(lambda x: x * x.flip(0) - x.flip(0) * x)(x).any()
