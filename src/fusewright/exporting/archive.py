"""`save` and `load`: a program as a zip of readable parts. docs/export-format.md specifies them.

Takes an ExportedProgram and a path or a file; gives it back. Packages (package.py, packaged.py) are made of the same
parts. Always holds: nothing of a file is executed, imported or unpickled; its parts are stored as they are (not
compressed), so none is larger than the file; every part's checksum and every field is checked before it is used, and
what is wrong is a ProgramFileError that names the part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import mmap
import os
import stat
import struct
import zipfile
from collections.abc import Callable
from typing import Any

from fusewright import _native
from fusewright.base.errors import ExportError, ProgramFileError
from fusewright.base.pytorch import as_bytes, torch
from fusewright.exporting.program import FIELDS, RELATIONS, SIZE_OPERATORS, ExportedProgram, Signature
from fusewright.exporting.spec import from_container
from fusewright.exporting.subclasses import is_record
from fusewright.exporting.text import parse, program_text

VERSION = 1
WEIGHTS, GRAPH, SIGNATURE = "weights.safetensors", "graph.txt", "signature.json"
PARTS = (WEIGHTS, GRAPH, SIGNATURE)
_ALIGNMENT = 64
_LOCAL_HEADER = 30
_DEEPEST = 64

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NAMED_DTYPES = {str(value).removeprefix("torch."): value for value in DTYPES.values()} | {
    "complex128": torch.complex128
}


# --- writing ---------------------------------------------------------------------------------------------------------


def save(program: ExportedProgram, file: Any) -> None:
    """Writes `program` to a path, or to a file that is open for writing bytes."""
    tensors, records = stored(weights_of(program))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        write_weights(archive, tensors)
        for name, text in texts_of(program, records).items():
            archive.writestr(zipfile.ZipInfo(name), text)


def weights_of(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """The tensors that a program holds, by the names that they have in a file."""
    return {**program.state, **{f"constant:{name}": value for name, value in program.constants.items()}}


def texts_of(program: ExportedProgram, weights: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Graph and signature. `weights`: where each lies."""
    signature = {"format": VERSION, **program.graph_signature.to_json(), "weights": weights}
    if '"unknown"' in json.dumps([signature["takes"], signature["gives"]]):
        raise ExportError(
            "the program takes or gives a container that cannot be saved: register it with torch.utils._pytree, with a "
            "serialized_type_name"
        )
    return {GRAPH: program_text(program.graph), SIGNATURE: json.dumps(signature, indent=1)}


def write_weights(archive: zipfile.ZipFile, tensors: dict[str, torch.Tensor]) -> str:
    """Writes the first part of a file; gives its SHA-256."""
    with archive.open(zipfile.ZipInfo(WEIGHTS), "w", force_zip64=True) as part:
        hashed = _Hashed(part)
        _write_tensors(hashed, tensors, _LOCAL_HEADER + len(WEIGHTS) + 20)
    return hashed.digest.hexdigest()


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, data: Any) -> None:
        self.file.write(data)
        self.digest.update(data)


