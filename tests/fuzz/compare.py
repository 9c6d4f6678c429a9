"""Says how what a compiled world holds differs from what an eager one holds.

Takes the roots of two worlds (results, tensors that were made, global state); gives a `Difference`, or None. Always
holds: everything that a program could tell is compared, down to who shares memory or identity with whom; a value may
differ only as far as eager itself is from the same program in float64, times FACTOR, with one rounding of room, or,
each element by itself, as eager does once the program's halves, or what its operators round, are changed by one
rounding in one of several ways, times FACTOR (fused code rounds at other places).
"""

from __future__ import annotations

import array
import collections
import contextlib
import decimal
import functools
import inspect
import itertools
import logging
import math
import operator
import re
import struct
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fusewright._native import CompiledFunction
from fusewright.base.records import dataclass, field
from fusewright.capture.border.values.constant import FROZEN_TYPES
from fusewright.module import ModuleCaller, TwinBase

FACTOR = 4
CHAOTIC = 0.05  # of the largest, or of 1
# What rounding may leave of results that cancel, as a part of the largest, or of 1.
ROOM = {torch.float64: 1e-12, torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PLAIN = (int, str, bytes, range, slice, type(None), torch.dtype, torch.device, type(Ellipsis), torch.Size)
EXACTLY = frozenset((*PLAIN, bool))  # no subclasses of them
DEEPEST = 40
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}|\b1[34]\d{13}\b")

Named = Iterator[tuple[Any, Any]]
Way = Callable[[Any], Named]


@dataclass(frozen=True, slots=True)
class Difference:
    """kind: what kind of fact differs; where: the path to it; ours, eager: the fact, as text; raised: whether eager
    has raised."""

    kind: str
    where: str
    ours: str
    eager: str
    raised: bool = False

    def __str__(self) -> str:
        return f"{self.kind} of {self.where}: {self.ours[:300]}, eager {self.eager[:300]}"


# One fact or several about a world: the path to it as pairs (path of what holds it, name in there), the facts' names,
# the facts, which must be equal, and what may be rounded. Tuples, since a campaign makes thousands for each program.
Path = tuple[Any, Any]
Leaf = tuple[Path, tuple[str, ...], tuple[Any, ...], Any]


def path_of(leaf: Leaf) -> str:
    """Names are text, (key,) of a dict or sequence, or the number of a dict's key."""
    path, said = leaf[0], []
    while path:
        path, name = path
        said.append(name if isinstance(name, str) else f".key{name}" if isinstance(name, int) else f"[{name[0]!r}]")
    return "".join(reversed(said))


IDENTITY, CLASS, DTYPE, FLAT = ("identity",), ("class",), ("class", "dtype"), ("class", "value")
OF_TENSOR = ("class", "dtype", "device", "shape", "layout", "requires_grad", "leaf", "inference")
STRIDED = (*OF_TENSOR, "strides", "memory", "bits")


