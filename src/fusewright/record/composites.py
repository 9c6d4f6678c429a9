"""Composite operators that reach the recorder whole: under inference mode PyTorch does not break them down.

Takes a recorder and an operator; gives the state in which its parts are recorded. Always holds: the parts meet what the
program's call met: views have a history, and autocast casts, unless an operator around them has its own casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from fusewright._native import isinstance
from fusewright.operators.schema import written_by

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


@contextmanager
def counting_writes(func: OpOverload, args: Sequence[object]) -> Iterator[None]:
    """Of an operator on lists, whose kernels count in eager: here its parts are below what counts."""
    yield
    written = [one for place in written_by(func, args) for one in _flat([args[place]])]
    increment_version([one for one in written if isinstance(one, torch.Tensor) and not one.is_inference()])


def parts(func: OpOverload) -> Callable[..., object]:
    """What calls the operator's parts: PyTorch's Python version where that serves outside of inference mode. The C++
    one may read memory that is not there if sizes vary (the `batch_sizes` of a packed sequence): a crash."""
    asked = torch._C._dispatch_tls_is_dispatch_key_included(DispatchKey.PythonDispatcher)
    python = func.py_kernels.get(DispatchKey.CompositeImplicitAutograd) if asked else None
    return python or partial(func._op_dk, DispatchKey.CompositeImplicitAutograd)


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
