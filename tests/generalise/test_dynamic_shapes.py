"""Programs over changing sizes: equal to eager at every size, with as few compiles as the program allows, and none of them eager."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import fusewright
from fusewright.base.events import STREAM, Broken, Captured, Compiled, Event, FellBack, InternalError, Skipped
from fusewright.base.own_methods import operators_replaced

pytestmark = pytest.mark.usefixtures("verified")


def compiles(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], **how: Any) -> int:
    """How many compiles these calls took; each gave what eager gives, gradients of the floating arguments included."""
    events: list[Event] = []
    compiled = fusewright.compile(function, **how)
    with STREAM.listening(events.append):
        for args in calls:
            mine, theirs = (
                [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
                for _ in range(2)
            )
            got, want = compiled(*mine), function(*theirs)
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride()
            if want.requires_grad:
                upstream = torch.randn_like(want)
                got.backward(upstream)
                want.backward(upstream)
                for a, b in zip(mine, theirs, strict=True):
                    if isinstance(a, torch.Tensor):
                        torch.testing.assert_close(a.grad, b.grad)
    bad = [event for event in events if isinstance(event, FellBack | InternalError | Skipped | Broken)]
    assert not bad, bad
    return sum(isinstance(event, Compiled) for event in events)


IMAGES = [(4, 3, 5, 6), (5, 3, 7, 7), (2, 3, 8, 9)]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_in_training(trains: bool, layout: torch.memory_format) -> None:
    """The statistics of the batch, and the running ones, over changing batches and image sizes."""
    norm = nn.BatchNorm2d(3)
    other = copy.deepcopy(norm)
    compiled = fusewright.compile(norm, dynamic=True)
    events: list[Event] = []
    with STREAM.listening(events.append):
        for shape in IMAGES:
            x = torch.randn(shape).to(memory_format=layout)
            mine, theirs = x.clone().requires_grad_(trains), x.clone().requires_grad_(trains)
            with torch.set_grad_enabled(trains):
                got, want = compiled(mine), other(theirs)
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride()
            if trains:
                upstream = torch.randn_like(want)
                got.backward(upstream)
                want.backward(upstream)
                torch.testing.assert_close(mine.grad, theirs.grad)
                torch.testing.assert_close(norm.weight.grad, other.weight.grad)
            torch.testing.assert_close(norm.running_var, other.running_var)
    assert [type(event) for event in events if isinstance(event, Compiled | InternalError | FellBack)] == [Compiled]


@pytest.mark.parametrize("how", [{"dynamic": True}, {}])
def test_changing_sizes_of_operators(how: dict[str, Any]) -> None:
    """Operators whose symbolic form once failed to compile."""
    most = 1 if how else 2
    x = lambda *shape: torch.randn(shape, requires_grad=True)
    assert (
        compiles(
            lambda x: functional.instance_norm(x, torch.zeros(3), torch.ones(3)), [(x(*s),) for s in IMAGES], **how
        )
        <= most
    )
    assert compiles(lambda x: functional.glu(x, 0), [(x(n),) for n in (8, 12, 22)], **how) <= most
    assert (
        compiles(
            lambda x, y: torch.slice_scatter(x, y, 0, 0, None, 2), [(x(n, 8), x(n // 2, 8)) for n in (8, 12, 20)], **how
        )
        <= most
    )


def test_half_of_two_is_one() -> None:
    """A size whose half broadcasts is known to be 2 from then on."""
    assert compiles(lambda x: functional.glu(x, 0), [(torch.randn(2, requires_grad=True),)], dynamic=True) == 1


def test_dropout_that_drops_nothing_gives_the_tensor_itself() -> None:
    for p, training in ((0.5, False), (0.0, True)):
        compiled = fusewright.compile(
            lambda x, p=p, training=training: functional.dropout(x, p, training), dynamic=True
        )
        x = torch.randn(5)
        assert compiled(x) is x


class Steps(nn.Module):
    """A cache that grows, and what the module notes of it, as generation has them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen = 0

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        h = self.linear(x)
        cache[0] = h if cache[0] is None else torch.cat([cache[0], h], 1)
        self.seen = x.shape[0]
        return (h @ cache[0].transpose(1, 2)).softmax(-1) @ cache[0], x.shape[0]


