"""The commands of `fusewright` besides `cache`: env, doctor, check, minify, report, run.

Takes parsed arguments; prints, and gives an exit status. Always holds: a script that is run sees the arguments, the
module search path and the name that Python would give it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusewright.base import options
from fusewright.base.errors import OptionError
from fusewright.tools import bench, doctor
from fusewright.tools.check import Check, check
from fusewright.tools.minify import KINDS, minify_script
from fusewright.tools.patching import patch
from fusewright.tools.report import report


class Command(NamedTuple):
    """One command: what it does, its arguments, and what runs it."""

    meaning: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _env(arguments: argparse.Namespace) -> int:
    print(bench.table(doctor.environment()))  # type: ignore[arg-type]
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    found = doctor.examine()
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else found)
    return found.exit_status


def _json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="FILE.py:NAME or MODULE:NAME: a module, a function, or a class to make one of")
    parser.add_argument("--args", default="args", help="the name of its arguments, a tuple, in the same file")
    parser.add_argument("--input", action="append", type=_sizes, help="an argument of random numbers, e.g. 32,64")
    parser.add_argument("--shape", action="append", type=_sizes, default=[], help="a further size to try, e.g. 16,64")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for measuring the speed")
    parser.add_argument("--torch-compile", action="store_true", help="time torch.compile as well")
    parser.add_argument("--strict", action="store_true", help="warnings give exit status 1 too")
    for name in ("mode", "backend"):
        parser.add_argument(f"--{name}", help="as compile's")
    for name in ("fullgraph", "dynamic"):
        parser.add_argument(f"--{name}", action="store_true", help="as compile's")
    _json_argument(parser)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size.strip())


def _checked(arguments: argparse.Namespace) -> Check:
    place, _, name = arguments.model.rpartition(":")
    if not place:
        raise OptionError(f"check takes FILE.py:NAME or MODULE:NAME, got {arguments.model!r}")
    sys.path.insert(0, str(Path(place).parent if place.endswith(".py") else Path.cwd()))
    names = runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place))
    wanted = [name] if arguments.input else [name, arguments.args]
    missing = [each for each in wanted if each not in names]
    if missing:
        hint = "; --args names the tuple of arguments, --input makes them" if arguments.args in missing else ""
        raise OptionError(f"{place} has no {' and no '.join(missing)}{hint}")
    model = names[name]() if isinstance(names[name], type) else names[name]
    inputs: Any = [torch.randn(sizes) for sizes in arguments.input] if arguments.input else names[arguments.args]
    given = {key: getattr(arguments, key) for key in ("mode", "backend", "fullgraph", "dynamic")}
    return check(
        model,
        inputs if isinstance(inputs, (tuple, list)) else (inputs,),
        shapes=arguments.shape,
        torch_compile=arguments.torch_compile,
        seconds=arguments.seconds,
        **{key: value for key, value in given.items() if value},
    )


def _check(arguments: argparse.Namespace) -> int:
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints is no part of the answer
        found = _checked(arguments)
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else found)
    return int(found.status != "ok") if arguments.strict else found.exit_status


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as after python -m")
    parser.add_argument("script", help="a Python program that uses torch.compile")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def _run(arguments: argparse.Namespace) -> int:
    options.replace_torch_compile()
    with patch():
        run_script(arguments.script, arguments.arguments, arguments.module)
    return 0


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, default=Path("fusewright_report.html"), help="the page")
    _run_arguments(parser)


def _report(arguments: argparse.Namespace) -> int:
    with report(arguments.output.absolute()) as recording:
        try:
            return _run(arguments)
        finally:
            recording.close()
            print(f"wrote {arguments.output}", file=sys.stderr)


def _minify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=KINDS, default="wrong", help="what is the matter (default: a wrong result)")
    parser.add_argument("-o", "--output", type=Path, help="a file for the program that fails")
    parser.add_argument("script", type=Path, help="a Python program that uses fusewright.compile or torch.compile")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def _minify(arguments: argparse.Namespace) -> int:
    """Exit status 1 if something was found."""
    _prepare(arguments.script, arguments.arguments)
    found = minify_script(arguments.script, arguments.kind)
    print(found or f"nothing found: no graph of {arguments.script} fails by itself (--kind {arguments.kind})")
    if found and arguments.output:
        arguments.output.write_text(found.program)
    return int(found is not None)


def run_script(script: str, arguments: list[str], module: bool) -> None:
    """Runs a program as Python would. Its exceptions and its exit status are its own."""
    if module:
        sys.argv[:] = [script, *arguments]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    _prepare(Path(script), arguments)
    runpy.run_path(script, run_name="__main__")


def _prepare(script: Path, arguments: list[str]) -> None:
    """Makes arguments and search path those that Python gives a script."""
    if not script.exists():
        raise OptionError(f"there is no file {script}")
    sys.argv[:] = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))


COMMANDS: dict[str, Command] = {
    "env": Command("what to paste into a bug report", lambda parser: None, _env),
    "doctor": Command(
        "checks installation, cache, processor and GPU; what to do about what is wrong", _json_argument, _doctor
    ),
    "check": Command("the production checklist for a model (fusewright.check)", _check_arguments, _check),
    "minify": Command("finds what is at fault in a program, and the smallest one", _minify_arguments, _minify),
    "report": Command("runs a program as run does, and writes what was compiled as a page", _report_arguments, _report),
    "run": Command("runs a program whose torch.compile is fusewright (fusewright.patch)", _run_arguments, _run),
}
