"""Python's own questions about an object from outside: in compiled code they get Python's answers, whatever stands for the object there.

OBJECTS are asked every question in QUESTIONS and whether they are instances (their classes: subclasses) of everything in CLASSES. Small grids
run always, of the containers and tensors that something else stands for; all of it is a sweep.
"""

# ruff: noqa: UP006, UP007, UP030, UP031, UP032, UP045, E721, C416 - the older spellings are what is asked about

from __future__ import annotations

import abc
import collections
import collections.abc
import copy
import dataclasses
import enum
import functools
import inspect
import json
import math
import numbers
import operator
import re
import string
import types
import typing
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fusewright
from fusewright.base.events import STREAM, InternalError


class ByMeta(type):
    def __instancecheck__(cls, one: object) -> bool:
        return type(one) is dict or hasattr(one, "keys")

    def __subclasscheck__(cls, one: type) -> bool:
        return one is dict


class AskedByMeta(metaclass=ByMeta):
    pass


class PassedOn(type):
    def __instancecheck__(cls, one: object) -> bool:
        return super().__instancecheck__(one)


class PassedOnDict(dict, metaclass=PassedOn):
    pass


@typing.runtime_checkable
class HasKeys(typing.Protocol):
    def keys(self) -> Any: ...


@typing.runtime_checkable
class HasData(typing.Protocol):
    data: int


@typing.runtime_checkable
class HasHash(typing.Protocol):
    def __hash__(self) -> int: ...


class NotCheckable(typing.Protocol):
    data: int


class ByHook(abc.ABC):
    @classmethod
    def __subclasshook__(cls, one: type) -> bool:
        return hasattr(one, "popitem") or NotImplemented


class Registered(abc.ABC):
    pass


for registered in (dict, torch.Tensor, np.ndarray):
    Registered.register(registered)


class SubDict(dict):
    pass


class SubList(list):
    pass


class SubTensor(torch.Tensor):
    pass


class Alone(typing.NamedTuple):
    a: Any


class Pair(typing.NamedTuple):
    a: int = 1
    b: float = 2.0


@dataclasses.dataclass
class Record:
    a: Any = dataclasses.field(default_factory=lambda: {"k": 1})
    b: int = 3


class Typed(typing.TypedDict):
    a: int


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Thing:
    def __init__(self) -> None:
        self.a = 1
        self.d = {"x": 2}

    def method(self) -> int:
        return self.a


def generator() -> Any:
    yield 1


STOOD_FOR: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"a": 1, "b": 2},
    "empty dict": dict,
    "instance dict": lambda: Thing().__dict__,
    "class dict": lambda: Thing.__dict__,
    "proxy": lambda: types.MappingProxyType({"a": 1}),
    "ordered": lambda: collections.OrderedDict(a=1),
    "default": lambda: collections.defaultdict(int, a=1),
    "list": lambda: [1, 2],
    "tensor": lambda: torch.ones(2),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "buffer": lambda: nn.Buffer(torch.ones(2)),
    "array": lambda: np.ones(2),
    "int": lambda: 3,
    "float": lambda: 2.5,
    **{
        f"in {kind.__name__}": lambda kind=kind: kind([{"a": {"b": 1}}])
        for kind in (list, tuple, collections.deque, SubList, Alone._make)
    },
    **{
        f"below {kind.__name__}": lambda kind=kind: kind({"a": {"b": 1}})
        for kind in (dict, collections.OrderedDict, SubDict, types.MappingProxyType)
    },
    "in a default": lambda: collections.defaultdict(list, a={"b": 1}),
    "deep": lambda: functools.reduce(lambda inner, _: {"a": inner}, range(12), {}),
}
OBJECTS: dict[str, Callable[[], Any]] = {
    **STOOD_FOR,
    "tuple": lambda: (1, 2), "set": lambda: {1}, "frozenset": lambda: frozenset({1}), "counter": lambda: collections.Counter("aab"),
    "deque": lambda: collections.deque([1]), "chain": lambda: collections.ChainMap({"a": 1}), "user dict": lambda: collections.UserDict(a=1),
    "user list": lambda: collections.UserList([1]), "sub dict": lambda: SubDict(a=1), "sub list": lambda: SubList([1]),
    "int tensor": lambda: torch.ones(2, dtype=torch.int64), "sub tensor": lambda: torch.ones(2).as_subclass(SubTensor),
    "module": lambda: nn.Linear(2, 2), "module dict": lambda: nn.ModuleDict({"a": nn.ReLU()}), "pair": Pair, "record": Record, "thing": Thing,
    "keys": lambda: {"a": 1}.keys(), "bool": lambda: True, "str": lambda: "ab", "bytes": lambda: b"ab", "bytearray": lambda: bytearray(b"ab"),
    "none": lambda: None, "range": lambda: range(3), "slice": lambda: slice(1, 2), "complex": lambda: 1j, "scalar": lambda: np.float32(2),
    "enum": lambda: Colour.RED, "int enum": lambda: Number.ONE, "function": lambda: generator, "method": lambda: Thing().method,
    "class": lambda: Thing, "meta": lambda: AskedByMeta, "partial": lambda: functools.partial(generator), "generator": generator,
    "iterator": lambda: iter([1, 2]), "size": lambda: torch.Size([1]), "dtype": lambda: torch.float32, "device": lambda: torch.device("cpu"),
    "error": lambda: ValueError("x"), "namespace": lambda: types.SimpleNamespace(a=1), "builtin": lambda: len,
}  # fmt: skip

