"""torch.istft over symbolic sizes, whose Python version leaves out a check of C++'s: that windows overlap everywhere.

Takes the call's arguments; gives the recorded result, or None where the function is recorded as it comes. Always holds:
where the sum of squared windows is 0 somewhere, the call is repeated eagerly, which raises eager's error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusewright.base.pytorch import methods, torch
from fusewright.sizes.interfaces import Recorder

aten = torch.ops.aten
_NAMES = "input n_fft hop_length win_length window center normalized onesided length return_complex".split()
_LEAST = 1e-11


def istft(recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `torch.istft(*args, **kwargs)`, or None."""
    if recorder.level != "aten" or not recorder.symbolic:
        return None
    made = call(torch.istft, args, kwargs)  # which checks the arguments
    given: dict[str, Any] = dict(zip(_NAMES, args)) | {"input": args[0] if args else kwargs.get("input")} | kwargs
    size, frames, window = given["n_fft"], given["input"].shape[-1], given.get("window")
    width = size if given.get("win_length") is None else given["win_length"]
    step = size // 4 if given.get("hop_length") is None else given["hop_length"]
    length, centered = given.get("length"), given.get("center", True)
    if window is None:
        window = call(torch.ones, (width,), {"device": given["input"].device})
    else:
        window = call(methods.detach, (window,), {})
    if width != size:
        left = (size - width) // 2
        window = call(aten.constant_pad_nd.default, (window, (left, size - width - left)), {})
    squares = call(methods.expand, (call(torch.pow, (window, 2), {}), (1, frames, size)), {})
    whole = size + step * (frames - 1)
    envelope = call(aten.unfold_backward.default, (squares, (1, whole), 1, size, step), {})
    start = size // 2 if centered else 0
    end = whole - start if length is None else start + length
    shown = call(aten.slice.Tensor, (envelope, 1, start, end), {})
    lowest = call(torch.min, (call(torch.abs, (shown,), {}),), {})
    overlap = call(torch.logical_not, (call(torch.lt, (lowest, _LEAST), {}),), {})
    call(aten._assert_async.msg, (overlap, "the windows of istft do not overlap everywhere"), {})
    return made
