"""`fusewright.export`: programs captured whole, with named sizes, compared with eager."""

from __future__ import annotations

import collections
import copy
import io

import pytest
import torch

import fusewright
from fusewright import Dim
from fusewright.exporting.text import parse, program_text


class Counts(torch.nn.Module):
    """Writes to buffers, to its argument, has tied weights and nested results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(4, 3)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, scale=None):
        self.count.add_(1)
        x.mul_(2)
        y = self.norm(self.first(x) + self.second(x)).relu() * x.shape[0]
        if scale is not None:
            y = y * scale["by"]
        return {"y": y, "more": (self.count, 3, x, x[:2], None), "rows": [x.shape[0] + 1]}


class Images(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(8, 10),
        )

    def forward(self, x):
        return self.body(x)


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10))


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    return transformers.BertModel(config).eval()


def encoder():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()


def assert_same(found, expected):
    ours, spec = torch.utils._pytree.tree_flatten(found)
    theirs, other = torch.utils._pytree.tree_flatten(expected)
    assert spec == other
    for one, two in zip(ours, theirs, strict=True):
        if isinstance(two, torch.Tensor):
            torch.testing.assert_close(one, two)
            assert one.stride() == two.stride()
        else:
            assert one == two and type(one) is type(two)


MODELS = {
    "linear": (mlp, lambda n: (torch.randn(n, 4),), {}, 1),
    "images": (lambda: Images().eval(), lambda n: (torch.randn(n, 3, 8, 8),), {}, 1),
    "images in training": (Images, lambda n: (torch.randn(n, 3, 8, 8),), {}, 1),
    "effects": (Counts, lambda n: (torch.randn(n, 4),), {}, 2),
    "encoder": (encoder, lambda n: (torch.randn(n, 5, 16),), {}, 1),
    "bert": (bert, lambda n: (torch.randint(100, (n, 7)),), {}, 1),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_batch_of_any_size_gives_what_eager_gives(name, compiled):
    make, arguments, _, least = MODELS[name]
    torch.manual_seed(0)
    model = make()
    program = fusewright.export(model, arguments(least), dynamic_shapes=({0: Dim("batch", min=least, max=256)},))
    assert program.range_constraints == {"batch": (least, 256)}
    assert program_text(parse(str(program))) == str(program)
    eager = copy.deepcopy(model)
    module = program.module()
    assert list(module.state_dict()) and module.state_dict().keys() == model.state_dict().keys()
    run = fusewright.compile(module, fullgraph=True) if compiled else module
    for size in (least, 64, 3):
        args = arguments(size)
        theirs = copy.deepcopy(args)
        assert_same(run(*args), eager(*theirs))
        assert_same(args, theirs)
        assert_same(dict(module.named_buffers()), dict(eager.named_buffers()))
    with pytest.raises(fusewright.ProgramInputError, match=r"batch.*size 300.*<= batch <= 256 .*test_export\.py:\d+"):
        module(*arguments(300))


def test_gradients_are_eager_s():
    model = Images()
    program = fusewright.export(model, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: Dim("batch")},))
    eager, x = copy.deepcopy(model), torch.randn(6, 3, 8, 8, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    program.module()(x).square().sum().backward()
    eager(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


def test_no_gradient_passes_what_the_program_cuts_off():
    def cut(x):
        with torch.no_grad():
            y = x * 2
        return y * x + x.detach()

    module = fusewright.export(cut, (torch.ones(2, requires_grad=True),)).module()
    x = torch.full((2,), 3.0, requires_grad=True)
    module(x).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]


def test_nested_arguments_keywords_and_the_signature():
    model = Counts()
    batch = Dim("batch", min=2)
    program = fusewright.export(
        model,
        (torch.randn(3, 4),),
        {"scale": {"by": torch.ones(3, 1)}},
        dynamic_shapes={"x": (batch, None), "scale": {"by": {0: batch}}},
    )
    signature = program.graph_signature
    assert signature.user_inputs == ["x", "scale['by']"]
    assert signature.user_inputs_to_mutate == ["x"]
    assert set(signature.buffers_to_mutate) == {
        "count", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"
    }  # fmt: skip
    assert "first.weight" in signature.parameters and "second.weight" not in signature.parameters
    text = program.print_readable(print_output=False)
    assert "# test_export.py:" in text and "x.mul_(2)" in text
    x, scale = torch.randn(5, 4), {"by": torch.rand(5, 1)}
    eager = copy.deepcopy(model)
    assert_same(program.module()(x.clone(), scale=scale), eager(x, scale=scale))
    with pytest.raises(fusewright.ProgramInputError, match=r"dimension 0 of scale.*batch, which is 5"):
        program.module()(torch.randn(5, 4), scale={"by": torch.rand(4, 1)})
    with pytest.raises(fusewright.ProgramInputError, match="exported for arguments"):
        program.module()(torch.randn(5, 4))


@pytest.mark.parametrize("torch_dims", [False, True])
def test_sizes_that_follow_from_others(torch_dims):
    def model(x, y, z):
        return x.repeat(2, 1) + y, z[1:] * x

    batch = torch.export.Dim("batch", min=1, max=32) if torch_dims else Dim("batch", min=1, max=32)
    args = (torch.randn(3, 2), torch.randn(6, 2), torch.randn(4, 2))
    program = fusewright.export(model, args, dynamic_shapes=({0: batch}, {0: 2 * batch}, {0: batch + 1}))
    module = program.module()
    for size in (1, 2, 9):
        args = (torch.randn(size, 2), torch.randn(2 * size, 2), torch.randn(size + 1, 2))
        assert_same(module(*args), model(*args))
    with pytest.raises(fusewright.ProgramInputError, match=r"dimension 0 of y has size 5.*batch"):
        module(torch.randn(3, 2), torch.randn(5, 2), torch.randn(4, 2))


def test_torchs_hints_and_forms():
    hints = torch.export.Dim
    program = fusewright.export(
        _pair,
        (torch.randn(3, 4), [torch.randn(2), torch.randn(1)]),
        dynamic_shapes={"x": (hints.AUTO, hints.STATIC), "y": [{0: Dim.AUTO}, None]},
    )
    module = program.module()
    args = (torch.randn(9, 4), [torch.randn(5), torch.randn(1)])
    assert_same(module(*args), _pair(*args))
    with pytest.raises(fusewright.ProgramInputError, match="dimension 1 of x has size 5"):
        module(torch.randn(9, 5), args[1])


class Chooses(torch.nn.Module):
    """Chooses by a value of its argument."""

    def __init__(self, other=torch.sin) -> None:
        super().__init__()
        self.one, self.two, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), other

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.one(x).log(), lambda x: self.other(self.two(x)), (x,)) + 1


@pytest.mark.parametrize("standalone", [False, True])
def test_a_choice_between_branches(standalone):
    model, file = Chooses(), io.BytesIO()
    with torch.no_grad():
        program = fusewright.export(model, (torch.ones(3, 4),), dynamic_shapes=({0: Dim("batch")},))
        fusewright.package(program, file, standalone=standalone)
        for run in (program.module(), fusewright.load_package(file.getvalue())):
            for x in (torch.ones(5, 4), -torch.ones(2, 4), torch.full((1, 4), -3.0)):
                torch.testing.assert_close(run(x), model(x), equal_nan=True)


@pytest.mark.parametrize(
    "model, grad, message",
    [
        (Chooses(), True, r"gradients through it are wanted.*no_grad"),
        (Chooses(lambda x: torch.linalg.inv(x)), False, "linalg_inv.* may fail in the other one"),
        (Chooses(lambda x: x + torch.rand(4, 4)), False, "draws random numbers"),
        (Chooses(lambda x: x[:1]), False, "different structures, shapes or dtypes"),
    ],
)
def test_a_choice_that_a_program_cannot_hold(model, grad, message):
    with torch.set_grad_enabled(grad), pytest.raises(fusewright.GraphBreakError, match=message):
        fusewright.export(model, (torch.ones(4, 4),))


def test_shapes_by_tensor():
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    shapes = torch.export.ShapesCollection()
    shapes[x], shapes[y] = {0: Dim("batch", 1, 64)}, {0: Dim("batch", 1, 64)}
    program = fusewright.export(lambda x, y: x + y, (x, y), dynamic_shapes=shapes)
    assert program.range_constraints == {"batch": (1, 64)}
    more = torch.export.AdditionalInputs()
    more.add((torch.randn(5, 4), torch.randn(5, 4)))
    program = fusewright.export(lambda x, y: x + y, (x, y), dynamic_shapes=more)
    z = torch.randn(9, 4)
    assert_same(program.module()(z, z), z + z)
    with pytest.raises(fusewright.ProgramInputError, match=r"x\.size\(0\) == .*y\.size|y\.size\(0\) == x\.size"):
        program.module()(z, z[:3])
    with pytest.raises(fusewright.ExportError, match="needs"):  # a size that it was told to leave free
        fusewright.export(lambda x: x + torch.ones(3, 4), (x,), dynamic_shapes=({0: Dim.DYNAMIC},))


def _pair(x, y):
    return x * 2, [one + 1 for one in y]


@pytest.mark.parametrize(
    "model, dims, message",
    [
        (lambda x: x + torch.ones(3, 4), {0: Dim("batch", max=9)}, r"batch .*needs .*3.*test_export\.py:\d+"),
        (lambda x: x * 2 if x.shape[0] < 5 else x, {0: Dim("batch", max=9)}, r"needs batch.*test_export\.py:\d+"),
        (lambda x: x.view(-1, 3, 4), {0: Dim("batch", max=9)}, r"batch.*needs"),
        (lambda x: x * 2 if x.shape[0] == 1 else x, {0: Dim("batch", max=9)}, "batch = 1.*min=2"),
        (lambda x: x, {2: Dim("batch")}, "no dimension 2"),
        (lambda x: x, {0: Dim("batch", min=4)}, "the example has 3"),
        (lambda x: x, {0: 5}, "fixed to 5, the example has 3"),
        (lambda x: x, {0: 2 * Dim("batch")}, "the example has 3"),
    ],
)
def test_a_declared_size_that_is_not_free_is_an_error(model, dims, message):
    with pytest.raises(fusewright.ExportError, match=message):
        fusewright.export(model, (torch.randn(3, 4),), dynamic_shapes=(dims,))


def test_an_undeclared_size_becomes_a_constraint():
    def model(x):
        return x * 2 if x.shape[0] < 5 else x

    module = fusewright.export(model, (torch.randn(3, 4),), dynamic_shapes=({0: Dim.AUTO},)).module()
    x = torch.randn(4, 4)
    assert_same(module(x), model(x))
    with pytest.raises(fusewright.ProgramInputError, match=r"x\.size\(0\) .*test_export\.py:\d+"):
        module(torch.randn(6, 4))


class _Steps(torch.nn.Module):
    steps = 0

    def forward(self, x):
        self.steps += 1
        return x


class Holder:
    """A result that is no container: tensors, numbers, dtypes, classes and objects of its own as attributes."""

    def __init__(self, x):
        self.x, self.more = x, {"twice": [x * 2, x.shape[0]]}
        self.dtype, self.device, self.kind, self.none = x.dtype, x.device, Holder, None


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Deleting(Holder):
    def __del__(self):
        pass


class _Keeping(torch.nn.Module):
    """Stores what is there already."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        self.table = self.table.to(x.dtype)
        return x + self.table


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


