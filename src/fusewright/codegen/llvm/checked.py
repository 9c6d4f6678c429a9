"""Checks of a kernel's memory accesses, added to its LLVM IR.

Takes the text of a function (emitter.py) and the elements of its buffers; gives the text in which each load and store
asks whether it lies inside the memory that its address was computed from: a buffer, or memory of the kernel's own.
Always holds: an access outside touches a block of its own instead, and the kernel's status tells of one such access
(`Outside` says how), so that the call fails and nothing else is read or written. Addresses are followed through the
text: it works for every generator, and sees what that wrote, vectors and their masks included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fusewright.base.records import dataclass
from fusewright.codegen.llvm.emit.memory import ZEROS
from fusewright.schedule.plan import Kernel
from fusewright.sizes.expressions import Dim


@dataclass(frozen=True, slots=True)
class Checks:
    """rooms: elements of the memory of each of the kernel's buffers. told: an access outside is an error that reaches
    the user; else the call runs eagerly."""

    rooms: tuple[Dim, ...]
    told: bool


OWN_MEMORY = 0x1FFE
"""Stands for a buffer's number in the status: memory that the kernel has for itself."""

_SIZES = {"ptr": 8, "double": 8, "float": 4, "half": 2, "bfloat": 2}
_DEFINED = re.compile(r"\s*(%[\w.]+) = (.*)")
_NAMES = re.compile(r"%[\w.]+")
_BUFFER = re.compile(r"getelementptr ptr, ptr %buffers, i64 (\d+)")
_BUFFER_LOAD = re.compile(r"load ptr, ptr (%[\w.]+), align 8")
_OWN = re.compile(r"alloca (?:\[(\d+) x (.+)\]|(\w+)), align")
_MALLOC = re.compile(r"call ptr @malloc\(i64 ([%\w.]+)\)")
_ADDRESSES = re.compile(r"(?:getelementptr|freeze|select|phi|insertelement|shufflevector) .*ptr")
_VECTOR = re.compile(r"<(\d+) x (\w+)>")
_OPERAND = r"(?:%[\w.]+|<[^>]*>|\w+(?: \([^)]*\))?)"
_PLAIN = re.compile(
    r" (?:load (?!volatile)(?P<type>[^,]+)|store (?!volatile)(?P<value>.+)), ptr (?P<address>[%@][\w.]+), align"
)
_MASKED = re.compile(
    rf"@llvm\.masked\.(?P<kind>load|store|gather|scatter)[\w.]*\((?:(?P<value><[^>]+> {_OPERAND}), )??"
    rf"(?:ptr|<\d+ x ptr>) (?P<address>[%@][\w.]+), i32 \d+, (?P<mask><\d+ x i1> {_OPERAND})"
)


@dataclass(frozen=True, slots=True)
class _Root:
    """Memory that addresses are computed from. buffer: its number, or OWN_MEMORY; size: bytes, an i64 operand."""

    base: str
    buffer: int
    size: str


def with_checks(body: str, kernel: Kernel, told: bool, declarations: dict[str, str]) -> str:
    """The function of `kernel` with checks. It takes the elements of each buffer as sizes after its own.
    `declarations` gets what it calls; `told`: as in Checks."""
    lines = body.split("\n")
    element_sizes = [dtype.itemsize for dtype in kernel.dtypes]
    roots = dict(_roots(lines, element_sizes))
    _follow(lines, roots)
    checks = _Checks(roots, element_sizes, 4 if told else 0, declarations)
    out: list[str] = []
    for line in lines:
        if line == "entry:":
            out += [line, *_prologue(len(kernel.sizes), element_sizes)]
        elif line == "  ret void":
            out += [*_EPILOGUE, line]
        else:
            out += checks.of(line)
    return "\n".join(out)


