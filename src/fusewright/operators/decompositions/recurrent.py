"""Recurrent layers over a length that varies, as one operator: PyTorch's own would fix the length and write out each
step. And layers between which numbers are dropped, one by one: PyTorch's Python version, which stands for the C++ one
where sizes vary, drops none.

Takes what `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu` take; gives the recorded result, or None where they are
recorded as they come: over lengths that are numbers, of packed sequences, with dropout, autocast or gradients. Always
holds: the operator computes what they do, by calling them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusewright.base.pytorch import torch
from fusewright.sizes.interfaces import Recorder

_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_LIBRARY.define(
    "recurrent(Tensor input, Tensor state, Tensor[] params, bool has_biases, int num_layers, bool bidirectional, bool "
    "batch_first, str kind) -> (Tensor, Tensor)"
)
RECURRENT = torch.ops.fusewright.recurrent.default

_KINDS = {"gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu}


def _run(
    input: torch.Tensor, state: torch.Tensor, params: Sequence[torch.Tensor], *how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    has_biases, num_layers, bidirectional, batch_first, kind = how
    made = _KINDS[kind](input, state, list(params), has_biases, num_layers, 0.0, False, bidirectional, batch_first)
    return made[0], made[1]


def _shapes(
    input: torch.Tensor, state: torch.Tensor, params: Sequence[torch.Tensor], *how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _, _, bidirectional, batch_first, _ = how
    length, batch = (input.shape[1], input.shape[0]) if batch_first else input.shape[:2]
    outputs = input.new_empty((length, batch, state.shape[2] * (2 if bidirectional else 1)))
    return outputs.transpose(0, 1) if batch_first else outputs, input.new_empty(state.shape)


_LIBRARY.impl("recurrent", _run, "CPU")
_LIBRARY.impl("recurrent", _shapes, "Meta")

_ARGUMENTS = 9  # input, state, params, has_biases, num_layers, dropout, train, bidirectional, batch_first


def recurrent(
    kind: str, recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of `torch.<kind>(*args, **kwargs)`, or None."""
    if (
        len(args) != _ARGUMENTS
        or kwargs
        or recorder.level != "aten"
        or not recorder.symbolic
        or not isinstance(args[2], list | tuple)
    ):
        return None
    x, state, params, biases, layers, dropout, train, bidirectional, batch_first = args
    tensors = (x, state, *params)
    if not all(recorder.owns(tensor) and tensor.device.type == "cpu" and tensor.dtype == x.dtype for tensor in tensors):
        return None
    if x.dim() != 3 or state.dim() != 3 or type(x.shape[1 if batch_first else 0]) is not torch.SymInt:
        return None
    if (train and dropout) or torch.is_autocast_enabled("cpu"):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    width = x.shape[2]
    if not isinstance(width, int) or params[0].shape[1] != width or state.shape[1] != x.shape[0 if batch_first else 1]:
        return None  # eager's error
    if state.shape[0] != layers * (2 if bidirectional else 1) or state.shape[2] != params[1].shape[1]:
        return None
    return call(RECURRENT, (x, state, list(params), biases, layers, bidirectional, batch_first, kind), {})


_OF_INPUT = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
_OF_PACKED = ("data", "batch_sizes", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")


def dropping(
    function: Any, recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of a recurrent function that drops between its layers, each layer a call of its own, or None."""
    place = 1 if function is torch.lstm else 2
    packed = "batch_sizes" in kwargs or (len(args) > place and isinstance(args[place], torch.Tensor))
    names = _OF_PACKED if packed else _OF_INPUT
    given = dict(zip(names, args, strict=False)) | kwargs
    if not recorder.symbolic or len(args) + len(kwargs) != len(names) or given.keys() != {*names}:
        return None
    layers, drop, directions = given["num_layers"], given["dropout"], 2 if given["bidirectional"] else 1
    if type(layers) is not int or layers < 2 or not drop or not given["train"] or len(given["params"]) % layers:
        return None
    states = given["hx"] if function is torch.lstm else [given["hx"]]
    x, each = args[0] if args else given[names[0]], len(given["params"]) // layers
    first = given.get("batch_first", False)
    x = call(torch.transpose, (x, 0, 1), {}) if first else x  # numbers are drawn in the order of the steps
    made = []
    for layer in range(layers):
        if layer:
            x = call(torch.dropout, (x, drop, True), {})
        begun = [call(torch.narrow, (state, 0, layer * directions, directions), {}) for state in states]
        hx = begun if function is torch.lstm else begun[0]
        params = list(given["params"][layer * each : (layer + 1) * each])
        how = (params, given["has_biases"], 1, 0.0, True, given["bidirectional"])
        x, *ended = call(function, (x, given["batch_sizes"], hx, *how) if packed else (x, hx, *how, False), {})
        made.append(ended)
    ends = [call(torch.cat, (list(parts), 0), {}) for parts in zip(*made, strict=True)]
    return call(torch.transpose, (x, 0, 1), {}) if first else x, *ends


def recurrent_or_dropping(
    kind: str, recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of `torch.<kind>(*args, **kwargs)`, or None."""
    made = recurrent(kind, recorder, call, args, kwargs) if kind in _KINDS else None
    return dropping(getattr(torch, kind), recorder, call, args, kwargs) if made is None else made