@pytest.mark.parametrize("how", [{"dynamic": True}, {}])
def test_a_batch_of_one_stands_for_larger_ones(how: dict[str, Any]) -> None:
    """The first and the further steps of a generation are two programs; each is compiled once, for one row and for several: what uses an
    argument as its memory will meet other sizes."""
    module = Steps()
    events: list[Event] = []
    compiled = fusewright.compile(module, **how)
    with torch.no_grad(), STREAM.listening(events.append):
        for rows, length in ((1, 5), (3, 7), (1, 4), (2, 1)):
            mine, theirs = [None], [None]
            for step in range(4):
                x = torch.randn(rows, length if step == 0 else 1, 8)
                want = module(x, theirs)
                module.seen = 0
                got = compiled(x, mine)
                torch.testing.assert_close(got, want)
                assert module.seen == rows and type(got[1]) is int
    assert not [event for event in events if isinstance(event, FellBack | InternalError | Skipped | Broken)]
    assert sum(isinstance(event, Compiled) for event in events) == 2


def attend(
    x: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A cache that is handed over, as functional code has it."""
    keys, values = x.sin(), x.cos()
    if cache is not None:
        keys, values = torch.cat([cache[0], keys], 1), torch.cat([cache[1], values], 1)
    return (x @ keys.transpose(1, 2)).softmax(-1) @ values, (keys, values)


def test_what_a_varying_function_meets_late_is_symbolic_at_once() -> None:
    """The further steps of a generation are symbolic from their first compile: their tokens are fewer than the prompt's."""
    events: list[Event] = []
    compiled = fusewright.compile(attend)
    with STREAM.listening(events.append):
        for rows, length in ((2, 5), (2, 9), (4, 3)):
            mine = theirs = None
            for step in range(4):
                x = torch.randn(rows, length if step == 0 else 1, 8)
                got, mine = compiled(x, mine)
                want, theirs = attend(x, theirs)
                torch.testing.assert_close(got, want)
    assert not [event for event in events if isinstance(event, FellBack | InternalError | Skipped | Broken)]
    assert sum(isinstance(event, Compiled) for event in events) <= 3  # the first prompt, the further steps, any prompt


def windows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([(x * 2 + y).softmax(1), x.mT.contiguous().mT], 1) + x.reshape(-1).sum()


@pytest.mark.parametrize(("how", "most"), [({"dynamic": True}, 1), ({}, 2)])
def test_windows_on_tensors_of_changing_sizes(how: dict[str, Any], most: int) -> None:
    """The strides of a window are no products of its sizes: they are symbols of their own."""
    calls = []
    for rows, columns, width in ((7, 9, 4), (5, 11, 3), (8, 8, 6), (3, 30, 2)):
        calls.append((torch.randn(rows, columns)[:, :width], torch.randn(rows, width)))
    assert compiles(windows, calls, **how) == most


def test_elements_that_share_memory_are_told_from_windows() -> None:
    calls = [(torch.randn(n).unfold(0, 4, 2),) for n in (10, 14, 20)] + [
        (torch.randn(n * 3, 8)[::3, ::2],) for n in (4, 7, 9)
    ]
    assert compiles(lambda x: x * 2 + x.mT.mT, calls, dynamic=True) <= 2


def test_sizes_given_as_ints() -> None:
    """A view by an int that changes ties it to sizes by a division: what is learnt there must not be written into itself."""

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        q = x.view(x.shape[0], count, 8, -1).transpose(-1, -2)
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        return functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)

    calls = [(torch.randn(b, h * 8, n), h) for b, h, n in ((2, 2, 5), (3, 4, 9), (1, 3, 7), (2, 5, 13))]
    assert compiles(heads, calls) <= 3


def test_rows_added_at_an_index() -> None:
    """The other sizes of what is added must be those of what it is added to: a guard where they are symbolic."""
    calls = [(torch.randn(m, 4), torch.randn(n, 4), torch.randint(0, m, (n,))) for n, m in ((5, 3), (9, 4), (12, 7))]
    assert compiles(lambda x, y, index: x.index_add(0, index, y), calls, dynamic=True) == 1


def test_a_window_beyond_its_tensor_raises_as_eager_does() -> None:
    for dynamic in (False, True):
        compiled = fusewright.compile(lambda x: x.as_strided((100,), (1,)) + 1, dynamic=dynamic)
        with pytest.raises(RuntimeError, match="out of bounds"):
            compiled(torch.randn(4, 3))


