"""Builtins of Python's that a tensor answers: the result is eager's, or the error with its frames."""

from __future__ import annotations

import math
import operator
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright

BUILTINS: list[Callable[[Any], Any]] = [
    len, list, iter, reversed, abs, round, bool, int, float, complex, operator.index, hash, operator.length_hint, sorted,
    sum, max, any, enumerate, zip, repr, math.floor, math.ceil, math.trunc, operator.neg, operator.pos, operator.invert, tuple,
]  # fmt: skip
TWO: list[Callable[[Any, Any], Any]] = [
    divmod, operator.contains, operator.matmul, operator.floordiv, operator.mod, pow, operator.getitem, operator.lshift, operator.and_,
]  # fmt: skip
CALLS = {one.__name__: one for one in BUILTINS} | {
    f"{one.__name__} {name}": (lambda x, one=one, with_=with_: one(x, with_))
    for one in TWO
    for name, with_ in (("number", 1), ("text", "a"))
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_is_answered_as_in_eager(name: str, shape: tuple[int, ...]) -> None:
    call = CALLS[name]

    def program(x: torch.Tensor) -> Any:
        y = x * 2
        try:
            found = call(y)
            return y, type(found), list(found) if hasattr(found, "__next__") else found
        except Exception as error:
            return y, error

    def told(result: Any) -> Any:
        if not isinstance(result[1], Exception):
            return str([0 if name == "hash" else one for one in result])
        frames = traceback.extract_tb(result[1].__traceback__)
        inner = [(frame.name, frame.lineno) for frame in frames if "fusewright" not in frame.filename]
        return inner, repr(result[1]).split("Exception raised")[0]

    x = torch.arange(float(math.prod(shape))).reshape(shape) + 1
    assert told(fusewright.compile(program)(x)) == told(program(x))
