"""Running one case eagerly and compiled, and saying how they compare.

Takes a function and its arguments; gives an `Outcome`. Always holds: both runs start from the same random state and from arguments of
their own with the same layouts; nothing compiled for an earlier case is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import fusewright
from fusewright.base import events
from tests.ops.cases import Case
from tests.ops.compare import alias_pattern, copy_tree, differences

with FakeTensorMode():
    """PyTorch 2.11 built for CUDA, on a machine without: the first thread that enters it holds a guard for all others, and
    when that thread ends, the next one that enters ends the process (torch.compile in eager's higher-order operators)."""

Kind = Literal["captured", "broke", "same error", "fell back", "wrong", "crashed", "error differs"]
GOOD: frozenset[str] = frozenset({"captured", "broke", "same error"})
"""Outcomes that are no defects."""


@dataclass(slots=True)
class Outcome:
    """kind    captured: equal, the whole call in one graph; broke: equal, some or all of it eager by a catalogued break; same error: both
               raise the same type; the rest are defects
    code    the catalogue's code of the break; detail: what differs, in words"""

    kind: Kind
    code: str = ""
    detail: str = ""


@dataclass(slots=True)
class Listener:
    """What the events of one compiled call say."""

    graphs: int = 0
    breaks: list[tuple[str, str]] = field(default_factory=list)
    internal: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Captured):
            self.graphs += 1
        elif isinstance(event, events.Broken | events.Skipped):
            self.breaks.append((event.report.code, event.report.reason))
        elif isinstance(event, events.InternalError):
            self.internal.append(event.trace)
        elif isinstance(event, events.FellBack):
            self.fallbacks.append(event.reason)


def attempt(function: Callable[..., Any], args: Any, kwargs: Any, seed: int) -> tuple[Any, BaseException | None]:
    """(result, None) or (None, the exception)."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    try:
        return function(*args, **kwargs), None
    except Exception as error:
        return None, error


def run_case(case: Case, **how: Any) -> Outcome:
    """Runs a case eagerly and compiled; `how`: keyword arguments of `fusewright.compile`."""
    given = (case.args, case.kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager_arguments = copy_tree(given)
        eager, eager_error = attempt(case.make(_itself), *eager_arguments, seed=7)
        fusewright.reset()
        if "backend" not in how:  # other backends draw PyTorch's random numbers anyway, and refuse the option
            how["options"] = {"fallback_random": True, **how.get("options", {})}
        compiled = case.make(lambda function: fusewright.compile(function, **how))
        our_arguments = copy_tree(given)
        heard = Listener()
        with events.STREAM.listening(heard):
            ours, our_error = attempt(compiled, *our_arguments, seed=7)
        return judge(case, (eager, eager_error, eager_arguments), (ours, our_error, our_arguments), heard)


def run_case_apart(case: Case, **how: Any) -> Outcome:
    """In a thread of its own: some operators leave theirs with a dispatch key switched on, in eager too."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run_case, case, **how).result()


def _itself(function: Any) -> Any:
    return function


def judge(case: Case, eager_run: Any, our_run: Any, heard: Listener) -> Outcome:
    """The outcome of two runs."""
    eager, eager_error, eager_arguments = eager_run
    ours, our_error, our_arguments = our_run
    if heard.internal:
        return Outcome("crashed", detail=heard.internal[0][-1500:])
    code = heard.breaks[0][0] if heard.breaks else ""
    reason = heard.breaks[0][1] if heard.breaks else ""
    if eager_error is not None or our_error is not None:
        if type(eager_error) is type(our_error):
            return Outcome("same error", code)
        return Outcome("error differs", code, f"ours {our_error!r}, eager {eager_error!r}"[:600])
    found = differences(ours, eager, lambda: precise_run(case)[0], case.values and case.invariants is None)
    if not found and case.invariants is not None:
        found = differences(case.invariants(ours), case.invariants(eager))
    if not found:
        found = [
            f"argument {text}"
            for text in differences(our_arguments, eager_arguments, lambda: precise_run(case)[1], case.values)
        ]
    if not found:
        mine, theirs = (
            (ours[0], eager[0]) if case.gradients else (ours, eager)
        )  # gradients may share memory with each other
        our_pattern, eager_pattern = alias_pattern(mine, our_arguments), alias_pattern(theirs, eager_arguments)
        if our_pattern != eager_pattern:
            found = [f"alias: {our_pattern}, eager {eager_pattern}"]
    if found:
        return Outcome("wrong", code, "; ".join(found)[:600])
    if heard.breaks:
        return Outcome("broke", code, reason[:300])
    if heard.fallbacks:
        return Outcome("fell back", detail=heard.fallbacks[0][:300])
    return (
        Outcome("captured") if 1 <= heard.graphs <= case.graphs else Outcome("wrong", detail=f"{heard.graphs} graphs without a break")
    )


_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


def precise_run(case: Case) -> tuple[Any, Any]:
    """(result, arguments afterwards) of the eager call with every floating point argument in double precision; the result is None when
    that cannot run."""
    args, kwargs = copy_tree((case.args, case.kwargs))

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in _WIDER:
            return leaf.detach().to(_WIDER[leaf.dtype]).requires_grad_(leaf.requires_grad)
        return _WIDER.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    args, kwargs = pytree.tree_map(widen, (args, kwargs))
    return attempt(case.make(_itself), args, kwargs, seed=7)[0], (args, kwargs)
