"""Kinds of state that a program can read, and what may happen to them between two calls: a table of state.py.

Each row gives Python text: `setup` makes the state, `read` is an expression over `names`, each of `changes` is a
statement that changes the state, `restore` puts process-wide state back. In the texts $I is the row's number in its
program (so that names differ), $V any constant, $N a number, $S a short string, $E a name that all programs share.
Always holds: everything that a row changes is reachable from its own names, or is put back by `restore`; what changes
process-wide state does the same when it is done twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

real_round = round
_originals: dict[tuple[object, str], object] = {}


def note_original(owner: Any, name: str) -> None:
    """Keeps what a module or class of PyTorch holds under a name, or that it holds nothing."""
    _originals[owner, name] = vars(owner).get(name, _originals)


def put_back(owner: Any, name: str) -> None:
    original, held = _originals[owner, name], vars(owner).get(name, _originals)
    if original is held:  # a store would clear what the interpreter has cached of the class
        return
    if original is not _originals:
        setattr(owner, name, original)
    else:
        delattr(owner, name)


class AddOne(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result + 1 if isinstance(result, torch.Tensor) and func is torch.Tensor.add else result


class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.add.Tensor else result


_inference: list[object] = []


def leave_modes() -> None:
    _inference.clear()
    torch.set_grad_enabled(True)
    while torch._C._len_torch_dispatch_stack():
        torch.utils._python_dispatch._pop_mode()
    while torch._C._len_torch_function_stack():
        torch.overrides._pop_mode()


def enter_inference() -> None:
    if not _inference:
        _inference.append(torch._C._InferenceMode(True))
    torch.set_grad_enabled(False)



@dataclass(frozen=True)
class Kind:
    """names: globals that the read needs (they may be handed over as arguments, closure cells or defaults instead)
    steady: reading it twice without a change needs no recompile
    backends: a graph of PyTorch's own calls raises what they raise, but not inside the program's try block"""

    name: str
    names: str
    setup: str
    read: str
    changes: tuple[str, ...]
    restore: str = ""
    steady: bool = True
    backends: tuple[str, ...] = ("eager", "aot_eager", "native")


# f32: float32; float64 in the world that says what is right.
PRELUDE = """
import abc, array, builtins, collections, contextvars, copy, dataclasses, decimal, enum, functools, inspect, itertools, logging, math
import operator, os, random, sys, threading, types, typing, weakref
import numpy as np
import torch
import fusewright
from tests.fuzz.state_kinds import AddOne, Doubling, enter_inference, leave_modes, put_back, real_round

def fixed(module):
    # parameters that float32 holds exactly
    for number, held in enumerate(module.parameters()):
        held.data = ((torch.arange(held.numel()) * 7 + number) % 9 / 4 - 1).reshape(held.shape).to(f32)
    return module
def written(result):
    # what a caller may do with its results
    for leaf in torch.utils._pytree.tree_leaves(result):
        with contextlib.suppress(RuntimeError), torch.no_grad():
            if isinstance(leaf, torch.Tensor): leaf.add_(1)
    return result
class MyInt(int): pass
class MyStr(str): pass
class MyFloat(float): pass
class MyTuple(tuple): pass
class MyList(list): pass
class MyDict(dict): pass
class Color(enum.Enum):
    RED = 1
    BLUE = 2
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2
Pair = collections.namedtuple("Pair", "a b")
class Plain:
    def __init__(self, **values): self.__dict__.update(values)
