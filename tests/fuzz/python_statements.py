"""The statements of tests/fuzz/python.py, in groups."""

from __future__ import annotations

from fusewright.base.records import dataclass
from tests.fuzz.python_expressions import rows, texts


@dataclass(frozen=True, slots=True)
class Group:
    weight: int
    blocks: bool
    rows: list[str]


STATEMENTS = (
    Group(
        8,
        False,
        rows("""
$I = $i | $L = $l | $D = $d | $T = $t | $U = $u | $S = $s | $E = $e | $Q = $q | $O = $o | $F = $f | $G = $g | $T = $t | $I = $i | $L = $l | $I = $J = $i | $L = $M = $l | $I, $J = $i, $i | $I, *$L = $l
$I, $J = $l | [$I, ($J, *$L)] = $i, $l | *$L, $I = $u | $I, $T = $u | $O = $x | ($I := $i) | $I, $J = $J, $I if False else ($i, $i) | $L = [$I := $i, $i] | $O: int = $i
"""),
    ),
    Group(
        8,
        False,
        rows("""
$l.append($x) | $l.append($i) | $l.extend($l[:3]) | $l.insert($k, $i) | $l.pop() | $l.pop($k) | $l.remove($i) | $l.reverse() | $l.sort() | $l.sort(key=$f) | $l.clear() | $l[$k] = $x | $l[$k] = $i | $l[1:2] = $l[:3] | $l[::2] = $l[:2]
$l[:] = [$i, $i] | del $l[$k] | del $l[$k:] | $l[$k] += $i | $l += [$i] | $l += $l[:2] | $l *= 1 | $d[$z] = $x | $d[$z] = $i | $d[$i] = $i | del $d[$z] | $d.pop($z) | $d.update($d) | $d.update(a=$i) | $d[$z] += $i | $d.clear() | $d.popitem()
$d |= {'c': $i} | $d.setdefault($z, []) | $d.setdefault('q', []).append($x) | $e.add($i) | $e.discard($i) | $e.update($l) | $e |= {$i} | $e.remove($i) | $q.append($i) | $q.appendleft($x) | $q.rotate(1) | $q.extend($l) | $q.popleft() | $q[0] = $i
$o.v = $x | $o.v = $i | $o.v += $i | $o.w = $x | $o.p = $i | del $o.v | del $o.w | $o[$k] = $i | $o += $i | $o.items.append($i) | setattr($o, $z, $i) | delattr($o, $z) | $o.__dict__['v'] = $i | $o.__dict__.update($d) | $c.v = $i | $o.__class__.w = $i
LOG.append($x) | LOG.append($i) | COUNT[0] += 1 | print($i, $s) | print($l, end='') | print($d, $u, sep='|') | KEPT.append($x) | KEPT.append($f) | KEPT.append($g) | global_list = $l | tick($i) | next($g) | next($g, None) | $f($i) | $f($x) | $o.m($i) | $o($i)
$g.close() | $g.send(None) | $g.throw(ValueError('t')) | LOG.extend($g) | LOG.append((tick(1), $i, tick(2))) | $t.add_($i) | $t[0] = $i | $t.mul_(2) | $t[$k] += $i | $t += 1 | T0.add_(1) | LOG.append($t.sum()) | L0.append($t) | D0['t'] = $t | collections.deque(map($f, $l), 0)
assert $b | assert $b, $s | raise $o | raise $r | $I = $i; del $I | del $l | heapq.heappush($l, $i) | $o.mt = $f | $f.v = $i | $f.__defaults__ = ($i,) | operator.setitem($d, $z, $i) | $i | $x | pass | D0 | L0.sort(key=lambda v: str(v)) | return $x | return | break | continue
"""),
    ),
    Group(
        6,
        True,
        texts("""
if $b:
    $B
--
if $b:
    $B
else:
    $B
--
if $b:
    $B
elif $b:
    $B
else:
    $B
--
for $I in $l:
    $B
--
for $I in $l:
    $B
    if $b: break
else:
    $B
--
for $0, $I in enumerate($l):
    $B
--
for $S, $I in $d.items():
    $B
--
for $I in $g:
    $B
    if $b: continue
    $B
--
for $I in range($i):
    $B
--
for $T in $t:
    $B
--
$0 = 3
while $0:
    $0 -= 1
    $B
--
$0 = 0
while True:
    $0 += 1
    if $0 > 3: break
    $B
--
for $1 in (1, 2):
    for $I in $l:
        $B
        break
--
with cm($i) as $I:
    $B
--
with cm($i), cm($x) as $O:
    $B
--
with contextlib.suppress($r):
    $B
--
with quiet($i):
    $B
--
with torch.no_grad():
    $B
--
match $x:
    case 0 | 1:
        $B
    case [$I, *$L]:
        $B
    case {'a': $J, **$D}:
        $B
    case P(x=$I):
        $B
    case str() as $S if $b:
        $B
    case _:
        $B
--
match $l:
    case []: pass
    case [$I]:
        $B
    case [$I, $J, *_] if $b:
        $B
    case $0:
        LOG.append($0)
--
match $o:
    case R(a=int() as $I) | S($I):
        $B
    case Shade.RED | None:
        $B
"""),
    ),
    Group(
        6,
        True,
        texts("""
try:
    $B
except $r:
    $B
--
try:
    $B
    raise ValueError($i)
except ValueError as $0:
    LOG.append((str($0), $0.__context__ is None))
    $B
--
try:
    $B
    $x
except ($r):
    $B
else:
    $B
finally:
    $B
--
try:
    $B
finally:
    LOG.append('finally')
    $B
--
try:
    try:
        $B
        raise KeyError($z)
    finally:
        $B
except KeyError as $0:
    KEPT.append($0)
--
try:
    $i // 0
except ZeroDivisionError as $0:
    try:
        raise ValueError('from') from $0
    except ValueError as $1:
        KEPT.append($1)
        $B
--
try:
    $x
    raise R($i)
except Exception as $0:
    LOG.append(type($0).__name__)
    LOG.append(str($0))
--
for $1 in (1, 2):
    try:
        $B
        if $b: continue
        $B
    finally:
        COUNT[0] += 1
--
try:
    raise ValueError(1)
except Exception as $0:
    LOG.append($0.__traceback__.tb_lineno)
    $B
    raise
--
try:
    $B
    $x
except $r as $0:
    KEPT.append($0)
    $B
    raise RuntimeError('second')
--
try:
    raise ExceptionGroup('g', [ValueError($i), KeyError($z)])
except* ValueError as $0:
    LOG.append(len($0.exceptions))
except* KeyError:
    $B
--
try:
    $B
    $x
except $r as $0:
    $0.add_note($s)
    LOG.append($0.__notes__)
    raise
"""),
    ),
    Group(
        7,
        True,
        texts("""
def $0(p, q=$i):
    $B@p
    return $x@p
--
def $0(p=$l, *rest, k=$i, **more):
    $B@p:l
    return p, rest, k, more, $x
--
$I = $i
def $0(p):
    nonlocal $I
    $I += 1
    $B@p
    return $I, $x@p
--
def $0(p):
    if p > 0:
        $B@p
        return $0(p - 1)
    return $x@p
--
def $0(p):
    $Y@p
    yield $x@p
    $Y@p
$G = $0($i)
--
def $0(p):
    try:
        $Y@p
        yield $x@p
    finally:
        LOG.append('done')
        $B@p
$G = $0($i)
next($0($k), None)
--
def $0(p):
    try:
        got = yield $x@p
        LOG.append(got)
        yield $x@p
    except ValueError as error:
        $B@p
        yield str(error)
    return $i
$G = $0($i)
LOG.append(next($0(1)))
--
def $0(p):
    got = yield from $g
    LOG.append(got)
    $Y@p
    yield from $l
$G = $0($i)
--
def $0(p):
    def inner():
        nonlocal p
        p += 1
        $B@p
        return p
    return inner
$F = $0($i)
LOG.append(($0($i)(), $0(2)()))
--
@functools.wraps(tick)
def $0(*args, **kwargs):
    $B@args:u@kwargs:d
    return args, kwargs
--
@twice
def $0(p):
    $B@p
    return $x@p
--
@contextlib.contextmanager
def $0(p):
    LOG.append('in')
    try:
        yield $x@p
    finally:
        $B@p
with $0($i) as $1:
    $B
--
class $0:
    v = $i
    def __init__(self, p=$i):
        self.v = p
        $B@p
    def m(self, p):
        $B@p
        return self.v, $x@p
    def __add__(self, other):
        return $0($i)
    def __repr__(self): return '$0'
$O = $0($i)
--
$F = lambda v: $x@v
LOG.append($f($i))
--
def $0(p):
    return [p, $x@p]
LOG.append($0($i))
LOG.append($0(*$l))
LOG.append($0(**$d))
--
def $0(p, /, q, *, r=1): return p, q, r, $x
LOG.append($0($i, $i))
LOG.append($0($i, q=$i, r=$x))
try: $0($i, *$l, **$d)
except TypeError as $1: LOG.append(str($1))
--
global_$0 = [$x]
def $0(): return global_$0
$0().append($i)
"""),
    ),
    Group(
        3,
        True,
        texts("""
$G = gen($i)
LOG.append(next($G, None))
$B
LOG.append(list($g))
--
def $0(p): yield from p
$G = $g
LOG.append(next($0($g), None))
--
try: LOG.append($o.none if $b else delattr($o, 'w'))
except AttributeError as $0: LOG.append((str($0), $0.name, $0.obj is None))
--
$G = gen($i)
try: LOG.append(next($G)); LOG.append($G.throw(ValueError('t')))
except Exception as $0: LOG.append(repr($0))
--
$G = gen($i)
try: next($G); LOG.append($G.send($i)); LOG.append($G.close())
finally: LOG.append($G.gi_frame is None)
--
$0 = locals(); $0['new'] = $i
LOG.append(($0 is locals(), sorted(vars()), 'new' in $0, dir()))
--
$0 = $l
for $I in $l:
    $0 = [$0, $I]
LOG.append($0)
--
$L = [$l, $l]
$L[0].append($i)
LOG.append($L[0] is $L[1])
--
$I = $i
$F = lambda v: (v, $I)
$I = $i
LOG.append($f(1))
--
$0 = [lambda v, e=e: (v, e, $i) for e in $l]
LOG.append([$1(1) for $1 in $0])
KEPT.append($0)
--
if ($I := $i) > 1 and ($J := $i):
    $B
--
$L = sorted([$i, $i, $i], key=lambda v: tick(v) % 3)
$L.sort(key=$f)
--
$0 = $l
$0[$k], $I = $i, $i
$I, $0[$k] = $i, $i
--
for $0 in list($d):
    $d[$0] = $x
--
$0 = $d
for $1 in $0:
    $0.pop($1)
--
$O = $o
with contextlib.suppress(AttributeError):
    $O.v = $i
    $O.v += 1
    $B
    del $O.v
    $O.v
--
$T = $t
$0 = $T
$0 += 1
$B
LOG.append($0 is $T)
--
$0 = iter($l)
$1 = list(zip($0, $0))
LOG.append(($1, next($0, 'none')))
--
$0: list = []
$0 += $u
$0.append($0) if $b else None
"""),
    ),
)
