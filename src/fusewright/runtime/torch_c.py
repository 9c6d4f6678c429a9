"""What call plans use of PyTorch's libraries: addresses of exported C functions, and the layout of a Python tensor
object.

Takes the PyTorch that is imported; gives addresses by name (`address`), and configures `fusewright._native` once, at
import.
Always holds: nothing is assumed about a version. The place of the tensor inside its Python object is measured against
PyTorch's own conversion on several tensors, the wrapping function is tried on a known tensor, and what fails its test
is replaced by PyTorch's slower Python entry points.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from typing import Any

from fusewright import _native
from fusewright.base.errors import FusewrightError
from fusewright.base.libraries import library_path
from fusewright.base.pytorch import torch

_LIBRARIES = ("torch_cpu", "torch_python", "c10", "torch_cuda")

FUNCTIONS: dict[str, tuple[str, ...]] = {
    # field of the native table: exported names, the first that exists is taken
    "empty_strided": ("aoti_torch_empty_strided",),
    "from_blob": ("aoti_torch_create_tensor_from_blob",),
    "reinterpret": ("aoti_torch__reinterpret_tensor",),
    "copy": ("aoti_torch_copy_",),
    "new_handle": ("aoti_torch_new_tensor_handle",),
    "delete_handle": ("aoti_torch_delete_tensor_object",),
    "data_ptr": ("aoti_torch_get_data_ptr",),
    "dim": ("aoti_torch_get_dim",),
    "sizes": ("aoti_torch_get_sizes",),
    "strides": ("aoti_torch_get_strides",),
    "dtype": ("aoti_torch_get_dtype",),
    "device_type": ("aoti_torch_get_device_type",),
    "storage_offset": ("aoti_torch_get_storage_offset",),
    "storage_size": ("aoti_torch_get_storage_size",),
    "element_size": ("aoti_torch_dtype_element_size",),
    "grad_enabled": ("aoti_torch_grad_mode_is_enabled",),
    "set_grad_enabled": ("aoti_torch_grad_mode_set_enabled",),
    "parallel_for": ("torch_parallel_for",),
    "error_text": ("torch_exception_get_what_without_backtrace",),
    "inference_mode": ("_ZN3c1013InferenceMode10is_enabledEv",),
    "exclude_keys": ("_ZN3c104impl23ExcludeDispatchKeyGuardC1ENS_14DispatchKeySetE",),
    "restore_keys": ("_ZN3c104impl23ExcludeDispatchKeyGuardD1Ev",),
    "wrap_move": ("_Z16THPVariable_WrapON2at10TensorBaseE",),
    "wrap": ("_Z16THPVariable_WrapRKN2at10TensorBaseE",),
    "cuda_stream": ("aoti_torch_get_current_cuda_stream",),
    "cuda_guard": ("aoti_torch_create_cuda_guard",),
    "cuda_guard_set": ("aoti_torch_cuda_guard_set_index",),
    "delete_cuda_guard": ("aoti_torch_delete_cuda_guard",),
    "has_callbacks": ("_ZN2at12hasCallbacksEv",),
    "record_start": ("aoti_record_function_start",),
    "record_end": ("aoti_record_function_end",),
    "version": ("_ZNK2at10TensorBase8_versionEv",),
    "bump_version": ("_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",),
}

_DTYPE_NAMES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
    "complex128", "bool", "bfloat16",
    "uint16", "uint32", "uint64", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz",
)  # fmt: skip
_DEVICE_NAMES = ("cpu", "cuda", "meta", "xpu", "mps", "privateuse1")
_EXCLUDED_KEYS = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")
_FUNCTORCH_KEYS = ("FuncTorchBatched", "FuncTorchGradWrapper")
_WRAPPED_KEYS = ("Conjugate", "Negative", "ZeroTensor", "Python", "Functionalize", *_FUNCTORCH_KEYS)


def _load(name: str) -> ctypes.CDLL | None:
    path = library_path(name)
    if not path.exists():
        return None
    try:
        # RTLD_NOLOAD: only a library that PyTorch has loaded; another copy would have its own state.
        return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


_libraries = [library for library in map(_load, _LIBRARIES) if library is not None]


def address(symbol: str) -> int | None:
    """The address of a function that PyTorch's libraries export, or None."""
    for library in _libraries:
        try:
            return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
        except AttributeError:
            continue
    return None


def _code(symbol: str) -> int | None:
    """What a function of no arguments that gives an int32 constant says."""
    found = address(symbol)
    return None if found is None else ctypes.CFUNCTYPE(ctypes.c_int32)(found)()


def _codes(prefix: str, names: Iterable[str]) -> dict[str, int]:
    found = ((name, _code(f"aoti_torch_{prefix}_{name}")) for name in names)
    return {name: code for name, code in found if code is not None}


DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for name, code in _codes("dtype", _DTYPE_NAMES).items() if hasattr(torch, name)
}
"""c10::ScalarType of each dtype."""
DEVICE_CODES: dict[str, int] = _codes("device_type", _DEVICE_NAMES)
"""c10::DeviceType of each device type."""

