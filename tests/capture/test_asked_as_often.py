"""Special methods of the program's classes are called as often as in eager, and by nobody else: what PyTorch's and
CPython's own code asks of an object is part of the program, what a capture looks at is not.

Each program is run three times on an object of each class, eagerly and compiled; its result and the methods that were
called, in their order, must be equal.
"""

from __future__ import annotations

import collections
import copy
import decimal
import enum
import fractions
import itertools
import operator
import re
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fusewright

CALLED: list[str] = []


def noting(base: type, *names: str, **answers: Any) -> type:
    """A subclass whose methods note that they were called: `names` do what the base's do, `answers` give a value."""

    def passed_on(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            CALLED.append(name)
            return getattr(base, name)(self, *args)

        return method

    def answering(name: str, value: Any) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            CALLED.append(name if name != "__getattr__" else args[0])
            if name == "__getattr__":
                raise AttributeError(args[0])
            return value

        return method

    made = {name: passed_on(name) for name in names} | {name: answering(name, answers[name]) for name in answers}
    return type(f"Noting{base.__name__.title()}", (base,), {"__hash__": base.__hash__, **made})


CONTAINER = ("__iter__", "__len__")
Index = noting(object, __index__=2, __float__=2.0)
AnyAttribute = noting(object, __getattr__=None)
CountingAny = noting(int, __getattr__=None)
Number = noting(int, __index__=1, __eq__=True, __ne__=True, __lt__=True, __radd__=5, __rpow__=5, __rmatmul__=5)
Double = noting(float, __radd__=5, __eq__=True)
Other = noting(object, __radd__=5, __eq__=True, __gt__=True, __rmatmul__=5)
Listed = noting(list, "__getitem__", *CONTAINER)
Tupled = noting(tuple, __radd__=5, __eq__=True)


class Sequence:
    def __getitem__(self, index: int) -> int:
        CALLED.append("__getitem__")
        return (1, 1)[index]

    def __len__(self) -> int:
        CALLED.append("__len__")
        return 2


OPERANDS: dict[str, Callable[[], Any]] = {
    "index": Index, "attributes": AnyAttribute, "int of attributes": lambda: CountingAny(1), "int": lambda: Number(1),
    "float": lambda: Double(1.0), "object": Other, "list": lambda: Listed([1, 2]), "tuple": lambda: Tupled((1, 2)),
    "sequence": Sequence,
}  # fmt: skip


def inplace(x: torch.Tensor, one: Any) -> Any:
    x = x.clone()
    x += one
    return x


def counted(*args: Any) -> int:
    return len(args)


OF_OPERANDS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "reshape": lambda x, one: x.reshape(one),
    "reshape to a tuple": lambda x, one: x.reshape((2, one)),
    "zeros": lambda x, one: torch.zeros(one) + x.sum(),
    "zeros of a tuple": lambda x, one: torch.zeros((one,)) + x.sum(),
    "full": lambda x, one: torch.full((2,), one) + x.sum(),
    "add": lambda x, one: x + one,
    "add to it": lambda x, one: one + x,
    "add in place": inplace,
    "mul": lambda x, one: torch.mul(x, one),
    "power": lambda x, one: x**one,
    "product": lambda x, one: x @ one,
    "equal": lambda x, one: x == one,
    "not equal": lambda x, one: x != one,
    "greater": lambda x, one: x > one,
    "is in": lambda x, one: one in [x],
    "sum": lambda x, one: x.sum(one),
    "element": lambda x, one: x[one],
    "slice": lambda x, one: x[:one],
    "store": lambda x, one: x.clone().__setitem__(0, one),
    "tensor": lambda x, one: torch.tensor(one) + x.sum(),
    "of a list": lambda x, one: torch.as_tensor([one, 1]) + x.sum(),
    "cat": lambda x, one: torch.cat(one),
    "softmax": lambda x, one: torch.nn.functional.softmax(x, dim=one),
    "where": lambda x, one: torch.where(x > 0, x, one),
    "clamp": lambda x, one: x.clamp(max=one),
    "alpha": lambda x, one: torch.add(x, 1, alpha=one),
    "einsum": lambda x, one: torch.einsum("ij->ji", one),
    "spread": lambda x, one: counted(1, *one),
    "spread alone": lambda x, one: counted(*one),
    "spread in a list": lambda x, one: [*one, 1],
    "extend": lambda x, one: [1].extend(one),
    "list": lambda x, one: list(one),
    "copy": lambda x, one: type(copy.copy(one)).__name__,
    "deep copy": lambda x, one: type(copy.deepcopy(one)).__name__,
}


