"""PyTorch's own methods of nn.Module, by which code of ours knows that a program has put nothing in their place.

Takes nothing; gives the functions, or None where they had been replaced when this module was imported. Always holds: a
comparison with one of them is not fooled by a program that assigns to `torch.nn.Module`.
"""

from __future__ import annotations

import torch
from torch.nn.modules import module as torch_module


def _own(name: str) -> object:
    method = vars(torch.nn.Module)[name]
    return method if getattr(method, "__globals__", None) is vars(torch_module) else None


CALL, CALL_IMPL = _own("_wrapped_call_impl"), _own("_call_impl")
GETATTR, SETATTR = _own("__getattr__"), _own("__setattr__")
