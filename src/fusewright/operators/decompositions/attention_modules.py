"""What PyTorch's operators behind the modules of attention compute, written out; capture interprets these functions in
their place. And attention itself, with a mask that its kernels take.

Takes what `torch._native_multi_head_attention` and `torch._transformer_encoder_layer_fwd` take, for dense tensors;
gives what they give.
Always holds: they are only for modules in inference, as PyTorch calls them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fusewright.base.pytorch import functional as F, methods, torch
from fusewright.sizes.interfaces import Recorder


def with_dense_mask(recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A mask that does not vary along its last dimension (transformers expands such ones) keeps attention off every
    fused kernel of a GPU: it is written out."""
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if not isinstance(mask, torch.Tensor) or mask.device.type != "cuda" or recorder.level != "aten":
        return None
    if not mask.ndim or mask.stride(-1) == 1:
        return None
    mask = call(methods.contiguous, (mask,), {})
    if len(args) > 3:
        return call(F.scaled_dot_product_attention, (*args[:3], mask, *args[4:]), kwargs)
    return call(F.scaled_dot_product_attention, args, {**kwargs, "attn_mask": mask})


def _multi_head(qkv: Any, heads: int, out: tuple[Any, Any], mask: tuple[Any, Any], average: bool | None) -> Any:
    """(attention, the weights). qkv: queries, keys and values beside each other; out: (weight, bias). mask: (tensor,
    type); type 0 is (query, key), 1 (batch, key), 2 (batch, head, query, key); where the tensor is not zero, a key is
    left out; a query without keys gives NaN (`scaled_dot_product_attention` gives zeros). average: of the weights over
    heads; None: no weights."""
    tensor, kind = mask
    size = out[0].shape[0] // heads
    q, k, v = qkv.unflatten(-1, (3, heads, size)).permute(2, 0, 3, 1, 4).unbind()
    kept = shares = None
    if tensor is not None:
        kept = tensor == 0
        if kind == 1:
            kept = kept[:, None, None, :]
    if average is not None:
        scores = (q / math.sqrt(size)) @ k.transpose(-2, -1)
        shares = (scores if kept is None else scores.masked_fill(~kept, -math.inf)).softmax(-1)
        attended = shares @ v
        if average:
            shares = shares.mean(1)
    else:
        attended = F.scaled_dot_product_attention(q, k, v, kept)
        if kept is not None:
            attended = attended.masked_fill(~kept.any(-1, keepdim=True), math.nan)
    return F.linear(attended.transpose(1, 2).flatten(2), *out), shares


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    """What autocast makes of an argument."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(dtype)


def native_multi_head_attention(
    query: Any, key: Any, value: Any, embed_dim: int, num_head: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any,
    proj_bias: Any,
    mask: Any = None, need_weights: bool = True, average_attn_weights: bool = True, mask_type: Any = None,
) -> Any:  # fmt: skip
    """torch._native_multi_head_attention (nn.MultiheadAttention calls it with query, key and value the same)."""
    device = query.device.type
    if torch.is_autocast_enabled(device):  # which knows it as one operator
        dtype, same = torch.get_autocast_dtype(device), query is key is value
        tensors = (query, key, value, qkv_weight, qkv_bias, proj_weight, proj_bias, mask)
        query, key, value, *weights, mask = [_cast(one, dtype) for one in tensors]
        operands = (query, query, query) if same else (query, key, value)
        how = (mask, need_weights, average_attn_weights, mask_type)
        given: list[Any] = [*operands, embed_dim, num_head, *weights, *how]
        with torch.autocast(device, enabled=False):
            return native_multi_head_attention(*given)
    average = average_attn_weights if need_weights else None
    if query is key is value:
        qkv = F.linear(query, qkv_weight, qkv_bias)
    else:
        parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3))
        qkv = torch.cat([F.linear(*part) for part in parts], -1)
    return _multi_head(qkv, num_head, (proj_weight, proj_bias), (mask, mask_type), average)


def transformer_encoder_layer(
    src: Any, embed_dim: int, num_heads: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any, proj_bias: Any,
    use_gelu: bool,
    norm_first: bool, eps: float, norm_weight_1: Any, norm_bias_1: Any, norm_weight_2: Any, norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any, ffn_weight_2: Any, ffn_bias_2: Any, mask: Any = None, mask_type: Any = None,
) -> Any:  # fmt: skip
    """torch._transformer_encoder_layer_fwd of a dense tensor. It adds in place: under autocast sums have the dtype of
    what is added to."""
    x = F.layer_norm(src, (embed_dim,), norm_weight_1, norm_bias_1, eps) if norm_first else src
    weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    x, _ = native_multi_head_attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)
    x += src
    if not norm_first:
        x = F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)
    y = F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps) if norm_first else x
    y = F.linear(y, ffn_weight_1, ffn_bias_1)
    y = F.linear(F.gelu(y) if use_gelu else F.relu(y), ffn_weight_2, ffn_bias_2)
    y += x
    return y if norm_first else F.layer_norm(y, (embed_dim,), norm_weight_2, norm_bias_2, eps)


def padded_zeros(encoder: Any, layer: Any, src: Any, output: Any, mask: Any, padding: Any) -> Any:
    """What `layer` of an nn.TransformerEncoder gives, (batch, sequence, width), with zeros at padded places where eager
    has them.

    Eager packs the sequences into a nested tensor, and unpacks it behind the last layer, if nothing in the encoder's
    `forward` speaks against it: above all, padding comes last in every sequence. padding: (batch, sequence), other than
    0 at padded places, or None.
    """
    first = encoder.layers[0]
    if layer is not encoder.layers[-1] or padding is None or mask is not None or src.dim() != 3 or first.training:
        return output
    if (
        not getattr(encoder, "use_nested_tensor", False)
        or torch.is_autocast_enabled()
        or not torch.backends.mha.get_fastpath_enabled()
    ):
        return output
    if torch.is_grad_enabled() and (
        src.requires_grad or any(parameter.requires_grad for parameter in first.parameters())
    ):
        return output
    padded = padding != 0
    aligned = ~(padded[:, :-1] & ~padded[:, 1:]).any()
    return output.masked_fill((padded & aligned)[:, :, None], 0.0)