def outcome(function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    CALLED.clear()
    try:
        result = function(*args)
    except Exception as error:
        # What PyTorch says of an operator that it refuses is its own.
        result = type(error)
    if isinstance(result, tuple) and len(result) > 1 and hasattr(result[1], "__next__"):
        result = type(result[1]), list(result[1])
    called = tuple(CALLED)
    return re.sub("0x[0-9a-f]+", "", str(result)), called


@pytest.mark.parametrize("name", OF_OPERANDS)
@pytest.mark.filterwarnings("ignore")
def test_operands(name: str) -> None:
    program = OF_OPERANDS[name]
    for kind, make in OPERANDS.items():
        one, x = make(), torch.arange(4.0).reshape(2, 2)
        expected = outcome(program, x, one)
        compiled = fusewright.compile(types.FunctionType(program.__code__, globals()))
        for call in range(3):
            assert outcome(compiled, x, one) == expected, (kind, call)


MAPPING = ("__iter__", "__len__", "__reversed__", "keys", "values", "items")
CONTAINERS: dict[str, Callable[[], Any]] = {
    base.__name__: (lambda kind=noting(base, *names), filling=filling: kind(filling))
    for base, names, filling in (
        (list, (*CONTAINER, "__reversed__"), [1, 3]), (tuple, CONTAINER, [1, 3]), (set, CONTAINER, [1, 3]),
        (frozenset, CONTAINER, [1, 3]), (collections.deque, (*CONTAINER, "__reversed__"), [1, 3]),
        (dict, MAPPING, {1: 2, 3: 4}), (collections.OrderedDict, MAPPING, {1: 2, 3: 4}), (bytes, CONTAINER, [1, 3]),
    )
}  # fmt: skip
ITERATORS: dict[str, Callable[[Any], Any]] = {
    "iter": iter, "reversed": reversed, "zip": lambda one: zip(one, one), "enumerate": enumerate,
    "map": lambda one: map(abs, one), "of a list": lambda one: iter(list(one)), "sorted": lambda one: iter(sorted(one)),
    "values": lambda one: iter(one.values()), "items": lambda one: reversed(one.items()),
}  # fmt: skip


def whole(x: torch.Tensor, one: Any, make: Any) -> Any:
    return x + 1, make(one)


def begun(x: torch.Tensor, one: Any, make: Any) -> Any:
    iterator = make(one)
    next(iterator)
    return x + 1, iterator


def of_a_copy(x: torch.Tensor, one: Any, make: Any) -> Any:
    return x + 1, make(type(one)(one))


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("program", [whole, begun, of_a_copy], ids=lambda program: program.__name__)
def test_iterators_that_leave_the_frame(kind: str, program: Any) -> None:
    for name, make in ITERATORS.items():
        compiled = fusewright.compile(types.FunctionType(program.__code__, globals()))
        expected = outcome(program, torch.ones(2), CONTAINERS[kind](), make)
        for call in range(2):
            assert outcome(compiled, torch.ones(2), CONTAINERS[kind](), make) == expected, (name, call)


CONTENTS: dict[type, Callable[[torch.Tensor], Any]] = {
    list: lambda x: [x, x], tuple: lambda x: (x, x), collections.deque: lambda x: [x, x],
    dict: lambda x: {"a": x, "b": x}, collections.OrderedDict: lambda x: {"a": x}, collections.defaultdict: lambda x: {"a": x},
}  # fmt: skip
OF_CONTENTS: list[Callable[[torch.Tensor, Any], Any]] = [
    lambda x, one: counted(*one), lambda x, one: [*one], lambda x, one: list(one), lambda x, one: tuple(one),
    lambda x, one: [1].__iadd__(one), lambda x, one: torch.broadcast_tensors(*one), lambda x, one: sorted(one, key=id)[2:],
    lambda x, one: dict(**one), lambda x, one: {**one}, lambda x, one: {} | one, lambda x, one: list(one.items()),
    lambda x, one: one.copy(), lambda x, one: x + one, lambda x, one: torch.stack(one), lambda x, one: torch.add(x, other=one),
]  # fmt: skip


@pytest.mark.parametrize("name", ["__getitem__", "__iter__", "__len__", "items", "keys", "values", "_fields"])
@pytest.mark.parametrize("base", CONTENTS)
def test_nobody_asks_a_container_for_what_it_holds(base: type, name: str) -> None:
    kind = noting(base, **{name: {"__getitem__": 7, "__len__": 7, "__iter__": iter(())}.get(name, ())})
    for place, program in enumerate(OF_CONTENTS):
        x = torch.ones(2)
        one: Any = base.__new__(kind, CONTENTS[base](x))
        if base is not tuple:
            base.__init__(one, *(int,) * (base is collections.defaultdict))
            (base.update if issubclass(base, dict) else base.extend)(one, CONTENTS[base](x))  # type: ignore[attr-defined]
        expected = outcome(program, x, one)
        compiled = fusewright.compile(types.FunctionType(program.__code__, globals()), backend="eager")
        for call in range(2):
            assert outcome(compiled, x, one) == expected, (place, call)


TEXT = ("__repr__", "__str__", "__format__")
NUMBER = ("__index__", "__int__", "__float__")
OF_ANY_KIND: dict[str, Callable[[], Any]] = {
    base.__name__: (lambda kind=noting(base, *names, __bool__=True, **answers), filling=filling: kind(*filling))
    for base, names, answers, filling in (
        (list, (*CONTAINER, *TEXT, "__getitem__", "sort", "__setitem__"), {"__index__": 1}, ([1, 2],)),
        (dict, (*MAPPING, *TEXT, "__setitem__", "update"), {}, ({"a": 1},)),
        (collections.OrderedDict, (*MAPPING, *TEXT, "__setitem__", "update"), {}, ({"a": 1},)),
        (set, (*CONTAINER, *TEXT), {}, ([1],)), (tuple, (*CONTAINER, *TEXT), {}, ([1, 2],)),
        (int, (*TEXT, *NUMBER), {}, (1,)), (float, (*TEXT, "__float__"), {"__index__": 1}, (1.5,)),
        (str, (*CONTAINER, *TEXT, "__getitem__"), {"__index__": 1}, ("ab",)),
        (object, TEXT, {"__len__": 2, "__getitem__": 1, "__index__": 1}, ()),
    )
}  # fmt: skip


def refused(x: torch.Tensor, one: Any) -> Any:
    assert not one, one


def raised(x: torch.Tensor, one: Any) -> Any:
    raise ValueError(one)


OF_ANY: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "in a text": lambda x, one: f"{[one]}",
    "percent": lambda x, one: "%s" % one,  # noqa: UP031
    "text": lambda x, one: str({"a": one}),
    "sort": lambda x, one: one.sort(),
    "identity": lambda x, one: id(one) == id(one),
    "product": lambda x, one: x is None or list(itertools.product(list(one), one)),
    "assert": refused,
    "raise": raised,
    "reverse": lambda x, one: sorted([2, 1], reverse=one),
    "limit": lambda x, one: [1, 2].index(1, one),
    "join": lambda x, one: ",".join(one),
    "update": lambda x, one: one.update(a=4),
    "complex": lambda x, one: complex(one),
    "int": lambda x, one: int(one),
    "reversed": lambda x, one: [next(reversed(one)), len(list(reversed(one)))],
    "sorted": lambda x, one: sorted(one),
}


