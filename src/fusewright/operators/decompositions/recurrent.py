"""Recurrent layers where sizes vary: PyTorch's Python versions, which then stand for its C++ ones, differ from eager.

They write out each step of a length: over one that varies, a layer is one operator here. They drop no numbers between
layers: layers with dropout are recorded one by one. They do not give an LSTM to oneDNN where its input needs gradients,
so autocast gives other dtypes: the LSTMs that eager gives to it are recorded as eager calls it.

Takes what `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu` take; gives the recorded result, or None
where they are recorded as they come. Always holds: each part computes what eager does, by calling it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.torch_version import TorchVersion

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


_ONEDNN_LSTM = 2  # ideep::rnn_kind::LSTM
_ONEDNN_DTYPES: dict[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: lambda: not torch.is_grad_enabled() and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}

_LOW_GRADIENTS = TorchVersion(torch.__version__) < "2.13"  # the backward's meta function gives another dtype


def lstm_layers(recorder: Recorder, call: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The result of `torch.lstm` by the operators that eager calls, where it calls oneDNN; or None."""
    x, states, params, biases, layers, drop, train, bidirectional, first = (given[name] for name in _OF_INPUT)
    each, directions = 4 if biases else 2, 2 if bidirectional else 1
    if type(layers) is not int or len(params) != each * layers * directions:
        return None
    if not _onednn(recorder, x, (x, *states, *params)):
        return None
    width, batch = params[1].shape[1], x.shape[0 if first else 1]
    if x.shape[2] != params[0].shape[1] or any(state.shape != (layers * directions, batch, width) for state in states):
        return None  # projections, or eager's error
    x = call(torch.Tensor.contiguous, (call(torch.transpose, (x, 0, 1), {}) if first else x,), {})
    states = [call(torch.Tensor.contiguous, (state,), {}) for state in states]
    ends: tuple[list[Any], list[Any]] = ([], [])
    for layer in range(layers):
        made = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = list(params[index * each : (index + 1) * each])
            weights += [] if biases else [call(torch.zeros_like, (weight,), {}) for weight in weights]
            begun = [call(torch.select, (state, 0, index), {}) for state in states]
            how: tuple[Any, ...] = (direction > 0, [], _ONEDNN_LSTM, width, layers, biases, bidirectional, first, train)
            output, *ended, _workspace = call(torch.ops.aten.mkldnn_rnn_layer.default, (x, *weights, *begun, *how), {})
            made.append(output)
            for end, one in zip(ends, ended, strict=True):
                end.append(one)
        x = call(torch.cat, (made, -1), {}) if bidirectional else made[0]
        if drop and train and layer < layers - 1:
            x = call(torch.dropout, (x, drop, True), {})
    return call(torch.transpose, (x, 0, 1), {}) if first else x, *(call(torch.stack, (end, 0), {}) for end in ends)


def _onednn(recorder: Recorder, x: Any, tensors: Sequence[Any]) -> bool:
    """Whether eager gives an LSTM of this input, among all its tensors, to oneDNN."""
    if not torch._C._get_mkldnn_enabled():
        return False
    if not all(recorder.owns(one) and one.device.type == "cpu" for one in tensors):
        return False
    if any(one.dtype not in _ONEDNN_DTYPES or one.layout is not torch.strided for one in tensors):
        return False
    if not torch.is_autocast_enabled("cpu") and any(one.dtype != x.dtype for one in tensors):
        return False  # eager's error
    if torch.is_grad_enabled() and _LOW_GRADIENTS and any(one.dtype is not torch.float32 for one in tensors):
        return False
    return x.dim() == 3 and bool(_ONEDNN_DTYPES[x.dtype]()) and x.numel() != 0


def _lstm(recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `torch.lstm(*args, **kwargs)` over tensors that are not packed, or None."""
    given = dict(zip(_OF_INPUT, args, strict=False)) | kwargs
    if not recorder.symbolic or len(args) + len(kwargs) != len(_OF_INPUT) or given.keys() != {*_OF_INPUT}:
        return None
    states, params = given["hx"], given["params"]
    if not isinstance(states, list | tuple) or not isinstance(params, list | tuple) or len(states) != 2:
        return None  # packed sequences, or eager's error
    made = lstm_layers(recorder, call, given)
    if made is None:
        made = dropping(torch.lstm, recorder, call, args, kwargs)
    result, *ends = call(torch.lstm, args, kwargs) if made is None else made
    # The Python version of PyTorch before 2.13 leaves a dimension in the states where the batch has several elements.
    ends = [
        end if end.dim() == state.dim() else call(torch.Tensor.reshape, (end, tuple(state.shape)), {})
        for end, state in zip(ends, states, strict=True)
    ]
    return result, *ends


def recurrent_or_dropping(
    kind: str, recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of `torch.<kind>(*args, **kwargs)`, or None."""
    made = recurrent(kind, recorder, call, args, kwargs) if kind in _KINDS else _lstm(recorder, call, args, kwargs)
    return dropping(getattr(torch, kind), recorder, call, args, kwargs) if made is None else made
