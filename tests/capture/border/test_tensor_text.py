"""Text that shows tensors: no break where nobody looks at it, eager's text where somebody does."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import pytest
import torch

import fusewright
from fusewright.base.errors import GraphBreakError
from fusewright.base.events import STREAM, Broken, InternalError


def checked(x: torch.Tensor, limit: int) -> torch.Tensor:
    count = (x > 0).sum()
    message = f"{count} of {x.numel()} are positive, {x.mean():.3f} on average"
    torch._check_tensor_all(count < limit, lambda: message)
    return x * 2 + count


def test_the_message_of_a_check_that_holds_is_never_made() -> None:
    x = torch.randn(8)
    assert torch.equal(fusewright.compile(checked, fullgraph=True)(x, 100), checked(x, 100))


def test_a_check_that_fails_raises_eagers_error() -> None:
    x = torch.ones(8)
    compiled = fusewright.compile(checked, fullgraph=True)
    assert torch.equal(compiled(-x, 5), checked(-x, 5))
    with pytest.raises(RuntimeError, match=r"8 of 8 are positive, 1\.000 on average"):
        compiled(x, 5)


@pytest.mark.parametrize(
    "show",
    [
        lambda text: print(text),
        lambda text: print("[" + text + "]"),
        lambda text: print(len(text), text.upper(), "1" in text),
        lambda text: print(", ".join([text, text])),
        lambda text: print({text: 1}, [text]),
    ],
)
def test_text_that_is_shown_is_eagers(show: object) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        text = f"sum {y.sum()}, {y!r}"
        z = y * 2
        show(text)  # type: ignore[operator]
        return z.cos()

    x = torch.ones(3)
    expected, got = io.StringIO(), io.StringIO()
    breaks: list[Broken] = []
    with contextlib.redirect_stdout(expected):
        result = program(x)
    with (
        contextlib.redirect_stdout(got),
        STREAM.listening(lambda event: breaks.append(event) if isinstance(event, Broken) else None),
    ):
        assert torch.equal(fusewright.compile(program)(x), result)
    assert got.getvalue() == expected.getvalue() and "sum" in got.getvalue().lower()
    assert breaks
    with pytest.raises(GraphBreakError):
        fusewright.compile(program, fullgraph=True)(x)


def test_text_is_returned_and_kept() -> None:
    def program(x: torch.Tensor, notes: list[str]) -> tuple[torch.Tensor, str]:
        y = x * 3
        notes.append(f"{y.max():.2f}")
        return y, str(y.min())

    x = torch.randn(3)
    mine: list[str] = []
    theirs: list[str] = []
    got, expected = fusewright.compile(program, fullgraph=True)(x, mine), program(x, theirs)
    assert torch.equal(got[0], expected[0]) and got[1] == expected[1] and type(got[1]) is str and mine == theirs


@pytest.mark.parametrize("shown", [lambda y: y, lambda y: y[0], lambda y: y.view(3, 1)])
def test_a_tensor_that_changes_after_its_text_was_made(shown: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        y = x * 3
        text = f"{shown(y)}"
        y.add_(1)
        return y, text

    def input_changed(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        text = f"{shown(x)}"
        x[1:].mul_(2)
        x[0] = 7
        return x + 1, text

    for function in (program, input_changed):
        x = torch.randn(3)
        expected = function(x.clone())
        got = fusewright.compile(function)(x.clone())
        assert torch.equal(got[0], expected[0]) and got[1] == expected[1]


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_the_text_of_an_inference_tensor(backend: str) -> None:
    def program(x: torch.Tensor) -> tuple[str, torch.Tensor]:
        made = torch.tensor([1.5])
        return f"{made} {x}" + str(made), x + 1

    heard: list[object] = []
    with STREAM.listening(lambda event: heard.append(event) if isinstance(event, InternalError) else None):
        with torch.inference_mode():
            x = torch.ones(2)
            assert fusewright.compile(program, backend=backend)(x)[0] == program(x)[0]
    assert not heard
