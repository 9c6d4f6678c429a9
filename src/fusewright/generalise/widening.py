"""One compiled version for sizes of 0 and 1 too, where it can be shown that it does the right thing for them.

Takes what is remembered of compiles over symbolic sizes, and a fresh capture for a call whose sizes are smaller than
those compiles were taken to be; gives an entry that runs the code that exists. Always holds: the capture for the small
sizes is what eager does, and the existing graph was shown to be that graph (graph/translation_validation.py), over
inputs of the same layout, under the same settings and with the same objects around it; what the existing compile knows
of sizes holds as well.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.fx
from torch.fx.node import map_arg

from fusewright import _native
from fusewright.base.errors import CannotFunctionalise
from fusewright.capture.bytecode.resume import Resumption
from fusewright.capture.conversions import plain_sources
from fusewright.capture.frame import CapturedFrame
from fusewright.capture.guards import Guard, build_program
from fusewright.capture.guards.sources import Source, TensorSize, TensorStride, unheld
from fusewright.capture.guards.types import SMALL_SIZES, STRIDE
from fusewright.generalise.same_calls import same_calls
from fusewright.generalise.same_finish import numbers_in
from fusewright.graph.builder import env_of
from fusewright.graph.translation_validation import same_for
from fusewright.graph.write_sizes import write_sizes
from fusewright.sizes.expressions import Dim, Expr, substitute


class General:
    """A compile over symbolic sizes: its capture, with the graph as it was before any pass. The tag of its entry."""

    def __init__(self, frame: CapturedFrame, graph: torch.fx.Graph) -> None:
        self.frame = frame
        # Passes give a node new arguments and types, and never change those that it has: to note them is much quicker
        # than to copy.
        self._nodes = [
            (node, node.op, node.target, node.args, node.kwargs, node.name, dict(node.meta)) for node in graph.nodes
        ]
        self.env = env_of(graph)

    @functools.cached_property
    def graph(self) -> torch.fx.Graph:
        made = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for node, op, target, args, kwargs, name, meta in self._nodes:
            args, kwargs = map_arg((args, kwargs), copies.__getitem__)
            copies[node] = made.create_node(op, target, args, kwargs, name)
            copies[node].meta = dict(meta)
        return made


def copy_of(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy whose nodes may be changed; types and sizes are shared."""
    made = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        copies[node] = made.node_copy(node, lambda argument: copies[argument])
    return made


def is_general(frame: CapturedFrame) -> bool:
    """Whether sizes were taken to be 2 or more in this capture."""
    return any(guard.kind == "SIZE" and guard.why == SMALL_SIZES for guard in frame.guards)


def widened(
    larger: Any,
    frame: CapturedFrame,
    clean: Callable[[torch.fx.Graph], torch.fx.Graph],
    values: tuple[Any, ...],
    function: Any,
    fixed: dict[Expr, Dim] | None = None,
) -> Any:
    """An entry for the calls that `frame` was captured for, running the code of the entry `larger`, whose tag is a
    General; None unless that is shown to be right. `clean`: the graph passes; `values`, `function`: the call at hand;
    `fixed`: what `serves` has said."""
    general: General = larger.tag
    if fixed is None:
        fixed = serves(general, frame, clean)
    if fixed is None:
        return None
    relations = [guard for guard in general.frame.guards if _is_kept(guard)]
    # What the passes have taken for granted of the general graph was not compared: they are run on both graphs anew.
    later = (*general.frame.later_guards(), *frame.later_guards())
    program = build_program((*frame.guards, *relations, *later), plain_sources(general.frame.inputs)[0])
    if not program.check(values, function):
        return None
    return _native.Entry(program, larger.graph, larger.finish)


def serves(
    general: General, frame: CapturedFrame, clean: Callable[[torch.fx.Graph], torch.fx.Graph]
) -> dict[Expr, Dim] | None:
    """Whether the code of `general` does what `frame` does: the symbols of the former that are numbers in the latter;
    None if that cannot be shown."""
    try:
        return _shown(general, frame, clean)
    except (CannotFunctionalise, ArithmeticError, RuntimeError, LookupError, ValueError):
        # for these sizes an operator of the general code cannot be: it divides by a size that is 0, has nothing to
        # reduce
        return None


