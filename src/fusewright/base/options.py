"""Modes, options and environment variables: one typed table each. The only place that reads the environment.

Takes what the user passed to `compile`; gives a frozen `Settings`. Always holds: an unknown key or a value of the wrong
type is an `OptionError` that names the value and the near misses.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fusewright.base.errors import OptionError, near_misses
from fusewright.base.records import dataclass, field


@dataclass(frozen=True, slots=True)
class Option:
    """One row: the type of its values, the default, what it means, and between which values it lies (both included)."""

    type: type
    default: Any
    meaning: str
    between: tuple[float, float] | None = None
    wrong: Callable[[Any], str] = lambda value: ""
    """What is wrong with a value of the right type; nothing when it is right."""


def _wrong_buckets(value: dict[Any, Any]) -> str:
    for name, sizes in value.items():
        argument, _, dimension = name.rpartition(".") if isinstance(name, str) else ("", "", "")
        if name not in ("batch", "seq") and not (argument and dimension.isdecimal()):
            return f'{name!r} names no dimension: "batch", "seq", or an argument and a dimension, as in "input_ids.1"'
        if (
            not isinstance(sizes, (list, tuple))
            or not sizes
            or any(type(size) is not int or size < 1 for size in sizes)
        ):
            return f"the sizes of {name!r} are not a list of positive ints: {sizes!r}"
        if list(sizes) != sorted(set(sizes)):
            return f"the sizes of {name!r} do not ascend: {sizes!r}"
    return ""


TARGETS = ("native", "x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64")
"""Processors that code is generated for: this one, levels of x86-64, any AArch64."""

SKIPPABLE = ("generated_gemm", "generated_attention", "fused_attention", "gpu_candidates", "memory")
"""Stages that a compile can do without (backends/pipeline.py: PLAN_STAGES)."""

OPTIONS: dict[str, Option] = {
    "max_autotune": Option(
        bool, False, "search kernel parameters and library paths by measuring, within autotune_seconds"
    ),
    "autotune_seconds": Option(float, 30.0, "time budget of a max_autotune compile, in seconds"),
    "bucket": Option(
        dict,
        {},
        'sizes to pad dimensions to, e.g. {"seq": [64, 128, 256]}: "batch" and "seq" are the first and second '
        'dimension of tensor '
        'arguments, "NAME.1" is one argument\'s; where padding cannot be shown to be exact, code for any size is '
        'compiled',
        wrong=_wrong_buckets,
    ),
    "shape_padding": Option(
        bool,
        True,
        "pad half-precision matrix products on a GPU to sizes that the hardware likes, where that gains more than it "
        "costs",
    ),
    "triton.cudagraphs": Option(bool, False, "replay the compiled graph as a CUDA graph where that is safe (GPU only)"),
    "triton.cudagraphs_training": Option(
        bool, True, "with triton.cudagraphs: replay forward and backward of training too"
    ),
    "trace.enabled": Option(
        bool, False, "write every stage of the compile to ./fusewright_debug, as FUSEWRIGHT_DEBUG=1 does"
    ),
    "fallback_random": Option(
        bool, False, "dropout draws exactly eager's numbers; each costs a library call and a mask in memory"
    ),
    "activation_memory_budget": Option(
        float,
        1.0,
        "share (0 to 1) of the memory that the forward saves for the backward by default; less is bought by computing "
        "more again",
        (0.0, 1.0),
    ),
    "layout": Option(bool, True, "let convolution chains run in channels-last memory format inside the graph"),
    "pack_weights": Option(
        bool, True, "keep weights in the layout that library operators like best (inference; takes memory for a copy)"
    ),
    "library_products": Option(
        bool,
        True,
        "leave matrix products to the library where it is quicker; False takes a generated kernel wherever there is "
        "one (CPU, inference)",
    ),
    "join_collectives": Option(
        bool,
        False,
        "begin neighbouring collectives of one kind as one, where all processes compile the same graph; each of them "
        "must then run compiled code whenever the others do",
    ),
    "cut_collectives": Option(
        int,
        1,
        "cut products beside collectives into so many pieces of rows (1: none), so that one's communication overlaps "
        "with another's product; for sizes that do not vary (dynamic=False), and under join_collectives' conditions",
        wrong=lambda value: "" if 1 <= value <= 64 else f"{value} is not between 1 and 64",
    ),
    "vector_functions": Option(
        bool,
        True,
        "call SLEEF's functions, which PyTorch's library has, on whole registers; False calls the C library's, element "
        "by element, so that the code needs nothing else (CPU)",
    ),
    "capture_dynamic_output_shape_ops": Option(
        bool,
        False,
        "nonzero, boolean masks, unique and the like become part of the graph, with a size that is known at run time",
    ),
    "capture_scalar_outputs": Option(
        bool, False, "item() and tolist() become part of the graph, as numbers known at run time"
    ),
    "speculate": Option(
        bool,
        True,
        "a value that the program reads from a tensor on a CPU (for a branch, by item(), as the size of a mask's "
        "result) is taken to be what it is at the first call, and checked at each; a call that differs runs eagerly, "
        "and from then on the read is a graph break (not under fullgraph)",
    ),
    "background": Option(
        bool, False, "compile on another thread; calls run eagerly until the compiled version is ready"
    ),
    "disk_cache": Option(bool, True, "keep compiled graphs on disk and take them from there"),
    "fusion": Option(
        bool, True, "fuse loops; False gives one kernel an operator, to find out which fusion is at fault"
    ),
    "target": Option(
        str,
        "native",
        "the kind of processor to generate code for: this one, or a lesser one whose code runs here too (x86-64-v2, "
        "x86-64-v3, x86-64-v4, aarch64)",
        wrong=lambda value: "" if value in TARGETS else f"unknown target {value!r}: {near_misses(value, TARGETS)}",
    ),
    "checked": Option(
        bool,
        False,
        "check each memory access of the CPU kernels: one outside its buffer is an error that names kernel, line and "
        "element (slow: to find a defect)",
    ),
    "skip_stage": Option(
        str,
        "none",
        "leave out one stage between fusion and code generation, to find out whether it is at fault: "
        f"{', '.join(SKIPPABLE)} (without memory, each temporary has memory of its own)",
        wrong=lambda value: (
            "" if value in ("none", *SKIPPABLE) else f"unknown stage {value!r}: {near_misses(value, SKIPPABLE)}"
        ),
    ),
    "stop_after_rewrites": Option(
        int, -1, "stop the graph passes after this many rewrites (-1: never): bisects a wrong answer"
    ),
    "instruction_limit": Option(
        int, 5_000_000, "Python instructions that capture follows before it gives up on a frame"
    ),
    "compile_seconds": Option(
        float,
        0.0,
        "time that capture and compile of a version may take, in seconds (0: as long as they need); then the function "
        "runs eagerly for good. It is looked at between steps: code generation of one graph is one of them",
        (0.0, math.inf),
    ),
    "cost_limit": Option(
        int,
        64,
        "compiles of one function, its versions and the parts behind its breaks taken together, after which they must "
        "have saved by their calls what they cost; else new cases run eagerly (0: never asked)",
    ),
    "arena_limit_mib": Option(
        int, 4096, "temporary memory kept between calls, in MiB; larger needs are freed after each call"
    ),
}

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True},
}

STANCES = (
    "default",
    "force_eager",
    "eager_on_recompile",
    "fail_on_recompile",
    "eager_then_compile",
    "aot_eager_then_compile",
)

CAPTURE_OPTIONS = frozenset(
    {
        "capture_dynamic_output_shape_ops",
        "capture_scalar_outputs",
        "speculate",
        "compile_seconds",
        "cost_limit",
        "instruction_limit",
        "background",
        "trace.enabled",
    }
)
"""Options of capture: they count under every backend."""

_AUTOTUNE, _SIZES = "'max_autotune' measures candidates", "compile(dynamic=) and fusewright.mark_dynamic say so"
_ALWAYS = "fusewright does this always"
PEER_OPTIONS: dict[str, str] = {
    "epilogue_fusion": f"{_ALWAYS}; 'fusion': False switches fusion off",
    "prologue_fusion": _ALWAYS,
    "aggressive_fusion": _ALWAYS,
    "combo_kernels": _ALWAYS,
    "pattern_matcher": _ALWAYS,
    "split_reductions": _ALWAYS,
    "memory_planning": _ALWAYS,
    "cpp_wrapper": "no Python runs between kernels in any case",
    "max_autotune_gemm": _AUTOTUNE,
    "max_autotune_pointwise": _AUTOTUNE,
    "max_autotune_gemm_backends": _AUTOTUNE,
    "coordinate_descent_tuning": _AUTOTUNE,
    "freezing": "'pack_weights', which is on, prepares weights for inference",
    "layout_optimization": "use 'layout'",
    "force_disable_caches": "use 'disk_cache': False",
    "fx_graph_cache": "use 'disk_cache'",
    "trace.graph_diagram": "'trace.enabled' writes every stage as text, and fusewright.report draws a page",
    "triton.cudagraph_trees": "use 'triton.cudagraphs'",
    "triton.unique_kernel_names": "kernels have names of their own",
    "cpp.threads": "torch.set_num_threads says how many",
    "compile_threads": (
        "a CPU needs no compiler process; one process compiles for a GPU, on all cores that the program may use"
    ),
    "dynamic_shapes": _SIZES,
    "automatic_dynamic_shapes": _SIZES,
    "assume_static_by_default": _SIZES,
    "recompile_limit": "it is an argument: compile(recompile_limit=)",
    "cache_size_limit": "it is an argument: compile(recompile_limit=)",
    "suppress_errors": "what cannot be compiled runs eagerly, unless fullgraph=True",
    "guard_filter_fn": "guards cannot be left out: a check that is missing gives wrong results, and all of them take "
    "less than a microsecond",
    "use_aoti": "fusewright.export makes programs that run elsewhere",
}
"""Options of other compilers, and what to use here."""


def _flag(text: str) -> bool:
    return text.strip().lower() not in ("", "0", "false", "no", "off")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: how its text is read, and what it means."""

    parse: Callable[[str], Any]
    default: Any
    meaning: str


