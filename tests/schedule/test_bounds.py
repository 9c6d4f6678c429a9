"""The proof that kernels stay inside their buffers: it shows what is true, refuses each planted wrong kernel, and never errs."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch

import fusewright
from fusewright.backends import pipeline
from fusewright.base import events
from fusewright.base.records import replace
from fusewright.loops import ir
from fusewright.loops.ir import Axis, Buffer, BufferRef, Expression, Extern, Output, Store
from fusewright.schedule import bounds
from fusewright.schedule.bounds import Known, show
from fusewright.schedule.plan import (
    Attention,
    Define,
    Kernel,
    Operand,
    Plan,
    Product,
    Rows,
    RunExtern,
    RunKernel,
    Scratch,
    Stage,
    Statement,
)
from fusewright.sizes import proofs
from fusewright.sizes.expressions import Dim, Expr, evaluate, loop_symbol, maximum, minimum, symbol
from fusewright.sizes.proofs import View, prove
from tests import replay_programs

CPU = torch.device("cpu")
F32, I64 = torch.float32, torch.int64
S0, S1, S2, S3 = (symbol(f"s{k}") for k in range(4))
N3 = symbol("n3", None)
SIZES: tuple[Expr, ...] = (S0, S1, S2, S3, N3)


def axis(number: int, extent: Dim, prefix: str = "o") -> Axis:
    return Axis(loop_symbol(f"{prefix}{number}", extent), extent)


def compare(op: str, left: Dim, right: Dim) -> Expression:
    return ir.apply(op, ir.index_value(left), ir.index_value(right), dtype=torch.bool)


def masked(masks: tuple[Expression, ...], body: Expression) -> Expression:
    for mask in masks:
        body = ir.masked(mask, body, ir.constant(0.0, F32))
    return body


def kernel(axes: tuple[Axis, ...], *statements: Statement, **others: Any) -> Kernel:
    """One stage; a and out hold floats, b integers."""
    dtypes = {"a": F32, "b": I64, "out": F32}
    return Kernel(
        "k", axes, (Stage((), statements),), tuple(dtypes), tuple(dtypes.values()), frozenset({"out"}), SIZES, **others
    )


def plan(
    made: Kernel | Extern, rooms: dict[str, Dim], when: Dim | None = None, output: BufferRef | None = None
) -> Plan:
    """One step over buffers of so many elements."""
    buffers = {name: Buffer(name, (count,), (1,), F32, CPU, "input") for name, count in rooms.items()}
    sizes = dict.fromkeys(SIZES, (0, 0))
    outputs = () if output is None else (Output("view", output.buffer, output),)
    if isinstance(made, Extern):
        return Plan({}, buffers, (RunExtern(made),), size_symbols=sizes, outputs=outputs)
    return Plan({made.name: made}, buffers, (RunKernel(made.name, when=when),), size_symbols=sizes, outputs=outputs)


def unproved(made: Plan, *facts: Dim) -> list[str]:
    return [one.buffer for one in show(made, Known(lambda d: False, facts)).unproved]


def reading(room: Dim, index: Dim, axes: tuple[Axis, ...], *masks: Expression) -> Plan:
    """Reads a[index] of so many elements where the masks hold."""
    return plan(kernel(axes, Store("out", 0, masked(masks, ir.load("a", index, F32)))), {"a": room, "b": 1, "out": 1})


def gathering(room: Dim, value: Expression, extent: Dim, width: Dim) -> Plan:
    """Reads a row of a whose number, taken to be below `extent`, is computed."""
    number, column = symbol("j0", 0, extent - 1), axis(0, width)
    load = ir.load("a", number * width + column.symbol, F32, ((number, value),))
    return plan(kernel((column,), Store("out", 0, load)), {"a": room, "b": 1, "out": 1})


O0, O1, O2 = axis(0, S0), axis(1, S1), axis(2, S2)
A, B, C = O0.symbol, O1.symbol, O2.symbol
H, W = (S2 + 1) // 2, (S3 + 1) // 2
Y, X = axis(1, (S2 + 3) // 4), axis(2, (S3 + 3) // 4)
HALF, PAIRS, JOINED, BACK = axis(0, S0 // 2), axis(0, S0 // 2 * 2), axis(0, S0 + S1), axis(0, 110)
CROPPED = axis(0, S0 * S2), axis(1, N3 + S1 - 3)
PADDED = axis(0, N3 + S0), axis(1, S1 * 2 - 8), axis(2, S2)
MERGED = axis(0, S2 * S3, "o"), axis(1, 64, "i")
FAR = maximum(BACK.symbol - 5, 5 - BACK.symbol)
STORED = ir.load("b", 0, I64)


def window(y: int, x: int, *left_out: int) -> Plan:
    """Of a maximum over 3 by 3 pixels, two apart, in an image with a border."""
    row, column = Y.symbol * 2 + y, X.symbol * 2 + x
    masks = compare("ge", row, 0), compare("ge", column, 0), compare("lt", row, H), compare("lt", column, W)
    return reading(
        S0 * H * W, (A * H + row) * W + column, (O0, Y, X), *(m for k, m in enumerate(masks) if k not in left_out)
    )


def windows(size: int, width: int, stride: int, dilation: int, padding: int, *left_out: int) -> Plan:
    """Of a convolution of images whose channels lie side by side: each window, with zeros for what lies outside."""
    channels = 32
    places = (size + 2 * padding - (width - 1) * dilation - 1) // stride + 1
    axes = tuple(axis(number, extent) for number, extent in enumerate((2, places, places, width, width, channels)))
    image, y, x, down, right, channel = (one.symbol for one in axes)
    row, column = y * stride + down * dilation, x * stride + right * dilation
    masks = [compare(op, at, bound) for at in (row, column) for op, bound in (("ge", padding), ("lt", size + padding))]
    index = ((image * size + row - padding) * size + column - padding) * channels + channel
    return reading(2 * size * size * channels, index, axes, *(m for k, m in enumerate(masks) if k not in left_out))


WINDOWS = ((14, 3, 1, 1, 1), (56, 3, 2, 1, 1), (28, 5, 1, 2, 4), (224, 7, 2, 1, 3), (13, 4, 3, 1, 2))


def merged(width: int) -> Plan:
    """Every other pixel of every other row, as the second of four parts of 16 of the last dimension."""
    pixel, part = (one.symbol for one in MERGED)
    index = pixel // S3 * S3 * 64 + pixel % S3 * 32 + S3 * 32 + part - 16
    room = S2 * S3 * 64 - 16
    return reading(room, index, MERGED, compare("ge", part, 16), compare("lt", part, 16 + width))


def joined(*, second: bool) -> Plan:
    """The second of two parts: in the mask's false branch, or (wrongly) in its true one."""
    mask, load, zero = compare("lt", JOINED.symbol, S0), ir.load("a", JOINED.symbol - S0, F32), ir.constant(0.0, F32)
    value = ir.masked(mask, zero, load) if second else ir.masked(mask, load, zero)
    return plan(kernel((JOINED,), Store("out", 0, value)), {"a": S1, "b": 1, "out": 1})