@dataclass(slots=True)
class Walk:
    """Goes through everything that is reachable, and numbers objects and memories in the order in which it meets
    them. objects: by id; what is in it from the beginning is told by its number alone."""

    objects: dict[int, int] = field(default_factory=dict)
    leaves: list[Leaf] = field(default_factory=list)
    memories: dict[int, tuple[int, int]] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)  # no id is used again while the walk lasts
    kinds: dict[type, Kind] = field(default_factory=dict)

    def walk(self, value: Any, path: Path, depth: int = 0) -> None:
        kind = type(value)
        if kind in EXACTLY:
            # Text is compared as it is: what its `repr` would tell is in it.
            said = value if (kind is str and len(value) < 6) or value is None else _exactly(value)
            self.leaves.append((path, FLAT, (kind.__name__, said), None))
            return
        known = self.objects.get(id(value))
        if known is not None or depth > DEEPEST:
            self.leaves.append((path, IDENTITY, (known,), None))
            return
        how = KINDS.get(kind) or self.kinds.get(kind) or kind_of(kind, self.kinds)
        if how.stands_for:
            self.walk(getattr(value, how.stands_for), path, depth)
            return
        if how.number:
            exact = struct.pack("d", value).hex() if issubclass(kind, float) else repr(value)
            self.leaves.append((path, CLASS, (kind.__name__,), (value, exact)))
            return
        if how.identity:
            self.objects[id(value)] = len(self.objects)
            self.kept.append(value)
        if how.tensor:
            self.tensor(value, path, depth)
            return
        held = [part for way in how.ways for part in way(value)]
        self.leaves.append((path, FLAT, (kind.__name__, len(held)), None))
        depth += 1
        for name, part in held:
            self.walk(part, (path, name), depth)

    def tensor(self, value: torch.Tensor, path: Path, depth: int) -> None:
        kind = type(value).__name__
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            self.leaves.append((path, CLASS, (kind,), None))
            return
        if isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
            self.leaves.append((path, DTYPE, (kind, value.dtype), None))
            return
        leaf, grad, inference = _said(lambda: value.is_leaf), value.requires_grad, value.is_inference()
        shape = tuple(value.shape if value.layout is not torch.jagged else (type(size) is int and size for size in value.shape))
        facts = (kind, value.dtype, str(value.device), shape, value.layout, grad, leaf, inference)
        with torch.no_grad():  # what is read is compared before anything writes to it
            if value.layout == torch.strided:
                full = value.numel() > 0
                strides = tuple(s if size > 1 else None for s, size in zip(value.stride(), shape)) if full else None
                bits = value.is_conj(), value.is_neg()
                facts = (*facts, strides, self.memory(value), bits)
                held = value.detach() if value.is_meta else value.detach().cpu()
                if bits != (False, False):
                    held = held.resolve_conj().resolve_neg()
                self.leaves.append((path, STRIDED, facts, held))
            else:
                self.leaves.append((path, OF_TENSOR, facts, None if value.layout is torch.jagged else value.to_dense().cpu()))
        for name, ask in PARTS_OF.get(value.layout, {}).items():
            self.walk(ask(value.detach()), (path, name), depth + 1)
        if (leaf is True or value.retains_grad) and not inference and value.grad is not None:
            self.walk(value.grad, (path, ".grad"), depth + 1)
        elif leaf is True and grad:
            self.leaves.append(((path, ".grad"), CLASS, ("none",), None))
        if leaf is True:  # other tensors of ours are made by other nodes, whose hooks may be elsewhere
            held = {name: hooks for name in HOOKS if (hooks := getattr(value, name))}
            for name, part in (held | value.__dict__ if value.layout is not torch.jagged else held).items():
                if not name.startswith("_dynamo_"):  # PyTorch's notes for its own compiler
                    self.walk(part, (path, f".{name}"), depth + 1)

    def memory(self, value: torch.Tensor) -> tuple[int, int] | None:
        """(number of the memory, bytes from where the first tensor over it begins)."""
        storage = value.untyped_storage()
        if not value.numel() or not storage.nbytes():
            return None
        place = value.storage_offset() * value.itemsize
        number, start = self.memories.setdefault(storage._cdata, (len(self.memories), place))
        return number, place - start


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# What a tensor holds that is not dense, beyond its elements.
PARTS_OF: dict[torch.layout, dict[str, Callable[[Any], Any]]] = {
    torch.sparse_coo: {".coalesced": torch.Tensor.is_coalesced, ".indices": torch.Tensor._indices},
    torch.jagged: {".values": lambda value: value._values, ".offsets": lambda value: value._offsets},
}


def _exactly(value: Any) -> str:
    text = repr(value)
    return ADDRESS.sub("an address", text) if len(text) > 7 else text


def _of_dict(value: dict[Any, Any]) -> Named:
    keys = collections.OrderedDict.__iter__ if isinstance(value, collections.OrderedDict) else dict.__iter__
    for number, key in enumerate(list(keys(value))):
        yield number, key
        yield (key,) if type(key) in (str, int) else f".{number}", dict.__getitem__(value, key)
    if isinstance(value, collections.defaultdict):
        yield ".default_factory", value.default_factory


def _of_sequence(value: Any) -> Named:
    iterate = next(kind.__iter__ for kind in (list, tuple, collections.deque) if isinstance(value, kind))
    for number, held in enumerate(iterate(value)):
        yield (number,), held
    if isinstance(value, collections.deque):
        yield ".maxlen", value.maxlen


def _of_constant(value: Any) -> Named:
    yield ".value", next(kind(value) for kind in (int, str, bytes) if isinstance(value, kind))


def _of_error(value: BaseException) -> Named:
    yield from _named("args", "__cause__", "__context__", "__suppress_context__")(value)
    yield ".lines", lines_of(value)
    if isinstance(value, (AttributeError, NameError, ImportError)):
        yield ".name", value.name


