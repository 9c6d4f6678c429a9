"""Functions and operators that are recorded as other operators: one table for each place where they are met.

FUNCTIONS: a torch function that the program calls. A row takes the recorder, a function that calls and records another
one, and the call's arguments; it gives the result, or None where the function is recorded as it comes.
OPERATORS: an operator that reaches the recorder. A row takes the recorder and the operator's arguments.
INTERPRETED: a function that stands for Python code, which capture interprets in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch._ops import OpOverload

from fusewright.base.pytorch import functional as F, methods, torch
from fusewright.operators.decompositions import attention_modules
from fusewright.operators.decompositions.broadcast import broadcast_tensors
from fusewright.operators.decompositions.eager_kernels import EAGER_KERNELS
from fusewright.operators.decompositions.fused_optimizers import FUSED_OPTIMIZERS
from fusewright.operators.decompositions.interpolate import interpolate
from fusewright.operators.decompositions.inverse_stft import istft
from fusewright.operators.decompositions.linspace import linspace
from fusewright.operators.decompositions.recurrent import recurrent
from fusewright.operators.decompositions.running_product import cumprod
from fusewright.operators.decompositions.unscale import check_and_unscale

aten = torch.ops.aten

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.interpolate: interpolate,
    torch.linspace: linspace,
    **dict.fromkeys((torch.istft, methods.istft), istft),
    **dict.fromkeys((torch.cumprod, methods.cumprod), cumprod),
    torch.broadcast_tensors: broadcast_tensors,
    F.scaled_dot_product_attention: attention_modules.with_dense_mask,
    **EAGER_KERNELS,
    **{getattr(torch, kind): partial(recurrent, kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
OPERATORS: dict[OpOverload, Callable[..., Any]] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: check_and_unscale,
    **FUSED_OPTIMIZERS,
}
INTERPRETED: dict[Any, Callable[..., Any]] = {
    **{function: function for function in (F.upsample, F.upsample_nearest, F.upsample_bilinear)},  # by F.interpolate
    torch._transformer_encoder_layer_fwd: attention_modules.transformer_encoder_layer,
    torch._native_multi_head_attention: attention_modules.native_multi_head_attention,
}
