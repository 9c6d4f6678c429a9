"""PyTorch's global state and tensor layout: what native guards read, captured in Python and verified once at import.

Takes nothing; gives `capture_global_state() -> GlobalState`, its native form, dtype codes and key sets for tensor
guards; and tells csrc/modes.cpp in which states compiled code may run at all.
Always holds: native reading is switched on only after it has agreed with Python's accessors on known tensors and on the
present state; otherwise (another PyTorch version, say) guards call the Python fallbacks, which are slower and equally
exact.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import types
from collections.abc import Iterable

from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.utils._device import DeviceContext

from fusewright import _native
from fusewright._native import isinstance
from fusewright.base.libraries import library_path
from fusewright.base.pytorch import torch
from fusewright.capture.guards.types import GlobalState

AUTOCAST_DEVICES = ("cpu", "cuda")
# Devices whose tensors keep their sizes in the TensorImpl; for others a tensor guard asks Python.
NATIVE_DEVICES = frozenset({"cpu", "cuda", "meta"})
_MATMUL_PRECISIONS = ("highest", "high", "medium")
_C10, _TORCH_CPU = str(library_path("c10")), str(library_path("torch_cpu"))
_DTYPE_NAMES = (
    "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16 uint16 uint32 "
    "uint64 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu float4_e2m1fn_x2"
).split()


def _dtype_codes() -> dict[torch.dtype, int]:
    """c10::ScalarType of each dtype, as libtorch's C interface gives it."""
    try:
        library = ctypes.CDLL(_TORCH_CPU)
    except OSError:
        return {}
    codes = {}
    for name in _DTYPE_NAMES:
        dtype, function = getattr(torch, name, None), getattr(library, f"aoti_torch_dtype_{name}", None)
        if dtype is not None and function is not None:
            codes[dtype] = int(function())
    return codes


DTYPE_CODES = _dtype_codes()


def _function_modes() -> list[object]:
    return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]


def _keys() -> tuple[int, int]:
    return torch._C._dispatch_tls_local_include_set().raw_repr(), torch._C._dispatch_tls_local_exclude_set().raw_repr()


def _names_key() -> int:
    """The dispatch key of named tensors, which guards refuse anyway: PyTorch's engine switches it off around a node's
    backward (up to 2.12), where a checkpoint computes again what its forward computed by compiled code."""
    key = torch._C._parse_dispatch_key("Named")
    return 0 if key is None else int(torch._C.DispatchKeySet.from_raw_repr(0).add(key).raw_repr())


class _Modes:
    """The states in which compiled code may run, as PyTorch's dispatch keys show them in a thread where nothing else is
    switched on. ignored: the keys whose exclusion changes nothing that guards do not see, in any combination."""

    def __init__(self) -> None:
        self.native = True
        thread = threading.Thread(target=self._look)
        thread.start()
        thread.join()

    def _look(self) -> None:
        self.usual = _keys()
        self._compare()
        with torch.inference_mode():
            self.inference = self._compare()
        autocast = 0
        for device in AUTOCAST_DEVICES:
            torch.set_autocast_enabled(device, True)
            autocast |= self._compare()[1]
            torch.set_autocast_enabled(device, False)
        self.ignored = autocast | _names_key()

    def _compare(self) -> tuple[int, int]:
        """How the present keys differ from the usual ones. Whether native code reads the same is noted."""
        (included, excluded), (was_included, was_excluded) = _keys(), self.usual
        changed = included ^ was_included, excluded ^ was_excluded
        read = _native.probe_modes(_C10, _TORCH_CPU)
        self.native &= read == (*changed, torch._C._len_torch_function_stack(), torch.is_anomaly_enabled())
        return changed

    def known(self) -> bool:
        """What csrc/modes.cpp cannot tell by itself, and the rest where it does not read it."""
        included, excluded = _keys()
        changed = included ^ self.usual[0], (excluded ^ self.usual[1]) & ~self.ignored
        if changed not in ((0, 0), self.inference) or torch.is_anomaly_enabled():
            return False
        return all(type(mode) is DeviceContext for mode in _function_modes())


