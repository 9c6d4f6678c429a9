"""A first call with a batch of 1 under dynamic shapes: one capture, as if the batch were larger, serves 1 too where that is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fusewright
from fusewright.base.events import (
    STREAM,
    Broken,
    Captured,
    Compiled,
    Event,
    FellBack,
    InternalError,
    LimitReached,
    Skipped,
)
from fusewright.capture import batch_of_one as ones
from tests.generalise.test_small_sizes import SEMANTICS

pytestmark = pytest.mark.usefixtures("verified")

Program = Callable[..., Any]


def grid(n: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, m), torch.randn(n, m)


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, tuple | list) else []


def memory(tensors: list[torch.Tensor]) -> list[int]:
    """For each tensor the place of the first in the same storage."""
    found = [tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor) for tensor in tensors]
    return [found.index(one) for one in found]


def strides(tensor: torch.Tensor) -> list[int]:
    return [step for size, step in zip(tensor.shape, tensor.stride()) if size != 1] if tensor.numel() else []


def check(program: Program, compiled: Program, args: tuple[torch.Tensor, ...]) -> None:
    """The compiled program's results, their layout, who shares memory with whom, and what is written, are eager's."""
    theirs, mine = [[t.clone() for t in args] for _ in range(2)]
    try:
        expected = program(*theirs)
    except (RuntimeError, IndexError, ValueError) as error:
        with pytest.raises(type(error)):
            compiled(*mine)
        return
    got = compiled(*mine)
    torch.testing.assert_close(got, expected, equal_nan=True)
    torch.testing.assert_close(mine, theirs, equal_nan=True)
    assert memory([*mine, *leaves(got)]) == memory([*theirs, *leaves(expected)])
    assert list(map(strides, leaves(got))) == list(map(strides, leaves(expected)))


STREAM_OF_SIZES = ((1, 7), (3, 7), (1, 7), (2, 5), (1, 1), (3, 1), (0, 4), (1, 9), (4, 2))


@pytest.mark.parametrize("program", SEMANTICS.values(), ids=SEMANTICS.keys())
def test_what_depends_on_small_sizes(program: Program) -> None:
    compiled = fusewright.compile(program, dynamic=True)
    for size in STREAM_OF_SIZES:
        check(program, compiled, grid(*size))


def doubled_part(x: torch.Tensor, y: torch.Tensor) -> Any:
    part = x[:, :1].contiguous()
    part.mul_(2)
    return part, x + y


def turned(x: torch.Tensor, y: torch.Tensor) -> Any:
    t = x.t().contiguous()
    return (t, t.t()) if t.is_contiguous() else t


def asked_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    t = x.t()
    z = t.reshape(-1)  # asks for the layout first
    return z + 1 if t.is_contiguous() else z * y.sum()


def reads_strides(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    t = x.t().contiguous()
    return x * 2 if t.stride(0) == 1 else x * 3


def same_object(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    t = x.t()
    return x + 1 if t.contiguous() is t else x + y


def by_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    part = torch.cat((x, y), 1)[:, 1:].contiguous()
    return part.as_strided((2,), (1,)) + part.numel()


def window(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    both = torch.cat((x, y), 1)
    part = both[:, : x.shape[1]].reshape(-1)
    both.add_(1)  # `part` is a view for 1
    return part


def shared(x: torch.Tensor, y: torch.Tensor) -> Any:
    both = torch.cat((x, y), 1)
    return both, both[:, : x.shape[1]].reshape(-1)


def attended(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    q, k, v = torch.cat((x, y, x), 1).view(x.shape[0], 1, 3, -1, 1).expand(-1, -1, -1, -1, 4).unbind(2)
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape[0], -1)


def cast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x[:, :1].reshape(-1, 1) @ y[:1]).float() + x[:, :1].contiguous()


def no_gradients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return functional.linear(torch.cat((x, y), 1)[:, : x.shape[1]], y)


def compared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sum(0) if x.shape[0] * 2 > 3 else x.prod(0)


def padded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(x[:, :, None], None, None, training=True) + y[:, :, None]


def channels(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    image = x[:, :, None, None] * y[:, None, :1, None]
    return image + 1 if image.is_contiguous(memory_format=torch.channels_last) else image + 2


def squeezed(x: torch.Tensor, y: torch.Tensor) -> Any:
    return (x + 1).squeeze(), torch.stack((x, y)).squeeze(1).shape


def views_of_views(x: torch.Tensor, y: torch.Tensor) -> Any:
    t = torch.cat((x, y), 1)[:, :2].contiguous()
    a, b = t.unbind(1)
    a.add_(b)
    return t.flatten(), a


def kept(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x.t().contiguous(), x.expand_as(y), x.reshape(x.shape[0], -1), x.contiguous()


PROGRAMS = {
    program.__name__: program
    for program in (
        doubled_part, turned, asked_twice, reads_strides, same_object, by_place, window, shared, attended, cast, no_gradients, compared, padded,
        channels, squeezed, views_of_views, kept,
    )
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_what_differs_for_one(program: Program) -> None:
    compiled = fusewright.compile(program, dynamic=True)
    for size in STREAM_OF_SIZES:
        check(program, compiled, grid(*size))


def by_attribute(a: torch.Tensor, b: torch.Tensor) -> bool:
    a.tag = 1  # type: ignore[attr-defined]
    found = hasattr(b, "tag")
    del a.tag  # type: ignore[attr-defined]
    return found


def by_namespace(a: torch.Tensor, b: torch.Tensor) -> bool:
    vars(a)["tag"] = 1
    found = "tag" in vars(b)
    del a.tag  # type: ignore[attr-defined]
    return found


def by_flag(a: torch.Tensor, b: torch.Tensor) -> bool:
    a.requires_grad_(True)
    found = b.requires_grad
    a.requires_grad_(False)
    return found


# Ways in which a program tells whether two tensors are one.
KNOWN_AGAIN: dict[str, Callable[[torch.Tensor, torch.Tensor], bool]] = {
    "is": lambda a, b: a is b,
    "a set": lambda a, b: a in {b},
    "a set of both": lambda a, b: len({(a, 1), (b, 1)}) == 1,
    "a key": lambda a, b: {b: 1}.get(a) == 1,
    "keys": lambda a, b: len(dict.fromkeys([a, b])) == 1,
    "hash": lambda a, b: hash(a) == hash(b),
    "id": lambda a, b: id(a) == id(b),
    "keys by id": lambda a, b: id(a) in {id(b): b},
    "address": lambda a, b: a.data_ptr() == b.data_ptr(),
    "attribute": by_attribute,
    "namespace": by_namespace,
    "requires_grad_": by_flag,
}


@pytest.mark.parametrize("known_again", KNOWN_AGAIN.values(), ids=KNOWN_AGAIN.keys())
@pytest.mark.parametrize("made", [False, True], ids=["argument", "result"])
def test_a_tensor_that_is_known_again(known_again: Callable[..., bool], made: bool) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        t = (x + 1)[:, :1] if made else x.t()
        return x + 1 if known_again(t.contiguous(), t) else x + y

    compiled = fusewright.compile(program, dynamic=True)
    for rows in (1, 3, 1, 2):
        check(program, compiled, grid(rows, 7))


class Block(nn.Module):
    """Attention over one token and what came before, as generation does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2)
            for t in self.project(self.norm(x)).split(x.shape[2], 2)
        )
        k, v = torch.cat((past, k), 2), torch.cat((past, v), 2)
        attended = functional.scaled_dot_product_attention(q.contiguous(), k, v)
        return x + self.output(attended.transpose(1, 2).reshape(x.shape))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, past)
        return x[:, -1:, :]


