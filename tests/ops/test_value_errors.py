"""Operators whose eager kernels look at values, or at arguments that meta kernels do not look at: the same errors, the same kinds of tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fusewright

BACKENDS = ["native", "aot_eager", "eager"]
ZEROS = torch.zeros(4, 8, dtype=torch.int64)
REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "class too large": (lambda x: F.one_hot(x, 3), (torch.tensor([5]),)),
    "class below zero": (lambda x: F.one_hot(x, 3) + 1, (torch.tensor([-1, 2]),)),
    "constant class below zero": (lambda x: F.one_hot(torch.tensor([-1])) + x, (torch.ones(1),)),
    "constant class too large": (lambda x: F.one_hot(torch.tensor([1, 4]), 3) + x, (torch.ones(1),)),
    "dimension of softmax": (lambda x: F.softmax(x, 9), (torch.ones(2, 3),)),
    "dimension of log_softmax": (lambda x: F.log_softmax(x, -4), (torch.ones(2, 3),)),
    "complex of two dtypes": (torch.complex, (torch.ones(4), torch.ones(4, dtype=torch.float64))),
    "complex of bfloat16": (torch.complex, (torch.ones(4).bfloat16(), torch.ones(4).bfloat16())),
    "cat into its operand": (lambda x, y: torch.cat([x[:0], y], out=y), (torch.ones(4), torch.ones(4))),
    "classes of another type": (lambda x: F.one_hot(x, 3), (ZEROS.int(),)),
    "classes of bytes": (lambda x: F.one_hot(x), (ZEROS.byte(),)),
    "glu of integers": (F.glu, (ZEROS,)),
    "glu of truths": (F.glu, (ZEROS.bool(),)),
    "max_pool1d of integers": (lambda x: F.max_pool1d(x, 2), (ZEROS,)),
    "max_pool1d of bytes": (lambda x: torch.max_pool1d(x, 2), (ZEROS.byte(),)),
    "multi_margin_loss of integers": (F.multi_margin_loss, (ZEROS, ZEROS[0, :4])),
    "interpolation of integers": (lambda x: F.interpolate(x, scale_factor=1.7), (ZEROS[None],)),
    "upsampling of integers": (lambda x: F.upsample_nearest(x, scale_factor=2), (ZEROS[None],)),
    "index_fill at another type": (lambda x: x.index_fill(0, torch.tensor([1], dtype=torch.int32), 2), (ZEROS,)),
    "targets that are too small": (lambda x: F.nll_loss(x, ZEROS[None, :, 1:]), (torch.ones(1, 3, 4, 8),)),
    "targets that are too large": (lambda x: F.cross_entropy(x, ZEROS[None]), (torch.ones(1, 3, 4, 7),)),
    "targets of another batch": (lambda x: F.cross_entropy(x, ZEROS[None]), (torch.ones(2, 3, 4, 8),)),
    "mask of more dimensions": (lambda x, m: x.masked_scatter_(m, x * 2), (torch.ones(3), torch.ones(1, 3) > 0)),
    "empty range": (lambda x: x.random_(5, 3), (torch.ones(3),)),
    "hardswish of integers": (F.hardswish, (torch.ones(3, dtype=torch.int64),)),
    "logsigmoid of integers": (F.logsigmoid, (torch.ones(3, dtype=torch.uint8),)),
    "complex of integers": (torch.complex, (torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))),
    "complex of two types": (torch.complex, (torch.ones(3), torch.ones(3).half())),
    "softmax of integers": (lambda x: F.softmax(x, 0), (torch.ones(3, dtype=torch.int64),)),
    "batch norm of integers": (
        lambda x, *rest: torch.ops.aten._native_batch_norm_legit(x, *rest, False, 0.5, 1e-5),
        (torch.ones(2, 3, dtype=torch.uint8), *torch.ones(4, 3)),
    ),
    "batch norm by integers": (
        lambda x, *rest: torch.ops.aten._native_batch_norm_legit(x, *rest, True, 0.5, 1e-5),
        (torch.ones(2, 3), torch.ones(3, dtype=torch.int64), *torch.ones(3, 3)),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses(name: str, backend: str, dynamic: bool) -> None:
    function, args = REFUSED[name]
    with pytest.raises(Exception) as expected:
        function(*args)
    with pytest.raises(type(expected.value)) as raised:
        fusewright.compile(function, backend=backend, dynamic=dynamic)(*args)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_classes_that_fit(backend: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.one_hot(x, 3), F.one_hot(x[:0], 3), F.one_hot(torch.tensor([1, 4]), 5) + x.sum()

    compiled = fusewright.compile(program, backend=backend, fullgraph=True)
    for x in (torch.tensor([0, 2]), torch.tensor([1, 1])):
        for ours, eager in zip(compiled(x), program(x), strict=True):
            assert torch.equal(ours, eager)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operator_whose_name_is_a_keyword(backend: str) -> None:
    compiled = fusewright.compile(lambda x: x.random_(2, 3) + 1, backend=backend, fullgraph=True)
    assert compiled(torch.zeros(3)).tolist() == [3, 3, 3]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gradients", [False, True])
def test_tensors_that_are_made_sparse_or_quantised(gradients: bool, backend: str) -> None:
    def program(x: torch.Tensor, v: torch.Tensor) -> Any:
        s = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [2, 0, 1]]), v, (3, 3))
        y = x * 2
        return torch.sparse.mm(s, y), s.to_dense(), s.coalesce().values(), s.layout, s.is_sparse, y

    def quantised(x: torch.Tensor) -> Any:
        y = x + 1
        q = torch.quantize_per_tensor(y, 0.1, 3, torch.quint8)
        return q.dequantize(), q.int_repr(), q.is_quantized, q.dtype, q.q_scale(), y

    x, v = torch.randn(3, 4), torch.randn(3).requires_grad_(gradients)
    for function, args in ((program, (x, v)), (quantised, (x,))):
        fusewright.reset()
        for ours, eager in zip(fusewright.compile(function, backend=backend)(*args), function(*args), strict=True):
            assert type(ours) is type(eager)
            torch.testing.assert_close(ours, eager) if isinstance(eager, torch.Tensor) else None
            assert isinstance(eager, torch.Tensor) or ours == eager


WRITES = """
t.abs_() t.neg_() t.zero_() t.sigmoid_() t.round_() t.tril_() t.nan_to_num_() t.logical_not_() t.t_() t.add_(2) t.div_(o) t.fill_(2)
t.fill_(o[0,0]) t.clamp_(2) t.copy_(o) t.copy_(o[0]) t.addcmul_(o,o) t.lerp_(o,.5) t.addmm_(o[:,:2],o[:2]) t.index_add_(0,i,o[:1]) t.index_copy_(0,i,o[:1])
t.index_fill_(0,i,2.0) t.scatter_(0,i[None],2.0) t.scatter_add_(0,i[None],o) t.masked_fill_(o>0,2.0) t.index_put_((i,),o[0,0]) t.__setitem__(0,3.0)
t.__setitem__(o>0,3.0) t.cumsum_(0) t.fill_diagonal_(3.0) t.masked_scatter_(o>0,o) t.put_(i,o[0,:1]) t[None].baddbmm_(o[None,:,:2],o[None,:2]) t.addr_(o[:,0],o[0])
t.uniform_(1,1) t.bernoulli_(1.0) t.renorm_(2,0,1.0) t[0].fill_(3) t[:,0].addmv_(o[:,:2],o[0,:2]) F.elu_(t) F.threshold_(t,0.1,2.0) F.relu(t,inplace=True)
torch.add(o,1,out=t) torch.clamp(o,0,out=t) torch.mm(o[:,:2],o[:2],out=t) torch.cat([o],out=t) torch.stack([o[0]]*3,out=t) torch.sum(o.expand(2,3,4),0,out=t)
torch.index_select(o,0,i[:1].expand(3),out=t) torch.gather(o,0,i.expand(3,1),out=t[:,:1]) torch.cumsum(o,0,out=t) torch.where(o>0,o,o,out=t) torch.eye(3,4,out=t)
torch.softmax(o,0,out=t) torch.tril(o,out=t) torch.arange(4.0,out=t[0]) torch._foreach_add_([t],1.0) torch._foreach_zero_([t]) torch._foreach_copy_([t],[o])
""".split()  # fmt: skip
TARGETS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: x[:1].expand(3, 4), "overlapping": lambda x: x.as_strided((3, 4), (1, 1)), "plain": lambda x: x.view(3, 4),
    "expanded result": lambda x: (x * 2)[:1].expand(3, 4), "part": lambda x: x[:, 1:].as_strided((3, 4), (4, 1)),
}  # fmt: skip


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of several threads that write to one element, chance says which writes last: in eager code too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_writes_to_elements_that_share_memory(name: str, inside: bool) -> None:
    """Most operators refuse that, some write all the same."""
    for write in WRITES:
        act = eval(f"lambda t, o, i: {write}", {"F": F, "torch": torch})  # text of this file

        def function(t: torch.Tensor, act: Callable[..., object] = act) -> object:
            target = TARGETS[name](t) if inside else t
            act(target, torch.arange(12.0).view(3, 4), torch.tensor([1]))
            return target + 0

        found = []
        for run in (function, fusewright.compile(function)):
            whole = torch.arange(16.0)[:12].view(3, 4)
            try:
                found.append((run(whole if inside else TARGETS[name](whole)), whole))
            except (RuntimeError, IndexError) as error:
                found.append((type(error), whole))
        (eager, _), (ours, _) = found
        assert (ours is eager) if isinstance(eager, type) else torch.allclose(ours, eager, equal_nan=True), write
        assert torch.allclose(found[0][1], found[1][1], equal_nan=True), write


def put(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.index_put((index,), torch.tensor(1.0))


def scattered_and_written(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    part = x[: len(index) - 1]
    result = part.scatter(0, torch.zeros_like(part, dtype=torch.int64), 1.0)
    x.floor_()
    return result


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("dynamic", [False, None, True])
@pytest.mark.parametrize("function", [put, scattered_and_written])
def test_places_in_what_is_empty(function: Any, dynamic: bool | None, checked: bool) -> None:
    """Eager looks at no index where nothing is written, but it asks for a place in each dimension that is indexed."""
    compiled = fusewright.compile(function, dynamic=dynamic, options={"checked": checked}, recompile_limit=99)
    outcomes = set()
    for shape in ((4, 2, 6), (3, 2, 6), (0, 0, 6), (0, 2, 6), (2, 0, 6), (5, 0, 6)):
        for index in (torch.tensor([0]), torch.tensor([7]), torch.tensor([], dtype=torch.int64)):
            results: list[Any] = []
            for call in (function, compiled):
                try:
                    results.append(call(torch.ones(shape), index))
                except (IndexError, RuntimeError) as error:
                    results.append(type(error))
            outcomes.add(type(results[0]))
            assert type(results[0]) is type(results[1]), (shape, index)
            if isinstance(results[0], type):
                assert results[0] is results[1], (shape, index)
            else:
                torch.testing.assert_close(results[1], results[0])
    assert outcomes == ({torch.Tensor, type} if function is put else {torch.Tensor})
