"""Process groups and reductions of torch.distributed: guarded by identity; a group's name, ranks and size are constants
then."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed

CONSTANTS: tuple[type, ...] = ()
METHOD: type = type(None)
"""What a method of a class of theirs is."""
if torch.distributed.is_available():
    _c10d = cast(Any, torch.distributed)
    CONSTANTS = (_c10d.ProcessGroup, _c10d.ReduceOp, _c10d.ReduceOp.RedOpType)
    METHOD = type(vars(_c10d.ProcessGroup)["size"])
