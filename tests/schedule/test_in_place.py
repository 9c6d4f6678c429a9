"""Writes to part of an input happen where it is, and only where nobody could tell the difference."""

import logging
import re

import pytest
import torch

import fusewright


def one_row(cache, x, i):
    cache.index_copy_(1, i, x)
    return (cache * 2).sum(1)


def by_index(cache, x, i):
    cache[:, i] = x
    return cache.sum()


def of_fixed_width(cache, x, i):
    """The cache's width is a size of its own until it meets the 8."""
    cache.index_copy_(1, i, x.flatten().reshape(-1, 1, 8))
    return cache.sum(1)


def twice(cache, x, i):
    cache.index_add_(1, i, x)
    middle = cache.exp().sum()
    cache.index_add_(1, i, x)
    return middle, cache + 1


def returned(cache, x, i):
    cache[:, i] = x
    return cache, cache.sum()


def largest(cache, x, i):
    return cache.scatter_reduce_(1, i.reshape(1, 1, 1).expand(x.shape), x, "amax").sum()


def old_value_is_read(cache, x, i):
    before = cache.sum()
    cache[:, i] = x
    return before, cache.sum()


def old_value_is_written(cache, x, i):
    cache[:, i] = x + cache[:, :1]
    return cache.sum()


def old_value_is_returned(cache, x, i):
    changed = cache.index_copy(1, i, x)
    kept = cache.clone()
    cache.copy_(changed)
    return kept, changed


def result_is_private(cache, x, i):
    changed = cache.index_copy(1, i, x)
    cache.copy_(changed)
    return changed


def other_layout(cache, x, i):
    cache.copy_(cache.index_copy(1, i, x).transpose(0, 2).contiguous().transpose(0, 2))
    return cache.sum()


IN_PLACE = [one_row, by_index, returned, of_fixed_width]
OTHERS = [
    twice,
    largest,
    old_value_is_read,
    old_value_is_written,
    old_value_is_returned,
    result_is_private,
    other_layout,
]


def compare(function, make, calls=5, **options):
    compiled = fusewright.compile(function, **options)
    ours, theirs = make(), make()
    for number in range(calls):
        x, i = (
            torch.randn(2, 1, 8).to(ours.dtype),
            torch.tensor([number % 4 - (number % 3 == 2 and function is by_index)]),
        )
        with torch.no_grad():
            torch.testing.assert_close(compiled(ours, x, i), function(theirs, x, i))
        torch.testing.assert_close(ours, theirs)
    return compiled, ours, theirs


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("function", IN_PLACE + OTHERS, ids=lambda f: f.__name__)
def test_results_and_the_input_are_eagers(function, dtype, dynamic):
    if dtype is torch.int64 and function is twice:
        pytest.skip("exp of integers")
    compare(function, lambda: torch.arange(2 * 16 * 8).reshape(2, 16, 8).to(dtype) % 7, dynamic=dynamic)


@pytest.mark.parametrize("layout", ["transposed", "part of another", "offset"])
@pytest.mark.parametrize("function", IN_PLACE + OTHERS, ids=lambda f: f.__name__)
def test_inputs_laid_out_otherwise(function, layout):
    def make():
        values = torch.arange(2 * 16 * 8, dtype=torch.float32).reshape(2, 16, 8) % 5
        if layout == "transposed":
            return values.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        if layout == "offset":
            return torch.cat([torch.zeros(3), values.flatten()])[3:].view(2, 16, 8)
        return torch.stack([values, values + 1], -1)[..., 0]

    compare(function, make)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", IN_PLACE, ids=lambda f: f.__name__)
def test_nothing_is_copied(function, dynamic, caplog):
    fusewright.set_logs(loops=True, schedule=True)
    try:
        with caplog.at_level(logging.INFO):
            compare(function, lambda: torch.ones(2, 16, 8), calls=1, dynamic=dynamic)
    finally:
        fusewright.set_logs(loops=False, schedule=False)
    plans = [record.getMessage() for record in caplog.records if record.name == "fusewright.schedule"]
    assert plans and "check(" in plans[0]
    lines = [line.strip() for line in plans[0].splitlines()]
    assert not [line for line in lines if re.match(r"buf\d+\[.*\] = in\d+\[", line)], plans[0]
    stores = [line for line in lines if re.match(r"in\d+\[", line)]
    assert stores and all("{" in line for line in stores), plans[0]  # by an index: no copy back


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", IN_PLACE, ids=lambda f: f.__name__)
def test_a_wrong_index_changes_nothing_and_raises_eagers_error(function, dynamic):
    compiled, ours, theirs = compare(function, lambda: torch.zeros(2, 16, 8), dynamic=dynamic)
    before = ours.clone()
    x = torch.randn(2, 1, 8)
    with torch.no_grad(), pytest.raises(IndexError) as expected:
        function(theirs, x, torch.tensor([99]))
    with torch.no_grad(), pytest.raises(IndexError) as found:
        compiled(ours, x, torch.tensor([99]))
    assert str(found.value) == str(expected.value)
    assert torch.equal(ours, before)


def outcome(function, *args):
    """The exception's class, or the result; and what the arguments hold then."""
    try:
        result = function(*args)
    except Exception as error:
        result = type(error)
    return result, args


def scattered(a, b):
    return a.scatter_(0, torch.zeros_like(a, dtype=torch.int64), 0.25)


