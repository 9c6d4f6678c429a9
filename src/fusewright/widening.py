"""One compiled version for sizes of 0 and 1 too, where it can be shown that it does the right thing for them.

Takes what is remembered of compiles over symbolic sizes, and a fresh capture for a call whose sizes are smaller than those compiles were
taken to be; gives an entry that runs the code that exists. Always holds: the capture for the small sizes is what eager does, and the
existing graph was shown to be that graph (graph/equivalence.py); every other guard of the existing compile holds as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx

from fusewright import _native
from fusewright.backends.numbers import plain_sources
from fusewright.capture.frame import CapturedFrame
from fusewright.capture.guard_types import SMALL_SIZES
from fusewright.capture.guards import Guard, build_program
from fusewright.capture.sources import Source, TensorSize
from fusewright.errors import CannotFunctionalise
from fusewright.graph.builder import env_of
from fusewright.graph.equivalence import same_for
from fusewright.graph.sizes import Dim, Expr
from fusewright.records import dataclass


@dataclass(frozen=True, slots=True)
class General:
    """A compile over symbolic sizes: its capture, with the graph as it was before any pass, and its entry."""

    frame: CapturedFrame
    graph: torch.fx.Graph
    entry: Any


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
    general: General, frame: CapturedFrame, clean: Callable[[torch.fx.Graph], torch.fx.Graph], values: tuple[Any, ...], function: Any
) -> Any:
    """An entry for the calls that `frame` was captured for, running the code of `general`; None unless that is shown to be right.
    `clean`: the graph passes; `values`, `function`: the call at hand."""
    if general.graph is None or frame.graph is None or frame.eager_reason or frame.finish_text != general.frame.finish_text:
        return None
    if frame.backward != general.frame.backward or len(frame.breaks) != len(general.frame.breaks):
        return None
    sizes = _sizes(general, frame)
    if sizes is None:
        return None
    placeholders = _placeholders(general.frame.inputs, general.graph), _placeholders(frame.inputs, frame.graph)
    if placeholders[0].keys() != placeholders[1].keys():
        return None
    inputs = {name: placeholders[1][source] for source, name in placeholders[0].items()}
    try:
        graphs = clean(copy_of(general.graph)), clean(copy_of(frame.graph))
    except CannotFunctionalise:
        return None
    if not same_for(graphs[0], graphs[1], inputs, sizes, (general.frame.constants, frame.constants)):
        return None
    relations = [guard for guard in (*general.frame.guards, *general.frame.later_guards()) if _is_kept(guard)]
    program = build_program((*frame.guards, *frame.later_guards(), *relations), plain_sources(general.frame.inputs)[0])
    if not program.check(values, function):
        return None
    return _native.Entry(program, general.entry.graph, general.entry.finish)


def _is_kept(guard: Guard) -> bool:
    return guard.kind == "SIZE" and guard.why != SMALL_SIZES


def _sizes(general: General, frame: CapturedFrame) -> dict[Expr, Dim] | None:
    """What the symbols of `general` are in `frame`; None when one is not there, or none is small."""
    old, new = env_of(general.graph), env_of(frame.graph)  # type: ignore[arg-type]
    if old is None:
        return None
    symbols = {} if new is None else {known.source: known.symbol for known in new.symbols.values()}
    examples = dict(zip(frame.inputs, frame.example_inputs, strict=True))
    found: dict[Expr, Dim] = {}
    for symbol, known in old.symbols.items():
        source: Any = known.source
        if source in symbols:
            found[symbol] = symbols[source]
        elif isinstance(source, TensorSize) and isinstance(examples.get(source.base), torch.Tensor):
            found[symbol] = int(examples[source.base].shape[source.dim])  # type: ignore[attr-defined]
        else:
            return None
    small = any(isinstance(size, int) and size < 2 and symbol in old.assumed for symbol, size in found.items())
    return found if small else None


def _placeholders(inputs: Sequence[Source], graph: torch.fx.Graph) -> dict[Source, str]:
    """The placeholder of each input that is no size."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    count = len(inputs)  # a joint graph has further placeholders: its tangents
    found: dict[Any, str] = {source: node.name for source, node in zip(inputs, nodes) if not isinstance(source, TensorSize)}
    found.update({number: node.name for number, node in enumerate(nodes[count:])})
    return found
