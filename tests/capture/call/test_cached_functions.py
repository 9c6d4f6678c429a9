"""Functions that keep their results (functools.lru_cache): bodies run as often as in eager, in eager's order, and the
cache afterwards holds what eager's holds, whatever happens to it between calls.

Each row defines `program`, and perhaps `kept`, the function; `tests/fuzz/session.py` compares all that can be reached.
"""

from __future__ import annotations

import functools
import textwrap
import warnings

import pytest
import torch

import fusewright
from fusewright.base import events
from fusewright.base.events import STREAM, Compiled, Event
from tests.fuzz import session

HEAD = """
begin()
LOG, KEPT, COUNT, GN = [], [], [0], 3
D0, T0 = {"a": 1, "b": 2}, made((2, 3), f32, 1)
"""
STEPS = """
def figures(): return kept.cache_info()[1:] if "kept" in globals() else None
def step0(): return program(made((2,), f32, 1), 2)
def step1(): return program(made((2,), f32, 2), 2), figures()
def step2():
    D0["b"] = 5
    return program(made((2,), f32, 1), 3)
def step3(): return program(made((2,), f32, 1), 2), "kept" in globals() and kept(2)
def step4():
    globals().update(T0=made((2,), f32, 3))
    return program(made((2,), f32, 1), 4), figures()
def step5():
    if "kept" in globals(): kept.cache_clear()
    return program(made((2,), f32, 1), 4), figures()
"""
NOTES = "LOG.append(p)\nreturn p"


def keeping(body: str, program: str, how: str = "lru_cache", takes: str = "p") -> str:
    """The text of `kept`, which keeps its results, and of `program`."""
    body, program = (textwrap.indent(text, "    ") for text in (body, program))
    return f"\n@functools.{how}\ndef kept({takes}):\n{body}\ndef program(a, b=2):\n{program}\n"