def held(made):
    return [type(made), made.more, {name: value for name, value in vars(made).items() if name not in ("inner", "more")}]


def test_an_object_that_each_call_makes_is_a_result():
    def model(x):
        made = Holder(x + 1)
        made.inner = Holder(x.sum(0))
        return {"made": made}, x

    module = fusewright.export(model, (torch.randn(1, 4),), dynamic_shapes=({0: Dim("batch")},)).module()
    x = torch.randn(3, 4)
    (got, same), (want, _) = module(x), model(x)
    assert same is x
    for one, other in ((got["made"], want["made"]), (got["made"].inner, want["made"].inner)):
        assert_same(held(one), held(other))
    assert module(x)[0]["made"] is not got["made"]


def test_functions_with_their_own_gradient_are_exported_where_none_is_wanted():
    x = torch.randn(2, 4, requires_grad=True)
    with torch.no_grad():
        assert_same(fusewright.export(_Doubled.apply, (x,)).module()(x), x.detach() * 2)
    with pytest.raises(fusewright.GraphBreakError, match="autograd"):
        fusewright.export(_Doubled.apply, (x,))


def test_sizes_in_lists_that_are_compared_stay_free():
    def model(x):
        a, b, c = x.size()
        assert list(x.size()) == [a, b, c] and [(a, [b])] == [(a, [b])] and (a, b) != (a, b, c)
        assert not [a, b] < [a, b] and [a, b] <= [a, b, 1] and (a, 3) < (a, 4) and [a, c] != [a, c + 1]
        return x * 2

    module = fusewright.export(model, (torch.ones(1, 3, 4),), dynamic_shapes=({0: Dim("batch"), 1: Dim("b")},)).module()
    assert_same(module(torch.ones(7, 2, 4)), torch.full((7, 2, 4), 2.0))


