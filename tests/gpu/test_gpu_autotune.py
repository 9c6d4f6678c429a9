"""mode="max-autotune" on a GPU: measurements that end with eager's results. Skipped where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.base import events

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def r(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def tuned(
    function: Callable[..., object], mode: str = "max-autotune-no-cudagraphs", **options: object
) -> Callable[..., object]:
    return fusewright.compile(function, fullgraph=True, mode=mode, options=options)


def check(function: Callable[..., object], inputs: list[torch.Tensor], **options: object) -> list[events.Event]:
    """Compiles with autotuning, compares with eager (errors by norms), gives the events."""
    heard: list[events.Event] = []
    compiled = tuned(function, **options)
    with torch.no_grad(), events.STREAM.listening(heard.append):
        actual = compiled(*inputs)
        expected = function(*inputs)
    actual, expected = ([x] if isinstance(x, torch.Tensor) else x for x in (actual, expected))
    for a, b in zip(actual, expected, strict=True):  # type: ignore[arg-type]
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
        error = ((a.float() - b.float()).norm() / b.float().norm()).item()
        assert error <= TOLERANCE[a.dtype], error
    assert not [event for event in heard if isinstance(event, (events.FellBack, events.InternalError))]
    return heard


def autotuned(heard: list[events.Event]) -> list[events.Autotuned]:
    return [event for event in heard if isinstance(event, events.Autotuned)]


Program = tuple[Callable[..., object], Callable[[torch.dtype], list[torch.Tensor]]]
"""A function, and what makes its inputs."""


def found(program: Program, dtype: torch.dtype) -> list[events.Autotuned]:
    """What was measured for a program that gives eager's results; none of the candidates was wrong."""
    torch.manual_seed(0)
    function, make = program
    heard = autotuned(check(function, make(dtype)))
    assert not [why for one in heard for why in one.refused.values() if why.startswith("wrong")]
    return heard