CLASSES: dict[str, Any] = {
    "dict": dict, "list": list, "tuple": tuple, "sets": (set, frozenset), "Union": typing.Union[dict, list], "Optional": typing.Optional[dict],
    "|": dict | list, "| |": (dict | int) | torch.Tensor, "| None": dict | None, "Dict": typing.Dict, "List": typing.List,
    "typing.Mapping": typing.Mapping, "typing.Callable": typing.Callable, "typing.Hashable": typing.Hashable, "typing.Sized": typing.Sized,
    "typing.Generator": typing.Generator, "Union with Tensor": typing.Union[torch.Tensor, dict],
    "Union with Parameter": typing.Union[nn.Parameter, typing.Dict, typing.Sequence], "nested": ((int, (dict, str)), list),
    "nested Union": (int, (typing.Union[dict, str], list | None)), "Mapping": collections.abc.Mapping,
    "MutableMapping": collections.abc.MutableMapping, "Sequence": collections.abc.Sequence, "Set": collections.abc.Set,
    "Callable": collections.abc.Callable, "Hashable": collections.abc.Hashable, "Container": collections.abc.Container,
    "Iterator": collections.abc.Iterator, "Reversible": collections.abc.Reversible, "KeysView": collections.abc.KeysView,
    "Number": numbers.Number, "Real": numbers.Real, "Integral": numbers.Integral, "by meta": AskedByMeta, "passed on": PassedOnDict,
    "has keys": HasKeys, "has data": HasData, "has hash": HasHash, "not checkable": NotCheckable, "by hook": ByHook, "registered": Registered,
    "object": object, "Tensor": torch.Tensor, "Parameter": nn.Parameter, "Buffer": nn.Buffer, "FloatTensor": torch.FloatTensor,
    "LongTensor": (torch.LongTensor, torch.DoubleTensor), "Module": nn.Module, "type": type, "function": types.FunctionType,
    "generator": types.GeneratorType, "proxy": types.MappingProxyType, "OrderedDict": collections.OrderedDict, "UserDict": collections.UserDict,
    "Pair": Pair, "Enum": enum.Enum, "int": int, "float": float, "generic": np.generic, "ndarray": np.ndarray,
    "SupportsFloat": typing.SupportsFloat, "SupportsInt": (typing.SupportsInt, typing.SupportsIndex), "Any": typing.Any,
    "Dict of": typing.Dict[str, int], "dict of": dict[str, int], "TypedDict": Typed, "3": 3, "nothing": (), "with 3": (int, 3),
    "TypeVar": typing.TypeVar("T"), "Literal": typing.Literal[1], "Union of a List of": typing.Union[typing.List[int], int],
    "| list of": list[int] | int, "NewType": typing.NewType("N", int), "Annotated": typing.Annotated[dict, 1], "bool": bool, "Size": torch.Size,
}  # fmt: skip


@functools.singledispatch
def dispatched(one: Any) -> str:
    return "object"


for kind in (dict, list, torch.Tensor, nn.Parameter, collections.abc.Mapping, int):
    dispatched.register(kind, lambda one, kind=kind: kind.__name__)


