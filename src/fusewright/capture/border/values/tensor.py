"""Tensors: graph inputs when they come from outside; their attributes.

Takes plain tensors, parameters and buffers; gives traced tensors. Always holds: one outside tensor has one traced
tensor, and `type(t)` answers for the class of the original. What would need a tensor's data, address or storage is a
graph break.
"""

from __future__ import annotations

import operator
import re
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.base.signals import GraphBreak, Retry, SkipFrame, UserException
from fusewright.capture.border.dynamic import symbolic_dims, symbolic_steps
from fusewright.capture.border.native import native
from fusewright.capture.border.torch_function import is_traced_subclass
from fusewright.capture.border.values import cls as classes, object as objects, subclass, wrapper
from fusewright.capture.border.values.dict import OutsideDict, attributes_of, handed_out
from fusewright.capture.border.values.gradient_node import gradient_node
from fusewright.capture.border.values.memory import TENSOR_CLASSES, guarded_fact, refuse_hidden_base
from fusewright.capture.border.values.wrapper import is_wrapper, load_wrapper
from fusewright.capture.guards import MISSING, Guard, TensorGuard
from fusewright.capture.guards.sources import (
    Attribute,
    FunctionSource,
    Item,
    PlainTensor,
    Source,
    TensorSize,
    TensorStride,
)
from fusewright.capture.guards.torch_state import TENSOR_METHODS
from fusewright.capture.guards.types import ASKED_AT, SMALL_SIZES, STRIDE
from fusewright.record.torch_level import set_data
from fusewright.record.traced_tensor import is_leaf, version_of
from fusewright.sizes.expressions import Dim, Relation, symbol, total
from fusewright.sizes.strides import free_strides, tight_strides
from fusewright.sizes.symint import dim_of

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

def load_tensor(world: World, real: torch.Tensor, source: Source) -> object:
    """A graph input. Kinds of tensors that the graph cannot hold make the whole frame run eagerly up to here."""
    if torch._C._functorch.is_functorch_wrapped_tensor(real):
        raise SkipFrame(
            "transform-active", f"{source.text()} is a tensor inside a functorch transform (vmap, grad, jvp)"
        )
    if isinstance(real, torch.nn.parameter.UninitializedTensorMixin):  # type: ignore[attr-defined]
        raise SkipFrame("uninitialised-parameter", source.text())
    if is_wrapper(real):
        return load_wrapper(world, real, source)
    original, kind = real, type(real)
    if kind not in TENSOR_CLASSES and subclass.is_subclass(kind):
        subclass.announce(world)
        real = subclass.plain(original)
    reason = unsupported(real)
    if reason is not None:
        raise GraphBreak("unsupported-tensor", f"{source.text()} is {reason}")
    recorder = world.recorder
    symbols = symbolic_dims(real, source, world)
    for dim, size in symbols.items():
        recorder.size_input(size, size.name)
        world.input_sources.append(TensorSize(source, dim))
    steps = symbolic_steps(real, source, world)
    for dim, step in steps.items():
        recorder.size_input(step, step.name)
        world.input_sources.append(TensorStride(source, dim))
    traced = recorder.input(real, placeholder_name(source), symbols, steps)
    type_ = traced.tensor_type
    for dim, inner in free_strides(real).items():
        below = type_.shape[inner] * type_.stride[inner]
        if type(below) is not int or dim in steps:  # elements share no memory
            assert recorder.env is not None
            recorder.env.guard(Relation("<=", below, type_.stride[dim]))
    for dim, inside in tight_strides(real).items():
        reach = total((type_.shape[axis] - 1) * type_.stride[axis] for axis in inside)
        if recorder.env is not None:
            recorder.env.guard(Relation("<", reach, type_.stride[dim]))
    for dim, size in symbols.items():
        if real.stride(dim) == 0:  # kernels read its one element before the loop over it, so there must be one
            assert recorder.env is not None
            recorder.env.settle(Relation("<=", 1, size))
    world.input_sources.append(source if real is original else PlainTensor(source))
    world.stand_in(original, source, traced)
    if real is not original:
        subclass.give_class(world, traced, kind)
    world.inputs.append((real, source, traced))
    return traced


