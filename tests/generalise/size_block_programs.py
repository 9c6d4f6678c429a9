"""Random programs over batches of sequences of changing sizes, as Python source: the vocabulary that models have.

Takes a seed; gives a function of two tensors of three dimensions (in double precision for seeds of 0 and 1 modulo 4) and an integer, and
a stream of (shape, integer) to call it with. Always holds: the same seed gives the same program and stream; a program may raise for some sizes, as eager then does too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tests.generalise.size_programs import LARGE, POWERS, PRIMES, compiled_from, statements

MOST = 1 << 14  # elements of an input
Shape = tuple[int, int, int]

_GENERATOR = torch.Generator().manual_seed(7)
KERNEL1 = torch.randn(3, 1, 3, generator=_GENERATOR)
KERNEL2 = torch.randn(2, 1, 3, 3, generator=_GENERATOR)
MATRIX = torch.randn(5, 4, generator=_GENERATOR)
TABLE = torch.randn(1, 7, 3, generator=_GENERATOR)


def halves(a: torch.Tensor) -> torch.Tensor:
    if a.shape[1] % 2 == 0:
        return a * 2
    return a - 1


def positions(a: torch.Tensor) -> torch.Tensor:
    if a.shape[1] == TABLE.shape[1]:
        return TABLE.sum(-1, keepdim=True)
    if a.shape[1] > 2 * TABLE.shape[1]:
        return TABLE[:, :1].sum(-1, keepdim=True).expand(1, a.shape[1], 1).contiguous()
    return functional.interpolate(TABLE.mT, size=a.shape[1], mode="linear").mT.sum(-1, keepdim=True).contiguous()


def written(a: torch.Tensor) -> torch.Tensor:
    b = a.clone()
    b[:, ::2] = 0.5
    b[:, : a.shape[1] // 2] += 1
    return b


def scanned(a: torch.Tensor) -> torch.Tensor:
    total = a[:, :0].sum(1)
    for place in range(min(a.shape[1], 3)):
        total = total * 0.5 + a[:, place]
    return total[:, None]


def longer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a if a.shape[1] >= b.shape[1] else b


# Statements over values a, b of three dimensions that make another: of the same shape, ...
SAME_SHAPE = (
    "{a}.sum((0, 2), keepdim=True) * 0.1 + {a}",
    "{a} - {a}.mean((1, 2), keepdim=True)",
    "{a}.var((0, 1), keepdim=True, unbiased=False) + {a}",
    "{a}.amax((0, 2), keepdim=True) - {a} if {a}.numel() else {a}",
    "torch.logsumexp({a}, (1, 2), keepdim=True) + {a} if {a}.numel() else {a}",
    "{a} / ({a}.norm(dim=(1, 2), keepdim=True) + 1)",
    "torch.std_mean({a}, 1, unbiased=False, keepdim=True)[1] + {a}",
    "functional.layer_norm({a}, {a}.shape[2:])",
    "functional.layer_norm({a}, {a}.shape[1:])",
    "functional.group_norm({a}, 1)",
    "functional.normalize({a}, dim=1)",
    "(torch.bmm({a}, {a}.transpose(1, 2)) / 4).softmax(-1) @ {a}",
    "functional.scaled_dot_product_attention({a}, {a}, {a})",
    "functional.scaled_dot_product_attention({a}[:, None], {a}[:, None], {a}[:, None], is_causal=True)[:, 0]",
    "functional.scaled_dot_product_attention({a}, {a}, {a}, attn_mask=torch.ones({a}.shape[1], {a}.shape[1], dtype=torch.bool).tril())",
    "functional.scaled_dot_product_attention({a}, {a}, {a}, attn_mask=(torch.arange({a}.shape[1]) < max(n, 1))[None, None].expand({a}.shape[0], {a}.shape[1], -1))",
    "torch.einsum('bld,bmd->blm', {a}, {a}).softmax(-1).matmul({a})",
    "torch.einsum('bld->bdl', {a}).flip(1).transpose(1, 2) * 0.5",
    "{a}.flip((0, 2))",
    "{a}.flip(1)[:, ::2].flip(1).sum(1, keepdim=True) + {a}",
    "{a}.masked_fill(torch.arange({a}.shape[1])[None, :, None] >= n, 0.25)",
    "{a}.scatter(1, torch.zeros({a}.shape[0], min({a}.shape[1], 1), {a}.shape[2], dtype=torch.long), 0.5)",
    "{a}.scatter_add(2, torch.arange({a}.shape[2]).expand_as({a}) // 2, {a})",
    "{a}.gather(1, torch.arange({a}.shape[1]).flip(0)[None, :, None].expand_as({a}))",
    "{a}.clone().add_(1).mul_({a}.shape[1] % 5)",
    "{a}.view({a}.shape[0], -1).cumsum(1).view({a}.shape) * 0.1 if {a}.numel() and {a}.is_contiguous() else {a}",
    "{a}.reshape({a}.shape[0], -1, 1).reshape({a}.shape) if {a}.numel() else {a}",
    "functional.conv1d({a}, {a}.new_ones({a}.shape[1], 1, 3) / 3, padding=1, groups={a}.shape[1]) if {a}.numel() else {a}",
    "functional.avg_pool1d({a}, 3, 1, 1) if {a}.numel() else {a}",
    "{a}.roll((1, -1), (1, 2))",
    "torch.addcmul({a}, {a}, {a}.tanh(), value=0.5)",
    "{a}.topk(min(2, {a}.shape[1]), 1)[0].sum(1, keepdim=True) + {a}",
    "{a}.argmax(1, keepdim=True) + {a} if {a}.shape[1] else {a}",
    "torch.lerp({a}, {a}.flip(2), 0.25)",
    "{a} + torch.arange({a}.shape[1], dtype=torch.float32)[:, None] / ({a}.shape[1] + 1)",
    "torch.linspace(0, 1, {a}.shape[1])[:, None] * {a}",
    "halves({a})",
    "{a} + positions({a})",
    "written({a})",
    "{a} + scanned({a})",
    "{a} * float({a}.shape[1]) ** -0.5 if {a}.shape[1] else {a}",
    "{a}.sort(1)[0] - {a}.median(1, keepdim=True)[0] if {a}.shape[1] else {a}",
    "torch.where(torch.arange({a}.shape[2]) % 2 == 0, {a}, {a}.neg())",
)
# ... of another shape, ...
OTHER_SHAPE = (
    "{a}.reshape(-1, {a}.shape[2])[None] if {a}.shape[2] else {a}",
    "{a}.flatten(0, 1)[:, None]",
    "{a}.flatten()[None, None]",
    "{a}.permute(2, 0, 1)",
    "{a}.transpose(0, 1).contiguous()",
    "{a}.mT",
    "torch.stack(({a}, {a}.neg()), 1).flatten(1, 2)",
    "torch.cat(({a}, {a}[:, :1].expand(-1, min({a}.shape[1], 1) * 2, -1)), 1) if {a}.shape[1] == 1 else torch.cat(({a}, {a}[:, :1]), 1)",
    "{a}.split(2, 1)[0]",
    "{a}.tensor_split(2, 1)[-1]",
    "{a}.chunk(3, 2)[0]",
    "{a}.unfold(1, 2, 1).flatten(2) if {a}.shape[1] >= 2 else {a}",
    "functional.pad({a}, (1, 0, 0, n % 3), value=0.5)",
    "functional.pad({a}, (0, 0, 1, 1), mode='replicate') if {a}.numel() else {a}",
    "functional.pad({a}, (0, -1)) if {a}.shape[2] else {a}",
    "functional.interpolate({a}, scale_factor=2, mode='nearest') if {a}.numel() else {a}",
    "functional.interpolate({a}, size={a}.shape[2] + 1, mode='linear') if {a}.numel() else {a}",
    "functional.conv1d({a}[:, :1], KERNEL1, padding=1) if {a}.numel() else {a}",
    "functional.conv2d({a}[:, None], KERNEL2, padding=1).mean(1) if {a}.numel() else {a}",
    "functional.max_pool1d({a}, 2) if {a}.shape[2] >= 2 and {a}.numel() else {a}",
    "functional.linear({a}[..., :1].expand(-1, -1, 4), MATRIX) if {a}.shape[2] else {a}",
    "{a}[:, n:]",
    "{a}[:, :n]",
    "{a}[-n:]",
    "{a}[..., ::2]",
    "{a}[:, -1:]",
    "{a}[:, {a}.shape[1] // 3 : -1]",
    "{a}.index_select(1, torch.arange({a}.shape[1] // 2))",
    "{a}.take_along_dim({a}.argsort(1)[:, :2], 1)",
    "{a}.repeat(1, 2, 1)",
    "{a}.repeat_interleave(2, 1)",
    "{a}.narrow(1, 0, {a}.shape[1] // 2)",
    "{a}.select(1, 0)[:, None] if {a}.shape[1] else {a}",
    "torch.bmm({a}, {a}.mT).tril() / 4",
    "{a}.new_zeros({a}.shape[1], {a}.shape[2]).index_add(0, torch.arange({a}.shape[1]), {a}.sum(0))[None]",
    "functional.one_hot(torch.arange({a}.shape[1]), {a}.shape[1]).to({a}.dtype) @ {a} if {a}.shape[1] else {a}",
    "torch.cdist({a}, {a} + 3)",
    "{a}.unflatten(2, (-1, 2)).sum(-1) if {a}.shape[2] and {a}.shape[2] % 2 == 0 else {a}",
    "{a}.mean((1, 2))[:, None, None]",
    "{a}.sum((0, 1, 2))[None, None, None]",
    "{a}.unbind(1)[0][:, None] if {a}.shape[1] else {a}",
    "scanned({a})",
    "{a}.new_full(({a}.shape[1], 1, n), 0.5) + {a}.sum()",
    "torch.eye({a}.shape[1])[None] * {a}.sum()",
    "torch.tril_indices({a}.shape[1], {a}.shape[1])[None].float()",
    "torch.diag_embed({a}.sum(2))",
    "{a}[:, torch.arange({a}.shape[1]) // 2]",
    "{a}.as_strided(({a}.shape[0], 1, {a}.shape[2]), {a}.stride()) if {a}.numel() and {a}.is_contiguous() else {a}",
)
# ... or of two values.
PAIRS = (
    "{a} * {b}",
    "{a} + {b}.mean((0, 1))",
    "torch.cat(({a}, {b}), 0)",
    "torch.cat(({a}, {b}), 1)",
    "torch.cat(({a}, {b}), 2)",
    "torch.bmm({a}, {b}.transpose(1, 2)) / 4",
    "{a} @ {b}.mT / 4",
    "torch.einsum('bij,bkj->bik', {a}, {b}) / 4",
    "torch.einsum('bij,bij->bi', {a}, {b})[..., None]",
    "torch.baddbmm({a}.sum() * {a}.new_ones(1, 1, 1), {a}, {b}.mT, alpha=0.25)",
    "functional.scaled_dot_product_attention({a}, {b}, {b})",
    "torch.where({a} > {b}, {a}, {b})",
    "longer({a}, {b})",
    "{a}.masked_fill({b} > 0, 0.0)",
    "torch.stack(({a}, {b}), 0).sum(0)",
    "{a}.expand_as({b})",
    "torch.outer({a}.sum((1, 2)), {b}.sum((1, 2)))[None]",
    "{a}[:, : {b}.shape[1]]",
    "functional.cross_entropy({a}.flatten(0, 1), {b}.flatten(0, 1).argmax(1) if {b}.shape[2] else {b}, reduction='none')[:, None, None]",
)
NAMES = {
    "torch": torch, "functional": functional, "KERNEL1": KERNEL1, "KERNEL2": KERNEL2, "MATRIX": MATRIX,
    "halves": halves, "positions": positions, "written": written, "scanned": scanned, "longer": longer,
}  # fmt: skip


def program(seed: int) -> tuple[Callable[..., Any], list[tuple[Shape, int]], str]:
    """(the function of two tensors and an integer, the shapes and integers of its calls, its source)."""
    rng = random.Random(seed)
    lines, last = statements(rng, "x, y, n", rng.randint(2, 6), (SAME_SHAPE, OTHER_SHAPE, PAIRS), (0.5, 0.78, 0.85))
    # What nobody uses is dropped with the error that it would raise: values whose operators check their elements are returned.
    kept = [f"v{step}" for step in range(len(lines) - 1) if rng.random() < 0.3 or "cross_entropy" in lines[step + 1]]
    lines.append(f"    return {', '.join([last, *kept])}, x.shape[1] + n")
    double = {name: value.double() for name, value in NAMES.items() if isinstance(value, torch.Tensor) and seed % 4 < 2}
    function, source = compiled_from(lines, f"<block program {seed}>", {**NAMES, **double})
    return function, stream(rng), source


def _size(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.15:
        return rng.choice((0, 1))
    if kind < 0.4:
        return rng.choice(PRIMES)
    if kind < 0.65:
        return rng.choice(POWERS[:6])
    return rng.choice(LARGE[:2]) if kind < 0.68 else rng.randint(2, 24)


def stream(rng: random.Random) -> list[tuple[Shape, int]]:
    """Six calls; a dimension may stay as it is, two may be equal."""
    found: list[tuple[Shape, int]] = []
    while len(found) < 6:
        sizes = [_size(rng) for _ in range(3)]
        if found and rng.random() < 0.4:
            sizes[rng.randrange(3)] = found[0][0][rng.randrange(3)]
        batch, length, width = sizes
        if batch * length * width <= MOST and max(batch, 1) * max(length, width) ** 2 <= MOST << 6:
            found.append(((batch, length, width), rng.choice((1, 2, 3, 5, 8, 31))))
    return found
