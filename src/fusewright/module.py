"""Compiled modules: a module that behaves as the original in everything, except that calling it runs compiled code.

Takes an nn.Module; gives an instance of a subclass of its class that *shares the original's `__dict__`*: parameters,
buffers, submodules, hooks, `training` and every other attribute are the same objects under the same names, so
`state_dict` keys, `train()`, `to()`, attribute access and `isinstance` need no forwarding. Always holds: the two
modules have one state, whichever is used to change it.
"""

from __future__ import annotations

import abc
import copy
import types
from collections.abc import Callable
from typing import Any

from torch.nn.modules import module as module_hooks

from fusewright import _native
from fusewright._native import isinstance
from fusewright.base import own_methods
from fusewright.base.errors import warn
from fusewright.base.pytorch import torch

Wrap = Callable[[types.FunctionType], Callable[..., Any]]


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling `module` runs anything besides its `forward`. Asks in the order of PyTorch's own call, which says
    in its error what a module that was not initialised lacks first."""
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or module._forward_hooks
        or module._forward_pre_hooks
        or module_hooks._global_forward_hooks
        or module_hooks._global_forward_pre_hooks
        or module_hooks._global_backward_hooks
        or module_hooks._global_backward_pre_hooks
    )


class ModuleCaller:
    """What a compiled module calls: `forward` compiled directly while there are no hooks, all that a call of the module
    does otherwise.

    A `forward` that is replaced later, on the class or on the instance, is noticed and compiled anew. Where the class
    has a `__call__` of its own, that is compiled; but `in_place` it is that which calls, by nn.Module's.
    """

    __slots__ = ("_entry", "_fast", "_forward", "_hooked", "_slow", "in_place", "module", "wrap")

    def __init__(self, module: torch.nn.Module, wrap: Wrap) -> None:
        self.module = module
        self.wrap = wrap
        self.in_place = False
        self._forward: types.FunctionType | None = None
        self._fast: Callable[..., Any] | None = None
        self._slow: Callable[..., Any] | None = None
        self._entry: Any = None  # what the latter was made of
        self._hooked: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        forward: Any
        entry: Any = type(module).__call__
        # whose __call__ adds error reports
        plain = self.in_place or entry is own_methods.CALL or isinstance(module, torch.fx.GraphModule)
        if plain:
            if "_call_impl" in vars(module):
                return module._call_impl(*args, **kwargs)
            entry = type(module)._call_impl
            plain = entry is own_methods.CALL_IMPL
        hooks = has_hooks(module)
        if plain and not hooks:
            forward = module.forward
            if _is_own(forward, module):
                if self._fast is None or forward.__func__ is not self._forward:
                    self._forward, self._fast = forward.__func__, self.wrap(forward.__func__)
                    self._fast.plainly = entry  # type: ignore[attr-defined]
                return self._fast(module, *args, **kwargs)
        if plain and hooks and _native.modes_known() and _communicates(module):
            forward = module.forward
            if _is_own(forward, module):
                return torch.nn.Module._call_impl(self._beside_hooks(forward.__func__), *args, **kwargs)
        if not _native.modes_known():  # torch.fx has put another `__call__` in its place
            return torch.nn.Module._call_impl(module, *args, **kwargs)
        if self._slow is None or self._entry is not entry:
            # Not Module.__call__, which would come back here for a module that is compiled in place.
            self._entry, self._slow = entry, self.wrap(entry)
        return self._slow(module, *args, **kwargs)

    def _beside_hooks(self, forward: types.FunctionType) -> Any:
        """The module with a compiled `forward`, for a call that runs its hooks as they are."""
        known = self._hooked
        if known is None or known._fusewright_forward[0] is not forward or known._fusewright_follow():
            pair = (forward, self.wrap(forward))
            known = self._hooked = _twin(
                self.module, HookedModuleBase, _fusewright_original=self.module, _fusewright_forward=pair
            )
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a module that is compiled in place is not compiled; its class may copy the whole `__dict__`."""
        return types.NoneType, ()

    def compiled_functions(self) -> list[Any]:
        """The compiled functions made so far (for `explain` and tests)."""
        beside = None if self._hooked is None else self._hooked._fusewright_forward[1]
        return [function for function in (self._fast, self._slow, beside) if function is not None]


