# ruff: noqa
"""Globals, module attributes, imports, built-in names."""

from __future__ import annotations

import builtins
import inspect
import math
import sys
import types

import typing

import torch

import fusewright

from tests.capture.interpret.language.support import program, x

COUNT = 0
HISTORY: list = []
TABLE = {"a": 1}
FLAG = True
WEIGHT = torch.ones(3)
HOLDER = types.SimpleNamespace(value=1)
MODULE = types.ModuleType("made")
MODULE.scale = 2


def globals_state(*names):
    return lambda: [globals().get(name, "absent") for name in names]


@program
def global_counter():
    global COUNT
    COUNT = 0

    def f(x):
        global COUNT
        COUNT += 1
        return x * COUNT

    return f, [(x(),), (x(),), (x(),)], globals_state("COUNT")


@program
def global_list_and_dict():
    HISTORY.clear()
    TABLE.clear()
    TABLE["a"] = 1

    def f(x):
        HISTORY.append(x.shape[0])
        TABLE["n"] = TABLE.get("n", 0) + 1
        TABLE.setdefault("x", x)
        return x + len(HISTORY) + TABLE["a"]

    return f, [(x(),), (x(),)], globals_state("HISTORY", "TABLE")


@program
def global_is_rebound_to_a_tensor():
    global WEIGHT
    WEIGHT = torch.ones(3)

    def f(x):
        global WEIGHT
        y = x * WEIGHT
        WEIGHT = WEIGHT + 1
        return y + WEIGHT

    return f, [(x(),), (x(),), (x(),)], globals_state("WEIGHT")


@program
def global_is_made_and_deleted():
    globals().pop("MADE", None)

    def f(x):
        global MADE
        MADE = x + 1
        y = MADE * 2
        del MADE
        try:
            MADE
        except NameError as error:
            return y, str(error), error.name

    return f, [(x(),), (x(),)], globals_state("MADE")


@program
def missing_global():
    def f(x, ask):
        y = x + 1
        return y if not ask else y + not_defined_anywhere

    return f, [(x(), False), (x(), True), (x(), False)]


@program
def global_flag_flips():
    global FLAG
    FLAG = True

    def f(x):
        global FLAG
        FLAG = not FLAG
        return x + 1 if FLAG else x - 1

    return f, [(x(),), (x(),), (x(),)], globals_state("FLAG")


@program
def namespace_attributes():
    holder = types.SimpleNamespace(value=1, extra=[1])

    def f(x, h):
        h.value += 1
        h.new = x
        del h.extra
        return x * h.value, hasattr(h, "extra"), vars(h).keys() == {"value", "new"}

    return f, [(x(), types.SimpleNamespace(value=1, extra=[])), (x(), types.SimpleNamespace(value=5, extra=[]))]


@program
def module_attribute_is_read_and_written():
    MODULE.scale = 2
    if hasattr(MODULE, "seen"):
        del MODULE.seen

    def f(x):
        y = x * MODULE.scale
        MODULE.scale += 1
        MODULE.seen = y
        return y

    return f, [(x(),), (x(),), (x(),)], lambda: (MODULE.scale, MODULE.seen)


@program
def module_attribute_is_deleted():
    MODULE.gone = 1

    def f(x):
        if hasattr(MODULE, "gone"):
            del MODULE.gone
            return x + 1
        return x - 1

    return f, [(x(),), (x(),), (x(),)], lambda: hasattr(MODULE, "gone")


@program
def imports_inside():
    def f(x):
        import math
        import os.path as p
        from collections import OrderedDict, deque as dq
        from torch import nn as layers

        return x * math.pi, p.basename("/a/b"), OrderedDict(a=1), dq([1]), layers.__name__

    return f, [(x(),), (x(),)]


@program
def relative_import_inside():
    def f(x):
        from tests.capture.interpret.language.support import x as make
        from tests.capture.interpret.language import support

        return x + make(), support.x is make

    return f, [(x(),), (x(),)]


