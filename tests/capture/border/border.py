"""A harness for the border: captures a function whole, runs graph and finish, and compares with eager.

Takes a function and a maker of fresh arguments; gives the captured frame. Always holds: results, arguments after the call, printed text and
warnings are those of eager, and the guards hold for the arguments that were captured.
"""

from __future__ import annotations

import collections
import contextlib
import io
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from fusewright.capture.attempt import capture_frame
from fusewright.capture.frame import CapturedFrame
from fusewright.capture.guards.check import guard_holds
from fusewright.capture.guards.sources import Source, TensorSize
from fusewright.capture.settings import CaptureOptions
from fusewright.sizes.expressions import Expr


def capture(
    function: types.FunctionType,
    args: tuple[Any, ...],
    level: str = "aten",
    fullgraph: bool = True,
    dynamic: bool | None = None,
) -> CapturedFrame:
    """One captured frame."""
    return capture_frame(function, args, CaptureOptions(level=level, fullgraph=fullgraph, dynamic=dynamic))  # type: ignore[arg-type]


def run(frame: CapturedFrame, function: types.FunctionType, args: tuple[Any, ...], gradients: bool = True) -> Any:
    """Runs a frame's graph with eager operators (static sizes), then its finish. An ATen-level graph says nothing about gradients."""
    outputs: tuple[Any, ...] = ()
    if frame.graph is not None:
        root = torch.nn.Module()
        for name, value in frame.constants.items():
            setattr(root, name, value)
        assert not any(isinstance(source, TensorSize) for source in frame.inputs)
        inputs = [value for value in frame.example_inputs if not isinstance(value, Expr)]
        with torch.set_grad_enabled(gradients and torch.is_grad_enabled()):
            outputs = torch.fx.GraphModule(root, frame.graph)(*inputs)
    return outputs[0] if frame.finish is None else frame.finish(outputs, function, *args)


def same(eager: Any, ours: Any, where: str = "", seen: dict[int, int] | None = None, gradients: bool = True) -> None:
    """Equal values of equal types, with the same aliasing."""
    seen = {} if seen is None else seen
    if id(eager) in seen:
        assert seen[id(eager)] == id(ours), f"{where}: aliasing differs"
        return
    assert type(eager) is type(ours), f"{where}: {type(eager)} and {type(ours)}"
    if isinstance(eager, (list, dict, set)) or getattr(type(eager), "__dictoffset__", 0):
        seen[id(eager)] = id(ours)
    if isinstance(eager, torch.Tensor):
        torch.testing.assert_close(ours, eager)
        assert not gradients or eager.requires_grad == ours.requires_grad, where
    elif isinstance(eager, types.FunctionType):
        assert eager.__code__ is ours.__code__, where
    elif isinstance(eager, (type, types.ModuleType)):
        assert eager is ours, where
    elif isinstance(eager, dict):
        assert list(eager) == list(ours), f"{where}: {list(eager)} and {list(ours)}"
        for key in eager:
            same(eager[key], ours[key], f"{where}[{key!r}]", seen, gradients)
    elif isinstance(eager, (list, tuple, collections.deque)):
        assert len(eager) == len(ours), where
        for index, (left, right) in enumerate(zip(eager, ours)):
            same(left, right, f"{where}[{index}]", seen, gradients)
    elif type(eager).__dictoffset__ and not isinstance(eager, BaseException):
        same(vars(eager), vars(ours), f"{where}.__dict__", seen, gradients)
    elif hasattr(type(eager), "__slots__") and type(eager).__module__ == f"{__name__}_programs":
        for name in type(eager).__slots__:
            same(getattr(eager, name, None), getattr(ours, name, None), f"{where}.{name}", seen, gradients)
    else:
        assert eager == ours, f"{where}: {eager!r} and {ours!r}"


def _observed(call: Callable[[], Any]) -> tuple[Any, str, list[str]]:
    text = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(text):
        warnings.simplefilter("always")
        result = call()
    return result, text.getvalue(), [str(one.message) for one in caught]


def check(function: types.FunctionType, make_args: Callable[[], tuple[Any, ...]], level: str = "aten") -> CapturedFrame:
    """Captures `function` whole and compares with eager."""
    gradients = level == "torch"
    eager_args, args = make_args(), make_args()
    frame = capture(function, args, level)
    assert not frame.breaks
    for guard in frame.guards:
        assert guard_holds(guard, args, function), f"{guard.kind} {guard.source.text()} {guard.value}"
    eager, text, warned = _observed(lambda: function(*eager_args))
    ours, our_text, our_warned = _observed(lambda: run(frame, function, args, gradients))
    same(eager, ours, "result", gradients=gradients)
    same(eager_args, args, "arguments", gradients=gradients)
    assert (text, warned) == (our_text, our_warned)
    return frame


def holds(frame: CapturedFrame, function: types.FunctionType, args: tuple[Any, ...]) -> bool:
    """Whether all guards of a frame hold for other arguments."""
    return all(guard_holds(guard, args, function) for guard in frame.guards)


def guarded(frame: CapturedFrame, kind: str) -> list[Source]:
    """The sources of the guards of a kind."""
    return [guard.source for guard in frame.guards if guard.kind == kind]
