"""Gradient unscaling of mixed precision: one operator over a list of tensors, as the operators that it is made of.

Takes the arguments of `aten._amp_foreach_non_finite_check_and_unscale_`; records the products and the check. Always
holds: as in eager, `found_inf` becomes 1 if any element of any tensor is infinite or NaN, and is left alone otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusewright.operators.decompositions.fused_optimizers import uncounted

if TYPE_CHECKING:
    from fusewright.sizes.interfaces import Recorder

aten = torch.ops.aten


def check_and_unscale(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """(tensors, found_inf, inverse scale), all written in place but the last."""
    tensors, found, inverse = (*args, *kwargs.values())
    run = recorder.dispatch
    worst = found
    for tensor in tensors:
        finite = run(aten.lt.Scalar, (run(aten.abs.default, (tensor,), {}), float("inf")), {})
        bad = run(aten.any.default, (run(aten.logical_not.default, (finite,), {}),), {})
        bad = run(
            aten.reshape.default, (run(aten._to_copy.default, (bad,), {"dtype": found.dtype}), list(found.shape)), {}
        )
        worst = run(aten.maximum.default, (worst, bad), {})
        run(aten.mul_.Tensor, (uncounted(recorder, tensor), inverse), {})
    if worst is not found:
        run(aten.copy_.default, (uncounted(recorder, found), worst), {})
