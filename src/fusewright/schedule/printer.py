"""Plans and kernels as text: what runs, in which order, over which memory, and from which lines of the user's program.

Takes a `Plan` or a `Kernel`; gives text for people (goldens, debug folders, logs). Always holds: equal plans print
equally.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusewright.base.location import Location
from fusewright.loops.ir import (
    Apply,
    Axis,
    Buffer,
    BufferRef,
    CheckedIndex,
    Constant,
    Expression,
    IndexValue,
    Load,
    LocalValue,
    Masked,
    Store,
)
from fusewright.schedule.plan import (
    Attention,
    Define,
    Kernel,
    Operand,
    Plan,
    Product,
    Reduce,
    RunKernel,
    ScanStep,
    Stage,
    Statement,
)
from fusewright.sizes.expressions import Dim

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=",
    "logical_and": "and", "logical_or": "or", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
}  # fmt: skip
SHORT_DTYPES = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8",
    "uint8": "u8", "bool": "bool",
}  # fmt: skip
ACCUMULATE = {"add": "+=", "max": "max=", "min": "min="}


def dtype_text(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return SHORT_DTYPES.get(name, name)


def expression_text(node: Expression, nested: bool = False) -> str:
    """A shared subexpression is printed where it is used, each time."""
    match node:
        case Constant():
            return repr(node.value)
        case IndexValue():
            return f"[{node.index}]"
        case LocalValue():
            return node.name
        case Load():
            return f"{node.buffer}[{node.index}]{_bindings_text(node.bindings)}"
        case Masked():
            return f"({expression_text(node.body)} if {expression_text(node.mask)} else {expression_text(node.other)})"
        case CheckedIndex():
            return f"check({expression_text(node.value)}, {node.extent}{', wrap' if node.wrap else ''})"
        case Apply(op="cast"):
            return f"{dtype_text(node.dtype)}({expression_text(node.args[0])})"
        case Apply():
            if node.op in INFIX:
                text = f" {INFIX[node.op]} ".join(expression_text(arg, True) for arg in node.args)
                return f"({text})" if nested else text
            return f"{node.op}({', '.join(expression_text(arg) for arg in node.args)})"
    raise TypeError(f"not a loop expression: {node!r}")


def _bindings_text(bindings: tuple[Any, ...]) -> str:
    if not bindings:
        return ""
    return "{" + ", ".join(f"{sym} = {expression_text(value)}" for sym, value in bindings) + "}"


def statement_text(statement: Statement) -> str:
    match statement:
        case Define():
            return f"{statement.local} = {expression_text(statement.value)}"
        case Store():
            operator = ACCUMULATE.get(statement.mode, "=")
            place = f"{statement.buffer}[{statement.index}]{_bindings_text(statement.bindings)}"
            return f"{place} {operator} {expression_text(statement.value)}"
        case Reduce():
            return f"{statement.local} = {statement.kind} of {expression_text(statement.value)}"
        case ScanStep():
            position = f", {statement.position}" if statement.position else ""
            return f"{statement.local}{position} = running {statement.kind} of {expression_text(statement.value)}"
    raise TypeError(f"not a statement: {statement!r}")


def _loop_text(axes: tuple[Axis, ...]) -> str:
    return ", ".join(f"{axis.symbol} < {axis.extent}" for axis in axes)


def stage_lines(stage: Stage, indent: str) -> list[str]:
    lines = []
    if stage.axes:
        lines.append(f"{indent}for {_loop_text(stage.axes)}:")
        indent += "  "
    lines.extend(f"{indent}{statement_text(statement)}" for statement in stage.statements)
    return lines


def kernel_text(kernel: Kernel, buffers: Mapping[str, Buffer] | None = None, locations: bool = True) -> str:
    """One kernel. With `buffers`, their shapes are printed too; with `locations`, the user's lines."""
    parameters = []
    for name, dtype in zip(kernel.buffers, kernel.dtypes):
        shape = ""
        if buffers is not None:
            shape = "[" + "x".join(str(size) for size in buffers[name].shape) + "]"
        parameters.append(f"{'*' if name in kernel.written else ''}{name}: {dtype_text(dtype)}{shape}")
    parameters.extend(str(size) for size in kernel.sizes)
    lines = [f"kernel {kernel.name}({', '.join(parameters)})"]
    if locations:
        lines.extend(f"  # {text}" for text in location_lines(kernel.locations))
    lines.extend(f"  {read} and {written} share memory" for read, written in kernel.inplace)
    indent = "  "
    if kernel.outer:
        lines.append(f"  parallel {_loop_text(kernel.outer)}:")
        indent = "    "
    lines.extend(
        f"{indent}scratch {scratch.name}: {dtype_text(scratch.dtype)}[{scratch.size}]" for scratch in kernel.scratch
    )
    if kernel.product is not None:
        lines += [f"{indent}{name} is {', '.join(buffers)} by o0" for name, buffers in kernel.product.chosen]
        lines.extend(indent + line for line in product_lines(kernel.product))
    if kernel.attention is not None:
        lines.append(indent + attention_text(kernel.attention))
    for stage in kernel.stages:
        lines.extend(stage_lines(stage, indent))
    return "\n".join(lines)