class Dispatching:
    @functools.singledispatchmethod
    def of(self, one: Any) -> str:
        return "object"

    @of.register
    def _(self, one: dict) -> str:
        return "dict"


def matched(one: Any) -> Any:
    match one:
        case collections.OrderedDict():
            return "ordered"
        case {"a": 1, **rest}:
            return "with a", rest
        case dict():
            return "dict"
        case nn.Parameter():
            return "parameter"
        case torch.Tensor():
            return "tensor"
        case [a, *_]:
            return "sequence", a
        case int(n):
            return "int", n
        case object():
            return "object"


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "type": lambda v: (type(v) is dict, type(v) == dict, type(v) in (dict, list), type(v).__name__),
    "__class__": lambda v: (v.__class__ is dict, v.__class__ is type(v), object.__getattribute__(v, "__class__").__name__),
    "match": matched,
    "singledispatch": lambda v: (dispatched(v), dispatched.dispatch(type(v))(v), Dispatching().of(v)),
    "copy": lambda v: (type(copy.copy(v)), copy.copy(v) is v),
    "deepcopy": lambda v: (type(copy.deepcopy(v)), copy.deepcopy(v) is v),
    "the copy": copy.deepcopy,
    "json": lambda v: json.dumps(v, default=lambda o: type(o).__name__),
    "strict json": json.dumps,
    "text": lambda v: (repr(v), str(v), f"{v}", f"{v!r:>3}", format(v, ""), ascii(v)),
    "template": lambda v: (string.Template("$a").substitute(v), "%(a)s" % v, "{a}".format_map(v)),
    "operator": lambda v: (operator.contains(v, "a"), operator.length_hint(v, 7), operator.truth(v), operator.eq(v, {"a": 1, "b": 2})),
    "getters": lambda v: (operator.itemgetter("a")(v), list(operator.methodcaller("keys")(v))),
    "|=": lambda v: operator.ior(v, {"q": 1}),
    "stores": lambda v: (operator.setitem(v, "z", 1), operator.delitem(v, "a"), len(v)),
    "made of it": lambda v: (dict(v), list(v), {**v}, dict.fromkeys(v, 0), collections.OrderedDict(v), collections.ChainMap(v)["a"]),
    "Counter": collections.Counter,
    "UserDict": collections.UserDict,
    "hasattr": lambda v: [hasattr(v, name) for name in ("keys", "__dict__", "__len__", "a", "__missing__", "__call__", "popitem", "real")],
    "fields": lambda v: (dataclasses.is_dataclass(v), [field.name for field in dataclasses.fields(v)], dataclasses.asdict(v)),
    "asdict": lambda v: dataclasses.asdict(Record(v)),
    "replace": lambda v: dataclasses.replace(v, b=9),
    "inspect": lambda v: (inspect.isfunction(v), inspect.isclass(v), inspect.ismethod(v), inspect.isgenerator(v), callable(v)),
    "metaclasses": lambda v: (
        isinstance(v, PassedOnDict), PassedOn.__instancecheck__(dict, v), type.__instancecheck__(dict, v),
        type.__instancecheck__(nn.Parameter, v), abc.ABCMeta.__instancecheck__(collections.abc.Mapping, v),
    ),
    "dict.get": lambda v: dict.get(v, "a"),
    "dict.__len__": lambda v: dict.__len__(v),
    "list.index": lambda v: list.index(v, 1),
    "object.__eq__": lambda v: (object.__eq__(v, v), object.__ne__(v, v)),
    "object.__repr__": lambda v: object.__repr__(v),
    "round": round,
    "returned": lambda v: [v, {"k": v}],
    "tree": lambda v: torch.utils._pytree.tree_map(lambda leaf: leaf, v),
}  # fmt: skip


def described(value: Any) -> Any:
    """Comparable, without addresses."""
    if isinstance(value, torch.Tensor):
        return type(value), value.tolist(), value.requires_grad
    if isinstance(value, dict):
        return type(value), [(described(key), described(one)) for key, one in dict.items(value)]
    if isinstance(value, (list, tuple)):
        return type(value), [described(one) for one in value]
    return type(value), re.sub(r"0x[0-9a-f]+", "", value if isinstance(value, str) else repr(value))


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return described(function(*args)), described(args)
    except Exception as error:
        return type(error), re.sub(r"0x[0-9a-f]+", "", str(error))