_NO_IDENTIFIER = re.compile(r"\W")


def placeholder_name(source: Source) -> str:
    """`self.layers[0].weight` as a name for a placeholder: `self_layers_0_weight`."""
    parts: list[str] = []
    at: Any = source
    while at is not None:
        name = (at.key_name() or at.key) if isinstance(at, Item) else getattr(at, "name", None)
        if name is not None and name not in ("_parameters", "_buffers", "_modules"):
            text = str(name)
            parts.append((text if text.isidentifier() else _NO_IDENTIFIER.sub("_", text)).strip("_"))
        at = getattr(at, "base", None)
    return "_".join(reversed([part for part in parts if part])) or "input"


def unsupported(real: torch.Tensor) -> str | None:
    """Why a tensor cannot be a graph input, or None."""
    if type(real) not in TENSOR_CLASSES:
        return f"a tensor subclass ({type(real).__qualname__})"
    if real.layout != torch.strided:
        return f"a sparse tensor ({real.layout})"
    if real.is_quantized:
        return "a quantised tensor"
    if real.is_nested:
        return "a nested tensor"
    if real.is_conj() or real.is_neg():
        return "a lazily conjugated or negated view (call .resolve_conj() or .resolve_neg())"
    if real.is_meta:
        return "a tensor on the meta device"
    if real.requires_grad and real.is_inference() and torch.is_grad_enabled():
        return "an inference tensor that requires a gradient"
    if real.requires_grad and not (real.is_floating_point() or real.is_complex()):
        return "a tensor of integers that a tensor with a gradient was written to"
    return None


def tensor_guard(world: World, real: torch.Tensor, traced: torch.Tensor) -> TensorGuard:
    """What the graph assumes of this input; symbolic sizes and strides are None."""
    shape = tuple(size if type(size) is int else None for size in traced.shape)
    stride = tuple(step if type(step) is int else None for step in traced.stride())
    requires_grad = real.requires_grad if world.requires_grad_matters else None
    kind = type(world.real_of(traced))
    return TensorGuard(kind, real.dtype, real.device, requires_grad, shape, stride, real.is_inference())


def size_guards(world: World) -> list[Guard]:
    """The guards on symbolic sizes, and on strides that follow from them."""
    sizes: list[Guard] = []
    env: Any = world.recorder.env
    if env is not None and env.symbols:
        sources = {known.symbol.name: known.source for known in env.symbols.values()}
        for known in env.symbols.values():
            if known.symbol in env.assumed or known.symbol in env.shown:
                least = 2 if known.symbol in env.assumed else 1
                sizes.append(
                    Guard("SIZE", known.source, (Relation("<=", least, known.symbol), sources), SMALL_SIZES)
                )
            if known.symbol.lower or known.symbol in env.numbers:  # no size is below 0, but a number may be
                bound = Relation("<=", known.symbol.lower, known.symbol)
                sizes.append(Guard("SIZE", known.source, (bound, sources), "marked range"))
            if known.symbol.upper is not None:
                bound = Relation("<=", known.symbol, known.symbol.upper)
                sizes.append(Guard("SIZE", known.source, (bound, sources), "marked range"))
        for relation, stack in zip(env.guards, env.asked_at, strict=True):
            sizes.append(
                Guard(
                    "SIZE",
                    FunctionSource(),
                    (relation, sources),
                    f"{ASKED_AT}{stack[-1]}" if stack else "asked by a pass",
                )
            )
        for _, source, traced in world.inputs:
            sizes += stride_guards(world, source, traced)
    return sizes


def stride_guards(world: World, source: Source, traced: torch.Tensor) -> list[Guard]:
    """Symbolic strides must stay the products of sizes that they are."""
    guards: list[Guard] = []
    env = world.recorder.env
    assert env is not None
    for dim, step in enumerate(traced.stride()):
        if type(step) is not int and not _is_own(env, dim_of(step), source, dim):
            stride = symbol(f"stride{len(env.symbols)}_{len(guards)}")
            sources = {known.symbol.name: known.source for known in env.symbols.values()} | {
                stride.name: TensorStride(source, dim)
            }
            guards.append(Guard("SIZE", source, (Relation("==", stride, dim_of(step)), sources), STRIDE))
    return guards


