"""What is read of a tensor under the names that its class has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusewright

NAMES = [name for name in dir(torch.Tensor) if name != "__torch_function__"]


@pytest.mark.parametrize("first", sorted({name.strip("_")[0] for name in NAMES}))
def test_what_a_name_leads_to_is_the_programs(first: str) -> None:
    """Of no method, and no class that one is bound to, is another one than eager's given out."""

    def described(found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            return tuple(found.shape)
        owner = getattr(found, "__self__", None)
        kept = owner if isinstance(owner, type) else type(owner)
        return type(found), getattr(found, "__qualname__", None), getattr(found, "__func__", None), kept

    def read(x: torch.Tensor, name: str) -> Any:
        try:
            return getattr(x, name)
        except Exception as error:
            return type(error).__name__

    compiled, x = fusewright.compile(read), torch.ones(3)
    for name in NAMES:
        if name.strip("_")[0] == first:
            assert described(compiled(x, name)) == described(read(x, name)), name


class Proxy:
    """Has what a tensor has, `__torch_function__` too: PyTorch asks the instance for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __radd__(self, other: torch.Tensor) -> Proxy:
        return Proxy(other + self.tensor)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.tensor, name)
        return (lambda *args, **kwargs: Proxy(found(*args, **kwargs))) if callable(found) else found


@pytest.mark.parametrize("outside", [False, True])
def test_what_passes_names_on_to_a_tensor_has_a_tensors_torch_function(outside: bool) -> None:
    kept = Proxy(torch.ones(2))

    def program(x: torch.Tensor) -> tuple[Any, ...]:
        proxy = kept if outside else Proxy(x)
        return (x + proxy).tensor, torch.sin(proxy).tensor, proxy.sum().tensor, (2 + proxy).tensor

    compiled, x = fusewright.compile(program), torch.ones(2)
    for _ in range(2):
        assert repr(compiled(x)) == repr(program(x))
