"""What capture hands to the driver: one frame, captured up to its end or its first graph break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch.fx

from fusewright.base.location import Location
from fusewright.base.records import dataclass, field
from fusewright.capture.guards import Guard
from fusewright.capture.guards.sources import Source
from fusewright.record.applications import UserCode

Places = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Break:
    """A graph break: `code` is a row of the catalogue in `fusewright.base.errors`; `stack` is outermost first."""

    code: str
    detail: str
    stack: tuple[Location, ...]


class ViewCall(NamedTuple):
    """A call of a view operator: the arguments after the first (their sizes may be symbolic). element: of the result,
    if that is a list; call: its number, by which outputs that have a call in common share its result; no_grad: it was
    made under no_grad; leaf: the view was told to require a gradient."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    element: int | None
    call: int
    no_grad: bool
    leaf: bool


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """How one of the frame's outputs is made of what the graph returns, outside of the autograd function that runs the
    graph.

    base      ("output", position among the graph's outputs) or ("input", position among its inputs): what it is, or is
        a view of
    steps     the view operators that lead to it
    no_grad   it requires no gradient, whatever its base does
    leaf      it is a leaf that requires a gradient, or a view of what the graph has made that requires one without a
        history
    """

    base: tuple[str, int]
    steps: tuple[ViewCall, ...] = ()
    no_grad: bool = False
    leaf: bool = False


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward half of a joint graph: its placeholders are the forward's inputs, then the tangents; its outputs the
    forward's, then the gradients.

    inputs, outputs  how many placeholders and outputs are the forward's
    tangents   positions of the outputs that have a tangent, in order
    row_major  for each tangent, whether it is row-major, whatever the output is (see `Recorder.tangent`)
    gradients  positions of the inputs that have a gradient, in the order in which the engine comes to them. Outputs
               that share no operator (each backward frees its own) have gradients of their own, so that an input may
               stand here more than once. ~n: output n, which is given hooks, and from which others are computed
    depends    for each gradient, the tangents (their places in `tangents`) whose outputs lead to the input in
        autograd's graph
    reads      for each gradient, those of them that it has any part of: where only others arrive, there is none
    groups     outputs that share operators, as places among the tangents: by the operator that made them, and by what a
        backward frees; behind those whose outputs they take for inputs
    histories  positions of the inputs that have a history (outputs among them): the others are leaves
    undefined  (input, tangents): inputs that outputs lead to, and that get no gradient from them
    updates    (input, output, writes): positions of an input that was written to with its history kept, so often, and
               of the output whose value it is to be given under autograd, after the graph
    rebuilt    how the frame's outputs are made of the graph's, in order; None when they are the graph's outputs as they
        are
    user_code  the custom autograd functions and hooks that have a part in the gradients. Gradients of gradients run
               them and the recorded operators again under autograd; None: one of them cannot be run again
    user_reads what these look up when the backward runs (capture/border/looked_up.py)
    hooked     outputs are given hooks after the graph: each needs a node of its own
    freed      the program has freed the outputs' graph already: their backward raises what eager raises
    """

    inputs: int
    outputs: int
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    row_major: tuple[bool, ...] = ()
    depends: tuple[tuple[int, ...], ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()
    groups: tuple[tuple[Places, Places], ...] = ()
    histories: frozenset[int] = frozenset()
    undefined: tuple[tuple[int, tuple[int, ...]], ...] = ()
    updates: tuple[tuple[int, int, int], ...] = ()
    rebuilt: tuple[Rebuilt, ...] | None = None
    user_code: tuple[UserCode, ...] | None = ()
    user_reads: tuple[Any, ...] = ()
    hooked: bool = False
    freed: bool = False


@dataclass(slots=True)
class CapturedFrame:
    """One captured frame.

    graph     ATen-level or torch-level FX graph, or None when the frame has no tensor operator before its end or break
    inputs    the source of each placeholder of `graph`, in order (a tensor, or a TensorSize for a symbolic size)
    guards    what must hold for this capture to be reused
    finish    called as finish(outputs, function, *locals) with the tuple of graph outputs; returns the frame's result.
              None when the graph has exactly one output and the frame returns just that
    finish_text  the generated source of `finish`, for people
    breaks    graph breaks of this frame (at most one: a resumed frame is captured separately)
    op_count  torch-level operators captured
    example_inputs  the real values of `inputs` at capture
    backward  when gradients are wanted and `options.differentiate` recorded them: the graph is then the joint graph
    eager_reason  why calls that these guards accept must run eagerly (gradients are wanted and cannot be compiled); ""
        when they need not
    later_guards  guards that compiling the graph has added; asked after the backend is done
    shown         whether it was shown that sizes of 1, which this capture took to be larger (`CaptureOptions.ones`),
                  are served as well; None where there are none
    replayed  the calls that are made after the graph (prints, log records), as text with their lines
    effects   what `finish` changes that existed before, besides tensors, as text
    repeats    calls of modules that were replayed from others alike (capture/border/memoise.py)
    inference  the graph is to run under inference mode, or without it, which the frame enters and leaves by itself
    level      of the graph: "aten" also where the backend takes torch-level graphs and a call has no form there
    constants  real tensors met inside native code, by the target of their get_attr node
    """

    graph: torch.fx.Graph | None
    inputs: tuple[Source, ...]
    guards: tuple[Guard, ...]
    finish: Callable[..., object] | None
    finish_text: str
    breaks: tuple[Break, ...] = ()
    op_count: int = 0
    example_inputs: tuple[object, ...] = field(default=())
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    backward: Backward | None = None
    eager_reason: str = ""
    later_guards: Callable[[], tuple[Guard, ...]] = tuple
    shown: bool | None = None
    replayed: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    repeats: int = 0
    inference: bool | None = None
    level: Literal["aten", "torch"] = "aten"
