"""What the parts of capture may ask of the border (World) and of the interpreter (Tracer), so that none of them imports
these two."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from fusewright.base.location import Location
from fusewright.base.records import dataclass
from fusewright.capture.assumptions import Assumptions
from fusewright.capture.border.absent import AbsentTraceback
from fusewright.capture.border.effects import DeferredCall, Effects, Shadow
from fusewright.capture.bytecode.instructions import CodeInfo
from fusewright.capture.guards import Guard
from fusewright.capture.guards.abstract_classes import AbstractChecks
from fusewright.capture.guards.sources import Constant, Source
from fusewright.capture.guards.types import GuardKind
from fusewright.capture.settings import CaptureOptions, History
from fusewright.record.recorder import Recorder


@dataclass(slots=True)
class Outside:
    """An outside object, where it came from, and what stands for it inside (itself, when it is handed out raw)."""

    real: Any
    source: Source
    value: Any


class Frame(Protocol):
    """An interpreted frame (interpret/interpreter.py). pc: the next instruction; namespace: of a class body, the only
    place of instructions that use it; value: what the frame gives when it is left; locals: NULL where a variable holds
    nothing; variables: what `locals()` has given, if it must give that again; begun: operators recorded before it."""

    function: types.FunctionType
    info: CodeInfo
    stack: list[Any]
    locals: list[Any]
    pc: int
    namespace: Any
    value: Any
    begun: int
    variables: dict[str, object] | None
    finished: bool

    @property
    def world(self) -> World: ...

    @property
    def tracer(self) -> Tracer: ...

    @property
    def back(self) -> Frame | None: ...

    def local(self, slot: int) -> Any: ...

    def stack_here(self) -> tuple[Location, ...]: ...


class World(Protocol):
    """The border between what a frame made and what was there before (border/world.py says what each of these does)."""

    tracer: Any
    effects: Effects
    input_sources: list[Source]
    inputs: list[tuple[torch.Tensor, Source, torch.Tensor]]
    module_sources: set[Source]
    wrappers: Any
    uses_arrays: bool
    settings_changed: bool
    may_infer: bool
    infers: bool
    inference_guards: list[Any]
    overridden: bool
    disablers: list[Any]
    repeats: Any
    arrays: list[tuple[Any, Source, torch.Tensor]]
    error_states: list[Any]
    recordings: list[Any]
    advanced: dict[int, Any]
    identities: dict[int, object]
    foreseen: Any
    iterators: dict[int, DeferredCall]
    generators: dict[int, tuple[Any, Any, Any]]
    cached: dict[int, dict[Any, Any]]
    deep_copies: dict[int, tuple[Any, dict[Any, Any]]]
    tensor_attributes: dict[int, dict[str, object]]
    owners: dict[int, tuple[object, str]]
    numbers: dict[Source, tuple[Any, Any]]
    gradient_nodes: dict[object, Any]
    number_tests: tuple[dict[Source, Any], dict[object, Any]]
    global_hooks_checked: bool
    requires_grad_matters: bool
    unread: dict[int, Shadow]
    touched: list[object]
    stored: dict[int, Any]
    store_count: int
    as_written: dict[int, tuple[int, bool]]
    intent: str
    abstract_checks: AbstractChecks
    looked_up: dict[tuple[type, str], Any]
    made: dict[int, Any]
    dict_kinds: dict[type, tuple[bool, bool]]
    _guards: dict[object, Guard]
    _by_real: dict[int, Outside]

    @property
    def recorder(self) -> Recorder: ...

    def ask_length(self, obj: Any) -> None: ...

    def binary(self, op: str, left: Any, right: Any, inplace: bool = False) -> Any: ...

    def bind(self, found: object, obj: object, kind: type, name: str) -> Any: ...

    def compare(self, op: str, left: Any, right: Any) -> Any: ...

    def constant(self, obj: object, hint: str) -> Constant: ...

    def contains(self, container: Any, item: Any) -> bool: ...

    def delattr(self, obj: Any, name: str) -> None: ...

    def delete_global(self, func: types.FunctionType, name: str) -> None: ...

    def delitem(self, obj: Any, key: Any) -> None: ...

    def dict_stand_in(self, real: Any, source: Source) -> Any: ...

    def format(self, value: Any, conversion: int, spec: str) -> str: ...

    def getattr(self, obj: Any, name: str) -> Any: ...

    def getitem(self, obj: Any, key: Any) -> Any: ...

    def globals_dict(self, func: types.FunctionType) -> Any: ...

    def guard(self, kind: GuardKind, source: Source, value: object) -> None: ...

    def guard_answer(
        self, function: Callable[..., object], args: tuple[object, ...], value: object, identical: bool = False
    ) -> None: ...

    def guard_bases(self, cls: type) -> None: ...

    def guard_identity(self, value: object) -> None: ...

    def guard_type_attribute(self, cls: type, name: str, found: object) -> None: ...

    def has_stand_ins(self) -> bool: ...

    def import_from(self, origin: types.ModuleType, name: str) -> Any: ...

    def import_name(self, namespace: Any, name: str, fromlist: Any, level: int) -> Any: ...

    def is_data_descriptor(self, found: object, reads: bool = False) -> bool: ...

    def is_inside_class(self, cls: type) -> bool: ...

    def is_outside_cell(self, cell: types.CellType) -> bool: ...

    def is_raw(self, value: object) -> bool: ...

    def iterate(self, obj: Any) -> Iterator[Any]: ...

    def known_stand_in(self, real: object) -> Any: ...

    def load(self, real: Any, source: Source) -> Any: ...

    def load_cell(self, cell: types.CellType) -> Any: ...

    def load_global(self, func: types.FunctionType, name: str) -> Any: ...

    def load_default(self, func: types.FunctionType, which: int | str | None) -> Any: ...

    def load_function(self, function: types.FunctionType) -> bool: ...

    def materialise(self, value: Any) -> Any: ...

    def next(self, iterator: Any) -> Any: ...

    def note_inside_class(self, cls: type) -> None: ...

    def note_inside_function(self, function: types.FunctionType) -> None: ...

    def number_stand_in(self, real: object, source: Source, value: object) -> None: ...

    def outside(self, value: object) -> Outside | None: ...

    def outside_objects(self) -> Iterable[Outside]: ...

    def real_of(self, value: object) -> Any: ...

    def record_of(self, real: object) -> Outside | None: ...

    def recorder_owns(self, value: object) -> bool: ...

    def replace_stand_in(self, real: Any, value: Any) -> None: ...

    def reserve_names(self, names: Iterable[str]) -> None: ...

    def root_cell_index(self, cell: types.CellType) -> int | None: ...

    def setattr(self, obj: Any, name: str, value: object) -> None: ...

    def setitem(self, obj: Any, key: Any, value: Any) -> None: ...

    def source_of(self, obj: object) -> Source | None: ...

    def stand_in(self, real: Any, source: Source, value: Any) -> Any: ...

    def store_global(self, func: types.FunctionType, name: str, value: object) -> None: ...

    def store_cell(self, cell: types.CellType, value: object) -> None: ...

    def torch_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def truth(self, obj: Any) -> bool: ...

    def type_of(self, obj: object) -> type: ...

    def unary(self, op: str, obj: Any) -> Any: ...

    def use(self, value: Any) -> Any: ...

    def written_dicts(self) -> list[Any]: ...

    def repeated_call(
        self, module: torch.nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def written_objects(self) -> set[int]: ...


class Handling(Protocol):
    """The exception that a frame or generator is handling."""

    error: BaseException | None


class Tracer(Protocol):
    """The interpreter of one capture attempt (interpret/interpreter.py)."""

    assumptions: Assumptions
    function: types.FunctionType
    history: History
    locals: tuple[object, ...]
    open_contexts: dict[int, BaseException]
    options: CaptureOptions
    recorder: Recorder
    branches: Any

    @property
    def world(self) -> World: ...

    @property
    def frame(self) -> Frame | None: ...

    @property
    def handling(self) -> Handling: ...

    def adopt_cell(self, cell: types.CellType) -> None: ...

    def ask_around(self) -> None: ...

    def call(self, function: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any: ...

    def called_natively(self, function: types.FunctionType, values: tuple[object, ...]) -> object: ...

    def clear_cell(self, cell: types.CellType) -> None: ...

    def copy_traceback(self, error: BaseException, part: BaseException) -> None: ...

    def execute(self, frame: Any, error: BaseException | None) -> object: ...

    def grown_tracebacks(self) -> list[Any]: ...

    def handled_exception(self) -> BaseException | None: ...

    def inline(
        self, function: types.FunctionType, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object: ...

    def is_handled(self, error: object) -> bool: ...

    def is_handling(self) -> bool: ...

    def is_inside_cell(self, cell: object) -> bool: ...

    def new_cell(self, value: object) -> types.CellType: ...

    def read_cell(self, cell: types.CellType) -> object: ...

    def set_context(self, error: BaseException, replace: bool = True) -> None: ...

    def set_traceback(self, error: BaseException, traceback: AbsentTraceback) -> None: ...

    def spend(self, instructions: int) -> None: ...

    def stack(self) -> tuple[Location, ...]: ...

    def suspended(self) -> int: ...

    def traceback_of(self, error: BaseException) -> AbsentTraceback | None: ...

    def write_cell(self, cell: types.CellType, value: object) -> None: ...
