"""The expressions of tests/fuzz/python.py, by kind.

Kinds: i int, b bool, s text, t tensor, l list, d dict, e set, u tuple, q deque, o object of a class of the program, c such
a class, f callable of one argument, g iterator, k small constant, z short text, r class of an exception, x any of them.
"""

from __future__ import annotations

LITERALS = {
    "i": ("0", "1", "2", "3", "-1", "5"),
    "k": ("0", "1", "2", "-1"),
    "b": ("True", "False"),
    "s": ("'a'", "'bc'", "''", "'x-y'"),
    "z": ("'a'", "'b'", "'z'"),
    "t": ("T0", "torch.ones(3)", "torch.arange(3)", "torch.tensor(2.0)", "torch.zeros(2, 3)"),
    "l": ("[]", "[1, 2]", "[2, 1, 3]", "L0"),
    "d": ("{}", "{'a': 1}", "{'b': 2, 'a': 0}", "D0"),
    "e": ("set()", "{1, 2}", "frozenset({3})", "E0"),
    "u": ("()", "(1,)", "(1, 2)", "(3, 'a')"),
    "q": ("collections.deque([1, 2])", "collections.deque((), 2)", "Q0"),
    "f": ("abs", "len", "str", "lambda v: v", "lambda v, w=2: (v, w)", "operator.neg", "list", "bool"),
    "g": ("iter([1, 2])", "iter(())", "iter(range(3))", "(n for n in (1, 2))"),
    "o": ("types.SimpleNamespace(v=1)", "P(1, 2)", "R(1)", "Shade.RED", "Exception('a')"),
    "c": ("list", "dict", "P", "R", "int"),
    "r": ("ValueError", "KeyError", "Exception", "(TypeError, IndexError)", "RuntimeError", "AttributeError", "LookupError"),
}


def rows(text: str) -> list[str]:
    return [row.strip() for line in text.strip().splitlines() for row in line.split(" | ") if row.strip()]


def texts(text: str) -> list[str]:
    return [row.strip("\n") for row in text.split("\n--\n")]