@pytest.mark.parametrize("name", OF_ANY)
@pytest.mark.parametrize("kind", OF_ANY_KIND)
def test_any_object(kind: str, name: str) -> None:
    program = OF_ANY[name]
    if kind == "object" and name in ("join", "product", "sorted"):
        return  # its elements never end
    expected = outcome(program, torch.ones(2), OF_ANY_KIND[kind]())
    compiled = fusewright.compile(types.FunctionType(program.__code__, globals()))
    for call in range(3):
        assert outcome(compiled, torch.ones(2), OF_ANY_KIND[kind]()) == expected, call


def making(base: type) -> type:
    """A subclass that notes when instances are made."""

    def new(cls: type, *args: Any) -> Any:
        CALLED.append(f"new {len(args)}")
        return base.__new__(cls, *(args if base in (tuple, frozenset) else ()))

    def initialise(self: Any, *args: Any) -> None:
        CALLED.append(f"init {len(args)}")
        if base is not object:
            base.__init__(self, *args if base not in (tuple, frozenset) else ())  # type: ignore[misc]
        self.v = 1

    return type(f"Making{base.__name__.title()}", (base,), {"__new__": new, "__init__": initialise})


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deep copy": copy.deepcopy, "own copy": lambda one: one.copy(), "or": lambda one: one | one,
    "sum": lambda one: one + one, "slice": lambda one: one[:1],
}  # fmt: skip


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("base", [
    list, dict, set, tuple, frozenset, object, collections.deque, collections.defaultdict, collections.OrderedDict,
])  # fmt: skip
def test_copies_make_instances_as_eager_does(base: type, how: str) -> None:
    kind, make = making(base), COPIES[how]
    filling: Any = {dict: ({1: 2},), object: (), collections.defaultdict: (int, {1: 2}), collections.OrderedDict: ({1: 2},)}
    one = kind(*filling.get(base, ([1, 9],)))
    one.w = [1]

    def program(x: torch.Tensor, one: Any) -> Any:
        made = make(one)
        return type(made).__name__, getattr(made, "__dict__", None), list(made) if base is not object else None

    expected = outcome(program, torch.ones(2), one)
    compiled = fusewright.compile(program)
    for _ in range(2):
        assert outcome(compiled, torch.ones(2), one) == expected