def _shown(
    general: General, frame: CapturedFrame, clean: Callable[[torch.fx.Graph], torch.fx.Graph]
) -> dict[Expr, Dim] | None:
    """As `serves`; raises where the general code cannot be written for the sizes of `frame`."""
    if (
        general.graph is None
        or frame.graph is None
        or frame.level != general.frame.level
        or frame.eager_reason
        or len(frame.breaks) != len(general.frame.breaks)
    ):
        return None
    if _surroundings(general.frame) != _surroundings(frame):
        return None
    sizes = _sizes(general, frame)
    numbers = None if sizes is None else _numbers(general, frame, sizes)
    if sizes is None or numbers is None or _backward(general.frame, sizes) != _backward(frame, {}):
        return None
    placeholders = _placeholders(general.frame.inputs, general.graph), _placeholders(frame.inputs, frame.graph)
    if placeholders[0].keys() != placeholders[1].keys():
        return None
    inputs = {name: placeholders[1][source] for source, name in placeholders[0].items()}
    fixed: dict[Expr, Dim] = {symbol: size for symbol, size in sizes.items() if isinstance(size, int)}
    constants = general.frame.constants, frame.constants
    if frame.level == "torch":
        graph = _without(copy_of(general.graph), numbers)
        return fixed if same_calls(graph, frame.graph, inputs, sizes, constants) else None
    # What the passes make of it for larger sizes is what runs: they may drop what does nothing there.
    compiled = clean(copy_of(general.graph))
    written = _without(write_sizes(compiled, lambda d: substitute(d, fixed)), numbers)
    graphs = clean(written), clean(copy_of(frame.graph))
    return fixed if same_for(graphs[0], graphs[1], inputs, sizes, constants) else None


def ones_of(frame: CapturedFrame, known: Sequence[General]) -> bool:
    """Whether a frame has sizes of 1 that would be symbolic were they larger, and that no compile in `known` takes as
    symbols."""
    env = None if frame.graph is None else env_of(frame.graph)
    if env is None or not env.ones:
        return False
    # others are of another program
    covered = [general.env for general in known if _tensors(general.frame) == _tensors(frame)]
    return not any(
        env.ones <= {size.source for size in other.symbols.values()} for other in covered if other is not None
    )


def _tensors(frame: CapturedFrame) -> set[Source]:
    """The inputs of a frame's graph that are no sizes."""
    return {source for source in frame.inputs if not isinstance(source, TensorSize | TensorStride)}


def _numbers(general: General, frame: CapturedFrame, sizes: dict[Expr, Dim]) -> Collection[int] | None:
    """The results of the general graph that are numbers in `frame`, where both frames end in the same way; None where
    they do not."""
    texts = general.frame.finish_text, frame.finish_text
    if texts[0] == texts[1]:
        return ()
    if frame.backward is not None or general.frame.backward is not None:
        return None
    outputs: Any = _output(general.graph).meta["type"]
    results = [substitute(value, sizes) if isinstance(value, Expr) else None for value in outputs]
    return numbers_in(*texts, [value if isinstance(value, int) else None for value in results])


def _without(graph: torch.fx.Graph, places: Collection[int]) -> torch.fx.Graph:
    """The graph without these results."""
    output = _output(graph)
    kept = [place for place in range(len(output.args[0])) if place not in places]  # type: ignore[arg-type]
    output.args = (tuple(output.args[0][place] for place in kept),)  # type: ignore[index]
    output.meta["type"] = tuple(output.meta["type"][place] for place in kept)
    return graph


def _output(graph: torch.fx.Graph | None) -> torch.fx.Node:
    return next(iter(reversed(graph.nodes)))  # type: ignore[union-attr]


def _is_kept(guard: Guard) -> bool:
    """Whether a guard of the general capture must hold. Strides that matter were shown to be the same (`same_for`)."""
    return guard.kind == "SIZE" and guard.why not in (SMALL_SIZES, STRIDE)


