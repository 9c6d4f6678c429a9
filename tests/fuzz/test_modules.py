"""A sample of random programs around modules; `python -m tests.fuzz.run modules` runs as many as one likes."""

from __future__ import annotations

import pytest
import torch

from fusewright.capture.border.world import World
from tests.fuzz import module_layers, modules, run, session

SAMPLE, SWEEP = 40, 4000
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")


def check(seeds: range) -> None:
    for seed in seeds:
        text = modules.program(seed)
        found = session.examine(text)
        assert found is None, f"seed {seed}: {found}\n{session.printed(text)}"


@pytest.mark.parametrize("part", range(SAMPLE // 8))
def test_sample(part: int) -> None:
    check(range(part * 8, part * 8 + 8))


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(SWEEP // 50))
def test_sweep(part: int) -> None:
    check(range(1000 + part * 50, 1050 + part * 50))


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(len(module_layers.PARTS)))
def test_each_part(number: int) -> None:
    for seed in range(6):
        text = modules.program(seed, module_layers.PARTS[number])
        found = session.examine(text)
        assert found is None, f"seed {seed}: {found}\n{session.printed(text)}"


def test_a_planted_defect_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = World.guards
    monkeypatch.setattr(World, "guards", lambda self: tuple(one for one in guards(self) if one.kind != "IS"))
    texts = map(modules.program, range(10, 100))
    text, like = next((text, one.like) for text in texts if (one := session.examine(text)) is not None)
    small = run.shrunk(text, like, most=60)
    assert len(small.splitlines()) < len(text.splitlines())


# What one of two equal worlds does besides, and where it is seen.
BREAKAGES = (
    ("m.weight.data[0] += 1", "._parameters['weight']"),
    ("m.running_mean.add_(1)", "._buffers['running_mean']"),
    ("m.late.add_(1)", "._buffers['late']"),
    ("m.weight.grad.mul_(2)", "._parameters['weight'].grad"),
    ("m.weight.requires_grad_(False)", "._parameters['weight']"),
    ("m.weight.scale = 3", "._parameters['weight'].scale"),
    ("m.weight.register_hook(print)", "._parameters['weight']._backward_hooks"),
    ("m.weight.register_post_accumulate_grad_hook(print)", "._parameters['weight']._post_accumulate_grad_hooks"),
    ("m.register_forward_hook(print)", "._forward_hooks"),
    ("m.training = False", ".training"),
    ("m.side = 2", ".side"),
    ("m.weight, m.bias = m.bias, m.weight", "._parameters['weight']"),
    ("m._non_persistent_buffers_set.clear()", "._non_persistent_buffers_set"),
    ("opt.state[m.weight]['momentum_buffer'].mul_(2)", "['opt'].state"),
    ("opt.param_groups[0]['lr'] = 3.0", "['opt'].param_groups"),
    ("sched.last_epoch += 1", "['sched'].last_epoch"),
    ("LOG.append(1)", "LOG"),
    ("kept.grad.mul_(2)", "['kept'].grad"),
    ("sparse.grad = sparse.grad.coalesce()", "['sparse'].grad"),
    ("nested.values().add_(1)", "['nested'].values"),
)
TRAINED = """
begin(state=True, modules=True)
m = fixed(nn.BatchNorm1d(4))
m.register_buffer("late", torch.ones(1), persistent=False)
m.side = m.weight.scale = 1
opt = torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5)
sched = lr_scheduler.StepLR(opt, 1)
nested = torch.nested.as_nested_tensor([torch.ones(n, 4) for n in (1, 2)], layout=torch.jagged)
sparse = nn.Parameter(torch.ones(3, 4))
F.embedding(torch.tensor([0, 1, 1]), sparse, sparse=True).sum().backward()
kept = m(torch.arange(8.0).reshape(2, 4) ** 2) * torch.arange(8.0).reshape(2, 4)
kept.retain_grad()
kept.sum().backward()
opt.step()
def program(x): return m(x)
def step0():
    return program(torch.ones(2, 4))
"""


@pytest.mark.parametrize("what, where", BREAKAGES)
def test_what_a_module_and_its_training_hold_is_compared(what: str, where: str) -> None:
    ours, eager = session.World(TRAINED), session.World(TRAINED)
    assert session.difference(ours.run("step0"), eager.run("step0"), lambda: None) is None
    exec(what, ours.names)
    found = session.difference(ours.leaves({}), eager.leaves({}), lambda: None)
    assert where in str(found)


@pytest.mark.parametrize("way", ["program = m", "compiled_(m)", "run = compiled(m)", "m.forward = compiled(m.forward)"])
def test_a_compiled_module_stands_for_the_programs_own(way: str) -> None:
    head = TRAINED.replace("def program(x): return m(x)", way)
    assert session.examine(head.replace("return program(torch.ones(2, 4))", "return m(torch.ones(2, 4))")) is None


RAISES = """
begin(state=True, modules=True)
def program(x): return checkpoint(lambda y: checkpoint(nn.Linear(2, 2), y.sin(), use_reentrant=False), x, use_reentrant=False)
def step0():
    return program(torch.ones(3, requires_grad=True))
"""


def test_an_error_in_a_checkpoint_leaves_no_hooks_to_the_next_world() -> None:
    world = session.World(RAISES)
    world.run("step0")
    assert isinstance(world.error, RuntimeError)
    x = torch.ones(2, requires_grad=True)
    assert x.sin().grad_fn._saved_self is x  # type: ignore[union-attr]
    assert session.examine(RAISES) is None


def test_the_same_seed_gives_the_same_program() -> None:
    assert modules.program(3) == modules.program(3) != modules.program(4)


GROWS = """
begin(state=True, modules=True)
m = fixed(nn.Linear(1, 1))
def program(): return m.weight.detach() * 2
def step0():
    m.weight.data.fill_($by)
    return program()
"""


def test_a_program_is_one_that_runs_and_does_not_diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    assert session.errors_of(GROWS.replace("$by", "1e3"), largest=1e4) == 0
    assert session.errors_of(GROWS.replace("$by", "math.nan"), largest=1e4) == 0
    assert session.errors_of(GROWS.replace("$by", "9e3"), largest=1e4) is None
    for drawn in ("x = 1 / 0", GROWS.replace("$by", "math.inf")):
        monkeypatch.setattr(modules, "_drawn", lambda rng, only, kinds, drawn=drawn: drawn)
        text = modules.program(3)
        assert session.errors_of(text) == 0 and session.examine(text) is None
        assert text == modules.program(3) != modules.program(4)
