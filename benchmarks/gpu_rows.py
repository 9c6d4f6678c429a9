"""The programs that `benchmarks.gpu_kernels` times: a name, a function, and what makes its arguments on the GPU.

Layouts, dtypes, reductions, index operations, products with what stands around them, and backward passes. A row of
training is timed with the gradients of all floating-point arguments.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Half, Full = torch.bfloat16, torch.float32
Make = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Row:
    """function: of what make() gives. setup: gives the function, where that must be made on the GPU."""

    function: Callable[..., Any]
    make: Make
    train: bool = False
    setup: bool = False
    tolerance: float = 2e-2


def r(*shape: int, dtype: torch.dtype = Half, last: bool = False) -> torch.Tensor:
    made = torch.randn(*shape, device="cuda", dtype=dtype)
    return made.to(memory_format=torch.channels_last) if last else made


def i(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape, device="cuda")


ROWS: dict[str, Row] = {}


def add(name: str, function: Callable[..., Any], make: Make, **options: Any) -> None:
    ROWS[name] = Row(function, make, **options)


# --- pointwise, layouts, dtypes ---------------------------------------------------------------------------------------

big = functools.partial(r, 8192, 4096)
add("add relu", lambda x, y: torch.relu(x + y), lambda: (big(), big()))
add("add relu f32", lambda x, y: torch.relu(x + y), lambda: (big(dtype=Full), big(dtype=Full)))
add("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), lambda: (big(),))
add("silu mul", lambda x, y: F.silu(x) * y, lambda: (big(), big()))
add("swiglu halves", lambda x: (lambda a, b: F.silu(a) * b)(*x.chunk(2, -1)), lambda: (r(8192, 8192),))
add("transpose add", lambda x, y: (x.t() + y).contiguous(), lambda: (r(4096, 8192), big()))
add("transposed result", lambda x: (x * 2).t().contiguous(), lambda: (big(),))
add("permute 0213", lambda x: (x + 1).permute(0, 2, 1, 3).contiguous(), lambda: (r(16, 1024, 16, 128),))
add("permute 3210", lambda x: (x * 2).permute(3, 2, 1, 0).contiguous(), lambda: (r(32, 64, 64, 128),))
add("to channels last", lambda x: (x * 2).contiguous(memory_format=torch.channels_last), lambda: (r(32, 256, 56, 56),))
add("cat columns", lambda x, y: torch.cat([x * 2, y + 1], 1), lambda: (big(), big()))
add("cat of 8", lambda *x: torch.cat([one.relu() for one in x], -1), lambda: tuple(r(8192, 512) for _ in range(8)))
add("pad reflect", lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect") * 2, lambda: (r(16, 64, 128, 128),))
add("pad zero", lambda x: F.pad(x, (1, 1, 1, 1)) + 1, lambda: (r(16, 64, 128, 128),))
add("where clamp", lambda x, y: torch.where(x > 0, x, y).clamp(-1, 1), lambda: (big(), big()))
add("broadcast row column", lambda x, a, b: x * a + b, lambda: (big(), r(4096), r(8192, 1)))
add("roll", lambda x: torch.roll(x, (5, 7), (0, 1)) + x, lambda: (big(),))
add("strided slice", lambda x: x[:, ::2] * 2 + x[:, 1::2], lambda: (big(),))
add("pixel shuffle", lambda x: F.pixel_shuffle(x.relu(), 2), lambda: (r(16, 64, 128, 128),))
add("float to half", lambda x: (x * 2).to(Half), lambda: (big(dtype=Full),))
add("uint8 image to half", lambda x: (x.to(Half) / 255 - 0.5) * 2,
    lambda: (torch.randint(0, 255, (64, 3, 512, 512), device="cuda", dtype=torch.uint8),))  # fmt: skip
add("int64 arithmetic", lambda x, y: (x * 3 + y) % 17, lambda: (i(1000, 4096, 2048), i(1000, 4096, 2048)))
add("bool masks", lambda x, y: (x > 0) & (y < 1) | (x == y), lambda: (big(), big()))
add("dropout", lambda x: F.dropout(x, 0.1, True) + 1, lambda: (big(),), tolerance=10.0)
add("one hot", lambda x: F.one_hot(x, 512).float(), lambda: (i(512, 65536),))
add("triu", lambda x: torch.triu(x) + torch.tril(x, -1) * 2, lambda: (r(8192, 8192),))
add("complex multiply", lambda x, y: x * y + 1j, lambda: (r(4096, 2048, dtype=torch.complex64), r(4096, 2048, dtype=torch.complex64)))  # fmt: skip


def rotary_complex(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def rotary(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cosine + torch.cat([-b, a], -1) * sine


def turns(length: int, width: int) -> torch.Tensor:
    return torch.polar(torch.ones(length, width, device="cuda"), r(length, width, dtype=Full))


add("rotary complex", rotary_complex, lambda: (r(4, 16, 2048, 128), turns(2048, 64)))
add("rotary halves", rotary, lambda: (r(4, 16, 2048, 128), r(2048, 128), r(2048, 128)))

# --- reductions -------------------------------------------------------------------------------------------------------

for width in (256, 1000, 4096, 32768):
    rows = min(65536, (1 << 25) // width)
    add(f"softmax {width}", lambda x: torch.softmax(x, -1), lambda rows=rows, width=width: (r(rows, width),))
    add(f"layer norm {width}", lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        lambda rows=rows, width=width: (r(rows, width), r(width), r(width)))  # fmt: skip
add("softmax dim 1", lambda x: torch.softmax(x, 1), lambda: (r(64, 512, 512),))
add("softmax dim 1 of 2048", lambda x: torch.softmax(x, 1), lambda: (r(8, 2048, 512),))
add("softmax dim 0", lambda x: torch.softmax(x, 0), lambda: (r(1024, 8192),))
add("log softmax f32", lambda x: F.log_softmax(x, -1), lambda: (r(4096, 8192, dtype=Full),))
add("log softmax 32000", lambda x: F.log_softmax(x.float(), -1), lambda: (r(2048, 32000),))
add("rms norm", lambda x, w: F.rms_norm(x, w.shape, w), lambda: (r(16384, 2048), r(2048)))
add("residual rms norm", lambda x, y, w: (lambda t: (F.rms_norm(t, w.shape, w), t))(x + y),
    lambda: (r(16384, 2048), r(16384, 2048), r(2048)))  # fmt: skip
add("group norm", lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)), lambda: (r(8, 320, 64, 64), r(320), r(320)))
add("group norm channels last", lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)),
    lambda: (r(8, 320, 64, 64, last=True), r(320), r(320)))  # fmt: skip
add("batch norm training", lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, training=True)),
    lambda: (r(32, 256, 56, 56), r(256), r(256)))  # fmt: skip
add("batch norm channels last", lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, training=True)),
    lambda: (r(32, 256, 56, 56, last=True), r(256), r(256)))  # fmt: skip
add("instance norm", lambda x: F.instance_norm(x), lambda: (r(16, 64, 128, 128),))
add("sum all", lambda x: x.sum(), lambda: (big(dtype=Full),))
add("mean rows", lambda x: x.float().mean(-1), lambda: (big(),))
add("sum columns", lambda x: x.sum(0), lambda: (r(65536, 1024),))
add("sum columns f32 few", lambda x: x.sum(0), lambda: (r(262144, 64, dtype=Full),))
add("sum middle", lambda x: x.sum(1), lambda: (r(64, 512, 512),))
add("sum 0 and 2", lambda x: x.float().sum((0, 2, 3)), lambda: (r(32, 256, 56, 56),))
add("std all", lambda x: x.std(), lambda: (r(4096, 4096),))
add("var rows", lambda x: x.float().var(-1), lambda: (big(),))
add("norm rows", lambda x: F.normalize(x.float(), dim=-1), lambda: (big(),))
add("amax columns", lambda x: x.amax(0), lambda: (r(16384, 2048),))
add("argmax rows", lambda x: x.argmax(-1), lambda: (r(8192, 8192),))
add("argmax dim 0", lambda x: x.argmax(0), lambda: (r(8192, 2048, dtype=Full),))
add("max and where", lambda x: x.max(1), lambda: (r(4096, 8192, dtype=Full),))
add("any rows", lambda x: (x > 3).any(-1), lambda: (big(),))
add("logsumexp", lambda x: torch.logsumexp(x.float(), -1), lambda: (r(4096, 16384),))
add("cumsum", lambda x: x.cumsum(-1), lambda: (r(4096, 4096, dtype=Full),))
add("cumsum dim 0", lambda x: x.cumsum(0), lambda: (r(4096, 4096, dtype=Full),))
add("cumsum long", lambda x: x.cumsum(-1), lambda: (r(4, 1 << 20, dtype=Full),))
add("cumprod half", lambda x: x.float().sigmoid().cumprod(-1), lambda: (r(8192, 1024),))
add("mse loss", lambda x, y: F.mse_loss(x.float(), y.float()), lambda: (big(), big()))
add("cross entropy", lambda x, y: F.cross_entropy(x.float(), y), lambda: (r(4096, 32000), i(32000, 4096)))
add("bce logits", lambda x, y: F.binary_cross_entropy_with_logits(x, y), lambda: (big(dtype=Full), r(8192, 4096, dtype=Full).sigmoid()))  # fmt: skip
add("kl div", lambda x, y: F.kl_div(x, y, reduction="batchmean", log_target=True),
    lambda: (r(4096, 32000).log_softmax(-1), r(4096, 32000).log_softmax(-1)))  # fmt: skip
add("kl div with softmaxes", lambda x, y: F.kl_div(F.log_softmax(x.float(), -1), F.softmax(y.float(), -1), reduction="batchmean"),
    lambda: (r(4096, 32000), r(4096, 32000)))  # fmt: skip
add("max pool", lambda x: F.max_pool2d(x.relu(), 3, 2, 1), lambda: (r(32, 64, 112, 112),))
add("average pool", lambda x: F.avg_pool2d(x.relu(), 3, 2, 1), lambda: (r(32, 64, 112, 112),))
add("adaptive pool", lambda x: F.adaptive_avg_pool2d(x.relu(), 1), lambda: (r(64, 2048, 14, 14),))
add("bilinear 2x", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), lambda: (r(8, 64, 128, 128),))
add("bilinear 2x f32", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), lambda: (r(8, 64, 128, 128, dtype=Full),))  # fmt: skip
add("nearest 2x", lambda x: F.interpolate(x, scale_factor=2) * 2, lambda: (r(8, 64, 128, 128),))
add("bicubic", lambda x: F.interpolate(x, size=(200, 200), mode="bicubic"), lambda: (r(8, 32, 128, 128, dtype=Full),))
add("grid sample", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
    lambda: (r(8, 32, 128, 128, dtype=Full), r(8, 128, 128, 2, dtype=Full)))  # fmt: skip

# --- 8-bit floats -----------------------------------------------------------------------------------------------------

Eight = torch.float8_e4m3fn
LARGEST = 448.0


def quantised(x: torch.Tensor, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    most = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = most.clamp(min=1e-12) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(Eight), scale


def blocks_quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made, scale = quantised(x.view(x.shape[0], -1, 128), -1)
    return made.view(x.shape), scale.squeeze(-1)


add("fp8 tensor scale", lambda x: quantised(x, None), lambda: (r(8192, 8192),), tolerance=0.1)
add("fp8 row scales", lambda x: quantised(x, -1), lambda: (r(8192, 8192),), tolerance=0.1)
add("fp8 blocks of 128", blocks_quantised, lambda: (r(8192, 4096),), tolerance=0.1)
add("fp8 cast and back", lambda x: x.to(Eight).to(Half) * 2, lambda: (big(),), tolerance=0.1)
add("fp8 dequantise", lambda x, s: x.to(Half) * s, lambda: (big().to(Eight), r(8192, 1)), tolerance=0.1)
add("silu to fp8 rows", lambda x, y: quantised(F.silu(x) * y, -1), lambda: (big(), big()), tolerance=0.1)

# --- index operations -------------------------------------------------------------------------------------------------

add("embedding", lambda x, w: F.embedding(x, w) * 8.0, lambda: (i(50000, 32768), r(50000, 1024)))
add("embedding sum", lambda x, y, w, v: F.layer_norm(F.embedding(x, w) + F.embedding(y, v), (768,)),
    lambda: (i(30000, 16384), i(512, 16384), r(30000, 768), r(512, 768)))  # fmt: skip
add("gather rows", lambda x, y: x.gather(1, y) * 2, lambda: (r(8192, 4096, dtype=Full), i(4096, 8192, 1024)))
add("index select", lambda x, y: x.index_select(0, y).relu(), lambda: (r(50000, 512), i(50000, 65536)))
add("index add", lambda x, y, z: x.index_add(0, y, z), lambda: (r(5000, 64, dtype=Full), i(5000, 200000), r(200000, 64, dtype=Full)))  # fmt: skip
add("scatter add", lambda x, y, z: x.scatter_add(1, y, z), lambda: (r(4096, 1024, dtype=Full), i(1024, 4096, 2048), r(4096, 2048, dtype=Full)))  # fmt: skip
add("bincount", lambda x: torch.bincount(x, minlength=1000), lambda: (i(1000, 1 << 22),))
add("masked fill softmax", lambda x, m: x.masked_fill(m, -math.inf).softmax(-1), lambda: (r(16, 16, 512, 512), r(16, 1, 512, 512) > 1))  # fmt: skip
add("sort rows", lambda x: x.sort(-1), lambda: (r(4096, 512, dtype=Full),))
add("topk 8 of 128", lambda x: x.topk(8, -1), lambda: (r(16384, 128, dtype=Full),))
add("topk 50 of 32000", lambda x: x.topk(50, -1), lambda: (r(256, 32000, dtype=Full),))
add("router", lambda x: (lambda v, k: (v / v.sum(-1, keepdim=True), k))(*x.float().softmax(-1).topk(2, -1)), lambda: (r(32768, 64),))  # fmt: skip
add("diff of neighbours", lambda x: (x[:, 1:] - x[:, :-1]).abs().mean(), lambda: (big(),))
add("unfold windows", lambda x: x.unfold(-1, 16, 8).float().mean(-1), lambda: (big(),))

# --- products and attention -------------------------------------------------------------------------------------------

add("linear gelu", lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda: (r(8192, 1024), r(4096, 1024) / 32, r(4096)))
add("linear residual norm", lambda x, w, y, g: F.rms_norm(y + F.linear(x, w), g.shape, g),
    lambda: (r(8192, 1024), r(1024, 1024) / 32, r(8192, 1024), r(1024)))  # fmt: skip
add("swiglu mlp", lambda x, a, b, c: F.linear(F.silu(F.linear(x, a)) * F.linear(x, b), c),
    lambda: (r(4096, 2048), r(5632, 2048) / 45, r(5632, 2048) / 45, r(2048, 5632) / 75))  # fmt: skip
add("one row product", lambda x, w: F.silu(F.linear(x, w)), lambda: (r(1, 4096), r(11008, 4096) / 64))
add("batched product", lambda x, y: (x @ y).relu(), lambda: (r(64, 512, 64), r(64, 64, 512)))
add("conv norm relu", lambda x, w, g, b: F.relu(F.batch_norm(F.conv2d(x, w, padding=1), g, g.abs(), g, b)),
    lambda: (r(32, 64, 56, 56, last=True), r(64, 64, 3, 3, last=True) / 24, r(64), r(64)), tolerance=5e-2)  # fmt: skip
add("attention causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    lambda: tuple(r(4, 16, 2048, 64) for _ in range(3)))  # fmt: skip
add("attention by hand", lambda q, k, v: ((q @ k.transpose(-1, -2)) * 0.125).softmax(-1) @ v,
    lambda: tuple(r(4, 16, 1024, 64) for _ in range(3)))  # fmt: skip

KEYS = 4096
MODS: dict[str, tuple[Any, Any]] = {
    "window": (lambda s, b, h, q, k: s + (k - q) * 0.01, lambda b, h, q, k: (q >= k) & (q - k < 1024)),
    "causal": (None, lambda b, h, q, k: q >= k),
    "alibi": (lambda s, b, h, q, k: s + (k - q) * torch.exp2(-(h + 1) * 0.5), lambda b, h, q, k: q >= k),
    "soft cap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), lambda b, h, q, k: q >= k),
}


def flex(name: str, rows: int = KEYS) -> Callable[..., Any]:
    mod, mask = MODS[name]
    made = create_block_mask(mask, None, None, rows, KEYS, device="cuda") if rows == KEYS else None
    return lambda q, k, v: flex_attention(q, k, v, score_mod=mod, block_mask=made, enable_gqa=True)


def heads(query: int, key: int, rows: int = KEYS, width: int = 64, batch: int = 1) -> Make:
    return lambda: (r(batch, query, rows, width), r(batch, key, KEYS, width), r(batch, key, KEYS, width))


for name in MODS:
    add(f"flex {name}", lambda name=name: flex(name), heads(16, 16), setup=True)
    add(f"flex {name} training", lambda name=name: flex(name), heads(16, 16), setup=True, train=True)
add("flex causal GQA d128 training", lambda: flex("causal"), heads(16, 4, width=128), setup=True, train=True)
add("flex decode 1x16/4", lambda: flex("window", 1), heads(16, 4, 1, 128), setup=True)
add("flex decode 8x16/4", lambda: flex("window", 1), heads(16, 4, 1, 128, 8), setup=True)

# --- backward ---------------------------------------------------------------------------------------------------------

for name in (
    "add relu", "silu mul", "gelu tanh", "softmax 1000", "softmax 32768", "layer norm 1000", "layer norm 4096",
    "rms norm", "group norm", "group norm channels last", "batch norm training", "batch norm channels last",
    "cross entropy", "embedding", "max pool", "average pool", "bilinear 2x", "rotary halves", "rotary complex",
    "softmax dim 1", "log softmax 32000", "swiglu halves", "dropout", "index select", "gather rows", "cumsum",
    "broadcast row column", "cat columns", "linear gelu", "attention causal", "attention by hand", "mse loss",
):  # fmt: skip
    ROWS[f"{name}, training"] = Row(ROWS[name].function, ROWS[name].make, True, False, max(ROWS[name].tolerance, 3e-2))
small = functools.partial(r, 512, 768)
add("small layer norm, training", lambda x, w, b: F.layer_norm(x, w.shape, w, b), lambda: (small(), r(768), r(768)), train=True)  # fmt: skip
add("small dropout layer norm, training", lambda x, w, b: F.layer_norm(F.dropout(x, 0.1), w.shape, w, b),
    lambda: (small(), r(768), r(768)), train=True, tolerance=10.0)  # fmt: skip


def adam(count: int) -> Callable[..., Any]:
    parameters = [nn.Parameter(r(256, 256, dtype=Full)) for _ in range(count)]
    for one in parameters:
        one.grad = torch.randn_like(one)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    optimizer.step()
    return lambda: optimizer.step()


add("AdamW 60", lambda: adam(60), lambda: (), setup=True)
add("AdamW 500", lambda: adam(500), lambda: (), setup=True)


class UNet(nn.Module):
    """Two levels of residual blocks with GroupNorm, attention at the bottom."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.first, self.last = _residual(width), _residual(width)
        self.middle = nn.ModuleList([_residual(2 * width) for _ in range(2)])
        self.norm, self.qkv, self.out = nn.GroupNorm(32, 2 * width), nn.Linear(2 * width, 6 * width), nn.Linear(2 * width, 2 * width)  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        kept = x = x + self.first(x)
        x = self.down(x)
        x = x + self.middle[0](x)
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x).flatten(2).transpose(1, 2)).view(b, h * w, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        x = x + self.out(mixed).transpose(1, 2).view(b, c, h, w)
        x = x + self.middle[1](x)
        x = self.up(F.interpolate(x, scale_factor=2.0)) + kept
        return self.leave(x + self.last(x))


def _residual(width: int) -> nn.Module:
    one = [nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*one, nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))