def put(a, b):
    return a.index_put_((b.long(),), b)


@pytest.mark.parametrize("update", [scattered, put, lambda a, b: a.index_add_(0, b.long(), b), torch.Tensor.mul_])
def test_a_branch_on_what_was_written_that_goes_the_other_way(update):
    """What was taken for granted is known to be wrong behind the write: the call that is repeated finds the old value."""

    def f(a, b):
        return a + 1 if update(a, b).sum() > 0 else a - 1

    compiled = fusewright.compile(f, options={"speculate": True})
    for sign in (1, 1, -1):
        expected, found = (outcome(function, sign * torch.ones(3), torch.ones(3)) for function in (f, compiled))
        torch.testing.assert_close(found, expected)


def masked(a, b):
    a.mul_(0)
    b.add_(1)
    a[a > 1] = b


def weight_of_other_channels(a, b):
    wide = b.abs().expand(5, 3, 3)
    made = torch.nn.functional.conv_transpose1d(wide, wide)
    b.add_(1)
    return made


def singular(a, b):
    a.add_(1)
    made = torch.linalg.inv(b.expand(3, 3))
    b.add_(1)
    return made


@pytest.mark.parametrize("function", [masked, weight_of_other_channels, singular], ids=lambda f: f.__name__)
def test_an_operator_that_fails_leaves_what_eager_leaves(function):
    """What was written before it, and not what is written behind it."""
    compiled = fusewright.compile(function)
    with torch.no_grad():
        expected, found = (outcome(f, torch.ones(1), torch.ones(3)) for f in (function, compiled))
    assert isinstance(expected[0], type) and found[0] is expected[0]
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("pick", [lambda t, i: t[i] * 2, lambda t, i: t.index_select(1, i)])
@pytest.mark.parametrize("shape", [(4,), (1, 7)])
def test_an_update_shares_neither_a_kernel_nor_a_region_with_a_check(shape, pick):
    """An embedding whose number is wrong: the other input has kept its value when eager repeats the call."""

    def f(state, table, number):
        row = pick(table, number)
        state.add_(1)
        return row

    compiled = fusewright.compile(f, dynamic=False)
    state, table = torch.zeros(shape), torch.randn(3, 4)
    with torch.no_grad():
        compiled(state, table, torch.tensor(2))
        assert torch.equal(state, torch.ones(shape))
        for function in (f, compiled):
            with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range in self|DATA)"):
                function(state, table, torch.tensor(7))
    assert torch.equal(state, torch.ones(shape))


FAILS = {
    "an index": (lambda table, number: table[number], IndexError),
    "a row": (lambda table, number: table.index_select(0, number), (IndexError, RuntimeError)),
    "an embedding": (lambda table, number: torch.nn.functional.embedding(number, table), IndexError),
    "a divisor": (lambda table, number: 5 // (number - 7), RuntimeError),
    "a remainder": (lambda table, number: 5 % (number - 7), RuntimeError),
}


@pytest.mark.parametrize("name", FAILS)
def test_what_the_program_catches_around_a_check(name):
    """The update stands before the check in the program, and is done once; the handler runs."""
    fails, raised = FAILS[name]

    def f(state, table, number):
        table = torch.nn.functional.batch_norm(table, state, state.exp(), training=True)
        try:
            row = fails(table, number)
        except raised:
            row = state * 3
        return row, table * 2

    compiled = fusewright.compile(f, fullgraph=True)
    table = torch.randn(3, 4)
    for number in (2, 7, 1):
        ours, theirs = torch.ones(4), torch.ones(4)
        with torch.no_grad():
            found, expected = (g(state, table, torch.tensor([number])) for g, state in ((compiled, ours), (f, theirs)))
        torch.testing.assert_close((ours, found), (theirs, expected))


def test_sizes_that_are_known_late_need_no_other_layout(caplog):
    """The heads and features of the cache are sizes of their own until they meet those of what is written."""

    def attend(cache, x, i, query):
        cache.index_copy_(2, i, x.view(x.shape[0], x.shape[1], -1, 8).transpose(1, 2))
        return torch.nn.functional.scaled_dot_product_attention(query, cache, cache)

    compiled = fusewright.compile(attend, dynamic=True)
    caches = [torch.zeros(2, 4, 16, 8) for _ in range(2)]
    x, i, query = torch.randn(2, 1, 32), torch.tensor([3]), torch.randn(2, 4, 1, 8)
    fusewright.set_logs(aot_graphs=True)
    try:
        with torch.no_grad(), caplog.at_level(logging.INFO):
            torch.testing.assert_close(compiled(caches[0], x, i, query), attend(caches[1], x, i, query))
    finally:
        fusewright.set_logs(aot_graphs=False)
    torch.testing.assert_close(*caches)
    graphs = [record.getMessage() for record in caplog.records if record.name == "fusewright.aot_graphs"]
    assert graphs and "index_copy" in graphs[0] and not any("clone" in graph for graph in graphs)


def test_an_input_that_takes_over_another():
    def f(a, b):
        a.copy_(b)
        return a + 1

    compiled = fusewright.compile(f, dynamic=False)
    a, b = torch.zeros(4), torch.randn(4)
    with torch.no_grad():
        assert torch.equal(compiled(a, b), b + 1)
    assert torch.equal(a, b)
