"""Recording: runs torch functions on traced tensors and writes down the operators, as an FX graph.

Takes real inputs (or sizes) and calls of torch functions; gives a `torch.fx.Graph` at one of two levels:
"aten"   one call_function node for each ATen OpOverload that reaches the dispatcher below autograd, autocast and
    composite operators;
"torch"  one call_function / call_method node for each call, as the user wrote it; dispatch below only computes shapes.
Always holds: nodes are in execution order; in-place operators and views are recorded as they are (the functionalise
pass resolves them); every aten-level node has meta["type"] (TensorType, a Dim, None, or a tuple of these) and
meta["location"]. Symbolic sizes stand in aten-level arguments as `Expr`, in torch-level arguments as nodes computed
from the size placeholders.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NoReturn

from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from fusewright._native import isinstance
from fusewright.base.location import Location
from fusewright.base.own_methods import operators_replaced
from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.base.signals import GraphBreak, Retry, Signal, untraced
from fusewright.graph.builder import is_surely_dense
from fusewright.graph.known_values import known_value
from fusewright.graph.nodes import add_call, add_placeholder
from fusewright.operators import derive, eager_dtypes, shape_rules, size_checks
from fusewright.operators.meta_kernels import Memo, MetadataChanged, infer_once, simplified, type_of
from fusewright.operators.schema import OperatorFacts, argument, facts, written_by
from fusewright.record import composites, data_sizes, draws, out_tensors, refusals, scalar_operands, traced_tensor
from fusewright.record.applications import UserCode, note_saved
from fusewright.record.draws import Draws
from fusewright.record.forward_lines import ForwardLines
from fusewright.record.special_operators import SPECIAL, UNINITIALISED, filler_of, is_symbolic_in_c
from fusewright.record.torch_level import AS_THEY_ARE, TorchLevel
from fusewright.record.traced_tensor import NonLeaf, TracedTensor, is_leaf, make_traced, make_view
from fusewright.record.unknown_shape import UnknownShape, make_unknown, result_types
from fusewright.sizes.expressions import Dim, Expr, Symbol
from fusewright.sizes.interfaces import Speculation
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.strides import symbolic_strides
from fusewright.sizes.symint import dim_of, size_of
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

MAX_DIMENSIONS = 64
"""Most of PyTorch's operators take no more."""
_OWN = frozenset({"aten", "prim", "prims", "fusewright"})
"""Namespaces of operators whose gradients are known below Python: they see the program's own grad mode."""
Level = Literal["aten", "torch"]
aten = torch.ops.aten
GRAD, BACKWARD = torch.autograd.grad, torch.autograd.backward  # a program may put others in their place


