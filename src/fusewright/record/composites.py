"""Composite operators that PyTorch does not break down as eager does: under inference mode they reach the recorder
whole, and with symbolic sizes some become something else.

Takes a recorder and an operator; gives the state in which its parts are recorded, or its parts. Always holds: the parts
meet what the program's call met: views have a history, and autocast casts, unless an operator around them has its own
casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from fusewright._native import isinstance

if TYPE_CHECKING:
    from fusewright.sizes.interfaces import Recorder


@contextmanager
def as_called(recorder: Recorder, func: OpOverload, args: Sequence[object]) -> Iterator[None]:
    """Here the keys of autograd and autocast are shut out, as in every `__torch_dispatch__`."""
    around = recorder.cast
    if not around:
        tensor = next((one for one in _flat(args) if isinstance(one, torch.Tensor)), None)
        recorder.cast = tensor is not None and _is_cast(func, tensor.device.type)
    state: AbstractContextManager[object] = nullcontext()
    if recorder.cast:
        state = torch._C._SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False)
    elif torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.PythonTLSSnapshot):
        state = torch._C._RestorePythonTLSSnapshot()  # type: ignore[attr-defined]
    # else: what the recorder itself calls is in no `__torch_dispatch__`, and nothing is shut out
    try:
        with state, _viewed_once(func):
            yield
    finally:
        recorder.cast = around


def _flat(args: Sequence[object]) -> Iterator[object]:
    for value in args:
        yield from value if isinstance(value, list | tuple) else (value,)


def _viewed_once(func: OpOverload) -> AbstractContextManager[object]:
    """What has kernels for nested tensors (`narrow`, `chunk`) makes its results views itself, so its parts do not."""
    itself = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "ADInplaceOrView")
    return torch._C._SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, True) if itself else nullcontext()


@cache
def _is_cast(func: OpOverload, device: str) -> bool:
    """Whether autocast has a rule for the operator itself."""
    key = f"Autocast{device.upper()}"
    return key in DispatchKey.__members__ and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


aten = torch.ops.aten
_RECURRENT = frozenset({
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, aten.lstm.input, aten.lstm.data, aten.gru.input,
    aten.gru.data, aten.rnn_tanh.input, aten.rnn_tanh.data, aten.rnn_relu.input, aten.rnn_relu.data,
})  # fmt: skip
_NAMES = tuple(
    f"{first} hx params has_biases num_layers dropout train bidirectional{last}".split()
    for first, last in (("input", " batch_first"), ("data batch_sizes", ""))
)


def over_sizes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What is called in the place of `fn` where sizes are symbolic."""
    return partial(_layer_by_layer, fn) if fn in _RECURRENT else fn


def _layer_by_layer(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A recurrent network as one of a single layer after the other: PyTorch's Python version of several layers leaves
    out the dropout between them."""
    packed = "batch_sizes" in kwargs or isinstance(args[3] if len(args) > 3 else None, list | tuple)
    given = {**dict(zip(_NAMES[packed], args)), **kwargs}
    count, dropout, train = (given.get(name) for name in ("num_layers", "dropout", "train"))
    if not (train and dropout and isinstance(count, int) and count > 1 and len(given) == len(_NAMES[packed])):
        return fn(*args, **kwargs)
    value, *others = (given[name] for name in _NAMES[packed])
    batch_first = given.pop("batch_first", False)
    value = value.transpose(0, 1) if batch_first else value
    between, several = others[:packed], isinstance(given["hx"], list | tuple)
    directions, each = 2 if given["bidirectional"] else 1, len(given["params"]) // count
    finals = []
    for layer in range(count):
        if layer:
            with torch._C._DisablePythonDispatcher():
                value = torch.dropout(value, dropout, True)
        held = [one.narrow(0, layer * directions, directions) for one in (given["hx"] if several else [given["hx"]])]
        weights = given["params"][layer * each : (layer + 1) * each]
        alike = (weights, given["has_biases"], 1, 0.0, train, given["bidirectional"], *(() if packed else (False,)))
        value, *final = fn(value, *between, held if several else held[0], *alike)
        finals.append(final)
    return (value.transpose(0, 1) if batch_first else value, *(torch.cat(parts) for parts in zip(*finals)))