add("UNet", lambda: UNet().to("cuda", Half), lambda: (r(4, 4, 64, 64),), setup=True, tolerance=5e-2)
add("UNet, training", lambda: UNet().to("cuda", Half), lambda: (r(4, 4, 64, 64),), setup=True, train=True, tolerance=5e-2)  # fmt: skip


# --- models: libraries are imported where a model is made -------------------------------------------------------------


class First(nn.Module):
    """The first tensor of a model's output; of an encoder with a decoder, both read the same tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.also = {"decoder_input_ids"} & set(inspect.signature(model.forward).parameters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(x, **dict.fromkeys(self.also, x))[0]
        return found


TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    # a name in transformers: what its config is given; all have six layers, widths are those of a published model
    "BERT": ("Bert", {}),
    "GPT-2": ("GPT2", {"n_layer": 6, "use_cache": False}),
    "Llama": ("Llama", {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8}),
    "Mistral": ("Mistral", {"hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 16, "sliding_window": 256}),
    "Qwen3": ("Qwen3", {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}),
    "Gemma2": ("Gemma2", {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "Phi3": ("Phi3", {"hidden_size": 2048, "intermediate_size": 8192, "pad_token_id": 0}),
    "ModernBERT": ("ModernBert", {"reference_compile": False}),
    "ELECTRA": ("Electra", {"embedding_size": 256, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}),
    "ALBERT": ("Albert", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    "DeBERTa": ("DebertaV2", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    "T5": ("T5", {"num_layers": 6, "use_cache": False}),
}  # fmt: skip


def _prepared(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return First(model.to("cuda", Half))


def _transformer(name: str) -> nn.Module:
    import transformers

    family, given = TEXT[name]
    config = getattr(transformers, f"{family}Config")(**{"num_hidden_layers": 6, **given})
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return _prepared(getattr(transformers, f"{family}Model")(config))


def _whisper() -> nn.Module:
    """Whisper's encoder (small)."""
    import transformers

    config = transformers.WhisperConfig(
        d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072, decoder_layers=1
    )
    return _prepared(transformers.WhisperModel(config).encoder)


