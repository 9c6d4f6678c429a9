"""Autograd inside compiled code: custom functions, backward() and torch.autograd.grad, hooks, requires_grad_.

Takes calls of PyTorch's autograd interface on traced tensors; PyTorch's own engine runs them at capture, and what it
does is recorded.
Always holds: user code that runs in a backward (a custom function's, a hook) is interpreted, never called natively; an
outside tensor whose gradient is accumulated has no hooks (guarded); what would reach an autograd graph outside of the
capture is a graph break.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch.autograd.function import _SingleLevelFunction
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fusewright._native import isinstance
from fusewright.base.pytorch import methods, now, torch
from fusewright.base.signals import GraphBreak, SkipFrame
from fusewright.capture.border.aliasing import written_arguments
from fusewright.capture.border.arguments import by_place
from fusewright.capture.border.effects import register_hook, registration, stamp
from fusewright.capture.border.hooked_results import registers_later
from fusewright.capture.border.looked_up import as_read, method_reads, reads_of
from fusewright.capture.border.native import Trampoline, native, unwatched
from fusewright.capture.border.values import tensor as tensors
from fusewright.capture.border.values.wrapper import is_wrapper
from fusewright.capture.call.support import guard_saved_hooked
from fusewright.capture.guards.sources import Attribute
from fusewright.graph.nodes import leaves
from fusewright.operators.overlap import view_chain
from fusewright.record import applications
from fusewright.record.applications import Application, Called, Forbids, Hook, Saving, SeesSaved, UserCode
from fusewright.record.recorder import BACKWARD, GRAD
from fusewright.record.traced_tensor import TracedTensor, is_leaf, version_of

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Row = Callable[["Tracer", Args, Kwargs], Any]


def at_aten_level(tracer: Tracer, code: str, what: str) -> None:
    detail = f"{what} (the backend takes graphs without their backward)"
    if tracer.recorder.level != "aten" or tracer.options.differentiate is None:
        tracer.recorder.lacks_form(code, detail)


# Custom functions.


def _apply(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """Function.apply: a stand-in of the class whose methods are interpreted is applied natively, so that autograd's
    rules are its own."""
    cls, *values = args
    values = [tracer.world.materialise(value) for value in values]
    kwargs = {name: tracer.world.materialise(value) for name, value in kwargs.items()}
    bound = by_place(cls.forward, _sets_up(cls), values, kwargs, tracer.world.load_default)
    if bound is None or getattr(cls, "boxed_grads_call", False) or getattr(cls, "clear_saved_tensors_on_access", False):
        detail = f"{cls.__qualname__} is applied with arguments that have no place, or takes boxed gradients"
        raise GraphBreak("autograd-function", detail)
    values = bound
    differentiates = torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    )
    if differentiates or tracer.recorder.level != "aten":
        at_aten_level(tracer, "autograd-function", cls.__qualname__)
    if not tracer.assumptions.custom_gradients:
        reason = tracer.assumptions.gradient_refused
        raise GraphBreak("autograd-function", f"{cls.__qualname__}, whose backward stays outside: {reason}")
    recorder = tracer.recorder
    if not differentiates:
        return unwatched(_stand_in(tracer, cls).apply, *values)
    again = applications.again(tuple(values))
    last, before = _last(recorder.graph), stamp(tracer.world.effects)
    result = unwatched(_stand_in(tracer, cls).apply, *values)
    nodes = _behind(last, recorder.graph)
    outputs = tuple(one.node if isinstance(one, TracedTensor) else None for one in _flat(result))
    written = (view_chain(one)[0] for node in nodes for one in leaves(written_arguments(node)) if one is not None)
    in_place = any(root not in nodes for root in written)
    repeatable = again is not applications.VARYING and not in_place and stamp(tracer.world.effects) == before
    apart = not repeatable or any(node is not None and node not in nodes for node in outputs)
    _note_user_code(tracer, None if apart else Application(cls.apply, again, nodes, outputs))
    if not tracer.world.is_inside_class(cls):
        recorder.user_reads += method_reads(cls, "backward", "vjp")
    return result


def _last(graph: torch.fx.Graph) -> torch.fx.Node | None:
    return next(iter(reversed(graph.nodes)), None)


def _behind(last: torch.fx.Node | None, graph: torch.fx.Graph) -> tuple[torch.fx.Node, ...]:
    """What was recorded since the node was the last one."""
    return tuple(itertools.takewhile(lambda node: node is not last, reversed(graph.nodes)))[::-1]


def _sets_up(cls: Any) -> bool:
    return cls.setup_context is not _SingleLevelFunction.setup_context


def _note_user_code(tracer: Tracer, what: UserCode | None) -> None:
    """Notes a part of the gradients that is the program's own; None for one that another call may have otherwise."""
    recorder = tracer.recorder
    recorder.user_code += 1
    if what is None:
        recorder.user_gradients = None
    elif recorder.user_gradients is not None:
        recorder.user_gradients.append(what)