def _prologue(first_room: int, element_sizes: Sequence[int]) -> Iterator[str]:
    yield "  %checked.outside = alloca i64, align 8"
    yield "  store i64 0, ptr %checked.outside, align 8"
    yield "  %checked.nowhere = alloca [1024 x i8], align 64"
    for number, size in enumerate(element_sizes):
        yield f"  %checked.slot{number} = getelementptr i64, ptr %sizes, i64 {first_room + number}"
        yield f"  %checked.room{number} = load i64, ptr %checked.slot{number}, align 8"
        yield f"  %checked.bytes{number} = mul i64 %checked.room{number}, {size}"


_EPILOGUE = [
    "  %checked.found = load i64, ptr %checked.outside, align 8",
    "  %checked.any = icmp ne i64 %checked.found, 0",
    "  %checked.before = load i64, ptr %status, align 8",
    "  %checked.now = select i1 %checked.any, i64 %checked.found, i64 %checked.before",
    "  store i64 %checked.now, ptr %status, align 8",
]


def _roots(lines: Sequence[str], element_sizes: Sequence[int]) -> Iterator[tuple[str, _Root]]:
    """By name: pointers to buffers, and to memory that the kernel has on the stack or allocates."""
    slots = {"%buffers": 0}
    for line in lines:
        defined = _DEFINED.match(line)
        if defined is None:
            continue
        name, rhs = defined.groups()
        if slot := _BUFFER.match(rhs):
            slots[name] = int(slot[1])
        elif (loaded := _BUFFER_LOAD.match(rhs)) and loaded[1] in slots:
            yield name, _Root(name, slots[loaded[1]], f"%checked.bytes{slots[loaded[1]]}")
        elif own := _OWN.match(rhs):
            count, of, one = own.groups()
            yield name, _Root(name, OWN_MEMORY, str(int(count) * _bytes(of) if count else _bytes(one)))
        elif allocated := _MALLOC.match(rhs):
            yield name, _Root(name, OWN_MEMORY, allocated[1])


def _follow(lines: Sequence[str], roots: dict[str, _Root]) -> None:
    """Adds what is computed from addresses that are known, until there is nothing more: a loop's start may be defined
    further down."""
    computed = [
        (defined[1], _NAMES.findall(defined[2]))
        for defined in map(_DEFINED.match, lines)
        if defined is not None and _ADDRESSES.match(defined[2])
    ]
    known = -1
    while known != len(roots):
        known = len(roots)
        for name, operands in computed:
            if name not in roots:
                found = next((roots[one] for one in operands if one in roots), None)
                if found is not None:
                    roots[name] = found


def _bytes(type_: str) -> int:
    vector = _VECTOR.fullmatch(type_)
    if vector is not None:
        return int(vector[1]) * _bytes(vector[2])
    return _SIZES[type_] if type_ in _SIZES else (int(type_.removeprefix("i")) + 7) // 8


