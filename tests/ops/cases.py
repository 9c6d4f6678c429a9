"""The cases of the sweep: every operator of PyTorch's own tests, with its samples, in the forms that users write.

Takes an entry of `op_db` (or `module_db`), a dtype and a form; gives functions with arguments. Forms: "function" as sampled, "method",
"inplace" (`x.op_(...)` on a copy), "out" (`out=` tensors of the right type), "gradient" (`torch.autograd.grad` of the result),
"gradgrad" (the gradient of that), "wrapped" ("gradient" of tensors that wrap others), "errors" (arguments that eager refuses).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.ops import wrapped
from tests.ops.compare import tensors_of

FORMS = ("function", "method", "inplace", "out", "gradient", "gradgrad", "wrapped", "errors")
DIFFERENTIATED = frozenset({"gradient", "gradgrad", "wrapped"})
Transform = Callable[[Any], Callable[..., Any]]
UNINITIALISED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
"""Operators whose results hold whatever was in memory."""


def _up_to_phase(result: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """What is determined of singular vectors and values (u, s, v): the vectors only up to a phase that each pair shares."""
    u, s, v = result
    return u.abs(), s, v.abs(), torch.einsum("...ik,...jk->...kij", u, v.conj())


def _without_generator_state(results: Sequence[Any]) -> Any:
    """The attention and the logarithms of its sums. On a GPU the seed and its offset, which follow, are memory that is
    not written to where nothing is dropped."""
    return results[:2]


INVARIANTS: dict[str, Callable[[Any], Any]] = {
    "pca_lowrank": _up_to_phase,
    "svd_lowrank": _up_to_phase,
    "torch.ops.aten._efficient_attention_forward": _without_generator_state,
    "torch.ops.aten._flash_attention_forward": _without_generator_state,
}
"""Operators without a unique result."""


@dataclass(slots=True)
class Case:
    """`make(transform)(*args, **kwargs)` is what is compared, with `transform` the identity and then `fusewright.compile`; `name` says which
    sample. Of a result that is not determined by the arguments alone, `invariants` is what is compared, beside types and layouts."""

    name: str
    make: Callable[[Transform], Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: bool = True
    gradients: bool = False  # the result is (the function's own result, gradients...)
    invariants: Callable[[Any], Any] | None = None
    graphs: int = 1  # at most so many, of a run that calls what is compiled several times


def operator_name(op: Any) -> str:
    """The entry's name with its variant: two entries of `op_db` may share a name."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def supports(op: Any, dtype: torch.dtype, form: str, device: str = "cpu") -> bool:
    if form == "wrapped" and (op.name in wrapped.LEFT_OUT or dtype.is_complex):
        return False
    if form not in ("function", "inplace", "gradient") and getattr(op, "supports_njt", False):  # jagged tensors
        return False
    if form in DIFFERENTIATED:
        return bool(
            op.supports_autograd
            and dtype in op.supported_backward_dtypes(device)
            and (form != "gradgrad" or op.supports_gradgrad)
        )
    if form == "errors":
        return op.error_inputs_func is not None and dtype == torch.float32
    if dtype not in op.supported_dtypes(device):
        return False
    if form == "method":
        return isinstance(getattr(op, "method_variant", None), Callable)  # type: ignore[arg-type]
    if form == "inplace":
        return isinstance(getattr(op, "inplace_variant", None), Callable)  # type: ignore[arg-type]
    return form != "out" or bool(op.supports_out)


def spread(samples: list[Any], limit: int) -> list[tuple[int, Any]]:
    """At most `limit` (0: all) of the samples, evenly spread, the first and the last included."""
    count = len(samples)
    if not limit or count <= limit:
        return list(enumerate(samples))
    places = sorted({round(i * (count - 1) / max(1, limit - 1)) for i in range(limit)})
    return [(place, samples[place]) for place in places]


