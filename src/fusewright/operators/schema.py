"""What an ATen operator's schema says about aliasing, as plain tuples: what it writes, and which results are arguments
or views of them.

Takes an OpOverload; gives an `OperatorFacts`, computed once an operator.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import torch
from torch._ops import OpOverload

from fusewright.base.records import dataclass

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """Aliasing and effects of one operator.

    arguments  the schema's argument names in order; keyword-only ones follow the positional ones
    written    indexes (into `arguments`) of the arguments that the operator writes to
    returned   for each result: ("same", i) it is written argument i itself; ("view", i) it may be a view of argument i;
        None: fresh
    parts_of   the argument of which the elements of the single result, a list, are views (split, unbind); else None
    random     draws from a random generator, so order matters
    effect     has an effect that outputs do not show (an assertion, a collective), so it is never removed
    composite  PyTorch breaks it down into other operators, or has a kernel that does nothing but move elements
    foreach    works on lists of tensors, element by element (`_foreach_add`)
    recasts    its result has the bytes of its first argument under another dtype
    may_fail   raises for some values of its operands (an index out of range, a singular matrix, ints divided by 0)
    product    of matrices or windows: takes long, and its kernels refuse dtypes that meta kernels let pass
    """

    arguments: tuple[str, ...]
    written: tuple[int, ...]
    returned: tuple[tuple[str, int] | None, ...]
    parts_of: int | None
    random: bool
    effect: bool
    composite: bool
    foreach: bool
    recasts: bool = False
    may_fail: bool = False
    product: bool = False

    @property
    def is_view(self) -> bool:
        return any(r is not None and r[0] == "view" for r in self.returned)


# Operators that give no tensor, or whose point is not their result. They stay in order and are never removed.
_EFFECTS = frozenset({"aten::_assert_async", "aten::_assert_scalar"})

_RECASTS = frozenset({aten.view_as_complex.default, aten.view_as_real.default, aten.view.dtype})

_PRODUCT = re.compile(r"(^|_|b|add)mm|(^|add)mv(_|$)|dot$|matmul|(^|_)linear(_|$)|(^|_)conv(\d|_|olution)|attention")

# By name; in-place forms have an underscore more.
_MAY_FAIL = frozenset("""
    _assert_tensor_metadata _functional_assert_async _functional_assert_scalar _local_scalar_dense
    _padded_dense_to_jagged_forward
    index index_add index_copy index_fill index_put index_reduce index_select _index_put_impl _unsafe_index
    _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate index_select_backward
    gather gather_backward _gather_sparse_backward scatter scatter_add scatter_reduce take take_along_dim put
    masked_scatter masked_scatter_backward masked_select max_unpool2d max_unpool3d searchsorted bucketize
    embedding embedding_backward embedding_dense_backward embedding_sparse_backward embedding_renorm embedding_bag
    _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_forward_only
    _embedding_bag_per_sample_weights_backward _embedding_bag_sparse_backward one_hot repeat_interleave segment_reduce
    nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
    binary_cross_entropy binary_cross_entropy_backward multi_margin_loss multi_margin_loss_backward
    multilabel_margin_loss_forward multilabel_margin_loss_backward ctc_loss _ctc_loss
    bincount histc histogram histogramdd _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors
    multinomial bernoulli poisson binomial normal mode isin floor_divide remainder fmod
    cholesky cholesky_inverse cholesky_solve _cholesky_solve_helper inverse pinverse lu_solve lu_unpack _lu_with_info
    triangular_solve lstsq logdet slogdet svd qr matrix_exp
    _linalg_check_errors _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd
    linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
    linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve
    linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_matrix_norm
    linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
    linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
