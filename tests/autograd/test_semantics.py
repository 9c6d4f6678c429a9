"""Autograd's semantics: every program gives compiled what it gives eagerly, and is compiled whole unless the table says why not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Broken, Event, FellBack, InternalError, Skipped
from tests.autograd import (  # noqa: F401  (they fill PROGRAMS)
    programs_custom,
    programs_engine,
    programs_hooked,
    programs_modes,
    programs_outputs,
    programs_visits,
)
from tests.autograd.programs import PROGRAMS

# Programs that are not compiled whole: the catalogue's codes of their graph breaks and skipped frames.
BREAKS: dict[str, set[str]] = {
    "view_in_place_of_an_input_that_is_written_to": {"inplace-metadata"},
    "view_in_place_beside_what_it_shows": {"training-eager"},
    "view_in_place_in_no_grad": {"inplace-metadata"},
    "view_of_an_input_that_is_made_a_leaf": {"training-eager"},
    "overlapping_result_is_written_to": {"operator-failed"},
    "behind_a_view_in_no_grad_a_function_raises": {"autograd-function"},
    "behind_a_view_in_no_grad_an_operator_has_no_gradient": {"training-eager"},
    "behind_a_view_in_no_grad_what_was_saved_is_written_to": {"training-eager"},
    "given_a_hook_and_written_to": {"autograd-call"},
    "retains_its_gradient_and_is_written_to": {"autograd-call"},
    "impure_backward": {"autograd-function"},
    "tensor_subclass_param_hook_module": {"autograd-function"},  # its hook keeps numbers
    "custom_raises": {"exception-escapes"},
    "custom_backward_raises": {"autograd-function"},
    "custom_gives_what_it_takes": {"autograd-function"},
    # eager leaves what the backward has written in these
    "custom_in_place_of_argument": {"autograd-function"},
    "custom_in_place_of_result": {"autograd-function"},
    "custom_in_place_of_second_result": {"autograd-function"},
    "custom_in_place_beside_another_group": {"autograd-function"},
    "grad_break_middle": {"explicit-graph-break"},
    "backward_hooked_param": {"autograd-call"},
    "backward_hook_added_later": {"autograd-call"},
    "backward_outer_graph": {"autograd-call"},
    "grad_past_an_outer_graph": {"autograd-call"},
    "asked_past_an_outer_graph_by_backward": {"autograd-call"},
    "asked_by_a_function_beside_a_hook": {"autograd-call"},
    "ckpt_break_inside": {"checkpoint"},
    "ckpt_eager_frames": {"explicit-graph-break"},
    "func_grad_of_compiled": {"transform-active"},
    "vmap_of_compiled": {"transform-active"},
    "jvp_of_compiled": {"transform-active"},
    "forward_ad_dual": {"transform-active"},
    "anomaly": {"transform-active"},  # its traces name the operators of the forward
    "anomaly_nan": {"transform-active"},
    "inplace_leaf_error": {"operator-failed"},
    "written_behind_a_break_in_no_grad": {"inplace-metadata"},
    "written_input_saved": {"training-eager"},
    "node_of_a_view_is_hooked": {"autograd-call"},
    "sparse_gradients_outlive_later_calls": {"unsupported-tensor"},
}


# What asks for the gradient of a result that another one is computed from does so behind a break.
LATE = ("asked_late_by_backward", "asked_late_by_an_edge", "asked_late_by_a_hook_of_several", "jacobian_")
BREAKS["no_grad_view_of_a_view"] = {"unsupported-tensor"}
BREAKS["gradients_of_another_dtype_inside"] = {"autograd-call"} if hasattr(torch.Tensor, "grad_dtype") else set()
BREAKS |= {
    name: {"autograd-call"}
    for name in PROGRAMS
    if name.startswith((*LATE, "hooked_one_beside_it")) or (name.startswith("kept_") and name.endswith("_returned"))
}
BREAKS |= {f"kept_of_a_node_{how}": {"autograd-call", "tensor-address", "opaque-object"} for how in ("returned", "stored")}
BREAKS |= {name: {"training-eager"} for name in PROGRAMS if name.startswith("write_behind_a_detach_")}
BREAKS |= {name: {"explicit-graph-break"} for name in PROGRAMS if name.startswith(("asked_behind_a_break", "hooked_behind_a_break"))}


def difference(got: Any, expected: Any) -> str:
    """How a result differs from eager's; "" when it does not."""
    if type(got) is not type(expected):
        return f"{type(got).__name__}, eager gives {type(expected).__name__}"
    if not isinstance(got, torch.Tensor):
        return "" if got == expected else f"{got!r}, eager gives {expected!r}"
    for name in ("dtype", "shape", "requires_grad", "is_leaf"):
        if getattr(got, name) != getattr(expected, name):
            return f"{name} {getattr(got, name)}, eager has {getattr(expected, name)}"
    if got.stride() != expected.stride():
        return f"strides {got.stride()}, eager has {expected.stride()}"
    half = got.dtype in (torch.bfloat16, torch.float16)
    if not torch.allclose(got, expected, rtol=2e-2 if half else 1e-4, atol=1e-5, equal_nan=True):
        return f"values {got}, eager has {expected}"
    return ""


def check(name: str, backend: str, expected_breaks: set[str] | None) -> None:
    program = PROGRAMS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        expected = program(lambda function: function)
        events: list[Event] = []
        options = {"fallback_random": True} if backend == "native" else None  # the others' operators are eager's
        with STREAM.listening(events.append):
            got = program(lambda function: fusewright.compile(function, backend=backend, options=options))
    assert len(got) == len(expected)
    for index, (mine, theirs) in enumerate(zip(got, expected)):
        assert not difference(mine, theirs), f"result {index}: {difference(mine, theirs)}"
    assert not [event for event in events if isinstance(event, InternalError | FellBack)]
    if expected_breaks is not None:
        assert {event.report.code for event in events if isinstance(event, Broken | Skipped)} == expected_breaks


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    check(name, "native", BREAKS.get(name, set()))


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_with_other_backends(name: str, backend: str) -> None:
    check(name, backend, None)