def test_a_write_to_a_window_of_the_last_part_of_a_tensor() -> None:
    def function(x):
        made = torch.tril_indices(x.numel(), x.numel())
        return made.chunk(2, 0)[-1].fill_diagonal_(2), made

    compiled = fusewright.compile(function, dynamic=True)
    with STREAM.listening(lambda event: failed.append(event) if isinstance(event, InternalError) else None):
        failed: list[object] = []
        for size in (10, 14):
            torch.testing.assert_close(compiled(torch.ones(size)), function(torch.ones(size)))
    assert not failed


def test_images_of_changing_sizes_through_windows_of_one_pixel() -> None:
    """Such convolutions are matrix products of any number of rows; those with steps keep the user's weights."""
    torch.manual_seed(0)
    parts = [
        nn.Conv2d(3, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 128, 1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
    ]
    net = nn.Sequential(
        *parts, nn.Conv2d(128, 96, 1, stride=2, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).eval()
    images = [
        (torch.randn(b, 3, h, w),)
        for b, h, w in ((2, 16, 16), (3, 17, 13), (1, 9, 21), (4, 32, 8), (1, 1, 1), (5, 7, 7))
    ]
    with torch.no_grad():
        assert compiles(net, images) <= 3
        assert compiles(net, images, dynamic=True) <= 2


def test_layers_of_one_input_over_any_number_of_rows() -> None:
    """They are one product where the example has few rows; its parts are windows on the result."""
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (layer(x).view(*x.shape[:2], 4, 32).transpose(1, 2) for layer in self.layers)
            return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    calls = [(torch.randn(b, n, 128),) for b, n in ((2, 8), (3, 5), (1, 9), (4, 1), (40, 30))]
    with torch.no_grad():
        assert compiles(Attention(), calls) == 2


class Memory:
    def __init__(self) -> None:
        self.state, self.last, self.notes = torch.zeros(2, 8), None, []


def test_what_keeps_its_sizes_stays_static() -> None:
    """A state that is replaced by one of the same shape, and results left in an argument, say nothing about sizes."""

    def step(x: torch.Tensor, memory: Memory) -> torch.Tensor:
        memory.state = memory.state * 0.5 + x
        memory.last = x * 2
        memory.notes.append(x + 1)
        return memory.state.abs()

    events: list[Event] = []
    compiled = fusewright.compile(step)
    mine, theirs = Memory(), Memory()
    with STREAM.listening(events.append):
        for _ in range(3):
            x = torch.randn(2, 8)
            assert torch.equal(compiled(x, mine), step(x, theirs))
    (graph,) = [event.graph for event in events if isinstance(event, Captured)]
    assert all(
        isinstance(size, int) for node in graph.nodes if node.op == "placeholder" for size in node.meta["type"].shape
    )


def test_broadcasting_batch_of_one_is_compiled_apart() -> None:
    """Where a batch of 1 does something else than larger ones, nothing is shared."""
    function = lambda x, y: (x + y).sum(0) if x.shape[0] == y.shape[0] else x * y.mean()
    calls = [(torch.randn(a, 3), torch.randn(b, 3)) for a, b in ((1, 4), (4, 4), (1, 1), (5, 2), (1, 7), (7, 7))]
    assert compiles(function, calls, dynamic=True) <= 5


NUMBERS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "slopes": lambda x, n: (
        functional.softplus(x, n, n) + functional.leaky_relu(x, n) + functional.elu(x, n) + functional.celu(x, n)
    ),
    "triangles": lambda x, n: x.tril(n) - x.triu(n),
    "deviation": lambda x, n: x.std(1, correction=n),
    "filled": lambda x, n: x.scatter(1, torch.zeros(4, 1, dtype=torch.long), n).index_fill(1, torch.tensor([2]), n),
    "arithmetic": lambda x, n: (x * n + x**n).clamp(max=n) - n / x,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_ints_that_stand_for_numbers(name: str) -> None:
    """An int that changes is a symbol; an operator that needs its value gets it, under a guard."""
    x = torch.rand(4, 6) + 0.5
    assert compiles(NUMBERS[name], [(x, n) for n in (2, 3, 4)]) <= 4


def test_a_constant_written_to_a_part_is_no_constant_elsewhere() -> None:
    """A scatter of one number, then a fill of another part by the same: the rest keeps its values."""
    function = lambda x: x.scatter(1, torch.zeros(4, 1, dtype=torch.long), 2).index_fill(1, torch.tensor([2]), 2)
    assert compiles(function, [(torch.rand(4, 6),)], dynamic=False) == 1


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_a_resized_signal_of_any_length_is_trained_whole(mode):
    def program(x, y):
        return functional.interpolate(x * 2, size=y.shape[-1:], mode=mode).square().mean()

    compiled = fusewright.compile(program, dynamic=True, fullgraph=True)
    for length in (5, 8, 13):
        x = torch.randn(2, 3, length, requires_grad=True)
        y = torch.randn(length + 2)
        (wanted,) = torch.autograd.grad(program(x, y), x)
        (found,) = torch.autograd.grad(compiled(x, y), x)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linspace_over_a_size(dtype: torch.dtype) -> None:
    """A grid of positions, as deformable attention has it; its ends are exact."""

    def grid(x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape
        return torch.linspace(0.5, height - 0.5, height, dtype=x.dtype)[:, None] / height + torch.linspace(
            -1, 1, width, dtype=x.dtype
        )

    assert (
        compiles(
            grid, [(torch.randn(s, dtype=dtype),) for s in ((5, 7), (8, 3), (2, 2), (33, 4), (100, 257))], dynamic=True
        )
        == 1
    )
    assert (
        compiles(
            lambda x: torch.linspace(2, -3, steps=x.shape[0] - 2) * 2,
            [(torch.randn(n),) for n in (9, 4, 12)],
            dynamic=True,
        )
        == 1
    )
    ends = fusewright.compile(lambda x: torch.linspace(0.1, 0.7, x.shape[0], dtype=dtype), dynamic=True)(
        torch.randn(11)
    )
    assert ends[0] == torch.tensor(0.1, dtype=dtype) and ends[-1] == torch.tensor(0.7, dtype=dtype)
    with pytest.raises(RuntimeError, match="must be non-negative"):
        fusewright.compile(lambda x: torch.linspace(0, 1, x.shape[0] - 5), dynamic=True)(torch.randn(3))


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers_over_any_length(kind: type[nn.RNNBase], batch_first: bool) -> None:
    """One operator, not a step for each element of the sequence."""
    net = kind(6, 5, 2, batch_first=batch_first, bidirectional=True).eval()
    with torch.no_grad():
        assert (
            compiles(lambda x: net(x)[0] * 2, [(torch.randn(b, t, 6),) for b, t in ((4, 5), (3, 7), (8, 19), (2, 2))])
            == 2
        )
        last = fusewright.compile(lambda x: net(x)[1], dynamic=True)
        for b, t in ((4, 5), (3, 7)):
            x = torch.randn(b, t, 6)
            torch.testing.assert_close(last(x), net(x)[1])
        with pytest.raises(RuntimeError):
            last(torch.randn(4, 5, 7))


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_recurrent_layers_of_any_batch_drop_between_their_layers(kind: type[nn.RNNBase], packed: bool, backend: str) -> None:
    """PyTorch's Python version of them, which stands for the C++ one where sizes vary, drops nothing."""
    first, net = nn.Linear(6, 6), kind(6, 5, 3, batch_first=True, bidirectional=True, dropout=0.5)

    def step(x: torch.Tensor) -> Any:
        x = first(x)
        given = nn.utils.rnn.pack_padded_sequence(x, [3, 2, 1, 1][: len(x)], batch_first=True) if packed else x
        result, state = net(given)
        result = nn.utils.rnn.pad_packed_sequence(result)[0] if packed else result
        return result.detach(), state, *torch.autograd.grad(result.sum(), [*net.parameters()])

    options = {"fallback_random": True} if backend == "native" else {}
    compiled = fusewright.compile(step, backend=backend, dynamic=True, options=options)
    for batch in (2, 3, 4):
        x, results = torch.randn(batch, 3, 6), []
        for run in (compiled, step):
            torch.manual_seed(batch)
            results.append((run(x), torch.rand(1)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("how", [{"num_layers": 2, "bidirectional": True}, {"bias": False}, {"proj_size": 3}], ids=str)
@pytest.mark.parametrize("low", ["", "autocast", "weights"])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("backend", ["native", "aot_eager"])
def test_an_lstm_over_varying_sizes_gives_dtypes_and_shapes_of_eager(
    how: dict[str, Any], low: str, train: bool, backend: str
) -> None:
    """Eager gives it to oneDNN, PyTorch's Python version does not where the input needs gradients. Before 2.13 that one
    leaves a dimension in the states."""
    first, net = nn.Linear(6, 6), nn.LSTM(6, 5, batch_first=True, **how).train(train)
    dtype = torch.bfloat16 if low == "weights" else torch.float32
    first, net = first.to(dtype), net.to(dtype)

    def step(x: torch.Tensor, state: Any, grad: bool) -> Any:
        with torch.autocast("cpu", enabled=low == "autocast"), torch.set_grad_enabled(grad):
            result, state = net(first(x), state)
        grads = torch.autograd.grad(result.float().sum(), [x, *net.parameters()]) if grad else ()
        return result.detach(), [one.detach() for one in state], grads

    compiled = fusewright.compile(step, backend=backend, dynamic=True)
    for batch, grad in itertools.product((2, 3), (False, True)):
        x = torch.randn(batch, 4, 6, dtype=dtype, requires_grad=True)
        state = [torch.randn_like(one, dtype=dtype) for one in step(x, None, False)[1]]
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if low else {}
        for given in (None, state):  # under autocast the second is wider than the input
            torch.testing.assert_close(compiled(x, given, grad), step(x, given, grad), **tolerance)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_a_packed_lstm_over_varying_sizes_gives_dtypes_of_eager(grad: bool, backend: str) -> None:
    """Since PyTorch 2.13 eager gives it to oneDNN where all sequences have one length."""
    net = nn.LSTM(4, 5)

    def step(x: torch.Tensor, sizes: torch.Tensor) -> Any:
        with torch.autocast("cpu"):
            result, state = net(nn.utils.rnn.PackedSequence(x, sizes))
        return result.data, state

    compiled = fusewright.compile(step, backend=backend, dynamic=True, options={"speculate": True})
    for sizes in map(torch.tensor, ([2, 2, 2], [3, 3, 3], [3, 2, 1], [1, 1], [1])):
        x = torch.randn(int(sizes.sum()), 4)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(compiled(x, sizes), step(x, sizes), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers_in_inference_mode_over_varying_sizes(kind: type[nn.RNNBase], packed: bool) -> None:
    """PyTorch does not break them down there. Its C++ versions read memory by a size, or need numbers of doubles."""
    net = kind(6, 5, 2, bidirectional=True).double()

    def step(x: torch.Tensor, sizes: torch.Tensor) -> Any:
        return net(nn.utils.rnn.PackedSequence(x.flatten(0, 1), sizes) if packed else x)

    compiled = fusewright.compile(step, dynamic=True, options={"speculate": True})
    with torch.inference_mode():
        for batch in (2, 3):
            x, sizes = torch.randn(4, batch, 6, dtype=torch.float64), torch.full((4,), batch)
            torch.testing.assert_close(compiled(x, sizes), step(x, sizes))


def test_replaced_functions_are_not_called_for_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's Python version of a recurrent cell calls `Tensor.tanh`, which eager's does not."""
    net, x = nn.GRU(3, 2), torch.randn(4, 1, 3)
    expected = net(x)[0]
    for owner, name in ((torch.Tensor, "tanh"), (torch.Tensor, "unsafe_chunk"), (torch, "stack"), (torch, "cat")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *args, **kwargs: pytest.fail("the program has called nothing of this name"))
            assert operators_replaced()
            got = fusewright.compile(lambda x: net(x)[0], dynamic=True)(x)
        torch.testing.assert_close(got, expected)
        assert not operators_replaced()


def test_the_version_of_one_size_keeps_serving_it() -> None:
    """It is quicker than the one for any size, and stays in front of it."""
    compiled = fusewright.compile(lambda x, y: (x * 2 + y).sin(), fullgraph=True)
    for size in (4, 5, 6, 7, 4, 6, 4):
        x, y = torch.randn(size, 3), torch.randn(size, 3)
        torch.testing.assert_close(compiled(x, y), (x * 2 + y).sin())
    static, general = compiled.entries  # type: ignore[attr-defined]
    assert (static.tag is None, general.tag is None) == (True, False)
    assert (static.calls, general.calls) == (3, 4)


PADDED: tuple[Callable[..., Any], ...] = (
    lambda x, n: torch.constant_pad_nd(x, [0, 0, n, 0]),
    lambda x, n: torch.constant_pad_nd(x, [0, 0, 0, x.shape[1] - 8, 0, n]),
    lambda x, n: functional.pad(x, (0, 0, n - 2, -1)),
)


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_nothing(kind: type[nn.RNNBase], grad: bool, backend: str) -> None:
    """oneDNN's layer, which eager does not call then, ends the process."""
    layer = kind(4, 4, batch_first=True).requires_grad_(grad)
    compiled = fusewright.compile(layer, backend=backend, dynamic=True)
    for batch in (2, 3, 0, 2):
        x = torch.randn(batch, 5, 4, requires_grad=grad)
        found = [pytree.tree_leaves(run(x)) for run in (compiled, layer)]
        torch.testing.assert_close(*found)
        if grad:
            torch.testing.assert_close(*(torch.autograd.grad(one[0].sum(), x)[0] for one in found))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("how", [{}, {"dynamic": True}], ids=str)
def test_padding_and_cropping(how: dict[str, Any], order: tuple[int, ...]) -> None:
    """Where nothing is added, the result lies as the input does; what takes away more than there is raises."""
    calls = [
        ((5, 6, 7), -1),
        ((5, 8, 7), 0),
        ((4, 8, 3), 2),
        ((5, 6, 7), 0),
        ((5, 7, 3), -2),
        ((5, 8, 7), -3),
        ((2, 8, 7), -3),
        ((2, 2, 2), 2),
    ]
    for padded in PADDED:
        compiled = fusewright.compile(padded, recompile_limit=32, **how)
        for shape, n in calls:
            x = torch.randn([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(3)])
            try:
                expected = padded(x, n)
            except RuntimeError:
                with pytest.raises(RuntimeError):
                    compiled(x, n)
                continue
            got = compiled(x, n)
            assert torch.equal(got, expected) and (got.stride() == expected.stride() or not got.numel()), (shape, n)


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "ihfft"])
def test_strides_of_the_gradient_of_a_padded_transform(name: str) -> None:
    transform = getattr(torch.fft, name)
    compiled = fusewright.compile(lambda x: transform(x, n=8, dim=1), dynamic=True)
    for shape in ((5, 6, 7), (3, 5, 4), (2, 9, 3)):
        x = torch.randn(shape, requires_grad=True)
        found = [
            torch.autograd.grad(run(x).abs().square().sum(), x)[0]
            for run in (compiled, lambda x: transform(x, n=8, dim=1))
        ]
        torch.testing.assert_close(*found)
        assert found[0].stride() == found[1].stride()


SHORTER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "windows": lambda x: (x + 1).unfold(1, 2, 1).flatten(2),
    "product": lambda x: x[:, 1:] @ x.new_ones(x.shape[2], 7),
    "softmax": lambda x: x[:, 1:].softmax(-1),
}
PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first": lambda whole: whole[:, :2],
    "middle": lambda whole: whole[:, 1:3],
    "last": lambda whole: whole[:, -2:],
    "every other": lambda whole: whole[:, ::2],
    "one": lambda whole: whole[:, 1],
    "turned": lambda whole: whole[:, 1:3].transpose(1, 2),
    "two": lambda whole: whole[:, 1:3, 2:4],
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("made", SHORTER)
def test_a_returned_part_of_what_has_a_size_less_one_is_a_view_of_the_whole(made: str, part: str) -> None:
    """Of a size s - 1 ranges alone do not tell that it is not -1: strides that it is a factor of are forward as the type's are."""
    compiled = fusewright.compile(lambda x: PARTS[part](SHORTER[made](x)), dynamic=True)
    for shape in ((4, 5, 6), (3, 9, 7), (2, 4, 6)):
        x = torch.randn(shape)
        got, expected = compiled(x), PARTS[part](SHORTER[made](x))
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride() and got.storage_offset() == expected.storage_offset()


HANN, ONES = torch.hann_window(16), torch.ones(16)
INVERSE_STFT: dict[str, Callable[..., Any]] = {
    "windows that overlap": lambda x: torch.istft(x, 16, window=ONES, center=False),
    "a narrow window": lambda x: x.istft(16, win_length=8, window=ONES[:8]),
    "no window": lambda x: torch.istft(input=x, n_fft=16, length=9),
    "a window of zeros": lambda x: torch.istft(x, 16, window=torch.zeros(16)),
    "windows that begin at 0": lambda x: torch.istft(x, 16, window=HANN, center=False),
    "nothing asked for": lambda x: torch.istft(x, 16, length=0),
    "an empty window": lambda x: torch.istft(x, 16, window=ONES[:0]),
}


@pytest.mark.filterwarnings("ignore:istft")
@pytest.mark.parametrize("name", INVERSE_STFT)
def test_inverse_transforms_refuse_what_eager_refuses(name: str) -> None:
    function = INVERSE_STFT[name]
    compiled = fusewright.compile(function, dynamic=True)
    for frames in (6, 9):
        for requires_grad in (False, True):
            x = torch.randn(2, 9, frames, dtype=torch.complex64, requires_grad=requires_grad)
            try:
                expected = function(x)
            except RuntimeError:
                with pytest.raises(RuntimeError):
                    compiled(x)
            else:
                torch.testing.assert_close(compiled(x), expected)


COPIED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "circular": lambda x: functional.pad(x, (1, 2), mode="circular"),
    "circular and cut": lambda x: functional.pad(x, (2, -1), mode="circular"),
    "circular, of images": lambda x: functional.pad(x[None], (1, 2, 2, 1), mode="circular"),
    "convolution": nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"),
    "a part": lambda x: (made := x * 2, made[..., :2].copy_(made[..., 2:4]))[0],
    "a part of a part": lambda x: (made := x * 2, made[..., 1:][..., :1].copy_(made[..., 1:][..., 1:2]))[0],
}


@pytest.mark.parametrize("name", COPIED)
def test_what_is_copied_within_a_tensor(name: str) -> None:
    """From windows that lie side by side, whatever the sizes."""
    calls = [(torch.randn(2, 2, size, requires_grad=True),) for size in (5, 6, 9, 7, 4)]
    assert compiles(COPIED[name], calls, dynamic=True, fullgraph=True) == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_what_is_copied_onto_itself_in_part(dynamic: bool | None) -> None:
    """Windows that meet are eager's, whose answer or error it is."""

    def move(x: torch.Tensor, n: int) -> torch.Tensor:
        made = x * 2
        made[:, n:].copy_(made[:, : x.shape[1] - n])
        return made

    compiled = fusewright.compile(move, dynamic=dynamic, recompile_limit=99)
    for size, n in ((8, 2), (8, 4), (10, 5), (10, 6), (12, 6), (12, 7), (9, 3), (4, 4), (4, 3)):
        x, outcomes = torch.randn(3, size), []
        for call in (compiled, move):
            try:
                outcomes.append(call(x, n))
            except RuntimeError as error:
                outcomes.append(type(error))
        if isinstance(outcomes[1], type):
            assert outcomes[0] is outcomes[1]
        else:
            torch.testing.assert_close(*outcomes)


def scatter_into(value: torch.Tensor) -> torch.Tensor:
    return value.scatter_(0, torch.zeros([1] * value.dim(), dtype=torch.long), 1.0)


TIED = {  # what makes a guard say that two sizes, or a size and 1, are equal
    "first and last": (lambda x: scatter_into(x.exp().permute(3, 2, 1, 0).tril_().exp()), (2, 3, 3, 2), (4, 5, 6, 4)),
    "middle": (lambda x: scatter_into(x.exp().transpose(1, 3).tril_().exp()), (2, 3, 4, 3), (3, 5, 2, 5)),
    "squeezed": (lambda x: x.flatten(1).chunk(2, 1)[1].squeeze().add_(1), (3, 1, 1, 2), (1, 1, 2, 1), (1, 2, 2, 1)),
    "squeezed dim": (lambda x: x.flatten(1).chunk(2, 1)[1].squeeze(1).mul_(2), (3, 1, 1, 2), (2, 1, 2, 1)),
    "expanded": (lambda x: x[x.shape[1] - x.shape[2] :].expand(x.shape[0], -1, -1, -1).add_(1), (2, 3, 3, 2), (4, 2, 2, 3)),
    "strided": (lambda x: x.flatten(1).chunk(2, 1)[1].as_strided((x.shape[0], 1), (2, 0)).add_(1), (3, 1, 1, 2), (4, 1, 2, 1)),
}


@pytest.mark.parametrize("name", TIED)
def test_sizes_that_a_guard_has_tied(name: str) -> None:
    """What is written through views of them, and the strides of what comes out."""
    function, *shapes = TIED[name]
    events: list[Event] = []
    compiled = fusewright.compile(function, dynamic=True)
    with STREAM.listening(events.append):
        for shape in (*shapes, *shapes):
            mine, theirs = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) for _ in range(2))
            got, expected = compiled(mine), function(theirs)
            torch.testing.assert_close((got, mine), (expected, theirs), check_stride=True)
    assert not [event for event in events if isinstance(event, InternalError)]


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_an_empty_vector_is_joined_to_tensors_of_any_rank(dynamic: bool | None) -> None:
    """Also as the cache that a first call begins with."""
    events: list[Event] = []
    compiled = fusewright.compile(joined := lambda x, y: torch.cat([x if x.dim() == 1 else x * 1, y], 1), dynamic=dynamic)
    with STREAM.listening(events.append):
        for first, second in (((8, 3), (8, 5)), ((0,), (0, 7)), ((0,), (3, 7)), ((0, 7), (0,)), ((2, 3), (0,))):
            x, y = torch.randn(first), torch.randn(second)
            torch.testing.assert_close(compiled(x, y), joined(x, y), check_stride=True)
    assert not [event for event in events if isinstance(event, InternalError)]


