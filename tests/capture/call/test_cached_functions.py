"""Functions that keep their results (functools.lru_cache): bodies run as often as in eager, in eager's order, and the cache
afterwards holds what eager's holds, whatever happens to it between calls.

Each row defines `program`, and perhaps `kept`, the function; `tests/fuzz/session.py` compares all that can be reached.
"""

from __future__ import annotations

import pytest

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
PROGRAMS = {
    "gives a dict": """
@functools.lru_cache
def kept(p):
    LOG.append(p)
    return {p: 1}
def program(a, b=2):
    found = kept(b)
    fusewright.graph_break()
    return a + 1, found, kept(b) is found
""",
    "gives an object, by name": """
@functools.lru_cache
def kept(p, q=1):
    return object() if q == 2 else {1: p}
def program(a, b=2):
    found = kept(b, q=1)
    return a + 1, found, kept(b, q=1) is found, type(kept(b, q=2))
""",
    "pops from a dict": """
@functools.lru_cache
def kept(p):
    return D0.pop('b', p)
def program(a, b=2):
    LOG.append(kept(b))
    return a + 1
""",
    "appends": """
@functools.lru_cache
def kept(p):
    LOG.append(p)
    return p
def program(a, b=2):
    LOG.append(kept(b))
    return a + 1
""",
    "asked twice, and for its figures": """
@functools.lru_cache
def kept(p):
    LOG.append(p)
    return p
def program(a, b=2):
    LOG.append(kept(b))
    LOG.append(kept(b))
    LOG.append(kept.cache_info()[1:])
    return a + 1
""",
    "gives a list": """
@functools.lru_cache
def kept(p):
    return [p]
def program(a, b=2):
    r = kept(b)
    r.append(1)
    return a + 1, r, kept(b) is r
""",
    "gives a tensor": """
@functools.lru_cache
def kept(p):
    return T0 + p
def program(a, b=2):
    return a + kept(b)
""",
    "reads what was written": """
@functools.cache
def kept(p):
    return GN
def program(a, b=2):
    global GN
    GN += 1
    return a + kept(b)
""",
    "raises": """
@functools.lru_cache
def kept(p):
    if p == 3: raise ValueError(p)
    return p
def program(a, b=2):
    try: LOG.append(kept(b))
    except ValueError as e: LOG.append(str(e))
    return a + 1
""",
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
    "breaks": """
@functools.lru_cache
def kept(p):
    fusewright.graph_break()
    LOG.append(p)
    return p
def program(a, b=2):
    LOG.append(kept(b))
    return a + 1
""",
    "is changed behind a break": """
@functools.lru_cache
def kept(p):
    LOG.append(p)
    return p
def program(a, b=2):
    LOG.append(kept(b))
    fusewright.graph_break()
    LOG.append(kept(b))
    kept.v = 1
    print(kept(b), end='')
    return a + 1
""",
    "reads a list that was written": """
@functools.lru_cache
def kept(p):
    return COUNT[0]
def program(a, b=2):
    COUNT[0] += 1
    return a + kept(b)
""",
    "one result": """
@functools.lru_cache(maxsize=1)
def kept(p):
    LOG.append(p)
    return p
def program(a, b=2):
    kept(1); kept(b); kept(1)
    return a + 1
""",
    "no result": """
@functools.lru_cache(maxsize=0)
def kept(p):
    LOG.append(p)
    return p
def program(a, b=2):
    kept(1); kept(b); kept(1)
    return a + 1
""",
    "typed": """
@functools.lru_cache(typed=True)
def kept(p):
    LOG.append(p)
    return p
def program(a, b=2):
    kept(1); kept(b); kept(1.0); kept(True)
    return a + 1
""",
    "reads a tensor's data that was written to": """
@functools.lru_cache
def kept(p):
    return T0.sum().item() + p
def program(a, b=2):
    T0.add_(1)
    LOG.append(kept(b))
    return a + 1
""",
    "reads a tensor that was written to": """
@functools.lru_cache
def kept(p):
    return T0 + p
def program(a, b=2):
    T0.add_(1)
    return a + kept(b).sum()
""",
    "makes a tensor": """
@functools.lru_cache
def kept(p):
    return torch.arange(p) * 2
def program(a, b=2):
    return a.sum() + kept(b), kept(b) is kept(b), kept(b)
""",
    "calls itself with effects": """
@functools.lru_cache
def kept(p):
    LOG.append(('body', p))
    return kept(p - 1) + kept(p - 2) if p > 1 else p
def program(a, b=2):
    return a.sum() + kept(b + 3), kept(4)
""",
    "calls itself": """
@functools.lru_cache
def kept(p):
    return kept(p - 1) + kept(p - 2) if p > 1 else p
def program(a, b=2):
    return a.sum() + kept(b + 3), kept(4)
""",
    "of a native function": """
@functools.lru_cache
def kept(p):
    return str(p).encode().hex() + str(hash(open)) [:0]
def program(a, b=2):
    COUNT[0] += 1
    return a.sum(), kept(b + 3), kept(4)
""",
    "of keywords": """
@functools.lru_cache
def kept(p, q=1, *r, k=3):
    LOG.append((p, q, r, k))
    return [p, q]
def program(a, b=2):
    return a.sum(), kept(b, k=b), kept(b, 1), kept(p=b), kept(b, k=b), kept(b, True), kept(b, 1.0)
""",
    "typed, of keywords": """
@functools.lru_cache(typed=True)
def kept(p, q=1, *r, k=3):
    LOG.append((p, q, r, k))
    return [p, q]
def program(a, b=2):
    return a.sum(), kept(b, k=b), kept(b, 1), kept(p=b), kept(b, k=b), kept(b, True), kept(b, 1.0)
""",
    "two results": """
@functools.lru_cache(maxsize=2)
def kept(p):
    LOG.append(p)
    return [p]
def program(a, b=2):
    LOG.append(kept(b)); LOG.append(kept(b + 1))
    return a.sum()
""",
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