def check(question: Callable[[Any], Any], objects: dict[str, Callable[[], Any]]) -> None:
    def function(x: torch.Tensor, one: Any) -> Any:
        return x + 1, question(one)

    defects: list[str] = []
    fusewright.reset()
    compiled = fusewright.compile(function, backend="eager", recompile_limit=2 * len(OBJECTS))
    with (
        warnings.catch_warnings(),
        STREAM.listening(lambda event: defects.append(event.trace) if isinstance(event, InternalError) else None),
    ):
        warnings.simplefilter("ignore")
        for name, make in objects.items():
            for _ in range(2):
                assert outcome(compiled, torch.ones(1), make()) == outcome(function, torch.ones(1), make()), name
    assert not defects, defects[0]


GRIDS = [pytest.param(STOOD_FOR, id="stood for"), pytest.param(OBJECTS, id="all", marks=pytest.mark.sweep)]


@pytest.mark.parametrize("objects", GRIDS)
@pytest.mark.parametrize("name", CLASSES)
def test_instances_and_subclasses(name: str, objects: Any) -> None:
    cls = CLASSES[name]
    check(lambda one: isinstance(one, cls), objects)
    check(lambda one: issubclass(type(one), cls), objects)


@pytest.mark.parametrize("objects", GRIDS)
@pytest.mark.parametrize("name", QUESTIONS)
def test_questions(name: str, objects: Any) -> None:
    check(QUESTIONS[name], objects)


@pytest.mark.parametrize("make", [dict, collections.OrderedDict])
def test_looking_into_a_container_does_not_write_to_it(make: Any) -> None:
    compiled = fusewright.compile(lambda x, d: x + len(repr(d)), backend="eager")
    d = make(a={"b": 1}, c=2)
    for _ in d:  # a store would make the iterator fail
        compiled(torch.ones(1), d)


def test_a_flag_of_a_tensor_is_guarded() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if isinstance(x, nn.Buffer) else 2)

    compiled = fusewright.compile(function, backend="eager")
    for x in (nn.Buffer(torch.ones(1)), torch.ones(1), nn.Buffer(torch.ones(1))):
        assert torch.equal(compiled(x), function(x))


# What special methods written in Python give is checked, and some of it converted, by whoever asks.

GIVEN: dict[str, Any] = {
    "None": None, "float": 1.2, "negative": -1, "str": "x", "int": 3, "large": 1 << 80, "list": [1], "bool": True, "bytes": b"b", "complex": 1j,
    "tensor": torch.ones(()), "sub int": type("SubInt", (int,), {})(4), "sub str": type("SubStr", (str,), {})("q"), "dict": {},
    "sub float": type("SubFloat", (float,), {})(4.5), "NotImplemented": NotImplemented,
}  # fmt: skip
ASKED: dict[str, list[Callable[[Any], Any]]] = {
    "__bool__": [bool, lambda o: 1 if o else 2, lambda o: not o, lambda o: o and 3, lambda o: any([o]), lambda o: list(filter(None, [o]))],
    "__len__": [len, bool, lambda o: 1 if o else 2, lambda o: list(reversed(o)), operator.length_hint],
    "__str__": [str, lambda o: f"{o}", lambda o: "%s" % o, lambda o: "{:>3}".format(o), lambda o: format(o), print],
    "__repr__": [repr, str, ascii, lambda o: f"{o!r:>4}", lambda o: "{0!r}".format(o), lambda o: str([o])],
    "__format__": [format, lambda o: f"{o:>3}", lambda o: "{:3}|{x:4}".format(o, x=o), lambda o: format(o, "x")],
    "__hash__": [hash, lambda o: {o: 1}, lambda o: hash((o,))],
    "__index__": [operator.index, int, float, complex, lambda o: [1, 2, 3, 4, 5][o], range, hex, lambda o: "ab" * o, lambda o: "abcd"[o:]],
    "__int__": [int, lambda o: "%d" % o, lambda o: int(o, 10)],
    "__float__": [float, complex, math.sqrt, lambda o: "%f" % o],
    "__complex__": [complex],
    "__iter__": [iter, list, lambda o: [*o], sum, lambda o: [part for part in o], dict, zip, lambda o: 1 in o, lambda o: "".join(o)],
    "__next__": [next, lambda o: next(o, 5)],
    "__contains__": [lambda o: 1 in o, lambda o: 1 not in o, lambda o: operator.contains(o, 1)],
    "__length_hint__": [operator.length_hint],
    "__round__": [round], "__trunc__": [math.trunc], "__floor__": [math.floor], "__abs__": [abs], "__reversed__": [reversed], "__dir__": [dir],
    "__eq__": [lambda o: o == 1, lambda o: [o] == [1], lambda o: 1 if o == 1 else 2, lambda o: o in [1]],
    "__lt__": [lambda o: o < 1, lambda o: sorted([o, 1]), lambda o: min(o, 1)],
}  # fmt: skip