def test_where_a_search_begins() -> None:
    def program(x: torch.Tensor) -> list[Any]:
        held: list[Any] = [1, (x,), 1, "a"]
        return [held.index(1, 1), held.index(1, 0, 1), held.index("a", -1), (1, held, 1).index(1, 1)]

    assert fusewright.compile(program)(torch.ones(2)) == program(torch.ones(2)) == [2, 0, 3, 2]


@pytest.mark.parametrize("base", [list, dict, collections.OrderedDict, set, Exception, object])
def test_instance_dictionaries_are_themselves(base: type) -> None:
    kind = type("Kind", (base,), {})

    def program(x: torch.Tensor, one: Any) -> Any:
        one.w = 4
        return vars(one), one.__dict__

    one = kind()
    compiled = fusewright.compile(program)
    for _ in range(2):
        first, second = compiled(torch.ones(1), one)
        assert first is one.__dict__
        assert second is one.__dict__


def test_methods_of_dicts_look_like_methods_of_dicts() -> None:
    outside = {"a": 1}

    def program(x: torch.Tensor) -> list[Any]:
        seen: list[Any] = []
        for method in (outside.get, outside.__len__, outside.__getitem__, {}.get):
            seen += [type(method).__name__, isinstance(method, type(len)), hasattr(method, "__func__")]
            seen += [method.__name__, method.__qualname__, type(method.__self__)]
            for change in (lambda: method.zzz, lambda: setattr(method, "__defaults__", 3)):
                try:
                    change()
                except AttributeError as error:
                    seen.append(str(error))
        return seen

    assert fusewright.compile(program)(torch.ones(1)) == program(torch.ones(1))


def test_contexts_of_errors_that_numbers_raise() -> None:
    def program(b: int) -> Any:
        try:
            try:
                (1, 2) > b  # type: ignore[operator]
            finally:
                del {"b": b}["a"]
        except KeyError as error:
            return error

    compiled = fusewright.compile(program)
    for b in (1, 2, 3):
        error = compiled(b)
        assert type(error.__context__) is TypeError
        assert error.__context__.__context__ is None


@pytest.mark.parametrize("call", [
    lambda one: dict(one), lambda one: {**one}, lambda one: list(one), lambda one: sorted(one), lambda one: max(one),
    lambda one: [].extend(one), lambda one: {}.update(one), lambda one: "".join(one), lambda one: zip(one), lambda one: one.a,
    lambda one: one[0], lambda one: int(one, 3), lambda one: sum(one), lambda one: (1).__add__(one, 2), lambda one: iter(one),
    lambda one: {1}.update(one), lambda one: one + "a", lambda one: copy.copy(iter(one)), lambda one: len(one), lambda one: one(),
])  # fmt: skip
def test_an_error_has_no_context_of_ours(call: Callable[[Any], Any]) -> None:
    def program(x: torch.Tensor, one: Any) -> Any:
        try:
            call(one)
        except Exception as error:
            return error, x + 1

    error = fusewright.compile(program)(torch.ones(1), 3)[0]
    assert (type(error), error.__context__, error.__cause__) == (type(program(torch.ones(1), 3)[0]), None, None)


def test_what_is_not_found_is_named() -> None:
    def program(x: torch.Tensor, kept: Any) -> list[str]:
        said = []
        for one, item in (([x.shape], 5), (collections.deque([(1,)]), "a"), (((1,),), 5), ([object], kept)):
            for method in ("index", "remove"):
                try:
                    getattr(one, method)(item)
                except (ValueError, AttributeError) as error:
                    said.append(str(error))
        return said

    assert fusewright.compile(program)(torch.ones(2), 1.5) == program(torch.ones(2), 1.5)


