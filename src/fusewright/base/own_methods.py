"""PyTorch's own methods and functions, by which code of ours knows that a program has put nothing in their place.

Takes nothing; gives the methods of nn.Module, or None where they had been replaced when this module was imported, and
says whether any operator's function has been replaced. Always holds: a comparison with one of them is not fooled by a
program that assigns to `torch.nn.Module`.
"""

from __future__ import annotations

import operator
import types

import torch
import torch.nn.functional as F
from torch.nn.modules import module as torch_module


def _own(name: str) -> object:
    method = vars(torch.nn.Module)[name]
    return method if getattr(method, "__globals__", None) is vars(torch_module) else None


CALL, CALL_IMPL = _own("_wrapped_call_impl"), _own("_call_impl")
GETATTR, SETATTR = _own("__getattr__"), _own("__setattr__")

# Where PyTorch's Python versions of operators look functions up, and which names there are operators'.
_OWNERS = ((torch.Tensor, (torch._C.TensorBase,)), (torch, (torch._C._VariableFunctions,)),
           (F, (torch._C._VariableFunctions, torch._C._nn)))  # fmt: skip
_RENAMED = frozenset((
    "__rtruediv__", "__itruediv__", "__pow__", "__ipow__", "__pos__", "__neg__", "__abs__", "__torch_dispatch__",
    "threshold", "logsigmoid",
))  # fmt: skip
"""What PyTorch itself keeps under another name than its own."""
_TEXT = frozenset(("__repr__", "__str__", "__format__", "__dir__"))
_seen: list[object] = []
_replaced = False


def operators_replaced() -> bool:
    """Whether a program has put functions in the place of some of `torch`, `torch.Tensor` or `torch.nn.functional`.
    PyTorch's Python versions of operators call these, where eager runs its C++."""
    global _replaced
    now = [*vars(torch.Tensor).values(), *vars(torch).values(), *vars(F).values()]
    if len(now) != len(_seen) or not all(map(operator.is_, now, _seen)):  # a program's == may say anything
        _seen[:] = now
        _replaced = any(
            _is_foreign(name, value) and any(hasattr(base, name) for base in bases)
            for owner, bases in _OWNERS
            for name, value in vars(owner).items()
        )
    return _replaced


def _is_foreign(name: str, value: object) -> bool:
    if not callable(value) or name in _RENAMED or name in _TEXT or isinstance(value, type | types.ModuleType):
        return False
    home = getattr(value, "__module__", None) or type(value).__module__
    return getattr(value, "__name__", name) != name or home.partition(".")[0] not in ("torch", "builtins")
