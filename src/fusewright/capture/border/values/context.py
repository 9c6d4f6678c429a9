"""The interpreter-wide settings of PyTorch: grad mode, autocast, inference mode, default device and dtype,
the choice among attention kernels.

Takes nothing; gives a snapshot, restores one, and lists the calls that lead from one to another. While a frame is
captured its context managers change the real settings, so that what is recorded is what eager would do; `World`
restores them at the end of the attempt.
Always holds: only settings that a context manager of PyTorch can change are here; a capture is guarded on all of
`GlobalState`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field
from fusewright.capture.guards.torch_state import AUTOCAST_DEVICES


@dataclass(frozen=True, slots=True)
class TorchState:
    """What interpreted code may have changed by its end."""

    grad_enabled: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    autocast_nesting: int
    inference_mode: bool
    function_modes: tuple[object, ...]
    settings: tuple[object, ...]


SETTINGS: tuple[tuple[Callable[[], object], Callable[..., object]], ...] = (
    (torch.get_default_dtype, torch._C._set_default_dtype),
    *(
        (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"))
        for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    ),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
)
"""Settings of the whole process: what reads one, and what sets it to the value read."""


SETTERS = frozenset((
    torch.set_autocast_enabled, torch.set_autocast_dtype, torch.set_autocast_cache_enabled,
    torch.autocast_increment_nesting, torch.autocast_decrement_nesting, torch._C._set_grad_enabled,
    *(write for _, write in SETTINGS),
))  # fmt: skip
"""What `changes` calls."""


def autocast_devices() -> tuple[str, ...]:
    """Devices whose autocast settings are kept."""
    return AUTOCAST_DEVICES


def snapshot(whole: bool = True) -> TorchState:
    """The settings now; without `whole`, those of the process are left out (reading them takes a while)."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return TorchState(
        torch.is_grad_enabled(),
        tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in autocast_devices()
        ),
        torch.is_autocast_cache_enabled(),
        nesting,
        torch.is_inference_mode_enabled(),
        tuple(_get_current_function_mode_stack()),
        tuple([read() for read, _ in SETTINGS]) if whole else (),
    )


def changes(before: TorchState, after: TorchState) -> list[tuple[Callable[..., object], tuple[object, ...]]]:
    """The calls that lead from `before` to `after`. Inference mode and function modes are not among them: see
    `World.check_state`."""
    steps: list[tuple[Callable[..., object], tuple[object, ...]]] = []
    for (device, was_enabled, was_dtype), (_, enabled, dtype) in zip(before.autocast, after.autocast, strict=False):
        if was_enabled != enabled:
            steps.append((torch.set_autocast_enabled, (device, enabled)))
        if was_dtype != dtype:
            steps.append((torch.set_autocast_dtype, (device, dtype)))
    if before.autocast_cache != after.autocast_cache:
        steps.append((torch.set_autocast_cache_enabled, (after.autocast_cache,)))
    step = (
        torch.autocast_increment_nesting
        if after.autocast_nesting > before.autocast_nesting
        else torch.autocast_decrement_nesting
    )
    steps += [(step, ())] * abs(after.autocast_nesting - before.autocast_nesting)
    if before.settings and after.settings and before.settings != after.settings:
        for (_, write), was, now in zip(SETTINGS, before.settings, after.settings, strict=True):
            if was != now:
                steps.append((write, (now,)))
    if before.grad_enabled != after.grad_enabled:
        steps.append((torch._C._set_grad_enabled, (after.grad_enabled,)))
    return steps


def restore(before: TorchState, whole: bool = True) -> None:
    """Puts the settings back as they were; without `whole`, those of the process stay."""
    for function, args in changes(snapshot(whole), before):
        function(*args)


def leave(before: TorchState, whole: bool = True) -> None:
    """Puts the settings back as they were, and takes off the function modes that were put on since. whole: of
    `restore`."""
    while torch._C._len_torch_function_stack() > len(before.function_modes):
        torch._C._pop_torch_function_stack()
    restore(before, whole)


_FLAGS = ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode",
          "_is_in_any_mode_without_ignore_compile_internals")  # fmt: skip
_HOME = vars(_python_dispatch)


@dataclass(slots=True)
class Surroundings:
    """What a compile must leave as it was. An exception of a signal's handler (Ctrl-C) may come anywhere, also where a
    context manager is about to put something back: `restore` is for the end of a compile that was cut short."""

    state: TorchState = field(default_factory=snapshot)
    dispatch_modes: int = field(default_factory=lambda: torch._C._len_torch_dispatch_stack())
    flags: dict[str, object] = field(default_factory=lambda: {name: _HOME[name] for name in _FLAGS if name in _HOME})

    def restore(self) -> None:
        while torch._C._len_torch_dispatch_stack() > self.dispatch_modes:
            torch._C._pop_torch_dispatch_stack(None)
        _HOME.update(self.flags)
        tell = _HOME.get("set_is_in_mode_without_ignore_compile_internals")  # native code has that flag too
        if tell is not None and _FLAGS[-1] in self.flags:
            tell(self.flags[_FLAGS[-1]])
        leave(self.state)
