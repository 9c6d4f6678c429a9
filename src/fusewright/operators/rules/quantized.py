"""Shape rules of linear layers with quantised weights (`torch.ao.quantization.quantize_dynamic`), whose weights are
opaque, and of fake quantisation.

Takes the input's TensorType and the packed weights; gives the result's type. Always holds: what the operator would
refuse is left undecided.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from fusewright.base.records import replace
from fusewright.operators.rules.common import Rule, fresh, preserved_strides, same
from fusewright.sizes.tensor_type import TensorType


def _weight_shape(packed: Any) -> tuple[int, ...]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        weight, _ = packed.unpack()
        return tuple(weight.shape)


def _linear_dynamic(x: TensorType, packed: Any, reduce_range: bool = False) -> object:
    if (
        not isinstance(packed, torch.ScriptObject)
        or x.ndim < 2
        or x.dtype is not torch.float32
        or x.device.type != "cpu"
    ):
        return NotImplemented
    columns, inner = _weight_shape(packed)
    if not same(x.shape[-1], inner):
        return NotImplemented
    return fresh((*x.shape[:-1], columns), x)


def _fake_quantised(x: TensorType, *rest: Any) -> object:
    """The values, and which of them the range holds."""
    if not x.dtype.is_floating_point or x.device.type != "cpu":
        return NotImplemented
    values = replace(fresh(x.shape, x), stride=preserved_strides(x))
    return values, replace(values, dtype=torch.bool)


_FAKE = (
    torch.ops.aten.fake_quantize_per_tensor_affine_cachemask.default,
    torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
    torch.ops.aten.fake_quantize_per_channel_affine_cachemask.default,
)
_NAMES = ("linear_dynamic", "linear_relu_dynamic", "linear_dynamic_fp16", "linear_relu_dynamic_fp16")
_PACKETS = [getattr(torch.ops.quantized, name, None) for name in _NAMES]
RULES: dict[OpOverload, Rule] = {
    **{packet.default: _linear_dynamic for packet in _PACKETS if packet is not None},
    **dict.fromkeys(_FAKE, _fake_quantised),
}
