"""Option `background`: eager until the compiled version is ready, and the same results, exceptions and side effects all along."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.background import WORKER
from fusewright.errors import BackendError, InternalErrorWarning


def background(function: Callable[..., Any], **options: Any) -> Any:
    return fusewright.compile(function, options={"background": True}, **options)


def test_the_compiled_version_takes_over() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).softmax(-1)

    compiled = background(f)
    x = torch.randn(20, 30)
    expected = f(x)
    torch.testing.assert_close(compiled(x), expected)
    assert WORKER.wait(60)
    assert len(compiled.entries) == 1 and compiled.entries[0].calls == 0
    torch.testing.assert_close(compiled(x), expected)
    assert compiled.entries[0].calls == 1


def test_calls_meanwhile_do_not_compile_again() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).softmax(-1)

    compiled = background(f)
    x = torch.randn(20, 30)
    for _ in range(50):
        torch.testing.assert_close(compiled(x), f(x))
    assert WORKER.wait(60)
    assert len(compiled.entries) == 1


def test_other_sizes_become_dynamic_as_ever() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    compiled = background(f)
    for n in (5, 6, 7, 8, 9, 10):
        x = torch.randn(n)
        torch.testing.assert_close(compiled(x), f(x))
        assert WORKER.wait(60)
    assert len(compiled.entries) == 2


@pytest.mark.parametrize("grad", [False, True])
def test_gradients(grad: bool) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    compiled = background(net)
    x = torch.randn(5, 8)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            result = compiled(x)
            torch.testing.assert_close(result, net(x))
            assert result.requires_grad == grad
            assert WORKER.wait(60)


def test_autocast_of_the_caller() -> None:
    net = nn.Linear(8, 16)
    compiled = background(net)
    x = torch.randn(5, 8)
    for _ in range(2):
        for enabled in (True, False):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                got = compiled(x)
                assert got.dtype == (torch.bfloat16 if enabled else torch.float32)
                torch.testing.assert_close(got, net(x))
            assert WORKER.wait(60)


def test_exceptions_and_side_effects() -> None:
    log: list[int] = []

    def f(x: torch.Tensor, fail: bool) -> torch.Tensor:
        log.append(len(log))
        if fail:
            raise ValueError("asked for")
        return x + len(log)

    compiled = background(f)
    for turn in range(4):
        torch.testing.assert_close(compiled(torch.ones(3), False), torch.ones(3) + len(log))
        with pytest.raises(ValueError, match="asked for"):
            compiled(torch.ones(3), True)
        assert WORKER.wait(60)
        assert log == list(range(2 * turn + 2))


def test_a_backend_that_fails_is_told_at_the_next_call() -> None:
    def broken(gm: Any, inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    compiled = fusewright.compile(lambda x: x.sin(), backend=broken)
    with pytest.raises(BackendError, match="no such kernel"):
        compiled(torch.ones(3))


def test_a_defect_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusewright.backends import native

    def fail(to_compile: Any) -> Any:
        raise AssertionError("a defect")

    compiled = background(lambda x: x.sin())
    monkeypatch.setattr(type(native.BACKEND), "compile", property(lambda self: fail), raising=False)
    with pytest.warns(InternalErrorWarning, match="a defect"):
        compiled(torch.ones(3))
        assert WORKER.wait(60)
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin())


def test_a_reset_drops_what_is_under_way() -> None:
    compiled = background(lambda x: x.sin() * 3)
    compiled(torch.ones(3))
    fusewright.reset()
    assert WORKER.wait(60)
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin() * 3)
    assert WORKER.wait(60)


def test_from_several_threads() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).softmax(-1)

    compiled = background(f)
    wrong: list[Exception] = []

    def work(n: int) -> None:
        try:
            for _ in range(20):
                x = torch.randn(n, 7)
                torch.testing.assert_close(compiled(x), f(x))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (4, 5, 6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert WORKER.wait(60) and not wrong