def stored(every: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Tensors to store, by name; and for each of `every` where it lies in which. Memory that several share is stored
    once."""
    shared: dict[Any, list[str]] = {}
    for name, value in every.items():
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise ExportError(f"{name} is a {type(value).__name__} of layout {value.layout}, which cannot be saved")
        shared.setdefault((value.device, value.untyped_storage().data_ptr() or id(value)), []).append(name)
    tensors: dict[str, torch.Tensor] = {}
    records: dict[str, dict[str, Any]] = {}
    for names in shared.values():
        base = every[names[0]].detach()
        alone = all(_same_view(every[name], base) for name in names) and base.is_contiguous()
        if alone and base.dtype in _DTYPE_NAMES:
            tensors[names[0]] = base
        else:
            tensors[names[0]] = torch.empty(0, dtype=torch.uint8, device=base.device).set_(base.untyped_storage())
        for name in names:
            value = every[name]
            records[name] = {
                "stored": names[0],
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "stride": list(value.stride()),
                "offset": 0 if alone else value.storage_offset(),
                "parameter": isinstance(value, torch.nn.Parameter),
                "requires_grad": value.requires_grad,
                "device": str(value.device),
            }
    return tensors, records


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape, one.stride(), one.storage_offset()) == (
        other.dtype,
        other.shape,
        other.stride(),
        other.storage_offset(),
    )


def _write_tensors(part: Any, tensors: dict[str, torch.Tensor], before: int) -> None:
    """The safetensors format: the header is padded so that the data, `before` bytes into the file, is aligned."""
    header: dict[str, Any] = {}
    at = 0
    for name, value in tensors.items():
        end = at + value.numel() * value.element_size()
        header[name] = {"dtype": _DTYPE_NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [at, end]}
        at = end + -end % _ALIGNMENT
        if at != end:  # the format allows no gaps
            header[f"padding:{name}"] = {"dtype": "U8", "shape": [at - end], "data_offsets": [end, at]}
    text = json.dumps(header).encode()
    text += b" " * (-(before + 8 + len(text)) % _ALIGNMENT)
    part.write(struct.pack("<Q", len(text)) + text)
    for value in tensors.values():
        data = as_bytes(value.cpu()).numpy()
        part.write(data.data)
        part.write(bytes(-data.nbytes % _ALIGNMENT))


# --- reading ---------------------------------------------------------------------------------------------------------


def load(file: Any) -> ExportedProgram:
    """The program that `save` wrote: from a path (its weights are mapped into memory, not read), an open file or bytes.

    Raises ProgramFileError, naming the part, for what is damaged or no such file. Nothing of the file is executed.
    """
    parts = read_parts(file, PARTS.__contains__)
    for name in PARTS:
        require(name in parts, f"{name}: is missing")
    return read_program(parts, read_weights(parts), {})


_DAMAGE = (
    zipfile.BadZipFile, struct.error, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError,
    NotImplementedError, RuntimeError, RecursionError, OverflowError, UnicodeError, MemoryError, OSError,
)  # fmt: skip


def read_parts(file: Any, known: Callable[[str], bool]) -> dict[str, memoryview]:
    """The parts of a path (mapped into memory, not read), an open file or bytes. `known`: whether a part may have a
    name."""
    if hasattr(file, "read"):
        file = file.read()
    if isinstance(file, (bytes, bytearray, memoryview)):
        return guarded("the zip directory", lambda: _parts(io.BytesIO(file), bytearray(file), known))
    with open(os.fspath(file), "rb") as opened:
        if os.fstat(opened.fileno()).st_size == 0:
            raise ProgramFileError("the file is empty")
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return guarded("the zip directory", lambda: _parts(opened, data, known))


def read_weights(parts: dict[str, memoryview]) -> dict[str, torch.Tensor]:
    """The tensors that a file stores."""
    return guarded(WEIGHTS, lambda: _tensors(parts[WEIGHTS]))


def read_program(
    parts: dict[str, memoryview], tensors: dict[str, torch.Tensor], made: dict[str, Any], lazily: bool = False
) -> ExportedProgram:
    """The program of a graph and a signature over stored tensors. `made`: the weights that exist already, by their
    records, which this adds to: programs of one file share theirs. lazily: the graph is read when it is first asked
    for, and checked then."""
    header = guarded(SIGNATURE, lambda: read_json(bytes(parts[SIGNATURE])))
    if header.get("format") != VERSION:
        raise ProgramFileError(f"{SIGNATURE}: format {header.get('format')!r:.40}; this version reads {VERSION}")
    state, constants = guarded(SIGNATURE, lambda: _weights(header["weights"], tensors, made))
    header.setdefault("subclasses", {})  # files of earlier versions have none
    signature = Signature(**{name: header.get(name) for name in FIELDS})
    specs = guarded(SIGNATURE, lambda: (from_container(signature.takes), from_container(signature.gives)))

    def graph() -> torch.fx.Graph:
        found: torch.fx.Graph = guarded(GRAPH, lambda: parse(bytes(parts[GRAPH]).decode()))
        guarded(SIGNATURE, lambda: _check_graph(signature, found))
        return found

    program = ExportedProgram(graph, signature, state, constants, specs)
    guarded(SIGNATURE, lambda: _check(program))
    if not lazily:
        guarded(SIGNATURE, program.module)  # reads the graph; the names of the weights are names of a module's
    return program


def guarded(part: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ProgramFileError:
        raise
    except _DAMAGE as error:
        raise ProgramFileError(f"{part}: {type(error).__name__}: {error!s:.200}") from error


def require(holds: Any, text: str) -> None:
    if not holds:
        raise ProgramFileError(text)


def _parts(opened: Any, data: Any, known: Callable[[str], bool]) -> dict[str, memoryview]:
    """The bytes of each part. Sizes and places are checked against the file before anything is read."""
    found: dict[str, memoryview] = {}
    whole = memoryview(data)
    with zipfile.ZipFile(opened) as archive:
        for entry in archive.infolist():
            name = entry.filename
            require(known(name) and entry.orig_filename == name, f"unknown part {name!r:.80}")
            require(name not in found, f"{name}: there are two parts of this name")
            require(not stat.S_ISLNK(entry.external_attr >> 16), f"{name}: is a symbolic link")
            require(entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1, f"{name}: is compressed")
            require(entry.file_size == entry.compress_size, f"{name}: its sizes differ")
            start = entry.header_offset
            require(0 <= start <= len(whole) - _LOCAL_HEADER, f"{name}: lies outside of the file")
            require(whole[start : start + 4] == b"PK\3\4", f"{name}: has no header")
            long, extra = struct.unpack_from("<HH", whole, start + 26)
            own = bytes(whole[start + _LOCAL_HEADER : start + _LOCAL_HEADER + long])
            require(own == name.encode(), f"{name}: has another name in its header")
            start += _LOCAL_HEADER + long + extra
            require(start + entry.file_size <= len(whole), f"{name}: ends behind the end of the file")
            found[name] = whole[start : start + entry.file_size]
            require(_native.crc32(found[name]) == entry.CRC, f"{name}: its checksum differs: the file is damaged")
    return found


def read_json(data: bytes) -> dict[str, Any]:
    """JSON of objects whose names differ."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        require(len(made) == len(pairs), "a name stands twice in an object")
        return made

    value = json.loads(data.decode(), object_pairs_hook=once)
    require(isinstance(value, dict), "is no object")
    return value


def _tensors(part: memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a part in the safetensors format, over its memory."""
    (size,) = struct.unpack_from("<Q", part)
    require(8 + size <= len(part), f"{WEIGHTS}: its header ends behind its end")
    header, data = read_json(bytes(part[8 : 8 + size])), part[8 + size :]
    found: dict[str, torch.Tensor] = {}
    at = 0
    for name, record in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (start, end) = DTYPES[record["dtype"]], _sizes(record["shape"]), record["data_offsets"]
        what = f"{WEIGHTS}: {name!r:.80}"
        require(
            type(start) is int and type(end) is int and start == at and at <= end <= len(data), f"{what} lies wrong"
        )
        require(math.prod(shape) * dtype.itemsize == end - start, f"{what}: its size is not that of its shape")
        at = end
        if end == start:
            found[name] = torch.empty(shape, dtype=dtype, device="cpu")
            continue
        flat = torch.frombuffer(data[start:end], dtype=torch.uint8)
        aligned = flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()
        found[name] = aligned.view(dtype).view(shape)
    return found


def _sizes(value: Any) -> list[int]:
    require(isinstance(value, list) and len(value) <= 64, "no list of sizes")
    require(all(type(size) is int and 0 <= size < 1 << 48 for size in value), "no list of sizes")
    return value


def _weights(
    records: Any, tensors: dict[str, torch.Tensor], made: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    state: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for name, record in records.items():
        base, dtype = tensors[record["stored"]], _NAMED_DTYPES[record["dtype"]]
        shape, stride, offset = _sizes(record["shape"]), _sizes(record["stride"]), record["offset"]
        require(len(shape) == len(stride) and type(offset) is int and offset >= 0, f"weight {name!r:.80}: no view")
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        empty = 0 in shape
        flat = base.reshape(-1).view(torch.uint8)
        require(empty or (last + 1) * dtype.itemsize <= flat.numel(), f"weight {name!r:.80}: ends behind its memory")
        key = json.dumps(record, sort_keys=True)
        if key not in made:
            if empty:
                value = torch.empty(shape, dtype=dtype, device="cpu")
            elif flat.numel() % dtype.itemsize:
                value = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
                value = value.as_strided(shape, stride, offset)
            else:
                value = flat.view(dtype).as_strided(shape, stride, offset)
            value = value.to(torch.device(record["device"]))
            if record["parameter"] is True:
                value = torch.nn.Parameter(value, requires_grad=record["requires_grad"] is True)
            elif record["requires_grad"] is True:
                value.requires_grad_()
            made[key] = value
        if name.startswith("constant:"):
            constants[name.removeprefix("constant:")] = made[key]
        else:
            state[name] = made[key]
    return state, constants


# --- whether the parts fit -------------------------------------------------------------------------------------------


def _check(program: ExportedProgram) -> None:
    """Raises ProgramFileError for a signature that does not fit the graph, the weights or itself."""
    signature = program.graph_signature
    for name, field in ((f.name, getattr(signature, f.name)) for f in dataclasses.fields(Signature)):
        wanted: type = dict if name in ("symbols", "buffers", "takes", "gives", "subclasses") else list
        require((field is None and name == "gives") or isinstance(field, wanted), f"{SIGNATURE}: {name} is damaged")
    require(all(map(is_record, signature.subclasses.values())), f"{SIGNATURE}: subclasses is damaged")
    takes = program.in_spec
    fits = takes.type is tuple and [child.type for child in takes.children()] == [tuple, dict]
    require(fits and takes.num_leaves == len(signature.leaves), f"{SIGNATURE}: takes does not fit the leaves")
    require(program.out_spec.num_leaves == len(signature.results), f"{SIGNATURE}: gives does not fit the results")
    for leaf in signature.leaves:
        _check_leaf(leaf, signature)
    for name, known in signature.symbols.items():
        leaf = signature.leaves[_place(known["leaf"], len(signature.leaves))]
        require(leaf["kind"] == "tensor", f"{SIGNATURE}: symbol {name!r:.40} is of no tensor")
        _place(known["dim"], len(leaf["shape"]))
        require(type(known["min"]) is int and (known["max"] is None or type(known["max"]) is int), "a range is damaged")
        require(type(known["label"]) is str and type(known["where"]) is str, f"{SIGNATURE}: a label is damaged")
    for fact in signature.constraints:
        require(fact["op"] in RELATIONS and type(fact["where"]) is str, f"{SIGNATURE}: a constraint is damaged")
        _check_size(fact["left"], signature)
        _check_size(fact["right"], signature)
    _check_records(program)


def _check_leaf(leaf: Any, signature: Signature) -> None:
    require(type(leaf["name"]) is str and leaf["kind"] in ("tensor", "value"), f"{SIGNATURE}: a leaf is damaged")
    if leaf["kind"] == "value":
        require(type(leaf["value"]) in (bool, int, float, str, type(None)), f"{SIGNATURE}: a value is damaged")
        return
    rank = len(leaf["shape"])
    require(isinstance(leaf["shape"], list) and rank <= 64, f"{SIGNATURE}: a shape is damaged")
    for size in leaf["shape"]:
        _check_size(size, signature)
    require(sorted(leaf["order"]) == list(range(rank)), f"{SIGNATURE}: an order of dimensions is damaged")
    texts = isinstance(leaf["where"], list) and len(leaf["where"]) == rank
    require(texts and type(leaf["dtype"]) is str and type(leaf["device"]) is str, f"{SIGNATURE}: a leaf is damaged")


def _check_size(size: Any, signature: Signature, depth: int = 0) -> None:
    require(depth < _DEEPEST, f"{SIGNATURE}: a size is nested too deeply")
    if isinstance(size, list):
        require(len(size) == 3 and size[0] in SIZE_OPERATORS, f"{SIGNATURE}: a size is damaged")
        _check_size(size[1], signature, depth + 1)
        _check_size(size[2], signature, depth + 1)
    else:
        require(
            type(size) is int or (type(size) is str and size in signature.symbols), f"{SIGNATURE}: a size is damaged"
        )


def _place(value: Any, count: int) -> int:
    require(type(value) is int and 0 <= value < count, f"{SIGNATURE}: {value!r:.40} is no place of {count}")
    return value


def _check_graph(signature: Signature, graph: torch.fx.Graph) -> None:
    placeholders = len(graph.find_nodes(op="placeholder"))
    require(placeholders == len(signature.inputs), f"{SIGNATURE}: inputs do not fit the graph's")
    first = [node.op for node in graph.nodes][:placeholders]
    require(set(first) <= {"placeholder"}, f"{GRAPH}: an input stands behind an operator")
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    require(isinstance(returned, tuple) and len(returned) == len(signature.outputs), f"{SIGNATURE}: outputs do not fit")


def _check_records(program: ExportedProgram) -> None:
    signature = program.graph_signature
    known = {"parameter": program.state, "buffer": program.state, "state": program.state, "constant": program.constants}
    tensors = [place for place, leaf in enumerate(signature.leaves) if leaf["kind"] == "tensor"]

    def target(record: Any, kinds: tuple[str, ...]) -> None:
        kind, value = record["kind"], record["target"]
        require(kind in kinds, f"{SIGNATURE}: unknown kind {kind!r:.40}")
        if kind in known:
            require(type(value) is str and value in known[kind], f"{SIGNATURE}: there is no {kind} {value!r:.80}")
        elif kind in ("user", "input_mutation", "leaf"):
            require(type(value) is int and value in tensors, f"{SIGNATURE}: {value!r:.40} is no tensor of a call")

    for record in signature.inputs:
        target(record, ("parameter", "buffer", "constant", "user"))
    results = 0
    for record in signature.outputs:
        if record["kind"] == "user":
            results += 1
        elif record["kind"] == "buffer_mutation":
            require(record["target"] in program.state, f"{SIGNATURE}: a buffer that is written to is missing")
        else:
            target(record, ("input_mutation",))
    for record in signature.results:
        target(record, ("output", "leaf", "state", "constant", "value"))
        if record["kind"] == "output":
            _place(record["target"], results)
        elif record["kind"] == "value":
            require(type(record["target"]) in (bool, int, float, str, type(None)), f"{SIGNATURE}: a value is damaged")
    for name, value in signature.buffers.items():
        require(name in program.state and type(value) is bool, f"{SIGNATURE}: buffer {name!r:.80} is missing")
