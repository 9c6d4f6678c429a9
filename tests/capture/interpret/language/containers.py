# ruff: noqa
"""Lists, dicts, sets, tuples, deques and their kin: arguments mutated, results aliased, every method."""

from __future__ import annotations

import collections
import copy
import functools
import sys
import weakref
from types import MappingProxyType

import torch

from tests.capture.interpret.language.support import program, x


@program("data-dependent-branch")
def list_methods():
    def f(x, l):
        l.append(x)
        l.extend([1, 2])
        l.insert(0, "first")
        last = l.pop()
        second = l.pop(1)
        l.remove(1)
        l.reverse()
        c = l.copy()
        c.clear()
        return l, last, second, c, l.index("first"), l.count(7), len(l)

    return f, [(x(), [3]), (x(), [7, 7])]


@program
def list_methods_of_numbers():
    def f(x, l):
        l.append(5)
        l.extend([1, 2])
        l.insert(0, 3)
        last = l.pop()
        second = l.pop(1)
        l.remove(1)
        l.reverse()
        try:
            l.remove(99)
        except ValueError as error:
            message = str(error)
        return (
            l,
            last,
            second,
            l.copy(),
            l.index(3),
            l.count(7),
            x + len(l),
            message,
            collections.deque([1, 2, 1]).count(1),
        )

    return f, [(x(), [3]), (x(), [7, 7])]


@program
def list_is_returned_twice():
    def f(x):
        l = [x + 1]
        return l, l, [l], {"l": l}

    return f, [(x(),), (x(),)]


@program
def argument_is_returned():
    def f(x, l, d):
        d["l"] = l
        l.append(d)
        return l, d, x

    return f, [(x(), [], {}), (x(), [1], {"a": 1})]


@program
def two_arguments_are_one_list():
    def f(x, a, b):
        a.append(1)
        b.append(2)
        return x + len(a), a is b

    l = []
    return f, [(x(), l, l), (x(), [], []), (x(), l, l)]


@program
def nested_containers_are_mutated():
    def f(x, d):
        d["a"]["b"].append(x + 1)
        d["a"]["c"] = d["a"]["b"]
        d["list"][0]["z"] = len(d["a"]["b"])
        return d["a"]["b"][-1] * 2

    return f, [(x(), {"a": {"b": []}, "list": [{}]}), (x(), {"a": {"b": [1]}, "list": [{"z": 0}]})]


@program
def slices_are_assigned_and_deleted():
    def f(x, l):
        l[1:3] = [x, x + 1, x + 2]
        del l[0]
        l[::2] = ["a"] * len(l[::2])
        l[-1] += "b" if isinstance(l[-1], str) else 1
        del l[:1]
        l *= 2
        l += (9,)
        return l[::-1], l[5:1:-1]

    return f, [(x(), [1, 2, 3, 4]), (x(), [1, 2, 3, 4, 5])]


@program
def dict_methods():
    def f(x, d):
        d.setdefault("n", []).append(1)
        d.update({"u": 1}, v=2)
        d |= {"w": x}
        popped = d.pop("u")
        missing = d.pop("zzz", "none")
        item = d.popitem()
        got = d.get("n"), d.get("q"), d.get("q", 3)
        merged = d | {"n": 0}
        return (
            popped,
            missing,
            item,
            got,
            merged,
            list(d),
            list(d.values()),
            list(d.items()),
            dict.fromkeys("ab", 1),
            "v" in d,
            len(d),
        )

    return f, [(x(), {"a": 1}), (x(), {"n": [0], "b": 2})]


@program
def dict_order_is_kept():
    def f(x, d):
        v = d.pop("a")
        d["a"] = v
        d["new"] = x
        return list(d), list(reversed(d)), {**d, "a": 0}

    return f, [(x(), {"a": 1, "b": 2, "c": 3}), (x(), {"b": 2, "a": 1})]


@program
def dict_views_are_live():
    def f(x):
        d = {"a": 1}
        k, v, i = d.keys(), d.values(), d.items()
        d["b"] = x
        return list(k), len(v), ("a", 1) in i, k & {"a", "z"}, k | {"q"}, k == {"a", "b"}, k

    return f, [(x(),), (x(),)]


