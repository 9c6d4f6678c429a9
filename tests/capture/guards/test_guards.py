"""The native guard program agrees with Python's own evaluation of the same guards, whatever is mutated between two checks."""

from __future__ import annotations

import collections
import gc
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import fusewright
from fusewright import _native
from fusewright.capture.guards import (
    MISSING,
    Guard,
    TensorGuard,
    build_program,
    capture_global_state,
    evaluate,
    guard_holds,
    guard_text,
    readable,
    torch_state,
)
from fusewright.capture.guards.check import relation_of
from fusewright.capture.guards.sources import (
    Attribute,
    Closure,
    Constant,
    DictKey,
    FunctionSource,
    Global,
    InstanceDict,
    Item,
    Local,
    Source,
    TensorSize,
    TensorStride,
    TypeOf,
)
from fusewright.sizes.expressions import Relation, symbol

X, Y, SELF = Local(0, "x"), Local(1, "y"), Local(0, "self")


def function(x=None, y=None):
    return x


def tensor_guard(tensor: torch.Tensor, **changes: object) -> TensorGuard:
    fields = {
        "cls": type(tensor),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
        "shape": tuple(tensor.shape),
        "stride": tensor.stride(),
        "inference": tensor.is_inference(),
    }
    return TensorGuard(**{**fields, **changes})


def check_both(program, locals, f=function) -> bool:
    """The native answer, cold, warm and by the shortcut that a program takes after a few passes, which must be Python's."""
    wanted = all(guard_holds(guard, locals, f, program._symbols) for guard in program.guards)
    for source in program.sources:
        try:
            evaluate(source, locals, f)
        except LookupError:
            wanted = False
    answers = [program.check(locals, f) for _ in range(10)]
    failing = [guard_text(guard) for guard in program.guards if not guard_holds(guard, locals, f, program._symbols)]
    assert set(answers) == {wanted}, failing
    if not wanted:
        guard, text = program.failure(locals, f)
        assert text and text != "every guard holds"
        assert guard is None or guard in program.guards
    return wanted


def one(kind: str, source: Source, value: object, inputs: tuple[Source, ...] = ()):
    return build_program([Guard(kind, source, value)], inputs)


# --- probing ---------------------------------------------------------------------------------------------------------


def test_native_reading_is_verified_on_this_pytorch():
    assert torch_state.LAYOUT["ready"] is True
    assert torch_state.LAYOUT["storage_ready"] is True
    assert torch_state.STATE_IS_NATIVE


def test_probe_refuses_samples_that_disagree():
    rows = torch_state._samples()
    try:
        wrong = [(*row[:3], (row[3] + 1) % 7, *row[4:]) for row in rows]
        assert (
            _native.probe_tensors(torch_state._C10, torch_state._TORCH_CPU, torch._C.TensorBase, wrong)["ready"]
            is False
        )
        # and without native reading, guards ask Python
        x = torch.randn(3, 4)
        program = build_program(
            [Guard("TENSOR", X, tensor_guard(x)), Guard("EQUALS", TensorSize(X, 0), 3)], [X, TensorSize(X, 1)]
        )
        assert check_both(program, (x,))
        assert program.inputs((x,), function) == (x, 4)
        assert not check_both(program, (torch.randn(4, 4),))
    finally:
        assert (
            _native.probe_tensors(torch_state._C10, torch_state._TORCH_CPU, torch._C.TensorBase, rows)["ready"] is True
        )


# --- tensors ---------------------------------------------------------------------------------------------------------


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2, 3)


class Sub(torch.Tensor):
    pass


TENSORS = {
    "plain": lambda: torch.ones(2, 3),
    "transposed": lambda: torch.ones(3, 2).t(),
    "other size": lambda: torch.ones(2, 4),
    "other dim": lambda: torch.ones(2, 3, 1),
    "scalar": lambda: torch.ones(()),
    "six dims": lambda: torch.ones(1, 2, 1, 3, 1, 2),
    "six dims, other": lambda: torch.ones(1, 2, 1, 3, 1, 3),
    "half": lambda: torch.ones(2, 3).half(),
    "int": lambda: torch.ones(2, 3, dtype=torch.int32),
    "complex": lambda: torch.ones(2, 3, dtype=torch.complex64),
    "conj": lambda: torch.ones(2, 3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.ones(2, 3, dtype=torch.complex64).conj().imag,
    "grad": lambda: torch.ones(2, 3, requires_grad=True),
    "non-leaf": lambda: torch.ones(2, 3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 3)),
    "buffer": lambda: torch.nn.Buffer(torch.ones(2, 3)),
    "subclass": lambda: torch.ones(2, 3).as_subclass(Sub),
    "inference": inference_tensor,
    "meta": lambda: torch.ones(2, 3, device="meta"),
    "sparse": lambda: torch.ones(2, 3).to_sparse(),
    "zero strides": lambda: torch.ones(1, 1).expand(2, 3),
    "empty": lambda: torch.ones(0, 3),
    "none": lambda: None,
    "int object": lambda: 3,
}
DENSE = [name for name in TENSORS if name not in ("conj", "neg", "sparse", "none", "int object")]


