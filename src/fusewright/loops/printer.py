"""Text of loop programs and expressions, for reading: explain, debug dumps, golden tests.

Takes IR objects; gives text. Always holds: equal programs print alike; a value that is used several times is named once
(`t0 = ...`), so the text is as large as the expression's graph, not as its tree.

    for i0 < 512, i1 < 768:
        buf3[i0*768 + i1] = max(in0[i0*768 + i1] + in1[i1], 0.0)    # model.py:12 in forward

`print_program(program, complete=True)` also says what a reader can do without (names of operations, ranges of symbols,
what the graph's inputs are): loops/parser.py makes the same program of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fusewright.base.location import Location
from fusewright.loops.ir import (
    Apply,
    Axis,
    Buffer,
    BufferRef,
    CheckedIndex,
    Constant,
    Expression,
    Extern,
    IndexValue,
    Load,
    LocalValue,
    LoopProgram,
    Masked,
    Operation,
    Output,
    Pointwise,
    Reduction,
    Scan,
    Store,
)
from fusewright.sizes.expressions import Dim, Expr, Symbol, free_symbols

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "bool", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
}  # fmt: skip

INFIX: dict[str, tuple[str, int]] = {
    # operation: (symbol, binding strength)
    "logical_or": ("or", 1), "logical_xor": ("xor", 1), "logical_and": ("and", 2),
    "eq": ("==", 3), "ne": ("!=", 3), "lt": ("<", 3), "le": ("<=", 3), "gt": (">", 3), "ge": (">=", 3),
    "bitwise_or": ("|", 4), "bitwise_xor": ("^", 4), "bitwise_and": ("&", 5), "shift_left": ("<<", 6),
    "shift_right": (">>", 6),
    "add": ("+", 7), "sub": ("-", 7), "mul": ("*", 8), "div": ("/", 8), "floor_divide": ("//", 8),
    "remainder": ("%", 8),
    "pow": ("**", 10),
}  # fmt: skip
RENAMED = {"minimum": "min", "maximum": "max"}
ATOM = 11
MODES = {"write": "=", "add": "+=", "max": "max=", "min": "min="}
INDENT = "    "


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


# --- expressions -----------------------------------------------------------------------------------------------------


class ExpressionPrinter:
    """Prints expressions of one statement list; `lines` collects the named values in the order of their first use."""

    def __init__(self, roots: Iterable[Expression], names: dict[Expression, str] | None = None) -> None:
        self.lines: list[str] = []
        self.names = {} if names is None else names
        self.uses = Counter[Expression]()
        seen: set[Expression] = set()
        stack = list(roots)
        self.uses.update(stack)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            below = _children(node)
            self.uses.update(below)
            stack.extend(below)

    def text(self, e: Expression, strength: int = 0) -> str:
        """The expression, in parentheses if it binds less than `strength`."""
        if e in self.names:
            return self.names[e]
        body, own = self._body(e)
        if self.uses[e] > 1 and isinstance(e, (Apply, Masked)):
            name = self.names[e] = f"t{len(self.names)}"
            self.lines.append(f"{name} = {body}")
            return name
        return f"({body})" if own < strength else body

    def _body(self, e: Expression) -> tuple[str, int]:
        match e:
            case Constant():
                return _constant_text(e), ATOM if not str(e.value).startswith("-") else 9
            case IndexValue():
                return f"index({e.index})", ATOM
            case LocalValue():
                return e.name, ATOM
            case Load():
                return f"{e.buffer}[{e.index}]{self.bindings(e.bindings)}", ATOM
            case Masked():
                return f"{self.text(e.body, 1)} if {self.text(e.mask, 1)} else {self.text(e.other, 1)}", 0
            case CheckedIndex():
                return f"check({self.text(e.value, 4)} < {e.extent}{', wrap' if e.wrap else ''})", ATOM
            case Apply():
                return self._apply(e)
        raise TypeError(f"not an expression: {e!r}")

    def _apply(self, e: Apply) -> tuple[str, int]:
        if e.op == "cast":
            return f"{dtype_name(e.dtype)}({self.text(e.args[0])})", ATOM
        if e.dtype != implied_dtype(e.op, e.args) and e.op != "bitcast":
            return f"{e.op}.{dtype_name(e.dtype)}({', '.join(self.text(arg) for arg in e.args)})", ATOM
        if e.op == "neg":
            inner = self.text(e.args[0], 9)
            return f"-({inner})" if isinstance(e.args[0], Constant) or inner[0].isdigit() else f"-{inner}", 9
        if e.op == "logical_not":
            return f"not {self.text(e.args[0], 3)}", 3
        if e.op in INFIX:
            symbol, strength = INFIX[e.op]
            # Left-associative: an equally strong right operand keeps its parentheses. Comparisons never chain.
            left = self.text(e.args[0], strength + 1 if strength == 3 else strength)
            return f"{left} {symbol} {self.text(e.args[1], strength + 1)}", strength
        args = ", ".join(self.text(arg) for arg in e.args)
        suffix = f".{dtype_name(e.dtype)}" if e.op == "bitcast" else ""
        return f"{RENAMED.get(e.op, e.op)}{suffix}({args})", ATOM

    def bindings(self, bindings: Sequence[tuple[Dim, Expression]]) -> str:
        if not bindings:
            return ""
        return "{" + ", ".join(f"{symbol}: {self.text(value)}" for symbol, value in bindings) + "}"


def _children(e: Expression) -> tuple[Expression, ...]:
    match e:
        case Apply():
            return e.args
        case Load():
            return tuple(value for _, value in e.bindings)
        case Masked():
            return e.mask, e.body, e.other
        case CheckedIndex():
            return (e.value,)
    return ()


IMPLIED = {float: torch.float32, int: torch.int64, bool: torch.bool}
"""The dtype of a literal that names none."""
TESTS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan",
         "isinf", "isfinite", "signbit"}  # fmt: skip


def implied_dtype(op: str, args: Sequence[Expression]) -> torch.dtype:
    """The dtype of an operation's result where its text names none."""
    return torch.bool if op in TESTS else args[1 if op == "where" else 0].dtype