@program
def dict_changed_during_iteration():
    def f(x, d):
        try:
            for k in d:
                d[k + "!"] = 1
        except RuntimeError as error:
            return x + 1, str(error)

    return f, [(x(), {"a": 1}), (x(), {"a": 1, "b": 2})]


@program
def dict_with_odd_keys():
    def f(x, d):
        d[(1, 2)] = "tuple"
        d[None] = "none"
        d[1.0] = "one"
        d[True] = "true"
        d[frozenset([1])] = "set"
        return x + len(d), d

    return f, [(x(), {1: "int"}), (x(), {})]


@program
def tensor_keys():
    def f(x, w):
        d = {x: 1, w: 2}
        return d[w], x in d, len({x, w, x})

    return f, [(x(), torch.ones(3)), (x(), torch.ones(3))]


@program
def dict_comprehension_and_zip():
    def f(x, names):
        d = {n: x + i for i, n in enumerate(names)}
        e = dict(zip(names, range(len(names))))
        inverted = {v: k for k, v in e.items()}
        return d, e, inverted, dict([("a", 1)], b=2)

    return f, [(x(), ["p", "q"]), (x(), "rst")]


@program
def sets():
    def f(x, s):
        s.add(3)
        s.discard(100)
        s.update([4, 5])
        s -= {4}
        t = s & {3, 5, 9}
        u = s | {10}
        v = s ^ {3}
        try:
            s.remove(99)
        except KeyError as error:
            e = error.args
        return t, u, v, e, s <= u, s.isdisjoint({77}), frozenset(t), 3 in s, len(s), sorted(s), x + len(s)

    return f, [(x(), {1, 2}), (x(), set())]


@program
def set_comprehension_and_dedup():
    def f(x, values):
        seen = set()
        out = [v for v in values if not (v in seen or seen.add(v))]
        return out, {v % 3 for v in values}, x + len(out)

    return f, [(x(), [3, 1, 3, 2, 1]), (x(), [])]


@program
def tuples():
    def f(x, t):
        a, *b = t
        return (
            t + (x,),
            t * 2,
            t[1:],
            t.index(2),
            t.count(2),
            b,
            (1, 2) < (1, 3),
            t == (1, 2, 2),
            hash((1, "a")) == hash((1, "a")),
            t,
        )

    return f, [(x(), (1, 2, 2)), (x(), (5, 2))]


@program
def tuple_with_mutable_member():
    def f(x, t):
        t[0].append(x)
        try:
            t[0] += [1]
        except TypeError as error:
            return str(error), t

    return f, [(x(), ([],)), (x(), ([1], 2))]


@program("data-dependent-branch")
def deque_methods():
    def f(x, q):
        q.append(x)
        q.appendleft(0)
        q.extend([1, 2])
        q.rotate(1)
        left = q.popleft()
        q.remove(1)
        return left, q, q[0], len(q), q.maxlen, collections.deque([1, 2, 3], maxlen=2), list(reversed(q))

    return f, [(x(), collections.deque()), (x(), collections.deque([7, 8], maxlen=4))]


@program
def ordered_dict():
    def f(x, d):
        d["c"] = x
        d.move_to_end("a")
        first = d.popitem(last=False)
        e = collections.OrderedDict([("z", 1)])
        e.move_to_end("z", last=False)
        return first, d, e, list(d.keys()), collections.OrderedDict(a=1, b=2) == collections.OrderedDict(b=2, a=1)

    return f, [(x(), collections.OrderedDict(a=1, b=2)), (x(), collections.OrderedDict(b=1, a=3))]


@program
def defaultdicts():
    def f(x, d):
        d["new"].append(x)
        d["old"].append(1)
        n = collections.defaultdict(int)
        for c in "hello":
            n[c] += 1
        nested = collections.defaultdict(lambda: collections.defaultdict(list))
        nested["a"]["b"].append(x + 1)
        return d, n, "zzz" in d, d.get("zzz"), nested["a"]["b"], dict(n)

    return f, [(x(), collections.defaultdict(list)), (x(), collections.defaultdict(list, old=[0]))]


