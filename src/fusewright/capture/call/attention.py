"""Attention of PyTorch's own modules, whose C++ shortcuts would hide what can be fused.

Takes calls of `scaled_dot_product_attention`, and of the operators that `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call in
inference; gives the same results from operators that the compiler knows. Always holds: a shortcut is taken where eager takes it, as it does
not compute what the module's Python does: every element of a mask that is not zero, also of one that is meant to be added, says "left out".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from fusewright.capture.border.native import native
from fusewright.operators.decompositions import attention_modules

if TYPE_CHECKING:
    from fusewright.capture.interpret.interpreter import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def attention(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """A mask that does not vary along its last dimension (transformers expands such ones) keeps attention off every fused kernel of a GPU:
    it is written out."""
    world = tracer.world
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if not isinstance(mask, torch.Tensor) or mask.device.type != "cuda" or tracer.recorder.level != "aten":
        mask = None
    if mask is not None and mask.ndim and mask.stride(-1) != 1:
        mask = world.torch_call(torch.Tensor.contiguous, (mask,), {})
        args, kwargs = (*args[:3], mask, *args[4:]) if len(args) > 3 else args, kwargs if len(args) > 3 else {**kwargs, "attn_mask": mask}
    return world.torch_call(F.scaled_dot_product_attention, args, kwargs)


def fast_path(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """torch.backends.mha.get_fastpath_enabled. (nn.TransformerEncoder asks too, for nested tensors: `encoder_layer` does without.)"""
    frame = tracer.frame
    if frame is None or frame.info.code not in _SHORTCUTS:
        return False
    answer = native(torch.backends.mha.get_fastpath_enabled)
    tracer.world.guard_answer(torch.backends.mha.get_fastpath_enabled, (), answer)
    return answer


_ENCODER = torch.nn.TransformerEncoder.forward.__code__
_SHORTCUTS = frozenset(
    (
        torch.nn.TransformerEncoderLayer.forward.__code__,
        torch.nn.MultiheadAttention.forward.__code__,
        attention_modules.padded_zeros.__code__,
    )
)


def encoder_layer(tracer: Tracer, layer: torch.nn.Module, output: Any, kwargs: Kwargs) -> Any:
    """`output` of a module that the frame called; as eager has it, if that is a layer of an nn.TransformerEncoder. Compiled, that makes no
    nested tensor (which would not be traced), so it leaves at padded places what the layers compute there."""
    frame = tracer.frame
    if frame is None or frame.info.code is not _ENCODER or kwargs.get("src_key_padding_mask") is None:
        return output
    encoder, src = frame.local(0), frame.local(1)
    masks = kwargs.get("src_mask"), kwargs["src_key_padding_mask"]
    function: Any = attention_modules.padded_zeros
    return tracer.inline(function, (encoder, layer, src, output, *masks))


def _written_out(function: Any) -> Any:
    """The row of an operator that is interpreted as `function`. Nested tensors, which it also takes, do not come inside."""

    def call(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        return tracer.inline(function, args, kwargs)

    return call


NAMED_ROWS: dict[tuple[str, str], Any] = {
    ("torch.backends.mha", "get_fastpath_enabled"): fast_path,
}
ROWS: list[tuple[Any, Any]] = [
    (F.scaled_dot_product_attention, attention),
    (torch._transformer_encoder_layer_fwd, _written_out(attention_modules.transformer_encoder_layer)),
    (torch._native_multi_head_attention, _written_out(attention_modules.native_multi_head_attention)),
]