def _surroundings(frame: CapturedFrame) -> Any:
    """What a frame's code was made for besides sizes: PyTorch's settings, and the objects that `finish` holds. Its text
    names these, and two objects may have one name; code objects, which every capture makes anew, compare by what they
    do."""
    held = {} if frame.finish is None else frame.finish.__globals__
    objects = {
        name: _identity(value) for name, value in held.items() if name != "__builtins__" and value is not frame.finish
    }
    return [guard.value for guard in frame.guards if guard.kind == "STATE"], objects


def _identity(value: object) -> object:
    code = value.code if type(value) is Resumption else unheld(value)
    return code if type(code) is types.CodeType else id(value)


def _backward(frame: CapturedFrame, sizes: dict[Expr, Dim]) -> Any:
    """A frame's backward, so that two compare: inputs by their sources (a graph over symbolic sizes has more of them),
    sizes as given."""
    backward = frame.backward
    if backward is None:
        return None

    def source(position: int) -> Source | int:
        return frame.inputs[position] if position >= 0 else position

    def written(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(written, value))
        if isinstance(value, dict):
            return tuple((name, written(item)) for name, item in sorted(value.items()))
        return substitute(value, sizes) if isinstance(value, Expr) else value

    rebuilt: Any = backward.rebuilt and tuple(
        (
            (one.base[0], source(one.base[1]) if one.base[0] == "input" else one.base[1]),
            written(one.steps),
            one.no_grad,
            one.leaf,
        )
        for one in backward.rebuilt
    )
    updates = tuple((source(position), *rest) for position, *rest in backward.updates)
    gradients = tuple(map(source, backward.gradients))
    undefined = tuple((source(position), depends) for position, depends in backward.undefined)
    tangents = backward.tangents, backward.row_major, backward.groups, backward.depends, backward.reads
    return backward.outputs, tangents, gradients, undefined, updates, rebuilt, backward.user_code == (), backward.freed


def _sizes(general: General, frame: CapturedFrame) -> dict[Expr, Dim] | None:
    """What the symbols of `general` are in `frame`; None when one is not there, or none is small."""
    old, new = general.env, env_of(frame.graph)  # type: ignore[arg-type]
    if old is None or old.unbacked or (new is not None and new.unbacked):
        return None
    symbols = {} if new is None else {known.source: known.symbol for known in new.symbols.values()}
    examples = dict(zip(frame.inputs, frame.example_inputs, strict=True))
    constants = {
        guard.source: guard.value for guard in frame.guards if guard.kind == "EQUALS" and type(guard.value) is int
    }
    found: dict[Expr, Dim] = {}
    for symbol, known in old.symbols.items():
        source: Any = known.source
        if source in symbols:
            found[symbol] = new.simplify(symbols[source])  # type: ignore[union-attr]
        elif isinstance(source, TensorSize | TensorStride):
            tensor = examples.get(source.base)
            if not isinstance(tensor, torch.Tensor) or tensor.dim() <= source.dim:
                return None  # it is of another rank
            found[symbol] = tensor.shape[source.dim] if isinstance(source, TensorSize) else tensor.stride(source.dim)
        elif source in constants and symbol in old.numbers:
            found[symbol] = constants[source]  # type: ignore[assignment]
        else:
            return None
    if any(old.settled(symbol) not in (symbol, old.simplify(symbol), size) for symbol, size in found.items()):
        return None  # with what it was taken to be at least, its guards left one size, which its code has as a number
    unproven = old.assumed | old.shown
    small = any(isinstance(size, int) and 0 <= size < 2 and symbol in unproven for symbol, size in found.items())
    return found if small else None


def _placeholders(inputs: Sequence[Source], graph: torch.fx.Graph) -> dict[Source, str]:
    """The placeholder of each input that is no size."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    count = len(inputs)  # a joint graph has further placeholders: its tangents
    found: dict[Any, str] = {
        source: node.name for source, node in zip(inputs, nodes) if not isinstance(node.meta["type"], Expr)
    }
    found.update({number: node.name for number, node in enumerate(nodes[count:])})
    return found