@program
def counters():
    def f(x, words):
        c = collections.Counter(words)
        c["extra"] += 2
        c.update(["a", "a"])
        d = collections.Counter(a=1)
        return x + c["a"], c.most_common(2), c["missing"], c - d, c + d, sum(c.values()), sorted(c.elements()), c

    return f, [(x(), ["a", "b", "a"]), (x(), "abc")]


@program
def chain_map():
    def f(x, base):
        local = {"b": x}
        m = collections.ChainMap(local, base)
        m["new"] = 1
        return m["a"], m["b"], sorted(m), len(m), "zz" in m, local, m.maps[1] is base, m.new_child({"a": 5})["a"]

    return f, [(x(), {"a": 1, "b": 2}), (x(), {"a": 3})]


@program
def user_collections():
    class MyList(collections.UserList):
        def total(self):
            return sum(self)

    class MyDict(collections.UserDict):
        def __missing__(self, k):
            return k * 2

    def f(x):
        l = MyList([1, 2])
        l.append(3)
        d = MyDict(a=1)
        return x + l.total() + d["a"], d[4], l.data, len(d)

    return f, [(x(),), (x(),)]


@program
def builtin_subclasses():
    class L(list):
        def first(self):
            return self[0]

    class D(dict):
        def __missing__(self, k):
            self[k] = k + "!"
            return self[k]

        def __getattr__(self, name):
            return self[name]

    class T(tuple):
        pass

    def f(x, l, d):
        l.append(x)
        l.tag = "tagged"
        return l.first(), d["q"], d.attr, d, T((1, x))[1] * 2, type(l).__name__, L([3]), D(a=1)

    return f, [(x(), L([1]), D()), (x(), L([5]), D(attr=1))]


@program
def dict_subclass_with_overridden_methods():
    class Upper(dict):
        def __setitem__(self, k, v):
            super().__setitem__(k.upper(), v)

        def __getitem__(self, k):
            return super().__getitem__(k.upper())

        def __contains__(self, k):
            return super().__contains__(k.upper())

    def f(x, d):
        d["a"] = x
        d["b"] = 2
        return d["A"] * d["b"], "a" in d, list(d), d.get("a")

    return f, [(x(), Upper()), (x(), Upper(Z=1))]


@program
def list_subclass_with_getitem():
    class Wrap(list):
        def __getitem__(self, i):
            return super().__getitem__(i % len(self))

        def __len__(self):
            return list.__len__(self)

    def f(x, l):
        l[0] = x
        return l[5] if len(l) == 5 else l[len(l)], [v for v in l][1:], len(l)

    return f, [(x(), Wrap([1, 2])), (x(), Wrap([1, 2, 3, 4, 5]))]


@program
def comprehensions_nested():
    def f(x, rows):
        flat = [v for row in rows for v in row if v]
        matrix = [[x * v for v in row] for row in rows]
        pairs = {(i, j): i * j for i in range(3) for j in range(i)}
        return flat, matrix, pairs, [a for a in [b for b in range(3)]], [lambda: v for v in flat][0]()

    return f, [(x(), [[1, 0], [2]]), (x(), [[3]])]


@program
def sorting():
    def f(x, people):
        by_age = sorted(people, key=lambda p: p["age"])
        by_two = sorted(people, key=lambda p: (-p["age"], p["name"]), reverse=True)
        names = [p["name"] for p in people]
        names.sort(key=str.lower, reverse=True)
        oldest = max(people, key=lambda p: p["age"])
        people.sort(key=lambda p: p["name"])
        return by_age, by_two, names, oldest, min(names, default=""), x + oldest["age"]

    people = lambda: [{"name": "b", "age": 3}, {"name": "A", "age": 3}, {"name": "c", "age": 1}]
    return f, [(x(), people()), (x(), people()[:2])]


@program
def star_unpacking():
    def f(x, seq):
        a, *b, c = seq
        *d, e = b
        (g, h), i = (1, 2), [3]
        [j, [k, *l]] = [0, [1, 2, 3]]
        m = [*seq, *d, *range(2)]
        n = {**{"a": 1}, **{"a": 2}}
        return a, b, c, d, e, g + h, i, j, k, l, m, n, (*b, x)

    return f, [(x(), [1, 2, 3, 4]), (x(), "abcde")]


