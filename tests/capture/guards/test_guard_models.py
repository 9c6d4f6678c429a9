"""Guards over whole modules: exact under random mutations, and readable when they fail."""

from __future__ import annotations

import gc
import random
from collections import OrderedDict

import pytest
import torch

from fusewright.capture.guards import Guard, build_program, capture_global_state
from fusewright.capture.guards.sources import FunctionSource, InstanceDict, Item, Local, Source
from tests.capture.guards.test_guards import check_both, function, tensor_guard

SELF = Local(0, "self")


def module_guards(module: torch.nn.Module, source: Source, guards: list[Guard], inputs: list[Source]) -> None:
    """The guards that a capture of nn.Module code makes, roughly."""
    guards.append(Guard("TYPE", source, type(module)))
    attributes = InstanceDict(source)
    guards.append(Guard("EQUALS", Item(attributes, "training"), module.training))
    guards.append(Guard("TYPE_ATTRIBUTE", source, (type(module), "forward", type(module).forward)))
    guards.append(Guard("LENGTH", Item(attributes, "_forward_hooks"), 0))
    for table in ("_parameters", "_buffers", "_modules"):
        where = Item(attributes, table)
        guards.append(Guard("TYPE", where, dict))
        guards.append(Guard("KEYS", where, tuple(getattr(module, table))))
        for name, value in getattr(module, table).items():
            if isinstance(value, torch.Tensor):
                guards.append(Guard("TENSOR", Item(where, name), tensor_guard(value)))
                inputs.append(Item(where, name))
            elif isinstance(value, torch.nn.Module):
                module_guards(value, Item(where, name), guards, inputs)
            else:
                guards.append(Guard("IS", Item(where, name), value))


def small_model() -> torch.nn.Module:
    block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1))
    return torch.nn.Sequential(
        OrderedDict(encoder=torch.nn.ModuleList([block(), block()]), head=torch.nn.Linear(4, 2, bias=False))
    )


def model_program(model):
    guards: list[Guard] = []
    inputs: list[Source] = []
    module_guards(model, SELF, guards, inputs)
    tensors = tuple(inputs)
    guards += [
        Guard("DIFFERENT", tensors[0], tensors),
        Guard("NO_OVERLAP", tensors[0], tensors),
        Guard("STATE", FunctionSource(), capture_global_state()),
    ]
    return build_program(guards, inputs)


def test_a_model_and_its_readable_failures():
    model = small_model()
    program = model_program(model)
    assert check_both(program, (model,))
    linear = model.encoder[0][0]
    assert all(found is wanted for found, wanted in zip(program.inputs((model,), function)[:2], linear.parameters()))
    linear.weight.requires_grad_(False)
    assert not check_both(program, (model,))
    assert program.failure((model,), function)[1] == "self.encoder[0][0].weight.requires_grad was True, is False"
    linear.weight.requires_grad_(True)
    model.head.eval()
    assert program.failure((model,), function)[1] == "self.head.training was True, is False"
    model.train()
    assert check_both(program, (model,))
    model.half()
    assert not check_both(program, (model,))
    model.float()
    assert check_both(program, (model,))


def mutations(model, rng):
    """Each changes something that guards look at, or something that they do not."""
    blocks = model.encoder
    layer = blocks[rng.randrange(2)]
    return [
        lambda: model.eval(),
        lambda: model.train(),
        lambda: layer[0].register_forward_hook(lambda *a: None),
        lambda: layer[0]._forward_hooks.clear(),
        lambda: setattr(layer[0], "weight", torch.nn.Parameter(torch.ones(4, 4))),
        lambda: setattr(layer[0], "weight", blocks[0][0].weight),
        lambda: setattr(layer[0], "bias", None),
        lambda: setattr(layer[0], "bias", torch.nn.Parameter(torch.ones(4))),
        lambda: setattr(layer[1], "extra", 3),
        lambda: layer[1].__dict__.pop("extra", None),
        lambda: layer.__setitem__(2, torch.nn.Dropout(0.5)),
        lambda: layer.__setitem__(2, torch.nn.Identity()),
        lambda: layer[0].__setattr__("__class__", Sublinear),
        lambda: layer[0].__setattr__("__class__", torch.nn.Linear),
        lambda: layer[0]._parameters.update(bias=layer[0]._parameters.pop("bias")),
        lambda: layer[0]._parameters.update(
            weight=layer[0]._parameters.pop("weight"), bias=layer[0]._parameters.pop("bias")
        ),
        lambda: setattr(layer[1].running_mean, "data", layer[1].running_var),
        lambda: layer[1].register_buffer("running_mean", torch.zeros(4)),
        lambda: setattr(layer[0].weight, "data", torch.ones(4, 4)),
        lambda: setattr(layer[0].weight, "data", torch.ones(4, 4, dtype=torch.float64)),
        lambda: layer[0].weight.requires_grad_(rng.random() < 0.5),
        lambda: model.double(),
        lambda: model.float(),
        lambda: gc.collect(),
        lambda: setattr(torch.nn.Linear, "forward", LINEAR_FORWARD if rng.random() < 0.7 else (lambda self, x: x)),
        lambda: setattr(layer[0], "__dict__", dict(layer[0].__dict__)),
    ]


class Sublinear(torch.nn.Linear):
    pass


LINEAR_FORWARD = torch.nn.Linear.forward


@pytest.mark.parametrize("seed", range(6))
def test_random_mutations_of_a_model(seed):
    rng = random.Random(seed)
    model = small_model()
    program = model_program(model)
    answers = []
    try:
        for _ in range(120):
            rng.choice(mutations(model, rng))()
            answers.append(check_both(program, (model,)))
            if rng.random() < 0.15:  # what a recompile does
                torch.nn.Linear.forward = LINEAR_FORWARD
                program = model_program(model)
                first = program.check((model,), function)
                assert first == check_both(program, (model,))
    finally:
        torch.nn.Linear.forward = LINEAR_FORWARD
    assert len(set(answers)) == 2