def operator_cases(op: Any, dtype: torch.dtype, form: str, limit: int = 0, device: str = "cpu") -> Iterator[Case]:
    """The cases of one operator; `limit`: at most so many samples (0: all)."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "errors":
            yield from _error_cases(op, limit, device)
            return
        samples = list(op.sample_inputs(device, dtype, requires_grad=form in DIFFERENTIATED))
    values = op.name.removeprefix("_refs.") not in UNINITIALISED
    for index, sample in spread(samples, limit):
        made = _FORMS[form](op, sample)
        if made is not None:
            make, args, kwargs = made
            gradients = form in DIFFERENTIATED
            invariants = None if gradients else INVARIANTS.get(op.name)
            yield Case(
                f"{operator_name(op)} {str(dtype)[6:]} {form} #{index}",
                make,
                args,
                kwargs,
                values,
                gradients,
                invariants,
            )


def _error_cases(op: Any, limit: int, device: str) -> Iterator[Case]:
    for index, error in spread(list(op.error_inputs(device)), limit):
        sample = error.sample_input
        yield Case(f"{operator_name(op)} errors #{index}", *_function(op, sample))


Made = tuple[Callable[[Transform], Callable[..., Any]], tuple[Any, ...], dict[str, Any]]


def _function(op: Any, sample: Any) -> Made:
    operator = op.op

    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    return lambda transform: transform(call), (sample.input, *sample.args), dict(sample.kwargs)


def _method(op: Any, sample: Any) -> Made | None:
    method = op.method_variant
    if not isinstance(sample.input, torch.Tensor):
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return lambda transform: transform(call), (sample.input, *sample.args), dict(sample.kwargs)


def _inplace(op: Any, sample: Any) -> Made | None:
    if sample.broadcasts_input or not isinstance(sample.input, torch.Tensor):
        return None
    variant = op.inplace_variant

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return variant(x, *args, **kwargs)

    return lambda transform: transform(call), (sample.input, *sample.args), dict(sample.kwargs)


def _out(op: Any, sample: Any) -> Made | None:
    operator = op.op
    args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
    torch.manual_seed(7)
    try:
        expected = operator(*args, **kwargs)
    except Exception:  # not a sample for this form: "function" reports it
        return None
    if not tensors_of(expected):
        return None
    out = pytree.tree_map(lambda t: torch.zeros_like(t) if isinstance(t, torch.Tensor) else t, expected)
    if isinstance(out, tuple):
        out = tuple(out)

    def call(out: Any, *args: Any, **kwargs: Any) -> Any:
        return operator(*args, out=out, **kwargs)

    return lambda transform: transform(call), (out, *args), kwargs


def _wanted(tree: Any) -> list[torch.Tensor]:
    return [t for t in tensors_of(tree) if t.requires_grad]


def _sampled(op: Any, sample: Any) -> Callable[..., Any]:
    operator, process = op.op, sample.output_process_fn_grad
    return lambda *args, **kwargs: process(operator(*args, **kwargs))


def _gradient(op: Any, sample: Any) -> Made | None:
    return _differentiated(op, sample, second=False)


def _gradgrad(op: Any, sample: Any) -> Made | None:
    return _differentiated(op, sample, second=True)


def _wrapped(op: Any, sample: Any) -> Made | None:
    made = _gradient(op, sample)
    return made and (lambda transform: wrapped.on_wrappers(made[0](transform)), *made[1:])


def _differentiated(op: Any, sample: Any, second: bool) -> Made | None:
    args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
    if not _wanted((args, kwargs)):
        return None
    function = _sampled(op, sample)
    return lambda transform: Differentiated(transform(function), second), args, kwargs


class Differentiated:
    """Calls `function` and gives its result together with the gradients of its arguments (and their gradients)."""

    def __init__(self, function: Callable[..., Any], second: bool) -> None:
        self.function = function
        self.second = second

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = _wanted((args, kwargs))
        result = self.function(*args, **kwargs)
        gradients = _gradients(_wanted(result), leaves, create_graph=self.second)
        if not self.second:
            return result, gradients
        return (
            result,
            gradients,
            _gradients([g for g in gradients if g is not None and g.requires_grad], leaves, create_graph=False),
        )


def _gradients(
    outputs: list[torch.Tensor], leaves: list[torch.Tensor], create_graph: bool
) -> tuple[torch.Tensor | None, ...]:
    if not outputs:
        return ()
    directions = [_direction(t) for t in outputs]
    return torch.autograd.grad(outputs, leaves, directions, create_graph=create_graph, allow_unused=True)


def _direction(output: torch.Tensor) -> torch.Tensor:
    """A gradient for an output, laid out as the output is: a gradient's layout follows that of what arrives."""
    if output.layout != torch.strided:
        return torch.ones_like(output)
    generator = torch.Generator().manual_seed(3)
    return torch.empty_like(output).copy_(torch.randn(output.shape, dtype=output.dtype, generator=generator))


_FORMS: dict[str, Callable[[Any, Any], Made | None]] = {
    "function": _function,
    "method": _method,
    "inplace": _inplace,
    "out": _out,
    "gradient": _gradient,
    "gradgrad": _gradgrad,
    "wrapped": _wrapped,
}


def foreach_cases(op: Any, dtype: torch.dtype, limit: int = 0, device: str = "cpu") -> Iterator[Case]:
    """The cases of one foreach operator, out of place and in place."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(op.sample_inputs(device, dtype, noncontiguous=False, allow_higher_dtype_scalars=True))
    for index, sample in spread(samples, limit):
        for form, operator in (("function", op.method_variant), ("inplace", op.inplace_variant)):
            if operator is None:
                continue

            def call(*args: Any, operator: Any = operator, **kwargs: Any) -> Any:
                return operator(*args, **kwargs)

            yield Case(
                f"{op.name} {str(dtype)[6:]} {form} #{index}",
                lambda transform, call=call: transform(call),
                (sample.input, *sample.args),
                dict(sample.kwargs),
            )


def module_cases(info: Any, dtype: torch.dtype, training: bool, limit: int = 0, device: str = "cpu") -> Iterator[Case]:
    """The cases of one module class: its forward, in train or eval mode. The module is an argument, so that each run has its own state."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(
            info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=False, training=training)
        )
    for index, sample in spread(samples, limit):
        constructor, call = sample.constructor_input, sample.forward_input
        if call is None:
            continue
        name = f"{info.module_cls.__module__.removeprefix('torch.')}.{info.module_cls.__name__}"
        made = _module_run(info, constructor, dtype, training, device)
        yield Case(
            f"{name} {str(dtype)[6:]} {'train' if training else 'eval'} #{index}", made, call.args, dict(call.kwargs)
        )


def _module_run(
    info: Any, constructor: Any, dtype: torch.dtype, training: bool, device: str
) -> Callable[[Transform], Callable[..., Any]]:
    def make(transform: Transform) -> Callable[..., Any]:
        torch.manual_seed(1)
        module: torch.nn.Module = (
            info.module_cls(*constructor.args, **constructor.kwargs).to(device, dtype).train(training)
        )
        transformed = transform(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            return transformed(*args, **kwargs), dict(module.state_dict())  # what a forward does to its buffers counts

        return run

    return make