class _Checks:
    """Writes the check of one access after another."""

    def __init__(
        self, roots: dict[str, _Root], element_sizes: Sequence[int], flags: int, declarations: dict[str, str]
    ) -> None:
        self.roots = roots
        self.element_sizes = element_sizes
        self.flags = flags
        self.declarations = declarations
        self.count = 0

    def of(self, line: str) -> list[str]:
        """`line`, and before it, if it is an access, its check."""
        masked = _MASKED.search(line)
        access = masked or _PLAIN.search(line)
        if access is None or access["address"] not in self.roots:
            return [line]
        address, root = access["address"], self.roots[access["address"]]
        self.count += 1
        name = f"%checked.{self.count}"
        stores = access["value"] is not None
        if masked is None:
            vector = _VECTOR.match(access["type"] or access["value"])
            lanes, type_ = (
                (int(vector[1]), vector[2]) if vector else (1, (access["type"] or access["value"]).split()[0])
            )
            mask = f"<{lanes} x i1> splat (i1 true)"
        else:
            vector = _VECTOR.match(access["value"] or line.split(" call ", 1)[1])
            assert vector is not None
            lanes, type_, mask = int(vector[1]), vector[2], access["mask"]
        many = masked is not None and masked["kind"] in ("gather", "scatter")
        code = (root.buffer + 1 << 3) + (2 if stores else 0) + self.flags
        lines = [] if many else self._lanes(name, address, lanes, type_)
        lines += self._outside(name, address if many else f"{name}.lanes", lanes, root, _bytes(type_), mask)
        lines += self._note(name, lanes, root, code)
        if masked is None:
            lines.append(f"  {name}.place = select i1 {name}.any, ptr %checked.nowhere, ptr {address}")
            return [*lines, line.replace(f"ptr {address}, align", f"ptr {name}.place, align")]
        lines.append(f"  {name}.inside = xor <{lanes} x i1> {name}.bad, splat (i1 true)")
        lines.append(f"  {name}.mask = and {mask}, {name}.inside")
        return [*lines, line.replace(mask, f"<{lanes} x i1> {name}.mask")]

    def _lanes(self, name: str, address: str, lanes: int, type_: str) -> list[str]:
        """The address of each lane."""
        steps = ", ".join(f"i64 {lane}" for lane in range(lanes))
        return [f"  {name}.lanes = getelementptr {type_}, ptr {address}, <{lanes} x i64> <{steps}>"]

    def _outside(self, name: str, places: str, lanes: int, root: _Root, size: int, mask: str) -> list[str]:
        """Which lanes count and lie outside. A false mask may have led a scalar access to the block of zeros."""
        numbers = f"<{lanes} x i64>"
        splat = (
            f"insertelement {numbers} poison, i64 {{}}, i64 0",
            f"shufflevector {numbers} {{}}, {numbers} poison, <{lanes} x i32> zeroinitializer",
        )
        return [
            f"  {name}.start = ptrtoint ptr {root.base} to i64",
            f"  {name}.zeros = ptrtoint ptr @{ZEROS} to i64",
            f"  {name}.last = sub i64 {root.size}, {size}",
            *(
                f"  {name}.{word}{step} = {splat[step].format(operand)}"
                for word in ("start", "zeros", "last")
                for step, operand in enumerate((f"{name}.{word}", f"{name}.{word}0"))
            ),
            f"  {name}.at = ptrtoint <{lanes} x ptr> {places} to {numbers}",
            f"  {name}.offset = sub {numbers} {name}.at, {name}.start1",
            f"  {name}.below = icmp slt {numbers} {name}.offset, zeroinitializer",
            f"  {name}.above = icmp sgt {numbers} {name}.offset, {name}.last1",
            f"  {name}.out = or <{lanes} x i1> {name}.below, {name}.above",
            f"  {name}.zero = sub {numbers} {name}.at, {name}.zeros1",
            f"  {name}.real = icmp uge {numbers} {name}.zero, splat (i64 1024)",
            f"  {name}.left = and <{lanes} x i1> {name}.out, {name}.real",
            f"  {name}.bad = and {mask}, {name}.left",
        ]

    def _note(self, name: str, lanes: int, root: _Root, code: int) -> list[str]:
        """Remembers the element of the first lane that lies outside, and what was done there."""
        size = 1 if root.buffer == OWN_MEMORY else self.element_sizes[root.buffer]
        shown = f"i{lanes}"
        count = f"llvm.cttz.{shown}"
        self.declarations.setdefault(count, f"declare {shown} @{count}({shown}, i1)")
        return [
            f"  {name}.bits = bitcast <{lanes} x i1> {name}.bad to {shown}",
            f"  {name}.any = icmp ne {shown} {name}.bits, 0",
            f"  {name}.which = call {shown} @{count}({shown} {name}.bits, i1 false)",
            f"  {name}.lane = and {shown} {name}.which, {lanes - 1}",
            f"  {name}.byte = extractelement <{lanes} x i64> {name}.offset, {shown} {name}.lane",
            f"  {name}.element = sdiv i64 {name}.byte, {size}",
            f"  {name}.high = shl i64 {name}.element, 16",
            f"  {name}.code = or i64 {name}.high, {code}",
            f"  {name}.old = load i64, ptr %checked.outside, align 8",
            f"  {name}.new = select i1 {name}.any, i64 {name}.code, i64 {name}.old",
            f"  store i64 {name}.new, ptr %checked.outside, align 8",
        ]