@program
def the_rest_of_an_iterator_is_asked_for_anew():
    log = []

    class Again:
        def __init__(self, n):
            self.n = self.left = n

        def __iter__(self):
            log.append("iter")
            self.left = self.n
            return self

        def __next__(self):
            log.append(self.left)
            if self.left == 0:
                raise StopIteration
            self.left -= 1
            return self.left

        def __length_hint__(self):
            log.append("hint")
            return self.left

    def f(x, n):
        first, *rest = Again(n)
        *most, last = Again(n)
        try:
            one, two, three, *none = Again(2)
        except ValueError as error:
            return x + first, rest, most, last, str(error)

    return f, [(x(), 2), (x(), 3)], lambda: log


@program
def unpack_errors():
    def f(x, seq):
        try:
            a, b = seq
        except (ValueError, TypeError) as error:
            return x, str(error)
        return x + a, b

    return f, [
        (x(), [1, 2]),
        (x(), [1]),
        (x(), [1, 2, 3]),
        (x(), 5),
        (x(), {"k": 1, "l": 2}) if False else (x(), (3, 4)),
    ]


@program
def identity_and_equality():
    def f(x, a, b):
        return a is b, a == b, a is not b, id(a) == id(b), x is x, [a] == [b], a in [b], x + 1, None is None

    l = [1]
    return f, [(x(), l, l), (x(), l, [1]), (x(), [], [2])]


@program
def cyclic_structure():
    def f(x):
        a = [x]
        a.append(a)
        d = {"a": a}
        d["d"] = d
        return a, d

    return f, [(x(),), (x(),)]


@program
def cyclic_argument():
    def f(x, a):
        a.append(x + 1)
        return a[0] is a, a

    def make():
        a = []
        a.append(a)
        return a

    return f, [(x(), make()), (x(), make())]


@program
def copies():
    def f(x, d):
        s, deep = copy.copy(d), copy.deepcopy(d)
        deep["l"].append(5)
        s["new"] = 1
        return s, deep, s["l"] is d["l"], deep["l"] is d["l"], x + len(d), d["l"][:], list(d["l"]), d["l"].copy()

    return f, [(x(), {"l": [1]}), (x(), {"l": [1, 2], "m": (3,)})]


@program
def tensors_in_containers_keep_identity():
    def f(x, l):
        y = x + 1
        l.append(y)
        l.append(y)
        l.append(x)
        return y, l[0] is y, any(v is x for v in l), [i for i, v in enumerate(l) if v is x]

    return f, [(x(), []), (x(), [])]


@program
def membership_and_index_with_tensors_by_identity():
    def f(x, w):
        l = [x, w]
        return l.index(x), [a is w for a in l], x is l[0]

    return f, [(x(), torch.ones(2, 3)), (x(), torch.ones(2, 3))]


@program
def views_of_arguments_share_memory():
    def f(x):
        a = x[0]
        b = x.view(-1)
        c = x.t()
        return a, b, c, x

    return f, [(x(),), (x(),)]


@program
def inplace_through_views():
    def f(x):
        row = x[0]
        row.add_(10)
        x[1, :2] = 5
        x[:, 2] *= 2
        return row, x.sum()

    return f, [(x(),), (x(),)]


@program
def mapping_proxy_and_frozen():
    def f(x, m):
        try:
            m["a"] = 1
        except TypeError as error:
            return x * m["k"], str(error), len(m), list(m)

    return f, [(x(), MappingProxyType({"k": 2})), (x(), MappingProxyType({"k": 3, "l": 4}))]


@program
def empty_and_falsy():
    def f(x, v):
        return x + 1 if v else x - 1

    return f, [(x(), []), (x(), [0]), (x(), {}), (x(), ""), (x(), 0.0), (x(), None), (x(), (0,)), (x(), set())]


@program
def list_of_lists_multiplication_aliases():
    def f(x):
        rows = [[0] * 2] * 2
        rows[0][0] = x
        return rows, rows[0] is rows[1]

    return f, [(x(),), (x(),)]