def _is_own(forward: Any, module: torch.nn.Module) -> bool:
    """Whether it is a method written in Python, of this module."""
    return (
        isinstance(forward, types.MethodType)
        and isinstance(forward.__func__, types.FunctionType)
        and forward.__self__ is module
    )


_COMMUNICATE = ("torch.distributed.fsdp", "torch.distributed._composable")


def _communicates(module: torch.nn.Module) -> bool:
    """Whether hooks fetch its parameters from other processes (FSDP2). They are no part of a graph: it begins behind
    them."""
    return any(
        getattr(hook, "__module__", "").startswith(_COMMUNICATE) for hook in module._forward_pre_hooks.values()
    )


_BASES: Any = vars(type)["__bases__"]
_OF_CLASS = ("__qualname__", "__module__", "__doc__")


class TwinBase:
    """What a module that stands for another one needs besides its `__dict__`: the original's class, should that be
    another one since.

    `register_parametrization` gives a module a class with properties in place of parameters, and a lazy module takes
    another class at its first call: the twin's class, which is its own, then derives from that. The attribute
    `__class__` is the original's, so that such functions may be given either of the two.
    """

    __slots__ = ()
    _fusewright_original: torch.nn.Module

    def __init_subclass__(cls, fusewright_twin: bool = False, **settings: Any) -> None:
        if not fusewright_twin:  # the program's classes are told of their own subclasses alone
            super().__init_subclass__(**settings)

    # One state, one module: the tables of torch.distributed are keyed by modules, and may know either of the two.
    def __eq__(self, other: object) -> bool:
        return self._fusewright_original is (other._fusewright_original if isinstance(other, TwinBase) else other)

    def __hash__(self) -> int:
        return hash(self._fusewright_original)

    def _fusewright_follow(self) -> bool:
        """Derives from the original's class; whether that is another one than before."""
        cls: Any = type(self)
        base, known = cls.__bases__
        original = type(self._fusewright_original)
        if known is original:
            return False
        _BASES.__set__(cls, (base, original))  # no metaclass of the program's is asked
        for name in ("__name__", *_OF_CLASS):
            type.__setattr__(cls, name, getattr(original, name))
        return True

    def __getattr__(self, name: str) -> Any:
        if self._fusewright_follow():
            return getattr(self, name)
        return super().__getattr__(name)  # type: ignore[misc]  # the module's class comes behind this one

    def __setattr__(self, name: str, value: Any) -> None:
        self._fusewright_follow()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._fusewright_follow()
        super().__delattr__(name)


class CompiledModuleBase(TwinBase):
    """Marks compiled modules and keeps what is not shared with the original. Mixed in front of the original's class."""

    __slots__ = ()
    _fusewright_caller: ModuleCaller
    _fusewright_recompile: Callable[[torch.nn.Module], torch.nn.Module]

    @property
    def _fusewright_original(self) -> torch.nn.Module:  # type: ignore[override]
        return self._fusewright_caller.module

    @property
    def _orig_mod(self) -> torch.nn.Module:
        """The original, by the name that programs written for torch.compile ask for."""
        return self._fusewright_caller.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _native.modes_known():
            # a tracer looks for this module, not for the original
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        result = self._fusewright_caller(*args, **kwargs)
        self._fusewright_follow()
        return result

    __call__.__annotations__.clear()  # its signature is nn.Module's
    # The same without Python, while a call comes to the compiled `forward`.
    __call__ = _native.ModuleCall(__call__, own_methods.CALL, own_methods.CALL_IMPL, vars(module_hooks))  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._fusewright_recompile(copy.deepcopy(self._fusewright_original, memo))

    def __copy__(self) -> Any:
        return self._fusewright_recompile(copy.copy(self._fusewright_original))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._fusewright_recompile, (self._fusewright_original,)

    def _replicate_for_data_parallel(self) -> torch.nn.Module:
        # DataParallel makes new modules, with parameters of their own, at each call: compiled code would be for none
        # but the last.
        warn(
            f"nn.DataParallel copies {type(self).__name__} at every call, and the copies run eagerly; "
            "nn.parallel.DistributedDataParallel, one process a GPU, runs compiled modules",
            UserWarning,
        )
        return self._fusewright_original._replicate_for_data_parallel()  # type: ignore[no-any-return]


