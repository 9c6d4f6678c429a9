"""Shared by all tests: every test starts with nothing compiled and a fixed seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fusewright


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    fusewright.reset()
    yield
    fusewright.set_stance("default")