def _constant_text(e: Constant) -> str:
    text = repr(e.value)
    if isinstance(e.value, float) and e.dtype is torch.float32 and not e.value.is_integer():
        short = f"{e.value:.9g}"
        text = short if float(short) == e.value else text
    return text if e.dtype == IMPLIED[type(e.value)] else f"{text}:{dtype_name(e.dtype)}"


def print_expression(e: Expression) -> str:
    """One expression on one line, with the names of shared values in front: `t0 = exp(x[i0]); t0 / (t0 + 1.0)`."""
    printer = ExpressionPrinter([e])
    result = printer.text(e)
    return "; ".join([*printer.lines, result]) if result not in printer.names.values() else "; ".join(printer.lines)


# --- operations ------------------------------------------------------------------------------------------------------


def print_axes(axes: Sequence[Axis]) -> str:
    return ", ".join(f"{axis.symbol} < {axis.extent}" for axis in axes)


def print_location(locations: Sequence[Location]) -> str:
    """The innermost lines of the user's program that the operation comes from."""
    shown = [f"{location.file.rsplit('/', 1)[-1]}:{location.line}" for location in locations]
    return f"    # {', '.join(dict.fromkeys(shown))}" if shown else ""


def print_store(store: Store, printer: ExpressionPrinter) -> str:
    value = printer.text(store.value)
    return f"{store.buffer}[{store.index}]{printer.bindings(store.bindings)} {MODES[store.mode]} {value}"


def _pointwise(operation: Pointwise) -> list[str]:
    roots = [value for s in operation.stores for value in (s.value, *(bound for _, bound in s.bindings))]
    printer = ExpressionPrinter(roots)
    body: list[str] = []
    for store in operation.stores:
        line = print_store(store, printer)
        body += [*printer.lines, line]
        printer.lines.clear()
    return _nest(operation.axes, body, operation)


def _nest(axes: Sequence[Axis], body: list[str], operation: Any) -> list[str]:
    body[-1] += print_location(operation.locations)
    if not axes:
        return body
    return [f"for {print_axes(axes)}:", *(INDENT + line for line in body)]


def _reduction(operation: Reduction) -> list[str]:
    printer = ExpressionPrinter([operation.value])
    value = printer.text(operation.value)
    inner = [*(INDENT + line for line in printer.lines), f"{INDENT}acc = {operation.kind}(acc, {value})"]
    body = [f"for {print_axes(operation.reduced)}:", *inner]
    body.append(f"{operation.buffer}[{operation.index}] = {print_expression(operation.finish)}")
    return _nest(operation.axes, body, operation)


def _scan(operation: Scan) -> list[str]:
    printer = ExpressionPrinter([operation.value])
    value = printer.text(operation.value)
    body = [*printer.lines, f"acc = {operation.kind}(acc, {value})"]
    body.append(f"{operation.buffer}[{operation.index}] = {print_expression(operation.finish)}")
    if operation.position_buffer is not None:
        body.append(f"{operation.position_buffer}[{operation.index}] = position(acc)")
    body = [f"scan {print_axes([operation.scanned])}:", *(INDENT + line for line in body)]
    return _nest(operation.axes, body, operation)


def _extern(operation: Extern) -> list[str]:
    args = [print_argument(arg) for arg in operation.args] + [
        f"{name}={print_argument(arg)}" for name, arg in operation.kwargs
    ]
    outputs = ", ".join(name or "_" for name in operation.outputs)
    notes = [
        note
        for note, holds in ((operation.placement, operation.placement == "out"), ("ordered", operation.ordered))
        if holds
    ]
    notes += [f"writes {name}" for name in operation.mutates]
    notes += [f"keeps {print_argument(one)}" for one in operation.keeps]
    if operation.skinny is not None:
        given = ", ".join(print_argument(arg) for arg in operation.skinny.args)
        notes.append(f"up to {operation.skinny.most} rows: {operation.skinny.target}({given})")
    tail = f"    [{', '.join(notes)}]" if notes else ""
    return [f"{outputs} = {operation.target}({', '.join(args)}){tail}{print_location(operation.locations)}"]