def lines_of(error: BaseException) -> tuple[str, ...]:
    """Where the program's own frames of a traceback stand: function and line."""
    step, lines = error.__traceback__, []
    while step is not None:
        code = step.tb_frame.f_code
        if code.co_filename.startswith("<fuzz"):
            lines.append(f"{code.co_name}:{step.tb_lineno}")
        step = step.tb_next
    return tuple(lines)


def _of_generator(value: Any) -> Named:
    yield ".state", inspect.getgeneratorstate(value)
    yield from _named("__name__", "__qualname__", "gi_yieldfrom")(value)
    if value.gi_frame is not None:
        yield ".line", value.gi_frame.f_lineno
        yield ".locals", dict(sorted(value.gi_frame.f_locals.items()))


def _of_function(value: types.FunctionType) -> Named:
    yield ".line", f"{value.__qualname__} {value.__name__} {value.__module__} {value.__code__.co_firstlineno}"
    for name in ("__defaults__", "__kwdefaults__", "__annotations__", "__dict__"):
        if held := getattr(value, name):
            yield f".{name}", held
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        yield f".cell {name}", cell


def _of_class(value: type) -> Named:
    yield ".name", value.__qualname__
    if value.__module__ == "world":
        yield ".bases", [base.__qualname__ for base in value.__mro__]
        for name, held in vars(value).items():
            asked_for = name == "__annotations__" and not held  # made for whoever asks first
            if not asked_for and name not in ("__dict__", "__weakref__", "__doc__", "_abc_impl", "__slotnames__"):
                yield f".{name}", held


def _of_iterator(value: Any) -> Named:
    said = _said(value.__reduce__)
    if isinstance(value, SET_ITERATOR) and isinstance(said, tuple) and not _by_value(said[1][0]):
        said = sorted(map(repr, said[1][0]))  # of equal texts the order would tell again
    yield ".parts", said


SET_ITERATOR = type(iter(set()))


def _of_set(value: Any) -> Named:
    """In its order, unless that goes by where objects lie in memory."""
    held = [repr(one) for one in (set if isinstance(value, set) else frozenset).__iter__(value)]
    yield from ((".value", one) for one in (held if _by_value(value) else sorted(held)))


def _by_value(elements: Any) -> bool:
    base = next(base for base in (list, tuple, set, frozenset) if isinstance(elements, base))
    return all(_by_value(one) if isinstance(one, tuple) else isinstance(one, HASHED) for one in base.__iter__(elements))


HASHED = (int, float, complex, str, bytes, range, type(None))


def _of_cache(value: Any) -> Named:
    """Nothing that is told: what is weakly held is, as a rule, remembered only."""
    return iter(())


def _named(*names: str) -> Way:
    return lambda value: ((f".{name}", getattr(value, name)) for name in names)


# What an object of a type holds; the first row that fits counts.
PARTS: tuple[tuple[tuple[type, ...], Way], ...] = (
    ((dict,), _of_dict),
    ((list, tuple, collections.deque), _of_sequence),
    ((set, frozenset), _of_set),
    ((int, str, bytes), _of_constant),
    ((bytearray, array.array, decimal.Decimal, np.generic), lambda value: iter([(".value", repr(value))])),
    ((np.ndarray,), lambda value: iter([(".dtype", str(value.dtype)), (".shape", value.shape), (".value", value.tolist())])),
    ((logging.Logger,), _named("level")),
    ((weakref.WeakKeyDictionary,), _of_cache),
    ((BaseException,), _of_error),
    ((types.GeneratorType,), _of_generator),
    ((types.FunctionType,), _of_function),
    ((types.CellType,), lambda value: ((".value", _said(lambda: value.cell_contents)) for _ in "1")),
    ((types.MethodType,), _named("__func__", "__self__")),
    ((classmethod, staticmethod), _named("__func__")),
    ((property,), _named("fget", "fset")),
    ((functools.partial,), _named("func", "args", "keywords")),
    ((type,), _of_class),
    (tuple(type(one) for one in ({}.keys(), {}.values(), {}.items())), lambda value: iter([(".held", list(value))])),
    (
        tuple(type(one) for one in (iter([]), reversed([]), iter(()), iter(range(0)), iter({}), iter({}.items())))
        + (SET_ITERATOR, zip, map, filter, enumerate, itertools.islice, itertools.chain),
        _of_iterator,
    ),
)


STAND_FOR = {TwinBase: "_fusewright_original", CompiledFunction: "__wrapped__"}
OPAQUE = logging.Logger | weakref.WeakKeyDictionary  # beyond their row of PARTS


