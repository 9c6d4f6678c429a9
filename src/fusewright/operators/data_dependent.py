"""Operators whose results have a shape that depends on data: what the recorder, the verifier and the passes know of
them."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)
GIVES = "gives_size"
"""In `node.meta`: the symbol whose value is read from this node, and where in its results (record/data_sizes.py)."""

# Operators whose results are taken to be of unknown shape, all of them, with their dtypes: "same" is the first
# argument's, "real" its real counterpart.
OF_UNKNOWN_SHAPE: dict[OpOverload, tuple[torch.dtype | str, ...]] = {
    aten.nonzero.default: (torch.int64,),
    aten.masked_select.default: ("same",),
    aten.index.Tensor: ("same",),
    aten._unique2.default: ("same", torch.int64, torch.int64),
    aten.unique_dim.default: ("same", torch.int64, torch.int64),
    aten.unique_consecutive.default: ("same", torch.int64, torch.int64),
    aten.unique_dim_consecutive.default: ("same", torch.int64, torch.int64),
    aten.repeat_interleave.Tensor: (torch.int64,),
    aten.bincount.default: (torch.int64,),
    aten.linalg_lstsq.default: ("same", "real", torch.int64, "real"),
}