@program
def accumulate_in_attribute_lists():
    class Model:
        def __init__(self):
            self.history = []
            self.cache = {}

        def step(self, x):
            y = x * 2
            self.history.append(y)
            self.cache[len(self.history)] = y
            return y

    m = Model()

    def f(x):
        return m.step(x) + m.step(x + 1)

    return f, [(x(),), (x(),)], lambda: vars(m)


@program
def iterators_over_containers_are_returned():
    def f(x):
        it = iter([x, x + 1, 3])
        first = next(it)
        e = enumerate(["a", "b"])
        next(e)
        z = zip([1, 2], "ab")
        r = reversed([1, 2, 3])
        return first, list(it), list(e), list(z), list(r)

    return f, [(x(),), (x(),)]


@program
def live_iterators_are_returned():
    def f(x):
        l = [1, 2, 3]
        it = iter(l)
        next(it)
        e = enumerate(l, 5)
        next(e)
        r = iter(range(5))
        next(r)
        return x + 1, it, e, r, l

    return lambda x: (lambda t: (t[0], list(t[1]), list(t[2]), list(t[3]), t[4]))(g(x)) if False else f(x), [
        (x(),),
        (x(),),
    ]


@program
def bytes_and_memory():
    def f(x, b):
        a = bytearray(b)
        a.append(65)
        a[0] = 66
        m = memoryview(b"hello")[1:3]
        return (
            a,
            bytes(a),
            b.hex(),
            b + b"z",
            b[0],
            b[1:],
            int.from_bytes(b, "big"),
            bytes(m),
            b.split(b"b"),
            x + len(a),
        )

    return f, [(x(), b"abc"), (x(), b"xbz")]


@program
def a_sort_that_fails():
    """The list is left as far as it had come."""

    def f(x, outside, reverse):
        made = [3, 1, 2, 5, 4, "b", 0]
        failed = []
        for values, options in ((made, {}), (outside, {"reverse": reverse}), (made, {"key": lambda v: v, "reverse": True})):
            try:
                values.sort(**options)
            except TypeError as error:
                failed.append(str(error))
        return x + 1, made, failed

    return f, [(x(), [3, 1, 2, "b"], False), (x(), [2, 3, 1, None, 0], True), (x(), [3, 1, 2], True)]


class Sharing:
    __slots__ = ("one", "other")


class Attributed:
    pass


@program(*(["cannot-rebuild"] if sys.version_info >= (3, 14) else []))  # a function cannot be given both its annotations
def what_two_places_share_stays_one():
    """However the places hold it: slots, attributes, causes, contexts, annotations, tensors."""

    def in_slots(shared):
        made = Sharing()
        made.one = made.other = shared
        return made

    def in_one_slot(shared):
        made = Sharing()
        made.one = shared
        return made

    def in_attributes(shared):
        made = Attributed()
        made.one = shared
        return made

    def in_errors(shared):
        made, held = ValueError(1), KeyError(2)
        held.add_note("note")
        held.more = shared
        made.__cause__ = held
        return made

    def in_contexts(shared):
        try:
            try:
                raise KeyError(shared)
            finally:
                raise ValueError
        except ValueError as error:
            return error

    def in_annotations(shared):
        def made(one):
            return one

        made.__annotations__ = {"one": shared}
        return made

    def in_tensors(shared):
        made = torch.ones(2)
        made.tag = shared
        return made

    def in_arguments(shared):
        made = ExceptionGroup("several", [ValueError(shared), KeyError()])
        return made, made.args, made.exceptions, made.exceptions[0].args

    def in_given_arguments(shared):
        made, given = ValueError(), (1, shared)
        made.args = given
        return given, made

    def in_partials(shared):
        made = functools.partial(max, shared, key=shared)
        return made.args, made.keywords, made

    def in_defaults(shared):
        def made(one=shared, *, other=shared) -> list:
            return one, shared

        def another():
            return one

        another.__defaults__, another.__kwdefaults__ = made.__defaults__, made.__kwdefaults__
        return made.__closure__, made.__annotations__, made, another, made.__kwdefaults__, made.__defaults__

    def f(x):
        found = []
        makers = (in_slots, in_one_slot, in_attributes, in_errors, in_contexts, in_annotations, in_tensors)
        for make in (*makers, in_arguments, in_given_arguments, in_partials, in_defaults):
            for first in (False, True):
                shared = [x.shape[0]]
                made = make(shared)
                found.append((made, shared) if first else (shared, made))
        return x + 1, found

    return f, [(x(),), (x(),)]


