"""Every way in which a compiled program may differ from the eager one, by name, with the reason.

A row says which differences it covers, and after which errors (ours, eager's) no more is compared. Rows
that do neither are of programs that the generators do not write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence

from fusewright.base.records import dataclass
from tests.fuzz.compare import Difference

Examine = Callable[[str], object]


def never(found: Difference, text: str, examine: Examine) -> bool:
    return False


KEPT = """
SEEN = []
def kept(seen, *values):
    seen += [value.clone() for value in values if isinstance(value, torch.Tensor)]
"""
NAMED = """
SEEN = []
def kept(seen, *values): pass
"""


def unused(found: Difference, text: str, examine: Examine) -> bool:
    """Whether the same error comes, or is caught, once every value is returned, as it was after each line that names it,
    and does not once the values are only named where they are made."""
    raised = found.raised or found.kind == "exception" or found.where.startswith("exception")
    if not raised and not re.search(r"^\s+except", text, re.MULTILINE):
        return False
    used, named = _used(text), _used(text, made=True)
    if used is None or examine(KEPT + used) is not None:
        return False
    # An inference tensor that is named behind its context is the result of a graph.
    return "inference_mode():\n        v" in text or examine(f"{NAMED}{named}") is not None


def _used(text: str, made: bool = False) -> str | None:
    """The text with a use of what each line of the program names, or only of what it gives a name; None of an object
    that is called."""
    tree = ast.parse(text)
    functions = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "program")
    program = next(functions, None)
    for one in ast.walk(tree):  # what a module computes is kept outside
        if isinstance(one, ast.FunctionDef) and one.name == "forward":
            one.body = _with_uses(one.body, {held.arg for held in one.args.args}, made, "SEEN")
    if program is None:
        return ast.unparse(ast.fix_missing_locations(tree)) if "def forward" in text else None
    body = [*ast.parse("seen = []").body, *_with_uses(program.body, {one.arg for one in program.args.args}, made)]
    program.body = body if isinstance(body[-1], ast.Return) else [*body, ast.Return(ast.Name("seen"))]
    return ast.unparse(ast.fix_missing_locations(tree))


def _with_uses(statements: list[ast.stmt], bound: set[str], made: bool, seen: str = "seen") -> list[ast.stmt]:
    """The statements, each followed by a use of all that it names. bound: names that are; more are added. made: only
    of those that it binds. seen: the list that keeps them, which is returned too if it is the function's own."""
    body: list[ast.stmt] = []
    for statement in statements:
        body.append(statement)
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        for inner in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            for part in ("body", "orelse", "finalbody"):
                if getattr(inner, part, None):  # what it binds may be unbound behind it
                    setattr(inner, part, _with_uses(getattr(inner, part), bound.copy(), made, seen))
        if isinstance(statement, ast.Expr):  # what has no name
            statement.value = ast.Call(ast.Name("kept", ast.Load()), [ast.Name(seen, ast.Load()), statement.value], [])
        if isinstance(statement, ast.Return) and seen == "seen":
            statement.value = ast.Tuple([statement.value or ast.Constant(None), ast.Name("seen")])
        elif isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.With):
            own = [part for one in ast.walk(statement) if isinstance(one, ast.comprehension) for part in ast.walk(one.target)]
            names = [one for one in ast.walk(statement) if isinstance(one, ast.Name)]
            bound |= {one.id for one in names if isinstance(one.ctx, ast.Store) and one not in own}
            shown = {one.id for one in names if isinstance(one.ctx, ast.Store) or not made} & bound
            body += ast.parse(f"kept({', '.join([seen, *sorted(shown)])})").body
    return body


HALF = re.compile(r"\bb?f16\b|half|autocast")
BENT = r"\b(hardtanh|relu6|hardswish|elu|celu|selu|hardshrink|softshrink)\((\w+)"
NORM = r"F\.(instance|layer|group|batch|rms)_norm\((\w+)"
LEAVES_ROUNDING = (
    r"= (F\.(?:(?:instance|layer|group|batch|rms)_norm|gelu|cosine_similarity)\(.*\)(?: \* [\d.]+)?"
    r"|\w+\.log_softmax\([-\d]+\)%s)$"
)


def equal_if(
    found: Difference,
    text: str,
    examine: Examine,
    pattern: str,
    other: str | Callable[[re.Match[str]], str],
    kinds: Sequence[str] = ("number",),
) -> bool:
    """Whether the results are equal once every line is written otherwise; what runs under a condition has its own."""
    lines = re.sub(r"^( +)(\w+ = )\((.+)\) if (.+) else (\w+)$", r"\1if \4: \2\3\n\1else: \2\5", text, flags=re.MULTILINE)
    changed = re.sub(pattern, other, lines, flags=re.MULTILINE)
    return found.kind in kinds and changed != lines and examine(changed) is None