VARIABLES: dict[str, Variable] = {
    "FUSEWRIGHT_LOGS": Variable(
        str, "", "comma-separated log artifacts, e.g. graph_breaks,recompiles; help lists them"
    ),
    "FUSEWRIGHT_DEBUG": Variable(
        _flag, False, "write every stage of every compile to ./fusewright_debug/<run>/<function>/<version>/"
    ),
    "FUSEWRIGHT_PROGRESS": Variable(
        _flag, True, "0: no line on a terminal while a compile takes longer than 3 seconds"
    ),
    "FUSEWRIGHT_DISABLE": Variable(_flag, False, "compile() returns its argument unchanged"),
    "FUSEWRIGHT_CACHE": Variable(_flag, True, "0 turns the disk cache off"),
    "FUSEWRIGHT_CACHE_DIR": Variable(
        str, "", "the disk cache's folder (default: fusewright in the user's cache folder)"
    ),
    "FUSEWRIGHT_CACHE_MIB": Variable(_positive, 2048, "the disk cache's largest size, in MiB; a positive number"),
    "FUSEWRIGHT_BACKEND": Variable(str, "", "the backend to use where the program does not name one"),
    "FUSEWRIGHT_REPLACE_TORCH_COMPILE": Variable(_flag, False, "1 replaces torch.compile, as fusewright.patch() does"),
}


