"""torch.cumprod with a gradient of a fixed number of operators.

Takes the call's arguments; gives the recorded result, or None where the function is recorded as it comes. PyTorch
before 2.13 differentiates it, for tensors like those of a capture, by operators for each element of the dimension: a
graph of thousands of nodes. Always holds: the gradient is that of the product also where elements are 0: behind the
first 0 the product no longer depends on anything; at the first one it is what the other elements give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusewright.base.pytorch import methods, torch
from fusewright.sizes.interfaces import Recorder

aten = torch.ops.aten


def cumprod(recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `torch.cumprod(*args, **kwargs)`, or None."""
    given: dict[str, Any] = dict(zip(("input", "dim"), args)) | kwargs
    of: Any = given.get("input")
    dim, dtype = given.get("dim"), given.get("dtype")
    if recorder.level != "aten" or not given.keys() <= {"input", "dim", "dtype"} or len(args) > 2:
        return None
    if not isinstance(of, torch.Tensor) or not of.requires_grad or not torch.is_grad_enabled():
        return None
    if not isinstance(dim, int) or not -of.dim() <= dim < of.dim():
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    return _RunningProduct.apply(of if dtype in (None, of.dtype) else call(methods.to, (of, dtype), {}), dim)


class _RunningProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, factors: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        # Recorded as an operator that autograd sees: for gradients of gradients it runs again with PyTorch's formula.
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            products = aten.cumprod.default(factors, dim)
        ctx.dim = dim
        ctx.save_for_backward(factors, products)
        return products

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        if gradient is None:
            return None, None
        factors, products = ctx.saved_tensors
        dim = ctx.dim
        if factors.is_complex():
            factors, products = factors.conj().resolve_conj(), products.conj().resolve_conj()
        if torch.is_grad_enabled():  # a gradient of this one is wanted; eager has none of a single factor's
            single = factors.numel() <= 1 or factors.shape[dim] == 1
            return gradient if single else _as_sums(gradient, factors, dim), None
        zero = factors == 0
        zeros = zero.cumsum(dim)  # at and before each place
        before, first = zeros == 0, zero & (zeros == 1)
        weighted = (gradient * products).masked_fill(~before, 0)
        regular = weighted.flip(dim).cumsum(dim, dtype=weighted.dtype).flip(dim) / factors
        behind = factors.masked_fill((zeros != 1) | first, 1).cumprod(dim)  # products of what comes behind the first 0
        arrives = (behind * gradient).masked_fill(zeros != 1, 0).sum(dim, keepdim=True)
        singular = arrives * factors.masked_fill(~before, 1).prod(dim, keepdim=True)
        return torch.where(before, regular, torch.where(first, singular, 0)), None


def _as_sums(gradient: torch.Tensor, factors: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient by sums of products over the other elements, which have gradients also where elements are 0. Takes
    memory for the square of the dimension."""
    dim %= factors.dim()
    size = factors.shape[dim]
    one = torch.eye(size, dtype=torch.bool, device=factors.device).view(size, size, *(1,) * (factors.dim() - dim - 1))
    others = factors.unsqueeze(dim).masked_fill(one, 1).cumprod(dim + 1)
    before = one.cumsum(dim=1) == 0
    return (others * gradient.unsqueeze(dim)).masked_fill(before, 0).sum(dim + 1)