def heard(function: Program, calls: list[tuple[torch.Tensor, ...]], reference: Program) -> list[Event]:
    events: list[Event] = []
    with torch.no_grad(), STREAM.listening(events.append):
        for args in calls:
            torch.testing.assert_close(function(*args), reference(*args))
    assert not [
        event for event in events if isinstance(event, Broken | Skipped | FellBack | InternalError | LimitReached)
    ]
    return events


def test_a_step_is_captured_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that a replay has copied too; a further call with several rows needs nothing new."""
    captures: list[object] = []
    capture = fusewright.compiler.capture_frame
    monkeypatch.setattr(fusewright.compiler, "capture_frame", lambda *args: captures.append(args) or capture(*args))
    net = Net().eval()
    calls = [
        (torch.randn(batch, 1, 16), torch.randn(batch, 2, past, 8)) for batch, past in ((1, 5), (3, 6), (1, 9), (2, 7))
    ]
    events = heard(fusewright.compile(net, dynamic=True), calls, net)
    assert sum(isinstance(event, Compiled) for event in events) == 1
    assert len(captures) == 1
    texts = next(event for event in events if isinstance(event, Captured)).guards
    assert any("1 <= " in text for text in texts)


def test_independent_batches() -> None:
    """What was shown for both being 1 says nothing of one being 1."""

    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.t().contiguous() * 2, y[:, :1].reshape(-1) + 1

    compiled = fusewright.compile(program, dynamic=True)
    for n, m in ((1, 1), (3, 1), (1, 3), (3, 4), (1, 1), (5, 1)):
        check(program, compiled, (torch.randn(n, 3), torch.randn(m, 5)))


def test_gradients_are_captured_for_one() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    compiled = fusewright.compile(net, dynamic=True)
    for batch in (1, 5, 1, 2):
        x = torch.randn(batch, 6)
        expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        torch.testing.assert_close(torch.autograd.grad(compiled(x).square().sum(), list(net.parameters())), expected)


def test_marked_dimensions() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x[:, :4], torch.ones(2, 4)).relu()

    compiled = fusewright.compile(program)
    x = torch.randn(1, 6)
    fusewright.mark_dynamic(x, 0, min=1, max=64)
    calls = [(x,), (torch.randn(64, 6),), (torch.randn(1, 6),)]
    events = heard(compiled, calls, program)
    assert sum(isinstance(event, Compiled) for event in events) == 1


def test_a_stored_plan_serves_one(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled for larger batches alone is another entry of the disk cache."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))
    net = Net().eval()
    for first in ((3, 1), (1, 3), (1, 3)):
        fusewright.reset()
        calls = [(torch.randn(batch, 1, 16), torch.randn(batch, 2, 5 + batch, 8)) for batch in first]
        heard(fusewright.compile(net, dynamic=True), calls, net)


def test_the_proof_is_needed() -> None:
    """Programs that do something else for 1 are not shown to do the same."""
    shown: list[bool] = []

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == 1 else x * 3

    original = ones.shown
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ones, "shown", lambda *args: shown.append(original(*args)) or shown[-1])
        for one in (program, asked_twice, reads_strides, shared, doubled_part, compared):
            check(one, fusewright.compile(one, dynamic=True), grid(1, 7))
    assert shown == [False] * 6


DRAWS: dict[str, Callable[[torch.Tensor], object]] = {
    "size of what loses a dimension": lambda x: torch.randn(x.squeeze().shape[1]),
    "as many as elements of it": lambda x: torch.rand_like(x.squeeze()[0]),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_that_nobody_reads(name: str) -> None:
    """The generator moves on by as much as in eager, though what is drawn is in no result."""

    def program(x: torch.Tensor) -> torch.Tensor:
        DRAWS[name](x)
        return x + 1

    compiled = fusewright.compile(program, dynamic=True)
    for shape in ((1, 3, 4), (1, 3, 5), (2, 3, 5), (1, 7, 5)):
        x, after = torch.rand(shape), []
        for one in (program, compiled):
            torch.manual_seed(0)
            one(x)
            after.append(torch.get_rng_state())
        assert torch.equal(*after), shape


@pytest.mark.parametrize("rows, captures", [(1, 2), (2, 1)])
def test_what_cannot_be_captured_is_tried_again_only_where_a_batch_of_1_was_taken_to_be_larger(
    rows: int, captures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(x: torch.Tensor) -> None:
        y = x * 2
        raise ValueError(len(y))

    tried: list[Any] = []
    capture = fusewright.compiler.capture_frame
    monkeypatch.setattr(fusewright.compiler, "capture_frame", lambda *args: tried.append(args) or capture(*args))
    with pytest.raises(ValueError, match=str(rows)):
        fusewright.compile(program, dynamic=True)(torch.randn(rows, 3))
    assert len(tried) == captures
