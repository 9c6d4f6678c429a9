"""The updates of PyTorch's fused optimizers: one operator over lists of tensors, as the operators that it is made of.

Takes the arguments of `aten._fused_adam_` and its kin; records each parameter's update, which scheduling joins again.
Always holds: as in eager's kernels, values are computed in float32 (float64 for doubles) and rounded once, what depends
on the step count alone in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from fusewright.base.signals import GraphBreak

if TYPE_CHECKING:
    from fusewright.sizes.interfaces import Recorder

aten = torch.ops.aten
Run = Callable[..., Any]
_HALF = (torch.float16, torch.bfloat16)


def _adam(run: Run, values: dict[str, Any], step: Any, options: dict[str, Any], decoupled: bool = False) -> None:
    lr, beta1, beta2 = options["lr"], options["beta1"], options["beta2"]
    gradient = run(aten.neg.default, values["grads"]) if options["maximize"] else values["grads"]
    parameter = values["self"]
    if options["weight_decay"] and decoupled:
        parameter = run(aten.sub.Tensor, parameter, _times(run, parameter, lr, options["weight_decay"]))
    elif options["weight_decay"]:
        gradient = run(aten.add.Tensor, gradient, _times(run, parameter, options["weight_decay"]))
    mean = run(aten.lerp.Scalar, values["exp_avgs"], gradient, 1 - beta1)
    square = _times(run, run(aten.mul.Tensor, gradient, gradient), 1 - beta2)
    square = run(aten.add.Tensor, _times(run, values["exp_avg_sqs"], beta2), square)
    largest = square
    if options["amsgrad"]:
        largest = values["max_exp_avg_sqs"] = run(aten.maximum.default, values["max_exp_avg_sqs"], square)
    correction = [run(aten.rsub.Scalar, run(aten.pow.Scalar, beta, step), 1) for beta in (beta1, beta2)]
    root = run(aten.div.Tensor, run(aten.sqrt.default, largest), run(aten.sqrt.default, correction[1]))
    size = _times(run, run(aten.reciprocal.default, correction[0]), lr)
    change = run(aten.div.Tensor, run(aten.mul.Tensor, mean, size), run(aten.add.Scalar, root, options["eps"]))
    values |= {"self": run(aten.sub.Tensor, parameter, change), "exp_avgs": mean, "exp_avg_sqs": square}


def _sgd(run: Run, values: dict[str, Any], step: Any, options: dict[str, Any]) -> None:
    gradient = run(aten.neg.default, values["grads"]) if options["maximize"] else values["grads"]
    if options["weight_decay"]:
        gradient = run(aten.add.Tensor, gradient, _times(run, values["self"], options["weight_decay"]))
    if options["momentum"]:
        buffer = gradient
        if not options["is_first_step"]:
            kept = _times(run, values["momentum_buffer_list"], options["momentum"])
            buffer = run(aten.add.Tensor, kept, _times(run, gradient, 1 - options["dampening"]))
        values["momentum_buffer_list"] = buffer
        gradient = (
            run(aten.add.Tensor, gradient, _times(run, buffer, options["momentum"])) if options["nesterov"] else buffer
        )
    values["self"] = run(aten.sub.Tensor, values["self"], _times(run, gradient, options["lr"]))


def _adagrad(run: Run, values: dict[str, Any], step: Any, options: dict[str, Any]) -> None:
    gradient = run(aten.neg.default, values["grads"]) if options["maximize"] else values["grads"]
    if options["weight_decay"]:
        gradient = run(aten.add.Tensor, gradient, _times(run, values["self"], options["weight_decay"]))
    slowed = run(aten.add.Scalar, _times(run, run(aten.sub.Scalar, step, 1), options["lr_decay"]), 1)
    rate = _times(run, run(aten.reciprocal.default, slowed), options["lr"])
    total = run(aten.add.Tensor, values["state_sums"], run(aten.mul.Tensor, gradient, gradient))
    spread = run(aten.add.Scalar, run(aten.sqrt.default, total), options["eps"])
    change = run(aten.div.Tensor, run(aten.mul.Tensor, gradient, rate), spread)
    values |= {"self": run(aten.sub.Tensor, values["self"], change), "state_sums": total}


def _times(run: Run, tensor: Any, *factors: Any) -> Any:
    """The product with numbers or tensors of one element."""
    for factor in factors:
        tensor = run(aten.mul.Tensor if isinstance(factor, torch.Tensor) else aten.mul.Scalar, tensor, factor)
    return tensor


def _operator(
    func: OpOverload, update: Callable[..., None]
) -> Callable[[Recorder, tuple[Any, ...], dict[str, Any]], None]:
    def record(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
        if named.pop("grad_scale", None) is not None or named.pop("found_inf", None) is not None:
            raise GraphBreak("operator-failed", f"{func} unscales gradients")
        if update is _sgd and any(tensor.dtype in _HALF for tensor in named["self"]):
            raise GraphBreak(
                "operator-failed", f"{func} of half types, where PyTorch's kernel for a CPU computes something else"
            )
        lists = {name: value for name, value in named.items() if isinstance(value, (list, tuple))}
        options = {name: value for name, value in named.items() if name not in lists}
        run: Run = lambda op, *operands: recorder.dispatch(op, operands, {})  # noqa: E731
        for index in range(len(lists["self"])):
            tensors = {name: value[index] for name, value in lists.items() if value}
            step = tensors.pop("state_steps", None)
            if len({tensor.dtype for tensor in tensors.values()}) > 1:
                raise GraphBreak("operator-failed", f"{func} of different dtypes, which PyTorch's kernels refuse")
            if step is not None:
                step = recorder.dispatch(aten._to_copy.default, (step,), {"dtype": torch.float64})
            before = {name: _widened(recorder, tensor) for name, tensor in tensors.items()}
            values = dict(before)
            update(run, values, step, options)
            for name, value in values.items():
                if value is not before[name]:
                    run(aten.copy_.default, uncounted(recorder, tensors[name]), value)

    return record


def uncounted(recorder: Recorder, tensor: Any) -> Any:
    """What a kernel writes to that counts no write: the tensor, as `data` gives it."""
    shown = recorder.dispatch(aten.detach.default, (tensor,), {})
    shown.node.meta["data"] = True  # type: ignore[attr-defined]
    return shown


def _widened(recorder: Recorder, tensor: Any) -> Any:
    if tensor.dtype in _HALF:
        return recorder.dispatch(aten._to_copy.default, (tensor,), {"dtype": torch.float32})
    return tensor


_UPDATES: dict[str, Callable[..., None]] = {
    "_fused_adam_": _adam,
    "_fused_adamw_": functools.partial(_adam, decoupled=True),
    "_fused_sgd_": _sgd,
    "_fused_adagrad_": _adagrad,
}
FUSED_NAMES = tuple(_UPDATES)

FUSED_OPTIMIZERS = {
    operator: _operator(operator, update)
    for name, update in _UPDATES.items()
    for operator in (getattr(aten, name).default, getattr(aten, name).tensor_lr)
}
"""For each operator, what records it: called with the recorder and the operator's arguments."""