def environment(name: str) -> Any:
    """The value of an environment variable of the table, parsed (read at each call: a test may change it). Raises
    OptionError."""
    variable = VARIABLES[name]
    text = os.environ.get(name)
    try:
        return variable.default if text is None else variable.parse(text)
    except ValueError:
        raise OptionError(
            f"the environment variable {name} is {text!r}, which it cannot be ({variable.meaning})"
        ) from None


def replace_torch_compile() -> None:
    """Sets FUSEWRIGHT_REPLACE_TORCH_COMPILE for the processes that this one starts."""
    os.environ["FUSEWRIGHT_REPLACE_TORCH_COMPILE"] = "1"


def given_variables() -> dict[str, str]:
    """The environment variables of ours that are set, known ones and others, with their texts."""
    return {name: text for name, text in sorted(os.environ.items()) if name.startswith("FUSEWRIGHT_")}


def cache_folder() -> Path:
    """The disk cache's folder: FUSEWRIGHT_CACHE_DIR, or `fusewright` in the user's cache folder (XDG_CACHE_HOME, else
    ~/.cache); for a user without a home (an unknown number in a container), one of the user's own among the temporary
    files."""
    named = environment("FUSEWRIGHT_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if named:
            return Path(named).expanduser().absolute()
        return (Path(base) if base else Path.home() / ".cache").absolute() / "fusewright"
    except RuntimeError:
        return (
            Path(os.environ.get("TMPDIR", "/tmp")) / f"fusewright-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """What one `compile` call asked for, checked."""

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: Any = "native"
    mode: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict)
    backend_options: Mapping[str, Any] | None = None
    name: str | None = None
    recompile_limit: int = 8

    def __getitem__(self, key: str) -> Any:
        """The value of option `key`: the user's, else the mode's, else the default."""
        return self.options[key]


def _checked(key: str, value: Any) -> Any:
    row = OPTIONS.get(key)
    if row is None and key in PEER_OPTIONS:
        raise OptionError(f"option {key!r} is another compiler's: {PEER_OPTIONS[key]}")
    if row is None:
        raise OptionError(f"unknown option {key!r}: {near_misses(key, OPTIONS)}")
    if row.type is float and type(value) is int:
        value = float(value)
    if type(value) is not row.type:
        raise OptionError(
            f"option {key!r} takes {row.type.__name__}, got {value!r} of type {type(value).__name__} ({row.meaning})"
        )
    complaint = row.wrong(value)
    if complaint:
        raise OptionError(f"option {key!r}: {complaint} ({row.meaning})")
    if row.between is not None and isinstance(value, float) and not row.between[0] <= value <= row.between[1]:
        raise OptionError(
            f"option {key!r} takes a value between {row.between[0]} and {row.between[1]}, got {value!r} ({row.meaning})"
        )
    return value


class Config:
    """Defaults of later `compile` calls, as attributes: `dynamic`, `recompile_limit`, and every option, with `_` for
    `.` in its name. What is compiled already keeps its settings.

    `config.patch(name=value)` changes them for a with-block or a decorated function. A mode, an option or an argument
    that `compile` is given counts more. Raises OptionError for an unknown name or a wrong value.
    """

    dynamic: bool | None
    recompile_limit: int

    def __init__(self) -> None:
        self.__dict__.update({key.replace(".", "_"): row.default for key, row in OPTIONS.items()})
        self.__dict__.update(dynamic=None, recompile_limit=8)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "dynamic":
            right = value is None or type(value) is bool
        elif name == "recompile_limit":
            right = type(value) is int and value > 0
        elif name in _BY_ATTRIBUTE:
            value, right = _checked(_BY_ATTRIBUTE[name], value), True
        elif name in PEER_OPTIONS:
            raise OptionError(f"fusewright.config.{name} is another compiler's: {PEER_OPTIONS[name]}")
        else:
            raise OptionError(f"fusewright.config has no {name!r}: {near_misses(name, self.__dict__)}")
        if not right:
            raise OptionError(f"fusewright.config.{name} cannot be {value!r}")
        self.__dict__[name] = value

    def given(self) -> dict[str, Any]:
        """The options, by their own names."""
        return {key: self.__dict__[name] for name, key in _BY_ATTRIBUTE.items()}

    @contextlib.contextmanager
    def patch(self, changes: Mapping[str, Any] | str | None = None, value: Any = None, **more: Any) -> Iterator[None]:
        """`patch(name=value)`, `patch({"name": value})` or `patch("name", value)`."""
        wanted = ({changes: value} if isinstance(changes, str) else dict(changes or {})) | more
        before = dict(self.__dict__)
        try:
            for name, new in wanted.items():
                setattr(self, name.replace(".", "_"), new)
            yield
        finally:
            self.__dict__.update(before)


_BY_ATTRIBUTE = {key.replace(".", "_"): key for key in OPTIONS}
config = Config()
_default_backend: Any = None


def default_backend() -> Any:
    """The backend where none is named: what set_default_backend has set, else FUSEWRIGHT_BACKEND, else "native"."""
    return _default_backend if _default_backend is not None else environment("FUSEWRIGHT_BACKEND") or "native"


def set_default_backend(backend: Any) -> None:
    """Sets what `default_backend` gives; None undoes that."""
    global _default_backend
    _default_backend = backend


def settings(
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: Any = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    recompile_limit: int | None = None,
) -> Settings:
    """Checks the arguments of `compile` and merges mode and options (options refine the mode).

    Raises OptionError naming the wrong value and the choices. Modes and options of a backend other than "native" are
    checked when it is known (backends.registry.check_arguments), but for those of capture.
    """
    if type(fullgraph) is not bool:
        raise OptionError(f"fullgraph takes True or False, got {fullgraph!r}")
    if dynamic not in (None, True, False) or type(dynamic) not in (bool, type(None)):
        raise OptionError(f"dynamic takes None, True or False, got {dynamic!r}")
    backend = backend if backend is not None else default_backend()
    if mode is not None and mode not in MODES and (backend == "native" or not callable(backend)):
        raise OptionError(f"unknown mode {mode!r}: {near_misses(str(mode), MODES)}")
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options takes a dict, got {type(options).__name__}")
    if recompile_limit is not None and (type(recompile_limit) is not int or recompile_limit < 1):
        raise OptionError(f"recompile_limit takes a positive int, got {recompile_limit!r}")
    merged = {key: row.default for key, row in OPTIONS.items()} | config.given() | MODES.get(mode or "default", {})
    backend_options = None
    if dynamic is False and options and backend == "native" and options.get("bucket"):
        raise OptionError("option 'bucket' needs sizes that change, and dynamic=False rules them out")
    if backend == "native":
        merged |= {key: _checked(key, value) for key, value in (options or {}).items()}
    else:
        backend_options = dict(options) if options else None
        merged |= {key: _checked(key, value) for key, value in (options or {}).items() if key in CAPTURE_OPTIONS}
    return Settings(
        fullgraph=fullgraph,
        dynamic=config.dynamic if dynamic is None else dynamic,
        backend=backend,
        mode=mode or "default",
        options=merged,
        backend_options=backend_options,
        name=name,
        recompile_limit=recompile_limit if recompile_limit is not None else config.recompile_limit,
    )