@program
def a_deep_copy_shares_what_the_original_shares():
    class Copied:
        def __deepcopy__(self, memo):
            return Copied()

    def f(x, held):
        inner, pair, one, frozen = {2}, ([1], 2), Copied(), frozenset({Attributed})
        method = inner.copy
        copied = copy.deepcopy([held, held, inner, inner, pair, pair, pair[0], one, one, frozen, frozen, x, x])
        return copied, copy.deepcopy({"a": held, "b": pair, "c": [held, pair]}), method()

    return f, [(x(), {1}), (x(), {1, 2})]


@program("untraceable-call", "opaque-object")
def keys_that_are_known_by_identity():
    """Equal ones, whose comparison is a tensor, or the program's."""

    shared = [1, 2]
    keys = [torch.ones(1), torch.ones(1), torch.ones(2), torch.ones(2)]
    held = {key: shared for key in keys}

    def f(x):
        return x + 1, [sum(value) for value in held.values()], [len(key) for key in held]

    def g(x, place=None):
        if place is not None:
            held[keys[place]] = [3 + place]
        return f(x)

    return g, [(x(),), (x(), 1), (x(), 3), (x(),)]


@program
def what_a_dict_is_updated_with_is_taken_one_by_one():
    """So an error leaves what came before it, and what makes the pairs sees them arrive."""

    def pairs(held, last):
        for number in range(3):
            yield (number, len(held))
        if last is not None:
            yield last

    class Mapping:
        def __init__(self, held):
            self.held = held

        def keys(self):
            return ["a", "b", "zz"]

        def __getitem__(self, key):
            return {"a": len(self.held), "b": len(self.held)}[key]

    def f(x, outside):
        said = []
        for held in (outside, {}, collections.OrderedDict(), collections.Counter()):
            for given in (pairs(held, None), pairs(held, (1,)), pairs(held, ([], 2)), pairs(held, 5), [(7, 8), (9,)], Mapping(held)):
                try:
                    dict.update(held, given) if type(held) is collections.Counter else held.update(given)
                except Exception as error:
                    said.append(repr(error))
            said.append(list(held.items()))
        return x + 1, said

    return f, [(x(), {}), (x(), {"c": 1})]


@program
def copies_of_dicts_that_answer_in_another_way():
    """What CPython reads of a subclass: its table, its `keys` and `[]`, or its iterator."""

    class Keys(dict):
        def keys(self):
            return ["b", "a"]

    class Item(dict):
        def __getitem__(self, key):
            return super().__getitem__(key) + 1

    class Default(collections.defaultdict):
        keys, __getitem__ = Keys.keys, lambda self, key: dict.__getitem__(self, key) + 1

    class Iter(Item):
        def __iter__(self):
            return iter(["b"])

    class Ordered(collections.OrderedDict):
        keys, __getitem__ = Keys.keys, lambda self, key: collections.OrderedDict.__getitem__(self, key) + 1

    def take(**given):
        return given

    def f(x, *given):
        made = []
        for one in (*given, Keys(a=1, b=2), Item(a=1, b=2), Iter(a=1, b=2), Ordered(a=1, b=2)):
            updated, merged, ordered = {}, {}, collections.OrderedDict()
            updated.update(one)
            merged |= one
            ordered.update(one)
            copies = {**one}, {"z": 0, **one}, dict(one, z=1), take(**one), take(z=0, **one), updated, merged, {} | one
            made += [*copies, ordered, collections.OrderedDict(one), collections.Counter(one), one.copy(), one | {"z": 1}]
            made += [collections.defaultdict(int, one), Iter(one), [*one], "{a}".format(**one) if "a" in {**one} else None]
        return x * 2, [(type(one).__name__, list(dict.items(one)) if isinstance(one, dict) else one) for one in made]

    kinds = Keys, Item, Iter, Ordered, lambda held: Default(int, held)
    return f, [(x(), *(kind({"a": 1, "b": 2}) for kind in kinds)), (x(), *(kind({"b": 3}) for kind in kinds[1:4]))]


