"""Results that lie where a temporary was: nobody can tell, except by the memory that a call takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusewright
from fusewright import _native
from fusewright.tools.memory import measure

kept: list[Tensor] = []


@torch.library.custom_op("fusewright_tests::keep_given", mutates_args=())
def keep_given(x: Tensor) -> Tensor:
    kept.append(x)
    return x.sum()


@keep_given.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(())


def images(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def twice(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, y


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "bmm, relu": (lambda x, y: (x @ y).relu(), lambda: (torch.randn(4, 64, 32), torch.randn(4, 32, 64))),
    "linear, gelu": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        lambda: (torch.randn(2, 64, 32), torch.randn(128, 32), torch.randn(128)),
    ),
    "linear, gelu, small": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        lambda: (torch.randn(2, 3, 8), torch.randn(4, 8), torch.randn(4)),
    ),
    "convolution, relu": (
        lambda x, w, b: F.conv2d(x, w, b).relu(),
        lambda: (torch.randn(2, 3, 16, 16), torch.randn(8, 3, 3, 3), torch.randn(8)),
    ),
    "convolution, channels last": (
        lambda x, w, b: F.silu(F.conv2d(x, w, b)) * 2,
        lambda: (images(2, 3, 16, 16), torch.randn(8, 3, 3, 3), torch.randn(8)),
    ),
    "convolution to one place": (
        lambda x, w, b: F.silu(F.conv2d(x, w, b)) * 2,
        lambda: (images(1, 3, 3, 3), torch.randn(8, 3, 3, 3), torch.randn(8)),
    ),
    "convolution of one dimension": (
        lambda x, w, b: F.conv1d(x, w, b).sigmoid() + 1,
        lambda: (torch.randn(2, 3, 16), torch.randn(8, 3, 3), torch.randn(8)),
    ),
    "a chain": (
        lambda x, y: torch.tanh(torch.sigmoid(x @ y) @ y).exp(),
        lambda: (torch.randn(64, 64), torch.randn(64, 64)),
    ),
    "returned twice": (
        lambda x, y: twice((x @ y).relu()),
        lambda: (torch.randn(64, 32), torch.randn(32, 64)),
    ),
    "a result and views of it": (
        lambda x, w: [(y := F.linear(x, w).relu()), y.transpose(1, 2), y[0]],
        lambda: (torch.randn(4, 64, 32), torch.randn(64, 32)),
    ),
    "the temporary as well": (
        lambda x, y: [(z := x @ y), z.relu()],
        lambda: (torch.randn(64, 32), torch.randn(32, 64)),
    ),
    "a view of the temporary as well": (
        lambda x, y: [(z := x @ y)[:2], z.relu()],
        lambda: (torch.randn(64, 32), torch.randn(32, 64)),
    ),
    "two of one temporary": (
        lambda x, y: [(z := x @ y).relu(), z.sigmoid()],
        lambda: (torch.randn(64, 32), torch.randn(32, 64)),
    ),
    "another dtype of the same width": (
        lambda x, y: ((x @ y) * 10).to(torch.int32),
        lambda: (torch.randn(64, 32), torch.randn(32, 64)),
    ),
    "other strides": (
        lambda x, y: (x @ y).relu().t().contiguous(),
        lambda: (torch.randn(64, 32), torch.randn(32, 64)),
    ),
    "a write to the result": (
        lambda x, y: (x @ y).add(1).mul_(2).add_(1),
        lambda: (torch.randn(64, 32), torch.randn(32, 64)),
    ),
    "a write to an input": (
        lambda x, y: x.copy_((x @ y).relu()),
        lambda: (torch.randn(64, 64), torch.randn(64, 64)),
    ),
    "beside a transposed tensor": (
        lambda x, y, z: (x @ y).relu() + z.t(),
        lambda: (torch.randn(70, 32), torch.randn(32, 90), torch.randn(90, 70)),
    ),
    "beside a column": (
        lambda x, y, z: (x @ y).sigmoid() * z[:, None],
        lambda: (torch.randn(3, 32), torch.randn(32, 5), torch.randn(3)),
    ),
    "a mask beside it": (
        lambda x, y: [z := (x @ y) + 1, z > 0],
        lambda: (torch.randn(37, 32), torch.randn(32, 41)),
    ),
    "half of the result": (
        lambda x, y: torch.cat([(x @ y).relu(), (y @ x).relu()]),
        lambda: (torch.randn(64, 64), torch.randn(64, 64)),
    ),
    "a reader that keeps it": (
        lambda x, y: [keep_given(z := x @ y), z.relu()],
        lambda: (torch.randn(64, 32), torch.randn(32, 64)),
    ),
}  # fmt: skip


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def looks(tensor: Tensor, dynamic: bool) -> tuple[Any, ...]:
    # The stride of a dimension of one element, which says nothing, may be another one with sizes that vary.
    strides = tuple(0 if dynamic and size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (
        tensor.dtype, tuple(tensor.shape), strides, tensor.storage_offset(), tensor.untyped_storage().nbytes(),
        tensor.requires_grad, tensor.is_inference(),
    )  # fmt: skip


def memory(results: list[Tensor]) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in results]


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("mode", ["no gradients", "inference", "training", "varying sizes"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_nobody_can_tell(name: str, mode: str, device: str) -> None:
    function, make = PROGRAMS[name]
    dynamic = mode == "varying sizes"
    compiled = fusewright.compile(function, dynamic=dynamic)
    torch.manual_seed(0)
    context = torch.inference_mode if mode == "inference" else torch.no_grad
    if mode == "training":
        context = torch.enable_grad
    earlier: list[tuple[list[Tensor], list[Tensor]]] = []
    del kept[:]
    with context():
        for _ in range(3):
            given = tuple(tensor.to(device) for tensor in make())
            if mode == "training" and name != "a write to an input":
                given = tuple(tensor.requires_grad_() for tensor in given)
            mine = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given)
            wanted, found = tensors(function(*given)), tensors(compiled(*mine))
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(list(mine), list(given))
            assert [looks(one, dynamic) for one in found] == [looks(one, dynamic) for one in wanted]
            assert all(b._is_view() or not a._is_view() for a, b in zip(found, wanted))
            # Results share memory with one another, and with inputs, as eager's do.
            theirs, ours = memory([*wanted, *given]), memory([*found, *mine])
            for (a, b), (c, d) in zip(itertools.combinations(theirs, 2), itertools.combinations(ours, 2), strict=True):
                assert (a == b) == (c == d)
            for before, copies in earlier:
                assert not {*memory(before)} & {*memory(found)} or name == "a write to an input"
                torch.testing.assert_close(before, copies, rtol=0, atol=0)
            earlier.append((found, [one.detach().clone().requires_grad_(one.requires_grad) for one in found]))
            if mode == "training" and name != "a write to an input" and "keeps" not in name:
                differentiable = [k for k, one in enumerate(wanted) if one.requires_grad]
                if differentiable:
                    sums = (sum(some[k].sum() for k in differentiable) for some in (wanted, found))
                    gradients = [torch.autograd.grad(total, inputs) for total, inputs in zip(sums, (given, mine))]
                    torch.testing.assert_close(gradients[1], gradients[0])
        for theirs, ours in zip(kept[::2], kept[1::2], strict=True):
            torch.testing.assert_close(ours, theirs)


SIZE = 2 << 20
SAVING: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor], tuple[tuple[int, ...], ...]]] = {
    "bmm, relu": (torch.bmm, torch.relu, ((8, 256, 64), (8, 64, 256))),
    "linear, gelu": (F.linear, F.gelu, ((8, 256, 64), (256, 64), (256,))),
    "convolution, silu": (F.conv2d, F.silu, ((4, 4, 128, 128), (8, 4, 1, 1), (8,))),
}


def allocations(call: Callable[[], Any]) -> int:
    """The number of times that a call takes the memory of a result."""
    levels = [0, *(level for _, level in measure(call).steps)]
    return sum(after - before >= SIZE for before, after in itertools.pairwise(levels))


@pytest.mark.parametrize("name", SAVING)
def test_a_call_takes_the_memory_of_its_result_only(name: str) -> None:
    library, function, shapes = SAVING[name]
    given = [torch.randn(shape) for shape in shapes]
    compiled = fusewright.compile(lambda *given: function(library(*given)))
    with torch.no_grad():
        assert compiled(*given).nbytes == library(*given).nbytes == SIZE
        _native.release_memory()
        alone = allocations(lambda: library(*given))
        assert allocations(lambda: function(library(*given))) == alone + 1
        assert allocations(lambda: compiled(*given)) == alone and _native.memory_held() < SIZE