@program
def import_error():
    def f(x):
        try:
            from math import no_such_name
        except ImportError as error:
            return x + 1, str(error)

    return f, [(x(),), (x(),)]


class Loaded(types.ModuleType):
    def __getattribute__(self, name):
        if name == "twice":
            return object.__getattribute__(self, "value") * 2
        if name == "thrice":
            return types.ModuleType.__getattribute__(self, "value") * 3
        return super().__getattribute__(name)

    def __setattr__(self, name, value):
        super().__setattr__(name, value + 1 if name == "value" else value)


class Late(types.ModuleType):
    def __getattr__(self, name):
        if name != "twice":
            raise AttributeError(name)
        return 7


def answered(name):
    if name in ("twice", "thrice"):
        return len(name)
    raise AttributeError(f"no {name}")


@program
def modules_that_say_what_they_hold():
    made = [Loaded("loaded"), Late("late"), Late("asks"), types.ModuleType("plain")]
    for one in made:
        one.value = 1
    for one in made[2:]:
        one.__getattr__ = answered
    asked = ("value", "twice", "thrice", "__name__", "__class__")

    def f(x):
        told = []
        for one in made:
            one.value += 1
            for how in (getattr, types.ModuleType.__getattribute__, object.__getattribute__):
                for name in asked:
                    try:
                        told.append(how(one, name))
                    except AttributeError as error:
                        told.append(str(error))
            x = x * one.value
        return x, told, hasattr(made[0], "nothing"), hasattr(made[1], "nothing")

    return f, [(x(),), (x(),)], lambda: [vars(one)["value"] for one in made]


@program
def what_import_errors_say():
    for name, file in (("fileless_module", None), ("module_of_a_file", "/some/where.py")):
        sys.modules[name] = types.ModuleType(name)
        if file is not None:
            sys.modules[name].__file__ = file

    def f(x):
        said = []
        try:
            from fileless_module import nothing
        except ImportError as error:
            said.append((str(error), error.args, error.name, error.path, getattr(error, "name_from", None)))
        try:
            from module_of_a_file import nothing
        except ImportError as error:
            said.append((str(error), error.args, error.name, error.path, getattr(error, "name_from", None)))
        try:
            from collections.abc import nothing
        except ImportError as error:
            said.append((str(error), error.args, error.name, error.path, getattr(error, "name_from", None)))
            return x + 1, said, error

    return f, [(x(),), (x(),)]


@program
def variables_asked_for_twice():  # one dict before Python 3.13, a new one each time from then on
    def f(x):
        def shared():
            return kept

        a, kept = 1, 2
        first = locals()
        first["new"], first["a"] = 3, 5
        seen = dict(first)
        a = 2
        second = vars()
        names = dir(), [sorted(locals()) for _ in range(2)]
        del a
        third = locals()
        same = first is second, first is third
        return x + shared(), seen, sorted(first), first.get("a"), sorted(second), sorted(third), names, same

    return f, [(x(),), (x(),)]


@program("explicit-graph-break")
def variables_asked_for_around_a_break():
    def f(x):
        a, y = 1, x + 1
        first = locals()
        fusewright.graph_break()
        a = 2
        second = locals()
        second["a"] = 9
        return y * a, first["a"], second["a"], first is second, sorted(first)

    return f, [(x(),), (x(),)]


@program("frame-access")
def variables_of_callers():
    def writes(value):  # reaches the caller from Python 3.13 on
        sys._getframe(1).f_locals["a"] = value

    def reads():
        return inspect.currentframe().f_back.f_locals["a"], inspect.stack()[1].frame.f_locals["a"]

    def between(x):
        a = 10
        writes(20)
        return x * a, reads()

    def f(x):
        a, y = 1, x + 1
        first = reads()
        writes(5)
        return y + a, first, reads(), between(y)

    return f, [(x(),), (x(),)]