PROGRAMS = {
    "gives a dict": keeping(
        "LOG.append(p)\nreturn {p: 1}",
        "found = kept(b)\nfusewright.graph_break()\nreturn a + 1, found, kept(b) is found",
    ),
    "gives an object, by name": keeping(
        "return object() if q == 2 else {1: p}",
        "found = kept(b, q=1)\nreturn a + 1, found, kept(b, q=1) is found, type(kept(b, q=2))",
        takes="p, q=1",
    ),
    # As einops keeps recipes, and what recipes give for a shape.
    "of an object that was made inside": """
class Recipe:
    def __init__(self, n): LOG.append(n); self.n = n
@functools.lru_cache
def recipe(n): return Recipe(n)
@functools.lru_cache(8)
def kept(p, q=3):
    LOG.append(q)
    return [p.n + q if isinstance(p, Recipe) else p]
def program(a, b=2):
    a.mul_(2)
    found = kept(recipe(b)), kept(recipe(b)), kept(recipe(b), q=4), kept(Recipe(7))
    return a * found[0][0], found, found[0] is found[1], recipe.cache_info()[1:]
""",
    "of an object with an equality of its own": """
class Named:
    def __init__(self, n): self.n = n
    def __eq__(self, other): LOG.append(self.n); return isinstance(other, Named) and self.n == other.n
    def __hash__(self): return hash(self.n)
@functools.lru_cache
def kept(p): LOG.append('body'); return [p]
def program(a, b=2):
    a.mul_(2)
    found = kept(Named(b)), kept(Named(b))
    return a + 1, found[0] is found[1]
""",
    "pops from a dict": keeping("return D0.pop('b', p)", "LOG.append(kept(b))\nreturn a + 1"),
    "appends": keeping(NOTES, "LOG.append(kept(b))\nreturn a + 1"),
    "asked twice, and for its figures": keeping(
        NOTES,
        "LOG.append(kept(b))\nLOG.append(kept(b))\nLOG.append(kept.cache_info()[1:])\nreturn a + 1",
    ),
    "gives a list": keeping("return [p]", "r = kept(b)\nr.append(1)\nreturn a + 1, r, kept(b) is r"),
    "gives a tensor": keeping("return T0 + p", "return a + kept(b)"),
    "reads what was written": keeping("return GN", "global GN\nGN += 1\nreturn a + kept(b)", how="cache"),
    "raises": keeping(
        "if p == 3: raise ValueError(p)\nreturn p",
        "try: LOG.append(kept(b))\nexcept ValueError as e: LOG.append(str(e))\nreturn a + 1",
    ),
    "refuses its arguments": keeping(
        NOTES,
        "for more in (1, 2), {'q': 1}:\n"
        "    try: kept(**more) if isinstance(more, dict) else kept(b, *more)\n"
        "    except TypeError as e: LOG.append(str(e))\nreturn a + 1",
    ),
    "of a class": """
class K:
    def __init__(self, p): LOG.append(p)
kept = functools.lru_cache(K)
def program(a, b=2):
    found = kept(b)
    return a + 1, found, kept(b) is found
""",
    "of a partial": """
kept = functools.lru_cache(functools.partial(lambda q, p: LOG.append(p) or [p], 1))
def program(a, b=2):
    found = kept(b)
    return a + 1, found, kept(b) is found
""",
    "says that it keeps another's": keeping(NOTES, "LOG.append(kept(b))\nreturn a + 1")
    + "\nkept.__wrapped__ = lambda p: LOG.append('other')",
    "of an object": """
class K:
    @functools.lru_cache
    def m(self, p):
        LOG.append(p)
        return p
O = K()
def program(a, b=2):
    LOG.append(O.m(b))
    return a + 1
""",
    "cached property": """
class K:
    @functools.cached_property
    def m(self):
        LOG.append('once')
        return [GN]
O = K()
def program(a, b=2):
    LOG.append(O.m)
    if b == 4: del O.m
    return a + 1
""",
    "breaks": keeping("fusewright.graph_break()\nLOG.append(p)\nreturn p", "LOG.append(kept(b))\nreturn a + 1"),
    "breaks, and keeps few": keeping(
        "fusewright.graph_break()\nLOG.append((p, q))\nreturn [p]",
        "r = kept(b), kept(b, q=2), kept(b)\nLOG.append((r[0] is r[2], r[0] is r[1]))\nreturn a + 1",
        how="lru_cache(maxsize=2)",
        takes="p, q=1",
    ),
    "breaks, and keeps one": keeping(
        "fusewright.graph_break()\nLOG.append(p)\nreturn [p]",
        "r = kept(1), kept(b), kept(1)\nLOG.append(r[0] is r[2])\nreturn a + 1",
        how="lru_cache(maxsize=1)",
    ),
    "breaks and raises": keeping(
        "fusewright.graph_break()\nLOG.append(p)\nraise ValueError(p)",
        "try: kept(b)\nexcept ValueError as e: LOG.append(str(e))\nreturn a + 1",
    ),
    "is changed behind a break": keeping(
        NOTES,
        "LOG.append(kept(b))\nfusewright.graph_break()\nLOG.append(kept(b))\n"
        "kept.v = 1\nprint(kept(b), end='')\nreturn a + 1",
    ),
    "reads a list that was written": keeping("return COUNT[0]", "COUNT[0] += 1\nreturn a + kept(b)"),
    "one result": keeping(NOTES, "kept(1); kept(b); kept(1)\nreturn a + 1", how="lru_cache(maxsize=1)"),
    "no result": keeping(NOTES, "kept(1); kept(b); kept(1)\nreturn a + 1", how="lru_cache(maxsize=0)"),
    "typed": keeping(NOTES, "kept(1); kept(b); kept(1.0); kept(True)\nreturn a + 1", how="lru_cache(typed=True)"),
    "reads a tensor's data that was written to": keeping(
        "return T0.sum().item() + p",
        "T0.add_(1)\nLOG.append(kept(b))\nreturn a + 1",
    ),
    "reads a tensor that was written to": keeping("return T0 + p", "T0.add_(1)\nreturn a + kept(b).sum()"),
    "reads numbers of a tensor that was written to": keeping(
        "return [T0.tolist()[0][0] + p, T0[0, 0].item(), float(T0[0, 1]), T0._version]",
        "T0.add_(1)\nreturn a + 1, kept(b)",
    ),
    "is told of a tensor that was written to": keeping(
        "return [T0._version, tuple(T0.shape), T0.requires_grad, T0.data.dtype]",
        "T0.add_(1)\nT0.unsqueeze_(0)\nT0.requires_grad_()\nreturn a + 1, kept(b)",
    ),
    "is told the shape of a tensor that was reshaped": keeping(
        "return tuple(T0.shape)",
        "T0.unsqueeze_(0)\nreturn a + 1, kept(b)",
    ),
    "is told the shape of replaced data": keeping(
        "return tuple(T0.shape)",
        "T0.data = torch.ones(7)\nreturn a + 1, kept(b)",
    ),
    "is told whether a tensor requires a gradient": keeping(
        "return T0.requires_grad, T0.grad is None", "T0.requires_grad_()\nT0.grad = T0.detach() + 1\nreturn a + 1, kept(b)"
    ),
    "draws behind a draw": keeping(
        "return torch.rand(2) + p", "torch.manual_seed(3)\nx = torch.rand(2)\nreturn a + x, kept(b), torch.rand(2)"
    ),
    "makes a tensor": keeping("return torch.arange(p) * 2", "return a.sum() + kept(b), kept(b) is kept(b), kept(b)"),
    "has met a tensor": "\nHELD = [False, made((3,), f32, 1)]"
    + keeping("return -1", "HELD.sort(key=kept)\nreturn a + sum(map(kept, HELD))"),
    "calls itself with effects": keeping(
        "LOG.append(('body', p))\nreturn kept(p - 1) + kept(p - 2) if p > 1 else p",
        "return a.sum() + kept(b + 3), kept(4)",
    ),
    "calls itself": keeping(
        "return kept(p - 1) + kept(p - 2) if p > 1 else p",
        "return a.sum() + kept(b + 3), kept(4)",
    ),
    "of a native function": keeping(
        "return str(p).encode().hex() + str(hash(open)) [:0]",
        "COUNT[0] += 1\nreturn a.sum(), kept(b + 3), kept(4)",
    ),
    "of keywords": keeping(
        "LOG.append((p, q, r, k))\nreturn [p, q]",
        "return a.sum(), kept(b, k=b), kept(b, 1), kept(p=b), kept(b, k=b), kept(b, True), kept(b, 1.0)",
        takes="p, q=1, *r, k=3",
    ),
    "typed, of keywords": keeping(
        "LOG.append((p, q, r, k))\nreturn [p, q]",
        "return a.sum(), kept(b, k=b), kept(b, 1), kept(p=b), kept(b, k=b), kept(b, True), kept(b, 1.0)",
        how="lru_cache(typed=True)",
        takes="p, q=1, *r, k=3",
    ),
    "two functions, and one result of each": """
@functools.lru_cache(1)
def other(p): LOG.append(('other', p)); return [p]
"""
    + keeping(
        "LOG.append(p)\nreturn [p, other(p)[0]]",
        "r = kept(b), other(b + 1), kept(b), other(b)\nreturn a.sum(), r, r[0] is r[2], other.cache_info()[1:]",
        how="lru_cache(maxsize=1)",
    ),
    "drops a result, and computes it again": keeping(
        "LOG.append(p)\nreturn [p]",
        "r = kept(1)\nif b > 2: kept(b), kept(b + 5), kept(1)\nreturn a.sum(), r, kept(1) is r",
        how="lru_cache(maxsize=2)",
    ),
    "knows tensors too": "\nHELD = made((3,), f32, 1)\n"
    + keeping(
        "LOG.append(type(p).__name__)\nreturn [q]",
        "if COUNT[0] == 0: kept(HELD, 1)\nCOUNT[0] += 1\nr = kept(b, 1)\nreturn a.sum(), r, kept(b, 1) is r",
        how="lru_cache(maxsize=2)",
        takes="p, q=1",
    ),
    "two functions, and a full cache": """
@functools.lru_cache(2)
def other(p): LOG.append(('other', p)); return [p]
"""
    + keeping(
        "return [p, other(p)[0], other(p + 5)[0]]",
        "r = other(1), other(2), kept(b), other(1)\nreturn a.sum(), r, other.cache_info()[1:]",
        how="lru_cache(maxsize=8)",
    ),
    "two results": keeping(
        "LOG.append(p)\nreturn [p]",
        "LOG.append(kept(b)); LOG.append(kept(b + 1))\nreturn a.sum()",
        how="lru_cache(maxsize=2)",
    ),
    "of objects with a hash": """
class V:
    def __init__(self, v): self.v = v
    def __hash__(self): COUNT[0] += 0; return hash(self.v)
    def __eq__(self, other): return self.v == other.v
V1, V2 = V(1), V(1)
@functools.lru_cache
def kept(p):
    LOG.append(p.v)
    return [p]
def program(a, b=2):
    return kept(V1) is kept(V2), kept(V(1)) is kept(V1), a + 1
""",
}