@pytest.mark.parametrize("name", DENSE)
def test_tensor_guard_agrees_with_python(name):
    tensor = TENSORS[name]()
    program = one("TENSOR", X, tensor_guard(tensor), (X,))
    assert check_both(program, (tensor,))
    assert program.inputs((tensor,), function)[0] is tensor
    for other, make in TENSORS.items():
        candidate = make()
        assert check_both(program, (candidate,)) or other != name


def test_tensor_guard_fields_that_do_not_matter():
    x = torch.ones(2, 3)
    program = one("TENSOR", X, tensor_guard(x, requires_grad=None, inference=None, shape=(None, 3), stride=(None, 1)))
    assert check_both(program, (torch.ones(7, 3),))
    assert check_both(program, (torch.ones(2, 3, requires_grad=True),))
    assert check_both(program, (inference_tensor(),))
    assert not check_both(program, (torch.ones(7, 4),))


def test_tensor_changes_in_place_are_seen():
    x = torch.ones(2, 3)
    program = one("TENSOR", X, tensor_guard(x))
    assert check_both(program, (x,))
    x.requires_grad_()
    assert not check_both(program, (x,))
    x.requires_grad_(False)
    assert check_both(program, (x,))
    x.data = torch.ones(2, 3, dtype=torch.float64)
    assert not check_both(program, (x,))
    x.data = torch.ones(5, 3)
    assert not check_both(program, (x,))
    x.data = torch.ones(2, 3)
    assert check_both(program, (x,))
    x.resize_(3, 2)
    assert not check_both(program, (x,))
    x.resize_(2, 3)
    assert check_both(program, (x,))
    x.t_()
    assert not check_both(program, (x,))


def test_failure_texts():
    x, y = torch.ones(32, 8), torch.ones(2)
    program = build_program([Guard("TENSOR", X, tensor_guard(x)), Guard("TENSOR", Y, tensor_guard(y))], [X, Y])
    texts = {
        "L['x'].size()[0] was 32, is 64": (torch.ones(64, 8), y),
        "L['y'].dtype was torch.float32, is torch.float16": (x, y.half()),
        "L['y'].requires_grad was False, is True": (x, y.clone().requires_grad_()),
        "L['x'].stride()[0] was 8, is 1": (torch.ones(8, 32).t(), y),
        "L['x'].dim() was 2, is 3": (torch.ones(32, 8, 1), y),
        "L['y'] was a Tensor, is a NoneType": (x, None),
    }
    for text, locals in texts.items():
        assert program.failure(locals, function)[1] == text
    assert program.failure((x, y), function) == (None, "every guard holds")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_devices():
    x = torch.ones(2, 3, device="cuda:0")
    program = one("TENSOR", X, tensor_guard(x), (X,))
    assert check_both(program, (x,)) and check_both(program, (torch.zeros(2, 3, device="cuda"),))
    assert not check_both(program, (x.cpu(),))
    elsewhere = one("TENSOR", X, tensor_guard(x, device=torch.device("cuda:1")))
    assert not check_both(elsewhere, (x,))
    for device in range(torch.cuda.device_count()):
        assert check_both(program, (torch.ones(2, 3, device=f"cuda:{device}"),)) == (device == 0)


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_size_relations():
    s0, s1 = symbol("s0", 2), symbol("s1", 2)
    sources = {"s0": TensorSize(X, 0), "s1": TensorSize(Y, 1)}
    x = torch.ones(4, 3)
    tensors = [Guard("TENSOR", source, tensor_guard(x, shape=(None, None), stride=(None, None))) for source in (X, Y)]
    guards = [
        *tensors,
        Guard("SIZE", X, Relation("<=", s0 + 3, s1 * 2 + 8)),
        Guard("SIZE", X, ("!=", ("%", ("sym", "s0"), 2), ("const", 1))),
        Guard(
            "SIZE",
            X,
            (("==", ("sym", "stride"), ("sym", "width")), {"stride": TensorStride(X, 0), "width": TensorSize(X, 1)}),
        ),
    ]
    program = build_program(guards, [X, TensorSize(X, 0), TensorStride(X, 0)], sources)
    rng = random.Random(0)
    answers = set()
    for _ in range(60):
        a, b = torch.ones(rng.randrange(1, 30), 3), torch.ones(2, rng.randrange(1, 12))
        passed = check_both(program, (a, b))
        answers.add(passed)
        if passed:
            assert program.inputs((a, b), function) == (a, a.shape[0], 3)
    assert answers == {True, False}
    text = "((x.shape[0] % 2) != 1) no longer holds: x.shape[0] is 7"
    assert program.failure((torch.ones(7, 3), torch.ones(2, 5)), function)[1] == text