@program("import", "opaque-object")
def import_of_a_missing_module():
    def f(x):
        y = x + 1
        try:
            import no_such_module_anywhere
        except ModuleNotFoundError as error:
            return y * 2, str(error), error.name

    return f, [(x(),), (x(),)]


@program
def shadowed_builtin():
    def f(x):
        len = lambda v: 7
        return x + len([]), builtins.len([1])

    return f, [(x(),), (x(),)]


@program
def name_is_main():
    def f(x):
        return x + 1, __name__ == "__main__", __name__.rpartition(".")[2]

    return f, [(x(),), (x(),)]


@program
def constants_of_modules():
    def f(x):
        return (
            x * math.e + math.inf * 0 if False else x * math.tau,
            sys.maxsize,
            sys.version_info >= (3, 11),
            torch.float32,
        )

    return f, [(x(),), (x(),)]


@program
def globals_are_read_as_a_dict():
    def f(x):
        return x + 1, globals()["COUNT"] is COUNT, "HISTORY" in globals()

    return f, [(x(),), (x(),)]


@program
def locals_of_the_function():
    def f(x, n):
        y = x + n
        return sorted(locals()), locals()["y"]

    return f, [(x(), 1), (x(), 2)]


@program
def dunder_debug_and_assert():
    def f(x, n):
        assert n > 0, f"n is {n}"
        assert x.shape[0] == 2
        return x + n, __debug__

    return f, [(x(), 1), (x(), 0), (x(), 2), (x()[:1], 1)]


@program
def type_alias_and_annotations():
    def f(x):
        y: int = 3
        z: "undefined thing" = 4

        def g(a: int, b: "list[str]" = ()) -> torch.Tensor:
            return x + a

        return g(y), g.__annotations__, z

    return f, [(x(),), (x(),)]


@program
def mutation_of_a_global_inside_a_callee():
    HISTORY.clear()

    def note(value):
        HISTORY.append(value)
        return len(HISTORY)

    def f(x):
        return x + note("a") + note("b")

    return f, [(x(),), (x(),)], globals_state("HISTORY")


@program
def exec_time_identity_of_globals():
    def f(x):
        return TABLE is globals()["TABLE"], HISTORY is not TABLE, x + 1, TABLE

    return f, [(x(),), (x(),)], globals_state("TABLE")


@program
def annotations_written_as_expressions():
    T = typing.TypeVar("T")

    def f(x):
        both = torch.jit.annotate(typing.List[torch.Tensor], [x, x + 1])
        pair = typing.cast(typing.Optional[typing.Tuple[int, ...]], (1, 2))
        kinds = (
            typing.Union[int, str],
            typing.Callable[[int], str],
            typing.Dict[str, T][int],
            typing.Literal["a", "b"],
            typing.Annotated[int, "m"],
        )
        return both[0] + both[1], pair, kinds, list[int], int | None

    return f, [(x(),), (x(),)]


@program
def locals_before_and_after_a_variable_is_bound():
    def f(x, n):
        y = x + n
        first = locals()
        z = y * 2
        second = locals()
        first["y"] = 5
        second["new"] = 1
        return y, sorted(first), sorted(second), first is second, first["y"], sorted(locals()), first is locals()

    return f, [(x(), 1), (x(), 2)]


@program
def locals_in_comprehensions():
    def f(x, n):
        a = [sorted(locals()) for i in range(2)]
        b = [[sorted(k for k in locals() if k != "k") for j in range(1)] for i in range(1)]
        c = {k: sorted(locals()) for k in "ab"}
        i = 7
        d = [i for i in range(3)]
        return x + n, a, b, c, i, d

    return f, [(x(), 1), (x(), 2)]


@program
def locals_with_cells():
    def f(x, n):
        def g():
            nonlocal n
            n += 1
            return n, sorted(locals())

        before = locals()
        r = g()
        return x + n, r, before["n"], locals()["n"]

    return f, [(x(), 1), (x(), 2)]