def _stand_in(tracer: Tracer, cls: type) -> Any:
    world = tracer.world
    names = ["forward", "vjp" if cls.backward is _SingleLevelFunction.backward else "backward"]  # type: ignore
    if _sets_up(cls):
        names.append("setup_context")
    body: dict[str, Any] = {}
    for name in names:
        method = world.getattr(cls, name)
        body["backward" if name == "vjp" else name] = staticmethod(_interpreted(tracer, method))
    return type(cls.__name__, (torch.autograd.Function,), body)


def _interpreted(tracer: Tracer, function: object) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return tracer.call(function, args)

    return run


def call_function_machinery(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """Python functions of torch.autograd.function: the methods of `ctx` run as they are, the wrapper of
    once_differentiable is inlined."""
    if fn.__code__.co_qualname == "once_differentiable.<locals>.wrapper":
        return tracer.inline(fn, args, kwargs)
    if fn.__qualname__.startswith(("FunctionCtx.", "_HookMixin.")) and tracer.world.outside(args[0]) is None:
        return unwatched(fn, *args, **kwargs)
    raise GraphBreak("autograd-function", f"torch.autograd.function.{fn.__qualname__}")


# The engine.


def _is_ours(value: Any) -> bool:
    return isinstance(value, TracedTensor)


def _flat(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


@contextlib.contextmanager
def _asking(tracer: Tracer, wanted: list[Any]) -> Iterator[None]:
    """Around what asks for the gradients that arrive at `wanted`, and may break the graph. Behind a cut all that was
    made before is the result of one graph, of which none is computed from another: where something has been computed
    from one of these, the frame runs eagerly instead."""
    try:
        yield
    except GraphBreak as signal:
        if tracer.recorder.level == "aten" and any(map(computed_from, wanted)):
            raise SkipFrame(signal.code, signal.detail) from signal
        raise


def _refuse(detail: str) -> NoReturn:
    raise GraphBreak("autograd-call", detail)


def computed_from(value: Any) -> bool:
    """Whether the graph has computed `value`, and something from it."""
    if is_wrapper(value):
        return any(computed_from(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return _is_ours(value) and value.node.op != "placeholder" and bool(value.node.users)


def _refuse_wrapper(tracer: Tracer, tensor: Any, what: str) -> None:
    """The engine at capture knows traced tensors, not those that are made of them."""
    if not _is_ours(tensor):
        with _asking(tracer, [tensor]):
            _refuse(f"{what} of a {type(tensor).__qualname__}")


def _check_engine_call(tracer: Tracer, roots: list[Any], what: str) -> None:
    at_aten_level(tracer, "autograd-call", what)
    tracer.world.effects.gradients_asked = len(tracer.world.effects.hooked_results)
    if torch.is_anomaly_enabled():
        _refuse(f"{what} under anomaly detection, which reads the gradients")
    for root in roots:
        if not _is_ours(root):
            _refuse(f"{what} of something that is no tensor")
        if tracer.world.outside(root) is not None and not tensors.known_leaf(tracer.world, root):
            _refuse(f"{what} of a tensor whose graph was made outside of the compiled function")


def _grad(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """torch.autograd.grad."""
    given = dict(zip(("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"), args)) | kwargs
    outputs, inputs = _flat(given.get("outputs")), _flat(given.get("inputs"))
    with _asking(tracer, inputs):
        _check_engine_call(tracer, outputs, "torch.autograd.grad")
        if given.get("is_grads_batched") or not all(map(_is_ours, inputs)):
            _refuse("torch.autograd.grad of batched gradients, or of graph edges")
        histories, outside = _histories(tracer), [one for one in inputs if tracer.world.outside(one) is not None]
        for leaf in _ends(outputs):
            # the engine would go on outside, perhaps to one of these
            value = histories.get(id(leaf), leaf)
            beyond = _is_ours(leaf) and any(one is not value for one in outside)
            if beyond and not tensors.known_leaf(tracer.world, value):
                _refuse("torch.autograd.grad past a tensor whose graph was made outside of the compiled function")
        for value in inputs:
            _without_hooks(tracer.world, value)
        result = tracer.world.torch_call(GRAD, args, kwargs)
    _note_freed(tracer, given)
    return result


def _note_freed(tracer: Tracer, given: dict[str, Any]) -> None:
    if not (given.get("retain_graph") or (given.get("retain_graph") is None and given.get("create_graph"))):
        tracer.recorder.freed = True


def _backward(tracer: Tracer, args: Args, kwargs: Kwargs) -> None:
    """torch.autograd.backward: traced leaves gather the gradients, which the outside ones' `grad` gets at the end."""
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
    _run_backward(tracer, dict(zip(names, args)) | kwargs)


def _tensor_backward(tracer: Tracer, args: Args, kwargs: Kwargs) -> None:
    """Tensor.backward, which looks the other one up."""
    if (found := tracer.world.getattr(now.autograd, "backward")) is not BACKWARD:
        given = dict(zip(("self", "gradient", "retain_graph", "create_graph", "inputs"), args)) | kwargs
        rest = (given.get("gradient"), given.get("retain_graph"), given.get("create_graph", False))
        return tracer.call(found, (given["self"], *rest), {"inputs": given.get("inputs")})  # type: ignore[no-any-return]
    given = dict(zip(("tensors", "grad_tensors", "retain_graph", "create_graph", "inputs"), args))
    given |= {("grad_tensors" if name == "gradient" else name): value for name, value in kwargs.items()}
    _run_backward(tracer, given)


def _run_backward(tracer: Tracer, given: dict[str, Any]) -> None:
    world = tracer.world
    roots = _flat(given["tensors"])
    wanted = _flat(given.get("inputs"))
    before = {}
    with _asking(tracer, wanted):
        _check_engine_call(tracer, roots, "backward()")
        if given.get("grad_variables") is not None:
            _refuse("backward() with the retired argument grad_variables")
        leaves: list[Any] = list(_leaves(tracer, roots))
        if wanted and not all(map(_is_ours, wanted)):
            _refuse("backward() towards graph edges")
        if not all(tensors.known_leaf(world, one) for one in wanted):
            _refuse("backward() towards a tensor that is no leaf")
        for leaf in wanted or leaves:
            _without_hooks(world, leaf)
            held = tensors.getattr_tensor(world, leaf, "grad")
            if held is not None and (not isinstance(held, TracedTensor) or held.requires_grad):
                _refuse("backward() into a gradient that itself has a history")
            unwatched(setattr, leaf, "grad", held)
            before[id(leaf)] = held
        keywords: dict[str, Any] = {
            name: given[name] for name in ("grad_tensors", "retain_graph", "create_graph", "inputs") if name in given
        }
        world.torch_call(BACKWARD, (given["tensors"],), keywords)
    _note_freed(tracer, given)
    for leaf in wanted or leaves:
        gradient = leaf.grad
        if gradient is not before[id(leaf)] and world.outside(leaf) is not None:
            world.effects.store_slot(leaf, "grad", gradient)


def _histories(tracer: Tracer) -> dict[int, Any]:
    """The tensors whose graphs were made outside of the compiled function, by the leaves that stand for them."""
    inputs = (node.meta for node, _ in tracer.recorder.inputs if node.meta.get("history") is not None)
    return {id(meta["leaf"]): meta["example_value"] for meta in inputs}


def _ends(roots: list[Any]) -> Iterator[Any]:
    """The leaves that the roots' graphs lead to."""
    seen: set[Any] = set()
    pending = [root.grad_fn for root in roots if not is_leaf(root)]
    yield from (root for root in roots if root.requires_grad and is_leaf(root))
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is None:
            pending += [following for following, _ in node.next_functions if following is not None]
        else:
            yield leaf


def _leaves(tracer: Tracer, roots: list[Any]) -> Iterator[Any]:
    """The traced leaves that the roots' graphs lead to."""
    histories = _histories(tracer)
    for leaf in _ends(roots):
        if id(leaf) in histories:
            _refuse("backward() through a tensor whose graph was made outside of the compiled function")
        if not _is_ours(leaf):
            _refuse("backward() into a tensor that the capture does not know")
        tensors.known_leaf(tracer.world, leaf)
        yield leaf


_TENSORS_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _without_hooks(world: World, tensor: Any) -> None:
    """Guards that an outside tensor has no hooks: the engine at capture would not run them."""
    if (record := world.outside(tensor)) is None:
        return
    if id(tensor) in world.effects.hooked:
        _refuse("the gradient of a tensor that was given a hook before is computed")
    for name in _TENSORS_HOOKS:
        if getattr(record.real, name):
            _refuse("the gradient of a tensor with hooks is computed")
        world.guard("IS", Attribute(record.source, name), None)
    tensors.check_gradient_dtype(world, record)


# Hooks and flags of tensors.


def _tensor_and_hook(args: Args, kwargs: Kwargs) -> Args:
    if len(args) + len(kwargs) != 2 or kwargs.keys() - {"hook"}:
        _refuse("a hook is registered with other arguments")
    return (*args, *kwargs.values())


def _register_hook(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """Tensor.register_hook: on a tensor made inside, the capture's backward calls the interpreter."""
    tensor, hook = _tensor_and_hook(args, kwargs)
    _refuse_wrapper(tracer, tensor, "Tensor.register_hook()")
    if tracer.world.outside(tensor) is not None:
        return _register_later(tracer, register_hook, tensor, hook)
    if tensor.requires_grad and registers_later(tracer.world, tensor):
        return tracer.world.effects.register(register_hook, tensor, hook)
    if not tracer.assumptions.custom_gradients:
        with _asking(tracer, [tensor]):
            _refuse(f"Tensor.register_hook(): {tracer.assumptions.gradient_refused}")
    at_aten_level(tracer, "autograd-call", "Tensor.register_hook()")
    if tensor.requires_grad:
        called, last = _called(tracer, hook), next(iter(reversed(tracer.recorder.graph.nodes)))
        _note_user_code(tracer, None if called is None else Hook(tensor.node, last, called))
        tracer.recorder.user_reads += () if called is None else reads_of(called.function)
    return unwatched(methods.register_hook, tensor, Trampoline(tracer, hook))


def _called(tracer: Tracer, function: Any) -> Called | None:
    """What can be called again, natively; None where another call may have it otherwise."""
    if not isinstance(function, types.FunctionType):
        return None
    if tracer.world.outside(function) is not None:
        return Called(function)
    tracer.recorder.user_cells += [(cell, applications.content(cell)) for cell in function.__closure__ or ()]
    return applications.called(function, tracer.world.is_outside_cell)


def _register_later(tracer: Tracer, register: Any, tensor: Any, hook: Any) -> Any:
    """A hook on a tensor from outside is registered after the graph: only a backward after that can call it."""
    world = tracer.world
    world.requires_grad_matters = True
    if not tensors.requires_grad(world, tensor):
        return native(register, tensor, hook)  # which raises
    if any(world.record_of(hooks) is not None for hooks in _hooks_of(world, tensor)):
        raise GraphBreak("autograd-call", "a tensor is given a hook after one of its hooks was removed or looked at")
    world.effects.hooked[id(tensor)] = tensor, version_of(tensor)
    return world.effects.register(register, tensor, hook)


def _hooks_of(world: World, tensor: Any) -> list[Any]:
    """The dictionaries that an outside tensor keeps its hooks in."""
    real: Any = world.outside(tensor).real  # type: ignore[union-attr]
    return [hooks for name in _TENSORS_HOOKS if (hooks := getattr(real, name)) is not None]


def _remove_hook(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """RemovableHandle.remove. Where the hook is registered after the graph, or another one of the same tensor is, it is
    removed after that."""
    (handle,) = args
    effects = tracer.world.effects
    if registration(handle) is None:
        record = tracer.world.outside(handle)
        effects.removed_inside += record is None
        later = (hooks for tensor, _ in effects.hooked.values() for hooks in _hooks_of(tracer.world, tensor))
        if record is None or all(hooks is not record.real.hooks_dict_ref() for hooks in later):
            return tracer.inline(RemovableHandle.remove, args, kwargs)  # type: ignore[arg-type]
    effects.defer(RemovableHandle.remove, (handle,), {}, changes="the hooks of a tensor")
    return None


def _register_accumulate_hook(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """Tensor.register_post_accumulate_grad_hook on a leaf from outside."""
    tensor, hook = _tensor_and_hook(args, kwargs)
    _refuse_wrapper(tracer, tensor, "Tensor.register_post_accumulate_grad_hook()")
    if tracer.world.outside(tensor) is None or not is_leaf(tensor):
        with _asking(tracer, [tensor]):
            _refuse("Tensor.register_post_accumulate_grad_hook() of a tensor made inside")
    return _register_later(tracer, methods.register_post_accumulate_grad_hook, tensor, hook)


def _requires_grad(tracer: Tracer, tensor: Any, args: Args, kwargs: Kwargs) -> Any:
    """Tensor.requires_grad_ on a tensor made inside, or where it changes nothing."""
    wanted = (*args, *kwargs.values(), True)[0]
    if not isinstance(wanted, bool) or len(args) + len(kwargs) > 1:
        raise GraphBreak("tensor-attribute", "Tensor.requires_grad_() of what is no bool")
    if tracer.world.outside(tensor) is not None:
        tracer.world.requires_grad_matters = True
        if tensors.requires_grad(tracer.world, tensor) is not bool(wanted):
            raise GraphBreak("tensor-attribute", "Tensor.requires_grad_() changes an input")
        return tensor
    if tracer.recorder.level != "aten":
        return tracer.world.torch_call(torch._C.TensorBase.requires_grad_, (tensor, *args), kwargs)
    if isinstance(tensor, TracedTensor):
        tracer.recorder.identity_asked = True  # `requires_grad` tells of it
        tensor.made_leaf = bool(wanted) and is_leaf(tensor)
    return unwatched(torch._C.TensorBase.requires_grad_, tensor, *args, **kwargs)


def _retain_grad(tracer: Tracer, tensor: torch.Tensor, args: Args, kwargs: Kwargs) -> None:
    """Tensor.retain_grad. A backward inside keeps the gradient in the traced tensor. One outside would have to reach a
    tensor that leaves the graph through the graph's inside: where there is one, the graph is cut here."""
    world, keep_gradient = tracer.world, torch._C.TensorBase.retain_grad
    world.requires_grad_matters = True
    if not tensors.requires_grad(world, tensor):
        return native(keep_gradient, tensor)  # type: ignore[no-any-return]  # which raises
    _refuse_wrapper(tracer, tensor, "Tensor.retain_grad()")
    if world.outside(tensor) is not None:
        if not tensors.known_leaf(world, tensor):
            world.effects.hooked[id(tensor)] = tensor, version_of(tensor)
            world.effects.defer(keep_gradient, (tensor,), {}, changes="the hooks of a tensor")
        return None
    if registers_later(world, tensor):
        return world.effects.defer(keep_gradient, (tensor,), {}, changes="the hooks of a tensor")
    if tracer.recorder.level != "aten":
        return world.torch_call(keep_gradient, (tensor,), {})  # type: ignore[no-any-return]
    if not tracer.assumptions.custom_gradients:
        with _asking(tracer, [tensor]):
            _refuse(f"Tensor.retain_grad(): {tracer.assumptions.gradient_refused}")
    tracer.recorder.retains = True
    return unwatched(keep_gradient, tensor)  # type: ignore[no-any-return]


_A_VIEW = torch.empty(1, device="cpu")[:]


def _detach(tracer: Tracer, tensor: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
    """Tensor.detach_: of an input with a gradient it changes the program's tensor; of a view it is an error."""
    world, detach = tracer.world, torch._C.TensorBase.detach_
    if args or kwargs:
        return native(detach, torch.empty(0, device="cpu"), *args, **kwargs or {})  # which raises
    _refuse_wrapper(tracer, tensor, "Tensor.detach_()")
    outside = world.outside(tensor) is not None
    if torch.is_inference_mode_enabled():
        return tensor if outside else world.torch_call(detach, (tensor,), {})
    if tensors.guarded_fact(world, tensor, "_is_view()", torch._C.TensorBase._is_view):
        return native(detach, _A_VIEW)  # which raises
    if not outside:
        if world.recorder.level == "torch" or not tensor.requires_grad or getattr(tensor, "node", None) is None:
            return world.torch_call(detach, (tensor,), {})
        held = world.torch_call(torch._C.TensorBase.detach, (tensor,), {})
        world.torch_call(detach, (tensor,), {})
        world.recorder.rebinds("a tensor that leaves its history")
        tensor.node = held.node  # for gradients of gradients the graph runs again: there too it has no history
        return tensor
    world.requires_grad_matters = True
    if tensors.requires_grad(world, tensor):
        raise GraphBreak("tensor-attribute", "Tensor.detach_() changes an input")
    return tensor


METHODS: dict[str, Callable[[Any, Any, Args, Kwargs], Any]] = {
    "detach_": _detach,
    "requires_grad_": _requires_grad,
    "retain_grad": _retain_grad,
}


# Hooks on saved tensors.


def _see_saved(tracer: Tracer, args: Args, kwargs: Kwargs) -> None:
    """What `with saved_tensors_hooks(pack, unpack)` enters: PyTorch's engine calls the interpreter, with what it saves
    now and when the backward is recorded."""
    at_aten_level(tracer, "autograd-call", "torch.autograd.graph.saved_tensors_hooks")
    if not tracer.assumptions.custom_gradients:
        reason = tracer.assumptions.gradient_refused
        raise GraphBreak("autograd-call", f"saved_tensors_hooks, whose unpacking stays outside: {reason}")
    world, recorder, push = tracer.world, tracer.recorder, torch._C._autograd._push_saved_tensors_default_hooks
    _message_of_forbidding(tracer, args, kwargs)
    native(push, *(_OfSaved(tracer, hook) for hook in args))
    pack, unpack = (_called(tracer, hook) for hook in args)
    saving = None
    if pack is not None and unpack is not None:
        saving = Saving(pack, unpack, partial(as_read, reads_of(pack.function)), _last(recorder.graph))
        recorder.user_reads += reads_of(unpack.function)
    world.disablers.append(SeesSaved(saving))
    world.repeats.enabled = False
    _note_user_code(tracer, saving)


class _OfSaved(Trampoline):
    """A function that is called again where the forward is, but if it draws random numbers: those are drawn already."""

    __slots__ = ()

    def __call__(self, *args: object, **kwargs: object) -> object:
        recorder = self.tracer.recorder
        last = _last(recorder.graph)
        result = super().__call__(*args, **kwargs)
        if any(node.meta.get("random") for node in _behind(last, recorder.graph)):
            recorder.user_gradients = None
        return result


def _close(tracer: Tracer, kind: type) -> None:
    contexts = tracer.world.disablers
    if not contexts or type(contexts[-1]) is not kind:
        raise GraphBreak("open-context", "a context of saved tensors that was entered outside is left")
    kept = contexts.pop()
    native(kept.__exit__)
    if kind is SeesSaved and kept.saving is not None:
        kept.saving.last = _last(tracer.recorder.graph)


def _forbid_saved(tracer: Tracer, args: Args, kwargs: Kwargs) -> None:
    """torch._C._autograd._saved_tensors_hooks_disable, which also leaves such a context within another."""
    (message,) = (*args, *kwargs.values())
    if (contexts := tracer.world.disablers) and type(contexts[-1]) is Forbids and contexts[-1].before == message:
        return _close(tracer, Forbids)
    if guard_saved_hooked(tracer.world):
        raise GraphBreak("autograd-call", "hooks on saved tensors are forbidden while there are some")
    before = _message_of_forbidding(tracer, args, kwargs)
    contexts.append(Forbids(before))
    native(torch._C._autograd._saved_tensors_hooks_disable, message)


def _message_of_forbidding(tracer: Tracer, args: Args, kwargs: Kwargs) -> str | None:
    """Why there may be no hooks on saved tensors now."""
    message = native(ask := torch._C._autograd._saved_tensors_hooks_get_disabled_error_message)
    if not any(type(one) is Forbids for one in tracer.world.disablers):
        tracer.world.guard_answer(ask, (), message)
    return message  # type: ignore[no-any-return]


def _set_anomaly(tracer: Tracer, args: Args, kwargs: Kwargs) -> None:
    """torch._C.set_anomaly_enabled where everything stays as it is."""
    for wanted, ask in zip((*args, *kwargs.values()), (torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled)):
        tracer.world.guard_answer(ask, (), answer := native(ask))
        if answer != wanted:
            raise GraphBreak("autograd-call", "anomaly detection is turned on or off")


ROWS: list[tuple[Any, Row]] = [
    (torch._C.set_anomaly_enabled, _set_anomaly),
    (torch.detach_, lambda tracer, args, kwargs: _detach(tracer, args[0], args[1:], kwargs)),
    (torch._C._autograd._push_saved_tensors_default_hooks, _see_saved),
    (torch._C._autograd._pop_saved_tensors_default_hooks, lambda tracer, args, kwargs: _close(tracer, SeesSaved)),
    (torch._C._autograd._saved_tensors_hooks_disable, _forbid_saved),
    (torch._C._autograd._saved_tensors_hooks_enable, lambda tracer, args, kwargs: _close(tracer, Forbids)),
    (torch._C._autograd._saved_tensors_hooks_get_disabled_error_message, _message_of_forbidding),
]

_OF_SAVED = ("saved_tensors_hooks.", "save_on_cpu.", "disable_saved_tensors_hooks")


def call_graph_module(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """Python functions of torch.autograd.graph."""
    if fn.__code__.co_qualname.startswith(_OF_SAVED):
        return tracer.inline(fn, args, kwargs)
    with _asking(tracer, tree_leaves((args, kwargs))):
        _refuse(f"torch.autograd.graph.{fn.__qualname__}")


POLICIES: dict[str, Callable[[Any, Any, Args, Kwargs], Any]] = {
    "torch.autograd.function": call_function_machinery,
    "torch.autograd.graph": call_graph_module,
}

NAMED_ROWS: dict[tuple[str, str], Row] = {
    ("torch.autograd.function", "Function.apply"): _apply,
    ("torch.autograd", "grad"): _grad,
    ("torch.autograd", "backward"): _backward,
    ("torch._tensor", "Tensor.backward"): _tensor_backward,
    ("torch._tensor", "Tensor.register_hook"): _register_hook,
    ("torch.utils.hooks", "RemovableHandle.remove"): _remove_hook,
    ("torch._tensor", "Tensor.register_post_accumulate_grad_hook"): _register_accumulate_hook,
}
