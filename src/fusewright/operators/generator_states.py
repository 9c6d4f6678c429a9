"""Seeds and states of PyTorch's random generators on the CPU, as operators: a graph seeds, keeps and puts back what
eager would, in the order of its draws.

Takes seeds and states; gives states, each in a tensor of its own. Always holds: a generator of the program's own is
never touched by a graph: its state comes in, PyTorch's generator draws from it, and the state that follows goes out.
"""

from __future__ import annotations

from typing import Any

from fusewright.base.pytorch import torch
from fusewright.sizes.tensor_type import TensorType

_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_STATE = torch.default_generator.get_state()


def _define(schema: str, kernel: Any, meta: Any = lambda *args: _STATE.to("meta")) -> torch._ops.OpOverload:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, meta, "Meta")
    return getattr(torch.ops.fusewright, name).default  # type: ignore[no-any-return]


def _begin(state: torch.Tensor) -> torch.Tensor:
    kept = torch.default_generator.get_state()
    torch.default_generator.set_state(state)
    return kept


def _end(kept: torch.Tensor) -> torch.Tensor:
    state = torch.default_generator.get_state()
    torch.default_generator.set_state(kept)
    return state


def _seed(seed: int) -> None:
    torch.manual_seed(seed)


def _set(state: torch.Tensor) -> None:
    torch.default_generator.set_state(state)


SEED = _define("draws_seed(SymInt seed) -> ()", _seed, lambda seed: None)
SET = _define("draws_set(Tensor state) -> ()", _set, lambda state: None)
GET = _define("draws_get() -> Tensor", torch.default_generator.get_state)
SEEDED = _define("draws_seeded(SymInt seed) -> Tensor", lambda seed: torch.Generator().manual_seed(seed).get_state())
BEGIN = _define("draws_begin(Tensor state) -> Tensor", _begin)
END = _define("draws_end(Tensor kept) -> Tensor", _end)
"""Between BEGIN, which takes the state to draw from and gives the one to go back to, and END, which gives the state
after the draws, PyTorch's generator stands for another."""

OPERATORS = frozenset({SEED, SET, GET, SEEDED, BEGIN, END})


def _state(*args: object) -> TensorType:
    return TensorType(tuple(_STATE.shape), (1,), torch.uint8, torch.device("cpu"))


RULES = {**dict.fromkeys((GET, SEEDED, BEGIN, END), _state), **dict.fromkeys((SEED, SET), lambda *args: None)}
"""For all of them: to ask an operator without tensors for its result is to call it."""
