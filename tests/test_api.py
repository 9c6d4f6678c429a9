"""The public surface: arguments that are wrong, modules that stay modules, exceptions that stay the user's own."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import pickle
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.base import errors
from fusewright.base.events import STREAM, FellBack


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 3), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "max-autotun"}, ["'max-autotun'", "max-autotune", "reduce-overhead"]),
        ({"backend": "natve"}, ["'natve'", "native", "inductor"]),
        ({"backend": "nvfuser"}, ["nvfuser", "retired", "native"]),
        ({"backend": 7}, ["backend", "7"]),
        ({"options": {"max_autotun": True}}, ["'max_autotun'", "max_autotune"]),
        ({"options": {"max_autotune": 1}}, ["max_autotune", "bool", "int"]),
        ({"options": [1]}, ["options", "list"]),
        ({"dynamic": "yes"}, ["dynamic", "yes"]),
        ({"fullgraph": 1}, ["fullgraph", "1"]),
        ({"recompile_limit": 0}, ["recompile_limit", "0"]),
    ],
    ids=str,
)
def test_wrong_arguments_name_the_value_and_the_choices(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(fusewright.OptionError) as error:
        fusewright.compile(Net(), **arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("wrong", [3, "model", Net], ids=str)
def test_what_cannot_be_compiled_is_refused(wrong: object) -> None:
    with pytest.raises(fusewright.OptionError):
        fusewright.compile(wrong)


def test_a_compiled_module_is_the_module() -> None:
    net = Net()
    compiled = fusewright.compile(net)
    assert isinstance(compiled, Net)
    assert list(compiled.state_dict()) == list(net.state_dict())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in net.parameters()]
    compiled.eval()
    assert not net.training
    compiled.scale = 3.0
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x))
        assert net.scale == 3.0
        calls = []
        handle = compiled.register_forward_hook(lambda *_: calls.append(1))
        torch.testing.assert_close(compiled(x), net.forward(x))
        assert calls == [1]
        handle.remove()
        Net().load_state_dict(compiled.state_dict())
        for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
            assert other.linear.weight is not net.linear.weight
            torch.testing.assert_close(other(x), net(x))


def test_functions_methods_decorators_and_in_place_use() -> None:
    def plain(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        "The docstring."
        return x.sin() * scale

    compiled = fusewright.compile(plain)
    assert compiled.__name__ == "plain" and compiled.__doc__ == "The docstring."
    x = torch.randn(6)
    torch.testing.assert_close(compiled(x, scale=3.0), plain(x, scale=3.0))
    torch.testing.assert_close(compiled(x), plain(x))
    with pytest.raises(TypeError, match="unexpected keyword argument 'shift'"):
        compiled(x, shift=1)
    net = Net().eval()
    with torch.no_grad():
        torch.testing.assert_close(fusewright.compile(net.forward)(torch.ones(2, 4)), net(torch.ones(2, 4)))
        expected = net(torch.ones(2, 4))
        fusewright.compile_(net)
        torch.testing.assert_close(net(torch.ones(2, 4)), expected)
    assert fusewright.compile(plain, disable=True) is plain


def test_exceptions_are_the_users_own_with_the_users_traceback() -> None:
    class Mine(Exception):
        pass

    @fusewright.compile
    def f(x: torch.Tensor, fail: bool) -> torch.Tensor:
        y = x + 1
        if fail:
            raise Mine("from the model")
        return y

    f(torch.ones(2), False)
    for _ in range(2):
        with pytest.raises(Mine, match="from the model") as error:
            f(torch.ones(2), True)
        assert traceback.extract_tb(error.value.__traceback__)[-1].line == 'raise Mine("from the model")'
    assert torch.equal(f(torch.ones(2), False), torch.full((2,), 2.0))


def test_errors_of_operators_are_pytorchs_own() -> None:
    @fusewright.compile
    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b).relu()

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        multiply(torch.ones(2, 3), torch.ones(4, 5))

    @fusewright.compile
    def look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(index, table) * 2

    table = torch.randn(5, 3)
    with torch.no_grad():
        torch.testing.assert_close(look_up(table, torch.tensor([0, 4])), table[[0, 4]] * 2)
        with pytest.raises(IndexError, match="index out of range"):
            look_up(table, torch.tensor([0, 5]))
        torch.testing.assert_close(look_up(table, torch.tensor([1, 2])), table[[1, 2]] * 2)


def test_stances() -> None:
    @fusewright.compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    f(torch.ones(2))
    with fusewright.set_stance("fail_on_recompile"):
        f(torch.ones(2))
        with pytest.raises(fusewright.RecompileError):
            f(torch.ones(2, dtype=torch.int64))
    with fusewright.set_stance("eager_on_recompile"):
        assert torch.equal(f(torch.ones(2, dtype=torch.int64)), torch.full((2,), 2))
    with fusewright.set_stance("force_eager"):
        assert torch.equal(f(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(fusewright.OptionError, match="force_eager"):
        fusewright.set_stance("force_eagr")


def test_torchs_stance_is_honoured() -> None:
    runs: list[int] = []

    @fusewright.compile
    def f(x: torch.Tensor) -> torch.Tensor:
        runs.append(1) if not torch.compiler.is_compiling() else None
        return x * 2

    f(torch.ones(2))
    compiled_runs = len(runs)
    with torch.compiler.set_stance("fail_on_recompile"):
        f(torch.ones(2))
        with pytest.raises(fusewright.RecompileError):
            f(torch.ones(2, dtype=torch.int64))
    with torch.compiler.set_stance("eager_on_recompile"):
        assert torch.equal(f(torch.ones(2, dtype=torch.int64)), torch.full((2,), 2))
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
        assert len(runs) == compiled_runs + 2
    f(torch.ones(2))
    assert len(runs) == compiled_runs + 2


def test_recompile_limit_warns_once_and_stays_right() -> None:
    @fusewright.compile(recompile_limit=2, dynamic=False)
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n

    with pytest.warns(fusewright.RecompileLimitWarning, match="recompile_limit"):
        for n in range(5):
            assert torch.equal(f(torch.ones(3), n), torch.full((3,), float(n)))


def test_gradients_flow_through_a_compiled_module() -> None:
    net, x = Net(), torch.randn(5, 4, requires_grad=True)
    compiled = fusewright.compile(net)
    for _ in range(2):
        compiled(x).sum().backward()
        mine = [x.grad, *(p.grad for p in net.parameters())]
        x.grad = None
        net.zero_grad()
        net(x).sum().backward()
        for got, expected in zip(mine, [x.grad, *(p.grad for p in net.parameters())]):
            torch.testing.assert_close(got, expected)
        x.grad = None
        net.zero_grad()


def test_logs_say_what_broke_and_what_recompiled(caplog: pytest.LogCaptureFixture) -> None:
    @fusewright.compile(dynamic=False)
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1

    fusewright.set_logs(graph_breaks=True, recompiles=True)
    try:
        with caplog.at_level("INFO", logger="fusewright"):
            f(torch.ones(3))
            f(torch.ones(4))
    finally:
        fusewright.set_logs(graph_breaks=False, recompiles=False)
    assert "torch.where" in caplog.text
    assert "L['x'].size()[0] was 3, is 4" in caplog.text
    with pytest.raises(fusewright.OptionError, match="graph_breaks"):
        fusewright.set_logs(graph_break=True)


def test_a_call_that_is_repeated_eagerly_is_told() -> None:
    def lookup(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return table[index] * 2

    compiled = fusewright.compile(lookup)
    seen: list[Any] = []
    with STREAM.listening(seen.append), pytest.raises(IndexError):
        compiled(torch.randn(4), torch.tensor([1, 7]))
    assert [event.function.split(" ")[0] for event in seen if isinstance(event, FellBack)] == [lookup.__qualname__]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("number", [1, -2])
def test_a_loss_over_one_class_checks_its_numbers(dynamic: bool, number: int) -> None:
    """The logarithm of a softmax over one class is the same for any number."""
    compiled = fusewright.compile(lambda x, y: torch.nn.functional.cross_entropy(x, y), dynamic=dynamic)
    assert compiled(torch.randn(3, 1), torch.tensor([0, 0, 0])) == 0
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(torch.randn(3, 1), torch.tensor([0, number, 0]))


def test_dir_shows_public_names() -> None:
    assert set(dir(fusewright)) == {*fusewright.__all__, "__version__"}
    told = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, (Exception, Warning))]
    # what users can meet, or filter, has a public name; RuntimeFallback and ServedCaseError never leave a compiled call
    hidden = {"CannotFunctionalise", "RuntimeFallback", "ServedCaseError"}
    assert {one.__name__ for one in told if one.__module__ == errors.__name__} - hidden <= set(fusewright.__all__)


def test_warnings_name_the_users_line() -> None:
    """Also where PyTorch's own code, or the compiler's, lies between."""

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor, text: str) -> torch.Tensor:
            return x * len(text)

    inner = Inner()
    fusewright.compile_(inner, recompile_limit=1)
    outer = nn.ModuleDict({"inner": inner})
    with pytest.warns(fusewright.RecompileLimitWarning) as told:
        for text in ("a", "bc"):
            outer["inner"](torch.ones(2), text)
    errors.warn_once.cache_clear()
    with pytest.warns(fusewright.OptionWarning) as more:
        fusewright.compile(lambda x: x + 1, mode="reduce-overhead")(torch.ones(2))
    assert {one.filename for one in (*told, *more)} == {__file__}


USER = """
from typing import assert_type
import torch, fusewright