def named(extent: Dim) -> Plan:
    """The mask is a local."""
    value = masked((ir.local_value("v0", torch.bool),), ir.load("a", A, F32))
    return plan(
        kernel((O0,), Define("v0", compare("lt", A, extent)), Store("out", 0, value)), {"a": S1, "b": 1, "out": 1}
    )


def product(room: Dim, checks: tuple[tuple[Dim, Dim, int], ...] = (), start: int = 0) -> Plan:
    """Rows of 16 elements of a, times columns."""
    k, axes = loop_symbol("k", 16), (axis(0, 1), axis(1, S0), axis(2, 8))
    left = Operand("a", F32, axes[1].symbol * 16 + start, k, checks)
    right = Operand("out", F32, axes[2].symbol * 16, k)
    return plan(kernel(axes, product=Product("product", left, right, k, 16)), {"a": room, "b": 1, "out": 128})


def scratch(index: Dim) -> Plan:
    """Four elements of a row's own memory."""
    store = Store("s0", index, ir.constant(0.0, F32))
    return plan(kernel((axis(0, 4),), store, scratch=(Scratch("s0", F32, 4),)), {"a": 1, "b": 1, "out": 1})


def clamped(least: int, most: int) -> Expression:
    low = ir.apply("maximum", STORED, ir.constant(least, I64), dtype=I64)
    return ir.apply("minimum", low, ir.constant(most, I64), dtype=I64)


