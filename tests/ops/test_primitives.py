"""The primitives of `torch._refs`: recorded as the operators that eager runs for them, whatever their schemas and meta kernels say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import _prims as prims, _refs as refs

from tests.ops.cases import Case
from tests.ops.running import run_case

X = torch.arange(12.0).reshape(3, 4).sin()
CAPTURED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a view that its schema calls a write": (lambda x: prims.as_strided(x * 2, (2, 2), (1, 4), 0), (X,)),
    "views of other classes": (lambda x: (prims.transpose(x, (1, 0)), prims.split_dim(x, 1, 2)), (X,)),
    "strides that its meta kernel does not tell": (lambda x: refs.fft.fft(x, dim=0), (X.reshape(2, 3, 2),)),
    "a value spread over others": (lambda x, w: refs.nn.functional.prelu(x, w), (X, torch.tensor([0.5]))),
    "a write": (lambda x, y: prims.copy_to(x, y), (X, X + 1)),
    "elements": (lambda x: refs.softmax(refs.sigmoid(x), 1), (X,)),
}
BROKEN: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a view of an input's memory": (lambda x: refs.as_strided(x, (2, 2), (1, 4), 0), (X,)),
    "another size": (lambda x: prims.resize(x, (2, 3)), (X,)),
}


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("name", CAPTURED | BROKEN)
def test_equals_eager(name: str, backend: str) -> None:
    function, args = (CAPTURED | BROKEN)[name]
    outcome = run_case(Case(name, lambda transform: transform(function), args, {}), backend=backend)
    assert outcome.kind == ("captured" if name in CAPTURED else "broke"), outcome


def test_what_is_refused() -> None:
    case = Case("two shapes", lambda transform: transform(prims.add), (X, X[0]), {})
    assert run_case(case).kind == "same error"