class _RecordingMode(TorchDispatchMode):
    """Sends every operator, factory functions included, to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo at the first operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return NotImplemented if traced_tensor.meets_others(types) else self.recorder.dispatch(func, args, kwargs or {})


class Recorder:
    """Records one graph.

    level      "aten" or "torch" (see the head of this file)
    env        the symbolic sizes of the capture; None when every size is static
    location   called for the user's stack (outermost first) at each call; its value goes to node.meta["location"]

    Set by the capture as it goes: user_gradients (custom autograd functions and hooks that have a part in the
    gradients; None when one of them cannot be called again), user_reads (what these look up in the backward), freed
    (the program has run a backward that frees its graph), wrapped (tensors that wrap others enter or leave with a
    history), recompute (nodes recorded now are to be computed again by the backward: meta["recompute"]), draws
    (dropout draws from the kernels' own generator; None: from PyTorch's), unknown_shapes (results of unknown shape
    are recorded as long as nothing reads it), changes (arguments that the last call wrote to; wrote: others did).
    Options: data_shapes, data_numbers (sizes of data), changes_level.
    """

    def __init__(
        self,
        level: Level = "aten",
        env: ShapeEnv | None = None,
        location: Callable[[], tuple[Location, ...]] | None = None,
    ) -> None:
        self.level: Level = level
        self.env = env
        self.location = location or (lambda: ())
        self.graph = torch.fx.Graph()
        self.inputs: list[tuple[torch.fx.Node, object]] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.submodules: dict[str, torch.fx.GraphModule] = {}
        self.op_count = self.user_code = self.changes = self._depth = 0
        self._constant_nodes: dict[int, TracedTensor] = {}
        self._torch_level = TorchLevel(self)
        self._last_placeholder: torch.fx.Node | None = None
        self.has_floats = False  # run-time floats were met: arguments are looked through for them
        self._inferred: Memo = {}
        self.here: tuple[Location, ...] = ()
        self.lines = ForwardLines()
        self._grad_mode = True  # as it was when the present call began
        self.user_gradients: list[UserCode] | None = []
        self.user_reads: list[Any] = []  # capture.border.looked_up.Read
        self.user_cells: list[Any] = []  # of hooks, with what they held
        self.saved: dict[torch.fx.Node, int] = {}  # by autograd (applications.note_saved)
        self.freed = self.wrapped = self.recompute = self.retains = self.cast = False
        self._decomposes = env is not None and not operators_replaced()
        # drew: this call has drawn random numbers; drawn: others; resolving: an overload is looked for
        self.drew = self.drawn = self.wrote = self.resolving = self.identity_asked = False
        self.refuse_unasked: Callable[[Recorder, Any, Any], None] | None = None  # tensor classes override functions
        self.draws: Draws | None = None
        self.data_shapes = self.data_numbers = self.changes_level = self.unknown_shapes = False
        self.ask_number: Any = None  # an AskNumber
        self.read_sizes: dict[torch.fx.Node, tuple[int, object]] = {}  # (tensor's version, what item gave)
        self.speculation: Speculation | None = None  # set by the capture
        # collectives: what the program holds of those not waited for, and what waiting does; results after waiting
        self.collectives: list[tuple[object, Callable[[], None], bool]] = []
        self.waited: dict[torch.fx.Node, TracedTensor] = {}

    @property
    def custom_gradients(self) -> bool:
        """Whether a custom autograd function or a hook has a part in the gradients."""
        return self.user_gradients is None or bool(self.user_gradients)

    @property
    def symbolic(self) -> bool:
        env = self.env
        return env is not None and bool(env.symbols or env.unbacked or self.data_shapes or self.data_numbers)

    def owns(self, value: object) -> bool:
        """Whether `value` is a traced tensor of this recorder."""
        return issubclass(type(value), TracedTensor) and value.recorder is self  # type: ignore[attr-defined]

    # --- inputs

    def input(
        self,
        tensor: torch.Tensor,
        name: str,
        symbolic_dims: Mapping[int, Expr] | None = None,
        symbolic_steps: Mapping[int, Dim] | None = None,
        requires_grad: bool | None = None,
    ) -> TracedTensor:
        """A placeholder for a real tensor. `symbolic_dims` gives the sizes that are symbolic; strides that are products
        of them follow; `symbolic_steps`: symbols for strides that are not."""
        if tensor.ndim > MAX_DIMENSIONS:
            raise GraphBreak("unsupported-tensor", f"a tensor of {tensor.ndim} dimensions")
        shape: tuple[Dim, ...] = tuple(tensor.shape)
        stride: tuple[Dim, ...] = tuple(tensor.stride())
        if symbolic_dims or symbolic_steps:
            shape = tuple((symbolic_dims or {}).get(axis, size) for axis, size in enumerate(shape))
            stride = symbolic_strides(tensor, shape, symbolic_steps or {})
        if requires_grad is None:
            requires_grad = tensor.requires_grad
        type_ = TensorType(shape, stride, tensor.dtype, tensor.device, requires_grad, 0)
        node = self._placeholder(name, tensor)
        node.meta["type"] = type_
        inference = tensor.is_inference()
        if not inference and not torch.is_inference_mode_enabled() and (not requires_grad or is_leaf(tensor)):
            node.meta["leaf"] = traced = make_traced(self, node, type_, requires_grad=requires_grad)
        else:
            with torch.inference_mode(inference), torch.enable_grad():
                node.meta["leaf"] = traced = make_traced(
                    self, node, type_, requires_grad=requires_grad and not inference
                )
                if requires_grad and not is_leaf(tensor):
                    traced = NonLeaf.of(traced)
                    traced.node, traced.tensor_type = node, type_
        node.meta["history"] = traced.grad_fn
        traced.input_storage = traced.is_input = True
        traced.original_class = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor
        node.meta["example_value"] = traced
        return traced

    def history_changed(self, node: torch.fx.Node) -> bool:
        """Whether the program wrote to this input so that autograd took note: it has another gradient function now."""
        traced = node.meta.get("example_value")
        return isinstance(traced, TracedTensor) and traced.requires_grad and traced.grad_fn is not node.meta["history"]

    def size_input(self, expr: Expr, name: str) -> torch.SymInt:
        """A placeholder for a symbolic size. At aten level it is named as the symbol prints, so that the graph's code
        runs as it prints."""
        node = self._placeholder(expr.name if isinstance(expr, Symbol) else name, expr)
        node.meta["type"] = expr
        self._torch_level.sizes[expr] = node
        size = size_of(expr, self.env)
        node.meta["example_value"] = size
        return size  # type: ignore[return-value]

    def tangent(self, output: TracedTensor, name: str) -> TracedTensor:
        """A placeholder for the gradient of `output`, of its type; row-major where it has gaps or is an argument."""
        type_ = replace(output.tensor_type, offset=0, requires_grad=False)
        if output.is_input or not is_surely_dense(type_, self.env):
            type_ = replace(type_, stride=contiguous_strides(type_.shape))
        node = self._placeholder(name, None)
        node.meta.update(type=type_, tangent=True)
        traced = make_traced(self, node, type_)
        node.meta["example_value"] = traced
        return traced

    def _placeholder(self, name: str, value: object) -> torch.fx.Node:
        # A new input may be met at any time; placeholders nevertheless stand at the head, in the order of `inputs`.
        last = self._last_placeholder
        with (
            self.graph.inserting_before(next(iter(self.graph.nodes), None))
            if last is None
            else self.graph.inserting_after(last)
        ):
            node = add_placeholder(self.graph, name)
        self._last_placeholder = node
        node.meta["location"] = self.location()
        self.inputs.append((node, value))
        return node

    def known_value(self, tensor: object) -> torch.Tensor | None:
        """The value of a tensor that the program made from Python data alone; None when it may differ from call to
        call."""
        if type(tensor) is not TracedTensor or tensor.recorder is not self or self.level != "aten":
            return None
        return known_value(tensor.node, self.constants)

    def read(self, tensor: object, most: int = 64) -> torch.Tensor | None:
        """The value of a tensor that the program reads: known, or taken for granted where it has `most` elements."""
        value = self.known_value(tensor)
        known = value is not None or self.speculation is None or not self.owns(tensor)
        return value if known else self.speculation.value(tensor, most)  # type: ignore[union-attr]

    def constant(self, tensor: torch.Tensor) -> TracedTensor:
        """A get_attr node for a real tensor that is part of the program. The tensor is kept in `constants`."""
        if tensor.requires_grad and torch.is_grad_enabled():
            raise GraphBreak(
                "operator-failed", "a tensor that requires a gradient reached an operator without being an input"
            )
        if is_traceable_wrapper_subclass(tensor):
            raise GraphBreak("unsupported-tensor", f"a {type(tensor).__qualname__} reached an operator")
        found = self._constant_nodes.get(id(tensor))
        if found is not None:
            return found
        name = f"constant_{len(self.constants)}"
        self.constants[name] = tensor
        node = self.graph.get_attr(name)
        type_ = replace(type_of(tensor), requires_grad=False)
        node.meta.update(type=type_, location=self.here)
        traced = make_traced(self, node, type_)
        traced.input_storage = traced.is_input = True
        node.meta["example_value"] = traced
        self._constant_nodes[id(tensor)] = traced
        return traced

    # --- calls

    def lacks_form(self, code: str, detail: str) -> NoReturn:
        """A call that no node stands for at this level. ATen level may have one (`changes_level`)."""
        if self.changes_level and self.level == "torch":
            raise Retry(lacks_form=True)
        raise GraphBreak(code, detail)

    @contextmanager
    def recording(self, decompositions: bool = True) -> Iterator[None]:
        """Records whatever runs inside, factory functions included. Not needed around `call`. `decompositions`: with
        symbolic sizes PyTorch's Python versions of composite operators stand for those in C++, which need numbers."""
        if self._depth:
            with nullcontext() if decompositions else torch._C._DisablePythonDispatcher():
                return (yield)
        self._begin()
        try:
            with _RecordingMode(self):
                if decompositions and self.symbolic and self._decomposes:
                    with torch._C._EnablePythonDispatcher():
                        yield
                else:
                    yield
        finally:
            self._depth -= 1

    def _begin(self) -> None:
        self._depth += 1
        self.here, self.wrote, self.changes = self.location(), self.wrote or self.changes > 0, 0
        self._grad_mode = torch.is_grad_enabled()
        if self._grad_mode:
            self.lines.note(self.here)

    def call(
        self, fn: Callable[..., object], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run a torch function, method or OpOverload on traced arguments, recording it; returns what it returns,
        traced.

        Raises GraphBreak when it cannot be traced, whatever the cause: run eagerly it gives the true result or error.
        """
        kwargs = kwargs or {}
        self.op_count += 1
        # A torch-level node stands before what its shape computation adds, and holds the arguments as they are now.
        node = self._torch_level.call(fn, args, kwargs) if self.level == "torch" and not self._depth else None
        fn = refusals.called(self, fn, args, kwargs)
        self.drawn, self.drew = self.drawn or self.drew, False
        watched = out_tensors.watch(self.graph, fn, kwargs) if self.level == "aten" and "out" in kwargs else None
        try:
            if self._depth or self.symbolic:
                with self.recording(not is_symbolic_in_c(fn)):
                    result = fn(*args, **kwargs)
            else:  # the same, without the cost of a generator
                self._begin()
                try:
                    with _RecordingMode(self):
                        result = fn(*args, **kwargs)
                finally:
                    self._depth = 0
        except Signal:
            raise
        except Exception as error:
            untraced(_name(fn), error)
        if watched is not None:
            watched.check_written(_name(fn))
        if node is not None:
            self._torch_level.adopt(result, node, self.drew, self.changes > 0)
        return result

    def dispatch(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Record one operator (the common path of `__torch_dispatch__`) and give its results as traced tensors."""
        if not isinstance(func, OpOverload):
            raise GraphBreak("operator-failed", f"the higher-order operator {func} is not traced")
        if self.refuse_unasked is not None:
            self.refuse_unasked(self, args, kwargs)
        known = facts(func)
        self.changes += len(written_by(func, args))
        self.drew |= known.random
        if func in scalar_operands.OF_NUMBERS and isinstance(args[0], (bool, int, float, complex)):
            return scalar_operands.record_number(self, func, args[0], kwargs)
        special = SPECIAL.get(func)
        if special is not None and (found := special(self, args, kwargs)) is not NotImplemented:
            return found
        if self.lines.active:
            self.here = self.lines.stack(self.here)
        if known.foreach:  # one operator for each tensor: scheduling finds out what the lists have in common
            with composites.counting_writes(func, args), _RecordingMode(self):
                return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        drawn = NotImplemented if self.draws is None else draws.record(self.draws, self, func, args, kwargs)
        if drawn is not NotImplemented:
            return drawn
        if self.has_floats and scalar_operands.holds_float(args, kwargs):
            return scalar_operands.record(self, func, args, kwargs)
        if known.composite:  # reached only under inference_mode, where PyTorch does not break composite operators down
            with composites.as_called(self, func, args), _RecordingMode(self):
                return composites.parts(func)(*args, **kwargs)
        asks = self.data_shapes or self.speculation is not None
        if asks and (found := data_sizes.record(self, func, args, kwargs)) is not NotImplemented:
            return found
        if self.symbolic:
            args, kwargs = scalar_operands.with_fixed_numbers(func, args, kwargs)
        of_unknown_shape = self._types_of_unknown_shape(func, args, kwargs)
        node_args, type_args = self._convert_sequence(args)
        node_kwargs: dict[str, object] = {}
        type_kwargs: dict[str, object] = {}
        for name, value in kwargs.items():
            node_kwargs[name], type_kwargs[name] = self.convert(value)
        if of_unknown_shape is not None:
            return self._unknown_results(func, of_unknown_shape, node_args, node_kwargs)
        try:
            result_type = self.infer(func, type_args, type_kwargs)
        except MetadataChanged as error:
            return out_tensors.lay_out_again(self, func, args, kwargs, error)
        node = None
        if self.level == "torch":
            if not self._depth:
                self.lacks_form("untraceable-call", f"native code calls {_name(func)} by itself")
        else:
            node = add_call(self.graph, func, tuple(node_args), node_kwargs)
            meta = node.meta
            meta.update(type=result_type, location=self.here)
            if known.random:
                meta["random"] = True
            # The gradient of an extension's operator is an autograd function, whose forward runs without autograd.
            if not torch.is_grad_enabled() and not (self._grad_mode and func.namespace not in _OWN):
                meta["no_grad"] = True
            if self.recompute:
                meta["recompute"] = True
            note_saved(self.saved, func, args, node)
        result = self._results(known, func, args, kwargs, node, result_type)
        if func in UNINITIALISED and node is not None and (filler := filler_of(result)) is not None:
            self.dispatch(aten.fill_.Scalar, (result, filler), {})
        return result

    def rebinds(self, how: str) -> None:
        """Told before a traced tensor comes to stand for another node."""

    def record(self, func: OpOverload, args: Sequence[object], result_type: object) -> Any:
        """Record an operator whose results are known to be of these types (its shapes cannot be asked for)."""
        self.here = self.location()
        node_args, _ = self._convert_sequence(args)
        node = add_call(self.graph, func, tuple(node_args))
        node.meta.update(type=result_type, location=self.here, **({"random": True} if facts(func).random else {}))
        return self._results(facts(func), func, tuple(args), {}, node, result_type)

    def node_of(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result_type: object
    ) -> torch.fx.Node:
        """The node of an aten-level operator whose arguments are nodes already."""
        node = add_call(self.graph, func, args, kwargs)
        node.meta.update(type=result_type, location=self.here)
        if not torch.is_grad_enabled():
            node.meta["no_grad"] = True
        return node

    def submodule(self, module: torch.fx.GraphModule) -> torch.fx.Node:
        """A get_attr node for a graph that an operator of a torch-level graph takes."""
        name = f"body_{len(self.submodules)}"
        self.submodules[name] = module
        return self.graph.get_attr(name)

    def record_call(
        self, fn: Callable[..., object], args: Sequence[object], result_types: Sequence[TensorType]
    ) -> list[object]:
        """Record a torch-level call whose results, a tuple, are known to be of these types."""
        made = [make_traced(self, None, kind) for kind in result_types]
        self._torch_level.record(fn, args, tuple(made))
        return list(made)

    def finish(self, outputs: Sequence[object]) -> torch.fx.Graph:
        """End the graph: a flat output tuple of traced tensors, sizes, ints or None. Placeholders that nothing uses
        stay, with meta["unused"]. Returns the linted graph."""
        values: list[object] = []
        kinds: list[object] = []
        for value in outputs:
            if self.level == "torch" and isinstance(value, torch.SymInt):
                values.append(self._torch_level.size(dim_of(value)))
                kinds.append(dim_of(value))
            elif isinstance(value, UnknownShape):
                values.append(value.node)
                kinds.append(value.tensor_type)
            else:
                node_value, kind = self.convert(value)
                values.append(node_value)
                kinds.append(kind)
        if self.level == "torch" and self.env is not None:
            self._torch_level.check(self.env.assertions())
        output = self.graph.output(tuple(values))  # type: ignore[arg-type]
        own = tuple(isinstance(one, TracedTensor) and one.viewed is None for one in outputs)
        output.meta.update(type=tuple(kinds), own=own, location=self.location(), env=self.env)
        for node in self.graph.find_nodes(op="placeholder"):
            if not node.users and not isinstance(node.meta["type"], Expr):
                node.meta["unused"] = True
        self.graph.lint()
        return self.graph

    def _unknown_results(
        self, func: OpOverload, types: tuple[TensorType, ...], args: list[object], kwargs: dict[str, object]
    ) -> object:
        node, one = add_call(self.graph, func, tuple(args), kwargs), len(types) == 1
        node.meta.update(type=types[0] if one else types, location=self.here)
        items = [node] if one else [self._getitem(node, index, item) for index, item in enumerate(types)]
        made = [make_unknown(self, item, type_, func) for item, type_ in zip(items, types, strict=True)]
        return made[0] if one else tuple(made)

    # --- dispatch, step by step

    def _types_of_unknown_shape(
        self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[TensorType, ...] | None:
        """The result types of what is recorded with a shape that nobody knows; raises GraphBreak for what cannot be
        recorded."""
        refusals.check_memory(self, func, args, kwargs)
        refused = refusals.check(func, args, kwargs, self.level if self._grad_mode else None)
        if refused is None:
            return None
        types = result_types(func, args, kwargs, f"unknown_{len(self.graph.nodes)}") if self.unknown_shapes else None
        if types is None:
            raise GraphBreak(*refused)
        return types

    def record_as(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result_type: Any
    ) -> tuple[torch.fx.Node | None, Any]:
        """The node of an operator whose result's type the caller knows (none within a torch-level call), and its
        results."""
        if self.level == "torch":
            return None, self._results(facts(func), func, args, kwargs, None, result_type)
        node_args, _ = self._convert_sequence(args)
        node_kwargs = {name: self.convert(value)[0] for name, value in kwargs.items()}
        node = self.node_of(func, tuple(node_args), node_kwargs, result_type)
        return node, self._results(facts(func), func, args, kwargs, node, result_type)

    def _convert_sequence(self, values: Sequence[object]) -> tuple[list[object], list[object]]:
        nodes, kinds = list[object](), list[object]()
        for value in values:
            if type(value) is TracedTensor and value.recorder is self:
                nodes.append(value.node)
                kinds.append(value.tensor_type)
            else:
                node, kind = self.convert(value)
                nodes.append(node)
                kinds.append(kind)
        return nodes, kinds

    def convert(self, value: object) -> tuple[object, object]:
        """(as a node argument, as a rule's argument)."""
        if type(value) in AS_THEY_ARE:
            return value, value
        if isinstance(value, torch.Tensor):
            if not isinstance(value, TracedTensor):
                value = self.constant(value)
            elif value.recorder is not self:
                raise GraphBreak("operator-failed", "a tensor of another capture")
            elif isinstance(value, UnknownShape):
                raise Retry(unknown_shapes=False)
            return value.node, value.tensor_type
        if isinstance(value, (list, tuple)):
            nodes, kinds = self._convert_sequence(value)
            return nodes, kinds
        if isinstance(value, torch.SymInt):
            d = dim_of(value)
            return d, d
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            guard = value.node.guard_float if isinstance(value, torch.SymFloat) else value.node.guard_bool
            number = guard("", 0)
            return number, number
        if isinstance(value, torch.Generator):
            raise GraphBreak("operator-failed", "an explicit random generator")
        return value, value

    def infer(self, func: OpOverload, args: list[object], kwargs: dict[str, object]) -> object:
        if self.env is not None and self.env.has_equalities:
            args, kwargs = simplified(args, self.env), simplified(kwargs, self.env)  # type: ignore[assignment]
        try:
            size_checks.check(self.env, func, args, kwargs)
            found = shape_rules.by_rule(func, args, kwargs, self.env)
            if found is NotImplemented:
                device = shape_rules.result_device(args, kwargs)
                found = infer_once(self._inferred, func, args, kwargs, device, self.env)
                found = derive.refined(func, args, kwargs, self.env, found)
        except (Signal, MetadataChanged):
            raise
        except Exception as error:
            untraced(func, error)
        disagreement = eager_dtypes.disagreement(func, args, kwargs, found)
        if disagreement:
            raise GraphBreak("operator-failed", f"{func}: {disagreement}")
        return found

    def _results(
        self,
        known: OperatorFacts,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        node: torch.fx.Node | None,
        result_type: object,
    ) -> object:
        returned = known.returned
        if not returned:
            return None
        if len(returned) == 1 and not isinstance(result_type, tuple):
            alias = returned[0]
            if alias is not None and alias[0] == "same":
                return argument(func, args, kwargs, alias[1])
            if not isinstance(result_type, TensorType):
                return self._plain_result(result_type)
            if alias is None:
                return make_traced(self, node, result_type)
            return make_view(self, node, result_type, argument(func, args, kwargs, alias[1]))  # type: ignore[arg-type]
        assert isinstance(result_type, tuple)
        results: list[object] = []
        for index, item in enumerate(result_type):
            alias = returned[index] if len(returned) == len(result_type) else None
            if alias is not None and alias[0] == "same":
                results.append(argument(func, args, kwargs, alias[1]))
            elif isinstance(item, TensorType):
                part = None if node is None else self._getitem(node, index, item)
                if known.parts_of is not None or (alias is not None and alias[0] == "view"):
                    place = known.parts_of if known.parts_of is not None else alias[1]  # type: ignore[index]
                    viewed = argument(func, args, kwargs, place)
                    results.append(make_view(self, part, item, viewed))  # type: ignore[arg-type]
                else:
                    results.append(make_traced(self, part, item))
            else:
                results.append(self._plain_result(item))
        return results if len(returned) == 1 else tuple(results)

    def _plain_result(self, value: object) -> object:
        return size_of(value, self.env) if isinstance(value, Expr) else value

    def _getitem(self, node: torch.fx.Node, index: int, type_: TensorType) -> torch.fx.Node:
        item = add_call(self.graph, operator.getitem, (node, index))
        item.meta.update(type=type_, location=self.here)
        return item


def _name(fn: object) -> str:
    return getattr(fn, "__qualname__", None) or str(fn)
