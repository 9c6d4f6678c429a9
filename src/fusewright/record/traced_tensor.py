"""The tensor that stands for a value during capture: a wrapper subclass with the real device and dtype and no data.

Takes a recorder and a TensorType; gives a tensor that PyTorch's own code (autograd, autocast, composite operators)
handles as any other.
Always holds: every operator on it reaches its recorder's `dispatch`; asking for its data raises GraphBreak, never gives
a wrong value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.base.pytorch import methods, torch
from fusewright.base.records import replace
from fusewright.base.signals import GraphBreak
from fusewright.sizes.expressions import Dim, Relation
from fusewright.sizes.symint import dim_of, size_of
from fusewright.sizes.tensor_type import TensorType

if TYPE_CHECKING:
    from fusewright.sizes.interfaces import Recorder


def _data_method(name: str, code: str) -> object:
    def refuse(self: TracedTensor, *args: object, **kwargs: object) -> NoReturn:
        raise GraphBreak(code, f"Tensor.{name}")

    refuse.__name__ = name
    return refuse


class KnownStorage:
    """What is known of the memory that a traced tensor lies in: the bytes up to its last element."""

    def __init__(self, tensor: TracedTensor) -> None:
        self.tensor = tensor

    def size(self) -> Any:
        root = memory_root(self.tensor)
        kind, env = root.tensor_type, root.recorder.env
        length = reach(kind.shape, kind.stride, 0) * kind.dtype.itemsize
        return length if env is None else size_of(length, env)

    nbytes = size

    def __getattr__(self, name: str) -> NoReturn:
        raise GraphBreak("operator-failed", f"Tensor.untyped_storage().{name}")


class TracedTensor(torch.Tensor):
    """A value of the graph being recorded.

    recorder        the Recorder that it belongs to
    node            its node in the recorder's graph (None only inside a torch-level call)
    tensor_type     its TensorType when it was made (not called `type`: torch.Tensor.type is a method that user code
        calls)
    python_class    the class that the program sees, where it is no plain tensor's: a subclass without parts
    original_class  torch.Tensor or torch.nn.Parameter: the class of the real input that it stands for
    input_storage   it is an input or a view of one, so its storage is larger and starts earlier than its type tells
    is_input        it is an input itself: an object that exists outside
    viewed          the traced tensor whose memory it is a view of, by one recorded operator; None when its memory is
        its own
    reshaped        an in-place view operator (t_, squeeze_, ...) has changed what it is since it was made
    made_leaf       the program has said `requires_grad_()` of it
    """

    recorder: Recorder
    node: torch.fx.Node
    tensor_type: TensorType
    python_class: type = torch.Tensor
    original_class: type
    input_storage: bool
    is_input: bool
    viewed: TracedTensor | None
    reshaped: bool
    made_leaf: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        if meets_others(types):
            return NotImplemented
        recorder = _recorder_of((*args, *(kwargs or {}).values()))
        return recorder.dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if self.recorder.resolving:
            return "a tensor"
        raise GraphBreak("print-tensor", "the text of a tensor")

    def __hash__(self) -> int:
        """A set or a dict tells by it which tensors are one object."""
        self.recorder.identity_asked = True
        return id(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise GraphBreak("operator-failed", "a tensor is copied or pickled")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise GraphBreak("operator-failed", "copy.deepcopy of a tensor")

    tolist = _data_method("tolist", "data-dependent-scalar")  # type: ignore[assignment]
    numpy = _data_method("numpy", "operator-failed")  # type: ignore[assignment]
    __array__ = _data_method("__array__", "operator-failed")  # type: ignore[assignment]
    __dlpack__ = _data_method("__dlpack__", "operator-failed")  # type: ignore[assignment]
    data_ptr = _data_method("data_ptr", "operator-failed")  # type: ignore[assignment]
    storage = _data_method("storage", "operator-failed")  # type: ignore[assignment]

    def untyped_storage(self) -> KnownStorage:  # type: ignore[override]
        """For code of PyTorch's that makes a wrapper of as many bytes."""
        return KnownStorage(self)