_PRINTERS: dict[type, Any] = {Pointwise: _pointwise, Reduction: _reduction, Scan: _scan, Extern: _extern}


def print_argument(arg: Any) -> str:
    if isinstance(arg, BufferRef):
        return print_ref(arg)
    if isinstance(arg, tuple):
        return "[" + ", ".join(print_argument(item) for item in arg) + "]"
    return repr(arg) if isinstance(arg, str) else str(arg)


def _by(dims: Sequence[Dim]) -> str:
    """2x(s0 + 1)x3: in parentheses what is not a number, so that one sees where it ends."""
    return "x".join(str(dim) if isinstance(dim, int) else f"({dim})" for dim in dims)


def print_ref(ref: BufferRef) -> str:
    """buffer(2x3 by 3x1 + 5): shape, strides, offset."""
    shape = _by(ref.shape) or "scalar"
    by = f" by {_by(ref.stride)}" if ref.shape else ""
    offset = "" if isinstance(ref.offset, int) and ref.offset == 0 else f" + {ref.offset}"
    return f"{ref.buffer}({shape}{by}{offset})"


# --- programs --------------------------------------------------------------------------------------------------------


def print_buffer(buffer: Buffer) -> str:
    shape = _by(buffer.shape) or "scalar"
    by = f" by {_by(buffer.stride)}" if buffer.shape else ""
    return f"{buffer.role} {buffer.name}: {dtype_name(buffer.dtype)}[{shape}{by}] {buffer.device}"


def print_output(output: Output) -> str:
    if output.kind == "view" and output.ref is not None:
        return "own " * output.own + print_ref(output.ref)
    return output.buffer if output.kind == "buffer" else str(output.value)


def print_program(program: LoopProgram, complete: bool = False) -> str:
    """The whole program: sizes, buffers, operations, outputs. `complete`: all of it but locations in the user's files
    and the values of constants."""
    lines: list[str] = []
    known: set[Expr] = set()
    if complete:
        roots = [*program.size_symbols, *program.buffers.values(), *program.outputs]
        lines += [f"symbol {text}" for text in _ranges(roots, known)]
    lines += [
        f"size {symbol} = "
        + (str(dim) if position < 0 else f"input {position}" + (f".shape[{dim}]" if dim >= 0 else ""))
        for symbol, (position, dim) in program.size_symbols.items()
    ]
    lines += [print_buffer(buffer) + _buffer_rest(buffer, complete) for buffer in program.buffers.values()]
    if complete:
        lines.append("inputs " + ", ".join(name or "_" for name in program.inputs))
        lines += [f"maker {name} = {maker}" for name, maker in program.makers.items()]
    for operation in program.operations:
        lines += ["", *_heading(operation, known, complete), *_PRINTERS[type(operation)](operation)]
    outputs = (f"{output.kind} " * complete + print_output(output) for output in program.outputs)
    lines += ["", "return " + (", ".join(outputs) or "()")]
    return "\n".join(lines) + "\n"


def _buffer_rest(buffer: Buffer, complete: bool) -> str:
    counted = "" if buffer.counted == 1 else f" counted {buffer.counted}"
    return f" at {buffer.position} + {buffer.offset}{counted}" if complete else ""


def _heading(operation: Operation, known: set[Expr], complete: bool) -> list[str]:
    if not complete:
        return []
    ranges = ", ".join(_ranges([operation], set(known)))
    return [f"op {operation.name}: {ranges}".rstrip()]


def _ranges(roots: Iterable[object], known: set[Expr]) -> list[str]:
    """`name in lower..upper` of each symbol below `roots` that is not known yet, behind those its upper end needs."""
    texts: list[str] = []

    def visit(symbol: Expr) -> None:
        if symbol in known or not isinstance(symbol, Symbol):
            return
        known.add(symbol)
        if symbol.upper is not None:
            for below in sorted(free_symbols(symbol.upper), key=str):
                visit(below)
        texts.append(range_text(symbol))

    for symbol in sorted(symbols_below(roots), key=str):
        visit(symbol)
    return texts


def range_text(symbol: Symbol) -> str:
    ends = ("" if end is None else str(end) for end in (symbol.lower, symbol.upper))
    return f"{symbol} in {'..'.join(ends)}"


def symbols_below(roots: Iterable[object]) -> set[Expr]:
    """All symbols in sizes and indices below `roots`."""
    found: set[Expr] = set()
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Expr):
            found |= free_symbols(value)
        elif isinstance(value, (tuple, list, frozenset)):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend((*value, *value.values()))
        else:
            stack.extend(getattr(value, name) for name in getattr(type(value), "__match_args__", ()))
    return found
