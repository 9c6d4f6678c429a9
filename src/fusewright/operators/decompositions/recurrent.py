"""Recurrent layers where sizes vary: PyTorch's Python versions, which then stand for its C++ ones, differ from eager.

They write out each step of a length: over one that varies, a layer is one operator here. They drop no numbers between
layers: layers with dropout are recorded one by one. They do not give an LSTM to oneDNN where its input needs gradients,
so autocast gives other dtypes: the LSTMs that eager gives to it are recorded as eager calls it. cuDNN takes a layer
whole, with its own dropout and dtypes under autocast: on a GPU such a layer runs between graphs, as in eager.

Takes what `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu` take; gives the recorded result, or None
where they are recorded as they come. Always holds: each part computes what eager does, by calling it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.torch_version import TorchVersion

from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak
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

_OF_INPUT = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
_OF_PACKED = ("data", "batch_sizes", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")


def recurrent(
    kind: str, recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of `torch.<kind>(*args, **kwargs)`, or None."""
    function, place = getattr(torch, kind), 1 if kind == "lstm" else 2
    packed = "batch_sizes" in kwargs or (len(args) > place and isinstance(args[place], torch.Tensor))
    names = _OF_PACKED if packed else _OF_INPUT
    given = dict(zip(names, args, strict=False)) | kwargs
    if not recorder.symbolic or len(args) + len(kwargs) != len(names) or given.keys() != {*names}:
        return None
    first = given[names[0]]
    if isinstance(first, torch.Tensor) and first.device.type == "cuda":
        if recorder.level != "aten":
            return None
        raise GraphBreak("operator-failed", f"torch.{kind} over sizes that vary, on a GPU")
    if not isinstance(given["params"], list | tuple) or not given["params"] or type(given["num_layers"]) is not int:
        return None
    if packed:
        found = _packed_by_onednn(recorder, call, given) if kind == "lstm" else None
        return found or _dropping(function, call, given)
    if kind != "lstm":
        return _one_operator(kind, recorder, call, given) or _dropping(function, call, given)
    if not isinstance(given["hx"], list | tuple) or len(given["hx"]) != 2:
        return None  # eager's error
    made = _by_onednn(recorder, call, given) or _dropping(function, call, given)
    result, *ends = made or call(function, args, kwargs)
    # The Python version of PyTorch before 2.13 leaves a dimension in the states where the batch has several elements.
    ends = [
        end if end.dim() == state.dim() else call(torch.Tensor.reshape, (end, tuple(state.shape)), {})
        for end, state in zip(ends, given["hx"], strict=True)
    ]
    return result, *ends