@pytest.mark.parametrize("given", [pytest.param(value, id=name) for name, value in GIVEN.items()])
@pytest.mark.parametrize("name", ASKED)
def test_answers_of_special_methods(name: str, given: Any) -> None:
    namespace: dict[str, Any] = {name: lambda self, *args: given, "__getitem__": lambda self, index: [1, 2, 3][index]}
    cls = type("Answering", (), namespace)
    for ask in ASKED[name]:

        def question(one: Any, ask: Any = ask) -> Any:
            try:
                found = ask(one), ask(cls())
            except Exception as error:
                return type(error), str(error)
            return [part if not hasattr(part, "__next__") else type(part) for part in found]

        check(question, {f"{name} of {given!r}": cls})


def test_an_initialiser_gives_nothing() -> None:
    class Given:
        def __init__(self, value: Any) -> None:
            return value

    def question(value: Any) -> Any:
        try:
            return type(Given(value))
        except TypeError as error:
            return str(error)

    check(question, {name: lambda value=value: value for name, value in GIVEN.items()})


def test_fields_of_a_format() -> None:
    class Shown:
        def __init__(self) -> None:
            self.b, self.d = 7, {"k": [1, 2]}

        def __format__(self, spec: str) -> str:
            return f"<{spec}>"

    templates = (
        "{}", "{0.b} {0.d[k][1]}", "{:>{w}}", "{x.b:03d}", "{{}}{}", "{0}{}", "{9}", "{no}", "{0.no}", "{} {} {}", "{:{}}", "{", "{0[k]}",
    )  # fmt: skip

    def question(one: Any) -> Any:
        found = []
        for template in templates:
            try:
                found.append(template.format(one, 5, 6, w=9, x=one))
            except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
                found.append((type(error), str(error)))
        return found

    check(question, {"shown": Shown})


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_fields_of_classes_that_change(backend: str) -> None:
    """A table of fields is read again when the program, or anybody between calls, has written to it."""

    @dataclasses.dataclass
    class Pair:
        a: int = 1
        b: dataclasses.InitVar[int] = 2
        c: typing.ClassVar[int] = 3

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            return {} if name == "__dataclass_fields__" else super().__getattribute__(name)

    @dataclasses.dataclass
    class Odd(metaclass=Meta):
        a: int = 1

    def names(one: Any) -> Any:
        try:
            return [(field.name, field.default) for field in dataclasses.fields(one)]
        except TypeError as error:
            return str(error)

    def program(x: torch.Tensor, write: bool) -> Any:
        @dataclasses.dataclass
        class Inside:
            d: int = 4

        if write:
            del Pair.__dataclass_fields__["a"]
        return x + 1, [names(one) for one in (Pair, Pair(0), Odd, Odd(), Inside, Inside(), int, 5)]

    seen = []
    for engine in ("eager", "compiled"):
        run: Any = program if engine == "eager" else fusewright.compile(program, backend=backend)
        table, kept, rows = Pair.__dataclass_fields__, dict(Pair.__dataclass_fields__), []
        rows.append(run(torch.ones(2), False)[1])
        table["e"] = dataclasses.fields(Odd())[0] if dataclasses.fields(Odd()) else table["a"]
        rows.append(run(torch.ones(2), False)[1])
        rows.append(run(torch.ones(2), True)[1])
        rows.append(run(torch.ones(2), False)[1])
        table.clear()
        table.update(kept)
        seen.append(rows)
    assert seen[0] == seen[1]