def test_what_is_stored_where_it_was_is_no_change():
    model, x = _Keeping(), torch.randn(3, 4)
    assert_same(fusewright.export(model, (x,)).module()(x), model(x))


OUTSIDE = Holder(torch.ones(1))


def _twice(x):
    one = Holder(x)
    return one, one


@pytest.mark.parametrize(
    "model, error",
    [
        (lambda x: x * x.sum().item(), fusewright.GraphBreakError),
        (_Steps(), fusewright.ExportError),
        (lambda x: iter([x]), fusewright.ExportError),
        (lambda x: (OUTSIDE, x), fusewright.ExportError),
        (lambda x: Slotted(x), (fusewright.ExportError, fusewright.GraphBreakError)),
        (lambda x: Deleting(x), (fusewright.ExportError, fusewright.GraphBreakError)),
        (_twice, fusewright.ExportError),
    ],
)
def test_what_a_program_cannot_hold_is_an_error(model, error):
    with pytest.raises(error):
        fusewright.export(model, (torch.randn(3),))


def test_a_fixed_argument_is_checked():
    module = fusewright.export(lambda x, k: x * k, (torch.randn(3), 2)).module()
    assert_same(module(torch.ones(3), 2), torch.full((3,), 2.0))
    for bad in (3, 2.0, True):
        with pytest.raises(fusewright.ProgramInputError, match="fixed value"):
            module(torch.ones(3), bad)
    for wrong in (torch.ones(3).double(), torch.ones(3, 1), 3):
        with pytest.raises(fusewright.ProgramInputError, match="takes a tensor"):
            module(wrong, 2)