def test_complaints_about_numbers_name_their_class() -> None:
    def one(*args: Any, **kwargs: Any) -> None: ...

    def program(x: torch.Tensor, number: Any) -> list[str]:
        def unpack() -> None:
            _, _ = number

        def unpack_more() -> None:
            _, *_ = number

        said = []
        calls = (
            unpack, unpack_more, lambda: [*number], lambda: one(*number), lambda: one(1, *number),
            lambda: {**number}, lambda: one(**number), lambda: number[0], lambda: number(), lambda: iter(number),
            lambda: len(number), lambda: 1 in number, lambda: number + "a", lambda: number.zzz,
        )  # fmt: skip
        for call in calls:
            try:
                call()
            except (TypeError, AttributeError) as error:
                said.append(str(error))
        return said

    compiled = fusewright.compile(program)
    for number in (2.5, 3.5, 2, 3, True):
        assert compiled(torch.ones(2), number) == program(torch.ones(2), number)


Watched = noting(object, "__getattribute__")
WatchedNumber, WatchedDouble = (noting(base, "__getattribute__") for base in (int, float))
WatchedOther = noting(WatchedNumber, "__getattribute__", __radd__=5, __eq__=NotImplemented, __lt__=7)
MET_BY_NUMBERS = (
    Watched(), WatchedNumber(3), WatchedDouble(3), WatchedOther(3), noting(list, "__getattribute__")([1]),
    decimal.Decimal(3), fractions.Fraction(3), object(), None, "a",
)  # fmt: skip


@pytest.mark.parametrize("met", MET_BY_NUMBERS, ids=lambda met: type(met).__name__)
@pytest.mark.parametrize("ask", [
    operator.add, operator.iadd, operator.mul, operator.floordiv, operator.eq, operator.ne, operator.lt, operator.ge,
    lambda left, right: left in [right],
])  # fmt: skip
def test_numbers_that_vary_ask_what_they_meet_nothing(ask: Callable[[Any, Any], Any], met: Any) -> None:
    for program in (lambda number: ask(number, met), lambda number: ask(met, number)):
        compiled = fusewright.compile(program)
        for number in (2, 3, 4, 5.5, 6.5, 3.0):
            seen = []
            for function in (program, compiled):
                CALLED.clear()
                try:
                    answer: Any = repr(function(number))
                except TypeError as error:
                    answer = str(error)
                seen.append((answer, list(CALLED)))
            assert seen[0] == seen[1]


def test_an_enum_member_without_its_name_leaves_the_frame() -> None:
    class Shade(enum.Enum):
        RED = 1

    vars(Shade.RED).clear()
    assert fusewright.compile(lambda x: (x + 1, Shade.RED))(torch.ones(2))[1] is Shade.RED


def test_an_enum_member_of_another_class() -> None:
    class Shade(enum.Enum):
        RED = 1

    class Other:
        def __str__(self) -> str:
            return "other"

    compiled = fusewright.compile(lambda x: (x + 1, str(Shade.RED)))
    assert compiled(torch.ones(2))[1] == "Shade.RED"
    Shade["RED"].__class__ = Other  # type: ignore[assignment]
    assert compiled(torch.ones(2))[1] == "other"


def asked(base: type) -> type:
    """A subclass that notes which attributes are asked for."""

    def getattribute(self: Any, name: str) -> Any:
        CALLED.append(name)
        return base.__getattribute__(self, name)

    return type(f"Asked{base.__name__.title()}", (base,), {"__getattribute__": getattribute})


def pretending(kind: type) -> type:
    """A class whose instances say that they are `kind`, as mocks and proxies do."""
    return type("Pretending", (Sequence,), {"__class__": property(lambda self: kind), "keys": lambda self: ["a"]})


def matched(one: Any) -> int:
    match one:
        case int():
            return 1
        case {"a": _}:
            return 2
        case [1, *_]:
            return 3
    return 4