def test_a_guard_with_sources_of_its_own_walks_no_others():
    """A list of 50,000 numbers that vary has as many symbols, and as many guards."""

    class Sources(dict):
        def __iter__(self):
            raise AssertionError("all of them were walked")

        keys = items = values = __iter__

    sources = Sources(s0=TensorSize(X, 0))
    tree = ("<=", ("sym", "width"), ("sym", "s0"))
    found, known = relation_of(Guard("SIZE", X, (tree, {"width": TensorSize(X, 1)})), sources)
    assert (found, known["width"], known["s0"]) == (tree, TensorSize(X, 1), TensorSize(X, 0))


def test_symbolic_python_int_and_size_constants():
    guards = [Guard("TYPE", X, int), Guard("SIZE", X, ("<", ("sym", "n"), 10))]
    program = build_program(guards, [X], {"n": X})
    for value in (3, 9, 10, True, 2.0, 10**30, -(10**30), None):
        assert check_both(program, (value,)) == (type(value) is int and -(10**20) < value < 10)
    t = torch.ones(3, 5)
    program = build_program(
        [Guard("TENSOR", X, tensor_guard(t, shape=(None, 5), stride=(5, 1))), Guard("EQUALS", TensorSize(X, 0), 3)], []
    )
    assert check_both(program, (t,)) and not check_both(program, (torch.ones(4, 5),))