PROGRAMS: dict[str, Program] = {
    "linear and GELU": (lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda t: [r(512, 256, dtype=t), r(1024, 256, dtype=t), r(1024, dtype=t)]),
    "odd sizes": (lambda x, w: torch.relu(x @ w) + 1, lambda t: [r(301, 203, dtype=t), r(203, 157, dtype=t)]),
    "transposed": (lambda x, w: (x.t() @ w.t()) * 2, lambda t: [r(256, 384, dtype=t), r(320, 256, dtype=t)]),
    "few rows and a norm": (
        lambda x, w, y: F.rms_norm(y + F.linear(x, w), (1024,)),
        lambda t: [r(16, 4096, dtype=t), r(1024, 4096, dtype=t) * 0.02, r(16, 1024, dtype=t)],
    ),
    "one row": (lambda x, w: F.silu(x @ w.t()), lambda t: [r(1, 4096, dtype=t), r(512, 4096, dtype=t)]),
    "batches": (lambda a, b: torch.tanh(a @ b.mT * 0.05), lambda t: [r(8, 160, 96, dtype=t), r(8, 200, 96, dtype=t)]),
    "a gated pair": (
        lambda x, w, v: F.silu(x @ w) * (x @ v), lambda t: [r(256, 192, dtype=t), r(192, 512, dtype=t), r(192, 512, dtype=t)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", PROGRAMS)
def test_products(name: str, dtype: torch.dtype) -> None:
    heard = found(PROGRAMS[name], dtype)
    assert heard and all(len(one.times) + len(one.refused) > 1 for one in heard)


COMPUTED: dict[str, Program] = {
    "int8 weights of a few rows": (
        lambda x, w, s: F.linear(x, w.to(x.dtype) * s[:, None]),
        lambda t: [r(16, 2048, dtype=t), torch.randint(-127, 128, (4096, 2048), device="cuda", dtype=torch.int8), r(4096, dtype=t) * 1e-3],
    ),
    "int8 weights of odd size": (
        lambda x, w, s: F.gelu(F.linear(x, w.to(x.dtype) * s[:, None])),
        lambda t: [r(301, 1003, dtype=t), torch.randint(-127, 128, (517, 1003), device="cuda", dtype=torch.int8), r(517, dtype=t) * 1e-2],
    ),
    "weights of another precision": (
        lambda x, w: torch.relu(x @ w.to(x.dtype)),
        lambda t: [r(64, 1024, dtype=t), r(1024, 2048, dtype=torch.float64 if t is torch.float32 else torch.float32)],
    ),
    "a gated unit": (
        lambda g, u, w: F.linear(F.silu(g) * u, w), lambda t: [r(2048, 1024, dtype=t), r(2048, 1024, dtype=t), r(256, 1024, dtype=t)],
    ),
    "a norm whose statistic is known": (
        lambda x, s, w, v: F.linear((x.float() * s * w.float()).to(x.dtype), v),
        lambda t: [r(1024, 512, dtype=t), r(1024, 1, dtype=torch.float32).abs(), r(512, dtype=t), r(128, 512, dtype=t)],
    ),
    "batches, both": (lambda a, b: torch.sigmoid(a) @ (b * 0.5).mT, lambda t: [r(8, 160, 90, dtype=t), r(8, 200, 90, dtype=t)]),
    "infinite beyond the operands": (
        lambda a, b: torch.reciprocal(a) @ torch.log(b), lambda t: [r(130, 77, dtype=t).abs() + 1, r(77, 150, dtype=t).abs() + 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", COMPUTED)
def test_products_that_compute_their_operands(name: str, dtype: torch.dtype) -> None:
    heard = found(COMPUTED[name], dtype)
    asked = [one for one in heard if " behind " in one.question]
    assert len(asked) == 1 and sum("computed" in candidate for candidate in asked[0].times) > 0, [
        one.text for one in heard
    ]


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_operands_that_win(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan without the kernels in front, whatever is quickest here."""
    monkeypatch.setattr(
        "fusewright.select.candidates.quickest",
        lambda calls, measure, delay: (calls[-1][0], dict.fromkeys(dict(calls), 1.0)),
    )
    heard = found(COMPUTED[name], torch.bfloat16)
    assert ["computed" in one.winner for one in heard if " behind " in one.question] == [True]


def test_convolutions() -> None:
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.wide, self.up = (
                nn.Conv2d(128, 64, 1),
                nn.Conv2d(64, 64, 3, padding=1, stride=2),
                nn.Conv2d(64, 128, 1),
            )
            self.side = nn.Conv2d(128, 128, 1, stride=2)
            self.norm, self.last = nn.BatchNorm2d(64), nn.BatchNorm2d(128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.relu(self.norm(self.wide(F.relu(self.norm(self.down(x))))))
            return F.relu(self.last(self.up(y)) + self.side(x))

    model = Block().cuda().bfloat16().eval()
    heard = autotuned(check(model, [r(8, 128, 29, 28)]))
    assert sum("convolution" in one.question for one in heard) == 4
    assert not [why for one in heard for why in one.refused.values() if why.startswith("wrong")]


def test_answers_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("FUSEWRIGHT_CACHE", "1")
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(folder))
    x, w = r(512, 256), r(256, 768)
    first = autotuned(check(lambda x, w: torch.sigmoid(x @ w), [x, w]))
    again = autotuned(check(lambda x, w: (torch.sigmoid(x @ w), x + 1), [x, w]))
    assert [one.winner for one in first] == [one.winner for one in again] and "(remembered)" in again[0].text
    fusewright.reset()
    whole = autotuned(check(lambda x, w: torch.sigmoid(x @ w), [x, w]))  # the graph itself is in the cache, with what was measured
    assert [one.winner for one in whole] == [one.winner for one in first] and whole[0].times == first[0].times


def test_no_time_leaves_the_default_and_says_so() -> None:
    heard = check(lambda x, w: torch.cos(x @ w), [r(512, 264), r(264, 512)], autotune_seconds=0.0)
    assert not autotuned(heard) and any(
        "autotune_seconds" in event.text for event in heard if isinstance(event, events.Hint)
    )


def test_a_search_that_had_no_time_goes_on_in_the_next_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("FUSEWRIGHT_CACHE", "1")
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(folder))
    function = lambda x, w: torch.cos(x @ w)
    x, w = r(512, 264), r(264, 512)
    assert not autotuned(check(function, [x, w], autotune_seconds=0.0))
    fusewright.reset()
    assert autotuned(check(function, [x, w]))


def test_the_random_state_is_the_programs_own() -> None:
    x, w = r(256, 128), r(128, 256)
    torch.manual_seed(3)
    expected = torch.rand(3, device="cuda")
    torch.manual_seed(3)
    check(lambda x, w: torch.erf(x @ w), [x, w])
    torch.testing.assert_close(torch.rand(3, device="cuda"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_training_and_recordings(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
    compiled = tuned(model, mode)
    x = r(192, 256, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(5):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    for _ in range(3):
        actual = torch.autograd.grad(compiled(x).square().mean(), list(model.parameters()))  # type: ignore[attr-defined]
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6)