_USUAL_GLOBALS = (
    (vars(_symbolic_trace), "_is_fx_tracing_flag", False),
    (vars(forward_ad), "_current_level", -1),
)
MODES = _Modes()
_native.set_modes(MODES.native, MODES.inference, MODES.ignored, MODES.known, _USUAL_GLOBALS)


class _TensorMethods:
    """What the methods of tensors are, as a number: a program may replace them.

    Names that PyTorch's classes did not have when this module was imported do not count; who reads one guards it.
    """

    MOST = 16  # kinds of content that are remembered, with the functions in them
    CLASSES = (torch.nn.Parameter, torch.Tensor)  # a change of the second changes the first one's version

    def __init__(self) -> None:
        self.names = frozenset(dir(torch.nn.Parameter))
        self.known: dict[int, tuple[dict[str, object], ...]] = {}
        self.given = 0
        self.foreign: frozenset[str] = frozenset()  # names that are bound to what is not PyTorch's

    def number(self) -> int:
        """Equal numbers mean that each name is bound to the same object."""
        noted = _native.tensor_class()
        if noted >= 0:
            return noted
        now = tuple({name: held for name, held in vars(cls).items() if name in self.names} for cls in self.CLASSES)
        number = next((number for number, then in self.known.items() if all(map(_same_items, then, now))), self.given)
        if number == self.given:
            self.known[number] = now
            self.given += 1
            if len(self.known) > self.MOST:
                del self.known[next(iter(self.known))]
        self.foreign = frozenset(name for holds in now for name, held in holds.items() if not _is_pytorchs(held))
        _native.note_tensor_class(self.CLASSES[0], number)
        return number

    def untraceable(self) -> str | None:
        """A special method or property of tensors that a program has replaced, so that operators are not PyTorch's."""
        for name in sorted(self.foreign - _TEXT):
            if name.startswith("__") or any(isinstance(vars(cls).get(name), property) for cls in self.CLASSES):
                return f"Tensor.{name}"
        return None


_TEXT = frozenset(("__repr__", "__str__", "__format__"))


def _same_items(then: dict[str, object], now: dict[str, object]) -> bool:
    return then.keys() == now.keys() and all(then[name] is held for name, held in now.items())


def _is_pytorchs(held: object) -> bool:
    code = held.fget if isinstance(held, property) else held
    return not isinstance(code, types.FunctionType) or (code.__module__ or "").partition(".")[0] == "torch"


TENSOR_METHODS = _TensorMethods()


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the settings of single backends do not agree: PyTorch has no one answer
        return "mixed"