TREES = st.recursive(
    st.one_of(st.integers(-9, 9), st.sampled_from([("sym", "a"), ("sym", "b"), ("const", 2**62)])),
    lambda inner: st.one_of(
        st.tuples(
            st.sampled_from(["+", "-", "*", "//", "%", "min", "max", "==", "!=", "<", "<=", ">", ">="]), inner, inner
        ),
        st.tuples(st.just("neg"), inner),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(TREES, st.integers(-20, 20), st.integers(-(2**63), 2**63 - 1))
def test_relation_programs_compute_as_python(tree, a, b):
    symbols = {"a": X, "b": Y}
    relation = ("or", ("==", tree, 0), ("<", tree, 5))
    program = build_program([Guard("TYPE", X, int), Guard("SIZE", X, relation)], [], symbols)
    check_both(program, (a, b))


# --- constants -------------------------------------------------------------------------------------------------------

NAN = float("nan")
CONSTANTS = [
    0,
    1,
    True,
    False,
    1.0,
    0.0,
    -0.0,
    NAN,
    -NAN,
    10**40,
    None,
    ...,
    "a",
    "b",
    "",
    b"a",
    1j,
    complex(0.0, -0.0),
    complex(0.0, 0.0),
    (),
    (1,),
    (True,),
    (1.0,),
    (0.0,),
    (-0.0,),
    ((1, "a"), None),
    frozenset(),
    frozenset({1}),
    frozenset({1.0}),
    frozenset({True}),
    slice(1, 2),
    slice(1, 2, 3),
    slice(1.0, 2),
    range(3),
    range(0, 4, 2),
    range(0, 3, 2),
    torch.float32,
    torch.float16,
    torch.device("cpu"),
    torch.device("meta"),
    torch.device("cuda:0"),
    torch.device("cuda:1"),
    torch.Size([1]),
    torch.strided,
    torch.contiguous_format,
    np.float64(0.0),
    np.float64(-0.0),
    np.float32(1.0),
    np.float64(1.0),
    np.int64(1),
    np.float32(-0.0),
]


def fresh(value: object) -> object:
    """An equal object that is, where Python allows it, another one."""
    match value:
        case float() if type(value) is float:
            return np.float64(value).item()
        case str() | bytes() if value:
            return value[:1] + value[1:]
        case torch.device():
            return torch.device(str(value))
        case tuple() if type(value) is tuple and value:
            return (*value[:1], *value[1:])
        case int() if type(value) is int:
            return int(str(value))
    return value


def test_equals_is_exact():
    programs = [one("EQUALS", X, value) for value in CONSTANTS]
    for i, (value, program) in enumerate(zip(CONSTANTS, programs)):
        assert check_both(program, (value,))
        assert check_both(program, (fresh(value),))
        for j, other in enumerate(CONSTANTS):
            same_bits = isinstance(value, float) and isinstance(other, float) and repr(value) == repr(other) and i != j
            if i != j and not same_bits:
                assert not check_both(program, (other,)), (value, other)


def test_instances_of_user_classes_are_compared_by_identity():
    class Always:
        def __eq__(self, other):
            raise AssertionError("guards must not call this")

        __hash__ = None

    a = Always()
    program = one("EQUALS", X, a)
    assert program.check((a,), function)
    assert not program.check((Always(),), function)


def test_bound_unbound_is_type_of():
    assert check_both(one("IS", X, function), (function,)) and not check_both(one("IS", X, function), (len,))
    assert check_both(one("IS", TypeOf(X), int), (3,)) and not check_both(one("IS", TypeOf(X), int), (True,))
    assert check_both(one("IS", X, None), (None,)) and not check_both(one("IS", X, None), (0,))


# --- containers ------------------------------------------------------------------------------------------------------


class MyDict(dict):
    def __getitem__(self, key):
        raise AssertionError("guards use dict's own method")

    def __len__(self):
        raise AssertionError("guards use dict's own method")


class MyList(list):
    def __getitem__(self, key):
        raise AssertionError("guards use list's own method")


@pytest.mark.parametrize("cls", [list, tuple, MyList, deque])
def test_sequences(cls):
    items = cls([1, "a", 2.5])
    source_type = cls
    guards = [
        Guard("TYPE", X, source_type),
        Guard("LENGTH", X, 3),
        Guard("EQUALS", Item(X, 1), "a"),
        Guard("EQUALS", Item(X, -1), 2.5),
    ]
    program = build_program(guards, [])
    assert check_both(program, (items,))
    for other in ([1, "b", 2.5], [1, "a"], [1, "a", 2.5, 4], [1, "a", 2], []):
        assert not check_both(program, (cls(other),))
    assert not check_both(program, ({1: "a"},))
    if cls is not tuple:
        items.append(4)
        assert not check_both(program, (items,))
        items.pop()
        assert check_both(program, (items,))


class Key:
    pass


@pytest.mark.parametrize("cls", [dict, OrderedDict, MyDict])
def test_dicts(cls):
    key = Key()
    d = cls({"a": 1, "b": [2], 7: "seven", key: "object", (1, 2): "pair"})
    guards = [
        Guard("TYPE", X, cls),
        Guard("LENGTH", X, 5),
        Guard("KEYS", X, ("a", "b", 7, key, (1, 2))),
        Guard("EQUALS", Item(X, "a"), 1),
        Guard("TYPE", Item(X, "b"), list),
        Guard("EQUALS", Item(Item(X, "b"), 0), 2),
        Guard("EQUALS", Item(X, 7), "seven"),
        Guard("EQUALS", Item(X, key), "object"),
        Guard("EQUALS", Item(X, (1, 2)), "pair"),
        Guard("ABSENT", X, "c"),
        Guard("ABSENT", X, Key()),
        Guard("IS", DictKey(X, 3), key),
    ]
    program = build_program(guards, [])
    set_, delete, len_ = dict.__setitem__, dict.__delitem__, dict.__len__
    assert check_both(program, (d,))
    changes = [
        (lambda: set_(d, "a", 2), lambda: set_(d, "a", 1)),
        (lambda: set_(d, "a", True), lambda: set_(d, "a", 1)),
        (lambda: set_(d, 7, "8"), lambda: set_(d, 7, "seven")),
        (lambda: set_(d, key, 0), lambda: set_(d, key, "object")),
        (lambda: set_(d, "b", (2,)), lambda: set_(d, "b", [2])),
        (lambda: d["b"].append(1) if cls is not MyDict else set_(d, "b", 1), lambda: set_(d, "b", [2])),
        (lambda: set_(d, "c", 0), lambda: delete(d, "c")),
    ]
    if cls is not OrderedDict:
        for change, back in changes:
            change()
            answer = check_both(program, (d,))
            back()
            assert check_both(program, (d,))
            assert len_(d) == 5 and answer in (True, False)
    else:
        d.move_to_end("a")
        assert not check_both(program, (d,))
        d.move_to_end("a", last=False)
        assert check_both(program, (d,))
    value = dict.pop(d, "a") if cls is not OrderedDict else d.pop("a")
    assert not check_both(program, (d,))
    d.update({"a": value})
    assert not check_both(program, (d,))  # the order has changed
    assert not check_both(program, ([],))


def test_a_key_that_runs_python_code_cannot_break_a_check():
    class Nasty:
        """Equal in hash to "k"; its __eq__ empties whatever the check is reading."""

        def __hash__(self):
            return hash("k")

        def __eq__(self, other):
            victims.clear()
            gc.collect()
            return False

    victims: list[object] = []
    program = build_program(
        [
            Guard("TYPE", Y, list),
            Guard("TYPE", Item(Y, 0), list),
            Guard("EQUALS", Item(Item(Y, 0), 0), "x"),
            Guard("EQUALS", Item(X, "k"), 5),
        ],
        [Item(Item(Y, 0), 0), Item(Y, 0)],
    )
    for _ in range(20):
        victims[:] = [["x"]]
        d = {Nasty(): 1}
        dict.__setitem__(d, "k", 5)
        victims[:] = [["x"]]
        inputs = program.inputs((d, victims), function)
        assert inputs is None or inputs == ("x", ["x"])


# --- objects and types -----------------------------------------------------------------------------------------------


class Base:
    flag = 1

    def method(self):
        return 0


class Derived(Base):
    pass


class Other(Base):
    pass


class Slotted:
    __slots__ = ("value",)


def test_instance_attributes_and_types():
    d = Derived()
    d.count = 3
    guards = [
        Guard("TYPE", SELF, Derived),
        Guard("EQUALS", Item(InstanceDict(SELF), "count"), 3),
        Guard("ABSENT", InstanceDict(SELF), "flag"),
        Guard("TYPE_ATTRIBUTE", SELF, (Derived, "flag", 1)),
        Guard("TYPE_ATTRIBUTE", SELF, (Derived, "method", Base.__dict__["method"])),
        Guard("TYPE_ATTRIBUTE", SELF, (Derived, "__getattr__", MISSING)),
    ]
    program = build_program(guards, [])
    assert check_both(program, (d,))
    d.count = 4
    assert not check_both(program, (d,))
    d.count = 3
    assert check_both(program, (d,))
    d.flag = 2
    assert not check_both(program, (d,))
    del d.flag
    assert check_both(program, (d,))
    d.__class__ = Other
    assert not check_both(program, (d,))
    d.__class__ = Derived
    assert check_both(program, (d,))
    Base.flag = 5
    assert not check_both(program, (d,))
    assert program.failure((d,), function)[1] == "Derived.flag was 1, is 5"
    Base.flag = 1
    assert check_both(program, (d,))
    Base.unrelated = 5
    assert check_both(program, (d,))
    del Base.unrelated
    Base.__getattr__ = lambda self, name: 0
    assert not check_both(program, (d,))
    del Base.__getattr__
    assert check_both(program, (d,))
    del d.count
    assert not check_both(program, (d,))
    d.__dict__ = {"count": 3}
    assert check_both(program, (d,))
    assert not check_both(program, (object(),))


def test_slots_and_attributes():
    s = Slotted()
    program = build_program(
        [Guard("TYPE", X, Slotted), Guard("EQUALS", Attribute(X, "value"), 3)], [Attribute(X, "value")]
    )
    assert not check_both(program, (s,))
    s.value = 3
    assert check_both(program, (s,))
    assert program.inputs((s,), function) == (3,)
    s.value = 4
    assert not check_both(program, (s,))
    unbound = one("BOUND", Attribute(X, "value"), False)
    assert not check_both(unbound, (s,))
    del s.value
    assert check_both(unbound, (s,))


def test_tensor_grad_attribute():
    w = torch.ones(3, requires_grad=True)
    grad = Attribute(X, "grad")
    none = one("IS", grad, None)
    assert check_both(none, (w,))
    w.sum().backward()
    assert not check_both(none, (w,))
    some = one("TENSOR", grad, tensor_guard(w.grad), (grad,))
    assert check_both(some, (w,))
    assert some.inputs((w,), function)[0] is w.grad


def test_functions_methods_cells_and_globals():
    cell_value = 5

    def inner(a=1, *, k=2):
        return cell_value, a, k

    guards = [
        Guard("EQUALS", Closure(0, "cell_value"), 5),
        Guard("EQUALS", Item(Attribute(FunctionSource(), "__defaults__"), 0), 1),
        Guard("EQUALS", Item(Attribute(FunctionSource(), "__kwdefaults__"), "k"), 2),
        Guard("IS", Global("function"), function),
        Guard("IS", Global("len"), len),
        Guard("IS", Item(Attribute(FunctionSource(), "__globals__"), "Base"), Base),
    ]
    program = build_program(guards, [])
    assert check_both(program, (), inner)
    cell_value = 6
    assert not check_both(program, (), inner)
    cell_value = 5
    assert check_both(program, (), inner)
    inner.__defaults__ = (3,)
    assert not check_both(program, (), inner)
    inner.__defaults__ = (1,)
    inner.__kwdefaults__["k"] = 0
    assert not check_both(program, (), inner)
    inner.__kwdefaults__["k"] = 2
    globals()["len"] = max
    try:
        assert not check_both(program, (), inner)
    finally:
        del globals()["len"]
    assert check_both(program, (), inner)
    inner.__closure__[0].cell_contents = 9
    assert not check_both(program, (), inner)
    del inner.__closure__[0].cell_contents
    assert not check_both(program, (), inner)
    assert check_both(one("BOUND", Closure(0, "cell_value"), False), (), inner)
    assert not check_both(one("BOUND", Closure(0, "cell_value"), True), (), inner)
    cell_value = 5
    bound = build_program(
        [
            Guard("TYPE", X, types.MethodType),
            Guard("IS", Attribute(X, "__func__"), Base.method),
            Guard("TYPE", Attribute(X, "__self__"), Derived),
        ],
        [],
    )
    assert [check_both(bound, (value,)) for value in (Derived().method, Base().method, len)] == [True, False, False]


def test_class_and_module_dictionaries():
    module = types.ModuleType("m")
    module.value = 1
    where = Item(InstanceDict(Constant(id(module), module, "m")), "value")
    program = one("EQUALS", where, 1)
    assert check_both(program, ())
    module.value = 2
    assert not check_both(program, ())
    program = one("EQUALS", Item(InstanceDict(X), "flag"), 1)
    assert check_both(program, (Base,)) and not check_both(program, (Derived,))


# --- several objects -------------------------------------------------------------------------------------------------


def test_same_different_overlap():
    a, b = torch.ones(4), torch.ones(4)
    same, different, apart = one("SAME", X, Y), one("DIFFERENT", X, (X, Y)), one("NO_OVERLAP", X, (X, Y))
    assert check_both(same, (a, a)) and not check_both(same, (a, b))
    assert check_both(different, (a, b)) and not check_both(different, (a, a)) and check_both(different, (b, a))
    assert check_both(apart, (a, b)) and not check_both(apart, (a, a[1:])) and not check_both(apart, (a[:2], a[2:]))
    assert check_both(apart, (a, torch.ones(0))) and check_both(apart, (torch.ones(0), torch.ones(0)))
    memory = bytearray(64)
    left, right = (
        torch.frombuffer(memory, dtype=torch.float32, count=8),
        torch.frombuffer(memory, dtype=torch.float32, count=8, offset=16),
    )
    assert not check_both(apart, (left, right))
    b.set_(a)
    assert not check_both(apart, (a, b))
    many = [torch.ones(1) for _ in range(50)]
    sources = tuple(Item(X, i) for i in range(50))
    program = one("DIFFERENT", sources[0], sources)
    for _ in range(3):
        assert check_both(program, (many,))
    many[7] = many[33]
    assert not check_both(program, (many,))


def test_call_guards_and_exceptions():
    program = one("CALL", X, lambda value: value > 3)
    assert [check_both(program, (value,)) for value in (4, 3, "a", None)] == [True, False, False, False]


# --- state -----------------------------------------------------------------------------------------------------------


def state_changes():
    yield torch.no_grad()
    yield torch.inference_mode()
    yield torch.autocast("cpu", dtype=torch.bfloat16)
    yield torch.autocast("cpu", enabled=False, cache_enabled=False)
    yield torch.device("meta")
    yield torch._C.DisableTorchFunction()
    yield torch.overrides.BaseTorchFunctionMode()


@pytest.mark.parametrize("index", range(len(list(state_changes()))))
def test_global_state_contexts(index):
    outside = one("STATE", FunctionSource(), capture_global_state())
    assert check_both(outside, ())
    with list(state_changes())[index]:
        assert not check_both(outside, ())
        inside = one("STATE", FunctionSource(), capture_global_state())
        assert check_both(inside, ())
    assert check_both(outside, ()) and not check_both(inside, ())


def test_global_settings():
    before = one("STATE", FunctionSource(), capture_global_state())
    threads = torch.get_num_threads()
    changes = [
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (lambda: torch.set_num_threads(threads + 1), lambda: torch.set_num_threads(threads)),
        (lambda: torch.set_float32_matmul_precision("high"), lambda: torch.set_float32_matmul_precision("highest")),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
        (
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
    ]
    for change, back in changes:
        change()
        try:
            assert not check_both(before, ())
            assert check_both(one("STATE", FunctionSource(), capture_global_state()), ())
        finally:
            back()
        assert check_both(before, ())


def test_functorch_is_part_of_the_state():
    program = one("STATE", FunctionSource(), capture_global_state())
    seen = []
    torch.func.vmap(lambda x: seen.append(check_both(program, ())) or x)(torch.ones(2))
    assert seen == [False] and check_both(program, ())


def test_dispatch_modes_are_part_of_the_state():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    program = one("STATE", FunctionSource(), capture_global_state())
    with Mode():
        assert not check_both(program, ())
    assert check_both(program, ())


# --- lifetime, threads -----------------------------------------------------------------------------------------------


def test_objects_that_died_between_checks_are_never_touched():
    program = build_program(
        [
            Guard("TYPE", X, dict),
            Guard("TYPE", Item(X, "a"), dict),
            Guard("TYPE", Item(Item(X, "a"), "b"), list),
            Guard("EQUALS", Item(Item(Item(X, "a"), "b"), 0), "v"),
        ],
        [Item(Item(Item(X, "a"), "b"), 0)],
    )
    for i in range(300):
        d = {"a": {"b": ["v" if i % 3 else "w"]}}
        assert program.check((d,), function) == bool(i % 3)
        del d
        if i % 50 == 0:
            gc.collect()


class Holder:
    """An object with a dictionary, as a module is one."""


def change_everything(root: Holder):
    """Each step changes something that a path below `root` reads, and is undone by the second step that it gives."""
    part, other = root.part, Derived()
    other.count = 5
    yield lambda: setattr(part, "count", 4), lambda: setattr(part, "count", 3)
    yield lambda: setattr(root, "part", other), lambda: setattr(root, "part", part)
    yield lambda: setattr(part, "__class__", Other), lambda: setattr(part, "__class__", Derived)
    yield lambda: setattr(part, "__dict__", {"count": 4}), lambda: setattr(part, "__dict__", {"count": 3})
    yield lambda: setattr(root, "__dict__", {}), lambda content=root.__dict__: setattr(root, "__dict__", content)
    yield lambda: root.hooks.update(a=1), root.hooks.clear
    yield lambda: root.items.append(1), root.items.pop
    yield lambda: root.items.__setitem__(0, "w"), lambda: root.items.__setitem__(0, "v")
    yield lambda: setattr(root, "items", ["w", 2]), lambda: setattr(root, "items", ["v", 2])
    yield lambda: setattr(root, "pair", (1, 3)), lambda: setattr(root, "pair", (1, 2))
    yield lambda: setattr(root.weight, "data", torch.ones(3, 3)), lambda: setattr(root.weight, "data", torch.ones(2, 3))
    yield (
        lambda: setattr(root.weight, "data", torch.ones(3, 2).t()),
        lambda: setattr(root.weight, "data", torch.ones(2, 3)),
    )
    yield (
        lambda: setattr(root.weight, "data", torch.ones(2, 3).half()),
        lambda: setattr(root.weight, "data", torch.ones(2, 3)),
    )
    yield lambda: setattr(root, "weight", torch.ones(2, 3)), lambda w=root.weight: setattr(root, "weight", w)
    yield lambda: setattr(Derived, "method", None), lambda: delattr(Derived, "method")
    yield (
        lambda: setattr(root.run, "__code__", one.__code__),
        lambda code=function.__code__: setattr(root.run, "__code__", code),
    )


def test_the_shortcut_sees_every_change():
    root = Holder()
    root.part, root.hooks, root.items, root.pair = Derived(), OrderedDict(), ["v", 2], (1, 2)
    root.part.count = 3
    root.weight = torch.nn.Parameter(torch.ones(2, 3))
    root.run = types.FunctionType(function.__code__, {})

    def of(name: str) -> Source:
        return Item(InstanceDict(SELF), name)

    guards = [
        Guard("TYPE", SELF, Holder),
        Guard("TYPE", of("part"), Derived),
        Guard("TYPE_ATTRIBUTE", SELF, (Derived, "method", Base.__dict__["method"])),
        Guard("EQUALS", Item(InstanceDict(of("part")), "count"), 3),
        Guard("ABSENT", InstanceDict(of("part")), "more"),
        Guard("LENGTH", of("hooks"), 0),
        Guard("LENGTH", of("items"), 2),
        Guard("TYPE", of("items"), list),
        Guard("EQUALS", Item(of("items"), 0), "v"),
        Guard("TYPE", of("pair"), tuple),
        Guard("EQUALS", Item(of("pair"), 1), 2),
        Guard("TENSOR", of("weight"), tensor_guard(root.weight, requires_grad=None)),
        Guard("TYPE", of("run"), types.FunctionType),
        Guard("IS", Attribute(of("run"), "__code__"), function.__code__),
        Guard("DIFFERENT", of("part"), (of("part"), SELF)),
    ]
    program = build_program(guards, [of("weight")])
    for change, undo in change_everything(root):
        for _ in range(2):
            assert check_both(program, (root,))
            assert program.words > 0
            change()
            assert not check_both(program, (root,)) and not check_both(program, (root,))
            undo()
        assert check_both(program, (root,))
    assert program.inputs((root,), function) == (root.weight,)
    twin = Holder()
    twin.__dict__ = dict(root.__dict__)
    assert check_both(program, (twin,)) and check_both(program, (root,))


def test_the_shortcut_lasts_while_attributes_get_the_values_that_they_have():
    root = Holder()
    root.value, root.hooks = ["v"], OrderedDict()
    guards = [
        Guard("TYPE", SELF, Holder),
        Guard("IS", Item(InstanceDict(SELF), "value"), root.value),
        Guard("LENGTH", Item(InstanceDict(SELF), "hooks"), 0),
    ]
    program = build_program(guards, [])
    for _ in range(3):
        assert program.check((root,), function)
    learnt = program.words
    assert learnt > 0
    for _ in range(5):
        setattr(root, "value", root.value)
        assert program.check((root,), function)
        assert program.words == learnt  # none while it is made again
    root.hooks["a"] = 1
    assert not program.check((root,), function)
    del root.hooks["a"]
    assert program.check((root,), function)
    root.value = ["v"]
    assert not program.check((root,), function)


def test_dicts_that_die_leave_no_version_to_those_that_take_their_place():
    program = build_program(
        [Guard("TYPE", SELF, Holder), Guard("EQUALS", Item(Item(InstanceDict(SELF), "table"), "k"), 1)], []
    )
    root, places = Holder(), set()
    for i in range(400):
        root.table = {"k": 1 if i % 5 else 2}
        places.add(id(root.table))
        for _ in range(3):
            assert program.check((root,), function) == bool(i % 5)
    assert len(places) < 400


def test_the_shortcut_is_not_taken_in_by_a_new_object_in_an_old_place():
    program = build_program([Guard("TYPE", SELF, Holder), Guard("EQUALS", Item(InstanceDict(SELF), "value"), 1)], [])
    places = set()
    for i in range(400):
        made = Holder()
        made.value = 1 if i % 20 else 2
        places.add(id(made))
        assert program.check((made,), function) == bool(i % 20)
        del made
    assert len(places) < 400


def test_recursion_and_threads_use_slots_of_their_own():
    depth = []

    def reenter(value):
        if len(depth) < 5:
            depth.append(value)
            n = len(depth)
            assert program.inputs(({"k": n}, 0), function) == (n,)
        return True

    program = build_program([Guard("CALL", X, reenter)], [Item(X, "k")])
    assert program.inputs(({"k": 100}, 0), function) == (100,)

    shared = build_program([Guard("CALL", X, lambda value: sum(range(50)) > 0)], [Item(X, "k")])
    wrong = []

    def work(n):
        for _ in range(300):
            if shared.inputs(({"k": n},), function) != (n,):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_programs_are_collected():
    class Marker:
        pass

    marker = Marker()
    program = one("IS", Constant(id(marker), marker, "m"), marker)
    holder = {"program": program}
    marker.cycle = holder
    import weakref

    alive = weakref.ref(marker)
    del marker, program, holder
    gc.collect()
    assert alive() is None


def test_bad_programs_are_refused():
    for op, slot, base in [(99, 0, 0), (0, 5, 0), (_native.OPCODES.index("TYPE_OF"), 0, 7)]:
        instruction = (op, slot, base, 0, 0, False, None, None)
        with pytest.raises(ValueError):
            _native.GuardProgram(1, 0, [instruction], [])
    with pytest.raises(ValueError):
        _native.GuardProgram(1, 0, [], [(False, 3)])
    with pytest.raises(ValueError):
        build_program([Guard("IS", TensorSize(X, 0), 3)], [])


def test_readable_names():
    weight = Item(Item(InstanceDict(Item(Item(InstanceDict(SELF), "_modules"), "0")), "_parameters"), "weight")
    assert readable(weight) == "self[0].weight"
    assert readable(Item(InstanceDict(Global("config")), "size")) == "config.size"
    assert guard_text(Guard("LENGTH", Closure(1, "items"), 3)) == "len(items) == 3"


def made_anew(value: object) -> types.FunctionType:
    def made():
        return value

    return made


def test_a_function_that_is_made_anew_is_not_kept_and_none_takes_its_place():
    """Not the next object at its address, nor None, which a dead reference gives."""
    held, last = ["what it holds"], None
    made = made_anew(held)
    alive, address = weakref.ref(made), id(made)
    guards = [
        Guard.of("IS", X, made),
        Guard.of("IS", Attribute(Constant.of(made, "_made"), "__code__"), made.__code__),
        Guard("TYPE", Item(Attribute(Constant.of(made, "_made"), "__closure__"), 0), types.CellType),
    ]
    program = build_program(guards, [])
    del guards
    assert check_both(program, (made, None))
    assert program.words > 0
    assert not check_both(program, (made_anew(held), None))
    assert check_both(program, (made, None))
    del made
    assert alive() is None
    assert sys.getrefcount(held) == 2
    others = []
    while len(others) < 100_000 and id(last) != address:
        last = made_anew(held)
        others.append(last)
    assert id(last) == address
    for one in (last, None):
        assert not check_both(program, (one, None))
    assert "an object that is gone" in program.failure((last, None), function)[1]
    assert "an object that is gone" in guard_text(program.guards[0])


TELL_APART: dict[str, Callable[[list[Any]], Any]] = {
    "a set": lambda two: len({*two}),
    "a frozenset of tuples": lambda two: len(frozenset((1, one) for one in two)),
    "keys": lambda two: len(dict.fromkeys(two)),
    "a key that is looked up": lambda two: {two[0]: 1}.get(two[1]),
    "an element that is looked up": lambda two: two[0] in {two[1]},
    "an element that is added": lambda two: (found := {two[0]}, found.add(two[1]), len(found))[2],
    "a difference": lambda two: len({two[0]} - {two[1]}),
    "a default": lambda two: (found := {two[0]: 1}, found.setdefault(two[1], 2))[1],
    "parameters": lambda two: len([*nn.ParameterList(two).parameters()]),
    "a counter": lambda two: len(collections.Counter(two)),
}


@pytest.mark.parametrize("name", TELL_APART)
def test_tensors_that_a_set_or_a_dict_tells_apart_stay_different_ones(name: str) -> None:
    held = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    compiled = fusewright.compile(lambda x: (x + 1, TELL_APART[name](held)), backend="eager")
    different = TELL_APART[name](held)
    assert compiled(torch.ones(2))[1] == different
    kept, held[1] = held[1], held[0]
    assert compiled(torch.ones(2))[1] == TELL_APART[name](held) != different
    held[1] = kept
    assert compiled(torch.ones(2))[1] == different
