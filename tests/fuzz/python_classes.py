"""What is around the function of a Python program: names that all begin with, classes, helpers, changes between calls."""

from __future__ import annotations

from tests.fuzz.python_expressions import rows, texts

PRELUDE = '''
import abc, bisect, collections, contextlib, copy, dataclasses, enum, fractions, functools, heapq, inspect, itertools, json, math, operator, re
import string, struct, sys, textwrap, traceback, types, typing, warnings, weakref
P = collections.namedtuple("P", "x y", defaults=(0,))
@dataclasses.dataclass(order=True)
class R:
    """Has a docstring, for which `dataclass` would read the signature."""
    a: int = 0
    b: list = dataclasses.field(default_factory=list)
class Shade(enum.Enum):
    RED = 1
    BLUE = 2
    @classmethod
    def _missing_(cls, value): return tick(cls.RED)
class Bits(enum.Flag):
    ONE = enum.auto()
    TWO = enum.auto()
    BOTH = ONE | TWO
class Rank(enum.IntEnum):
    LOW = 1
    HIGH = 2
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Z:
    """Frozen."""
    v: int = 0
    w: object = dataclasses.field(default=None, compare=False)
    twice: int = dataclasses.field(init=False, default=0)
    def __post_init__(self): object.__setattr__(self, "twice", self.v * 2)
class Meta(type):
    made = 0
    def __call__(cls, *args):
        cls.made += 1
        return super().__call__(*args)
    def __instancecheck__(cls, one): return isinstance(one, int) or super().__instancecheck__(one)
    def __len__(cls): return 3
    def __getitem__(cls, key): return cls.__name__, key
class M(metaclass=Meta):
    only = None
    def __new__(cls, *args):
        if cls.only is None: cls.only = super().__new__(cls)
        return cls.only
    def __init__(self, v=0): self.v = v
    def __repr__(self): return "M"
@functools.total_ordering
class Ordered:
    def __init__(self, v=0): self.v = v
    def __eq__(self, other): return self.v == getattr(other, "v", other)
    def __lt__(self, other): return self.v < getattr(other, "v", other)
    __hash__ = None
    half = functools.partialmethod(lambda self, by, more=0: (self.v, by, more), 2)
    def __class_getitem__(cls, key): return key
    def __repr__(self): return "Ordered"
@functools.singledispatch
def kind_of(v): return "any"
@kind_of.register
def _(v: int): return "int", v
@kind_of.register(list)
@kind_of.register(tuple)
def _(v): return [kind_of(one) for one in v][:3]
class Turn:
    def __init__(self, v): self.v = v
    def __await__(self):
        got = yield self.v
        return got if got is not None else self.v
    async def __aenter__(self): return await self
    async def __aexit__(self, kind, error, back): LOG.append(kind and kind.__name__)
    def __aiter__(self): return self
    async def __anext__(self):
        self.v -= 1
        if self.v < 0: raise StopAsyncIteration
        return self.v
def drive(coroutine, most=6):
    said = []
    try:
        for _ in range(most): said.append(coroutine.send(None))
    except StopIteration as end: return said, end.value
    finally: coroutine.close()
    return said
class Field:
    def __init__(self, first=0): self.first = first
    def __set_name__(self, owner, name): self.name = "_" + name
    def __get__(self, one, kind=None): return self.first if one is None else one.__dict__.get(self.name, self.first)
    def __set__(self, one, value): one.__dict__[self.name] = value
class S:
    v = 1
    p = Field(4)
    __match_args__ = ("v",)
    def __init__(self, v=0): self.v, self.items = v, []
    def m(self, x=1): return self.v, x
    def __call__(self, x=0): return x
    def __add__(self, other): return S(other)
    def __repr__(self): return type(self).__name__
class Mixin:
    def m(self, x=1): return "mixin", super().m(x)
class Lower(S):
    def __init__(self, v=0):
        super().__init__(v)
        self.w = v
    def m(self, x=1): return "lower", super().m(x)
def tick(v=0):
    COUNT[0] += 1
    LOG.append(("tick", v))
    return v
def gen(n):
    try:
        for step in range(n):
            got = yield step
            if got is not None: LOG.append(("got", got))
    except ValueError:
        yield "caught"
    except GeneratorExit:
        return "left"
    finally:
        LOG.append("gen done")
    return n
def twice(function):
    @functools.wraps(function)
    def twice_of(*args, **kwargs): return function(*args, **kwargs), function(*args, **kwargs)
    return twice_of
class cm:
    def __init__(self, v): self.v = v
    def __enter__(self):
        LOG.append("enter")
        return self.v
    def __exit__(self, kind, error, back):
        LOG.append(("exit", kind and kind.__name__))
@contextlib.contextmanager
def quiet(v):
    try: yield v
    except ValueError as error: LOG.append(str(error))
    finally: COUNT[0] += 1
def x0(): return made((3,), f32, 5)
def poke(value, depth=0):
    if isinstance(value, (types.GeneratorType, map, filter, zip, enumerate)): return next(value, None)
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)): return value(1)
    if isinstance(value, (tuple, list)) and depth < 3: return [poke(one, depth + 1) for one in value]
'''