@program
def copies_of_sets_that_iterate_in_another_way():
    class Iter(set):
        def __iter__(self):
            return iter([7, 8])

    class Frozen(frozenset):
        __iter__ = Iter.__iter__

    def f(x, *given):
        made = []
        for one in (*given, Iter([1, 2]), Frozen([1, 2])):
            made += [{*one}, {0, *one}, set(one), {7}.union(one), [*one], sorted(one), frozenset(one)]
        return x + 1, made

    return f, [(x(), Iter([1, 2]), Frozen([1, 3])), (x(), Iter([5]))]


@program
def keys_that_are_functions_written_in_c():
    grad, data = torch.Tensor.grad, torch.Tensor.data
    held = [1]
    table = {held.append: 1, torch.add: 2, grad.__get__: 3, len: 4, {}.get: 5}

    def f(x, functions):
        found = [torch.add in functions, torch.sub in functions, len in functions, grad.__get__ in functions]
        found += [data.__get__ in functions, torch.Tensor.add in functions, (torch.cos, 1) in functions, len(functions)]
        if isinstance(functions, set):
            functions.discard(len)
            functions.add(torch.mul)
        found += [torch.mul in functions, {torch.add} | functions == functions, functions - {torch.add}]
        found += [table.get(held.append), held.append in table, [].append in table, table[torch.add], table[grad.__get__]]
        return x + sum(found[:4]), found

    def functions():
        return {torch.add, len, grad.__get__, torch.Tensor.add, (torch.cos, 1), torch.sin.__call__, torch.ops.aten.add}

    return f, [(x(), functions()), (x(), functions() - {torch.add}), (x(), frozenset(functions()))]


@program
def proxies_that_leave():
    table, holder = {"a": 2}, Holder()

    def f(x):
        local = {"x": x}
        shown = MappingProxyType(local)
        local["y"], holder.shown = x + 1, MappingProxyType(table)
        table["n"] = len(table)
        ordered = MappingProxyType(collections.OrderedDict(z=1))
        return [shown, shown, local, ordered, MappingProxyType(ordered), local.keys().mapping], shown["y"]

    def g(x):
        made, same = f(x)
        made[2]["later"] = table["later"] = 1
        return x + 1, made, same, made[0]["later"], holder.shown["later"]

    return g, [(x(),), (x(),)]


class Holder:
    pass


# What holds numbers that differ between runs: the walk sees closures, not globals.
HELD: list = []
IDS: dict = {}
HASHES: set = set()


@program("untraceable-call", "opaque-object")
def keys_that_are_known_by_what_they_refer_to():
    class Plain:
        pass

    one, two = Plain(), Plain()
    first, second = x(), x()
    makers = (
        weakref.ref,
        lambda value: (weakref.ref(value), 1),
        hash,
        lambda value: hash((value, 1)),
        lambda value: hash(frozenset([value])),
    )
    HELD[:] = [({make(one): 1, make(two): 2, make(first): 3}, [make(two), make(second)]) for make in makers]

    def f(x, key):
        found = []
        for make, (table, items) in zip(makers, HELD):
            made = make(key)
            found.append((table.get(made), made in items, items.count(made)))
        return x + 1, found

    return f, [(x(), one), (x(), two), (x(), first), (x(), second), (x(), one), (x(), Plain())]


@program("opaque-object")
def identities_of_what_a_call_makes_leave_it():
    class Plain:
        pass

    kept = []
    IDS.clear()
    HASHES.clear()

    def f(x, how):
        y, made, items = x + 1, Plain(), [x]
        if how == 0:
            IDS[id(made)] = IDS[id(items)] = IDS[id(y)] = how
        elif how == 1:
            HASHES.add(hash(made))
            HASHES.add(hash(y))
            HASHES.add(hash((made, y)))
        kept.append((y, made, items))
        return id(items) == id(items), id(y) == hash(y), len({id(made), id(y)})

    def known():
        return [
            ([id(part) in IDS for part in parts], [hash(part) in HASHES for part in (*parts[:2], (parts[1], parts[0]))])
            for parts in kept
        ]

    return f, [(x(), 0), (x(), 1), (x(), 2), (x(), 0), (x(), 1)], known