def attention(room: Dim, when: Dim | None) -> Plan:
    """Keys of a batch s3, read in the batches of queries, s0."""
    axes, features = (axis(0, S0), axis(1, 2), axis(2, S1)), 8
    query = Rows("b", F32, (axes[0].symbol * 2 + axes[1].symbol) * S1 * features + axes[2].symbol * features)
    key = Rows("a", F32, (axes[0].symbol * 2 + axes[1].symbol) * S2 * features, features)
    found = Attention(query, key, key, None, Rows("out", F32, query.outer), S2, features, 1.0, False)
    many = S0 * 2 * S1 * features
    return plan(Kernel("k", axes, (), ("a", "b", "out"), (F32,) * 3, frozenset({"out"}), SIZES, attention=found),
                {"a": room, "b": many, "out": many}, when)  # fmt: skip


def passing(room: Dim) -> Extern:
    return Extern("e", torch.ops.aten.relu.default, (BufferRef("a", (S0, S1), (S1, 1), 3, F32),), (), ("out",))


SAME_BATCH = maximum(0, 1 - (maximum(S0, S3) - minimum(S0, S3)))
TRUE: dict[str, tuple[Any, ...]] = {
    "whole": (reading(S0 * S1, A * S1 + B, (O0, O1)),),
    "one loop": (reading(S0 * S1, loop_symbol("o0", S0 * S1), (axis(0, S0 * S1),)),),
    "numbers": (reading(96, loop_symbol("o0", 12) * 8 + loop_symbol("o1", 8), (axis(0, 12), axis(1, 8))),),
    "flipped": (reading(S0 * S1, (S0 - 1 - A) * S1 + (S1 - 1 - B), (O0, O1)),),
    "broadcast": (reading(S2, A % S2, (O0, O2)),),
    "first of a dimension": (reading(S0 * S1, A * S1, (O0, O1)),),
    "first of a dimension that a guard fills": (reading(S0 * S1, A * S1, (O0,)), S1 - 1),
    "half": (reading(S0, HALF.symbol, (HALF,)),),
    "other half": (reading(S0, S0 // 2 + PAIRS.symbol % (S0 // 2), (PAIRS,)),),
    "every other row": (reading(H * S1, loop_symbol("o0", S2) // 2 * S1 + B, (axis(0, S2), O1)),),
    "a part that guards keep small": (
        reading(S0 * S1, loop_symbol("o0", S2) * S1 + loop_symbol("o1", S3), (axis(0, S2), axis(1, S3))), S0 - S2, S1 - S3,
    ),
    "cropped": (reading(S0 * S2 * (N3 + S1 - 3), CROPPED[0].symbol * (N3 + S1 - 3) + CROPPED[1].symbol, CROPPED),),
    "padded": (
        reading(S0 * S1 * S2, (PADDED[0].symbol * S1 + PADDED[1].symbol) * S2 + PADDED[2].symbol, PADDED,
                compare("lt", PADDED[0].symbol, S0), compare("lt", PADDED[1].symbol, S1)), S1 * 2 - 8, 8 - S1,
    ),
    "reflected": (reading(100, 99 - maximum(FAR - 99, 99 - FAR), (BACK,)),),
    "clamped": (reading(S1, minimum(A, S1 - 1), (O0, O1)),),
    **{f"window {y} {x}": (window(y, x),) for y in (-1, 0, 1) for x in (-1, 0, 1)},
    **{f"windows {given}": (windows(*given),) for given in WINDOWS},
    "the second part": (joined(second=True),),
    "a named mask": (named(S1),),
    "a checked number": (gathering(S0 * S1, ir.checked_index(STORED, S0), S0, S1),),
    "a remainder": (gathering(7 * S1, ir.apply("remainder", STORED, ir.constant(7, I64), dtype=I64), 7, S1),),
    "a clamped number": (gathering(7 * S1, clamped(0, 6), 7, S1),),
    "scratch": (scratch(loop_symbol("o0", 4)),),
    "a product": (product(S0 * 16),),
    "a product that begins before": (product(16, ((loop_symbol("o1", S0) * 16 - 2, loop_symbol("k", 16), 16),), -2),),
    "attention where batches are equal": (attention(S3 * 2 * S2 * 8, SAME_BATCH),),
    "a library's window": (plan(passing(S0), {"a": S0 * S1 + 3, "out": 1}),),
    "a view": (plan(passing(S0), {"a": S0 * S1 + 3, "out": 1}, output=BufferRef("a", (S0,), (S1,), 0, F32)), S1 - 1),
}  # fmt: skip

FALSE: dict[str, tuple[Any, ...]] = {
    "one beyond": (reading(S0 * S1, A * S1 + B + 1, (O0, O1)),),
    "one before": (reading(S0 * S1, A * S1 + B - 1, (O0, O1)),),
    "a number beyond": (reading(95, loop_symbol("o0", 12) * 8 + loop_symbol("o1", 8), (axis(0, 12), axis(1, 8))),),
    "another size": (reading(S0 * S1, A * S1 + B, (O0, axis(1, S2))),),
    "another size, one of them known to be smaller": (reading(S0, C, (O2,)), S2 - S0),
    "a size of 1 that is none": (reading(S1, B + C, (O1, O2)),),
    "first of a dimension that may be empty": (reading(S0 * S1, A * S1, (O0,)),),
    "flipped": (reading(S0, S0 - A, (O0,)),),
    "other half": (reading(S0, S0 - S0 // 2 + PAIRS.symbol % (S0 // 2) + 1, (PAIRS,)),),
    "every other row": (reading(S2 // 2 * S1, loop_symbol("o0", S2) // 2 * S1 + B, (axis(0, S2), O1)),),
    "padded": (
        reading(S0 * S1 * S2, (PADDED[0].symbol * S1 + PADDED[1].symbol) * S2 + PADDED[2].symbol, PADDED,
                compare("lt", PADDED[0].symbol, S0)), S1 * 2 - 8,
    ),
    "reflected": (reading(99, 99 - maximum(FAR - 99, 99 - FAR), (BACK,)),),
    **{f"window {y} {x} without a mask": (window(y, x, left_out),) for y, x, left_out in ((-1, 0, 0), (0, -1, 1), (1, 0, 2), (0, 1, 3))},
    **{f"windows {given} without mask {k}": (windows(*given, k),) for given in WINDOWS[::2] for k in range(4)},
    "more than one of four parts": (merged(17),),
    "the first part": (joined(second=False),),
    "a named mask": (named(S2),),
    "a number checked against another size": (gathering(S0 * S1, ir.checked_index(STORED, S2), S0, S1),),
    "a number checked, of fewer rows": (gathering(S2 * S1, ir.checked_index(STORED, S0), S0, S1),),
    "a number as it is stored": (gathering(S0 * S1, STORED, S0, S1),),
    "a clamped number": (gathering(7 * S1, clamped(0, 7), 7, S1),),
    "a number clamped above only": (gathering(7 * S1, clamped(-1, 6), 7, S1),),
    "scratch": (scratch(loop_symbol("o0", 4) + 1),),
    "a loop variable of another range": (reading(S0, loop_symbol("o0", S0), (O1,)),),
    "a product": (product(S0 * 15),),
    "a product that begins before": (product(S0 * 16, start=-2),),
    "attention": (attention(S3 * 2 * S2 * 8, None),),
    "a library's window": (plan(passing(S0), {"a": S0 * S1, "out": 1}),),
    "a view": (plan(passing(S0), {"a": S0 * S1 + 3, "out": 1}, output=BufferRef("a", (S0,), (S1 + 4,), 0, F32)),),
}  # fmt: skip


@pytest.mark.parametrize("name", TRUE)
def test_what_is_inside_is_shown(name: str) -> None:
    made, *facts = TRUE[name]
    assert not unproved(made, *facts)


@pytest.mark.parametrize("name", FALSE)
def test_a_planted_wrong_access_is_refused(name: str) -> None:
    made, *facts = FALSE[name]
    assert unproved(made, *facts)


def test_what_a_mask_says_of_one_loop_is_seen_at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "prove", lambda d, facts, search=True: prove(d, facts, search=False))
    assert not unproved(merged(16))


def test_numbers_that_a_kernel_stored_are_in_the_range_that_it_stored() -> None:
    """An index that is checked in front of the kernel that uses it; unless the store leaves elements out."""
    for count, known in ((S2, True), (S2 - 1, False)):
        first = Kernel("first", (axis(0, count),), (Stage((), (Store("at", loop_symbol("o0", count), ir.checked_index(STORED, S0)),)),),
                       ("b", "at"), (I64, I64), frozenset({"at"}), SIZES)  # fmt: skip
        number = symbol("j0", 0, S0 - 1)
        load = ir.load("a", number, F32, ((number, ir.load("at", C, I64)),))
        second = kernel((O2,), Store("out", C, load))
        made = plan(second, {"a": S0, "b": 1, "out": S2})
        made.buffers["at"] = Buffer("at", (S2,), (1,), I64, CPU, "temporary")
        made.kernels["first"] = first
        made.steps = (RunKernel("first"), RunKernel("k"))
        assert (not unproved(made)) is known


def test_a_division_is_at_its_greatest_in_one_term_alone() -> None:
    """Where another term takes it away, it is not."""
    rest, several = S1 % 7, symbol("several", 2, None)
    assert not prove(-1 - (rest - several * rest) // 2, ())  # it is -1 where the remainder is 0
    assert prove(3 - (rest - several * rest) // 2, ())


def test_a_remainder_and_a_quotient_are_of_one_division() -> None:
    """Of an odd number that is even plus one: the index of a row that a mask lets through."""
    rest = (B + 1) % 2
    facts = (A * 2 + B - 1, rest, -rest)
    assert prove(A * 5 + (B + 1) // 2 * 5 - 5, facts)
    assert not prove(A * 5 + (B + 1) // 2 * 5 - 6, facts)


def random_size(rng: random.Random, atoms: list[Expr], depth: int = 2) -> Dim:
    """A small expression over the symbols."""
    made: Dim = rng.randint(-3, 3)
    for _ in range(rng.randint(1, 3)):
        atom: Dim = rng.choice(atoms)
        kind = rng.random() if depth else 0
        whole = random_size(rng, atoms, 0) if depth and rng.random() < 0.5 else atom + 1
        if kind > 0.9:
            atom = whole // rng.choice([2, 3])
        elif kind > 0.8:
            atom = whole % rng.choice([2, 3])
        elif kind > 0.7:
            atom = rng.choice([maximum, minimum])(random_size(rng, atoms, 0), random_size(rng, atoms, 0))
        elif kind > 0.4:
            atom = atom * rng.choice(atoms)
        made = made + atom * rng.choice([-2, -1, 1, 1, 2, 3])
    return made


@pytest.mark.parametrize("seed", range(8))
def test_nothing_false_is_proved(seed: int) -> None:
    """Random questions, with and without facts, against every assignment of small numbers; some of them are proved."""
    rng = random.Random(seed)
    shown = 0
    for _ in range(150):
        loops = [
            loop_symbol("o0", rng.choice([S0, S1, S0 * S1, S0 - 1, 3])),
            loop_symbol("o1", rng.choice([S1, S0 + 1, 2])),
        ]
        atoms: list[Expr] = [S0, S1, *loops]
        facts = [random_size(rng, atoms) for _ in range(rng.randint(0, 3))]
        wanted = random_size(rng, atoms)
        if facts and rng.random() < 0.5:
            wanted = sum((fact * rng.choice([1, 2, S0]) for fact in facts), rng.randint(-1, 1) * rng.randint(0, 2))
        view = View(tuple(facts), SIZES)
        if not prove(view.of(wanted), view.facts) and not prove(wanted, tuple(facts)):
            continue
        shown += 1
        for sizes in itertools.product(range(5), repeat=2):
            values: dict[Expr, int] = dict(zip((S0, S1), sizes))
            ranges = [range(evaluate(loop.upper, values) + 1) for loop in loops]  # type: ignore[arg-type, attr-defined]
            for point in itertools.product(*ranges):
                everything = values | dict(zip(loops, point))
                if all(evaluate(fact, everything) >= 0 for fact in facts):
                    assert evaluate(wanted, everything) >= 0, (wanted, facts, everything)
    assert shown > 20


@pytest.mark.parametrize("seed", range(4))
def test_what_stays_within_each_dimension_is_inside(seed: int) -> None:
    """Random layouts, and indices made of steps along them, against every assignment of small numbers."""
    rng = random.Random(seed)
    answers = []
    for _ in range(300):
        sizes: list[Dim] = [rng.choice([S0, S1, H, 1, 2, 3, S0 * 2]) for _ in range(rng.randint(1, 3))]
        loops = [loop_symbol(f"o{k}", rng.choice([size, size, size * 2 if k else size])) for k, size in enumerate(sizes)]
        if rng.random() < 0.3:  # a loop over all of the dimensions, or over the inner ones
            loops[-1] = loop_symbol("o9", functools.reduce(lambda a, b: a * b, sizes[rng.randint(0, 1) :], 1))
        strides: list[Dim] = []
        step: Dim = rng.choice([1, 1, 1, 0, 2])
        for size in reversed(sizes):
            strides.insert(0, step)
            step = step * size + rng.choice([0, 0, 0, 1])
        facts: list[Dim] = []
        index: Dim = 0
        for size, stride, loop in zip(sizes, strides, loops, strict=True):
            at = rng.choice([loop, loop, loop * 2, loop + 1, loop - 1, loop - loop, size - 1 - loop, (loop + 1) // 2])
            facts += rng.sample([at, size - 1 - at, size - 1], rng.randint(0, 3))
            index = index + at * (rng.choice(strides) if loop.name == "o9" else stride)
        order = rng.sample(range(len(sizes)), len(sizes))
        shape, stride = tuple(sizes[k] for k in order), tuple(strides[k] for k in order)
        buffer = Buffer("a", shape, stride, F32, CPU, "input")
        answers.append(bounds._is_in_each_dimension(buffer, index, (tuple(facts),)))
        for values in itertools.product(range(5), repeat=3) if answers[-1] else ():
            given: dict[Expr, int] = dict(zip((S0, S1, S2), values))
            ranges = [range(evaluate(loop.upper, given) + 1) for loop in loops]  # type: ignore[arg-type]
            for point in itertools.product(*ranges):
                everything = given | dict(zip(loops, point))
                if all(evaluate(fact, everything) >= 0 for fact in facts):
                    room = 1 + sum((evaluate(n, given) - 1) * evaluate(step, given) for n, step in zip(shape, stride))
                    assert 0 <= evaluate(index, everything) < room, (index, shape, stride, facts, everything)
    assert 60 < sum(answers) < 280


@pytest.mark.parametrize("seed", range(4))
def test_what_an_example_refutes_has_no_proof(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    loops = [loop_symbol("o0", S0), loop_symbol("o1", S1)]
    refuted, refute = 0, proofs._is_refuted
    monkeypatch.setattr(proofs, "_is_refuted", lambda d, facts: False)
    for _ in range(150):
        facts = tuple(random_size(rng, [S0, S1, *loops]) for _ in range(rng.randint(0, 3)))
        wanted = random_size(rng, [S0, S1, *loops])
        if isinstance(wanted, Expr) and refute(wanted, tuple(fact for fact in facts if isinstance(fact, Expr))):
            refuted += 1
            assert not prove(wanted, tuple(fact for fact in facts if isinstance(fact, Expr))), (wanted, facts)
    assert refuted > 20


@pytest.mark.parametrize("outside", [False, True])
def test_what_is_not_shown_is_told(outside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline asks at each compile: a plan whose kernel reads one element too far is told of, a right one not."""
    real = pipeline.with_memory

    def moved(made: Plan, own_bytes: int | None) -> Plan:
        placed = real(made, own_bytes)
        for name, buffer in placed.buffers.items():
            if outside and buffer.role == "input":
                placed.buffers[name] = replace(buffer, shape=(buffer.shape[0] - 1,))
        return placed

    monkeypatch.setattr(pipeline, "with_memory", moved)
    x, hints = torch.randn(7), []
    with events.STREAM.listening(lambda event: hints.append(str(event)) if isinstance(event, events.Hint) else None):
        compiled = fusewright.compile(lambda x: x.sin() + 1, options={"disk_cache": False})
        assert torch.allclose(compiled(x), x.sin() + 1)
    assert any("not shown to lie inside its buffer" in hint for hint in hints) is outside


def test_replay_programs_are_shown() -> None:
    """Of the kernels of programs over all kinds of operators, at least 95 in 100 are shown to stay inside."""
    found: list[bounds.Shown] = []
    kernels = [0]
    real = bounds.show

    def show_and_keep(made: Plan, known: Known | None = None) -> bounds.Shown:
        found.append(real(made, known))
        kernels[0] += len(made.kernels)
        return found[-1]

    names = ("gathers", "scatters", "views", "joined", "pools", "resampled", "sizes_of_every_kind", "residual_block")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "show", show_and_keep)
        for name in names:
            fusewright.reset()
            replay_programs.PROGRAMS[name](functools.partial(fusewright.compile, options={"disk_cache": False}))
    open_ = sum(len({access.where for access in shown.unproved}) for shown in found)
    total = sum(shown.accesses for shown in found)
    lost = sum(len(shown.unproved) for shown in found)
    print(f"shown: {kernels[0] - open_} of {kernels[0]} kernels, {total - lost} of {total} accesses")
    assert kernels[0] > 20 and open_ <= kernels[0] // 20


def test_searches_that_fail_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel reads a window of many elements from images of sizes that nothing ties to each other."""
    asked: list[Dim] = []

    def counted(d: Dim, facts: Any, search: bool = True) -> bool:
        if search:
            asked.append(d)
        return prove(d, facts, search=search)

    monkeypatch.setattr(bounds, "prove", counted)
    backward = functools.partial(torch.ops.aten.max_pool2d_with_indices_backward, kernel_size=[5, 5], stride=[1, 1])
    backward = functools.partial(backward, padding=[2, 2], dilation=[1, 1], ceil_mode=False)
    x = torch.randn(2, 3, 5, 4)
    _, indices = torch.nn.functional.max_pool2d(x, 5, 1, 2, return_indices=True)
    gradient = torch.randn(2, 3, 5, 4)
    compiled = fusewright.compile(lambda g, x, i: backward(g, x, indices=i), dynamic=True)
    assert torch.allclose(compiled(gradient, x, indices), backward(gradient, x, indices=indices))
    assert 0 < len(asked) < 10 * bounds.MOST_FAILURES