@dataclass(frozen=True, slots=True)
class Kind:
    """How an object of a type is walked. ways: to what it holds; identity: whether it is told which object it is;
    stands_for: the attribute that holds the program's own object, in whose place it is."""

    ways: tuple[Way, ...]
    tensor: bool
    number: bool
    identity: bool
    stands_for: str = ""


CHANGES = 1 << 9  # the flag of a type that Python code has made, so that what it has may change
KINDS: dict[type, Kind] = {}  # of the other types


def kind_of(kind: type, changing: dict[type, Kind]) -> Kind:
    """What an object of a type holds: by its row of PARTS, its attributes, its slots. changing: where it is kept if it
    may be otherwise later."""
    ways = [next((of for kinds, of in PARTS if issubclass(kind, kinds)), None)]  # what it says its class is may be no class
    if not issubclass(kind, types.FunctionType | type | types.ModuleType | types.MethodType | OPAQUE):
        ways += [_attributes if kind.__dictoffset__ else None, _slots if _world(kind) else None]
    # A constant tuple, or another immutable object, may be one object or several: nobody should ask.
    identity = not issubclass(kind, tuple | np.generic) and kind not in FROZEN_TYPES and kind is not frozenset
    held = tuple(way for way in ways if way is not None)
    stands_for = next((name for base, name in STAND_FOR.items() if issubclass(kind, base)), "")
    found = Kind(held, issubclass(kind, torch.Tensor), issubclass(kind, float | complex), identity, stands_for)
    (changing if kind.__flags__ & CHANGES else KINDS)[kind] = found
    return found


# Where PyTorch keeps a module's compiled call: nothing in the copy of a module whose class copies all that it holds.
UNSEEN = ("_compiled_call_impl",)


def _attributes(value: object) -> Named:
    try:
        held = object.__getattribute__(value, "__dict__").items()
        return ((f".{name}", part) for name, part in held if name not in UNSEEN and type(part) is not ModuleCaller)
    except AttributeError:
        return iter(())


def _world(kind: type) -> list[type]:
    return [cls for cls in kind.__mro__ if cls.__module__ == "world"]


def _slots(value: object) -> Named:
    for cls in _world(type(value)):
        for name, held in vars(cls).items():
            if isinstance(held, types.MemberDescriptorType):
                yield f".{name}", _said(lambda held=held: held.__get__(value))  # type: ignore[misc]


def _said(ask: Callable[[], object]) -> object:
    """The answer, or the error that asking raises."""
    try:
        return ask()
    except (RuntimeError, AttributeError, ValueError) as error:
        return str(error)[:60]


@dataclass(slots=True)
class Begun:
    """The classes and functions that a program begins with. As long as they are as they were, a walk tells only which
    they are. Two worlds that begin alike number them alike."""

    numbers: dict[int, int] = field(default_factory=dict)
    views: list[Any] = field(default_factory=list)  # what classes, dicts and lists hold, as it is at any time
    readers: dict[Callable[[Any], tuple[Any, ...]], list[Any]] = field(default_factory=dict)  # of other parts; whose
    met: dict[int, object] = field(default_factory=dict)
    known: bool = True  # whether any change would be seen
    lengths: list[int] = field(default_factory=list)
    parts: list[object] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def note(self, values: Iterable[object]) -> None:
        self.add(values)
        self.lengths, self.parts = [*map(len, self.views)], [*self.held()]
        self.ids = [*map(id, self.parts)]

    def add(self, values: Iterable[Any]) -> None:
        for value in values:
            if type(value) not in EXACTLY and id(value) not in self.met:
                self.met[id(value)] = value
                for held in self.parts_of(value):
                    self.add(held)

    def parts_of(self, value: Any) -> list[Iterable[Any]]:
        """What the value holds; from now on it is looked at."""
        kind = type(value)
        how = KINDS.get(kind) or kind_of(kind, {})
        if how.identity:
            self.numbers[id(value)] = len(self.numbers)
        held: list[Any] = []
        reader = READERS.get(kind)
        if how.tensor:
            self.known = False
        elif issubclass(kind, type):
            if value.__module__ == "world":
                held, reader = [vars(value), vars(value).values()], OF_CLASS
        elif kind is dict:
            held = [value, value.values()]
        elif kind in (list, set, frozenset):
            held = [value]
        elif kind is tuple:
            return [value]
        elif reader is None:
            unseen = any(way not in (_attributes, _slots, _of_constant, _of_cache) for way in how.ways)
            self.known = self.known and not unseen and not [*_slots(value)]
            reader = OF_OBJECT if _attributes in how.ways else None
        self.views += held
        if reader is not None:
            self.readers.setdefault(reader, []).append(value)
            held = [*held, reader(value)]
        return held

    def held(self) -> Iterator[object]:
        yield from itertools.chain.from_iterable(self.views)
        for reader, values in self.readers.items():
            yield from itertools.chain.from_iterable(map(reader, values))

    def objects(self) -> dict[int, int]:
        """Their numbers; none if anything has changed."""
        if self.known and [*map(len, self.views)] == self.lengths:
            with contextlib.suppress(AttributeError, ValueError):  # something was deleted
                if [*map(id, self.held())] == self.ids:
                    return self.numbers.copy()
        return {}