"""

VALUES = (
    "0", "1", "True", "False", "1.0", "0.0", "-0.0", "float('nan')", "float('inf')", "2", "-1", "10**30", "'a'", "'b'", "''", "b'a'",
    "None", "(1, 2)", "(1, True)", "(1.0, 2)", "()", "1j", "complex(0.0, -0.0)", "range(3)", "range(0, 3, 2)", "slice(1, 2)",
    "slice(1, True)", "frozenset({1})", "frozenset({True})", "MyInt(1)", "MyStr('a')", "MyFloat(0.0)", "Color.RED", "Color.BLUE", "Level.LOW",
    "torch.float32", "torch.float64", "torch.device('cpu')", "torch.Size([2])", "...", "int", "float", "[1, 2]", "[1, True]", "{'a': 1}",
    "{'a': True}", "{1: 2}", "{True: 2}", "{1, 2}", "Pair(1, 2)", "Pair(1, 2.0)", "MyTuple((1, 2))", "MyList([1])", "MyDict(a=1)",
    "np.float64(0.0)", "np.float64(-0.0)", "np.int64(1)", "np.int32(1)", "np.bool_(True)", "decimal.Decimal('1.0')", "bytearray(b'a')",
    "NotImplemented", "torch.strided", "torch.preserve_format", "2**63", "2**31", "1e-320", "'\\ud800'", "len", "math.sin",
    "torch.ones(2)", "torch.ones(2, dtype=torch.int64)", "torch.zeros(2, 3)", "torch.zeros(3, 2).t()", "torch.tensor(1.0)",
)  # fmt: skip
NUMBERS = ("0", "1", "True", "1.0", "2", "-0.0", "0.5", "-1", "3", "0.0", "float('inf')", "7")
STRINGS = ("'a'", "'b'", "'c'", "'d'")

KINDS: tuple[Kind, ...] = (
    # constants and builtin containers
    Kind("constant", "o$I", "o$I = $V", "o$I", ("o$I = $V", "o$I = $V", "o$I = copy.deepcopy(o$I)")),
    Kind("number in arithmetic", "o$I", "o$I = $N", "x * o$I", ("o$I = $N",)),
    Kind("list item", "o$I", "o$I = [$V, $V]", "(o$I[0], o$I[-1])",
         ("o$I[0] = $V", "o$I[1] = $V", "o$I.insert(0, $V)", "o$I.reverse()", "o$I = o$I[:1]", "o$I = tuple(o$I)", "o$I = MyList(o$I)")),
    Kind("list length", "o$I", "o$I = [1]", "len(o$I)", ("o$I.append(1)", "o$I.clear()", "o$I = (1, 2)", "o$I = 'ab'", "o$I = {1: 2}")),
    Kind("list as a whole", "o$I", "o$I = [$V]", "list(o$I)", ("o$I.append($V)", "o$I *= 2", "o$I[:] = [$V]", "o$I.clear()")),
    Kind("list written", "o$I", "o$I = [$N]", "(o$I.append(len(o$I)), len(o$I))[1]", ("o$I[0] = $V", "o$I.clear()", "o$I.append($V)"), steady=False),
    Kind("list truth", "o$I", "o$I = []", "1 if o$I else 2", ("o$I.append($V)", "o$I.clear()", "o$I = None", "o$I = $V"), steady=False),
    Kind("list membership", "o$I", "o$I = [$V, $V]", "1 in o$I", ("o$I[0] = $N", "o$I.append(1)", "o$I.clear()"), steady=False),
    Kind("nested", "o$I", "o$I = [[$V], {'k': ($V, [$V])}]", "(o$I[0][0], o$I[1]['k'][1][0], o$I[1]['k'][0])",
         ("o$I[0][0] = $V", "o$I[1]['k'][1][0] = $V", "o$I[1]['k'] = ($V, [$V])", "o$I[1] = {'k': ($V, [$V])}", "o$I[0] = [$V, $V]")),
    Kind("shared list", "o$I,p$I", "o$I = [$N]; p$I = o$I", "(o$I.append(1), len(p$I), o$I is p$I)[1:]",
         ("p$I = list(o$I)", "p$I = o$I", "o$I = [$N]", "o$I.clear()"), steady=False),
    Kind("dict item", "o$I", "o$I = {'a': $V, 'b': $V}", "o$I['a']",
         ("o$I['a'] = $V", "o$I['b'] = $V", "o$I = dict(o$I)", "o$I = MyDict(o$I)", "o$I = collections.OrderedDict(o$I)", "del o$I['a']",
          "o$I.clear()", "o$I = collections.defaultdict(int, b=1)", "o$I.setdefault('a', $V)"), steady=False),
    Kind("dict order", "o$I", "o$I = {'a': 1, 'b': 2, 'c': 3}", "(list(o$I), list(o$I.items()))",
         ("o$I['a'] = o$I.pop('a', 0)", "o$I['d'] = 1", "o$I.pop('b', 0)", "o$I['b'] = $V", "o$I = dict(reversed(o$I.items()))")),
    Kind("dict presence", "o$I", "o$I = {'a': 1}", "('b' in o$I, o$I.get('b', 5), len(o$I))",
         ("o$I['b'] = $V", "o$I.pop('b', 0)", "o$I['c'] = 1", "o$I.clear()")),
    Kind("dict keys by type", "o$I", "o$I = {1: 'x'}", "(list(o$I), o$I.get(1), o$I.get(True))",
         ("o$I = {True: 'x'}", "o$I = {1.0: 'x'}", "o$I = {1: 'x'}", "o$I = {MyInt(1): 'x'}", "o$I[1] = $V", "o$I = {Level.LOW: 'x'}")),
    Kind("dict written", "o$I", "o$I = {'a': $N}", "(o$I.update(b=len(o$I)), o$I['b'])[1]",
         ("o$I['a'] = $V", "o$I.clear()", "o$I['c'] = 1", "o$I.pop('b', 0)"), steady=False),
    Kind("ordered dict", "o$I", "o$I = collections.OrderedDict(a=1, b=2)", "(list(o$I), o$I['a'] if 'a' in o$I else 0)",
         ("o$I.move_to_end(next(iter(o$I)))", "o$I['a'] = $V", "o$I.popitem()" + "; o$I['b'] = 3", "o$I['c'] = 1")),
    Kind("default dict", "o$I", "o$I = collections.defaultdict(int, a=1)", "o$I['b']",
         ("o$I.default_factory = list", "o$I.default_factory = float", "o$I['b'] = $V", "o$I.pop('b', 0)",
          "o$I = collections.defaultdict(lambda: $N)", "o$I.default_factory = None"), steady=False),
    Kind("default dict, Python factory", "o$I,n$I", "n$I = $N; o$I = collections.defaultdict(lambda: n$I)", "o$I['b']",
         ("n$I = $N; o$I.pop('b', 0)", "o$I['b'] = $V"), steady=False),
    Kind("counter", "o$I", "o$I = collections.Counter('aab')", "(o$I['a'], o$I['z'], o$I.most_common(1))",
         ("o$I['a'] += 1", "o$I['z'] = 9", "del o$I['a']", "o$I.update('bbb')")),
    Kind("chain map", "o$I,p$I", "p$I = {'a': 1}; o$I = collections.ChainMap({}, p$I)", "o$I['a']",
         ("p$I['a'] = $V", "o$I.maps[0]['a'] = $V", "o$I.maps.reverse()", "o$I.maps[0].clear(); p$I['a'] = $N")),
    Kind("user dict", "o$I", "o$I = collections.UserDict(a=$V)", "(o$I['a'], len(o$I))", ("o$I['a'] = $V", "o$I['b'] = 1", "o$I.data = {'a': $V}")),
    Kind("dict subclass, missing", "o$I,C$I", "class C$I(dict):\n    def __missing__(self, key): return $N\no$I = C$I()", "o$I['z']",
         ("o$I['z'] = $V", "o$I.pop('z', 0)", "C$I.__missing__ = lambda self, key: $N", "C$I.__getitem__ = lambda self, key: $N")),
    Kind("deque", "o$I", "o$I = collections.deque([1, 2, 3], maxlen=4)", "(o$I[0], list(o$I), o$I.maxlen)",
         ("o$I.rotate(1)", "o$I.append($V)", "o$I[0] = $V", "o$I = collections.deque(o$I)", "o$I = collections.deque(o$I, 3)")),
    Kind("set", "o$I", "o$I = {1, 2}", "(1 in o$I, len(o$I), sorted(o$I))",
         ("o$I.add(3)", "o$I.discard(1)", "o$I = frozenset(o$I)", "o$I = {True, 2}", "o$I = {1.0}", "o$I.clear()"), steady=True),
    Kind("set order", "o$I", "o$I = {8, 0}", "list(o$I)", ("o$I = {0, 8}", "o$I.clear(); o$I.update((0, 8))", "o$I.clear(); o$I.update((8, 0))")),
    Kind("frozenset", "o$I", "o$I = frozenset({1, 2})", "(1 in o$I, len(o$I), o$I)",
         ("o$I = frozenset({1, 3})", "o$I = frozenset({True, 2})", "o$I = frozenset({1.0, 2})", "o$I = {1, 2}")),
    Kind("bytearray", "o$I", "o$I = bytearray(b'abc')", "(o$I[0], len(o$I), bytes(o$I))", ("o$I[0] = 98", "o$I.append(1)", "o$I = bytearray(b'abc')")),
    Kind("memoryview", "o$I,p$I", "p$I = bytearray(b'abc'); o$I = memoryview(p$I)", "o$I[0]", ("p$I[0] = 98", "p$I[0] = 97")),
    Kind("array", "o$I", "o$I = array.array('i', [1, 2])", "(o$I[0], len(o$I))", ("o$I[0] = 5", "o$I.append(1)")),
    Kind("dict view", "o$I,p$I", "p$I = {'a': 1}; o$I = p$I.keys()", "(list(o$I), len(o$I), 'b' in o$I)", ("p$I['b'] = 1", "p$I.pop('a', 0)", "p$I['a'] = 2")),
    Kind("dict values view", "o$I,p$I", "p$I = {'a': 1}; o$I = p$I.values()", "sum(o$I)", ("p$I['b'] = 1", "p$I['a'] = 2", "p$I.clear()")),
    Kind("dict items view", "o$I,p$I", "p$I = {'a': 1}; o$I = p$I.items()", "[k for k, v in o$I if v]", ("p$I['b'] = 1", "p$I['a'] = 0", "p$I.clear()")),
    Kind("mapping proxy", "o$I,p$I", "p$I = {'a': 1}; o$I = types.MappingProxyType(p$I)", "(o$I['a'], list(o$I))",
         ("p$I['a'] = $V", "p$I['b'] = 1", "p$I['a'] = p$I.pop('a')")),
    Kind("tuple of objects", "o$I", "o$I = (Plain(a=$V), [1])", "(o$I[0].a, o$I[1][0])", ("o$I[0].a = $V", "o$I[1][0] = $V", "o$I = (Plain(a=1), [2])")),
    Kind("named tuple", "o$I", "o$I = Pair($V, [1])", "(o$I.a, o$I.b[0])", ("o$I = o$I._replace(a=$V)", "o$I.b[0] = $V", "o$I = Pair(*o$I)")),
    Kind("iterator", "o$I", "o$I = iter([1, 2, 3, 4, 5, 6, 7, 8, 9])", "next(o$I, None)", ("next(o$I, None)", "o$I = iter([5])"), steady=False),
    Kind("generator", "o$I", "o$I = (i * 2 for i in range(50))", "next(o$I, None)", ("next(o$I, None)", "o$I = (i for i in [5])"), steady=False),
    Kind("enumerate object", "o$I", "o$I = enumerate([5, 6])", "list(o$I)", ("o$I = enumerate([7])", "next(o$I, None)"), steady=False),
    Kind("counter object", "o$I", "o$I = itertools.count()", "next(o$I)", ("next(o$I)",), steady=False),
    Kind("slice", "o$I", "o$I = slice(0, 1)", "[1, 2, 3][o$I]", ("o$I = slice(0, 2)", "o$I = slice(None)", "o$I = slice(0, True)")),
    Kind("numpy array", "o$I", "o$I = np.ones(2)", "float(o$I[0])", ("o$I[0] += 1", "o$I = np.zeros(2)", "o$I = np.ones(2, dtype=np.int64)"), steady=False),
    Kind("numpy into torch", "o$I", "o$I = np.ones(2, dtype=np.float32)", "x[:2] + torch.from_numpy(o$I)", ("o$I += 1", "o$I = np.zeros(2, dtype=np.float32)"), steady=False),
    Kind("int subclass with attributes", "o$I", "o$I = MyInt(1); o$I.a = 1", "(o$I + 1, o$I.a)", ("o$I.a = $V", "o$I = MyInt(2); o$I.a = 1"), steady=True),
    Kind("list subclass attributes", "o$I", "o$I = MyList([1]); o$I.a = 1", "(o$I[0], o$I.a)", ("o$I.a = $V", "o$I[0] = $V", "o$I.append(1)")),
    # objects and classes
    Kind("attribute", "o$I", "o$I = Plain(a=$V)", "o$I.a", ("o$I.a = $V", "o$I.b = 1", "o$I = Plain(a=$V)", "del o$I.a", "o$I.__dict__ = {'a': $V}",
         "o$I.__dict__['a'] = $V", "vars(o$I).clear()")),
    Kind("attribute or default", "o$I", "o$I = Plain()", "(getattr(o$I, 'a', 7), hasattr(o$I, 'b'))", ("o$I.a = $V", "o$I.b = 1", "o$I = Plain(b=$V)", "vars(o$I).clear()")),
    Kind("attribute written", "o$I", "o$I = Plain(a=1)", "setattr(o$I, 'a', o$I.a + 1) or o$I.a", ("o$I.a = 5", "o$I = Plain(a=2)", "o$I.b = 1"), steady=False),
    Kind("vars", "o$I", "o$I = Plain(a=1)", "(dict(vars(o$I)), len(o$I.__dict__))", ("o$I.a = $V", "o$I.b = 1", "o$I.__dict__ = {'z': 2}", "del o$I.a; o$I.a = 3")),
    Kind("class attribute", "o$I,C$I", "class C$I: a = $V\no$I = C$I()", "(o$I.a, C$I.a)", ("C$I.a = $V", "o$I.a = $V", "vars(o$I).clear()", "C$I.a = property(lambda self: $N)",
         "C$I.__getattr__ = lambda self, name: 5", "C$I.__getattribute__ = lambda self, name: $N", "del C$I.a", "C$I.a = staticmethod(abs)")),
    Kind("inherited attribute", "o$I,B$I,C$I", "class B$I: a = $V\nclass M$I(B$I): pass\nclass C$I(M$I): pass\no$I = C$I()", "o$I.a",
         ("B$I.a = $V", "M$I.a = $V", "C$I.a = $V", "o$I.a = $V", "M$I.a = property(lambda self: $N)", "C$I.__bases__ = (B$I,)", "C$I.__bases__ = (M$I,)")),
    Kind("class changed", "o$I,C$I,D$I", "class C$I:\n    def m(self): return 1\nclass D$I(C$I):\n    def m(self): return $N\no$I = C$I()",
         "(o$I.m(), type(o$I).__name__, isinstance(o$I, D$I))", ("o$I.__class__ = D$I", "o$I.__class__ = C$I", "C$I.m = lambda self: $N", "o$I.m = lambda: $N", "vars(o$I).clear()")),
    Kind("property", "o$I,C$I", "class C$I:\n    @property\n    def a(self): return self.b\no$I = C$I(); o$I.b = $V", "o$I.a",
         ("o$I.b = $V", "C$I.a = property(lambda self: (self.b, 1))", "C$I.a = $N", "o$I.__dict__['a'] = $N", "C$I.b = property(lambda self: $N)", "C$I.a = C$I.__dict__['a']")),
    Kind("descriptor", "o$I,C$I,D$I", "class D$I:\n    def __init__(self, v): self.v = v\n    def __get__(self, obj, cls=None): return self.v\nclass C$I: a = D$I($V)\no$I = C$I()",
         "o$I.a", ("C$I.__dict__['a'].v = $V", "C$I.a = D$I($V)", "o$I.__dict__['a'] = $V", "D$I.__set__ = lambda self, obj, value: None",
         "D$I.__get__ = lambda self, obj, cls=None: $N", "C$I.a = $V")),
    Kind("cached property", "o$I,C$I", "class C$I:\n    @functools.cached_property\n    def a(self): return self.b\no$I = C$I(); o$I.b = $V", "o$I.a",
         ("o$I.b = $V", "o$I.__dict__.pop('a', None)", "o$I.a = $V", "o$I = C$I(); o$I.b = $V"), steady=False),
    Kind("getattr fallback", "o$I,C$I", "class C$I:\n    def __getattr__(self, name): return name\no$I = C$I()", "o$I.zz",
         ("o$I.zz = $V", "C$I.zz = $V", "C$I.__getattr__ = lambda self, name: $N", "vars(o$I).clear()", "del C$I.__getattr__")),
    Kind("slots", "o$I,C$I", "class C$I:\n    __slots__ = ('a', 'b')\no$I = C$I(); o$I.a = $V", "(o$I.a, getattr(o$I, 'b', None))",
         ("o$I.a = $V", "o$I.b = $V", "del o$I.a", "o$I = C$I(); o$I.a = $V", "C$I.a = $N")),
    Kind("method", "o$I,C$I", "class C$I:\n    def m(self, k=$N): return (k, self.a)\no$I = C$I(); o$I.a = $V", "o$I.m()",
         ("o$I.a = $V", "C$I.m.__defaults__ = ($V,)", "C$I.m = lambda self: $N", "o$I.m = lambda: $N", "C$I.m.__code__ = (lambda self, k=1: (k, 2)).__code__", "vars(o$I).pop('m', 0)")),
    Kind("bound method object", "o$I,m$I,C$I", "class C$I:\n    def m(self): return self.a\no$I = C$I(); o$I.a = $V; m$I = o$I.m", "m$I()",
         ("o$I.a = $V", "C$I.m = lambda self: $N", "m$I = Plain.__init__.__get__(o$I) and (lambda: 1)", "m$I = C$I.m.__get__(Plain(a=$V))")),
    Kind("class method", "C$I,D$I", "class C$I:\n    a = $V\n    @classmethod\n    def m(cls): return cls.a\nclass D$I(C$I): pass", "(C$I.m(), D$I.m())",
         ("C$I.a = $V", "D$I.a = $V", "C$I.m = classmethod(lambda cls: $N)", "D$I.m = staticmethod(lambda: $N)")),
    Kind("super", "o$I,B$I,C$I", "class B$I:\n    def m(self): return $N\nclass C$I(B$I):\n    def m(self): return (1, super().m())\no$I = C$I()", "o$I.m()",
         ("B$I.m = lambda self: $N", "C$I.__bases__ = (type('Z', (B$I,), {'m': lambda self: 'z'}),)", "C$I.m = lambda self: $N")),
    Kind("metaclass", "C$I,M$I", "class M$I(type):\n    @property\n    def a(cls): return cls.b\n    c = $V\nclass C$I(metaclass=M$I): b = $V", "(C$I.a, C$I.c)",
         ("C$I.b = $V", "M$I.a = property(lambda cls: $N)", "M$I.c = $V", "C$I.c = $V")),
    *(Kind(f"special {method}", "o$I,C$I", f"class C$I:\n    def {method}(self, *args): return self.a\no$I = C$I(); o$I.a = {first}", read,
           (f"o$I.a = {second}", f"o$I.a = {first}", f"C$I.{method} = lambda self, *args: {second}", f"C$I.{method} = lambda self, *args: {first}"),
           steady="iter(" not in first)  # a call uses the iterator up
      for method, read, first, second in (
          ("__len__", "len(o$I)", "2", "3"), ("__bool__", "1 if o$I else 2", "True", "False"), ("__call__", "o$I(1)", "2", "3"),
          ("__eq__", "o$I == 1", "True", "False"), ("__ne__", "o$I != 1", "True", "False"), ("__lt__", "o$I < 1", "True", "False"),
          ("__hash__", "hash(o$I)", "2", "3"), ("__iter__", "list(o$I)", "iter(())", "iter((1,))"), ("__contains__", "1 in o$I", "True", "False"),
          ("__getitem__", "o$I['k']", "2", "3"), ("__add__", "o$I + 1", "2", "3"), ("__radd__", "1 + o$I", "2", "3"), ("__neg__", "-o$I", "2", "3"),
          ("__str__", "str(o$I)", "'p'", "'q'"), ("__repr__", "repr(o$I)", "'p'", "'q'"), ("__format__", "f'{o$I:x}'", "'p'", "'q'"),
          ("__int__", "int(o$I)", "2", "3"), ("__float__", "float(o$I)", "2.0", "3.0"), ("__index__", "[1, 2, 3, 4][o$I]", "2", "3"),
          ("__abs__", "abs(o$I)", "2", "3"), ("__round__", "round(o$I)", "2", "3"), ("__matmul__", "o$I @ 1", "2", "3"), ("__mul__", "x * o$I", "2", "3"),
          ("__rmul__", "x * o$I", "2", "3"), ("__reversed__", "list(reversed(o$I))", "iter(())", "iter((1,))"), ("__iadd__", "operator.iadd(o$I, 1)", "2", "3"),
          ("__enter__", "o$I.__enter__()", "2", "3"), ("__length_hint__", "operator.length_hint(o$I)", "2", "3"), ("__bytes__", "bytes(o$I)", "b'p'", "b'q'"),
          ("__divmod__", "divmod(o$I, 1)", "2", "3"), ("__trunc__", "math.trunc(o$I)", "2", "3"), ("__dir__", "dir(o$I)", "['p']", "['q']"),
          ("__sizeof__", "o$I.__sizeof__()", "2", "3"), ("__class_getitem__", "C$I[1]", "2", "3") if False else ("__fspath__", "os.fspath(o$I)", "'p'", "'q'"),
      )),
    # outside elements compared and hashed by native containers
    *(Kind(f"equality in {label}", "o$I,p$I,C$I", "class C$I:\n    def __init__(self, v): self.v = v\n    def __eq__(self, other): return self.v == getattr(other, 'v', other)\n"
           "    def __hash__(self): return 1\n    def __lt__(self, other): return self.v < other.v\no$I = C$I(1); p$I = C$I(2)", read,
           ("o$I.v = 2", "p$I.v = 1", "o$I.v = 1", "C$I.__eq__ = lambda self, other: True", "C$I.__eq__ = lambda self, other: False", "C$I.__lt__ = lambda self, other: True", "p$I.v = 0"),
           steady=steady)
      for label, read, steady in (
          ("list ==", "[o$I] == [p$I]", True), ("tuple ==", "(o$I, 1) == (p$I, 1)", True), ("dict ==", "{'a': o$I} == {'a': p$I}", True), ("list <", "[o$I] < [p$I]", True),
          ("tuple !=", "(o$I,) != (p$I,)", True), ("list in", "o$I in [p$I]", True), ("tuple in", "p$I in (1, o$I)", True), ("set in", "o$I in {p$I}", True), ("dict in", "o$I in {p$I: 1}", True),
          ("dict get", "{p$I: 1}.get(o$I, 5)", True), ("dict item", "{p$I: 1, 3: 4}[3]", True), ("set of both", "len({o$I, p$I})", True), ("dict of both", "len({o$I: 1, p$I: 2})", True),
          ("list index", "[1, p$I, 2].index(o$I) if o$I == p$I else -1", True), ("list count", "[p$I, p$I].count(o$I)", True), ("values", "o$I in {'a': p$I}.values()", True),
          ("sorted", "[e.v for e in sorted([p$I, o$I])]", True), ("min", "min(p$I, o$I).v", True), ("nested", "[[o$I]] == [[p$I]]", True), ("set ==", "{o$I} == {p$I}", True), ("set |", "len({o$I} | {p$I})", True),
          ("tuple max", "max((1, o$I), (1, p$I))[0]", True), ("frozenset", "len(frozenset([o$I, p$I]))", True), ("set add", "(lambda s: (s.add(o$I), len(s))[1])({p$I})", True),
          ("dict set", "(lambda d: (d.__setitem__(o$I, 1), len(d))[1])({p$I: 1})", True), ("remove", "(lambda l: (l.remove(o$I) if o$I == p$I else None, len(l))[1])([p$I])", True),
          ("dict from pairs", "len(dict([(o$I, 1), (p$I, 2)]))", True), ("Counter", "len(collections.Counter([o$I, p$I]))", True), ("deque ==", "collections.deque([o$I]) == collections.deque([p$I])", True),
          ("groupby", "len(list(itertools.groupby([o$I, p$I])))", True), ("operator.eq", "operator.eq([o$I], [p$I])", True), ("operator.contains", "operator.contains([p$I], o$I)", True),
          ("items ==", "{'a': o$I}.items() == {'a': p$I}.items()", True), ("setdefault", "{p$I: 1}.setdefault(o$I, 9)", True), ("set pop", "({p$I}.discard(o$I), len({p$I} - {o$I}))[1]", True),
          ("countOf", "operator.countOf([p$I], o$I)", True), ("dict |", "len({o$I: 1} | {p$I: 1})", True), ("hash", "hash((o$I, 1)) == hash((p$I, 1))", True), ("fromkeys", "len(dict.fromkeys([o$I, p$I]))", True),
          ("partial", "functools.partial(operator.eq, o$I)(p$I)", True), ("set compare", "{o$I} <= {p$I}", True), ("comprehension", "len({e for e in (o$I, p$I)})", True),
      )),
    Kind("hash in dict", "o$I,p$I,C$I", "class C$I:\n    def __init__(self, v): self.v = v\n    def __eq__(self, other): return True\n    def __hash__(self): return self.v\n"
         "o$I = C$I(1); p$I = C$I(2)", "(len({o$I, p$I}), o$I in {p$I: 1}, {p$I: 1}.get(o$I))", ("o$I.v = 2", "p$I.v = 1", "o$I.v = 1", "C$I.__hash__ = lambda self: 3", "C$I.__hash__ = lambda self: self.v")),
    Kind("dataclass", "o$I,C$I", "@dataclasses.dataclass\nclass C$I:\n    a: object = 1\n    b: object = 2\no$I = C$I($V)", "(o$I.a, o$I.b, o$I == C$I(1), dataclasses.asdict(o$I)['b'])",
         ("o$I.a = $V", "o$I.b = $V", "o$I = C$I(1)", "del o$I.b", "C$I.b = $N"), steady=False),
    Kind("frozen dataclass", "o$I,C$I", "@dataclasses.dataclass(frozen=True)\nclass C$I:\n    a: object = 1\no$I = C$I($V)", "(o$I.a, hash(o$I) == hash(C$I(1)) if isinstance(o$I.a, int) else 0)",
         ("o$I = C$I($V)", "object.__setattr__(o$I, 'a', $V)", "o$I = dataclasses.replace(o$I, a=1)", "o$I = C$I(1)")),
    Kind("enum member", "o$I,C$I", "class C$I(enum.Enum):\n    A = 1\n    B = 2\n    @property\n    def twice(self): return self.value * 2\no$I = C$I.A", "(o$I.value, o$I.name, o$I.twice, o$I is C$I.A)",
         ("o$I = C$I.B", "o$I = C$I.A", "C$I.A._value_ = 5", "C$I.A.extra = 1", "C$I.twice = property(lambda self: $N)")),
    Kind("enum class", "C$I", "class C$I(enum.Enum):\n    A = 1", "[m.name for m in C$I]", ("class C$I(enum.Enum):\n    A = 1\n    B = 2", "class C$I(enum.Enum):\n    Z = 1")),
    Kind("simple namespace", "o$I", "o$I = types.SimpleNamespace(a=$V)", "o$I.a", ("o$I.a = $V", "o$I.b = 1", "o$I = types.SimpleNamespace(a=$V)", "o$I.__dict__['a'] = $V")),
    Kind("isinstance of a class", "o$I,C$I", "o$I = 1; C$I = int", "isinstance(o$I, C$I)", ("C$I = str", "C$I = (str, int)", "o$I = True", "o$I = 'a'", "C$I = bool")),
    Kind("abstract base class", "o$I,A$I,C$I", "class A$I(abc.ABC): pass\nclass C$I: pass\no$I = C$I()", "(isinstance(o$I, A$I), issubclass(C$I, A$I))", ("A$I.register(C$I)", "o$I = 1", "A$I.register(int)")),
    Kind("subclass hook", "o$I,A$I,C$I", "class A$I(abc.ABC):\n    @classmethod\n    def __subclasshook__(cls, other): return hasattr(other, 'quack')\nclass C$I: pass\nclass D$I: quack = 1\no$I = C$I()",
         "isinstance(o$I, A$I)", ("o$I = D$I()", "o$I = C$I()", "A$I.register(C$I)")),
    Kind("protocol", "o$I,P$I", "@typing.runtime_checkable\nclass P$I(typing.Protocol):\n    def quack(self): ...\nclass C$I: pass\no$I = C$I()", "isinstance(o$I, P$I)",
         ("o$I.quack = lambda: 1", "C$I.quack = lambda self: 1", "o$I = C$I()")),
    Kind("instance check", "o$I,M$I,C$I", "class M$I(type):\n    def __instancecheck__(cls, o): return cls.flag\nclass C$I(metaclass=M$I): flag = True\no$I = 1", "isinstance(o$I, C$I)",
         ("C$I.flag = False", "C$I.flag = True", "M$I.__instancecheck__ = lambda cls, o: False")),
    Kind("callable", "o$I,C$I", "class C$I: pass\no$I = C$I()", "callable(o$I)", ("C$I.__call__ = lambda self: 1", "o$I = len", "o$I = 1")),
    Kind("identity", "o$I,p$I", "o$I = Plain(); p$I = Plain()", "o$I is p$I", ("p$I = o$I", "p$I = Plain()", "o$I = p$I = None", "o$I = Plain()")),
    Kind("identity of elements", "o$I", "o$I = [Plain(), Plain()]", "(o$I[0] is o$I[1], o$I[0] in o$I[1:])", ("o$I[1] = o$I[0]", "o$I[1] = Plain()", "o$I.reverse()")),
    Kind("id in dict", "o$I,p$I", "o$I = Plain(); p$I = {id(o$I): 1}", "p$I.get(id(o$I), 0)", ("o$I = Plain(before=o$I)", "p$I = {id(o$I): 2}", "p$I.clear()")),
    Kind("object key", "o$I,p$I", "o$I = Plain(); p$I = {o$I: 1}", "p$I.get(o$I, 0)", ("p$I[o$I] = $V", "o$I = Plain()", "p$I.clear()", "p$I = {o$I: 3}")),
    Kind("class and type key", "p$I", "p$I = {int: 1, Plain: 2}", "(p$I[int], p$I.get(Plain), p$I.get(str))", ("p$I[int] = $V", "p$I[str] = 1", "p$I.pop(Plain, 0)")),
    Kind("copy", "o$I", "o$I = Plain(a=[1])", "(copy.copy(o$I).a is o$I.a, copy.deepcopy(o$I).a)", ("o$I.a.append(2)", "o$I.a = $V", "Plain.__copy__ = lambda self: Plain(a=1)"), restore="Plain.__dict__.get('__copy__') and delattr(Plain, '__copy__')"),
    Kind("weak reference", "o$I,w$I", "o$I = Plain(a=1); w$I = weakref.ref(o$I)", "(w$I() is not None and w$I().a)", ("o$I.a = $V", "o$I = None", "o$I = Plain(a=2); w$I = weakref.ref(o$I)"), steady=True),
    Kind("weak dictionary", "o$I,w$I", "o$I = Plain(a=1); w$I = weakref.WeakKeyDictionary({o$I: 1})", "len(w$I)", ("o$I = None", "o$I = Plain(); w$I[o$I] = 2"), steady=False),
    Kind("thread local", "o$I", "o$I = threading.local(); o$I.a = $V", "o$I.a", ("o$I.a = $V", "o$I = threading.local(); o$I.a = $V"), steady=False),
    Kind("context variable", "o$I", "o$I = contextvars.ContextVar('o'); o$I.set($V)", "o$I.get()", ("o$I.set($V)", "o$I.set($N)"), steady=False),
    # functions
    Kind("helper", "h$I", "def h$I(): return $V", "h$I()", ("def h$I(): return $V", "h$I.__code__ = (lambda: $N).__code__", "h$I = lambda: $N", "h$I = abs.__class__ and (lambda: $N)")),
    Kind("helper default", "h$I", "def h$I(a=$V, *, b=$V): return (a, b)", "h$I()", ("h$I.__defaults__ = ($V,)", "h$I.__kwdefaults__ = {'b': $V}", "h$I.__kwdefaults__['b'] = $V", "def h$I(a=1, *, b=$V): return (a, b)",
         "h$I.__defaults__ = ([$N],)")),
    Kind("mutable default", "h$I", "def h$I(a=[$V]): return a[0]", "h$I()", ("h$I.__defaults__[0][0] = $V", "h$I.__defaults__ = ([$V],)", "h$I.__defaults__[0].insert(0, $V)")),
    Kind("helper closure", "h$I", "def make$I(a):\n    def h(): return a\n    return h\nh$I = make$I($V)", "h$I()", ("h$I.__closure__[0].cell_contents = $V", "h$I = make$I($V)", "h$I = make$I([$N])")),
    Kind("closure of a closure", "h$I", "def make$I(a):\n    def inner(): return a\n    def h(): return inner()\n    return h\nh$I = make$I($V)", "h$I()",
         ("h$I.__closure__[0].cell_contents.__closure__[0].cell_contents = $V", "h$I = make$I($V)", "h$I.__closure__[0].cell_contents = lambda: $N", "h$I.__closure__[0].cell_contents.__code__ = (lambda a: (lambda: (a, 1)))(1).__code__")),
    Kind("function attribute", "h$I", "def h$I(): return h$I.a\nh$I.a = $V", "(h$I(), h$I.a)", ("h$I.a = $V", "h$I.b = 1", "del h$I.a", "h$I.__dict__ = {'a': $V}")),
    Kind("function name", "h$I", "def h$I(): pass", "(h$I.__name__, h$I.__doc__, h$I.__qualname__, h$I.__module__)", ("h$I.__name__ = $S", "h$I.__doc__ = $S", "h$I.__qualname__ = $S", "h$I.__module__ = $S")),
    Kind("function annotations", "h$I", "def h$I(a: int): pass", "h$I.__annotations__.get('a')", ("h$I.__annotations__['a'] = str", "h$I.__annotations__ = {}", "h$I.__annotations__.clear()")),
    Kind("function code", "h$I", "def h$I(a): pass", "(h$I.__code__.co_argcount, h$I.__code__.co_varnames)", ("h$I.__code__ = (lambda p, q: 1).__code__", "def h$I(b): pass")),
    Kind("signature", "h$I", "def h$I(a): pass", "list(inspect.signature(h$I).parameters)", ("h$I.__code__ = (lambda p, q: 1).__code__", "h$I.__signature__ = inspect.Signature()", "def h$I(b): pass", "h$I.__defaults__ = (1,)")),
    Kind("decorated helper", "h$I,k$I", "def k$I(): return $N\n@functools.wraps(k$I)\ndef h$I(): return (1, k$I())", "h$I()", ("k$I = lambda: $N", "k$I.__code__ = (lambda: $N).__code__", "h$I.__wrapped__ = 1")),
    Kind("generator function", "h$I", "def h$I():\n    yield $V\n    yield 2", "list(h$I())", ("h$I.__code__ = (lambda: iter([1])).__code__", "def h$I():\n    yield $V")),
    Kind("recursive helper", "h$I,n$I", "n$I = 2\ndef h$I(k): return 0 if k == 0 else n$I + h$I(k - 1)", "h$I(3)", ("n$I = $N", "h$I = lambda k: $N")),
    Kind("partial", "h$I,k$I", "def k$I(*a, **kw): return (a, sorted(kw.items()))\nh$I = functools.partial(k$I, $N, b=$N)", "h$I(1)",
         ("h$I = functools.partial(k$I, $N)", "h$I.keywords['b'] = $N", "h$I.keywords['c'] = $N", "k$I.__code__ = (lambda *a, **kw: $N).__code__", "h$I = functools.partial(lambda *a, **kw: 1)")),
    Kind("partial parts", "h$I", "h$I = functools.partial(max, $N)", "(h$I.args, h$I.func is max, h$I(2))", ("h$I = functools.partial(min, 1)", "h$I = functools.partial(max, $N)")),
    Kind("partial method", "o$I,C$I", "class C$I:\n    def m(self, a): return (a, self.b)\n    p = functools.partialmethod(m, $N)\no$I = C$I(); o$I.b = 1", "o$I.p()", ("o$I.b = $V", "C$I.p = functools.partialmethod(C$I.m, $N)", "C$I.m = lambda self, a: 9")),
    Kind("cached function", "h$I,n$I", "n$I = $N\n@functools.lru_cache\ndef h$I(k): return (n$I, k)", "h$I(1)", ("n$I = $N", "n$I = $N; h$I.cache_clear()", "h$I.cache_clear()", "h$I = functools.lru_cache(lambda k: $N)")),
    Kind("cached function's tally", "h$I", "@functools.lru_cache\ndef h$I(k): return k", "(h$I(1), h$I.cache_info().misses)[0]", ("h$I.cache_clear()", "h$I(2)"), steady=False),
    Kind("cached function of a mutable", "h$I,o$I", "@functools.lru_cache\ndef h$I(k): return k.a\no$I = Plain(a=$V)", "h$I(o$I)", ("o$I.a = $V", "o$I.a = $V; h$I.cache_clear()", "o$I = Plain(a=$V)")),
    Kind("cached function gives a list", "h$I", "@functools.lru_cache\ndef h$I(): return [1]", "h$I()[0]", ("h$I()[0] = $V", "h$I.cache_clear()")),
    Kind("single dispatch", "h$I,o$I", "h$I = functools.singledispatch(lambda o: 'base')\no$I = 1", "h$I(o$I)", ("h$I.register(int, lambda o: $N)", "o$I = 'a'", "h$I.register(str, lambda o: 's')", "o$I = True"), steady=False),
    Kind("operator getter", "h$I,o$I", "h$I = operator.attrgetter('a'); o$I = Plain(a=$V, b=2)", "h$I(o$I)", ("o$I.a = $V", "h$I = operator.attrgetter('b')", "h$I = operator.attrgetter('a')")),
    Kind("method caller", "h$I,o$I,C$I", "class C$I:\n    def m(self, k): return (k, self.a)\nh$I = operator.methodcaller('m', $N); o$I = C$I(); o$I.a = 1", "h$I(o$I)", ("o$I.a = $V", "h$I = operator.methodcaller('m', $N)", "C$I.m = lambda self, k: $N")),
    Kind("builtin bound method", "h$I,o$I", "o$I = [1]; h$I = o$I.count", "h$I(1)", ("o$I.append(1)", "h$I = [1, 1].count", "h$I = o$I.index", "o$I[0] = 2")),
    Kind("string method", "h$I", "h$I = 'a-b'.split", "h$I('-')", ("h$I = 'a-b-c'.split", "h$I = 'x'.join", "h$I = 'a-b'.split")),
    Kind("callable object", "o$I,C$I", "class C$I:\n    def __init__(self, a): self.a = a\n    def __call__(self, k): return (k, self.a)\no$I = C$I($V)", "o$I(1)", ("o$I.a = $V", "C$I.__call__ = lambda self, k: $N", "o$I = C$I($V)", "o$I = abs")),
    Kind("class construction", "C$I", "class C$I:\n    z = $N\n    def __init__(self, a): self.a = a", "(lambda c: (c.a, c.z))(C$I(1))",
         ("C$I.__init__ = lambda self, a: setattr(self, 'a', $N)", "C$I.z = $V", "C$I.__new__ = lambda cls, a: Plain(a=a, z=$N)", "class C$I:\n    z = 5\n    def __init__(self, a): self.a = [a]")),
    Kind("context manager", "C$I", "class C$I:\n    log = 0\n    def __enter__(self): return self\n    def __exit__(self, *e): C$I.log += 1; return True", "(lambda c: (c.__enter__() is c, c.log))(C$I())", ("C$I.log = $N", "C$I.__enter__ = lambda self: 1")),
    # names
    Kind("module attribute", "m$I", "m$I = types.ModuleType('m$I'); m$I.a = $V", "(m$I.a, getattr(m$I, 'b', 0))", ("m$I.a = $V", "m$I.b = $V", "del m$I.a", "m$I.__getattr__ = lambda name: $N", "m$I = types.ModuleType('z'); m$I.a = $V")),
    Kind("function of a module", "m$I", "m$I = types.ModuleType('m$I'); m$I.n = $N; exec('def h(): return n', m$I.__dict__)", "m$I.h()", ("m$I.n = $V", "m$I.h = lambda: $N", "del m$I.n", "m$I.h.__globals__['n'] = $N")),
    Kind("import", "", "sys.modules['stale_$E_$I'] = types.ModuleType('stale_$E_$I'); sys.modules['stale_$E_$I'].a = $V", "__import__('stale_$E_$I').a",
         ("sys.modules['stale_$E_$I'].a = $V", "sys.modules['stale_$E_$I'] = types.SimpleNamespace(a=$V)", "sys.modules.pop('stale_$E_$I', 0)"), restore="sys.modules.pop('stale_$E_$I', 0)", steady=False),
    Kind("global name", "", "g$I = $V", "g$I", ("g$I = $V", "del g$I", "g$I = [$V]", "globals()['g$I'] = $N")),
    Kind("global hides builtin", "", "", "abs(-3)", ("abs = lambda v: $N", "globals().pop('abs', 0)")),
    Kind("builtin replaced", "", "", "stale_name_$I()", ("builtins.stale_name_$I = lambda: $N", "stale_name_$I = lambda: $N", "builtins.__dict__.pop('stale_name_$I', 0)", "globals().pop('stale_name_$I', 0)"),
         restore="builtins.__dict__.pop('stale_name_$I', 0)"),
    Kind("real builtin replaced", "", "", "round(2.5)", ("builtins.round = lambda v: $N", "builtins.round = real_round"), restore="builtins.round = real_round"),
    Kind("global written", "", "g$I = 1", "globals().__setitem__('g$I', g$I + 1) or g$I", ("g$I = 5",), steady=False),
    Kind("environment variable", "", "os.environ['STALE_$I'] = 'a'", "(os.environ.get('STALE_$I'), 'STALE_$I' in os.environ, os.getenv('STALE_$I', 'z'))", ("os.environ['STALE_$I'] = $S", "os.environ.pop('STALE_$I', 0)"),
         restore="os.environ.pop('STALE_$I', 0)", steady=False),
    Kind("recursion limit", "", "", "sys.getrecursionlimit() > 5000", ("sys.setrecursionlimit(6000)", "sys.setrecursionlimit(4000)"), restore="sys.setrecursionlimit(1000)", steady=False),
    Kind("log level", "o$I", "o$I = logging.getLogger('stale$E$I'); o$I.setLevel(10)", "(o$I.isEnabledFor(15), o$I.level)", ("o$I.setLevel(20)", "o$I.setLevel(10)", "logging.disable(15)", "logging.disable(0)"), restore="logging.disable(0)", steady=False),
    Kind("decimal context", "", "", "str(decimal.Decimal(1) / 3)", ("decimal.getcontext().prec = 3", "decimal.getcontext().prec = 28"), restore="decimal.getcontext().prec = 28", steady=False),
    Kind("Python's random numbers", "", "", "random.random()", ("random.seed(3)", "random.seed(4)"), steady=False),
    Kind("NumPy's random numbers", "", "", "float(np.random.rand())", ("np.random.seed(3)", "np.random.seed(4)"), steady=False),
    Kind("thread name", "", "", "threading.current_thread().name", ("threading.current_thread().name = 'stale'", "threading.current_thread().name = 'MainThread'"), restore="threading.current_thread().name = 'MainThread'", steady=False),
    # modules
    Kind("module parameter", "o$I", "o$I = fixed(torch.nn.Linear(4, 3))", "o$I(x.sum() * torch.ones(2, 4, dtype=f32))",
         ("o$I.weight = torch.nn.Parameter(torch.ones(3, 4))", "o$I.weight.data = torch.full((3, 4), 2.0)", "o$I.bias = None", "o$I.weight.data.mul_(2)", "torch.nn.init.ones_(o$I.weight)", "o$I.weight.data = torch.ones(5, 4); o$I.bias.data = torch.ones(5) if o$I.bias is not None else None",
          "o$I.requires_grad_(False)", "o$I.requires_grad_(True)", "del o$I.bias; o$I.bias = None", "o$I.weight.data = torch.ones(4, 3).t()")),
    Kind("module hooks", "o$I", "o$I = fixed(torch.nn.Linear(4, 3))", "o$I(torch.ones(2, 4, dtype=f32))",
         ("h = o$I.register_forward_hook(lambda m, a, r: r * 2)", "h = o$I.register_forward_pre_hook(lambda m, a: (a[0] + 1,))", "o$I._forward_hooks.clear()", "o$I._forward_pre_hooks.clear()",
          "h = o$I.register_forward_hook(lambda m, a, k, r: r + len(k), with_kwargs=True)", "o$I._forward_hooks_with_kwargs.clear(); o$I._forward_hooks.clear()", "h = o$I.register_full_backward_hook(lambda m, a, b: None)", "o$I._backward_hooks.clear()")),
    Kind("global module hooks", "o$I", "o$I = fixed(torch.nn.Linear(4, 3))", "o$I(torch.ones(2, 4, dtype=f32))",
         ("torch.nn.modules.module._global_forward_hooks.clear(); gh = torch.nn.modules.module.register_module_forward_hook(lambda m, a, r: r * 3)", "torch.nn.modules.module._global_forward_hooks.clear()", "torch.nn.modules.module._global_forward_pre_hooks.clear(); gp = torch.nn.modules.module.register_module_forward_pre_hook(lambda m, a: (a[0] + 2,))",
          "torch.nn.modules.module._global_forward_pre_hooks.clear()"), restore="torch.nn.modules.module._global_forward_hooks.clear(); torch.nn.modules.module._global_forward_pre_hooks.clear()"),
    Kind("module training flag", "o$I", "o$I = fixed(torch.nn.Sequential(torch.nn.Dropout(1.0), torch.nn.BatchNorm1d(4)))", "(o$I(torch.arange(8.0).to(f32).view(2, 4)), o$I[0].training)", ("o$I.eval()", "o$I.train()", "o$I[0].eval()", "o$I[1].momentum = 0.5", "o$I[0].p = 0.0", "o$I[1].eps = 0.5", "o$I[1].track_running_stats = False")),
    Kind("submodule", "o$I", "o$I = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Identity())", "o$I(x - 1)",
         ("o$I[1] = torch.nn.Tanh()", "o$I.append(torch.nn.Sigmoid())", "o$I[0] = torch.nn.LeakyReLU(0.5)", "del o$I[-1]", "o$I.insert(0, torch.nn.Tanh())", "o$I._modules['0'] = torch.nn.ELU()")),
    Kind("module attribute shadowing", "o$I,C$I", "class C$I(torch.nn.Module):\n    a = $N\n    def forward(self, x): return x * self.a\no$I = C$I()", "o$I(x)",
         ("o$I.a = $N", "C$I.a = $N", "vars(o$I).pop('a', 0)", "o$I.register_buffer('b', torch.ones(1))", "C$I.a = property(lambda self: $N)", "o$I._parameters['a'] = torch.nn.Parameter(torch.tensor(2.0)); vars(o$I).pop('a', 0)",
          "o$I._parameters.pop('a', 0)", "o$I._buffers['a'] = torch.tensor(4.0)", "C$I.a = $N; o$I._buffers.pop('a', 0)")),
    Kind("module forward replaced", "o$I,C$I", "class C$I(torch.nn.Module):\n    def forward(self, x): return x + 1\no$I = C$I()", "o$I(x)",
         ("C$I.forward = lambda self, x: x * $N", "o$I.forward = lambda x: x - $N", "vars(o$I).pop('forward', 0)", "C$I.__call__ = lambda self, x: x + $N", "C$I.forward.__code__ = (lambda self, x: x / 2).__code__")),
    Kind("module buffers", "o$I", "o$I = torch.nn.Module(); o$I.register_buffer('b', torch.ones(2))", "(o$I.b, len(list(o$I.buffers())), [n for n, _ in o$I.named_buffers()])",
         ("o$I.b = torch.zeros(2)", "o$I.register_buffer('c', torch.ones(1))", "o$I.b = None", "o$I.b = torch.ones(3)", "del o$I.b; o$I.b = torch.ones(1)", "o$I.b = torch.ones(2)")),
    Kind("module list", "o$I", "o$I = torch.nn.ModuleList([torch.nn.ReLU()])", "(len(o$I), [type(m).__name__ for m in o$I], [m(x) for m in o$I])", ("o$I.append(torch.nn.Tanh())", "o$I[0] = torch.nn.Sigmoid()", "o$I.pop(-1) if len(o$I) else 0")),
    Kind("module dict", "o$I", "o$I = torch.nn.ModuleDict({'a': torch.nn.ReLU(), 'b': torch.nn.Tanh()})", "(list(o$I), [m(x) for m in o$I.values()], 'c' in o$I)", ("o$I['c'] = torch.nn.ELU()", "o$I['a'] = o$I.pop('a') if 'a' in o$I else torch.nn.ReLU()", "o$I['b'] = torch.nn.Sigmoid()")),
    Kind("parameter list", "o$I", "o$I = torch.nn.ParameterList([torch.ones(1)])", "(len(o$I), sum(p.sum() for p in o$I))", ("o$I.append(torch.full((1,), 3.0))", "o$I[0] = torch.full((1,), 5.0)")),
    Kind("named parameters", "o$I", "o$I = torch.nn.Linear(2, 2)", "[(n, p.requires_grad) for n, p in o$I.named_parameters()]", ("o$I.weight.requires_grad_(False)", "o$I.extra = torch.nn.Parameter(torch.ones(1))", "o$I.bias = None", "o$I.sub = torch.nn.Linear(1, 1)")),
    Kind("module in place of module", "o$I", "o$I = torch.nn.ReLU()", "o$I(x - 1)", ("o$I = torch.nn.Tanh()", "o$I = torch.nn.ReLU()", "o$I = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())", "o$I.inplace = True")),
    Kind("compiled call slot", "o$I", "o$I = torch.nn.ReLU()", "o$I(x - 1)", ("o$I.__dict__['_call_impl'] = lambda x: x * 5", "o$I.__dict__.pop('_call_impl', 0)")),
    # tensors
    Kind("tensor", "t$I", "t$I = torch.arange(6.0).view(2, 3)", "(t$I + 1, t$I.shape, t$I.stride(), t$I.dtype, t$I.is_contiguous())",
         ("t$I = torch.arange(6.0).view(3, 2)", "t$I = torch.arange(6.0).view(3, 2).t()", "t$I = t$I.to(f64)", "t$I = t$I.clone()", "t$I = t$I.long()", "t$I = torch.arange(12.0).view(2, 6)[:, ::2]", "t$I = t$I.flatten()", "t$I.add_(1)",
          "t$I = torch.ones(1, 3).expand(2, 3)", "t$I = torch.empty(0, 3)", "t$I = torch.ones(())", "t$I = t$I.bool()", "t$I.data = torch.zeros(2, 2)", "t$I.resize_(1, 3).fill_(2)", "t$I = t$I.to(torch.bfloat16)", "t$I.t_() if t$I.dim() == 2 else 0")),
    Kind("tensor or something else", "t$I", "t$I = torch.ones(2)", "isinstance(t$I, torch.Tensor)", ("t$I = None", "t$I = 1.0", "t$I = torch.nn.Parameter(torch.ones(2))", "t$I = [torch.ones(2)]", "t$I = np.ones(2)", "t$I = torch.ones(2)"), steady=False),
    Kind("requires grad", "t$I", "t$I = torch.ones(2)", "(t$I.requires_grad, (t$I * 2).requires_grad, t$I.is_leaf)", ("t$I.requires_grad_(True)", "t$I = torch.ones(2)", "t$I = torch.ones(2, requires_grad=True) * 1", "t$I = torch.nn.Parameter(torch.ones(2))", "t$I = t$I.detach()")),
    Kind("gradient", "t$I", "t$I = torch.ones(2, requires_grad=True)", "0 if t$I.grad is None else t$I.grad + 1", ("t$I.grad = torch.full((2,), 3.0)", "t$I.grad = None", "(t$I * 2).sum().backward()")),
    Kind("tensor attribute", "t$I", "t$I = torch.ones(2); t$I.tag = $V", "(t$I.tag, hasattr(t$I, 'other'))", ("t$I.tag = $V", "t$I.other = 1", "del t$I.tag", "t$I = torch.ones(2); t$I.tag = $V")),
    Kind("tensor type", "t$I", "t$I = torch.ones(2)", "(type(t$I).__name__, isinstance(t$I, torch.nn.Parameter), t$I.type())", ("t$I = torch.nn.Parameter(torch.ones(2))", "t$I = torch.nn.Buffer(torch.ones(2))", "t$I = torch.ones(2).double()", "t$I = torch.ones(2)")),
    Kind("tensor subclass", "t$I", "class T$I(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, f, t, a=(), k=None): return super().__torch_function__(f, t, a, k or {}).as_subclass(torch.Tensor) * 2\nt$I = torch.ones(2)", "t$I + 1",
         ("t$I = torch.ones(2).as_subclass(T$I)", "t$I = torch.ones(2)", "T$I.__torch_function__ = classmethod(lambda cls, f, t, a=(), k=None: torch.zeros(1))"), steady=False),
    Kind("special tensors", "t$I", "t$I = torch.ones(2, dtype=torch.complex64) * (1 + 2j)", "t$I * 2", ("t$I = t$I.conj()", "t$I = t$I.imag", "t$I = torch.ones(2).to_sparse()", "t$I = torch.ones(2)", "t$I = t$I.resolve_conj()", "t$I = torch.ones(2, device='meta')"), steady=False),
    Kind("inference tensor", "t$I", "t$I = torch.ones(2)", "(t$I * 2, t$I.is_inference())", ("with torch.inference_mode(): t$I = torch.ones(2)", "t$I = torch.ones(2)")),
    Kind("storage offset", "t$I", "t$I = torch.arange(8.0)[:4]", "(t$I.storage_offset(), t$I * 1)", ("t$I = torch.arange(8.0)[4:]", "t$I = torch.arange(8.0)[1:5]", "t$I = torch.arange(4.0)")),
    Kind("same tensor twice", "t$I,u$I", "t$I = torch.ones(3); u$I = torch.ones(3)", "(t$I.add_(u$I), t$I is u$I, t$I + u$I)", ("u$I = t$I", "u$I = torch.full((3,), 2.0)", "u$I = t$I.detach()", "u$I = t$I[:]", "t$I = torch.ones(3)", "u$I = t$I[:1].expand(3)")),
    Kind("overlapping tensors", "t$I,u$I", "b$I = torch.arange(6.0); t$I = b$I[:3]; u$I = b$I[3:]", "(t$I.mul_(2), u$I + 1, t$I)",
         ("u$I = b$I[2:5]", "u$I = b$I[3:]", "u$I = b$I[:3]", "u$I = torch.arange(3.0)", "t$I = b$I[1:4]", "t$I = torch.arange(3.0)", "u$I = b$I[1:4]", "b$I = torch.arange(6.0); t$I = b$I[::2]; u$I = b$I[1::2]")),
    Kind("partial overlap within", "t$I", "t$I = torch.arange(6.0)", "t$I[1:].add_(t$I[:-1])", ("t$I = torch.zeros(6)", "t$I = torch.arange(6.0)"), steady=False, backends=("native", "aot_eager")),
    Kind("expanded operand in place", "t$I", "t$I = torch.arange(3.0)", "t$I.mul_(2)", ("t$I = torch.ones(1).expand(3)", "t$I = torch.arange(3.0)", "t$I = torch.arange(9.0)[::3]"), steady=False, backends=("native", "aot_eager")),
    Kind("partial overlap of inputs", "t$I,u$I", "b$I = torch.arange(6.0); t$I = b$I[:3]; u$I = torch.arange(3.0)", "t$I.copy_(u$I) + 0", ("u$I = b$I[1:4]", "u$I = torch.arange(3.0)", "u$I = b$I[3:]", "t$I = torch.arange(3.0)"), backends=("native", "aot_eager")),
    Kind("list of tensors", "o$I", "o$I = [torch.ones(2), torch.ones(2)]", "(o$I[0] is o$I[1], sum(o$I))", ("o$I[1] = o$I[0]", "o$I.append(torch.ones(2))", "o$I[0] = torch.zeros(2)", "o$I[1] = torch.ones(3)[:2]", "o$I[0] = torch.ones(2).double()")),
    Kind("scalar tensor's value", "t$I", "t$I = torch.tensor(2)", "(t$I.item(), [1, 2, 3, 4, 5, 6][int(t$I)])", ("t$I = torch.tensor(3)", "t$I.fill_(1)", "t$I = torch.tensor(True)"), steady=True),
    Kind("branch on a tensor", "t$I", "t$I = torch.tensor(2.0)", "1 if t$I > 1 else 2", ("t$I = torch.tensor(0.0)", "t$I.fill_(5)", "t$I = torch.tensor(float('nan'))")),
    Kind("generator state", "o$I", "o$I = torch.Generator().manual_seed(1)", "torch.rand(2, generator=o$I)", ("o$I.manual_seed(2)", "o$I = torch.Generator().manual_seed(3)"), steady=False),
    Kind("random tensor", "", "", "torch.rand(2) + x.sum()", ("torch.manual_seed(5)", "torch.manual_seed(6)")),
    Kind("initial seed", "", "", "torch.initial_seed()", ("torch.manual_seed(5)", "torch.manual_seed(6)"), steady=False),
    # settings of PyTorch
    *(Kind(f"setting {label}", "", "", read, changes, restore, steady) for label, read, changes, restore, steady in (
        ("grad mode", "(torch.is_grad_enabled(), (x.detach().clone().requires_grad_() * 2).requires_grad)", ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"), "torch.set_grad_enabled(True)", False),
        ("grad mode of an input", "torch.is_grad_enabled()", ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"), "torch.set_grad_enabled(True)", True),
        ("default dtype", "(torch.ones(2), torch.get_default_dtype(), torch.tensor(1.5).dtype, x.sum() * torch.ones(1))", ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"), "torch.set_default_dtype(torch.float32)", True),
        ("default device", "(torch.ones(2).device, torch.get_default_device())", ("torch.set_default_device('meta')", "torch.set_default_device('cpu')", "torch.set_default_device(None)"), "torch.set_default_device(None)", False),
        ("autocast", "((torch.ones(2, 2) @ torch.ones(2, 2)).dtype, torch.is_autocast_enabled('cpu'), torch.get_autocast_dtype('cpu'))",
         ("torch.set_autocast_enabled('cpu', True)", "torch.set_autocast_enabled('cpu', False)", "torch.set_autocast_dtype('cpu', torch.float16)", "torch.set_autocast_dtype('cpu', torch.bfloat16)"),
         "torch.set_autocast_enabled('cpu', False); torch.set_autocast_dtype('cpu', torch.bfloat16); torch.clear_autocast_cache()", True),
        ("cuda autocast", "(torch.is_autocast_enabled('cuda'), torch.get_autocast_dtype('cuda'))", ("torch.set_autocast_enabled('cuda', True)", "torch.set_autocast_enabled('cuda', False)", "torch.set_autocast_dtype('cuda', torch.bfloat16)"),
         "torch.set_autocast_enabled('cuda', False); torch.set_autocast_dtype('cuda', torch.float16)", True),
        ("autocast cache", "torch.is_autocast_cache_enabled()", ("torch.set_autocast_cache_enabled(False)", "torch.set_autocast_cache_enabled(True)"), "torch.set_autocast_cache_enabled(True)", True),
        ("deterministic", "(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(), torch.get_deterministic_debug_mode())",
         ("torch.use_deterministic_algorithms(True)", "torch.use_deterministic_algorithms(False)", "torch.use_deterministic_algorithms(True, warn_only=True)"), "torch.use_deterministic_algorithms(False)", False),
        ("fill uninitialised memory", "torch.utils.deterministic.fill_uninitialized_memory", ("torch.utils.deterministic.fill_uninitialized_memory = False", "torch.utils.deterministic.fill_uninitialized_memory = True"), "torch.utils.deterministic.fill_uninitialized_memory = True", False),
        ("matmul precision", "torch.get_float32_matmul_precision()", ("torch.set_float32_matmul_precision('high')", "torch.set_float32_matmul_precision('highest')", "torch.set_float32_matmul_precision('medium')"), "torch.set_float32_matmul_precision('highest')", True),
        ("threads", "torch.get_num_threads()", ("torch.set_num_threads(1)", "torch.set_num_threads(2)"), "torch.set_num_threads(2)", True),
        ("anomaly mode", "(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())", ("torch.autograd.set_detect_anomaly(True)", "torch.autograd.set_detect_anomaly(False)", "torch.autograd.set_detect_anomaly(True, check_nan=False)"), "torch.autograd.set_detect_anomaly(False, check_nan=True)", False),
        ("mkldnn", "torch.backends.mkldnn.enabled", ("torch.backends.mkldnn.flags(False).__enter__()", "torch._C._set_mkldnn_enabled(True)", "torch._C._set_mkldnn_enabled(False)"), "torch._C._set_mkldnn_enabled(True)", False),
        ("cudnn", "(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled)",
         ("torch._C._set_cudnn_benchmark(True)", "torch._C._set_cudnn_benchmark(False)", "torch._C._set_cudnn_deterministic(True)", "torch._C._set_cudnn_deterministic(False)", "torch._C._set_cudnn_allow_tf32(False)", "torch._C._set_cudnn_allow_tf32(True)", "torch._C._set_cudnn_enabled(False)", "torch._C._set_cudnn_enabled(True)"),
         "torch._C._set_cudnn_benchmark(False); torch._C._set_cudnn_deterministic(False); torch._C._set_cudnn_allow_tf32(True); torch._C._set_cudnn_enabled(True)", False),
        ("tf32", "torch.backends.cuda.matmul.allow_tf32", ("torch.backends.cuda.matmul.allow_tf32 = True", "torch.backends.cuda.matmul.allow_tf32 = False"), "torch.backends.cuda.matmul.allow_tf32 = False", False),
        ("attention backends", "(torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled())",
         ("torch.backends.cuda.enable_flash_sdp(False)", "torch.backends.cuda.enable_flash_sdp(True)", "torch.backends.cuda.enable_math_sdp(False)", "torch.backends.cuda.enable_math_sdp(True)"), "torch.backends.cuda.enable_flash_sdp(True); torch.backends.cuda.enable_math_sdp(True)", False),
        ("torch function mode", "x + 1", ("leave_modes(); mode = AddOne(); mode.__enter__()", "leave_modes()"), "leave_modes()", False),
        ("dispatch mode", "x + 1", ("leave_modes(); mode = Doubling(); mode.__enter__()", "leave_modes()"), "leave_modes()", False),
        ("warn always", "torch.is_warn_always_enabled()", ("torch.set_warn_always(True)", "torch.set_warn_always(False)"), "torch.set_warn_always(False)", False),
        ("inference mode", "(torch.is_inference_mode_enabled(), torch.ones(1).is_inference())", ("enter_inference()", "leave_modes()"), "leave_modes()", False),
        ("functorch", "x.sum() * 2", (), "", True),
        ("print options", "str(torch.tensor([1.23456789]))", ("torch.set_printoptions(precision=2)", "torch.set_printoptions(profile='default')"), "torch.set_printoptions(profile='default')", False),
        ("module swap", "torch.__future__.get_swap_module_params_on_conversion()", ("torch.__future__.set_swap_module_params_on_conversion(True)", "torch.__future__.set_swap_module_params_on_conversion(False)"), "torch.__future__.set_swap_module_params_on_conversion(False)", False),
    )),
)  # fmt: skip
