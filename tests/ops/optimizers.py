"""The cases of the optimizer database: every optimizer with every input of PyTorch's own tests, in the forms that training loops write.

Takes an entry of `optim_db`, a dtype and a form; gives functions of parameters and gradients. Forms: "step" (the compiled `step`, between
whose calls the learning rate changes, the state is saved and loaded, and a gradient is missing), "groups" (the same with parameter
groups), "closure" (`step(closure)`), "training" (a compiled training step), "inside" (the optimizer is made in the compiled function),
"sparse" (sparse gradients).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.ops.cases import Case, Transform, spread
from tests.ops.opinfo import optimizer_inputs

FORMS = ("step", "groups", "closure", "training", "inside", "sparse")
SHAPES = ((3, 4), (2, 3))
MORE_SHAPES = ((4,), ())  # which Muon refuses


def supports(info: Any, dtype: torch.dtype, form: str) -> bool:
    return (
        info.only_supports_sparse_grads <= (form == "sparse")
        # How often LBFGS asks its closure depends on what rounding leaves of a loss.
        and (not info.step_requires_closure or dtype is torch.float64)
        and (dtype.is_floating_point or (dtype.is_complex and info.supports_complex))
        and (form != "sparse" or info.supports_sparse or info.only_supports_sparse_grads)
        and (form != "groups" or info.supports_param_groups)
    )


def optimizer_cases(info: Any, dtype: torch.dtype, form: str, limit: int = 0, device: str = "cpu") -> Iterator[Case]:
    torch.manual_seed(0)
    shapes = SHAPES if info.name == "Muon" or form == "sparse" else SHAPES + MORE_SHAPES
    for index, given in spread(optimizer_inputs(info, dtype, device), limit):
        if form in ("closure", "training") and given.kwargs.get("differentiable"):
            continue  # a backward gives gradients to leaves, and those are not written to under autograd
        values = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
        gradients = [[torch.randn_like(value) for value in values] for _ in range(4)]
        if info.name != "LBFGS":  # which takes views
            for row in (values, *gradients):
                row[1] = row[1].t()
            if not given.kwargs.get("fused"):  # eager's kernels take a gradient's elements in the order of memory
                gradients[1][0] = gradients[1][0].t().contiguous().t()
        make = _FORMS[form](info, given.kwargs)
        name = f"{info.name} {str(dtype)[6:]} {form} #{index} {given.kwargs}"
        yield Case(name, make, (values, gradients), {}, graphs=8)


Make = Callable[[Transform], Callable[..., Any]]


def _parameters(values: list[torch.Tensor], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Such as the optimizer may write to: one that is differentiable takes no leaves."""
    if kwargs.get("differentiable"):
        return [value.requires_grad_().clone() for value in values]
    return [torch.nn.Parameter(value.clone()) for value in values]


def _made(info: Any, parameters: Any, kwargs: dict[str, Any]) -> torch.optim.Optimizer:
    return info.optim_cls(parameters, **copy.deepcopy(kwargs))  # type: ignore[no-any-return]


def _give(parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()


def _outcome(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], *more: Any) -> Any:
    state = [[(name, held) for name, held in optimizer.state[one].items()] for one in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    total = sum(one.abs().sum() for one in parameters)
    leaves = [] if total.grad_fn is None else [one for one in parameters if one.is_leaf]
    return parameters, state, rates, torch.autograd.grad(total, leaves) if leaves else (), more


def _stepped(info: Any, kwargs: dict[str, Any], grouped: bool, sparse: bool = False) -> Make:
    def make(transform: Transform) -> Callable[..., Any]:
        def run(values: list[torch.Tensor], gradients: list[list[torch.Tensor]]) -> Any:
            parameters = _parameters(values, kwargs)
            groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]
            optimizer = _made(info, groups if grouped else parameters, kwargs)
            needs_closure = (lambda: parameters[0].abs().sum(),) if info.step_requires_closure else ()
            step = transform(optimizer.step)
            for count, row in enumerate(gradients):
                _give(parameters, [one.to_sparse() if sparse else one for one in row])
                if count == 1:
                    for group in optimizer.param_groups:
                        group["lr"] = group["lr"] * 0.5
                if count == 2 and not kwargs.get("differentiable"):
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                if count == 3:
                    parameters[0].grad = None
                step(*needs_closure)
            return _outcome(optimizer, parameters)

        return run

    return make


def _loss(parameters: list[torch.Tensor], row: list[torch.Tensor]) -> torch.Tensor:
    terms = [((parameter - wanted).abs() ** 2).sum() for parameter, wanted in zip(parameters, row, strict=True)]
    return torch.stack(terms).sum()


def _with_closure(info: Any, kwargs: dict[str, Any]) -> Make:
    def make(transform: Transform) -> Callable[..., Any]:
        def run(values: list[torch.Tensor], gradients: list[list[torch.Tensor]]) -> Any:
            parameters = _parameters(values, {})
            optimizer = _made(info, parameters, kwargs)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = _loss(parameters, gradients[0])
                loss.backward()
                return loss

            step = transform(optimizer.step)
            return _outcome(optimizer, parameters, [step(closure) for _ in range(3)])

        return run

    return make


def _trained(info: Any, kwargs: dict[str, Any]) -> Make:
    def make(transform: Transform) -> Callable[..., Any]:
        def run(values: list[torch.Tensor], gradients: list[list[torch.Tensor]]) -> Any:
            parameters = _parameters(values, {})
            optimizer = _made(info, parameters, kwargs)

            def step(row: list[torch.Tensor]) -> torch.Tensor:
                def closure() -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = _loss(parameters, row)
                    loss.backward()
                    return loss

                if info.step_requires_closure:
                    return optimizer.step(closure)  # type: ignore[return-value]
                loss = closure()
                optimizer.step()
                return loss.detach()

            compiled = transform(step)
            return _outcome(optimizer, parameters, [compiled(row) for row in gradients])

        return run

    return make


def _inside(info: Any, kwargs: dict[str, Any]) -> Make:
    def make(transform: Transform) -> Callable[..., Any]:
        def run(values: list[torch.Tensor], gradients: list[list[torch.Tensor]]) -> Any:
            parameters = _parameters(values, kwargs)
            _give(parameters, gradients[0])

            def whole() -> Any:
                optimizer = _made(info, parameters, kwargs)
                needs_closure = (lambda: parameters[0].abs().sum(),) if info.step_requires_closure else ()
                optimizer.step(*needs_closure)
                optimizer.step(*needs_closure)
                return optimizer

            return _outcome(transform(whole)(), parameters)

        return run

    return make


_FORMS: dict[str, Callable[[Any, dict[str, Any]], Make]] = {
    "step": lambda info, kwargs: _stepped(info, kwargs, False),
    "groups": lambda info, kwargs: _stepped(info, kwargs, True),
    "sparse": lambda info, kwargs: _stepped(info, kwargs, False, True),
    "closure": _with_closure,
    "training": _trained,
    "inside": _inside,
}