def attention_text(attention: Attention) -> str:
    texts = [
        f"{rows.buffer}[{rows.outer}]" + (f" by {rows.step}" if rows.step != 0 else "")
        for rows in attention.operands[:-1]
    ]
    texts += [f"{attention.columns} columns of {attention.features}", f"scale {attention.scale:g}"]
    texts += ["causal"] if attention.causal else []
    texts += ["many rows"] if attention.many else []
    return f"{attention.result.buffer}[{attention.result.outer}] = attention({', '.join(texts)})"


def product_lines(product: Product) -> list[str]:
    softmax, chain = product.softmax, product.chain
    if softmax is not None:
        rows = [f"{softmax.most} = max of {expression_text(softmax.score)}", f"{softmax.total} = sum of exponentials"]
        places, before = softmax.places, [product_text(softmax.scores), *rows]
    elif chain is not None:
        places, before = chain.places, [product_text(part) for part in chain.parts]
    else:
        return [product_text(one) for one in (product, *product.besides)]
    within = f"for {product.k} in {places.least} .. {places.end} of rows {places.first} .. {places.last}"
    seen = "" if places.seen is None else f" where {expression_text(places.seen)}"
    return [f"{within}{seen}:", *(f"  {line}" for line in (*before, product_text(product)))]


def product_text(product: Product) -> str:
    def operand(o: Operand) -> str:
        if o.value is not None:
            return f"({expression_text(o.value)})"
        inside = "".join(f" where 0 <= {outer + inner} < {extent}" for outer, inner, extent in o.checks)
        return f"{o.buffer}[{o.outer + o.inner}]{inside}"

    factors = f"{operand(product.left)} * {operand(product.right)}"
    return f"{product.local} = sum over {product.k} < {product.length} of {factors}"


def location_lines(locations: tuple[Location, ...]) -> list[str]:
    """`model.py:12, 14 in forward`: one line for each function."""
    by_function: dict[tuple[str, str], list[int]] = {}
    for location in locations:
        found = by_function.setdefault((location.file, location.function), [])
        if location.line not in found:
            found.append(location.line)
    return [f"{file}:{', '.join(map(str, lines))} in {function}" for (file, function), lines in by_function.items()]


def _argument_text(argument: Any) -> str:
    if isinstance(argument, BufferRef):
        shape = "x".join(str(size) for size in argument.shape)
        return f"{argument.buffer}[{shape}]"
    if isinstance(argument, (tuple, list)):
        return "(" + ", ".join(_argument_text(item) for item in argument) + ")"
    return str(argument)


def plan_text(plan: Plan, locations: bool = True) -> str:
    """The whole plan: steps in order, kernels at their first use, memory."""
    lines = [
        f"plan: {len(plan.kernels)} kernels, {len(plan.steps) - len(plan.kernels)} library calls, arena of "
        f"{_bytes(plan.arena_size)}"
    ]
    for number, step in enumerate(plan.steps):
        lines.append("")
        if isinstance(step, RunKernel):
            kernel = plan.kernels[step.kernel]
            text = kernel_text(kernel, plan.buffers, locations)
            fresh = [name for name in kernel.buffers if name in kernel.written]
        else:
            extern = step.extern
            arguments = [_argument_text(arg) for arg in extern.args] + [
                f"{name}={_argument_text(arg)}" for name, arg in extern.kwargs
            ]
            results = ", ".join(name or "_" for name in extern.outputs)
            text = f"{results + ' = ' if results else ''}{extern.target}({', '.join(arguments)})  # {extern.placement}"
            if extern.mutates:
                text += f", writes {', '.join(extern.mutates)}"
            fresh = [name for name in extern.outputs if name is not None]
        places = [f"{name} at {plan.placements[name].offset}" for name in fresh if name in plan.placements]
        freed = [name for name, last in plan.last_use.items() if last == number]
        beside = " (at the same time as the step before)" if isinstance(step, RunKernel) and step.horizontal else ""
        only = "" if step.when is None else f" (if {step.when})"
        lines.append(f"{number}{beside}{only}: {text}")
        if places:
            lines.append(f"  # arena: {', '.join(places)}")
        if freed:
            lines.append(f"  # last use of {', '.join(freed)}")
    outputs = [
        output.buffer or (output.ref.buffer + "[view]" if output.ref else str(output.value)) for output in plan.outputs
    ]
    lines += ["", f"return {', '.join(outputs)}"]
    return "\n".join(lines)


def _bytes(size: Dim) -> str:
    return f"{size} bytes"