def capture_global_state() -> GlobalState:
    """The settings of this thread and process that a captured graph depends on."""
    modes = _function_modes()
    devices = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
    return GlobalState(
        grad_enabled=torch.is_grad_enabled(),
        inference_mode=torch.is_inference_mode_enabled(),
        autocast=tuple(
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in AUTOCAST_DEVICES
        ),
        autocast_cache=torch.is_autocast_cache_enabled(),
        default_dtype=torch.get_default_dtype(),
        default_device=str(devices[-1]) if devices else None,
        deterministic=(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        torch_function_enabled=torch._C._is_torch_function_enabled(),
        torch_function_modes=len(modes),
        modes_known=_native.modes_known(),
        num_threads=torch.get_num_threads(),
        matmul_precision=_matmul_precision(),
        tensor_class=TENSOR_METHODS.number(),
    )


def state_holds(expected: GlobalState) -> bool:
    """Whether the present state is `expected`: the fallback of native guards."""
    return capture_global_state() == expected


def _two(values: Iterable[int]) -> tuple[int, int]:
    """Padded to the two devices of csrc/tensors.h, which looks at as many as AUTOCAST_DEVICES has."""
    first, second = (*values, 0)[:2]
    return first, second


def native_state(state: GlobalState) -> tuple[object, ...] | None:
    """`state` in the form of csrc/tensors.h's State; None when only Python can compare it (a default device, disabled
    torch functions)."""
    dtypes = (state.default_dtype, *(dtype for _, _, dtype in state.autocast))
    names = tuple(name for name, _, _ in state.autocast)
    if (
        state.torch_function_modes
        or state.default_device is not None
        or not state.torch_function_enabled
        or names != AUTOCAST_DEVICES
        or any(dtype not in DTYPE_CODES for dtype in dtypes)
        or state.matmul_precision not in _MATMUL_PRECISIONS
    ):
        return None
    return (
        int(state.grad_enabled),
        int(state.inference_mode),
        int(state.autocast_cache),
        0,
        int(state.modes_known),
        int(state.deterministic[0]),
        int(state.deterministic[1]),
        _MATMUL_PRECISIONS.index(state.matmul_precision),
        DTYPE_CODES[state.default_dtype],
        _two(int(enabled) for _, enabled, _ in state.autocast),
        _two(DTYPE_CODES[dtype] for _, _, dtype in state.autocast),
        state.torch_function_modes,
        state.num_threads,
        state.tensor_class,
    )


_key_sets: dict[str, tuple[int, int]] = {}


def key_sets(device: torch.device) -> tuple[int, int]:
    """Dispatch key sets of a plain dense tensor on `device`: made normally, and made in inference mode."""
    found = _key_sets.get(device.type)
    if found is None:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            with torch.inference_mode(False):
                normal = torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr()
            with torch.inference_mode(True):
                inference = torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr()
        found = _key_sets[device.type] = (normal, inference)
    return found


def _samples() -> list[tuple[object, ...]]:
    """Known tensors whose fields differ enough to tell each apart; those of few dimensions come first."""
    empty = functools.partial(torch.empty, device="cpu")
    tensors = [
        empty(3, 4),
        empty(5, 6, dtype=torch.float64).t(),
        empty(2, 3, 4, 5, 6, dtype=torch.int64),
        empty(9, dtype=torch.float16, requires_grad=True),
        empty(2, 7, dtype=torch.complex64).conj(),
        empty((), dtype=torch.bool),
        torch.empty(3, 11, dtype=torch.bfloat16, device="meta"),
        torch.nn.Parameter(empty(4, 2, dtype=torch.float64)),
        torch.frombuffer(bytearray(24), dtype=torch.int16),  # the storage's data pointer and its context differ
        empty(2, 1, 3, 1, 4, 1, 5, dtype=torch.uint8),
        empty(9, 8)[2, 1:],  # the first element is not the storage's
        empty(5, 7, dtype=torch.int64)[3],
    ]
    with torch.inference_mode():
        tensors.append(empty(8, 2, dtype=torch.int32))
    rows: list[tuple[object, ...]] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        row = (
            tensor,
            tensor._cdata,
            torch._C._dispatch_keys(tensor).raw_repr(),
            DTYPE_CODES[tensor.dtype],
            storage._cdata,
            storage.data_ptr(),
            storage.nbytes(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.requires_grad),
            # as libtorch's C interface counts
            -1 if tensor.device.index is None else tensor.device.index,
        )
        rows.append(row)
    return rows


def _probe() -> tuple[dict[str, object], bool]:
    if not DTYPE_CODES:
        return {"ready": False, "storage_ready": False}, False
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.inference_mode(False):
        found = _native.probe_tensors(_C10, _TORCH_CPU, torch._C.TensorBase, _samples())
    state = native_state(capture_global_state())
    state_found = state is not None and _native.probe_state(_C10, _TORCH_CPU, len(AUTOCAST_DEVICES), state)
    return found, bool(state_found)


LAYOUT, STATE_IS_NATIVE = _probe()
