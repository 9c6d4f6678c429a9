"""What sizes, operators and traced tensors may ask of the recorder, so that none of them needs to know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NoReturn, Protocol

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright.sizes.shape_env import ShapeEnv

AskNumber = Callable[[torch.fx.Node, Callable[[float, float], bool], float], bool | None]
"""Whether the number that a node holds is so related to a constant (a guard asks it again); None: that is not known."""


class Speculation(Protocol):
    """What the program reads from tensors and the capture takes for granted (capture/interpret/speculation.py)."""

    count: int

    def value(self, tensor: Any, most: int) -> torch.Tensor | None: ...

    def count_of(self, mask: Any) -> int | None: ...

    def shape_of(self, func: OpOverload, args: Sequence[object]) -> tuple[tuple[int, ...], str] | None: ...


class Recorder(Protocol):
    """Records operators on traced tensors as nodes of one graph (record/recorder.py says what each attribute means)."""

    level: Literal["aten", "torch"]
    env: ShapeEnv | None
    has_floats: bool
    resolving: bool
    identity_asked: bool  # the program has asked whether tensors are the same object
    cast: bool  # a composite operator is broken down that autocast has cast as a whole
    data_shapes: bool
    data_numbers: bool
    ask_number: AskNumber | None
    speculation: Speculation | None
    read_sizes: dict[torch.fx.Node, tuple[int, object]]
    lines: Any  # record/forward_lines.py
    waited: dict[torch.fx.Node, Any]
    collectives: list[tuple[object, Callable[[], None], bool]]

    @property
    def symbolic(self) -> bool: ...

    def owns(self, value: object) -> bool: ...

    def dispatch(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Any: ...

    def call(
        self, fn: Callable[..., object], args: Sequence[object] = ..., kwargs: Mapping[str, object] | None = ...
    ) -> object: ...

    def convert(self, value: object) -> tuple[object, Any]: ...

    def infer(self, func: OpOverload, args: list[object], kwargs: dict[str, object]) -> object: ...

    def rebinds(self, how: str) -> None: ...

    def lacks_form(self, code: str, detail: str) -> NoReturn: ...

    def recording(self, decompositions: bool = ...) -> AbstractContextManager[None]: ...

    def known_value(self, tensor: object) -> torch.Tensor | None: ...

    def read(self, tensor: object, most: int = ...) -> torch.Tensor | None: ...

    def node_of(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result_type: object
    ) -> torch.fx.Node: ...

    def record_as(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result_type: Any
    ) -> tuple[torch.fx.Node | None, Any]: ...
