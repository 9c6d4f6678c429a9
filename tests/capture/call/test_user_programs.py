"""Programs that users write are captured whole, or break where OPEN says so; either way they equal eager in results,
effects (arguments, output, warnings, the state of every random generator) and exceptions, call after call."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Broken, Compiled, Event, Skipped
from tests.capture.call import (
    gradient_programs,
    hook_programs,
    numpy_programs,
    outside_programs,
    python_programs,
    torch_programs,
)
from tests.capture.call.comparing import same

PROGRAMS = python_programs.PROGRAMS
CALLS = 3

# What is not captured whole: on both backends, and on one of them alone.
OPEN = frozenset(
    """
    data_ptr_as_number data_store_of_another_type generator_argument hook_removed_behind_a_break
    inference_inside_then_grad iterator_over_a_list_that_grows map_argument older_hook_removed_before_another
    random_many_ways register_hook_then_write thread_lock time_time warning_of_pytorch_recorded warnings_recorded_once
    """.split()
)
OPEN |= {  # PyTorch says what is wrong
    f"tensor_of_elements_{name}"
    for name in """
    many lengths depths floats_as_integers floats_as_integers_new floats_as_bits overflow complex_as_floats mapped
    """.split()
}
OPEN_AT_TORCH_LEVEL: frozenset[str] = frozenset()
OPEN_AT_ATEN_LEVEL = frozenset({"np_write_beside_a_view"})


def described(value: Any) -> Any:
    """What can be seen of a value, for `same`."""
    if isinstance(value, torch.Tensor):
        facts = (type(value), value.requires_grad, value.is_inference(), value.is_leaf and described(value.grad))
        return ("tensor", facts, value.detach().clone())
    if isinstance(value, Warning):
        return (type(value), value.args)
    if isinstance(value, torch.nn.Module):
        return [(name, described(one)) for name, one in value.named_parameters()]
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(described, value))
    if isinstance(value, dict):
        return {key: described(one) for key, one in value.items()}
    if isinstance(value, torch.Generator):
        return ("generator", value.get_state())
    if isinstance(value, random.Random):
        return ("generator", value.getstate())
    if isinstance(value, np.ndarray):
        return ("array", torch.from_numpy(value.copy()))
    if isinstance(value, (int, float, str, bytes, type(None), torch.dtype, np.generic)):
        return (type(value), value)
    if type(value) is weakref.ref:
        return ("reference", described(value()))
    if isinstance(value, (outside_programs.Held, warnings.WarningMessage)):
        return ("held", described(vars(value)))
    if hasattr(value, "__length_hint__"):
        return (type(value), list(copy.copy(value)))
    return type(value).__qualname__


def seen(function: Callable[..., Any], make: Callable[[], Any], around: bool) -> list[Any]:
    """What CALLS calls do, each with arguments of its own."""
    outside_programs.position = iter(range(1, 100))
    torch.manual_seed(11), random.seed(12), np.random.seed(13)
    for cached in (python_programs.cached_tensor, python_programs.cached_of_tensor, python_programs.WithCache.of):
        cached.cache_clear()
    found: list[Any] = []
    for _ in range(CALLS):
        args, output = make(), io.StringIO()
        result, raised = None, None
        with contextlib.redirect_stdout(output), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # torch.compile's own
            with torch.inference_mode(around):
                try:
                    result = function(*args)
                except (TypeError, ValueError, RuntimeError, IndexError, AssertionError) as error:
                    if type(error).__module__.startswith("fusewright"):
                        raise
                    raised = (type(error).__name__, str(error))
        before = described(result)
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, torch.Tensor) and first.requires_grad and first.dim() == 0 and not first.is_leaf:
            first.backward()
        found.append((before, described(result), described(args), raised, output.getvalue()))
        found.append([str(one.message) for one in warned])
        found.append((torch.get_rng_state(), random.getstate(), [repr(part) for part in np.random.get_state()]))
    return found


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str, backend: str) -> None:
    fusewright.reset()
    function, make = PROGRAMS[name]
    around, options = name == "inference_around", gradient_programs.OPTIONS.get(name)
    expected = seen(function, make, around)
    whole = name not in OPEN | (OPEN_AT_ATEN_LEVEL if backend == "native" else OPEN_AT_TORCH_LEVEL)
    if not whole:
        with pytest.raises(fusewright.GraphBreakError):
            seen(fusewright.compile(function, backend=backend, fullgraph=True, options=options), make, around)
        fusewright.reset()
    compiled = fusewright.compile(function, backend=backend, fullgraph=whole, options=options)
    same(seen(compiled, make, around), expected, rel=1e-5)


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_a_lazy_module_is_compiled_once_it_has_parameters(backend: str) -> None:
    fusewright.reset()
    torch.manual_seed(0)
    module, x = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.ReLU()), torch.ones(2, 3)
    events: list[Event] = []
    with STREAM.listening(events.append):
        compiled = fusewright.compile(module, backend=backend, fullgraph=True)
        results = [compiled(x) for _ in range(3)]
    same(results[1:], [module(x)] * 2)
    told = [one for one in events if isinstance(one, (Broken, Skipped, Compiled))]
    assert [type(one) for one in told] == [Skipped, Compiled]


def test_the_programs_of_all_files_are_run() -> None:
    assert torch_programs.step in [function for function, _ in PROGRAMS.values()]
    assert numpy_programs.np_order in [function for function, _ in PROGRAMS.values()]
    assert gradient_programs.train_step in [function for function, _ in PROGRAMS.values()]
    assert hook_programs.steps in [function for function, _ in PROGRAMS.values()]
    assert OPEN | OPEN_AT_TORCH_LEVEL | OPEN_AT_ATEN_LEVEL <= PROGRAMS.keys()