@pytest.mark.parametrize("settings", ["{}", "{'backend': 'eager'}", "{'dynamic': True}"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_bodies_run_as_often_as_in_eager(name: str, settings: str) -> None:
    found = session.examine(f"SETTINGS = {settings}\n{HEAD}{PROGRAMS[name]}{STEPS}")
    assert found is None, found


def test_functions_that_keep_results_are_compiled_once() -> None:
    one = functools.lru_cache(64)(lambda p: [p])
    other = functools.lru_cache(64)(lambda p, q=1: (p, q))
    it = type("It", (), {})()

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * one(2)[0] + other(3)[0] + other(3, q=2)[1] + other(it)[1] + other(5)[0] + one(7)[0]

    seen: list[events.Event] = []
    compiled, x = fusewright.compile(program), torch.ones(2)
    with events.STREAM.listening(seen.append):
        results = [compiled(x) for _ in range(3)]
    assert sum(isinstance(event, events.Compiled) for event in seen) == 1
    assert all(torch.equal(result, program(x)) for result in results)


class _Unhashable:
    def __eq__(self, other: object) -> bool:
        return NotImplemented


def test_of_what_has_no_hash() -> None:
    kept, it = functools.lru_cache(lambda p: 1), _Unhashable()

    def program(x: torch.Tensor) -> object:
        try:
            return kept(it)
        except TypeError as error:
            return x + 1, str(error)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an internal error warns
        found = fusewright.compile(program)(torch.ones(2))
    assert found[1] == program(torch.ones(2))[1]


def test_a_second_call_compiles_nothing() -> None:
    """Functions that ask one another's results, as those of einops do, are first asked inside the call."""

    class Recipe:
        def __init__(self, pattern: str) -> None:
            self.pattern = pattern

    @functools.lru_cache(256)
    def recipe(pattern: str) -> Recipe:
        return Recipe(pattern)

    @functools.lru_cache(1024)
    def shaped(recipe: Recipe, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape, len(recipe.pattern))

    def program(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        for pattern in ("a b", "b a c"):
            x = x * sum(shaped(recipe(pattern), (2, 3)))
        return x + shaped(recipe("a b"), (2, 3))[2]

    compiled = fusewright.compile(program)
    events: list[Event] = []
    with STREAM.listening(events.append):
        found = [compiled(torch.ones(2)) for _ in range(3)]
    assert [one.tolist() for one in found] == [program(torch.ones(2)).tolist()] * 3
    assert sum(isinstance(event, Compiled) for event in events) == 1
    assert shaped.cache_info()[1:] == (2, 1024, 2)
