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
_SHARED = re.compile(r"  call void @(fw\.[\w.]+)\((.*)\)")
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
    """Memory that addresses are computed from, all of it operands of LLVM. size: bytes; code: what the status says of
    an access outside, but for the element and whether it was a store."""

    base: str
    size: str
    code: str


_ANYTHING = _Root("null", str(2**63 - 1), "0")
"""An argument of which nothing is known: none is outside."""


def with_checks(body: str, kernel: Kernel, told: bool, declarations: dict[str, str]) -> str:
    """The function of `kernel` with checks. It takes the elements of each buffer as sizes after its own.
    `declarations` gets what it calls; `told`: as in Checks."""
    element_sizes = [dtype.itemsize for dtype in kernel.dtypes]
    lines = body.split("\n")
    flags = 4 if told else 0
    checks = _Checks(dict(_roots(lines, flags)), flags, declarations)
    out: list[str] = []
    for line in checks.lines(lines):
        if line == "entry:":
            out += [line, *_prologue(len(kernel.sizes), element_sizes)]
        elif line == "  ret void":
            out += [*_EPILOGUE, line]
        else:
            out.append(line)
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


def _roots(lines: Sequence[str], flags: int) -> Iterator[tuple[str, _Root]]:
    """By name: pointers to buffers, and to memory that the function has on the stack or allocates."""
    slots = {"%buffers": 0}
    for line in lines:
        defined = _DEFINED.match(line)
        if defined is None:
            continue
        name, rhs = defined.groups()
        if slot := _BUFFER.match(rhs):
            slots[name] = int(slot[1])
        elif (loaded := _BUFFER_LOAD.match(rhs)) and loaded[1] in slots:
            yield name, _Root(name, f"%checked.bytes{slots[loaded[1]]}", str((slots[loaded[1]] + 1 << 3) + flags))
        elif own := _OWN.match(rhs):
            count, of, one = own.groups()
            size = int(count) * _bytes(of) if count else _bytes(one)
            yield name, _Root(name, str(size), str((OWN_MEMORY + 1 << 3) + flags))
        elif allocated := _MALLOC.match(rhs):
            yield name, _Root(name, allocated[1], str((OWN_MEMORY + 1 << 3) + flags))


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
    """Writes the checks of one function."""

    def __init__(self, roots: dict[str, _Root], flags: int, declarations: dict[str, str]) -> None:
        self.roots = roots
        self.flags = flags
        self.declarations = declarations
        self.count = 0

    def lines(self, lines: Sequence[str]) -> Iterator[str]:
        _follow(lines, self.roots)
        for line in lines:
            call = _SHARED.fullmatch(line)
            yield from [self._call(*call.groups())] if call is not None else self._access(line)

    def _call(self, name: str, arguments: str) -> str:
        """A call of a function that kernels share: it is told where the memory behind each pointer ends."""
        more = []
        for argument in arguments.split(", "):
            kind, operand = argument.split(" ", 1)
            if kind == "ptr":
                root = self.roots.get(operand, _ANYTHING)
                more += [f"ptr {root.base}", f"i64 {root.size}", f"i64 {root.code}"]
        checked = _shared(name, self.flags, self.declarations)
        own = ["ptr %checked.outside", "ptr %checked.nowhere"]
        return f"  call void @{checked}({', '.join([arguments, *more, *own])})"

    def _access(self, line: str) -> list[str]:
        """`line`, and before it, if it is an access, its check."""
        masked = _MASKED.search(line)
        access = masked or _PLAIN.search(line)
        if access is None or access["address"] not in self.roots:
            return [line]
        address, root = access["address"], self.roots[access["address"]]
        self.count += 1
        name = f"%checked.{self.count}"
        moved = access["value"] or (line.split(" call ", 1)[1] if masked else access["type"])
        vector = _VECTOR.match(moved)
        lanes, type_ = (int(vector[1]), vector[2]) if vector else (1, moved.split()[0])
        mask = f"<{lanes} x i1> splat (i1 true)" if masked is None else masked["mask"]
        many = masked is not None and masked["kind"] in ("gather", "scatter")
        lines = [] if many else [_lanes(name, address, lanes, type_)]
        lines += _outside(name, address if many else f"{name}.lanes", lanes, root, _bytes(type_), mask)
        lines += self._note(name, lanes, root, _bytes(type_), access["value"] is not None)
        if masked is None:
            lines.append(f"  {name}.place = select i1 {name}.any, ptr %checked.nowhere, ptr {address}")
            return [*lines, line.replace(f"ptr {address}, align", f"ptr {name}.place, align")]
        lines.append(f"  {name}.inside = xor <{lanes} x i1> {name}.bad, splat (i1 true)")
        lines.append(f"  {name}.mask = and {mask}, {name}.inside")
        return [*lines, line.replace(mask, f"<{lanes} x i1> {name}.mask")]

    def _note(self, name: str, lanes: int, root: _Root, size: int, stores: bool) -> list[str]:
        """Remembers the element of the first lane that lies outside, and what was done there."""
        bits = f"i{lanes}"
        count = f"llvm.cttz.{bits}"
        self.declarations.setdefault(count, f"declare {bits} @{count}({bits}, i1)")
        return [
            f"  {name}.bits = bitcast <{lanes} x i1> {name}.bad to {bits}",
            f"  {name}.any = icmp ne {bits} {name}.bits, 0",
            f"  {name}.which = call {bits} @{count}({bits} {name}.bits, i1 false)",
            f"  {name}.lane = and {bits} {name}.which, {lanes - 1}",
            f"  {name}.byte = extractelement <{lanes} x i64> {name}.offset, {bits} {name}.lane",
            f"  {name}.element = sdiv i64 {name}.byte, {size}",
            f"  {name}.high = shl i64 {name}.element, 16",
            f"  {name}.code = or i64 {name}.high, {root.code}",
            f"  {name}.does = or i64 {name}.code, {2 * stores}",
            f"  {name}.old = load i64, ptr %checked.outside, align 8",
            f"  {name}.new = select i1 {name}.any, i64 {name}.does, i64 {name}.old",
            f"  store i64 {name}.new, ptr %checked.outside, align 8",
        ]


def _shared(name: str, flags: int, declarations: dict[str, str]) -> str:
    """Adds the function of this name with checks to the module; gives its name."""
    checked = f"{name}.checked{flags}"
    if checked not in declarations:
        header, *lines = declarations[name].split("\n")
        before, parameters = header.removesuffix(") {").split("(", 1)
        roots, more = dict(_roots(lines, flags)), []
        for number, parameter in enumerate(parameters.split(", ")):
            kind, operand = parameter.split(" ", 1)
            if kind == "ptr":
                base, size, code = (f"%checked.{word}{number}" for word in ("base", "size", "code"))
                roots[operand] = _Root(base, size, code)
                more += [f"ptr {base}", f"i64 {size}", f"i64 {code}"]
        more += ["ptr %checked.outside", "ptr %checked.nowhere"]
        begin = f"{before.replace(name, checked)}({', '.join([parameters, *more])}) {{"
        declarations[checked] = ""  # it may call itself
        declarations[checked] = "\n".join([begin, *_Checks(roots, flags, declarations).lines(lines)])
    return checked


def _lanes(name: str, address: str, lanes: int, type_: str) -> str:
    """The address of each lane."""
    steps = ", ".join(f"i64 {lane}" for lane in range(lanes))
    return f"  {name}.lanes = getelementptr {type_}, ptr {address}, <{lanes} x i64> <{steps}>"


def _outside(name: str, places: str, lanes: int, root: _Root, size: int, mask: str) -> list[str]:
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