@pytest.mark.parametrize("trains", [False, True])
def test_a_divisor_that_the_facts_of_a_view_make_0(trains: bool) -> None:
    """Facts that no call meets say so; nothing else is shown from them."""
    events: list[Event] = []
    compiled = fusewright.compile(f := lambda x, y: (y.reshape(x.shape[1], -1).atan2(y), x.reciprocal()), dynamic=True)
    with STREAM.listening(events.append):
        for rows in (6, 8):
            x, y = torch.rand(rows, 3, requires_grad=trains)[::2], torch.rand(3, 3, requires_grad=trains)
            torch.testing.assert_close(compiled(x, y), f(x, y))
    assert not [event for event in events if isinstance(event, InternalError)]


@pytest.mark.parametrize("shape", [(4, 3), (3,)])
def test_the_gradient_of_a_loss_over_classes_as_bytes(shape: tuple[int, ...]) -> None:
    scores, classes = torch.rand(shape, requires_grad=True), torch.ones(shape[:-1], dtype=torch.uint8)
    events: list[Event] = []
    compiled = fusewright.compile(functional.cross_entropy)
    with STREAM.listening(events.append):
        (got,) = torch.autograd.grad(compiled(scores, classes), scores)
    torch.testing.assert_close(got, torch.autograd.grad(functional.cross_entropy(scores, classes), scores)[0])
    assert not [event for event in events if isinstance(event, InternalError)]


