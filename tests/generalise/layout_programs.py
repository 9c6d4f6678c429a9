"""Random small programs, and streams of calls of them whose tensors change sizes, strides, offsets and ranks from call to call.

Takes a seed; gives a function of two tensors and a stream of cases. A case makes its two tensors anew each time it is asked, equal to the bit.
Always holds: the same seed gives the same program and stream; a program may raise for some cases, as eager then does too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from fusewright.base.records import dataclass
from tests.generalise.size_programs import compiled_from

CALLS = 7
SIZES = (0, 1, 1, 1, 2, 3, 4, 5, 8, 17)

# Statements that make a value of earlier values a and b, of any rank.
POINTWISE = (
    "{a} * 2",
    "{a} + 1",
    "{a} + {b}",
    "{a} * {b}",
    "torch.where({a} > 0, {a}, {b})",
    "{a} - {a}.sum(-1, keepdim=True)",
    "{a} + torch.arange({a}.shape[-1])",
    "{a}.clone()",
    "torch.zeros_like({a}) + {b}",
    "{a}.contiguous().to(torch.float64)",
    "torch.empty_like({a}).copy_({b})",
)
REDUCTIONS = (
    "{a}.sum(0)",
    "{a}.sum(-1)",
    "{a}.sum()",
    "{a}.sum(-1, keepdim=True)",
    "{a}.amax(0)",
    "{a}.amin(-1)",
    "{a}.max(-1)[0]",
    "{a}.min(0)[1]",
    "{a}.max()",
    "{a}.argmax()",
    "{a}.argmin(0)",
    "{a}.argmax(-1, keepdim=True)",
    "{a}.contiguous().median(-1)[0]",
    "{a}.double().mean(0)",
    "{a}.double().logsumexp(-1)",
    "{a}.prod(0)",
    "{a}.cumsum(0)",
    "{a}.double().softmax(-1)",
    "{a}.sort(-1)[0]",
    "({a} > 0).any(-1)",
    "torch.aminmax({a}, dim=-1)[1]",
    "{a}.flip(0)",
    "{a}.roll(1, -1)",
)
VIEWS = (
    "{a}.transpose(0, -1)",
    "{a}[:1]",
    "{a}[..., :1]",
    "{a}[1:]",
    "{a}[..., 1:]",
    "{a}[..., ::2]",
    "{a}[-1:]",
    "{a}[0]",
    "{a}[..., -1]",
    "{a}.unsqueeze(0)",
    "{a}.unsqueeze(-1)",
    "{a}.squeeze()",
    "{a}.squeeze(0)",
    "{a}.reshape(-1)",
    "{a}.view(-1)",
    "{a}.flatten()",
    "{a}.flatten(0, -1)",
    "{a}.reshape({a}.shape[-1], -1)",
    "{a}.contiguous()",
    "{a}.expand(2, *{a}.shape)",
    "{a}.expand_as({b})",
    "{a}.movedim(0, -1)",
    "{a}.unfold(0, 1, 1)",
    "{a}.narrow(0, 0, 1)",
    "{a}.chunk(2, -1)[-1]",
    "{a}.T",
    "{a}.detach()",
)
PRODUCTS = (
    "{a} @ {b}.transpose(-1, -2)",
    "{a} @ {b}",
    "torch.cat(({a}, {b}), 0)",
    "torch.cat(({a}, {b}), -1)",
    "torch.stack(({a}, {b}))",
    "torch.outer({a}.reshape(-1), {b}.reshape(-1)[:3])",
    "functional.pad({a}, (1, 1))",
    "{a}.index_select(0, torch.arange({a}.shape[0]) // 2)",
    "{a}.repeat_interleave(2, 0)",
)
ASKED = (
    "{a} + 1 if {a}.is_contiguous() else {a} - 1",
    "{a} * 2 if {a}.shape[0] == 1 else {a} * 3",
    "{a} + ({a}.stride(0) if {a}.shape[0] > 1 else 0)",
    "{a} * ({a}.numel() + 2)",
    "{a} if {a}.shape[-1] < 2 or {a}.stride(-1) == 1 else {a}.clone()",
)
# Statements that write.
WRITES = (
    "{a}.add_(1)",
    "{a}.mul_({b})",
    "{a}[:1].add_(5)",
    "{a}[..., :1].mul_(3)",
    "{a}[..., 1:].zero_()",
    "{a}.transpose(0, -1).add_(2)",
    "{a}.reshape(-1).add_(1)",
    "{a}.copy_({b})",
    "{a}[0] = 7",
    "{a}[..., -1] = {b}[..., -1]",
    "{a}.clamp_(-1, 1)",
    "{a}.contiguous().mul_(2)",
    "{a}.squeeze().sub_(1)",
    "{a}.t_()",
    "{a}.unsqueeze_(0)",
)
KINDS = ((POINTWISE, 0.3), (REDUCTIONS, 0.5), (VIEWS, 0.75), (PRODUCTS, 0.83), (ASKED, 0.9), (WRITES, 1.0))

LAYOUTS = (
    "contiguous",
    "contiguous",
    "cache",
    "cache",
    "rows",
    "offset",
    "transposed",
    "expanded",
    "steps",
    "last",
    "windows",
)
"""How a tensor lies in its memory: as it is by default; the first columns, or rows, of something larger; behind other elements; with dimensions
exchanged; one element for a whole dimension; every second element; channels last; with elements in common."""


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor to be made: its shape and layout, what surrounds it, its type and its elements' seed."""

    shape: tuple[int, ...]
    layout: str
    extra: int
    dtype: torch.dtype
    seed: int

    def make(self) -> torch.Tensor:
        shape, extra, rank = self.shape, self.extra, len(self.shape)
        if not rank:
            return self._filled((extra + 1,))[extra]
        match self.layout:
            case "cache":
                return self._filled((*shape[:-1], shape[-1] + extra))[..., : shape[-1]]
            case "rows":
                return self._filled((shape[0] + extra, *shape[1:]))[: shape[0]]
            case "offset":
                return self._filled((*shape[:-1], shape[-1] + extra))[..., extra:]
            case "transposed":
                return self._filled((*shape[1:], shape[0])).movedim(-1, 0)
            case "expanded":
                at = extra % rank
                return self._filled((*shape[:at], 1, *shape[at + 1 :])).expand(shape)
            case "steps":
                return self._filled((*shape[:-1], shape[-1] * 2))[..., ::2]
            case "last" if rank == 4:
                return self._filled(shape).contiguous(memory_format=torch.channels_last)
            case "windows" if rank > 1:
                return (
                    self._filled((shape[0] + shape[1],))
                    .as_strided(shape[:2], (1, 1))
                    .reshape(shape[:2] + (1,) * (rank - 2))
                    .expand(shape)
                )
            case _:
                return self._filled(shape)

    def _filled(self, shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        return made.to(self.dtype) if self.dtype.is_floating_point else (made * 4).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """One call: two tensors; `shared`: the second is a view of the first, made by this text."""

    x: Place
    y: Place
    shared: str = ""

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x.make()
        return x, eval(self.shared, {"x": x}) if self.shared else self.y.make()


def program(seed: int) -> tuple[Callable[..., Any], list[Case], str]:
    """(the function of two tensors, the cases of its calls, its source)."""
    rng = random.Random(seed)
    lines, values = ["def program(x, y):"], ["x", "y"]
    for step in range(rng.randint(1, 4)):
        chance = rng.random()
        kind = next(kind for kind, below in KINDS if chance < below)
        text = rng.choice(kind).format(a=rng.choice(values[-2:] + values[:1]), b=rng.choice(values[:2] + values[-1:]))
        if kind is WRITES:
            lines.append(f"    {text}")
        else:
            lines.append(f"    v{step} = {text}")
            values.append(f"v{step}")
    results = [value for value in values if value not in "xy" or rng.random() < 0.2] or ["x + y"]
    if rng.random() < 0.2:
        results.append(rng.choice(["x.shape[0]", "x.shape", "x.stride()", "y.shape[-1] * 2"]))
    lines.append(f"    return {', '.join(results)}")
    function, source = compiled_from(lines, f"<layout program {seed}>", {"torch": torch, "functional": functional})
    return function, stream(rng), source


def stream(rng: random.Random) -> list[Case]:
    """Seven cases. The shapes of one call are near those of the one before, often in another layout."""
    rank = rng.choice((1, 2, 2, 2, 3, 4))
    shape = tuple(rng.choice(SIZES[3:]) for _ in range(rank))
    layout, other = rng.choice(LAYOUTS), rng.choice(LAYOUTS)
    relation = rng.random()
    dtype = rng.choice((torch.float32, torch.float32, torch.float32, torch.int64))
    found: list[Case] = []
    while len(found) < CALLS:
        seed = rng.randrange(1 << 30)
        x = Place(shape, layout, rng.choice((1, 2, 3, 10)), dtype, seed)
        beside = shape if relation < 0.5 else _broadcastable(rng, shape)
        y = Place(beside, other, rng.choice((1, 2, 3, 10)), dtype, seed + 1)
        shared = rng.choice(["x[..., :1]", "x[:1]", "x", "x.detach()"]) if rank and rng.random() < 0.07 else ""
        found.append(Case(x, y, shared))
        if rng.random() < 0.08:
            shape = (*shape, 1) if rng.random() < 0.5 else shape[1:] or shape
        for dim in range(len(shape)):
            if rng.random() < 0.55:
                shape = (*shape[:dim], rng.choice(SIZES), *shape[dim + 1 :])
        if rng.random() < 0.35:
            layout = rng.choice(LAYOUTS)
        if rng.random() < 0.35:
            other = rng.choice(LAYOUTS)
    return found


def _broadcastable(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    made = tuple(1 if rng.random() < 0.4 else size for size in shape)
    return made[1:] if rng.random() < 0.4 else made