class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

def f(x: torch.Tensor, n: int = 2) -> torch.Tensor:
    return x * n

@fusewright.compile(fullgraph=True, mode="max-autotune")
def g(x: torch.Tensor) -> int:
    return 1

@fusewright.compile
def h(x: torch.Tensor) -> int:
    return 1

assert_type(fusewright.compile(Net()), Net)
assert_type(fusewright.compile(f, backend=lambda gm, inputs: gm.forward)(torch.ones(1), n=3), torch.Tensor)
assert_type((g(torch.ones(1)), h(torch.ones(1))), tuple[int, int])
fusewright.compile_(Net(), dynamic=True)
assert_type(fusewright.benchmark(f, torch.ones(1)).speedup, float)
assert_type(fusewright.check(f, (torch.ones(1),)).exit_status, int)
assert_type(fusewright.report("page.html").html, str)
assert_type(fusewright.explain(f)(torch.ones(1)).graph_count, int)
assert_type(fusewright.explain(f, torch.ones(1)).op_count, int)
found = fusewright.minify(f, (torch.ones(1),))
assert_type(found.program if found else "", str)
with fusewright.patch() as patched:
    assert_type(patched.undo(), None)
fusewright.compile(f)("text")
fusewright.compile(f, mode="fast")
fusewright.compile(f, fullgraf=True)
g(1)
"""


WRONG = {number for number, line in enumerate(USER.splitlines(), 1) if re.search(r"text|fast|graf|^g\(1\)", line)}


def test_a_program_of_a_user_has_types(tmp_path: Path) -> None:
    mypy = pytest.importorskip("mypy.api")
    program = tmp_path / "user.py"
    program.write_text(USER)
    recursion = sys.getrecursionlimit()
    text, _, _ = mypy.run(["--strict", "--config-file=", "--no-error-summary", str(program)])
    sys.setrecursionlimit(recursion)  # mypy raises it
    assert {int(line.split(":")[1]) for line in text.splitlines() if ": error:" in line} == WRONG, text


def test_pyright_sees_the_types_too(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    program = tmp_path / "user.py"
    program.write_text(USER)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not start: {done.stderr[-200:]}")  # it fetches Node at its first start
    told = json.loads(done.stdout)["generalDiagnostics"]
    assert {one["range"]["start"]["line"] + 1 for one in told if one["severity"] == "error"} == WRONG, told


class WithSlot(nn.Module):
    __slots__ = ("amount",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.amount


def test_a_slot_of_the_modules_class_is_shared() -> None:
    module = WithSlot()
    compiled = fusewright.compile(module)
    for holder, amount in ((module, 3), (compiled, 4), (module, 5)):
        holder.amount = amount
        assert compiled.amount == module.amount == amount
        assert torch.equal(compiled(torch.ones(2)), module(torch.ones(2)))
    del compiled.amount
    assert not hasattr(module, "amount")


class GivingAll(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


def test_a_class_that_gives_all_of_its_state_is_copied_as_if_not_compiled() -> None:
    module = GivingAll(2, 2)
    fusewright.compile_(module)
    x = torch.ones(1, 2)
    expected = module(x)
    for again in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(again(x), expected)
        assert vars(again)["_compiled_call_impl"] is None


def test_a_cached_function_keeps_what_it_is_asked_for() -> None:
    @functools.lru_cache(maxsize=4)
    def f(n: int) -> torch.Tensor:
        """A text."""
        return torch.ones(n)

    compiled = fusewright.compile(f)
    assert compiled(2) is compiled(2)
    assert (compiled.cache_info().misses, compiled.cache_info().maxsize) == (1, 4)
    assert (compiled.__name__, compiled.__doc__, list(inspect.signature(compiled).parameters)) == ("f", "A text.", ["n"])
    compiled.cache_clear()
    assert f.cache_info().currsize == 0


def test_parts_of_a_compiled_function_are_the_functions() -> None:
    def f(x: torch.Tensor, amount: int = 1) -> torch.Tensor:
        return x + amount

    def other(x: torch.Tensor, amount: int = 1) -> torch.Tensor:
        return x - amount

    compiled = fusewright.compile(f)
    assert compiled(torch.ones(1)) == 2
    compiled.__defaults__ = (2,)
    assert compiled(torch.ones(1)) == f(torch.ones(1)) == 3
    compiled.__code__ = other.__code__
    assert compiled(torch.ones(1)) == f(torch.ones(1)) == -1
    with pytest.raises(AttributeError):
        compiled.__globals__ = {}


def test_where_backends_settings_of_precision_disagree() -> None:
    code = """
import warnings
import torch
import fusewright
warnings.simplefilter("error")
torch.set_float32_matmul_precision("high")
torch.backends.fp32_precision = "ieee"
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
compiled = fusewright.compile(lambda x: (x @ x).relu())
x = torch.ones(4, 4)
assert torch.equal(compiled(x), x * 4)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