# Called through the class (torch.Tensor.tolist(x)) these would miss the refusals above.
DATA_METHODS: dict[object, object] = {
    getattr(torch.Tensor, name): getattr(TracedTensor, name)
    for name in ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage", "__repr__")
}


_LARGE = 1 << 40
"""Bytes in the storage of a tensor of symbolic sizes, as far as PyTorch's own checks are concerned."""


def make_traced(
    recorder: Recorder, node: torch.fx.Node | None, type_: TensorType, requires_grad: bool = False
) -> TracedTensor:
    """A traced tensor of this type, standing for `node`."""
    shape, stride, offset = type_.shape, type_.stride, type_.offset
    storage = None  # PyTorch computes it
    if recorder.symbolic:
        storage = _LARGE  # nobody may ask for it, and from symbolic sizes it takes 85 us
        env = recorder.env
        shape = tuple(size_of(d, env) for d in shape)  # type: ignore[misc]
        stride = tuple(size_of(d, env) for d in stride)  # type: ignore[misc]
        offset = size_of(offset, env)  # type: ignore[assignment]
    traced = methods._make_wrapper_subclass(
        TracedTensor,
        shape,  # type: ignore[arg-type]
        strides=stride,  # type: ignore[arg-type]
        storage_offset=offset,  # type: ignore[arg-type]
        dtype=type_.dtype,
        device=type_.device,
        requires_grad=requires_grad,
        storage_size=storage,  # type: ignore[call-arg]
    )
    prepare(traced, recorder, node, type_)
    return traced


def make_view(recorder: Recorder, node: torch.fx.Node | None, type_: TensorType, viewed: TracedTensor) -> TracedTensor:
    """A traced tensor that is a view of `viewed`. As in eager, it is an inference tensor if and only if that is one,
    whatever the present mode is: PyTorch keeps a version counter for both or for neither."""
    inference = viewed.is_inference()
    if torch.is_inference_mode_enabled() != inference:
        with torch.inference_mode(inference):
            traced = make_traced(recorder, node, type_)
    else:
        traced = make_traced(recorder, node, type_)
    traced.viewed, traced.input_storage = viewed, viewed.input_storage
    return traced


def prepare(traced: TracedTensor, recorder: Recorder, node: torch.fx.Node | None, type_: TensorType) -> None:
    """Makes a fresh wrapper stand for `node`."""
    traced.recorder = recorder
    traced.node = node  # type: ignore[assignment]
    traced.tensor_type = type_
    traced.original_class = torch.Tensor
    traced.input_storage = traced.is_input = traced.reshaped = traced.made_leaf = False
    traced.viewed = None


def cut_off(graph: torch.fx.Graph) -> None:
    """Lets nothing lead from the graph's traced tensors to it: autograd holds some of them where the collector of
    cycles does not look. They still tell shapes and dtypes."""
    for node in graph.nodes:
        for traced in (node.meta.get("example_value"), node.meta.get("leaf")):
            if isinstance(traced, TracedTensor):
                traced.node = traced.recorder = None  # type: ignore[assignment]


class NonLeaf(torch.autograd.Function):
    """Gives a traced input a grad_fn, as the real one has (a leaf that requires a gradient forbids in-place
    operators)."""

    @staticmethod
    def forward(context: Any, leaf: TracedTensor) -> TracedTensor:
        context.set_materialize_grads(False)  # where no gradient arrives, none is handed on
        return make_traced(leaf.recorder, leaf.node, leaf.tensor_type)

    @classmethod
    def of(cls, leaf: TracedTensor) -> TracedTensor:
        """Outside of the transforms (vmap, grad, jvp) that the program is in where it meets the input."""
        allowed = torch._C._functorch.get_single_level_autograd_function_allowed()
        torch._C._functorch.set_single_level_autograd_function_allowed(True)
        try:
            with torch._C._DisableFuncTorch():
                return super(torch.autograd.Function, cls).apply(leaf)  # type: ignore
        finally:
            torch._C._functorch.set_single_level_autograd_function_allowed(allowed)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return gradient


