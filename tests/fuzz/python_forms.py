"""More statements of tests/fuzz/python.py: how blocks are left, coroutines, classes of the standard library, patterns."""

from __future__ import annotations

from tests.fuzz.python_expressions import texts
from tests.fuzz.python_statements import Group

FORMS = (
    Group(
        6,
        True,
        texts("""
def $0(p):
    for one in (1, 2, 3):
        try:
            $B@p
            if one > p: return one, $x@p
            if $b: continue
        finally:
            LOG.append(one)
            if one == 2: break
    return 'end'
LOG.append($0($i))
--
def $0(p):
    try:
        $B@p
        return $x@p
    finally:
        LOG.append(p)
        return 'finally'
LOG.append($0($i))
--
def $0(p):
    with cm(p) as one, quiet(1):
        $B@p
        return one, $x@p
LOG.append($0($i))
--
def $0(p):
    with cm(p):
        try:
            got = yield $x@p
            LOG.append(got)
            $Y@p
        finally: LOG.append('left')
$G = $0($i)
LOG.append(next($G))
--
@contextlib.contextmanager
def $0(p):
    with contextlib.suppress(KeyError): yield $x@p
    $B@p
with $0($i) as $1:
    $B
    raise KeyError(1)
--
with contextlib.ExitStack() as $0:
    $I = $0.enter_context(cm($i))
    $0.callback(LOG.append, $x)
    $0.push(lambda kind, error, back: LOG.append(kind) or True)
    $B
    if $b: raise ValueError($i)
--
async def $0(p):
    $B@p
    got = await Turn(p)
    async with Turn(1) as one:
        LOG.append((got, one, $x@p))
    return [e async for e in Turn(2)], $x@p
LOG.append(drive($0($i)))
--
async def $0(p):
    for one in range(2):
        yield one, $x@p
        await Turn(one)
async def $1(): return [one async for one in $0($i)]
LOG.append(drive($1()))
--
@dataclasses.dataclass(order=$b)
class $0(R):
    c: object = None
    d: dataclasses.InitVar[int] = 1
    count: typing.ClassVar[int] = 0
    def __post_init__(self, d):
        self.a += d
        type(self).count += 1
        $B@d
$O = $0($i, [$x])
LOG.append((dataclasses.asdict($O), $O == $0(1), $0.count))
--
class $0(enum.Enum):
    A = $i
    B = 'b'
    def m(self, x=1): return self.name, x, $x@x
    @property
    def p(self): return self.value
$O = $0.A
LOG.append(($O.p, $0('b').m(), [one.name for one in $0], $0.A in $0))
--
class $0(typing.NamedTuple):
    x: int
    y: object = None
    def m(self, x=1): return self.x, x
$O = $0($i, $x)
LOG.append(($O._asdict(), $O.m(2), $O == ($i, None)))
--
class $0(abc.ABC):
    @abc.abstractmethod
    def m(self, x=1): ...
    @staticmethod
    def make(): return $x
try: $0()
except TypeError as $1: LOG.append(type($1).__name__)
$O = type('Full', ($0,), {'m': lambda self, x=1: (super($0, self).make(), x)})()
LOG.append($O.m($i))
--
class $0:
    n = $i
    squares = [e * 2 for e in $l]
    by = {k: v for k, v in $d.items()}
    def outer(self):
        def inner(): return __class__.__name__, self.n, $x
        return inner()
    def __init_subclass__(cls, tag=0): cls.tag = tag
class $1($0, tag=$i): pass
$O = $1()
LOG.append(($O.outer(), $O.tag, $0.squares))
--
def $0(p):
    total = 0
    def add(v):
        nonlocal total
        total += v
        def more():
            nonlocal total, p
            total, p = total + 1, p + v
            $B@p:i@total:i
        more()
        return total
    return [add(e) for e in (1, 2)], total, p, add
$F = $0($i)[-1]
LOG.append($f($i))
--
def $0(p):
    if p: del p
    try: return p
    except UnboundLocalError as error: LOG.append(type(error).__name__)
    p = $x
    return p
LOG.append(($0(0), $0(1)))
--
match $d:
    case {'a': int(n), **rest} if n > $i: LOG.append((n, rest))
    case {'a': [n, *_] | (n, _)} | {'b': n}: LOG.append(n)
    case collections.OrderedDict() | {}: LOG.append('none')
--
match ($x, $i):
    case (torch.Tensor(shape=(n, *_)), m): LOG.append((n, m))
    case (Z(v=n) | Ordered(v=n), 0 | 1 | 2): LOG.append(n)
    case (Rank.LOW | None, _): LOG.append('low')
    case (str(n), m) | (float(n), m): LOG.append((n, m))
    case (P(a, b) as whole, int()): LOG.append((a, b, whole))
    case [one, two]: LOG.append((one, two))
--
warnings.warn($s, stacklevel=1)
exec('LOG.append(1 + 1)')
globals()['made_$0'] = $x
LOG.append('made_$0' in globals())
--
try:
    $B
    raise KeyError($z) from ValueError($i)
except (KeyError, TypeError) as $0:
    LOG.append((repr($0.__cause__), traceback.format_exception_only($0), sys.exc_info()[0].__name__, traceback.extract_tb($0.__traceback__)[0].lineno))
LOG.append(sys.exc_info())
--
$0 = weakref.ref($O := S($i))
$B
LOG.append($0() is $O)
$1 = weakref.finalize($O, LOG.append, 'gone')
del $O
--
$0 = itertools.tee($g, 2)
LOG.append((next($0[0], None), list($0[1]), list($0[0])))
--
class $0:
    def __init__(self, v): self.v = v
    def __del__(self): LOG.append(('del', self.v))
$O = $0($i)
$O = $0(2)
del $O
"""),
    ),
)