IN_RANGE = """
def in_range(a):
    return a.nan_to_num(0.0, 9.0, -9.0).clamp(0, 99) if a.is_floating_point() else a
"""


FINITE = """
def finite(a):
    if a.requires_grad: a.register_hook(lambda gradient: gradient.nan_to_num(0.0, 0.0, 0.0))
    return a
"""


ONE_ZERO = """
def one_zero(a):
    return a + 0 if isinstance(a, torch.Tensor) and a.is_floating_point() else a
"""
EXTREME = r"= (.*(?:\.(?:max|min|amax|amin|aminmax)|maximum|minimum|max_pool\dd|clamp)\(.*)$"


SMALL = """
def small(a, name):
    return (a.clamp_ if name.endswith("_") else a.clamp)(-99, 99) if a.is_floating_point() else a
"""


WRITTEN = """
def written(a):
    return (lambda *sizes: torch.Tensor(*sizes).zero_()) if isinstance(a, torch.Tensor) else type(a)
"""


def overflows_between(found: Difference, text: str, examine: Examine) -> bool:
    """Whether ours is infinite only where eager's is within a factor of two of the largest half, and the results are
    equal once each half is a float."""
    pairs = zip(*[re.findall(r"[-\w.]+", side) for side in (found.ours, found.eager)], strict=False)
    infinite = [(ours, eager) for ours, eager in pairs if ours.endswith("inf") != eager.endswith("inf")]
    other = re.sub(r"\bf16\b", "f32", text)
    near = [eager for ours, eager in infinite if ours.endswith("inf") and abs(float(eager)) > 32752]
    return found.kind == "number" and 0 < len(near) == len(infinite) and other != text and examine(other) is None


KRON = """
def kron(*operands):
    return torch.kron(*[one.clone() for one in operands])
"""


KINDS_OF_RESULTS = ("number", "value", "structure", "class", "exception", "shape", "dtype")
WITHOUT_SEARCH = """
class Asking(torch.optim.SGD):
    def step(self, closure): return [super(Asking, self).step(closure) for _ in range(4)][-1]
"""
OF_ANOTHER_TYPE = (*KINDS_OF_RESULTS, "requires_grad", "strides")
ONCE = """
def once(function, *values, **settings): return function(*(values[1:] if type(values[0]) is int else values))
"""
WITH_ALL_STEPS = """
def with_all_steps(norm):
    def laid_out(one):
        if not in_eager: return one
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(one.ndim)
        nearly = last and one.is_contiguous(memory_format=last) and not one.is_contiguous()
        return one.clone(memory_format=last) if nearly else one
    def of_all(*values, **settings):
        result = norm(*[laid_out(one) if type(one) is torch.Tensor else one for one in values], **settings)
        if in_eager and result.requires_grad: result.register_hook(lambda one: one.clone(memory_format=torch.contiguous_format))
        return result
    return type(norm.__name__, (norm,), {"forward": with_all_steps(norm.forward)}) if isinstance(norm, type) else of_all
"""
OF_PLAIN = """
def of_plain(pool):
    def pooled(*values, **settings):
        result = pool(*[one.contiguous() if in_eager and type(one) is torch.Tensor else one for one in values], **settings)
        if not in_eager: return result
        with torch.no_grad(): like = pool(*values, **settings)
        last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
        return result.clone(memory_format=torch.channels_last) if last else result
    return type(pool.__name__, (pool,), {"forward": of_plain(pool.forward)}) if isinstance(pool, type) else pooled
"""
CHANGES = r"hooked\(|sdpa_kernel\(|register_\w*hook|functional_call|delattr\(|requires_grad_\("


class _ByName(ast.NodeTransformer):
    """Gives what is caught a name, and a `raise` without one that name."""

    def __init__(self) -> None:
        self.caught: list[str] = []

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        node.type, node.name = node.type or ast.Name("BaseException"), node.name or f"caught{len(self.caught)}"
        self.caught.append(node.name)
        self.generic_visit(node)
        self.caught.pop()
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        if node.exc is None and self.caught:
            node.exc = ast.Name(self.caught[-1])
        return node


def goes_with_a_frame(found: Difference, text: str, examine: Examine) -> bool:
    """Whether the results are equal once errors are raised again by name, at which a traceback grows, or, where one is
    kept, a generator that is dropped says nothing of it."""
    if found.kind not in ("value", "structure"):
        return False
    if "gen(" in text and re.search(r"except[^\n]* as (\w+):\n.*KEPT\.append\(\1\)", text, re.S):
        if examine(text.replace("begin()\n", SILENT, 1)) is None:
            return True
    changed = ast.unparse(ast.fix_missing_locations(_ByName().visit(ast.parse(text))))
    return bool(re.search(r"^\s+raise$", text, re.M)) and examine(changed) is None