OF_CLASS = operator.attrgetter("__qualname__", "__mro__")
OF_OBJECT = operator.attrgetter("__class__", "__dict__")
READERS = {
    types.FunctionType: operator.attrgetter(
        *"__code__ __qualname__ __name__ __module__ __defaults__ __kwdefaults__ __annotations__ __dict__ __closure__".split()
    ),
    types.CellType: operator.attrgetter("__class__", "cell_contents"),
    types.MethodType: operator.attrgetter("__func__", "__self__"),
    staticmethod: operator.attrgetter("__func__", "__dict__"),
    classmethod: operator.attrgetter("__func__", "__dict__"),
    property: operator.attrgetter("fget", "fset"),
}


def flatten(roots: dict[str, Any], objects: dict[int, int]) -> list[Leaf]:
    """objects: the numbers of those whose contents are not told."""
    walk = Walk(objects)
    for name, root in roots.items():
        walk.walk(root, ((), name))
    return walk.leaves


def difference(
    ours: list[Leaf],
    eager: list[Leaf],
    precise: Callable[[], list[Leaf] | None],
    nudged: Callable[[], Sequence[list[Leaf]]] = lambda: (),
    halves: bool = False,
) -> Difference | None:
    """The first fact that differs. `precise`: gives the leaves of the program in float64, if it runs there; `nudged`:
    of the program in which something was changed by one rounding, in several ways; `halves`: whether floats may come of
    halves, whose roundings several steps of training add up."""
    rounded: list[int] = []
    for place, (a, b) in enumerate(zip(ours, eager)):
        if a[2] != b[2] or a[1] != b[1] or a[0][1] != b[0][1]:  # what holds them was told before, and is equal
            return _first(a, b)
        if a[3] is not b[3] and not _close(a[3], b[3]):
            rounded.append(place)
    if len(ours) != len(eager):
        return Difference("structure", "everything", f"{len(ours)} leaves", f"{len(eager)} leaves")
    if rounded:
        values = {path_of(leaf): leaf[3] for leaf in precise() or ()}
        wrong = [
            place
            for place in rounded
            if not _as_accurate(ours[place][3], eager[place][3], values.get(path_of(eager[place])), halves)
        ]
        others = [{path_of(leaf): leaf[3] for leaf in leaves} for leaves in (nudged() if wrong else ())]
        for place in wrong:
            path = path_of(eager[place])
            if not _as_near(ours[place][3], eager[place][3], [values.get(path) for values in others]):
                return Difference("number", path, *_differing(ours[place][3], eager[place][3]))
    return None


def _first(ours: Leaf, eager: Leaf) -> Difference:
    path = path_of(eager)
    if path_of(ours) != path:
        return Difference("structure", path, path_of(ours), path)
    for name, mine, theirs in zip(ours[1], ours[2], eager[2]):
        if mine != theirs:
            return Difference(name, path, str(mine), str(theirs))
    return Difference("structure", path, *(str(list(zip(*leaf[1:3]))) for leaf in (ours, eager)))


