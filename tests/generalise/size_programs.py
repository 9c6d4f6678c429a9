"""Random programs over tensors of changing sizes, as Python source.

Takes a seed; gives a function of two matrices of one shape, and a stream of shapes to call it with. Always holds: the same seed gives the
same program and shapes; a program may raise for some shapes, as eager then does too.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

PRIMES = (2, 3, 5, 7, 11, 13, 17, 31, 61, 127)
POWERS = (2, 4, 8, 16, 32, 64, 128)
LARGE = (4099, 10007, 65536)
MOST = 1 << 17  # elements of an input

# Statements over matrices a, b (of any shapes) that make a matrix: each a template, with {a} and {b} for earlier values.
SAME_SHAPE = (  # need nothing of each other's shape
    "torch.relu({a}) - 0.5",
    "torch.tanh({a}) * {a}.shape[0]",
    "{a} / ({a}.shape[1] + 1)",
    "{a}.softmax(-1)",
    "{a}.softmax(0)",
    "{a} - {a}.mean(1, keepdim=True)",
    "{a} - {a}.sum(0)",
    "{a}.cumsum(1)",
    "{a}.flip(0)",
    "{a}.roll(1, 1)",
    "{a}.t().contiguous().t() + 1",
    "{a} + torch.arange({a}.shape[1])",
    "{a} * torch.ones({a}.shape[0], 1)",
    "torch.where({a} > 0, {a}, {a} * 0.1)",
    "{a}.clamp(-1, 1)",
    "{a}.reshape(-1).reshape({a}.shape) * 2",
    "{a}.view(-1).view({a}.shape[0], {a}.shape[1]) + 1",
    "{a}.unsqueeze(0).expand(2, -1, -1).sum(0)",
    "functional.layer_norm({a}, ({a}.shape[1],))",
    "{a}.tril()",
    "{a}.triu(1) + {a}",
    "{a}.sort(1)[0]",
    "{a} + {a}.new_zeros({a}.shape[0], 1)",
    "torch.zeros_like({a}) + {a}.amax() if {a}.numel() > 0 else {a}",
    "{a} * 2 if {a}.shape[0] > {a}.shape[1] else {a} * 3",
    "{a} + 1 if {a}.shape[0] % 2 == 0 else {a} - 1",
    "{a}[torch.arange({a}.shape[0]).flip(0)]",
    "{a}.index_select(1, torch.arange({a}.shape[1]) // 2)",
    "{a}.gather(1, torch.zeros({a}.shape[0], {a}.shape[1], dtype=torch.long)) if {a}.shape[1] > 0 else {a}",
    "torch.zeros_like({a}).index_add(0, torch.arange({a}.shape[0]) // 2, {a})",
    "functional.dropout({a}, 0.5, training=False) + {a}.std() if {a}.numel() > 1 else {a}",
)
OTHER_SHAPE = (
    "{a}.t()",
    "{a}.t() @ {a} / ({a}.shape[0] + 1)",
    "{a} @ {a}.t() / ({a}.shape[1] + 1)",
    "{a}[: {a}.shape[0] // 2]",
    "{a}[:, {a}.shape[1] // 2 :]",
    "{a}[::2]",
    "{a}[:, 1:]",
    "{a}[:-1]",
    "{a}[-3:]",
    "functional.pad({a}, (1, 2))",
    "functional.pad({a}, (0, {a}.shape[0] % 3))",
    "{a}.repeat(2, 1)",
    "torch.cat(({a}, {a}.flip(0)), 0)",
    "torch.cat(({a}, {a} * 2), 1)",
    "torch.stack(({a}, {a}), 1).flatten(0, 1)",
    "torch.stack(({a}, {a}), 2).flatten(1)",
    "{a}.reshape(-1, 1)",
    "{a}.reshape(1, -1)",
    "{a}.view(-1, 2) if {a}.numel() % 2 == 0 and {a}.is_contiguous() else {a}",
    "{a}.flatten()[None]",
    "{a}.sum(0, keepdim=True)",
    "{a}.mean(1)[:, None]",
    "{a}.chunk(2, 0)[0]",
    "{a}.split(max({a}.shape[1] // 2, 1), 1)[-1]",
    "{a}.diagonal()[:, None]",
    "{a}[: min({a}.shape[0], 5)]",
    "{a}.unfold(1, 2, 1).sum(-1) if {a}.shape[1] >= 2 else {a}",
    "{a}.repeat_interleave(2, 0)",
    "{a}.new_full(({a}.shape[0] + 1, max({a}.shape[1], 1)), 0.25)",
    "torch.ones({a}.shape[1], {a}.shape[0]) * {a}.sum()",
)
PAIRS = (  # of one shape, unless they broadcast
    "{a} * {b}",
    "{a} + {b}",
    "torch.maximum({a}, {b})",
    "torch.where({a} > {b}, {a}, {b})",
    "torch.cat(({a}, {b}), 0)",
    "torch.cat(({a}, {b}), 1)",
    "{a} @ {b}.t() / ({b}.shape[1] + 1)",
    "{a}.t() @ {b} / ({b}.shape[0] + 1)",
    "{a} + {b}.mean(0)",
    "{a} * {b}.sum(1, keepdim=True)",
    "{a} - {b}[:1]",
    "{a} + 1 if {a}.shape == {b}.shape else {b} + 1",
)


def program(seed: int) -> tuple[Callable[..., Any], list[tuple[int, int]], str]:
    """(the function of two matrices, the shapes of its calls, its source)."""
    rng = random.Random(seed)
    lines, last = statements(rng, "x, y", rng.randint(2, 7), (SAME_SHAPE, OTHER_SHAPE, PAIRS), (0.45, 0.75, 0.8))
    kept = [f"v{step}" for step in range(len(lines) - 1) if rng.random() < 0.3]
    lines.append(f"    return {', '.join([last, *kept])}, x.shape[0] * 2")
    function, source = compiled_from(lines, f"<program {seed}>", {"torch": torch, "functional": functional})
    return function, shapes(rng), source


def statements(
    rng: random.Random,
    arguments: str,
    count: int,
    vocabulary: tuple[Sequence[str], ...],
    odds: tuple[float, float, float],
) -> tuple[list[str], str]:
    """(the lines of a program without its return, the last name). `vocabulary`: templates that keep the shape, change it, take two values;
    `odds`: up to where a random number chooses the first and the second kind, and how often a pair is of values of the inputs' shape."""
    same, other, pairs = vocabulary
    lines = [f"def program({arguments}):"]
    twins = ["x", "y"]  # values of the inputs' shape
    last = "x"
    for step in range(count):
        kind = rng.random()
        name = f"v{step}"
        if kind < odds[0]:
            chosen = rng.choice([*twins, last])
            lines.append(f"    {name} = {rng.choice(same).format(a=chosen)}")
            if chosen in twins:
                twins.append(name)
        elif kind < odds[1]:
            lines.append(f"    {name} = {rng.choice(other).format(a=rng.choice([*twins, last]))}")
        else:
            a, b = (rng.choice(twins), rng.choice(twins)) if rng.random() < odds[2] else (last, rng.choice(twins))
            lines.append(f"    {name} = {rng.choice(pairs).format(a=a, b=b)}")
        last = name
    return lines, last


def compiled_from(lines: Sequence[str], file: str, names: dict[str, Any]) -> tuple[Callable[..., Any], str]:
    """(the function `program` of these lines over these names, its source); tracebacks show the source under the name `file`."""
    source = "\n".join(lines) + "\n"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), names)
    return names["program"], source


def size(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.15:
        return rng.choice((0, 1))
    if kind < 0.45:
        return rng.choice(PRIMES)
    if kind < 0.7:
        return rng.choice(POWERS)
    return rng.choice(LARGE) if kind < 0.75 else rng.randint(2, 50)


def shapes(rng: random.Random) -> list[tuple[int, int]]:
    """Seven shapes; a dimension may stay as it is, both may be equal, a large size stands beside a small one."""
    found: list[tuple[int, int]] = []
    while len(found) < 7:
        rows, columns = size(rng), size(rng)
        if found and rng.random() < 0.3:
            rows, columns = rng.choice(((found[0][0], columns), (rows, found[0][1]), (rows, rows)))
        if rows * columns <= MOST and max(rows * rows, columns * columns) <= (
            MOST << 6 if min(rows, columns) < 8 else MOST << 3
        ):
            found.append((rows, columns))
    return found
