"""Whether what a compiled program did equals what eager did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def same(got: Any, expected: Any, rel: float = 0.0) -> None:
    """Asserts it, through containers. rel: how far a Python float may be off, relative to it."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, equal_nan=True)
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected) and len(got) == len(expected), (got, expected)
        for pair in zip(got, expected, strict=True):
            same(*pair, rel)
    elif isinstance(expected, dict):
        assert list(got) == list(expected), (got, expected)
        same(list(got.values()), list(expected.values()), rel)
    elif rel and isinstance(expected, (float, np.floating)):
        assert got == pytest.approx(expected, rel=rel, nan_ok=True)
    else:
        assert got == expected, (got, expected)
