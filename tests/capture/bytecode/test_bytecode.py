"""Decoding and assembling code objects."""

from __future__ import annotations

import argparse
import ast
import asyncio.tasks
import dataclasses
import inspect
import subprocess
import types

import pytest

from fusewright.capture.bytecode.instructions import (
    Item,
    _big_endian,
    _line_table,
    assemble,
    constant_body,
    decode,
    decoded,
    parse_exception_table,
)

MODULES = (argparse, ast, asyncio.tasks, dataclasses, inspect, subprocess)


def code_objects(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_objects(constant)


def module_code(module):
    with open(module.__file__, encoding="utf-8") as file:
        return compile(file.read(), module.__file__, "exec")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_assembling_what_was_decoded_gives_the_same_code(module):
    for code in code_objects(module_code(module)):
        info = decode(code)
        items = [
            Item(instruction.name, instruction.arg, instruction.target, instruction.positions, info.handlers[index])
            for index, instruction in enumerate(info.instructions)
        ]
        bytecode, lines, exceptions = assemble(items, code.co_firstlineno)
        assert bytecode == code.co_code
        made = code.replace(co_code=bytecode, co_linetable=lines, co_exceptiontable=exceptions)
        assert list(made.co_positions()) == list(code.co_positions())
        again = decode(made)
        assert again.instructions == info.instructions
        assert again.handlers == info.handlers


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_slots_are_named_as_cpython_names_them(module):
    for code in code_objects(module_code(module)):
        info = decode(code)
        assert list(info.slots) == [code._varname_from_oparg(slot) for slot in range(len(info.slots))]


def test_long_jumps_get_extended_arguments():
    body = "\n".join(f"        x = x + {n}" for n in range(2000))
    scope: dict = {}
    exec(f"def f(x, n):\n    while n:\n        n -= 1\n{body}\n    return x\n", scope)
    code = scope["f"].__code__
    info = decode(code)
    # An instruction in front moves every jump, whose argument has three bytes here.
    items = [Item("NOP")] + [
        Item(
            instruction.name,
            instruction.arg,
            instruction.target + 1 if instruction.target >= 0 else -1,
            instruction.positions,
        )
        for instruction in info.instructions
    ]
    bytecode, lines, exceptions = assemble(items, code.co_firstlineno)
    moved = types.FunctionType(code.replace(co_code=bytecode, co_linetable=lines, co_exceptiontable=exceptions), {})
    assert moved(1, 3) == scope["f"](1, 3)


def test_a_jump_the_wrong_way_is_refused():
    with pytest.raises(ValueError, match="wrong way"):
        assemble([Item("NOP"), Item("JUMP_FORWARD", target=0)], 1)


def test_exception_table_numbers_of_any_size():
    for value in (0, 1, 63, 64, 4095, 4096, 300_000):
        row = b"".join(_big_endian(number) for number in (value, 1, value, value << 1 | 1))
        row = bytes((row[0] | 128, *row[1:]))
        assert parse_exception_table(row) == [(value, value + 1, value, value, True)]


def test_lines_go_back_and_may_be_missing():
    items = [
        Item("NOP", positions=(50, 50, 3, 9)),
        Item("NOP", positions=(None, None, None, None)),
        Item("NOP", positions=(7, 7, None, None)),
        Item("NOP", positions=(7, 9, 400, 2)),
    ]
    code = compile("pass", "x", "exec").replace(
        co_code=bytes((9, 0)) * 4, co_linetable=_line_table(items, [1] * 4, 10), co_firstlineno=10
    )
    assert list(code.co_positions()) == [item.positions for item in items]


def test_decoded_is_made_once_and_dropped_with_the_code():
    from fusewright.capture.bytecode import instructions as bytecode

    code = compile("def f(): return 1", "x", "exec").co_consts[0]
    assert decoded(code) is decoded(code)
    key = id(code)
    assert key in bytecode._decoded
    del code
    assert key not in bytecode._decoded


def test_constant_body_keeps_the_signature():
    def f(a, /, b=2, *args, c, **kwargs):
        yield a

    stand_in = types.FunctionType(constant_body(f.__code__), {}, "f", f.__defaults__)
    assert inspect.signature(stand_in).parameters.keys() == inspect.signature(f).parameters.keys()
    assert stand_in(1, c=3) is None
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'c'"):
        stand_in(1)