VISION = {
    # a name in torchvision, or in timm where it says so
    "resnet50": "torchvision", "vit_b_16": "torchvision", "convnext_tiny": "torchvision", "densenet121": "torchvision",
    "efficientnet_b0": "timm", "mobilenetv3_large_100": "timm", "regnety_032": "timm", "swin_tiny_patch4_window7_224": "timm",
    "mixer_b16_224": "timm", "resnext50_32x4d": "timm",
}  # fmt: skip


def _vision(name: str) -> nn.Module:
    if VISION[name] == "timm":
        import timm

        model = timm.create_model(name, drop_rate=0.0)
    else:
        import torchvision

        model = getattr(torchvision.models, name)()
    return model.to("cuda", Half).to(memory_format=torch.channels_last)


class DiT(nn.Module):
    """Blocks of a diffusion transformer, with adaptive norms."""

    def __init__(self, width: int = 768, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Linear(width, 6 * width), nn.Linear(width, 3 * width), nn.Linear(width, width),
                           nn.Linear(width, 4 * width), nn.Linear(4 * width, width)])
            for _ in range(depth)
        )  # fmt: skip

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        for change, qkv, out, up, down in self.blocks:  # type: ignore[misc]
            a1, s1, g1, a2, s2, g2 = change(F.silu(time)).unsqueeze(1).chunk(6, -1)
            y = F.layer_norm(x, (c,)) * (1 + s1) + a1
            q, k, v = qkv(y).view(b, n, 3, c // 64, 64).permute(2, 0, 3, 1, 4)
            x = x + g1 * out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))
            y = F.layer_norm(x, (c,)) * (1 + s2) + a2
            x = x + g2 * down(F.gelu(up(y), approximate="tanh"))
        return x


def _model(name: str, function: Callable[[], nn.Module], make: Make, tolerance: float = 1e-1) -> None:
    """Two rows: inference, and a training step."""
    add(f"model {name}", lambda: function().eval(), make, setup=True, tolerance=tolerance)
    add(f"model {name}, training", lambda: function().train(), make, setup=True, train=True, tolerance=2 * tolerance)


for name in TEXT:
    _model(name, lambda name=name: _transformer(name), lambda: (i(20000, 8, 512),))
_model("Whisper encoder", _whisper, lambda: (r(8, 80, 3000),))
for name in VISION:
    _model(name, lambda name=name: _vision(name), lambda: (r(32, 3, 224, 224, last=True),))
_model("DiT", lambda: DiT().to("cuda", Half), lambda: (r(8, 256, 768), r(8, 768)), tolerance=5e-2)