ASKING: list[Callable[[torch.Tensor, Any], Any]] = [
    lambda x, one: isinstance(one, (int, torch.Tensor)), lambda x, one: isinstance(one, collections.abc.Mapping),
    lambda x, one: one.__class__.__name__, lambda x, one: type(one).__name__, lambda x, one: matched(one),
    lambda x, one: hasattr(one, "v"), lambda x, one: one == one, lambda x, one: bool(one), lambda x, one: len(one),
    lambda x, one: (x + 1, [one, {"a": one}]), lambda x, one: sorted([one]), lambda x, one: [*one], lambda x, one: f"{one:>3}"[:0],
    lambda x, one: one(), lambda x, one: copy.copy(one), lambda x, one: copy.deepcopy(one), lambda x, one: torch.is_tensor(one),
    lambda x, one: x + one, lambda x, one: torch.mul(one, x), lambda x, one: x[one], lambda x, one: x.sum(one),
    lambda x, one: torch.full((2,), one), lambda x, one: x.view(one), lambda x, one: x.new_zeros(one),
    lambda x, one: "-".join(one), lambda x, one: "a%s"[:1] % () + "%s"[:0] % one if type(one) is tuple else {}.update(one),
]  # fmt: skip


@pytest.mark.parametrize("made", [
    *(lambda kind=kind, value=value: asked(kind)(*value) for kind, value in
      ((object, ()), (list, ([1],)), (tuple, ((1,),)), (int, (1,)), (dict, ({"a": 1},)), (float, (1.0,)))),
    *(pretending(kind) for kind in (list, dict, int, tuple, str, float, set, ValueError, type, types.FunctionType, slice)),
])  # fmt: skip
def test_what_an_object_says_its_class_is_is_asked_as_often(made: Callable[[], Any]) -> None:
    for program in ASKING:

        def run(function: Callable[..., Any], one: Any) -> Any:
            CALLED.clear()
            try:
                result = type(function(torch.arange(2.0), one)).__name__
            except Exception as error:
                result = f"{type(error).__name__}: {error}".split("0x")[0]
            return result, list(CALLED)

        one, other, compiled = made(), made(), fusewright.compile(program, backend="eager")
        for _ in range(2):
            assert run(compiled, other) == run(program, one)


class Listening:
    """Notes every attribute that it is asked for; some have two names."""

    def __init__(self) -> None:
        self.number, self.items = 2, [1]

    def __getattribute__(self, name: str) -> Any:
        CALLED.append(name)
        return object.__getattribute__(self, {"count": "number"}.get(name, name))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_asks_for_what_pythons_asks(copied: Callable[[Any], Any]) -> None:
    def program(x: torch.Tensor, one: Any) -> Any:
        other = copied(one)
        other.number = 5
        return x + other.count + one.count, other

    compiled = fusewright.compile(program, fullgraph=True)
    seen = []
    for run in (program, compiled, compiled):
        CALLED.clear()
        one = Listening()
        total, other = run(torch.ones(1), one)
        asked = list(CALLED)
        seen.append((asked, float(total), type(other), other.number, other.items, other.items is one.items, one.number))
    assert seen[0] == seen[1] == seen[2]


def test_the_compiler_looks_at_types_alone() -> None:
    """Each file that meets objects of the program takes `isinstance` from the extension module, which asks them
    nothing."""
    source = Path(fusewright.__file__).parent
    for path in (*source.glob("capture/**/*.py"), *source.glob("record/*.py")):
        text = path.read_text()
        if re.search(r"\bisinstance\(", text):
            assert re.search(r"^from fusewright\._native import (\w+, )*isinstance\b", text, re.M), path


class Checking(type):
    def __instancecheck__(cls, one: Any) -> bool:
        return super().__instancecheck__(one)


class Checked(metaclass=Checking):
    pass


def watched(one: Any) -> Any:
    return one, weakref.ref(made := Other())() is made


OF_CLASSES: list[Callable[[Any], Any]] = [
    lambda one: isinstance(one, Checked), lambda one: isinstance(one, (int, Checked)), lambda one: isinstance(one, str | Checked),
    lambda one: type.__instancecheck__(Checked, one), lambda one: type.__instancecheck__(int, one),
    lambda one: Checked.__instancecheck__(one), lambda one: type.__instancecheck__(type(one), one), watched,
    lambda one: issubclass(type(one), Checked),
]  # fmt: skip


@pytest.mark.parametrize("base", [object, ValueError, list, torch.nn.Module])
def test_what_an_object_calls_its_class(base: type) -> None:
    hooked = noting(base, "__getattribute__")
    named = type("Named", (base,), {"__class__": property(lambda self: CALLED.append("named") or int)})
    for make in (hooked, named):
        for place, program in enumerate(OF_CLASSES):
            one, compiled = make(), fusewright.compile(program, backend="eager")
            expected = outcome(program, one)
            for call in range(3):
                assert outcome(compiled, one) == expected, (make, place, call)
