"""Compiled graphs in the disk cache: what a graph's key is made of, and how an entry is used and written.

Takes a graph on its way to backend `native`; gives the compiled graph that an earlier process (or an earlier compile of
this one) has stored for it. Always holds: the key covers everything that decides the result: graph, sizes' relations,
options, PyTorch's global state, and the versions of fusewright, Python, PyTorch and the processor. Relations between
sizes on which the compile relied are checked against the present sizes and become guards again; other sizes have an
entry of their own. An entry counts GPUs as its graph names them, so processes that have a GPU each share it.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from fusewright.backends.registry import GraphToCompile
from fusewright.base.errors import OptionError
from fusewright.base.events import Autotuned, CacheUse, Event, Hint, KernelMade, PlanLoaded, StageDone
from fusewright.base.location import Location, attributed
from fusewright.base.options import environment
from fusewright.base.records import dataclass, replace
from fusewright.capture.guards.torch_state import capture_global_state
from fusewright.codegen.call_plan_types import CallPlan, LaunchCall, SlotSpec
from fusewright.codegen.device_kernel import DeviceKernel
from fusewright.codegen.kernel_code import KernelCode
from fusewright.graph.builder import env_of
from fusewright.graph.fingerprint import fingerprint
from fusewright.runtime import launch
from fusewright.runtime.artifact import (
    ArtifactError,
    CompiledGraph,
    KernelFacts,
    NotSerialisable,
    dump,
    load_graph,
    on_gpus,
)
from fusewright.runtime.cache import Claim
from fusewright.runtime.host import host_text, needs, runs_here, store
from fusewright.runtime.parameters import with_prepacking
from fusewright.sizes.expressions import Expr, Relation, from_tuples, to_tuples
from fusewright.sizes.shape_env import ShapeEnv

if TYPE_CHECKING:
    from fusewright.backends.pipeline import Generated
    from fusewright.runtime.training_graphs import TrainingGraphs

IRRELEVANT = frozenset(
    {"background", "disk_cache", "trace.enabled", "instruction_limit", "arena_limit_mib", "autotune_seconds"}
)
"""Options that do not change what is compiled."""
RECORDED = "cuda"
"""The kind of device whose work can be recorded and replayed."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is known about one graph. key: where it is or will be stored, None when it cannot be. `known`: relations
    that its sizes had before it was compiled; `assumed`: sizes that were taken to be 2 or more before. plan: the native
    plan, when it was found and loaded. claim: that this process makes the entry, until it is released. gpus: the number
    of each GPU that the entry counts."""

    graph: torch.fx.Graph
    key: str | None
    known: int
    assumed: frozenset[Expr] = frozenset()
    plan: Any = None
    claim: Claim | None = None
    gpus: tuple[int, ...] = ()

    def __enter__(self) -> None:
        """The graph is compiled inside: other processes wait for it until the end."""

    def __exit__(self, *error: object) -> None:
        if self.claim is not None:
            self.claim.release()


def find(to_compile: GraphToCompile, graph: torch.fx.Graph, name: str = "") -> Lookup:
    """Looks `graph` up, and loads what is found, under `name` (by default the function's)."""
    env = env_of(graph)
    known = 0 if env is None else len(env.guards)
    assumed: frozenset[Expr] = frozenset() if env is None else frozenset(env.assumed)
    found = _key(to_compile, graph)
    if found is None:
        return Lookup(graph, None, known, assumed)
    key, gpus = found
    for candidate in _candidates(key, env):
        body, claim = store().get(candidate), None
        if body is None:
            claim = store().claim(candidate)
            body = store().get(candidate)  # somebody may have made it in between
        if body is None:
            to_compile.notify(CacheUse(to_compile.function, False, candidate, "no entry"))
            return Lookup(graph, candidate, known, assumed, claim=claim, gpus=gpus)
        if claim is not None:
            claim.release()
        try:
            stored = on_gpus(load_graph(body), dict(enumerate(gpus)))
            if not _facts_hold(stored, env):
                continue
            stacks = [node.meta.get("location", ()) for node in graph.nodes]
            labels = partial(_stored_labels, stored.kernels, stored.calls, stacks)
            plan = load_plan(to_compile, stored, name or to_compile.function, labels)
        except (ArtifactError, launch.LoadError, ValueError) as error:
            # The entry is whole (its hash was checked) but this process cannot use it: it is written anew.
            to_compile.notify(CacheUse(to_compile.function, False, candidate, f"not usable here: {error}"))
            return Lookup(graph, candidate, known, assumed, gpus=gpus)
        _learn_facts(stored, env)
        to_compile.notify(CacheUse(to_compile.function, True, candidate, ""))
        for kernel in stored.kernels:
            announce_kernel(to_compile, kernel, stacks)
        for question, winner, times, text in stored.autotuned:
            to_compile.notify(Autotuned(to_compile.function, question, winner, dict(times), {}, text))
        return Lookup(graph, candidate, known, assumed, plan)
    return Lookup(graph, None, known, assumed)


def save(
    to_compile: GraphToCompile, lookup: Lookup, compiled: CompiledGraph, made: Generated
) -> None:
    """Stores what was compiled for the graph of `lookup`, if it can be stored."""
    if lookup.key is None:
        return
    env = env_of(lookup.graph)
    learnt = () if env is None else env.guards[lookup.known :]
    larger = () if env is None else tuple(Relation("<=", 2, symbol) for symbol in env.assumed - lookup.assumed)
    facts = tuple((fact.op, to_tuples(fact.left), to_tuples(fact.right)) for fact in (*learnt, *larger))
    places = _places(lookup.graph)
    described = tuple(kernel_facts(kernel, places) for kernel in made.kernels)
    calls = tuple((name, _lines(locations, places)) for name, locations in made.calls.items())
    try:
        counted = on_gpus(compiled, {gpu: number for number, gpu in enumerate(lookup.gpus)})
        body = dump(replace(counted, kernels=described, facts=facts, calls=calls))
    except (ArtifactError, NotSerialisable) as error:
        to_compile.notify(CacheUse(to_compile.function, False, lookup.key, f"not stored: it holds {error}"))
        return
    store().put(lookup.key, to_compile.function, body)


def load_plan(
    to_compile: GraphToCompile, compiled: CompiledGraph, name: str, labels: launch.Labels | None = None
) -> Any:
    """The native plan, with its machine code in memory, and what prepares its last inputs; `labels`: see launch.load.
    Raises LoadError or ValueError."""
    started = time.perf_counter()
    plan, target = compiled.plan, to_compile.settings["target"]
    if target != "native" and not runs_here(*needs(target)):
        raise OptionError(f"option 'target': code for {target} does not run on this machine")
    kernels = {(step.key, step.device) for step in plan.steps if isinstance(step, LaunchCall)}
    on_gpu: dict[str, Any] = {}
    if kernels:
        from fusewright.runtime import cuda_code  # lazy, as all that only a GPU needs

        on_gpu = cuda_code.load(kernels, to_compile.tell_kernel)
    limit = to_compile.settings["arena_limit_mib"] << 20
    plan = replace(plan, name=name)
    load = partial(launch.load_with_code, code=compiled.code, more=on_gpu, arena_limit=limit, labels=labels)
    made = load(plan)
    if to_compile.settings["triton.cudagraphs"] and any(slot.device == RECORDED for slot in plan.slots):
        made = _recorded(to_compile, made, plan, load)
    if compiled.prepacking is not None:
        made = with_prepacking(made, compiled.prepacking, len(plan.inputs) - compiled.prepacking.added)
    to_compile.notify(PlanLoaded(to_compile.function, plan, made))
    to_compile.notify(StageDone(to_compile.function, "load", partial(repr, made), time.perf_counter() - started))
    return made


def short_of_kernels(plan: CallPlan) -> bool:
    """Whether a later process may find more kernels for the plan's GPUs than this one did."""
    if all(slot.device == "cpu" for slot in plan.slots):
        return False
    from fusewright.runtime import cuda_code

    return cuda_code.short_of_kernels()


def _recorded(to_compile: GraphToCompile, made: Any, plan: CallPlan, load: Callable[[CallPlan], Any]) -> Any:
    """The plan behind a CUDA graph; half of a joint graph waits for the other half. `load`: makes a native plan."""
    if to_compile.backward is not None and not to_compile.settings["triton.cudagraphs_training"]:
        asks = 'options={"triton.cudagraphs_training": True} records that'
        _hint(to_compile.notify, to_compile.function, f"no CUDA graph: it is trained ({asks})")
        return made
    from fusewright.runtime.cudagraphs import Loaded, Recorder
    from fusewright.runtime.host_steps import apart

    parts = apart(plan, on_host)
    loaded = Loaded(made, plan, made) if parts is None else Loaded(made, parts[1], load(parts[1]), load(parts[0]))
    if to_compile.backward is not None:
        from fusewright.runtime.training_graphs import Half

        return Half(loaded)
    return Recorder(loaded, partial(_hint, to_compile.notify, to_compile.function))


def on_host(slot: SlotSpec) -> bool:
    """Whether a plan's work on this memory runs beside a recording."""
    return slot.device == "cpu" != RECORDED


def _hint(notify: Callable[[Event], None], function: str, text: str) -> None:
    notify(Hint(function, text))


def with_draws(plan: Callable[..., Any], draws: tuple[Callable[[], torch.Tensor], ...]) -> Callable[..., Any]:
    """The plan of a graph whose last inputs are drawn anew at each call."""
    from fusewright.runtime.training_graphs import Half

    return (
        replace(plan, draws=draws)
        if isinstance(plan, Half)
        else lambda *inputs: plan(*inputs, *(draw() for draw in draws))
    )


def training_graphs(
    to_compile: GraphToCompile, forward: Any, backward: Any, saved: Sequence[int], outputs: int
) -> TrainingGraphs | None:
    """Both halves of a joint graph behind CUDA graphs, if they are plans for a GPU in a mode that records. `saved`: see
    joint.Split."""
    from fusewright.runtime.training_graphs import Gpu, Half, TrainingGraphs

    if not isinstance(forward, Half) or not isinstance(backward, Half):
        return None
    index = max((slot.device_index for slot in forward.call_plan.slots if slot.device == "cuda"), default=0)
    tell = partial(_hint, to_compile.notify, to_compile.function)
    return TrainingGraphs(forward, backward, saved, outputs, tell, Gpu(index))


# --- keys ------------------------------------------------------------------------------------------------------------


def _key(to_compile: GraphToCompile, graph: torch.fx.Graph) -> tuple[str, tuple[int, ...]] | None:
    """And the GPUs that an entry under this key counts; None for what is not stored."""
    settings = to_compile.settings
    if (
        not (settings["disk_cache"] and environment("FUSEWRIGHT_CACHE"))
        or settings["trace.enabled"]
        or environment("FUSEWRIGHT_DEBUG")
    ):
        return None
    made = fingerprint(graph, to_compile.constants)
    if made is None:
        return None
    options = {key: value for key, value in settings.options.items() if key not in IRRELEVANT}
    gpus = ""
    if made.gpus:
        from fusewright.runtime import cuda_code

        gpus = cuda_code.machine_text(*made.gpus)
    env = env_of(graph)
    # What passes may take for granted: sizes that are guarded to be 2 or more, and those that may be 1.
    granted = "" if env is None else repr([sorted(map(str, symbols)) for symbols in (env.assumed, env.shown)])
    parts = (host_text(), gpus, repr(sorted(options.items())), repr(capture_global_state()), granted, made.digest)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest(), made.gpus


def _candidates(key: str, env: ShapeEnv | None) -> Iterator[str]:
    """The key without regard to the example's sizes, then the one for just these sizes."""
    yield key
    if env is not None:
        sizes = ",".join(str(known.hint) for known in env.symbols.values())
        yield hashlib.sha256(f"{key}|{sizes}".encode()).hexdigest()


# --- relations between sizes -----------------------------------------------------------------------------------------


def _relations(stored: CompiledGraph, env: ShapeEnv | None) -> list[Relation]:
    symbols = {} if env is None else {symbol.name: symbol for symbol in env.symbols}
    return [
        Relation(op, from_tuples(left, symbols), from_tuples(right, symbols))  # type: ignore[arg-type]
        for op, left, right in stored.facts
    ]


def _facts_hold(stored: CompiledGraph, env: ShapeEnv | None) -> bool:
    relations = _relations(stored, env)
    return not relations or (
        env is not None and all(Relation(r.op, env.hint(r.left), env.hint(r.right)).holds({}) for r in relations)
    )


def _learn_facts(stored: CompiledGraph, env: ShapeEnv | None) -> None:
    for relation in _relations(stored, env):
        assert env is not None
        env.guard(relation)


# --- what users are told about kernels --------------------------------------------------------------------------------


def _places(graph: torch.fx.Graph) -> dict[Location, int]:
    """The first node of the graph that is put down to each source line."""
    found: dict[Location, int] = {}
    met: set[int] = set()  # by identity: the nodes of a call share its stack
    for position, node in enumerate(graph.nodes):
        stack = node.meta.get("location", ())
        if id(stack) not in met:
            met.add(id(stack))
            line = attributed(stack)
            if line is not None:
                found.setdefault(line, position)
    return found


def _lines(locations: Iterable[Location], places: dict[Location, int]) -> tuple[int, ...]:
    return tuple(places[location] for location in locations if location in places)


def kernel_facts(kernel: KernelCode | DeviceKernel, places: dict[Location, int]) -> KernelFacts:
    lines = _lines(kernel.locations, places)
    return KernelFacts(kernel.name, kernel.origins, lines, zlib.compress(kernel.source.encode(), 1))


def _locations(lines: Iterable[int], stacks: Sequence[Sequence[Location]]) -> tuple[Location, ...]:
    found = (attributed(stacks[position]) for position in lines if position < len(stacks))
    return tuple(line for line in found if line is not None)


def announce_kernel(to_compile: GraphToCompile, kernel: KernelFacts, stacks: Sequence[Sequence[Location]]) -> None:
    locations = _locations(kernel.lines, stacks)
    to_compile.notify(
        KernelMade(to_compile.function, kernel.name, locations, kernel.origins, partial(_text, kernel.text))
    )


def made_labels(made: Generated) -> dict[str, str]:
    """What a profile calls the kernels and library calls of a plan that was made."""
    return _labels({kernel.name: kernel.locations for kernel in made.kernels} | made.calls)


def _stored_labels(
    kernels: Iterable[KernelFacts], calls: Iterable[tuple[str, tuple[int, ...]]], stacks: Sequence[Sequence[Location]]
) -> dict[str, str]:
    """The same, of one that was loaded."""
    rows = [*((kernel.name, kernel.lines) for kernel in kernels), *calls]
    return _labels({name: _locations(lines, stacks) for name, lines in rows})


def _labels(locations: dict[str, tuple[Location, ...]]) -> dict[str, str]:
    return {name: ", ".join(map(_place, lines)) for name, lines in locations.items()}


def _place(line: Location) -> str:
    """`layers.0.norm model.py:12 from train.py:30`: the innermost line, and the outermost where it is another."""
    return f"{line.short} from {line.outermost}" if line.outermost else line.short


def _text(compressed: bytes) -> str:
    return zlib.decompress(compressed).decode()
