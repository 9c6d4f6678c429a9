"""Replaces public functions and methods of PyTorch's by wrappers that count, before anything is compiled; then compares
programs with eager: their results, and how often each wrapper has run. Run by test_looked_up.py in a process of its own."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import fusewright

RUN: list[str] = []
OWNERS: dict[str, Any] = {
    "torch": torch, "functional": F, "linalg": torch.linalg, "fft": torch.fft, "special": torch.special,
    "autograd": types.SimpleNamespace(grad=torch.autograd.grad, backward=torch.autograd.backward),
}  # fmt: skip
METHODS = ("detach", "reshape", "flip", "split", "clone", "double", "contiguous", "unbind")
# PyTorch's own Python asks these, or makes shapes and first gradients with them: eager's does so as well, elsewhere.
OF_PYTORCH = frozenset("""
    compile typename is_tensor is_grad_enabled empty empty_like empty_permuted empty_strided ones_like sym_float
""".split())  # fmt: skip


def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        RUN.append(name)
        return original(*args, **kwargs)

    return wrapper


def public() -> Iterator[tuple[Any, str, str, Any]]:
    for label, owner in OWNERS.items():
        for name, value in [*vars(owner).items()]:
            if isinstance(value, types.FunctionType | types.BuiltinFunctionType) and name not in OF_PYTORCH:
                if not name.startswith("_") or name in dir(torch._C._VariableFunctions):
                    yield torch.autograd if label == "autograd" else owner, label, name, value
    for name in METHODS:
        yield torch.Tensor, "Tensor", name, getattr(torch.Tensor, name)


def branches(x: Any) -> Any:
    y = x.sin() if x.sum() > 0 else x.cos()
    if x.mean() > 5:
        y = y + 1
    return y * (2 if x.max() < 100 else 3)


def elements(x: Any) -> Any:
    total: Any = 0
    for row in x:
        total = total + (row if row[0] > 1 else -row)
    return total, len(x), [*x], max(x[0, 0], x[0, 1])


def gradient(x: Any) -> Any:
    w = x.clone().requires_grad_()
    return torch.autograd.grad((w.sin() * w).sum(), w)[0]


def backward(x: Any) -> Any:
    w = x.clone().requires_grad_()
    w.register_hook(lambda g: g * 2)
    (w.exp() * w).sum().backward()
    return w.grad


def arrays(x: Any) -> Any:
    a = x.numpy()
    return np.where(a > 0, a * 2, -a).sum(), np.median(a), np.clip(a, 0, 1), a.T @ a, np.cumsum(a), abs(a), np.outer(a, a)


def written(x: Any) -> Any:
    y = x.clone()
    y[0], y[:, 1] = 1, y[:, 2]
    y[y > 1] = 0
    x.add_(1)
    return y, x, x.view(-1), x[:, ::2], x.detach()


def checked(x: Any) -> Any:
    assert (x < 1e9).all()
    torch._check(x.shape[0] > 1)
    return x + 1


def modes(x: Any) -> Any:
    with torch.no_grad():
        y = x * 2
    with torch.autocast("cpu", torch.bfloat16):
        return y, x @ x.t()


def broken(x: Any) -> Any:
    y = x.sin()
    sys.stdout.write("")
    exec("pass")
    return y * 2, y.view(-1)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda x: torch.relu(x + 1) * 2, "where": lambda x: torch.where(x > 0, x, -x),
    "one hot": lambda x: F.one_hot(x.argmax(1), 6), "one hot of data": lambda x: F.one_hot(x.argmax(1)),
    "reversed": lambda x: [*reversed(x)], "vmap": lambda x: torch.vmap(lambda row: row.sin() * row.sum())(x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "tensors": lambda x: (torch.tensor([x[0, 0], 2.0]), torch.tensor([1.5, x.shape[0]]), torch.full((2,), 1.5)),
    "losses": lambda x: (F.layer_norm(x, (6,)), F.softmax(x, -1), F.cross_entropy(x, x.argmax(1) % 6)),
    "operators": lambda x: (x @ x.t(), x // 2, x**2, 1 - x, x % 2, 2 / x, ~(x > 0), x.T, x[None], x[1, 2]),
    "casts": lambda x: (x.double(), x.half().float(), x.to(torch.int32), x.type(torch.float64), x.size(), x.stride()),
    "numbers": lambda x: (float(x.sum()), x * x[0, 0].item(), x.nonzero()), "conditional": lambda x: (x.median(), x.topk(2)[0], x.norm()),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
    **{f.__name__: f for f in (branches, elements, gradient, backward, arrays, written, checked, modes, broken)},
}  # fmt: skip


def told(program: Callable[[Any], Any]) -> tuple[Any, Counter[str]]:
    x = torch.arange(24, dtype=torch.float32, device="cpu").reshape(4, 6).sin()
    RUN.clear()
    result = program(x)
    return result, Counter(RUN)


def main() -> None:
    for owner, label, name, value in [*public()]:
        setattr(owner, name, counting(f"{label}.{name}", value))
    wrong = []
    for name, program in PROGRAMS.items():
        eager, expected = told(program)
        compiled = fusewright.compile(program)
        for call in ("first", "second"):
            result, found = told(compiled)
            counts = {key: (expected[key], found[key]) for key in expected | found if expected[key] != found[key]}
            try:
                torch.testing.assert_close(result, eager)
            except AssertionError as error:
                counts["result"] = (0, str(error))  # type: ignore[assignment]
            wrong += [f"{name}, {call} call: {counts}"] * bool(counts)
    assert not wrong, "\n".join(["as (eager's, ours)", *wrong])


if __name__ == "__main__":
    main()
