"""What is found in PyTorch's libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright import _native
from fusewright.runtime import torch_c

EMPTY: dict[str, Any] = {
    "name": "x", "inputs": "", "values": (0, 1), "symbols": (), "instructions": (), "slots": (), "steps": (), "outputs": (),
    "arena": 0, "constants": (), "single": False, "arena_limit": 1 << 30,
}  # fmt: skip


def test_every_function_that_has_no_replacement_is_found() -> None:
    optional = {"error_text", "inference_mode", "exclude_keys", "restore_keys", "wrap", "wrap_move", "bump_version"}
    if not torch.backends.cuda.is_built():
        optional |= {"cuda_stream", "cuda_guard", "cuda_guard_set", "delete_cuda_guard"}
    missing = {
        field for field, names in torch_c.FUNCTIONS.items() if all(torch_c.address(name) is None for name in names)
    }
    assert missing <= optional


def test_codes_are_pytorchs() -> None:
    assert torch_c.DEVICE_CODES["cpu"] == 0
    known = {
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.complex64,
    }
    assert known <= set(torch_c.DTYPE_CODES)
    assert len(set(torch_c.DTYPE_CODES.values())) == len(torch_c.DTYPE_CODES)


def test_an_unknown_symbol_has_no_address() -> None:
    assert torch_c.address("aoti_torch_no_such_function") is None


def test_excluded_keys_hide_autograd_and_autocast() -> None:
    keys = torch._C.DispatchKey
    bits = torch._C.DispatchKeySet.from_raw_repr(torch_c.excluded_keys())
    assert bits.has(keys.AutogradFunctionality) and bits.has(keys.AutocastCPU) and bits.has(keys.ADInplaceOrView)


def test_a_missing_required_function_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="empty_strided"):
        torch_c.configure(without=("empty_strided",))
    with pytest.raises(RuntimeError, match="not configured"):
        _native.Plan(**EMPTY)
    torch_c.configure()


def test_malformed_plans_are_refused() -> None:
    good = {**EMPTY, "inputs": "t"}
    assert _native.Plan(**good)(torch.ones(1)) == ()
    slot = (0, 0, 0, 6, 4, 0, -1, 0, 0, 0, 0)
    broken = [
        {"slots": (slot[:5],)},
        {"slots": ((0, 0, 7, *slot[3:]),)},
        {"slots": ((9, *slot[1:]),)},
        {"slots": ((*slot[:7], 3, 1, 1, 0),)},
        {"steps": ((3, 0),)},
        {"steps": ((0, "k", 0, 0, 1, (), ()),)},
        {"steps": ((0, "k", 8, 5, 1, (), ()),)},
        {"steps": ((2, "f", len, (), ((3, 2),), None, ()),)},
        {"steps": ((2, "f", len, (), ((0, 0),), None, ()),)},
        {"outputs": ((0, 0, 0, 0, 0, 0, -1, None),)},
        {"symbols": ((0, 0, -1),)},
        {"symbols": ((0, 4, 0),)},
        {"instructions": ((0, 2, 0, 0),)},
        {"arena": 2},
        {"single": True},
        {"inputs": "q"},
        {"slots": ((2, *slot[1:]),), "outputs": ((0, 0, 0, 0, 0, 0, -1, None),)},
    ]
    for change in broken:
        with pytest.raises(ValueError):
            _native.Plan(**{**good, **change})
    with pytest.raises(TypeError):
        _native.Plan(**{**good, "constants": (3,)})