def test_other_strides_than_the_example_s_give_the_same():
    def model(x):
        return x.view(-1), x.flatten(), x.t()

    module = fusewright.export(model, (torch.randn(3, 4),), dynamic_shapes=({0: Dim("n"), 1: Dim("m")},)).module()
    x = torch.randn(6, 5).t()
    for one, two in zip(module(x), model(x.contiguous()), strict=True):
        assert torch.equal(one, two)


Point = collections.namedtuple("Point", "x y")


def test_constants_and_views_of_weights_are_part_of_the_program():
    table = torch.arange(4.0)
    program = fusewright.export(
        lambda x: Point(x + table, [table]), (torch.zeros(2, 4),), dynamic_shapes=([Dim("n"), None],)
    )
    found = program.module()(torch.ones(3, 4))
    assert torch.equal(found.x, torch.ones(3, 4) + table) and torch.equal(found.y[0], table)


def test_torchs_own_program_goes_in_and_comes_out():
    model, batch = mlp(), torch.export.Dim("batch", min=1, max=256)
    theirs = torch.export.export(model, (torch.randn(4, 4),), dynamic_shapes=({0: batch},))
    program = fusewright.export(theirs)
    assert list(program.range_constraints.values()) == [(1, 256)]
    x = torch.randn(9, 4)
    assert_same(program.module()(x), model(x))
    assert program.state.keys() == model.state_dict().keys()
    ours = fusewright.export(model, (torch.randn(4, 4),), dynamic_shapes=({0: Dim("batch", min=2, max=256)},))
    back = ours.to_torch()
    assert_same(back.module()(x), model(x))
    (bounds,) = back.range_constraints.values()
    assert (int(bounds.lower), int(bounds.upper)) == (2, 256)


@pytest.mark.parametrize("loaded", [False, True])
def test_operators_are_decomposed_by_a_table(loaded):
    model = mlp()
    program = fusewright.export(model, (torch.randn(1, 4),), dynamic_shapes=({0: Dim("batch", max=256)},))
    if loaded:
        file = io.BytesIO()
        fusewright.save(program, file)
        program = fusewright.load(file.getvalue())
    made = program.run_decompositions({torch.ops.aten.addmm.default: lambda bias, x, weight: x @ weight + bias})
    assert "= aten.addmm" in str(program) and "= aten.addmm" not in str(made) and "aten.mm.default" in str(made)
    assert made.range_constraints == {"batch": (1, 256)}
    assert made.graph_signature.user_inputs == program.graph_signature.user_inputs
    for size in (1, 5):
        x = torch.randn(size, 4)
        assert_same(made.module()(x), model(x))