class HookedModuleBase(TwinBase):
    """What `Module._call_impl` is given where the hooks of a module stay outside: its `forward` is the compiled one."""

    __slots__ = ()
    _fusewright_forward: tuple[types.FunctionType, Callable[..., Any]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fusewright_forward[1](self._fusewright_original, *args, **kwargs)


class DisabledModuleBase(TwinBase):
    """Marks modules whose calls run eagerly inside compiled code. Mixed in front of the original's class."""

    __slots__ = ()
    _fusewright_reason: str | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = _native.call_paused(self._fusewright_original, *args, **kwargs)
        self._fusewright_follow()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return disabled_module(copy.deepcopy(self._fusewright_original, memo), self._fusewright_reason)

    def __copy__(self) -> Any:
        return disabled_module(copy.copy(self._fusewright_original), self._fusewright_reason)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return disabled_module, (self._fusewright_original, self._fusewright_reason)


def _class_of(twin: TwinBase) -> type:
    return type(twin._fusewright_original)


def _set_class(twin: TwinBase, cls: type) -> None:
    twin._fusewright_original.__class__ = cls
    twin._fusewright_follow()


def _made_by_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """What a twin's class gives where the program calls it (`type(model)(...)`): a module of the original's class."""
    if len(cls.__bases__) != 2:
        raise TypeError(f"{cls.__qualname__} derives from a compiled module's type(), not from its __class__")
    return cls.__bases__[1](*args, **kwargs)


def _shared(slot: Any) -> property:
    """What stands for a slot of the original's, which is no part of its `__dict__`."""
    return property(
        lambda twin: slot.__get__(twin._fusewright_original),
        lambda twin, value: slot.__set__(twin._fusewright_original, value),
        lambda twin: slot.__delete__(twin._fusewright_original),
    )


def _twin(module: torch.nn.Module, base: type, **slots: Any) -> Any:
    """An instance of (`base`, the module's class) that shares the module's `__dict__`; `slots` are its own."""
    original = type(module)
    shared = {
        name: _shared(slot)
        for base in original.__mro__
        for name, slot in vars(base).items()
        if type(slot) is types.MemberDescriptorType and getattr(original, name, None) is slot
    }
    body = {
        **shared,
        "__slots__": tuple(slots),
        **{name: getattr(original, name) for name in _OF_CLASS},
        "__new__": _made_by_class,
        "__class__": property(_class_of, _set_class),  # a class statement with this name in it has no `super()`
        # torch.jit.script would compile them, and needs a list
        "__jit_unused_properties__": [
            *getattr(original, "__jit_unused_properties__", ()),
            *shared,
            "__class__",
            "_fusewright_original",
            "_orig_mod",
        ],
    }
    # Not the metaclass itself: one of the program's may keep a table of its classes.
    new: Any = (abc.ABCMeta if isinstance(original, abc.ABCMeta) else type).__new__
    cls: Any = new(type(original), original.__name__, (base, original), body, fusewright_twin=True)
    twin = object.__new__(cls)  # GraphModule's own __new__ would make yet another class
    object.__setattr__(twin, "__dict__", module.__dict__)
    for name, value in slots.items():
        getattr(cls, name).__set__(twin, value)  # the slots: nn.Module.__setattr__ must not see these
    return twin


def compiled_module(
    module: torch.nn.Module, wrap: Wrap, recompile: Callable[[torch.nn.Module], torch.nn.Module]
) -> torch.nn.Module:
    """The compiled twin of `module`. `recompile(m)` compiles another module the same way (copies and unpickling use
    it)."""
    caller = ModuleCaller(module, wrap)
    return _twin(module, CompiledModuleBase, _fusewright_caller=caller, _fusewright_recompile=recompile)


def disabled_module(module: torch.nn.Module, reason: str | None) -> torch.nn.Module:
    """The twin of `module` whose calls run eagerly."""
    return _twin(module, DisabledModuleBase, _fusewright_original=module, _fusewright_reason=reason)