class _InOrder(ast.NodeTransformer):
    """Puts what is written `{*these, one}` in a dict, which has an order."""

    def visit_Set(self, node: ast.Set) -> ast.expr:
        made = ast.parse("dict.fromkeys([])", mode="eval").body
        made.args[0].elts = node.elts  # type: ignore[attr-defined]
        return made if any(isinstance(one, ast.Starred) for one in node.elts) else node


def hashed_by_address(found: Difference, text: str, examine: Examine) -> bool:
    """Whether only the order of a set differs, of what is sorted by its text, or of the letters of a text, which goes by
    where objects lie in memory."""
    if found.kind == "value" and "an address" in found.eager:
        return sorted(found.ours) == sorted(found.eager)
    by_kind = re.sub(r"key=(lambda v: str\(v\)|str\b)", "key=lambda v: type(v).__name__", text)
    if by_kind != text and found.kind in ("value", "identity", "class") and examine(by_kind) is None:
        return True
    letters = text.replace("''.join(sorted(", "''.join(list(")
    if letters != text and found.kind == "value" and examine(letters) is None:
        return True
    if "{*" in text and found.kind in ("class", "value", "identity"):
        if examine(ast.unparse(ast.fix_missing_locations(_InOrder().visit(ast.parse(text))))) is None:
            return True
    alike = text.replace("begin()\n", "begin()\nS.__hash__ = lambda self: 5\n", 1)
    return found.kind in ("class", "value") and "set(" in text and alike != text and examine(alike) is None


def left_a_property(found: Difference, text: str, examine: Examine) -> bool:
    """Whether the results are equal once no property is one that CPython specialises reads for."""
    alike = text.replace("begin()\n", "begin()\nclass Asked(property): pass\n", 1).replace("@property", "@Asked")
    return found.where.endswith(".name") and "@property" in text and examine(alike) is None


def casts_anew(text: str) -> str:
    """Empties autocast's cache in each step, and where autocast's dtype changes."""
    text = re.sub(r"^(def step\w+\(\):\n    )", r"\1torch.clear_autocast_cache()\n    ", text, flags=re.MULTILINE)
    return re.sub(r"(set_autocast_dtype\('cpu', [\w.]+\))", r"\1; torch.clear_autocast_cache()", text)


SILENT = """begin()
def gen(n):
    try:
        for step in range(n):
            got = yield step
            if got is not None: LOG.append(("got", got))
    except ValueError:
        yield "caught"
"""


def held_across_a_break(found: Difference, text: str, examine: Examine) -> bool:
    """Whether the results are equal once a generator that is dropped says nothing of it."""
    alike = text.replace("begin()\n", SILENT, 1)
    held = r"next\(gen\(\w+\), .*\.(item|tolist)\(\)|\w\.(send|throw|close)\("
    return bool(re.search(held, text)) and examine(alike) is None


IN_BACKWARD = "raised in the backward"
IN_GRADIENTS_OF_GRADIENTS = "raised in the backward that keeps its own graph"
OF_DTYPES = re.compile(r"mixed dtype|same dtype|scalar type")  # what operators say of arguments that do not fit
NODE = re.compile(r",(?:\s|\\n)+grad_fn=<\w+>")  # in a text of a text a new line is two letters


@dataclass(frozen=True, slots=True)
class Deviation:
    name: str
    reason: str
    covers: Callable[[Difference, str, Examine], bool] = never
    ends: Callable[[Exception | None, Exception | None], bool] = lambda ours, eager: False


DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        "errors of values that nobody uses",
        "An operator whose result nobody uses is not run, so it raises nothing either (an index out of bounds), and what is "
        "behind it runs.",
        unused,
    ),
    Deviation(
        "gradients of what `.data` has changed",
        "Eager's gradient uses the changed values of a saved tensor, which is wrong for the result that was computed.",
        lambda found, text, examine: (
            found.kind == "number"
            and ".grad" in found.where
            and ".data" in text
            and (
                "backward(KEPT.pop" in text
                or ".apply_(" in text  # which no graph holds
                or equal_if(found, text, examine, r"\.data\.(?=\w+_\()", ".data.clone().")
            )
        ),
    ),
    Deviation(
        "writes before a write that autograd refuses",
        "A write to a view of a leaf raises eager's error when the call's writes are made, not between them.",
        ends=lambda ours, eager: type(ours) is type(eager) and "leaf Variable that requires grad" in str(eager),
    ),
    Deviation(
        "writes around an index out of bounds",
        "Where values make an operator raise, what the call writes later on may have been written already.",
        ends=lambda ours, eager: (
            type(ours) is IndexError
            and (type(eager) is IndexError or (type(eager) is RuntimeError and "index out of range in" in str(ours)))
        ),
    ),
    Deviation(
        "gradients at NaN of the last few elements",
        "Eager's vectorised kernels compare otherwise than its code for the elements that fill no vector; ours are the "
        "vectors' (tests/autograd/test_special_values.py).",
        lambda found, text, examine: (
            found.where.endswith(".grad") and equal_if(found, text, examine, BENT, r"\1(\2.nan_to_num()")
        ),
    ),
    Deviation(
        "gelu of infinity",
        "Eager's kernel for float32 and halves gives NaN, the one for doubles infinity; ours gives infinity in each.",
        lambda found, text, examine: equal_if(
            found, text, examine, r"\bgelu\((\w+)", r"gelu(\1.nan_to_num(0.0, 9.0, -9.0)"
        ),
    ),
    Deviation(
        "attention over scores that are not finite",
        "Eager's kernel for a CPU gives zeros for some rows of infinite scores; ours gives the NaN that softmax has.",
        lambda found, text, examine: equal_if(
            found, IN_RANGE + text, examine, r"attention\((\w+), (\w+), ", r"attention(in_range(\1), in_range(\2), "
        ),
    ),
    Deviation(
        "memory behind a result",
        "A result of ours has memory for its elements; eager's reductions (`mse_loss`) may have more, which a window shows.",
        ends=lambda ours, eager: eager is None and "are out of bounds for storage" in str(ours),
    ),
    Deviation(
        "products of many elements",
        "Parts of it overflow and vanish in another order than eager's; equal once no factor is larger than 1.",
        lambda found, text, examine: equal_if(
            found, text, examine, r"(\w+)\.(prod|cumprod)\(", r"\1.clamp(-1, 1).\2("
        ),
    ),
    Deviation(
        "sums of the largest numbers",
        "Others vanish beside them, so what is left once they cancel goes by the order in which they are added (`nan_to_num` "
        "makes them of infinities). Equal once no number is larger than 99.",
        lambda found, text, examine: equal_if(
            found, SMALL + text, examine, r"\b(\w+)\.(sum|mean|cumsum_?)\(", r"small(\1, '\2').\2("
        ),
    ),
    Deviation(
        "gradients of halves whose parts overflow in between",
        "A gradient of several parts near the largest half: what the first of them add up to may be beyond it, and goes by "
        "their order. Equal once halves are floats.",
        lambda found, text, examine: ".grad" in found.where and overflows_between(found, text, examine),
    ),
    Deviation(
        "gradients of a product of elements that are not finite",
        "Eager divides the product by each element; ours multiplies the others, which is the gradient.",
        lambda found, text, examine: (
            ".grad" in found.where
            and equal_if(found, text, examine, r"(\w+)\.prod\(", r"\1.nan_to_num(0.5, 2.0, -2.0).prod(")
        ),
    ),
    Deviation(
        "gradients that are added to gradients of gradients",
        "Ours are added behind the compiled function, eager's at each step of it: of infinities, one sum may be NaN, and sums are "
        "not parts of one gradient. Equal once each has a backward of its own.",
        lambda found, text, examine: (
            ".grad" in found.where
            and equal_if(found, text, examine, r"again=True", "again=True, apart=True", ("number", "memory"))
        ),
    ),
    Deviation(
        "what the frames of a traceback hold",
        "The frames of a rebuilt one hold no variables, so what they held dies with the call (docs/limits.md). Equal once no "
        "exception is kept.",
        lambda found, text, examine: (
            "__del__" in text
            and equal_if(found, text, examine, r"\b(KEPT|LOG)\.append\((n\d+)\)$", r"\1.append(repr(\2))", ("value", "class"))
        ),
    ),
    Deviation(
        "the dictionary of an exception",
        "CPython makes it when it is first asked for, as a capture does, and `__reduce__` tells. Equal once it is asked for "
        "where the exception is made.",
        lambda found, text, examine: equal_if(
            found, text, examine, r"^(\w+) = (C\d+\(.*\))$", r"\g<0>\nobject.__getattribute__(\1, '__dict__')", ("value",)
        ),
    ),
    Deviation(
        "normalisations of numbers whose squares overflow",
        "Each of eager's kernels gives something else (0, or NaN): they sum squares in floats, in doubles, or not at all. "
        "Equal once the numbers are below 1e17.",
        lambda found, text, examine: equal_if(found, text, examine, NORM, r"F.\1_norm(\2.clamp(-1e17, 1e17)"),
    ),
    Deviation(
        "normalisations of equal numbers",
        "Eager adds neighbours in pairs, so the mean of equal numbers is that number, and 0 is left. Where our lanes are "
        "rows, each adds its elements one after the other, and the sum's rounding is left, over the root of epsilon; so it is "
        "of their gradients. Equal once it is done in doubles, or no rows are equal.",
        lambda found, text, examine: (
            (
                (not found.eager.strip("[]-0., ") or (".grad" in found.where and ".expand(" in text))
                and equal_if(found, text, examine, NORM, r"F.\1_norm(\2.double()")
            )
            or (
                "Norm" in text
                and equal_if(found, text, examine, r"\(\(1, (\d+)\), (.*?)\)\.expand\((\d+), \1\)", r"((\3, \1), \2)")
            )
            or (
                bool(re.search(r"Norm.*(?s:.*)(\.expand\(|_pool|Pool|Pad|pad\()", text))
                and equal_if(found, text, examine, r"\bf32\b|^(m = .+)$", lambda met: f"{met[1]}.double()" if met[1] else "f64")
            )
        ),
    ),
    Deviation(
        "gradients of a normalisation that infinite ones come to",
        "Eager sums their products with the numbers themselves, ours with the normalised ones: where one of them is 0, infinity "
        "becomes NaN. Equal once what comes in is finite.",
        lambda found, text, examine: (
            ".grad" in found.where and equal_if(found, FINITE + text, examine, rf"= ({NORM}.*\))$", r"= finite(\1)")
        ),
    ),
    Deviation(
        "gradients of a variance of one element",
        "Infinity times the element less its mean, which eager rounds alike: 0, so it is NaN. Ours may keep the element in a "
        "higher precision. Equal once it is not divided by 0.",
        lambda found, text, examine: (
            ".grad" in found.where
            and not found.eager.strip("[]na, ")
            and equal_if(found, text, examine, r"\.(var|std)\((-?\d+)\)", r".\1(\2, correction=0)")
        ),
    ),
    Deviation(
        "which of two zeros an extreme is",
        "Eager's kernels take the first, the last or either, by the layout; ours may take the other one. Equal once what they "
        "give is a positive zero.",
        lambda found, text, examine: equal_if(found, ONE_ZERO + text, examine, EXTREME, r"= one_zero(\1)"),
    ),
    Deviation(
        "the sign of a NaN",
        "What operators make has either, by the instruction: eager's also differs between a vector and what fills none. Equal "
        "once nobody asks for it.",
        lambda found, text, examine: (
            equal_if(found, text, examine, r"\b(\w+)\.signbit\(", r"\1.nan_to_num().signbit(")
            or equal_if(found, text, examine, r"copysign\((\w+), (\w+)\)", r"copysign(\1, \2.nan_to_num())")
        ),
    ),
    Deviation(
        "gradients of a Kronecker product of what is written to later",
        "Eager saves views of its operands that do not share their version, so it misses the write and multiplies by what was "
        "written: its gradient is wrong (ours is that of the product that was computed). Equal once copies go in.",
        lambda found, text, examine: (
            ".grad" in found.where
            and equal_if(found, KRON + text, examine, r"torch\.kron\((?=\w)", "kron(")
        ),
    ),
    Deviation(
        "cosine similarity of a half and another type",
        "The norm of the half is rounded to a half, by eager at another place; equal once no argument is a half.",
        lambda found, text, examine: (
            found.kind == "number"
            and "cosine_similarity(" in text
            and (other := re.sub(r"\b(f16|bf16)\b", "f32", text)) != text
            and examine(other) is None
        ),
    ),
    Deviation(
        "quotients by what rounding leaves",
        "Of equal numbers a normalisation leaves 0 or the rounding of their mean, of numbers below -5 gelu leaves 0 or the "
        "rounding of erf, of orthogonal vectors cosine_similarity leaves 0 or the rounding of their product, and for the largest "
        "half of a row log_softmax leaves 0 in eager; a half less a product that was rounded to it leaves 0, or what the "
        "rounding left. A quotient by it is anything, and relu has a gradient there or not.",
        lambda found, text, examine: equal_if(
            found, text, examine, LEAVES_ROUNDING % (r"|-?[\w.]+ - [\w.]+" if HALF.search(text) else ""), r"= \1 + 9"
        ),
    ),
    Deviation(
        "how many numbers a Poisson draw takes",
        "That goes by its rates, which a half rounds in eager and need not in ours. Equal once each rate is the same number.",
        lambda found, text, examine: (
            HALF.search(text) is not None
            and equal_if(found, text, examine, r"torch\.poisson\((.+)\)$", r"torch.poisson(\1 * 0 + 2)", ("value", "number"))
        ),
    ),
    Deviation(
        "how many numbers rrelu draws behind a normalisation",
        "One for each number that is not positive. Of equal numbers a normalisation leaves 0, or the rounding of their mean. Equal "
        "once the slope is not drawn.",
        lambda found, text, examine: (
            "Norm" in text and equal_if(found, text, examine, r"\bRReLU\(", "LeakyReLU(", ("value", "number"))
        ),
    ),
    Deviation(
        "scatters into what shares elements",
        "`select_scatter`, `slice_scatter` and `diagonal_scatter` of expanded or overlapping tensors give dense copies.",
        lambda found, text, examine: (
            bool(re.search(r"(select|slice|diagonal)_scatter\(", text))
            and bool(re.search(r"as_strided|expand|unfold", text))
        ),
    ),
    Deviation(
        "scatters into what has gaps, once its sizes vary",
        "Their copies have eager's gaps where the step is known, or what the graph knows of it shows that elements lie apart; "
        "else they are dense.",
        lambda found, text, examine: (
            found.kind == "strides" and bool(re.search(r"(select|slice|diagonal)_scatter\(", text))
        ),
    ),
    Deviation(
        "strides of gradients that a hook is given",
        "They are the tensor's where the gradient that comes in is laid out otherwise than the output.",
        lambda found, text, examine: (
            found.kind == "strides" and "KEPT" in found.where and "register_hook(lambda g: KEPT.append(g))" in text
        ),
    ),
    Deviation(
        "strides of gradients that the engine adds up in place",
        "Where it may, the step of a dimension of one element is that of the first of them; `pixel_shuffle` and its kin take it for a "
        "memory format, and make of it the steps of all (docs/guarantees.md). Equal once gradients are added to new tensors.",
        lambda found, text, examine: (
            bool(re.search(r"pixel_?(un)?shuffle", text, re.IGNORECASE))
            and equal_if(
                found, text, examine, r"(functional\.vjp\(.*)\)\[1\]", r"\1, create_graph=True)[1]", ("strides",)
            )
        ),
    ),
    Deviation(
        "a backward under inference mode",
        "Eager refuses that of a view of a leaf which is made there; behind a graph break ours is the leaf's.",
        ends=lambda ours, eager: ours is None and "element 0 of tensors does not require grad" in str(eager),
    ),
    Deviation(
        "errors of a library about no elements",
        "The Fourier transform of no rows raises where its result is used in whole; ours computes none of no elements.",
        ends=lambda ours, eager: ours is None and "MKL FFT error" in str(eager),
    ),
    Deviation(
        "leaves that a compiled function makes",
        "A fuzzed program takes gradients of gradients by every leaf that the graph of a result shows, and ours shows none that the "
        "function has made for itself. Equal once it makes none.",
        lambda found, text, examine: (
            "again=True" in text and equal_if(found, text, examine, r"= torch\.nn\.Parameter\((.+)\)$", r"= (\1)", ("number", "value"))
        ),
    ),
    Deviation(
        "inference tensors that a backward needs",
        "Eager refuses to save an inference tensor, or one whose data replaced one's, for a backward that nobody can ask for; ours "
        "saves none.",
        ends=lambda ours, eager: ours is None
        and bool(re.search("Inference tensors (cannot be saved for backward|do not track version counter)", str(eager))),
    ),
    Deviation(
        "what the backward needs was written to",
        "Other tensors are kept for the backward than by eager, so a write in between may be refused, or not, otherwise.",
        ends=lambda ours, eager: (
            "needed for gradient computation has been modified" in f"{ours}{eager}"
            and "before gradients of its gradients" not in str(ours)
        )
        or (
            ours is None
            and "A view was created in no_grad mode" in str(eager)  # it is asked what it comes from
            and IN_BACKWARD in getattr(eager, "__notes__", ())
        ),
    ),
    Deviation(
        "gradients of gradients of a call that has written to what it reads",
        "The forward runs once more for them, and its arguments do not hold what they held: it is refused.",
        ends=lambda ours, eager: (
            IN_GRADIENTS_OF_GRADIENTS in getattr(ours, "__notes__", ()) and "of its gradients were asked" in str(ours)
        ),
    ),
    Deviation(
        "gradients of gradients of a call whose argument requires a gradient only since",
        "Eager's reach it past what the call has computed of it: it is refused (docs/limits.md).",
        ends=lambda ours, eager: "Set requires_grad before the call" in str(ours),
    ),
    Deviation(
        "gradients of gradients through a jagged tensor",
        "Its class computes below autograd, so what runs again leads nowhere: it is refused (docs/limits.md).",
        ends=lambda ours, eager: "hides its gradient from PyTorch's autograd" in str(ours),
    ),
    Deviation(
        "gradients of gradients through what cannot run again",
        "They need a hook or a custom function once more, and it has side effects, takes what may change, or has written to an "
        "argument: it is refused (docs/limits.md).",
        ends=lambda ours, eager: "gradients of gradients (create_graph=True) need a custom" in str(ours),
    ),
    Deviation(
        "when a generator dies that a function of a version holds",
        "A version knows the functions that it was captured with by identity, and keeps them and what their variables hold: a "
        "generator's `finally` runs when the version goes. Equal once that does nothing.",
        lambda found, text, examine: equal_if(
            found, text, examine, r"(finally:\n +)LOG\.append\('done'\)", r"\1pass", ("value",)
        ),
    ),
    Deviation(
        "a second backward of what saves nothing",
        "Eager refuses one only where an operator has saved a tensor, with the gradients added that come before it; ours always, "
        "before any.",
        ends=lambda ours, eager: (
            (eager is None or "backward through the graph a second time" in str(eager))
            and "backward through the graph a second time" in str(ours)
            and IN_BACKWARD in getattr(ours, "__notes__", ())
        ),
    ),
    Deviation(
        "memory that nothing has written to",
        "`torch.Tensor(3)`, which `type(a)(3)` is where `a` is a tensor, holds whatever lay there.",
        lambda found, text, examine: equal_if(found, WRITTEN + text, examine, r"\btype\((\w+)\)\(", r"written(\1)("),
    ),
    Deviation(
        "products with a tensor that has no memory",
        "Of a tensor on the CPU and one on meta, `linear` gives memory that nothing has written to. Equal on the CPU.",
        lambda found, text, examine: equal_if(found, text, examine, r"default_device\('meta'\)", "default_device('cpu')"),
    ),
    Deviation(
        "a backward whose code looks up something else by then",
        "It needs the forward once more, and that computes something else, too, or cannot run again: it is refused.",
        ends=lambda ours, eager: (
            IN_BACKWARD in getattr(ours, "__notes__", ())
            and any(said in str(ours) for said in ("something else now", "cannot be repeated eagerly"))
        ),
    ),
    Deviation(
        "a backward of parameters that have another dtype by then",
        "`Module.to` replaces a parameter's data. Eager's operators refuse another dtype of what they have saved. Ours keeps "
        "other tensors, and is one node: it may compute, complain otherwise, or complain before any gradient has arrived.",
        ends=lambda ours, eager: any(
            IN_BACKWARD in getattr(error, "__notes__", ()) and OF_DTYPES.search(str(error)) is not None
            for error in (ours, eager)
        ),
    ),
    Deviation(
        "gradients of a write to an expanded result",
        "Eager's is a view of what the call has made, and its backward refuses to write to it; ours is a tensor of its own.",
        ends=lambda ours, eager: (
            ours is None
            and "more than one element of the written-to tensor" in str(eager)
            and IN_BACKWARD in getattr(eager, "__notes__", ())
        ),
    ),
    Deviation(
        "gradients of a triangle that is cut out of what shares elements",
        "`triu_` and `tril_` of an unfolded tensor give one place both a zero and itself: which gradient it has goes by the "
        "order of eager's copy. Equal once no elements share a place.",
        lambda found, text, examine: (
            ".grad" in found.where
            and bool(re.search(r"\.tri[ul]_\(", text))
            and equal_if(found, text, examine, r"(\.unfold\([^()]*\))", r"\1.clone()")
        ),
    ),
    Deviation(
        "the node that PyTorch blames for a gradient of a wrong shape",
        "The backward of a compiled function is one node, and its error names that node; the error is eager's otherwise. Where "
        "that node runs the forward once more, for a parameter whose data has another shape by then, the error is of its result.",
        ends=lambda ours, eager: (
            type(ours) is type(eager)
            and "returned an invalid gradient at index" in str(eager)
            and any(said in str(ours) for said in ("returned an invalid gradient at index", "Mismatch in shape: grad_output"))
        ),
    ),
    Deviation(
        "what was rounded before it became a double",
        "A float that is turned into a double keeps its rounding; equal once nothing is turned into a double.",
        lambda found, text, examine: (
            found.kind == "number"
            and (other := re.sub(r"\b(torch\.float|f)64\b", r"\g<1>32", text).replace(".double()", ".float()")) != text
            and examine(other) is None
        ),
    ),
    Deviation(
        "what autocast has cached",
        "Eager's cache of casts is not emptied where autocast's dtype or a leaf changes, so it meets casts of the other dtype, "
        "for which the operator raises, or of what the leaf held; ours casts it anew. Equal once the cache is emptied in each "
        "step and where the dtype changes.",
        lambda found, text, examine: "torch.set_autocast_" in text and examine(casts_anew(text)) is None,
    ),
    Deviation(
        "the node in the text of a tensor",
        "The backward of a compiled function is one node, and the text of a tensor names that.",
        lambda found, text, examine: (
            "grad_fn=<" in found.eager and NODE.sub("", found.ours) == NODE.sub("", found.eager)
        ),
    ),
    Deviation(
        "how a search goes on",
        "LBFGS asks again, and goes as far, as losses and gradients say that it has asked for before: differences of losses "
        "that are near each other, gradients that are zero but for rounding. Equal with an optimizer that asks as often "
        "but decides nothing.",
        lambda found, text, examine: (
            (changed := re.sub(r"torch\.optim\.LBFGS\([^()]*\)", "Asking(ps, lr=0.125)", text)) != text
            and examine(WITHOUT_SEARCH + changed) is None
        ),
    ),
    Deviation(
        "the type of a compiled part",
        "`type()` of a compiled module is a class of its own, as torch.compile's is; `isinstance` and `__class__` say the "
        "original's. Equal once that is asked.",
        lambda found, text, examine: (
            "compiled(" in text
            and equal_if(found, text, examine, r"\btype\((\w+)\) is (nn\.\w+)", r"\1.__class__ is \2", OF_ANOTHER_TYPE)
        ),
    ),
    Deviation(
        "what only the frame of a traceback holds",
        "The rest of a function behind a graph break runs in a frame of its own, which is in the traceback of an error that "
        "is raised there, not of one that was raised before or is raised again: what its variables hold goes when it ends.",
        goes_with_a_frame,
    ),
    Deviation(
        "the order of a set of what is hashed by its address",
        "Two runs of eager differ too, though not always.",
        hashed_by_address,
    ),
    Deviation(
        "the name in an AttributeError that leaves a property",
        "From CPython 3.12 on a read that was specialised for a property does not write it, and when a read is specialised goes "
        "by how often the code ran: two runs of eager differ too.",
        left_a_property,
    ),
    Deviation(
        "a generator on the stack at a graph break",
        "What an expression holds while a later part of it breaks the graph becomes an argument of the function that goes on "
        "behind the break, and the callers of that hold it until it returns: a generator in it is closed at the end.",
        held_across_a_break,
    ),
    Deviation(
        "fused optimizers of gradients that are laid out otherwise than their parameters",
        "Eager's kernels for a CPU go through both memories alike, so that each element meets the gradient, or the state, of "
        "another one. Equal once the optimizer is not fused.",
        lambda found, text, examine: (
            bool(re.search(r"channels_last|transpose\(|\.t\(|permute\(", text))
            and equal_if(found, text, examine, r"fused=True", "fused=False")
        ),
    ),
    Deviation(
        "a parameter that is twice in a group, on a GPU",
        "Eager's kernel for a list writes to all of its tensors at the same time, so that one of two writes may be lost. Equal "
        "where the optimizer has no such kernel.",
        lambda found, text, examine: (
            "['params'][0] = p" in text
            and equal_if(
                found, text, examine, r"torch\.optim\.\w+\(ps.*\)$",
                lambda line: re.sub(r", (foreach|fused)=\w+|\)$", "", line[0]) + ", foreach=False)",
            )
        ),
    ),
    Deviation(
        "integers divided by 0, on a GPU",
        "What eager gives is not defined there (docs/limits.md). Equal where no divisor is 0.",
        lambda found, text, examine: equal_if(
            found, text, examine, r"(remainder|floor_divide)\((\w+), (\w+)\)", r"\1(\2, (lambda a: a + (a == 0))(\3))", ("number", "value"),
        ),
    ),
    Deviation(
        "gradients of average pools of channels_last, on a GPU",
        "Eager's are wrong where windows overlap or reach over the border (docs/limits.md). Equal once eager pools plain tensors.",
        lambda found, text, examine: equal_if(
            found, OF_PLAIN + text, examine, r"((?:F|nn|torch)\.(?:avg_pool2d|AvgPool2d))\(", r"of_plain(\1)(", ("number", "value")
        ),
    ),
    Deviation(
        "topk of a number, on a GPU",
        "Eager's result for none of it is a number: what was in memory. Equal over one dimension.",
        lambda found, text, examine: equal_if(found, text, examine, r"(\w+)\.topk\(0\)", r"\1.reshape(-1).topk(0)"),
    ),
    Deviation(
        "checkpoints of what changes before the backward",
        "Eager runs it again as it is then, without a hook that has been removed, with a parameter that was none of a "
        "functional call's (docs/guarantees.md). Equal without the checkpoint.",
        lambda found, text, examine: (
            bool(re.search(CHANGES, text))
            and equal_if(
                found, ONCE + text, examine, r"\bcheckpoint(_sequential)?\(", "once(", ("number", "value", "class")
            )
        ),
    ),
    Deviation(
        "gradients of batch norms of one image",
        "Eager's kernel for a CPU mixes up elements where something is laid out with its channels last but for the step of a "
        "dimension of one element (docs/guarantees.md). Equal once eager's has that step, too.",
        lambda found, text, examine: equal_if(
            found, WITH_ALL_STEPS + text, examine, r"\b((nn|F)\.(Batch|Instance|batch_|instance_)[Nn]orm\w*)", r"with_all_steps(\1)"
        ),
    ),
    Deviation(
        "multi_margin_loss of no samples",
        "Eager's mean over them is what was in memory. Equal with another loss.",
        lambda found, text, examine: (
            bool(re.search(r"made\(\(0,", text)) and equal_if(found, text, examine, "multi_margin_loss", "cross_entropy")
        ),
    ),
    Deviation(
        "`torch.autograd.grad` through a reentrant checkpoint",
        "Eager's refuses it, or finds no way to the parameters inside; ours has their gradients (docs/limits.md). Equal once the "
        "checkpoint is not reentrant.",
        lambda found, text, examine: (
            bool(re.search(r"autograd\.grad\(|backward\(.*inputs=", text))
            and equal_if(found, text, examine, "use_reentrant=True", "use_reentrant=False", ("class", "number", "exception"))
        ),
    ),
    Deviation("warnings of operators", "They come when a program is captured, not at each call."),
)