_dtype_of_code = {code: dtype for dtype, code in DTYPE_CODES.items()}


def alias_view(
    base: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: int
) -> torch.Tensor:
    """A strided view of `base` that is a view for autograd's bookkeeping too: it shares the version counter. `offset`
    counts elements of the view's dtype from the first element of `base`."""
    wanted = _dtype_of_code[dtype]
    if base.dtype != wanted:
        # A flat window over the bytes of the view, seen in the other dtype: valid for every base of one dimension with
        # stride 1.
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if all(sizes) else 0
        first, last = offset * wanted.itemsize, (offset + span) * wanted.itemsize
        width = base.dtype.itemsize
        base = base.as_strided(
            (-(-last // width) - first // width,), (1,), base.storage_offset() + first // width
        ).view(wanted)
        offset = (first % width) // wanted.itemsize
    return base.as_strided(sizes, strides, base.storage_offset() + offset)


def excluded_keys() -> int:
    """The dispatch keys above the operators that a graph records: autograd, views' bookkeeping, autocast (as a
    DispatchKeySet's bits)."""
    return _key_bits([*_EXCLUDED_KEYS, *(name for name in dir(torch._C.DispatchKey) if name.startswith("Autocast"))])


def _key_bits(names: Iterable[str]) -> int:
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _tensor_word(tensor: torch.Tensor, delete: Callable[[int], int]) -> int:
    """The content of the at::Tensor inside `tensor` (the address of its TensorImpl), as PyTorch's own conversion gives
    it."""
    (capsule,) = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([tensor])
    handle = _capsule_pointer(capsule, None)
    word = ctypes.c_uint64.from_address(handle).value
    delete(handle)
    return word


def find_handle_offset() -> int:
    """Where an at::Tensor stands in its Python object, in bytes; -1 when it cannot be told."""
    found = address(FUNCTIONS["delete_handle"][0])
    if found is None:
        return -1
    delete = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(found)
    owner = torch.empty(4, device="cpu")
    samples = [
        owner,
        owner.view(2, 2),
        torch.nn.Parameter(torch.empty(3, device="cpu")),
        torch.empty(0, dtype=torch.int64, device="cpu"),
        torch.empty(2, device="cpu").add_(1),
    ]
    words = [_tensor_word(tensor, delete) for tensor in samples]
    header = object.__basicsize__
    for offset in range(header, torch.Tensor.__basicsize__ - 7, 8):
        if all(
            ctypes.c_uint64.from_address(id(tensor) + offset).value == word
            for tensor, word in zip(samples, words, strict=True)
        ):
            return offset
    return -1


def _wrapping_works(wrap: int, offset: int) -> bool:
    """Wrapping the tensor inside a Python tensor must give that very Python tensor back."""
    if offset < 0:
        return False
    sample = torch.empty(2, device="cpu")
    # PyDLL holds the GIL and checks for exceptions, as the function needs.
    back = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(wrap)(id(sample) + offset)
    return back is sample


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.preserve_format)


def _count_change(tensor: torch.Tensor) -> None:
    """Counts one in-place change of `tensor`, as the native function does where PyTorch exports it."""
    if tensor.is_inference():
        if not torch.is_inference_mode_enabled():
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed")
        return
    torch.autograd.graph.increment_version(tensor)


def configure(*, without: Iterable[str] = (), handle_offset: int | None = None) -> None:
    """Gives the native part its functions. `without` leaves optional functions out and `handle_offset=-1` the measured
    layout (tests of the slower paths). Raises RuntimeError when this PyTorch lacks a function that nothing replaces,
    and FusewrightError where its libraries are not found at all."""
    if "cpu" not in DEVICE_CODES:
        raise FusewrightError(
            f"backend 'native' calls PyTorch's C interface, which {library_path('torch_cpu')} would have, but it "
            "cannot be loaded. Install PyTorch from its wheels, or name another backend, such as 'aot_eager'."
        )
    offset = find_handle_offset() if handle_offset is None else handle_offset
    functions: dict[str, int] = {}
    for field, symbols in FUNCTIONS.items():
        found = next((value for value in map(address, symbols) if value is not None), None)
        if found is not None and field not in without:
            functions[field] = found
    if "wrap" in functions and not _wrapping_works(functions["wrap"], find_handle_offset()):
        del functions["wrap"]
    if "wrap" not in functions:
        functions.pop("wrap_move", None)
    if "exclude_keys" not in functions or "restore_keys" not in functions:
        functions.pop("exclude_keys", None)
        functions.pop("restore_keys", None)
    aoti: Any = torch._C._aoti
    _native.configure_plan(
        functions,
        offset,
        excluded_keys(),
        _key_bits(_WRAPPED_KEYS),
        DEVICE_CODES["cpu"],
        torch._C.TensorBase,
        aoti.unsafe_alloc_void_ptrs_from_tensors,
        aoti.alloc_tensors_by_stealing_from_void_ptrs,
        _count_change,
        alias_view,
        _clone,
    )


configure()