def _as_near(ours: Any, eager: Any, nudged: Sequence[Any]) -> bool:
    """Whether eager's own answers change as much with one rounding of what it is given: the largest as the largest, and
    each element about as that element, beyond a rounding of its own. What one element's sensitivity allows says nothing
    of its neighbours. Where they change by `CHAOTIC`, rounding decides what comes (training that diverges)."""
    if isinstance(eager, tuple) and isinstance(eager[0], float):  # what a tensor of float32 gave
        nudged = [one for one in nudged if isinstance(one, tuple)]
        ours, eager, *nudged = (torch.tensor([complex(one[0]).real]) for one in (ours, eager, *nudged))
    like = [one for one in nudged if isinstance(one, torch.Tensor) and one.shape == getattr(eager, "shape", None)]
    if not like or isinstance(eager, tuple) or not (eager.dtype.is_floating_point or eager.is_complex()):
        return False
    if eager.is_complex():
        ours, eager, *like = map(torch.view_as_real, (ours, eager, *like))
    ours, eager, eps = ours.double(), eager.double(), _eps(eager.dtype)
    finite = torch.isfinite(eager)
    changes = torch.stack([(one.double() - eager)[finite].abs().nan_to_num(math.inf) for one in like])
    if finite.any() and changes.max() > CHAOTIC * max(1.0, float(eager[finite].abs().max())):
        return True
    if not torch.equal(ours[~finite].nan_to_num(), eager[~finite].nan_to_num()) or not ours[finite].isfinite().all():
        return False
    if not finite.any():
        return True
    off, moved = (ours - eager)[finite].abs(), changes.amax(0)
    return bool(off.max() <= moved.max() and (off <= FACTOR * moved + eps * eager[finite].abs()).all())


def _differing(ours: Any, eager: Any) -> tuple[str, str]:
    """Both as text: of tensors, the first elements that differ, those that are not finite in front."""
    if not isinstance(eager, torch.Tensor) or ours.shape != eager.shape or eager.is_meta:
        return _text(ours), _text(eager)
    differs = ((ours != eager) & ~(torch.isnan(ours) & torch.isnan(eager))).flatten().nonzero().flatten()
    ours, eager = ours.flatten()[differs], eager.flatten()[differs]
    finite = torch.isfinite(ours) & torch.isfinite(eager)
    order = finite.long().argsort(stable=True)
    return _text(ours[order]), _text(eager[order])


def _text(value: Any) -> str:
    return f"{value.flatten()[:12].tolist()}" if isinstance(value, torch.Tensor) else repr(value)


def _close(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        if b.is_meta:
            return True
        if a.dtype == torch.complex32:  # few operators know it
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        if torch.equal(a, b):
            return True
        exact = not b.dtype.is_floating_point and not b.is_complex()
        return not exact and torch.allclose(a, b, rtol=_eps(b.dtype), atol=0, equal_nan=True)
    if isinstance(b, tuple):
        return a[1] == b[1]
    return a is b


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _as_accurate(ours: Any, eager: Any, precise: Any, halves: bool = False) -> bool:
    """Whether our worst distance from the precise value is about eager's, and everything that is not finite agrees.
    Where the program has no value in float64 (it looks at the bytes of a float), eager's is taken to be precise."""
    if isinstance(eager, tuple):
        precise = precise if isinstance(precise, tuple) else eager
        # What a tensor of float32 gave: a number carries no dtype, so the room is that of float32.
        wide = [torch.tensor(value[0], dtype=torch.complex128).reshape(1) for value in (ours, eager, precise)]
        return _near(*wide, ROOM[torch.bfloat16 if halves else torch.float32])
    if not isinstance(precise, torch.Tensor) or precise.shape != eager.shape:
        precise = eager
    if not eager.dtype.is_floating_point and not eager.is_complex():
        # A jump (a comparison, an index of a maximum): it may differ only where eager's own rounding made it jump.
        return bool((precise[ours != eager] != eager[ours != eager]).all())
    if eager.dtype == torch.complex32:
        ours, eager = torch.view_as_real(ours).double(), torch.view_as_real(eager).half()
        precise = torch.view_as_real(precise.to(torch.complex128))
    wide = [value.to(torch.complex128) for value in (ours, eager, precise)]
    return _near(*wide, max(ROOM[eager.dtype.to_real()], ROOM[torch.bfloat16] * halves))


def _near(ours: torch.Tensor, eager: torch.Tensor, precise: torch.Tensor, room: float) -> bool:
    kinds = [torch.isnan(one) + 2 * torch.isinf(one) for one in (ours, eager, precise)]
    differs = kinds[0] != kinds[1]
    if (differs & (kinds[1] == kinds[2])).any():  # else eager itself overflows, or rounds to 0, where float64 does not
        return False
    infinite = torch.isinf(eager) & ~differs
    if not torch.equal(ours[infinite].nan_to_num(), eager[infinite].nan_to_num()):  # of a complex one a part may be NaN
        return False
    finite = torch.isfinite(ours) & torch.isfinite(precise) & torch.isfinite(eager)
    if not finite.any():
        return True
    ours, eager, precise = ours[finite], eager[finite], precise[finite]
    worst = (eager - precise).abs().max()
    largest = max(1.0, float(precise.abs().max()))
    return bool((ours - precise).abs().max() <= FACTOR * worst + room * largest)