EXPRESSIONS = {
    kind: rows(text)
    for kind, text in {
        "i": """
bisect.bisect($l, $i) | math.gcd($i, $i) | math.floor($i / 2) | math.prod($l) | math.comb(4, $k) | math.isqrt(abs($i)) | int(fractions.Fraction($i, 3)) | len(json.dumps($l)) | len(re.findall('[a-c]', $s)) | Rank.LOW + $i | Rank($k) | Z(v=$i).twice
Bits.BOTH.value | len(inspect.signature($f).parameters) | sys._getframe().f_code.co_argcount | len(M) | Ordered($i).v | eval('1 + 2') | struct.unpack('<h', struct.pack('<h', $i))[0] | len(weakref.WeakSet()) | M($i).v | int.__call__($i) | sum($l, start=$i) | max(*$l, $i)
max($u, key=str) | len(f'{$i:_}') | ($i).real | len($s.encode()) | b'ab'[$k] | $i.__index__() | len(textwrap.dedent($s)) | hash(($i, $s)) * 0 | (yield_ := $i) + 1 | int($b) + True | round($i, -1) | ~$i % 5 | math.trunc(1.5 * $i) | operator.countOf($l, $i) | len(traceback.format_exc()) * 0
$i + $i | $i - $i | $i * $k | $i // $i | $i % $i | -$i | ~$i | $i & 3 | $i ^ $i | $i << 1 | abs($i) | len($l) | len($d) | len($s) | len($u)
sum($l) | max($i, $i) | min($l) | max($l, default=$i) | min($l, key=lambda v: -v) | $l[$k] | $l[-1] | $d[$z] | $d.get($z, $i) | $u[$k] | $q[0]
$i if $b else $i | ($i and $i) | ($i or $i) | next($g, $i) | next($g) | $f($i) | $t.shape[-1] | $t.dim() | $t.numel() | int($t.sum()) | len($t)
$t.flatten()[0].item() | $o.v | $o.p | getattr($o, $z, $i) | $o($i) | $o[$k] | len($o) | $o + $i | $i + $o | $o.m($i) | $l.index($i) | $l.count($i) | $u.count(1)
$l.pop() | $d.pop($z, $i) | $d.setdefault($z, $i) | $q.popleft() | $q.pop() | hash($s) & 0 | int('12') | ord('a') | int($b) | round($i / 2) | divmod($i, 3)[0]
functools.reduce(lambda p, q: p + q, $l, $i) | operator.itemgetter($k)($l) | sum(1 for e in $l if $b@e) | sum(e for e in $g) | COUNT[0] | GN
sum(map($f, $l)) | (lambda v: v + $i)($i) | (lambda *v, **w: len(v) + len(w))(*$l, **$d) | [*$l, $i][$k] | {**$d, 'a': $i}['a'] | $i.bit_length() | pow($i, 2, 7)
int(1.0 * $i) | len(set($l)) | len({e for e in $l}) | len($e) | tick($i) | tick($i) + tick($i) | $i.__add__($i) | (tick(1), tick(2))[$k] | int.from_bytes(b'a', 'big')
dict(a=$i)['a'] | len(str($i)) | P($i, 1).x | R($i).a | $s.find('a') | sorted($l)[0] | operator.index($i) | len(list($g)) | type($i)($i) | int($s) | len(range($i))
""",
        "b": """
Bits.ONE in Bits.BOTH | isinstance($x, M) | Ordered($i) <= Ordered($i) | Ordered($i) >= $i | Rank.LOW < $i | Z(v=$i) == Z(v=$i, w=1) | Z() in {Z(): 1} | math.isclose($i, $i) | $i is not $i or True | re.match('a|b', $s) is not None | bool(Bits(0)) | kind_of($x) == kind_of($x)
isinstance($x, typing.Sized) | issubclass($c, typing.Hashable) | inspect.isfunction($f) | not (yield_ := $l) | $u >= $u | {*$l} >= {$i} | $d.items() >= $d.items() | $d.keys() == {'a'} | all(map($f, $l)) | $s.isdigit() | $x in ($x, $i) | $l is ($0 := $l) | M() is M($i) | weakref.ref($0 := S())() is $0
$i > $i | $i < $i < $i | $i == $i | $i in $l | $z in $d | $i not in $e | not $i | not $l | $b and $b | $b or $b | $l == $l | $d == $d | $u < $u | $s == $s
isinstance($x, (int, list)) | isinstance($o, $c) | $o == $o | $o is $o | $l is $l | $i is None | bool($o) | bool($t.sum() > $i) | any($l) | all(e > $i for e in $l)
hasattr($o, $z) | callable($x) | $e <= $e | $e == $e | $t.dim() > 1 | $t.shape == $t.shape | $t is $t | $z in $s | $s.startswith('a') | issubclass($c, object) | $i in $o
type($x) is $c | $o < $o | $t.requires_grad | $i in $g | bool($l) | $f($i) is None | $x is not None | $x == $x | $e.isdisjoint($l) | $i != $o
""",
        "s": """
json.dumps($d, sort_keys=True, default=str) | re.sub('[ab]', lambda m: m[0] * 2, $s) | string.Template(chr(36) + 'a').safe_substitute($d) | '{a[0]}'.format(a=$l) | '{0.v}'.format(R($i)) | '{a}'.format_map($d) | '%(a)s' % $d | '%5.2f|%x' % ($i, abs($i)) | f'{$s:{$i}}' | f'{$x!s:.4}' | textwrap.shorten($s, 3)
$s.translate({97: 'q'}) | $s.removeprefix('a') | str($o.__class__.__mro__[-1]) | Shade.RED.name | str(Rank.LOW) | repr(Bits.BOTH) | repr(Z(v=$i)) | f'{Shade.BLUE}' | str(fractions.Fraction($i, 4)) | inspect.getdoc($c) or '' | f'{$b!r:^7}' | f"{'a' if $b else $s}" | $s.encode().hex() | b'ab'.decode()
''.join(map(str, $l)) | ' '.join(f'{a}{b}' for a, b in zip($s, $l)) | $s.expandtabs() | repr(inspect.signature($f)) if $b else $s | type($o).__qualname__ | $f.__name__ | $f.__qualname__ | M['a'][0] | '%s' % ($u,) | $s.rsplit('-', 1)[-1] | $s.splitlines()[0]
$s + $s | $s * 2 | str($i) | f'{$i}' | f'{$s!r:>5}' | f'{$i:03d}|{$s}' | f'{$i:>{4}}' | '%s-%d' % ($s, $i) | '{0}/{k}'.format($i, k=$s) | $s.upper() | '-'.join($u@e)
','.join(str(e) for e in $l) | $s[::-1] | $s[$k:] | repr($l) | repr($u) | str($d) | $s.split('-')[0] | $s.replace('a', 'b') | type($x).__name__ | $z | f'{$o}' | str($o)
$s if $b else $s | max($s, 'b') | ''.join(sorted($s)) | f'{$l=}' | $s.strip() | $s.zfill(4) | $s.title() | ''.join(e for e in $s if e != 'a') | repr($o) | format($i, 'x') | f'{$d}'
f'{$i!r}{$b}' | $s.partition('-')[0] | $s.join(['p', 'q']) | str($e) | str($q) | f'{1.5 * $i:.2f}' | ascii($s) | $s.center(5, '*') | str($t.shape) | str($t.dtype)
""",
        "t": """
$t + $t | $t * $i | $t - $i | $i - $t | -$t | $t.sin() if $t.is_floating_point() else $t | $t.sum() | $t.sum(-1) | $t.clone() | $t.relu() | $t.flatten() | $t.reshape(-1)
$t[0] | $t[..., $k] | $t[None] | $t.unsqueeze(0) | torch.cat([$t, $t]) | torch.stack([$t, $t]) | torch.where($t > $i, $t, $t) | $t.to(torch.float64) | $t.detach() | $t @ $t.T
sum([$t, $t]) | $t if $b else $t | $f($t) | torch.full((2,), $i) | $t.new_zeros($i) | $t.view($t.shape) | $t.max() | $t.add_($i) | $t.mul_(2) | max($t, $t, key=lambda v: v.dim())
functools.reduce(torch.add, [$t, $t, $t]) | torch.tensor($l) | torch.tensor([$i, $i]) | $t.expand(2, *$t.shape) | $t.t() | (lambda v: v * 2)($t) | $t / 2 | $t > $i | $t == $t | $t ** 2
torch.zeros($t.shape) | $t.tanh() | abs($t) | $t.chunk(2)[0] | torch.maximum($t, $t) | next(iter($t)) | {'t': $t}['t'] | [$t, $t][$k] | ($t, 1)[0] | copy.copy($t) | $o + $t | $t + $o
""",
        "l": """
list(itertools.combinations($l, 2)) | list(itertools.permutations($l[:3], 2)) | list(itertools.compress($l, $u)) | list(itertools.dropwhile(lambda v: v < $i, $l)) | list(itertools.filterfalse($f, $l)) | list(zip($l, $u, strict=True)) | list(map(max, $l, $l)) | [*Shade] | [*Bits.BOTH] | heapq.nsmallest(2, $l) | json.loads(json.dumps($l))
re.split('-', $s) | [y for x in $l if (y := x) is not None] | [[e * w for w in $l[:2]] for e in $l[:2]] | [lambda e=e: e + n for n, e in enumerate($l)] | [(a, b) for a, *b in [$u, $l]] | list(collections.Counter($s).most_common(2)) | list(collections.ChainMap($d, $d)) | dataclasses.astuple(R($i, $l))[1] | [f.name for f in dataclasses.fields(R)]
list(itertools.repeat($x, 2)) | sorted($l, key=functools.cmp_to_key(lambda a, b: b - a)) | sorted([Ordered($i), Ordered($i)])[0:1] | [kind_of(one) for one in $u] | [drive(Turn($i).__aenter__())] | list(Rank) | [*map(type, $u)] | [x for x in (lambda: (yield $i))()] | list($s) | [*$s, *$u]
[$i, $i] | [$i, *$l] | [e for e in $l] | [e + $i for e in $l if $b@e] | [$x@e for e in $l] | $l + $l | $l[$k:] | $l[::-1] | $l[:2] * 2 | sorted($l) | sorted($l, key=lambda v: -v)
sorted($l, key=$f, reverse=$b) | list($u) | list($d) | list($d.values()) | list($g) | list($e) | list($q) | list(map($f, $l)) | list(filter($f, $l)) | [*$u] | [*$d.items()]
list(zip($l, $u)) | list(enumerate($l)) | list(reversed($l)) | [[]] * 2 | [$x, $x] | [$t, $i] | $l if $b else $l | $l.copy() | copy.copy($l) | copy.deepcopy($l) | list(range($i))
[(e, w) for e in $l for w in $l[:2]] | [w for e in [$l, $l] for w in e] | [(w := e) for e in $l] | list(itertools.chain($l, $g)) | list(itertools.accumulate($l)) | $s.split('-')
[lambda: e for e in $l] | [v() for v in [lambda e=e: e for e in $l]] | list(itertools.islice($g, 2)) | list(itertools.zip_longest($l, $u)) | $t.tolist() | $d.setdefault('l', []) | list($o)
list($o.items) | [$f(e) for e in $l] | [v for _, v in sorted($d.items())] | list(itertools.groupby($l, $f))[:1] | list(itertools.product($l[:2], $u)) | [tick(e) for e in $l] | list(dict.fromkeys($l))
list(itertools.takewhile(lambda v: v < $i, $l)) | [[$i]] * 2 | list($t.shape) | [*$g, *$l] | [*range($k, $i)] | sorted($d) | sorted($e)
""",
        "d": """
dataclasses.asdict(R($i, $l)) | json.loads(json.dumps({'a': $i})) | inspect.signature($f).parameters | {k: v for k, v in zip($s, $l)} | {**dict.fromkeys($l), **$d} | dict(collections.ChainMap($d, {'a': $i})) | {name: one.value for name, one in Shade.__members__.items()} | types.MappingProxyType($d) | {(k, n): v for n, (k, v) in enumerate($d.items())}
dict(sorted($d.items(), reverse=True)) | {Rank.LOW: $i, 1: $x} | {Shade.RED: $x} | {R: $i, S: $x} | {frozenset($l): $i} | collections.UserDict($d).data | {x: y for x in $l for y in $l if x is not y}
{'a': $i, $z: $x} | {**$d} | {**$d, 'b': $i} | {e: $i@e for e in $l} | {k: v for k, v in $d.items()} | {v: k for k, v in $d.items()} | $d.copy() | dict($d) | dict(a=$i, **$d)
dict(zip('ab', $l)) | $d | {'b': $i} | dict.fromkeys($s, $i) | collections.OrderedDict(a=$i, b=$x) | collections.defaultdict(list, $d) | collections.Counter($l) | {'t': $t} | collections.defaultdict(int)
vars($o) | $d if $b else $d | {str(e): e for e in $l} | copy.deepcopy($d) | {1: $i, True: $i} | types.SimpleNamespace(a=$i).__dict__ | dict([('a', $i)]) | collections.OrderedDict($d) | {**vars($o)}
""",
        "e": """
{$i, $i} | set($l) | {e % 3 for e in $l} | $e + 0 if False else $e | $e & $e | $e - {1} | $e ^ {$i} | set($d) | frozenset($l) | $e.union($l) | set($s) | {*$l, $i} | $d.keys() & {'a'} | {$z, $i}
""",
        "u": """
($i, $i) | ($x,) | tuple($l) | (*$l, $i) | $u + ($i,) | $u[::-1] | tuple(e for e in $l) | ($l, $l) | divmod($i, 3) | P($i, $x) | P(1, 2)._replace(x=$i) | tuple($t.shape) | $t.shape | ($t, $i)
tuple($g) | (($i, $i), $u) | $u * 2 | $u[$k:] | tuple(map($f, $l)) | ($u if $b else $u) | tuple(sorted($l)) | tuple($d.items()) | (tick(1), *$l, tick(2)) | tuple(zip($l, $l)) | $s.partition('-')
""",
        "q": "collections.deque($l) | collections.deque($l, 2) | collections.deque([$x]) | $q.copy() | collections.deque($g, maxlen=$k)",
        "o": """
Z(v=$i, w=$x) | Ordered($i) | M($i) | Rank($k) | Bits($k) | Bits.ONE ^ Bits.TWO | fractions.Fraction($i, 3) | dataclasses.replace(Z(), v=$i) | type('Made', (S,), {'m': lambda self, x=1: x})($i) | Turn($i) | collections.UserDict($d) | collections.ChainMap($d) | types.MappingProxyType($d) | P._make($u[:2]) | copy.deepcopy(R($i, $l))
functools.partial(S, v=$i)() | operator.methodcaller('m', $i)(S(1)) | max([R(1), R($i)]) | types.SimpleNamespace(**$d) | contextlib.nullcontext($i) | contextlib.ExitStack() | inspect.signature($f) | object() if False else S($i)
$c($i) | $c() | P($i, $i) | R($i) | R($i, [$i]) | types.SimpleNamespace(v=$i, a=$x) | $o | copy.copy($o) | functools.partial($f, $i) | dataclasses.replace(R(1), a=$i) | Shade(2) | Shade($i) | Shade['RED'] | slice($i, $i)
ValueError($i, $s) | KeyError($z) | range($i) | $o if $b else $o | S($i) | -$o | $o + 1
""",
        "f": """
kind_of | functools.partial($f) | operator.methodcaller('m') | Ordered($i).half | S($i).m | functools.cache(lambda v: v) | M | Ordered | types.MethodType(lambda self, v: (self, v), $i) | (lambda g: lambda v: g(g(v)))($f) | functools.reduce(lambda p, q: lambda v: q(p(v)), [$f, $f]) | staticmethod($f) | type(S()).m.__get__(S($i)) | vars(S)['m'].__get__(S($i), S)
lambda v: $x@v | lambda v, w=$i: (v, w, $i) | functools.partial(max, $i) | $o.m | operator.itemgetter($k) | operator.attrgetter('v') | LOG.append | $d.get | (lambda y: lambda v: (v, y))($x) | $f
lambda *v: $u | (lambda v: $x@v) if $b else $f | lambda v: LOG.append(v) | functools.lru_cache(lambda v: $i) | lambda v, *, k=$i: k | $q.count | $s.join | $c | tick | str.upper | lambda v: (yield v)
""",
        "g": """
iter($l) | iter($d) | iter($d.items()) | (e for e in $l) | ($x@e for e in $l) | zip($l, $u) | enumerate($l, $i) | map($f, $l) | filter(None, $l) | reversed($l) | iter($e) | itertools.chain($l, $u) | iter($u)
itertools.islice(itertools.count($i), 3) | itertools.cycle($l) if False else iter($l) | (tick(e) for e in $l) | iter($o) | iter(lambda: 1, 1) | itertools.accumulate($l) | itertools.starmap(max, [($i, $i)])
(e for e in $l if $b@e) | itertools.pairwise($l) | iter($q) | itertools.tee($l)[0] | (w for e in ($l, $u) for w in e) | $g | gen($i) | gen($i)
""",
    }.items()
}
