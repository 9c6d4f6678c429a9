"""What no tensor guard looks at: facts of the real tensor, its address and its storage.

Takes a traced tensor; gives the fact, guarded by itself, or an `Address` or a `Storage`, which are made inside. Always
holds: two addresses are compared
by what they are known to be addresses of; a number that only the tensor at hand has is a graph break, unless the tensor
existed before, where it is read again behind the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from fusewright.base.pytorch import methods, torch
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.native import native
from fusewright.record.traced_tensor import TracedTensor, is_leaf, memory_root, reach
from fusewright.sizes.expressions import Relation
from fusewright.sizes.symint import size_of

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


TENSOR_CLASSES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class _Reads:
    """Guard callable: this attribute, or the answer of this method, is still what it was."""

    __slots__ = ("name", "read", "value")

    def __init__(self, name: str, read: Callable[[Any], object], value: object) -> None:
        self.name = name
        self.read = read
        self.value = value

    def __call__(self, tensor: Any) -> bool:
        return self.read(tensor) == self.value

    def __repr__(self) -> str:
        return f"has {self.name} = {self.value!r}"


def guarded_fact(world: World, tensor: torch.Tensor, name: str, read: Callable[[Any], object]) -> object:
    """What a tensor guard does not look at, read from the original and guarded by itself; a tensor made inside answers
    natively."""
    record = world.outside(tensor)
    if record is None:
        return native(read, tensor)
    if type(record.real) not in TENSOR_CLASSES:
        read = _past_overrides(read)
    value = native(read, record.real)
    world.guard("CALL", record.source, _Reads(name, read, value))
    return value


def refuse_hidden_base(world: World, tensor: torch.Tensor) -> None:
    """A graph break where a gradient is wanted of a view made in no_grad of an input that is a view itself, of what
    requires none: the view requires one if that does, which its traced tensor knows nothing of."""
    if type(tensor) is not TracedTensor or tensor.viewed is None or not tensor.node.meta.get("no_grad"):
        return
    root = memory_root(tensor)
    if root.requires_grad and world.outside(root) is not None and is_leaf(tensor):
        if not guarded_fact(world, root, "_base that requires a gradient, or none", _base_requires_grad):
            raise GraphBreak("unsupported-tensor", "a view made in no_grad of an input that is a view")


def _base_requires_grad(tensor: torch.Tensor) -> bool:
    return tensor._base is None or tensor._base.requires_grad


def _past_overrides(read: Callable[[Any], object]) -> Callable[[Any], object]:
    """`read`, of which a class's `__torch_function__` is not told."""

    def plainly(tensor: Any) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            return read(tensor)

    return plainly


def _refuse(self: Any, *args: object) -> NoReturn:
    raise GraphBreak("tensor-address", f"the value of {self.what} is needed")


class Address:
    """`tensor.data_ptr()`, or that of its storage: an int that is known to be equal to another one, or not."""

    __slots__ = ("of_storage", "tensor", "world")
    refuse = _refuse

    def __init__(self, world: World, tensor: TracedTensor, of_storage: bool = False) -> None:
        self.world, self.tensor, self.of_storage = world, tensor, of_storage

    @property
    def what(self) -> str:
        return "Tensor.untyped_storage().data_ptr()" if self.of_storage else "Tensor.data_ptr()"

    @property
    def text(self) -> str:
        """What gives it of the tensor, as Python text."""
        return "untyped_storage().data_ptr()" if self.of_storage else "data_ptr()"

    def __eq__(self, other: object) -> bool:
        if type(other) is not Address:
            _refuse(self)
        roots = [memory_root(one.tensor) for one in (self, other)]
        env = self.world.recorder.env
        for one in (*roots, self.tensor, other.tensor):
            filled = [Relation("<=", 1, size) for size in one.tensor_type.shape]
            if one.reshaped or not all(size.holds({}) if env is None else env.guard(size) for size in filled):
                _refuse(self)  # what has no elements has no address
        if self.world.effects.data:
            _refuse(self)
        self.world.recorder.identity_asked = True
        if roots[0] is not roots[1]:
            return all(root.is_input for root in roots) and _inputs_meet(self, other)
        if self.of_storage and other.of_storage:
            return True
        if roots[0].is_input and self.of_storage != other.of_storage:
            _refuse(self)  # an input may start anywhere in its storage
        same = Relation("==", *(_offset(one) for one in (self, other)))
        return same.holds({}) if env is None else env.guard(same)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _number(self, *args: object) -> NoReturn:
        _refuse(self)

    __hash__ = __int__ = __index__ = __bool__ = __float__ = __repr__ = __str__ = __format__ = _number  # type: ignore
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __floordiv__ = _number
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rshift__ = __invert__ = _number
    __lt__ = __le__ = __gt__ = __ge__ = __truediv__ = __divmod__ = __pow__ = __neg__ = __abs__ = _number


def _inputs_meet(left: Address, right: Address) -> bool:
    """Whether two inputs have one address: guarded by their not overlapping, or else by the addresses themselves."""
    world = left.world
    records = [record for one in (left, right) if (record := world.outside(one.tensor)) is not None]
    if len(records) != 2 or left.of_storage != right.of_storage:
        _refuse(left)
    storages = [record.real.untyped_storage()._cdata for record in records]
    if storages[0] != storages[1] and not left.of_storage:
        places = tuple(record.source for record in records)
        world.guard("NO_OVERLAP", places[0], places)
        return False
    found = [guarded_fact(world, one.tensor, left.text, _read(left)) for one in (left, right)]
    return found[0] == found[1]


def _read(address: Address) -> Callable[[torch.Tensor], object]:
    """What reads the address of a real tensor."""
    if address.of_storage:
        return lambda tensor: tensor.untyped_storage().data_ptr()
    return methods.data_ptr


def _offset(address: Address) -> Any:
    """In bytes from the start of the memory's root."""
    if address.of_storage:
        return 0
    root, tensor = memory_root(address.tensor), address.tensor
    start = 0 if tensor is root else tensor.tensor_type.offset
    return start * tensor.dtype.itemsize


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


class Storage:
    """`tensor.untyped_storage()`."""

    __slots__ = ("tensor", "world")

    def __init__(self, world: World, tensor: TracedTensor) -> None:
        self.world, self.tensor = world, tensor

    what, text = "Tensor.untyped_storage()", "untyped_storage()"

    def data_ptr(self) -> Address:
        return Address(self.world, self.tensor, True)

    def nbytes(self) -> Any:
        root = memory_root(self.tensor)
        if root.is_input:
            return guarded_fact(self.world, root, "untyped_storage().nbytes()", _bytes)
        kind = root.tensor_type
        return size_of(reach(kind.shape, kind.stride, 0) * kind.dtype.itemsize, self.world.recorder.env)

    size = __len__ = nbytes

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def element_size(self) -> int:
        return 1

    def _refused(self, *args: object) -> NoReturn:
        _refuse(self)

    __getattr__ = __eq__ = __hash__ = __repr__ = __str__ = __getitem__ = __setitem__ = __iter__ = _refused  # type: ignore