def _is_own(env: Any, step: Dim, source: Source, dim: int) -> bool:
    """Whether a stride is the symbol that stands for just this stride."""
    known = env.symbols.get(step)
    return known is not None and known.source == TensorStride(source, dim)


# Attributes answered natively by the traced tensor.
_PLAIN = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse",
    "is_sparse_csr", "is_mkldnn", "is_quantized", "is_nested", "is_complex", "itemsize", "nbytes", "names", "is_xla",
    "is_ipu", "is_maia", "is_mtia", "is_vulkan",
})  # fmt: skip

# Attributes that are operators.
_OPERATORS = frozenset({"T", "mT", "H", "mH", "real", "imag"})

_REFUSED = {
    "_version": "its version counter",
    "_base": "the tensor that it is a view of",
    "_backward_hooks": "its hooks",
    "__array_interface__": "its address",
    "__cuda_array_interface__": "its address",
    "__dlpack__": "its address",
    "name": "its autograd name",
}


def getattr_tensor(world: World, tensor: torch.Tensor, name: str) -> object:
    """`tensor.name`."""
    if is_wrapper(tensor):
        if name in _REFUSED or (name in _OF_AUTOGRAD and world.outside(tensor) is not None):
            return getattr_plain(world, tensor, name)
        found = classes.lookup(type(tensor), name)
        return (
            types.MethodType(found, tensor)
            if isinstance(found, types.FunctionType)
            else world.torch_call(getattr, (tensor, name), {})
        )
    if is_traced_subclass(tensor):
        return subclass.getattr_subclass(world, tensor, name, getattr_plain)
    return getattr_plain(world, tensor, name)


