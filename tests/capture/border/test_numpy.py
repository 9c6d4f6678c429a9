"""NumPy in compiled code: every program gives what it gives eagerly, types and dtypes included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fusewright

T = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
A = np.linspace(-1.0, 4.0, 12, dtype=np.float32).reshape(3, 4)
D = np.arange(6, dtype=np.float64)
I = np.array([3, 1, 2, 0])


def written(a: np.ndarray) -> tuple[np.ndarray, float]:
    a = a.copy()
    a[0] += 1
    a[:, 1] = 7
    return a, float(a.sum())


def through_both(t: torch.Tensor) -> torch.Tensor:
    y = (t * 2).numpy()
    z = np.sin(y) + np.cos(y).mean(axis=0)
    return torch.from_numpy(z) + 1


def shares_memory(t: torch.Tensor) -> torch.Tensor:
    t = t * 1
    t.numpy()[0] = 5.0
    return t + 1


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "ufunc": (lambda a: np.sin(a), (A,)),
    "ufunc of a tensor": (lambda t: np.exp(t.numpy()), (T,)),
    "binary": (lambda a, b: a + b, (A, A * 2)),
    "asarray of arrays": (lambda a: np.asarray([a * i for i in range(3)]), (A,)),
    "asarray of NumPy's numbers": (lambda a: a * np.asarray([np.float64(1.5), 2.0]).sum(), (A,)),
    "array of NumPy's numbers": (lambda a: a * np.array(((np.float32(1.5), 2.0), (1, 2))).sum(), (A,)),
    "asarray with a dtype": (lambda a: np.asarray((a, a + 1), dtype=np.float64), (A,)),
    "broadcast": (lambda a: a * a[0] - a[:, :1], (A,)),
    "promotion": (lambda a, i: a + i, (A, I)),
    "promotion with float64": (lambda d, i: d[:4] * i, (D, I)),
    "python scalar": (lambda a: a * 2 + 1, (A,)),
    "numpy scalar": (lambda a: a * np.float64(2.0), (A,)),
    "integers": (lambda i: i // 2 + i % 3, (I,)),
    "division of integers": (lambda i: i / 2, (I,)),
    "comparison": (lambda a: (a > 1) & (a < 3), (A,)),
    "where": (lambda a: np.where(a > 0, a, -a), (A,)),
    "sum": (lambda a: np.sum(a), (A,)),
    "sum over an axis": (lambda a: a.sum(axis=1), (A,)),
    "mean of integers": (lambda i: i.mean(), (I,)),
    "max and argmax": (lambda a: (a.max(axis=0), a.argmax()), (A,)),
    "std": (lambda a: (a.std(), a.var(axis=1, ddof=1)), (A,)),
    "cumsum": (lambda a: np.cumsum(a, axis=1), (A,)),
    "matmul": (lambda a: a @ a.T, (A,)),
    "dot and outer": (lambda d: (np.dot(d, d), np.outer(d, d)), (D,)),
    "einsum": (lambda a: np.einsum("ij,kj->ik", a, a), (A,)),
    "norm": (lambda a: np.linalg.norm(a, axis=1), (A,)),
    "reshape and transpose": (lambda a: a.reshape(2, -1).T, (A,)),
    "indexing": (lambda a, i: (a[1], a[:, ::2], a[..., None].shape, i[[0, 2]]), (A, I)),
    "mask": (lambda a: a[a > 1], (A,)),
    "concatenate and stack": (lambda a: (np.concatenate([a, a]), np.stack([a, a], axis=1)), (A,)),
    "sort": (lambda i: (np.sort(i), np.argsort(i)), (I,)),
    "unique": (lambda i: np.unique(i % 2, return_counts=True), (I,)),
    "clip and round": (lambda a: np.round(np.clip(a, 0, 2), 1), (A,)),
    "creation": (lambda t: torch.from_numpy(np.arange(4, dtype=np.float32)) + t, (T,)),
    "zeros_like": (lambda a: np.zeros_like(a) + np.ones(4), (A,)),
    "astype": (lambda a: a.astype(np.int64), (A,)),
    "dtype questions": (lambda a: (a.dtype == np.float32, a.dtype.itemsize, a.ndim, a.size, a.shape), (A,)),
    "in place": (written, (A,)),
    "tensor to array and back": (through_both, (T,)),
    "shared memory": (shares_memory, (T,)),
    "a function of both": (lambda t, a: t * torch.from_numpy(a) + torch.tensor(a.sum()), (T, A)),
    "torch function of an array": (lambda t, a: t + torch.as_tensor(a), (T, A)),
    "out by position": (lambda a: np.exp(a, a), (A,)),
    "out by position into a tensor": (lambda t: float(np.exp(t.numpy(), t.numpy()).sum()), (T,)),
    "out behind other arguments": (lambda a: np.cumsum(a, 1, None, a), (A,)),
    "an input that NumPy overwrites": (lambda a: (np.median(a, overwrite_input=True), np.sort(a, None)), (A,)),
    "an input that NumPy cleans": (lambda a: np.nan_to_num(np.log(a, a), copy=False), (A,)),
    "the same array": (lambda a: a, (A,)),
    "complex": (lambda d: np.fft.fft(d).real, (D,)),
    "random with a seed": (lambda t: t + torch.from_numpy(np.random.RandomState(0).rand(4)).float(), (T,)),
    "iteration": (lambda a: sum(row.sum() for row in a), (A,)),
    "an error": (lambda a: a @ a, (A,)),
    "nan": (lambda a: np.nanmean(np.where(a > 0, a, np.nan)), (A,)),
}


def outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except ValueError as error:
        return type(error), str(error)


def same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, tuple):
        assert len(got) == len(expected)
        for pair in zip(got, expected):
            same(*pair)
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected)
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=1e-6)  # sums are taken in another order
    else:
        assert got == expected


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str, backend: str) -> None:
    function, args = PROGRAMS[name]
    compiled = fusewright.compile(function, backend=backend)
    for scale in (1, 2, 1):
        values = tuple(value * scale for value in args)
        copies = tuple(value.copy() if isinstance(value, np.ndarray) else value.clone() for value in values)
        got, expected = outcome(compiled, values), outcome(function, copies)
        same(got, expected)
        for value, copy in zip(values, copies):
            same(value, copy)
        if name == "the same array":
            assert got is values[0]


WHOLE = [
    "ufunc", "ufunc of a tensor", "binary", "broadcast", "promotion", "promotion with float64", "python scalar", "comparison", "where", "sum",
    "sum over an axis", "mean of integers", "matmul", "reshape and transpose", "concatenate and stack", "tensor to array and back",
    "shared memory", "division of integers", "numpy scalar", "iteration", "a function of both", "torch function of an array",
]  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_what_maps_is_captured_whole(name: str) -> None:
    function, args = PROGRAMS[name]
    report = fusewright.explain(function)(*args)
    assert (report.graph_count, report.graph_break_count) == (1, 0), str(report)
    same(report.result, function(*args))


def test_arrays_of_other_kinds_and_shapes() -> None:
    compiled = fusewright.compile(lambda a: np.sin(a) * 2)
    read_only = A.copy()
    read_only.flags.writeable = False
    arrays = [
        A,
        A[::2],
        A[::-1],
        A.T,
        A.astype(np.float64),
        A.astype(np.float16),
        A.astype(">f4"),
        A[:0],
        A[0, 0:1].reshape(()),
        read_only,
        A,
    ]
    for array in arrays:
        same(compiled(array), np.sin(array) * 2)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_], ids=str
)
def test_promotion_is_numpys(dtype: Any) -> None:
    values = np.array([0, 1, 2, 3]).astype(dtype)
    for other in (2, 2.5, True, -1, np.float32(2), np.int8(2), A[0], I, np.array([True, False, True, True])):
        for operation in (np.add, np.subtract, np.maximum, np.divide, np.greater):

            def f(a: np.ndarray, operation: Any = operation, other: Any = other) -> Any:
                return operation(a, other)

            with np.errstate(all="ignore"):
                try:
                    expected = f(values)
                except (TypeError, OverflowError) as error:
                    with pytest.raises(type(error)):
                        fusewright.compile(f, backend="eager")(values)
                    continue
                same(fusewright.compile(f, backend="eager")(values), expected)  # what is recorded decides: no kernels


def test_arrays_that_share_memory_with_tensors() -> None:
    def f(t: torch.Tensor, a: np.ndarray) -> torch.Tensor:
        t.add_(1)
        return t + torch.from_numpy(a)

    def values() -> tuple[torch.Tensor, np.ndarray]:
        t = torch.ones(3)
        return t, t.numpy()

    compiled = fusewright.compile(f)
    for _ in range(2):
        torch.testing.assert_close(compiled(*values()), f(*values()))
    mine, theirs = np.ones(3, dtype=np.float32), np.ones(3, dtype=np.float32)
    torch.testing.assert_close(compiled(torch.zeros(3), mine), f(torch.zeros(3), theirs))


def test_stores_into_arrays_from_outside_are_seen_outside() -> None:
    def f(a: np.ndarray) -> np.ndarray:
        b = a + 1
        a[0] = 7
        a += 1
        return b * a

    compiled = fusewright.compile(f)
    for _ in range(2):
        mine, theirs = A.copy(), A.copy()
        same(compiled(mine), f(theirs))
        same(mine, theirs)


def test_an_array_that_changes_is_read_again() -> None:
    table = np.array([1.0, 2.0], dtype=np.float32)
    compiled = fusewright.compile(lambda t: t * torch.from_numpy(table) + float(table[0]))
    t = torch.ones(2)
    assert torch.equal(compiled(t), torch.tensor([2.0, 3.0]))
    table[0] = 5.0
    assert torch.equal(compiled(t), torch.tensor([10.0, 7.0]))
