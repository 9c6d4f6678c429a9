"""Attention of PyTorch's own modules, whose C++ shortcuts would hide what can be fused.

Takes the questions that `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` ask before they call an operator of
their own in inference (`operators/decompositions` has what that stands for). Always holds: a shortcut is taken where
eager takes it, as it does not compute what the module's Python does: every element of a mask that is not zero, also of
one that is meant to be added, says "left out".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.native import unwatched
from fusewright.capture.call import transforms as call_transforms
from fusewright.operators.decompositions import attention_modules, flex_attention

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def fast_path(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """torch.backends.mha.get_fastpath_enabled. (nn.TransformerEncoder asks too, for nested tensors: `encoder_layer`
    does without.)"""
    frame = tracer.frame
    if frame is not None and frame.info.code is _ENCODER:
        return False
    asked: Any = torch.backends.mha.get_fastpath_enabled
    return tracer.inline(asked, args, kwargs)


_ENCODER = torch.nn.TransformerEncoder.forward.__code__


def encoder_layer(tracer: Tracer, layer: torch.nn.Module, output: Any, kwargs: Kwargs) -> Any:
    """`output` of a module that the frame called; as eager has it, if that is a layer of an nn.TransformerEncoder.
    Compiled, that makes no nested tensor (which would not be traced), so it leaves at padded places what the layers
    compute there."""
    frame = tracer.frame
    if frame is None or frame.info.code is not _ENCODER or kwargs.get("src_key_padding_mask") is None:
        return output
    encoder, src = frame.local(0), frame.local(1)
    masks = kwargs.get("src_mask"), kwargs["src_key_padding_mask"]
    function: Any = attention_modules.padded_zeros
    return tracer.inline(function, (encoder, layer, src, output, *masks))


def _at_each_point(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """A mod of flex attention over all indices: `torch.vmap`'s own layers, and what the mod indexes is read by them."""
    mod, *values = args
    if tracer.recorder.level != "aten":
        raise GraphBreak("functorch-transform", "a mod of flex_attention")
    function = flex_attention.at_each_point
    return unwatched(tracer.recorder.call, function, (call_transforms.for_transform(tracer, mod), *values), kwargs)


def _written_out(function: Any) -> Any:
    return lambda tracer, args, kwargs: tracer.inline(function, args, kwargs)


NAMED_ROWS: dict[tuple[str, str], Any] = {
    (flex_attention.__name__, "at_each_point"): _at_each_point,
    ("torch.nn.attention.flex_attention", "create_mask"): _written_out(flex_attention.create_mask),
    ("torch.backends.mha", "get_fastpath_enabled"): fast_path,
}
HIGHER_ORDER: dict[str, Any] = {"flex_attention": _written_out(flex_attention.flex_attention)}
"""By the name of the operator."""