def is_leaf(tensor: torch.Tensor) -> bool:
    """Of a view made under no_grad whose base was written to since, nobody may ask."""
    try:
        return tensor.is_leaf
    except RuntimeError as error:
        raise GraphBreak("unsupported-tensor", str(error)) from None


def version_of(tensor: torch.Tensor) -> int:
    """How often it was written to; inference tensors do not count, nor does one that was until `.data =` gave it
    another's."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def with_history(traced: TracedTensor) -> TracedTensor:
    """A tensor for the input `traced`, which as a real tensor requires a gradient and is no leaf."""
    if not is_leaf(traced):
        return traced
    node, type_ = traced.node, replace(traced.tensor_type, requires_grad=True)
    with torch.inference_mode(False), torch.enable_grad():
        leaf = make_traced(traced.recorder, node, type_, requires_grad=True)  # type: ignore[arg-type]
        made: TracedTensor = NonLeaf.apply(leaf)  # type: ignore[assignment]
    node.meta.update(type=type_, leaf=leaf, history=made.grad_fn)
    return made


def move_metadata(traced: TracedTensor, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Let an in-place view operator (squeeze_, transpose_, …) change the sizes and strides of the traced tensor
    itself."""
    with torch._C._DisableTorchDispatch():
        func(*args, **kwargs)


def replace_metadata(traced: TracedTensor, like: TracedTensor) -> None:
    """Give a traced tensor, which no autograd graph knows, the sizes and strides of another."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        traced.data = like


def memory_root(value: TracedTensor) -> TracedTensor:
    """The traced tensor whose memory `value` lies in: itself, or what it is a view of."""
    while value.viewed is not None and not value.reshaped:
        value = value.viewed
    return value


def check_window(tensor: TracedTensor, shape: Sequence[int], stride: Sequence[int], offset: int | None) -> None:
    """Raises GraphBreak where as_strided could reach beyond the memory that the program has shown: eager checks the
    storage, which may be larger than an input, but whose size nothing guards."""
    root = memory_root(tensor)
    if root.is_input and offset is not None:
        raise GraphBreak("operator-failed", "as_strided at an absolute offset of an input's storage")
    start = tensor.tensor_type.offset if offset is None else dim_of(offset)
    needed = reach([dim_of(size) for size in shape], [dim_of(step) for step in stride], start)
    limits = [Relation("<=", needed, reach(root.tensor_type.shape, root.tensor_type.stride, 0))]
    if tensor is not root and tensor.requires_grad:  # elements beside it have no gradient, until its base is written to
        seen = tensor.tensor_type
        end = reach(seen.shape, seen.stride, seen.offset)
        limits += [Relation("<=", seen.offset, start), Relation("<=", needed, end)]
    env = tensor.recorder.env
    if not all(one.holds({}) if env is None else env.guard(one) for one in limits):
        raise GraphBreak("operator-failed", "as_strided beyond the elements of the tensor")


def reach(shape: Sequence[Dim], stride: Sequence[Dim], offset: Dim) -> Dim:
    """How many elements of the storage a tensor spans."""
    if any(size == 0 for size in shape):
        return 0
    last = offset
    for size, step in zip(shape, stride, strict=True):
        last = last + (size - 1) * step
    return last + 1


def meets_others(types: Sequence[type]) -> bool:
    """Whether an operator's arguments have classes that shall see it first: tensors that wrap traced ones."""
    return not all(kind is TracedTensor or issubclass(kind, TracedTensor) for kind in types)


def _recorder_of(values: tuple[object, ...]) -> Recorder:
    """The recorder of the first traced tensor among the arguments (at most one level deep in lists)."""
    for value in values:
        if type(value) is TracedTensor:
            return value.recorder
        if isinstance(value, (list, tuple)):
            for item in value:
                if type(item) is TracedTensor:
                    return item.recorder
    raise AssertionError("a traced operator without a traced argument")