CLASS_HEADS = (
    "class $N:",
    "class $N:",
    "class $N:",
    "class $N(list):",
    "class $N(dict):",
    "class $N(Exception):",
    "class $N(collections.OrderedDict):",
    "class $N(int):",
    "class $N(S):",
    "class $N(S):",
    "class $N(Mixin, S):",
    "class $N(torch.nn.Module):",
    "class $N(Lower):",
)
MEMBERS = texts("""
def __init__(self, *args):
    super().__init__()
    self.v = args[0] if args else $i
    self.items = [$i]
--
def __init__(self, v=$i):
    self.v, self.a = v, $x
--
v = $i
--
b = $l
--
@property
def p(self):
    $B
    return self.v + $i
@p.setter
def p(self, value):
    LOG.append(value)
    self.v = value
--
@functools.cached_property
def p(self):
    LOG.append('once')
    return $x
--
p = Field($i)
--
__slots__ = ('v', 'w')
--
def m(self, x=1):
    $B@x
    return $x@x
--
def m(self, x=1):
    self.v = x
    return super().m(x)
--
@classmethod
def m(cls, x=1):
    cls.count = getattr(cls, 'count', 0) + 1
    return cls.__name__, $x@x
--
@staticmethod
def m(x=1): return $x@x
--
def __getattr__(self, name):
    LOG.append(name)
    if name in ('v', 'b', 'items'): return $i
    raise AttributeError(name)
--
def __getattribute__(self, name):
    LOG.append((name, 'get'))
    return super().__getattribute__(name)
--
def __setattr__(self, name, value):
    LOG.append((name, 'set'))
    super().__setattr__(name, value)
--
def __delattr__(self, name):
    LOG.append((name, 'del'))
    super().__delattr__(name)
--
def __add__(self, other):
    if isinstance(other, type(self)): return NotImplemented
    $B
    return $x
def __radd__(self, other): return $x
--
def __iadd__(self, other):
    LOG.append('iadd')
    return self
--
def __eq__(self, other): return $b
--
def __eq__(self, other):
    return NotImplemented
def __hash__(self): return 7
--
def __lt__(self, other): return $b
--
def __len__(self): return $i
--
def __bool__(self):
    COUNT[0] += 1
    return $b
--
def __getitem__(self, key):
    LOG.append(key)
    if isinstance(key, int) and key > 2: raise IndexError(key)
    return $x
--
def __setitem__(self, key, value): LOG.append((key, value))
--
def __contains__(self, value): return $b
--
def __iter__(self):
    $Y
    yield $x
    yield $i
--
def __iter__(self): return iter($l)
--
def __call__(self, x=1, *rest):
    $B@x
    return $x@x
--
def __enter__(self): return self
def __exit__(self, kind, value, back):
    LOG.append(kind and kind.__name__)
    return $b
--
def __neg__(self): return $x
--
def __index__(self): return $i
--
def __str__(self): return $s
--
def __format__(self, spec): return 'F' + spec
--
def __missing__(self, key):
    LOG.append(key)
    return $i
--
def __init_subclass__(cls, **more):
    super().__init_subclass__(**more)
    LOG.append(cls.__name__)
""")
HELPERS = texts("""
def $0(p, q=$i, *rest):
    $B@p
    return $x@p
--
def $0(p):
    global GN
    GN = $i
    $B@p
    return $x@p
--
def $0(p, seen=[]):
    seen.append(p)
    $B@p
    return list(seen)
--
def $0(p):
    try:
        $B@p
        return $x@p
    except $r:
        return $x
    finally:
        LOG.append('helper')
--
def $0(p):
    $Y@p
    yield $x@p
    return $i
--
@functools.lru_cache
def $0(p):
    return $i@p
--
def _made(n):
    def set_(v):
        nonlocal n
        n = v
        return n
    def $0(p): return (n, $x@p, set_(n + 1))
    return $0
$0 = _made($i)
--
@twice
def $0(p, k=$i):
    $B@p
    return $x@p
""")
# What a step may do before it calls the program.
BETWEEN = rows("""
L0.append($i) | L0.append(x0()) | L0[:] = [$i, $i] | L0.sort() | L0.clear() | D0['a'] = $i | D0['z'] = $x | D0.pop('a', None) | D0.update(b=$i) | D0.clear() | GN = $i | GN = $i | E0.add($i) | E0.discard(1) | Q0.append($i)
Q0.clear() | T0.add_(1) | globals().update(T0=made((2, 3), f32, $i + 9)) | globals().update(L0=[$i, $i]) | globals().update(D0={'a': $i}) | COUNT[0] = 0 | KEPT.clear() | S.v = $i | S.m = lambda self, x=1: ('new', x)
P.__new__.__defaults__ = (1, 2) | Field.__get__ = lambda self, one, kind: 9 | Mixin.v = $i | S.__len__ = lambda self: 2 | L0.append(1.5) | L0.append(True) | D0['a'] = True | D0['a'] = 1.0 | L0[0:1] = [False] | L0.insert(0, 'a')
globals().update(tick=lambda v: v) | globals().update(gen=lambda v: iter([v])) | L0.append(L0[0] if L0 else 0) | LOG.clear() | globals().update(T0=T0.double()) | D0['l'] = L0 | L0.append(D0) | $o.v = $i | $o.__dict__.clear() | $c.v = $i
S.p = property(lambda self: $i) | del L0[:1] | globals().update(R=P) | tick.__defaults__ = ($i,) | tick.__code__ = (lambda v=0: v).__code__ | D0.__setitem__(1, T0) | globals().update(Q0=collections.deque([$i])) | L0.reverse() | poke(KEPT[-1])
$o.w = $x | $o.m = lambda x=1: x | $o.__class__ = Lower | del D0['b'] | E0.clear() | Shade.RED.extra = $i
Shade._missing_ = classmethod(lambda cls, value: cls.BLUE) | del Field.__get__ | del Field.__set__
""")
