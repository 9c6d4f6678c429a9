"""PyTorch's databases of operators, modules and optimizers, importable without the test helpers that they drag along.

Gives `DATABASES`, by the name of what they hold. `expecttest` is needed by PyTorch's test case classes only, never by a sample.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
import unittest
from typing import Any

if importlib.util.find_spec("expecttest") is None:
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    stand_in.__spec__ = importlib.machinery.ModuleSpec("expecttest", None)
    sys.modules["expecttest"] = stand_in

import torch
import torch.testing._internal.common_methods_invocations as _invocations
from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
    op_db,
    python_ref_db,
)
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import _get_optim_inputs_including_global_cliquey_kwargs, optim_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.testing._internal.hop_db import hop_db
from torch.testing._internal.opinfo.definitions.nested import njt_op_db

# Entries of random operators call this by its global name. PyTorch's own saves, seeds and restores the generator inside the function under
# test; the sweep seeds both runs from outside, as users do.
_invocations.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)

DATABASES = {
    "op": op_db,
    "reference": python_ref_db,
    "custom operator": custom_op_db,
    # In eager the gradient of a split of jagged tensors ends the process.
    "jagged": [op for op in njt_op_db if op.supports_njt and op.name != "split_with_sizes"],
    "autograd function": autograd_function_db,
    "higher-order operator": hop_db,
    "foreach": [
        *foreach_unary_op_db,
        *foreach_binary_op_db,
        *foreach_pointwise_op_db,
        *foreach_reduce_op_db,
        *foreach_other_op_db,
    ],
    "module": module_db,
    "optimizer": optim_db,
}


def optimizer_inputs(info: Any, dtype: torch.dtype, device: str) -> list[Any]:
    """Every input of an optimizer with every implementation that it has on the device."""
    return list(_get_optim_inputs_including_global_cliquey_kwargs(device, dtype, info))


__all__ = ["DATABASES", "op_db", "optimizer_inputs"]