def getattr_plain(world: World, tensor: torch.Tensor, name: str) -> object:
    if name in TENSOR_METHODS.foreign or name not in TENSOR_METHODS.names:
        return _getattr_foreign(world, tensor, name)
    handler = _ATTRIBUTES.get(name)
    if handler is not None:
        return handler(world, tensor)
    if name in _PLAIN:
        return native(getattr, tensor, name)
    if name in _OPERATORS:
        return world.torch_call(getattr(torch.Tensor, name).__get__, (tensor,), {})
    if name in _REFUSED:
        raise GraphBreak("tensor-address", f"Tensor.{name} asks for {_REFUSED[name]}")
    found = classes.lookup(world.type_of(tensor), name)
    if isinstance(found, types.FunctionType):
        return types.MethodType(world.load(found, world.constant(found, name)), tensor)
    if isinstance(found, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        # PyTorch's own method: the traced class overrides some, to refuse them
        return found.__get__(tensor, torch.Tensor)
    if isinstance(found, (classmethod, types.ClassMethodDescriptorType, types.BuiltinFunctionType)):
        # not the traced class's own
        return getattr(world.type_of(tensor), name)
    if isinstance(found, (types.GetSetDescriptorType, property)):
        raise GraphBreak("tensor-attribute", f"Tensor.{name}")
    return found if isinstance(found, (str, type(None))) else native(getattr, tensor, name)


def _getattr_foreign(world: World, tensor: torch.Tensor, name: str) -> object:
    """An attribute that a program has given to the tensor, or to PyTorch's classes of tensors."""
    cls = world.type_of(tensor)
    found = classes.lookup(cls, name)
    if name not in TENSOR_METHODS.names:  # the others are compared as a part of PyTorch's state
        world.guard_type_attribute(cls, name, found)
    if isinstance(found, property) and found.fget is not None:
        return world.tracer.call(found.fget, (tensor,))
    value = _namespace(world, tensor).get(name, MISSING)
    if value is not MISSING:
        return value
    if isinstance(found, types.FunctionType):
        return types.MethodType(found, tensor)
    if found is not MISSING:
        raise GraphBreak("tensor-attribute", f"Tensor.{name}")
    raise UserException(
        AttributeError(f"'{world.type_of(tensor).__name__}' object has no attribute '{name}'", name=name, obj=tensor)
    )


def _namespace(world: World, tensor: torch.Tensor) -> dict[str, object] | OutsideDict:
    """User attributes of a tensor: those of the original, or a table for tensors made inside."""
    record = world.outside(tensor)
    if record is not None:
        kind = type(record.real)
        attributes = object.__getattribute__(record.real, "__dict__")
        return attributes_of(world, attributes, classes.dict_source(kind, record.source))
    namespace = world.tensor_attributes.setdefault(id(tensor), {})
    world.owners[id(namespace)] = tensor, "__dict__"
    return namespace


def _dict(world: World, tensor: torch.Tensor) -> object:
    world.recorder.identity_asked = True  # it may be stored to
    return handed_out(_namespace(world, tensor))


def _requires_grad(world: World, tensor: torch.Tensor) -> object:
    world.requires_grad_matters = True
    return requires_grad(world, tensor)


def requires_grad(world: World, tensor: torch.Tensor) -> bool:
    """Whether the program's tensor requires a gradient: the traced one may not, of an inference tensor or a wrapper."""
    record = world.outside(tensor)
    if record is not None and (is_wrapper(tensor) or record.real.is_inference()):
        return record.real.requires_grad
    refuse_hidden_base(world, tensor)
    return tensor.requires_grad


def storage_offset(world: World, tensor: torch.Tensor) -> object:
    """`tensor.storage_offset()`; a view made inside does not know the offset of what it is a view of."""
    if world.outside(tensor) is None and tensor._is_view():
        raise GraphBreak("tensor-address", "Tensor.storage_offset() of a view that was made inside")
    return guarded_fact(world, tensor, "storage_offset()", torch._C.TensorBase.storage_offset)


def _fact(name: str) -> Callable[[World, torch.Tensor], object]:
    read = operator.attrgetter(name)
    return lambda world, tensor: guarded_fact(world, tensor, name, read)


def _grad(world: World, tensor: torch.Tensor) -> object:
    record = world.outside(tensor)
    if record is None:
        return tensor.grad
    stored = world.effects.read_slot(tensor, "grad")
    return stored.value if stored is not None else world.load(record.real.grad, Attribute(record.source, "grad"))


def _data(world: World, tensor: torch.Tensor) -> object:
    """The getter itself: what is written through `data` is counted by neither tensor, as it is by both after
    detach()."""
    made = world.torch_call(torch._C.TensorBase.data.__get__, (tensor,), {})  # type: ignore[attr-defined]
    if world.recorder.level == "aten" and world.recorder_owns(made):
        made.node.meta["data"] = True  # type: ignore[attr-defined]
    return made


def known_leaf(world: World, tensor: torch.Tensor) -> bool:
    """Whether a tensor is one; the same capture serves another from outside only if that is one, too."""
    if world.outside(tensor) is None:
        return is_leaf(tensor)
    return bool(guarded_fact(world, tensor, "is_leaf", operator.attrgetter("is_leaf")))


_GRADIENTS_HAVE_DTYPES = hasattr(torch.Tensor, "grad_dtype")  # older releases of PyTorch have no such attribute


def check_gradient_dtype(world: World, record: Any) -> None:
    """Guards that the gradient of a leaf from outside has the leaf's dtype: the engine at capture gives no other."""
    if _GRADIENTS_HAVE_DTYPES and record.real.is_leaf:
        if record.real.grad_dtype is not record.real.dtype:
            raise GraphBreak("autograd-call", "the gradient of a tensor whose grad_dtype is another is computed")
        world.guard("IS", Attribute(record.source, "grad_dtype"), record.real.dtype)


def _grad_fn(world: World, tensor: torch.Tensor) -> object:
    """None for a tensor without a history; the history of an input is nothing that a graph holds."""
    world.requires_grad_matters = True
    if world.outside(tensor) is None:
        return gradient_node(world, tensor)
    if tensor.requires_grad and not known_leaf(world, tensor):
        raise GraphBreak("tensor-address", "Tensor.grad_fn asks for its autograd node")
    return None


def _retains_grad(world: World, tensor: torch.Tensor) -> object:
    retain = torch._C.TensorBase.retain_grad
    told = any(call.function is retain and call.args[0] is tensor for call in world.effects.calls)
    return told or _fact("retains_grad")(world, tensor)


_ATTRIBUTES: dict[str, Callable[[World, torch.Tensor], object]] = {
    "requires_grad": _requires_grad,
    "grad": _grad,
    "grad_fn": _grad_fn,
    "data": _data,
    "is_leaf": _fact("is_leaf"),
    "retains_grad": _retains_grad,
    "output_nr": _fact("output_nr"),
    "__class__": lambda world, tensor: world.type_of(tensor),
    "__dict__": _dict,
}


# What the stand-in of a tensor that wraps others does not know: its history is that of its parts.
_OF_AUTOGRAD = frozenset({"requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "output_nr"})


def setattr_tensor(world: World, tensor: torch.Tensor, name: str, value: object) -> None:
    """`tensor.name = value`: the gradient and user attributes are held back; anything else is a graph break."""
    if is_wrapper(tensor):
        if name == "grad" and world.outside(tensor) is not None:
            world.effects.store_slot(tensor, "grad", value)
        else:
            wrapper.store(world, tensor, name, value)
        return
    if is_traced_subclass(tensor):
        subclass.setattr_subclass(world, tensor, name, value, setattr_plain)
    else:
        setattr_plain(world, tensor, name, value)


def setattr_plain(world: World, tensor: torch.Tensor, name: str, value: object) -> None:
    world.recorder.identity_asked = True  # whoever finds there what was stored knows the tensor again
    record = world.outside(tensor)
    if name == "grad" and record is not None:
        if value is not None and not _is_gradient(tensor, value):
            raise GraphBreak("tensor-attribute", "a store to Tensor.grad of what is no gradient of that tensor")
        world.effects.store_slot(tensor, "grad", value)
        return
    if name == "data":
        _store_data(world, tensor, value)
        return
    if name == "grad" and world.recorder_owns(tensor):
        if tensor.made_leaf:  # type: ignore[attr-defined]
            return native(setattr, tensor, name, value)  # type: ignore[no-any-return]
        world.recorder.lacks_form("tensor-attribute", "a store to Tensor.grad of a tensor made inside")
    if name == "requires_grad":
        if value is True and _requires_grad(world, tensor) and not known_leaf(world, tensor):
            raise UserException(RuntimeError("you can only change requires_grad flags of leaf variables."))
        return world.tracer.call(torch._C.TensorBase.requires_grad_, (tensor, value))  # type: ignore[no-any-return]
    if classes.lookup(world.type_of(tensor), name) is not MISSING:
        raise GraphBreak("tensor-attribute", f"a store to Tensor.{name}")
    namespace = _namespace(world, tensor)
    if type(namespace) is OutsideDict:
        namespace.store(name, value)
    else:
        namespace[name] = value


def _is_gradient(tensor: torch.Tensor, value: object) -> bool:
    """Whether PyTorch takes this as the gradient of the tensor."""
    if not isinstance(value, torch.Tensor) or value is tensor:
        return False
    return value.dtype == tensor.dtype and value.device == tensor.device and value.shape == tensor.shape


def _store_data(world: World, tensor: Any, value: Any) -> None:
    """`tensor.data = value`: the tensor takes over the memory of `value`, and keeps its place in autograd."""
    if value is tensor:  # what Module.to does to a parameter that is as wanted already
        return
    recorder = world.recorder
    if not (recorder.owns(tensor) and recorder.owns(value)) or is_traced_subclass(tensor) or is_traced_subclass(value):
        raise GraphBreak("tensor-attribute", "a store to Tensor.data of a tensor subclass, or of no tensor")
    types = [replace(one.tensor_type, requires_grad=False, offset=0) for one in (tensor, value)]
    if types[0] != types[1] or tensor.is_inference() != value.is_inference():
        raise GraphBreak("tensor-attribute", "a store to Tensor.data that changes its type")
    outside = world.outside(tensor) is not None
    if tensor.requires_grad and not outside:
        raise GraphBreak("tensor-attribute", "a store to Tensor.data of a result that requires a gradient")
    recorder.rebinds("a tensor whose data are replaced")
    world.effects.data.append((tensor, version_of(tensor)))
    if recorder.level == "torch":  # the graph does it, below the eyes of autograd
        recorder.record_call(set_data, (tensor, value), ())
        return
    held = world.torch_call(torch._C.TensorBase.detach, (value,), {})
    tensor.node = held.node
    if outside:
        world.effects.store_slot(tensor, "data", held)


def check_data(world: World, wants_gradients: bool) -> None:
    """Refuses what a graph of ATen operators cannot do with tensors from outside whose data were replaced: a backward
    would read them after the replacement; a write is counted by the tensor, though it is the new memory's."""
    if not world.effects.data or world.recorder.level == "torch":
        return
    if wants_gradients:
        if world.recorder.changes_level:
            raise Retry(lacks_form=True)
        raise GraphBreak("tensor-attribute", "a store to Tensor.data where gradients are wanted")
    if any(version_of(tensor) != version for tensor, version in world.effects.data):
        if world.recorder.changes_level:
            raise Retry(lacks_form=True)
        raise GraphBreak("tensor-attribute", "a write to a tensor whose Tensor.data was stored to")


def delattr_tensor(world: World, tensor: torch.Tensor, name: str) -> None:
    """`del tensor.name`, for the gradient and user attributes."""
    kind = world.type_of(tensor)
    own = is_wrapper(tensor) or classes.python_method(world, kind, "__delattr__") is not None
    if name == "grad" and not own and not is_traced_subclass(tensor):
        return setattr_plain(world, tensor, name, None)
    if own or classes.guarded_lookup(world, kind, name) is not MISSING:
        raise GraphBreak("tensor-attribute", f"del {kind.__qualname__}.{name}")
    namespace = _namespace(world, tensor)
    if namespace.get(name, MISSING) is MISSING:
        asked = objects.probe(world, tensor, name)
        raise objects.refusal(world, lambda probe: object.__delattr__(probe, name), asked, tensor)
    if type(namespace) is OutsideDict:
        namespace.remove(name)
    else:
        del namespace[name]


def method_in_c(name: str) -> Callable[..., Any]:
    """PyTorch's own method of tensors, also where a program has put another one under its name."""
    found = getattr(torch._C.TensorBase, name, None)
    return found if found is not None and found is not getattr(object, name, None) else getattr(torch.Tensor, name)


DATA_DEPENDENT = {
    "item": "Tensor.item()",
    "tolist": "Tensor.tolist()",
    "__bool__": "the truth value of a tensor",
    "__float__": "float(tensor)",
    "__int__": "int(tensor)",
    "__index__": "a tensor used as an index of a Python sequence",
    "__complex__": "complex(tensor)",
}

_ADDRESS = frozenset(
    """data_ptr __cuda_array_interface__ numpy storage untyped_storage _typed_storage storage_type __array__ __dlpack__
    is_shared share_memory_ pin_memory is_set_to""".split()
)

_OF_ELEMENTS = frozenset({"apply_", "map_", "map2_"})  # call a Python function for each; a traced tensor has no memory

_AUTOGRAD = frozenset(
    {
        "backward",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "requires_grad_",
        "set_",
        "resize_",
        "_make_subclass",
        "as_subclass",
        "__deepcopy__",
        "__reduce_ex__",
        "__setstate__",
        "module_load",
    }
)


def refuse_method(name: str) -> None:
    """Raises the graph break of a tensor method that a graph cannot hold."""
    if name in DATA_DEPENDENT:
        raise GraphBreak(
            "data-dependent-branch" if name == "__bool__" else "data-dependent-scalar", DATA_DEPENDENT[name]
        )
    if name in _OF_ELEMENTS:
        raise GraphBreak("data-dependent-scalar", f"Tensor.{name}() calls a function with each element")
    if name in _ADDRESS:
        raise GraphBreak("tensor-address", f"Tensor.{name}()")
    if name in _AUTOGRAD:
        raise GraphBreak(
            "autograd-call" if name in ("backward", "register_hook", "retain_grad") else "tensor-attribute",
            f"Tensor.{name}()",
        )
    if name in ("__repr__", "__str__", "__format__"):
        raise GraphBreak("print-tensor", "a tensor turned into text")