""".split())  # fmt: skip


_FACTS: dict[int, tuple[OpOverload, OperatorFacts]] = {}
"""By identity (the operator is kept with its facts): operators hash in Python, and this is asked tens of thousands of
times."""


def facts(op: OpOverload) -> OperatorFacts:
    """The facts of `op` from its schema and tags."""
    found = _FACTS.get(id(op))
    if found is None:
        found = _FACTS[id(op)] = op, _facts(op)
    return found[1]


def _facts(op: OpOverload) -> OperatorFacts:
    schema = op._schema
    written = tuple(i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    by_alias: dict[str, int] = {}
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            for name in argument.alias_info.before_set:
                by_alias.setdefault(name, i)
    returned: list[tuple[str, int] | None] = []
    for result in schema.returns:
        names = () if result.alias_info is None else tuple(result.alias_info.before_set)
        source = next((by_alias[name] for name in names if name in by_alias), None)
        if source is None:
            returned.append(None)
        else:
            returned.append(
                ("same" if source in written and result.alias_info.is_write else "view", source)  # type: ignore
            )
    listed = len(schema.returns) == 1 and str(schema.returns[0].type) == "List[Tensor]"
    listed = listed and returned == [None] and schema.returns[0].alias_info is not None
    viewed = (i for i, a in enumerate(schema.arguments) if a.alias_info is not None and i not in written)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # Where the CPU has a kernel, the parts are for other devices: they round halves at each step.
    known = torch._C._dispatch_has_kernel(op.name())  # the dispatcher has no `aten::size`, which native code asks for
    composite = known and has_kernel(op.name(), "CompositeImplicitAutograd") and (
        schema.name == "aten::native_channel_shuffle" or not has_kernel(op.name(), "CPU")
    )
    return OperatorFacts(
        arguments=tuple(a.name for a in schema.arguments),
        written=written,
        returned=tuple(returned),
        parts_of=next(viewed, None) if listed else None,
        random=torch.Tag.nondeterministic_seeded in op.tags,
        effect=schema.name in _EFFECTS
        or (not schema.returns and not written)
        or op.namespace in ("_c10d_functional", "c10d", "fusewright_c10d"),
        composite=composite,
        foreach=schema.name.startswith("aten::_foreach_") and not schema.overload_name.endswith("out"),
        recasts=op in _RECASTS,
        may_fail=schema.name == "fusewright::numpy_call"
        or (op.namespace == "aten" and _may_fail(schema.name.removeprefix("aten::"), schema.overload_name)),
        product=_PRODUCT.search(schema.name.partition("::")[2]) is not None,
    )


def _may_fail(name: str, overload: str) -> bool:
    if name in ("div", "divide"):  # of floats it gives infinity
        return overload.endswith("_mode")
    return name in _MAY_FAIL or name.removesuffix("_") in _MAY_FAIL


@cache
def list_of_views(op: OpOverload) -> int | None:
    """The index of the argument that the elements of a list result are views of (split, unbind)."""
    for index, one in enumerate(op._schema.arguments):
        if one.alias_info is not None and "*" in one.alias_info.after_set and not one.alias_info.is_write:
            return index
    return None


def argument(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], index: int) -> object:
    """The value that argument `index` of the schema has in this call (None when it keeps a default)."""
    known = facts(op)
    if index < len(args):
        return args[index]
    return kwargs.get(known.arguments[index])


ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default})
"""Operators whose result is zero, whatever they read."""


# Operators that write to arguments without saying so in their schema: (written arguments, they are written only if this
# argument is true).
HIDDEN_WRITES: dict[OpOverload, tuple[tuple[int, ...], int]] = {
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.cudnn_batch_norm.default: ((3, 4), 5),
    aten.miopen_batch_norm.default: ((3, 4), 5),
}


def written_by(op: OpOverload, args: Sequence[object]) -> tuple[int, ...]:
    """The arguments that a call with these positional arguments writes to."""
    hidden, asked = HIDDEN_WRITES.get(op, ((), 0))
    return hidden if hidden and args[asked] and args[hidden[0]] is not None else facts(op).written


# Functional forms that are not found by name and arguments: in-place operator -> (operator, positions of its arguments
# that are kept).
_FUNCTIONAL: dict[OpOverload, OpOverload] = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update.default: aten._batch_norm_with_update_functional.default,
    aten.rrelu_with_noise.default: aten.rrelu_with_noise_functional.default,
}


@cache
def functional_form(op: OpOverload) -> OpOverload | None:
    """The pure operator that computes what `op` writes: same arguments less the `out` ones; None when PyTorch has
    none."""
    found = _FUNCTIONAL.get(op)
    if found is not None:
        return found
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    name = op._schema.name.removeprefix("aten::")
    if any(a.is_out for a in op._schema.arguments):
        base = name
    elif name.endswith("_") and not name.endswith("__"):
        base = name[:-1]
    else:
        return None
    packet = getattr(aten, base, None)
    if packet is None or op.namespace != "aten":
        return None
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        same = [(a.name, str(a.type)) for a in candidate._schema.arguments] == wanted
        if same and not facts(candidate).written and candidate._schema.returns:
            return candidate
    return None