def _one_operator(kind: str, recorder: Recorder, call: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The result of a function other than `torch.lstm` in inference over a length that varies; or None."""
    x, state, params, biases, layers, dropout, train, bidirectional, batch_first = (given[name] for name in _OF_INPUT)
    tensors = (x, state, *params)
    if recorder.level != "aten" or not all(recorder.owns(tensor) for tensor in tensors):
        return None
    if any(tensor.device.type != "cpu" or tensor.dtype != x.dtype for tensor in tensors):
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


def _walk(
    call: Callable[..., Any], given: dict[str, Any], layer: Callable[[Any, int], tuple[Any, list[Any]]], join: Any
) -> tuple[Any, ...]:
    """The result of a recurrent function. `layer` takes an input and a number, and gives what that layer makes of it
    and its last states, which `join` puts together."""
    x, first = given.get("input", given.get("data")), given.get("batch_first", False)
    x = call(torch.transpose, (x, 0, 1), {}) if first else x  # numbers are drawn in the order of the steps
    ends: list[Any] = []
    for index in range(given["num_layers"]):
        if index and given["dropout"] and given["train"]:
            x = call(torch.dropout, (x, given["dropout"], True), {})
        x, ended = layer(x, index)
        ends += ended
    x = call(torch.transpose, (x, 0, 1), {}) if first else x
    return x, *(call(join, (list(parts), 0), {}) for parts in zip(*ends, strict=True))


def _dropping(function: Any, call: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The result of a recurrent function that drops between its layers, each layer a call of its own; or None."""
    layers, params, both = given["num_layers"], given["params"], given["bidirectional"]
    if layers < 2 or not given["dropout"] or not given["train"] or len(params) % layers:
        return None
    states, each = given["hx"] if function is torch.lstm else [given["hx"]], len(params) // layers
    directions, packed = 2 if both else 1, "batch_sizes" in given

    def layer(x: Any, index: int) -> tuple[Any, list[Any]]:
        begun = [call(torch.narrow, (state, 0, index * directions, directions), {}) for state in states]
        hx = begun if function is torch.lstm else begun[0]
        how = (list(params[index * each : (index + 1) * each]), given["has_biases"], 1, 0.0, True, both)
        x, *ended = call(function, (x, given["batch_sizes"], hx, *how) if packed else (x, hx, *how, False), {})
        return x, [ended]

    return _walk(call, given, layer, torch.cat)


_ONEDNN_LSTM = 2  # ideep::rnn_kind::LSTM
_ONEDNN_DTYPES: dict[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: lambda: not torch.is_grad_enabled() and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}


def _by_onednn(recorder: Recorder, call: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The result of `torch.lstm` by the operators that eager calls, where it calls oneDNN; or None."""
    x, states, params, biases, layers, _, train, bidirectional, first = (given[name] for name in _OF_INPUT)
    each, directions = 4 if biases else 2, 2 if bidirectional else 1
    if len(params) != each * layers * directions or not _fits_onednn(recorder, x, (x, *states, *params)):
        return None
    width, batch = params[1].shape[1], x.shape[0 if first else 1]
    if x.shape[2] != params[0].shape[1] or any(state.shape != (layers * directions, batch, width) for state in states):
        return None  # projections, or eager's error
    states = [call(torch.Tensor.contiguous, (state,), {}) for state in states]

    def layer(x: Any, index: int) -> tuple[Any, list[Any]]:
        x, made, ends = call(torch.Tensor.contiguous, (x,), {}), [], []
        for direction in range(directions):
            place = index * directions + direction
            weights = list(params[place * each : (place + 1) * each])
            weights += [] if biases else [call(torch.zeros_like, (weight,), {}) for weight in weights]
            begun = [call(torch.select, (state, 0, place), {}) for state in states]
            how: tuple[Any, ...] = (direction > 0, [], _ONEDNN_LSTM, width, layers, biases, bidirectional, first, train)
            output, *ended, _workspace = call(torch.ops.aten.mkldnn_rnn_layer.default, (x, *weights, *begun, *how), {})
            made.append(output)
            ends.append(ended)
        return call(torch.cat, (made, -1), {}) if bidirectional else made[0], ends

    return _walk(call, given, layer, torch.stack)


_PACKED_TO_ONEDNN = TorchVersion(torch.__version__) >= "2.13"


def _packed_by_onednn(recorder: Recorder, call: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The same over a packed sequence, which eager gives to oneDNN where each step has one batch size."""
    data, sizes = given["data"], given["batch_sizes"]
    if not _PACKED_TO_ONEDNN or recorder.level != "aten" or not _fits_onednn(recorder, data, (data, *given["hx"]), 2):
        return None
    batches = [int(call(torch.select, (sizes, 0, step), {})) for step in range(sizes.shape[0])]
    if len({*batches}) != 1:
        return None
    steps = call(torch.Tensor.view, (data, (len(batches), batches[0], data.shape[1])), {})
    made = _by_onednn(recorder, call, {**given, "input": steps, "batch_first": False})
    return made and (call(torch.flatten, (made[0], 0, 1), {}), *made[1:])


def _fits_onednn(recorder: Recorder, x: Any, tensors: Sequence[Any], dims: int = 3) -> bool:
    """Whether eager gives an LSTM of this input, among all its tensors, to oneDNN."""
    if not torch._C._get_mkldnn_enabled():
        return False
    if not all(recorder.owns(one) and one.device.type == "cpu" for one in tensors):
        return False
    if any(one.dtype not in _ONEDNN_DTYPES or one.layout is not torch.strided for one in tensors):
        return False
    if not torch.is_autocast_enabled("cpu") and any(one.dtype != x.dtype for one in tensors):
        return False  # eager's error
    return x.dim() == dims and bool(_ONEDNN_DTYPES[x.dtype]()) and x.numel() != 0
