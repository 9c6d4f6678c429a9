"""PyTorch's operator and module databases, importable without the test helpers that they drag along.

Gives `op_db`, `module_db` and the foreach tables. `expecttest` is needed by PyTorch's test case classes only, never by a sample.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
import unittest

if importlib.util.find_spec("expecttest") is None:
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    stand_in.__spec__ = importlib.machinery.ModuleSpec("expecttest", None)
    sys.modules["expecttest"] = stand_in

import torch.testing._internal.common_methods_invocations as _invocations
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
    op_db,
)
from torch.testing._internal.common_modules import module_db

# Entries of random operators call this by its global name. PyTorch's own saves, seeds and restores the generator inside the function under
# test; the sweep seeds both runs from outside, as users do.
_invocations.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)

foreach_db = [
    *foreach_unary_op_db,
    *foreach_binary_op_db,
    *foreach_pointwise_op_db,
    *foreach_reduce_op_db,
    *foreach_other_op_db,
]

__all__ = ["foreach_db", "module_db", "op_db"]