FLATTENED: dict[str, Callable[[], list[nn.Module]]] = {
    "batch norm": lambda: [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)],
    "batch norms": lambda: [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)],
    "batch norm of the input": lambda: [nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)],
    "instance norm": lambda: [nn.InstanceNorm2d(4, affine=True), nn.GELU()],
    "group norm": lambda: [nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()],
    "depthwise": lambda: [nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.Hardswish()],
    "a line": lambda: [nn.Flatten(2), nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)],
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", FLATTENED)
def test_what_is_flattened_for_a_linear_layer_lies_as_its_weight_says(name: str, training: bool, last: bool) -> None:
    """Its width is a number that the product of symbolic sizes must be: strides are products of sizes, or numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(*FLATTENED[name](), nn.Flatten(), nn.Linear(144, 3)).train(training)
    twin = copy.deepcopy(model)
    compiled = fusewright.compile(twin, dynamic=True)
    for shape in ((3, 4, 6, 6), (2, 4, 9, 4), (5, 4, 4, 9)):
        x = torch.randn(shape)
        x = x.to(memory_format=torch.channels_last) if last else x
        results = [(run(x), module) for run, module in ((compiled, twin), (model, model))]
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
        weights = torch.randn_like(results[0][0])
        mine, theirs = (torch.autograd.grad(got, [*module.parameters()], weights) for got, module in results)
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
