"""Every way in which a compiled program may differ from the eager one, by name, with the reason.

A row says which differences it covers, and after which errors (ours, eager's) no more is compared. Rows
that do neither are of programs that the generators do not write.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fusewright.base.records import dataclass
from tests.fuzz.compare import Difference

Examine = Callable[[str], object]


def never(found: Difference, text: str, examine: Examine) -> bool:
    return False


def unused(found: Difference, text: str, examine: Examine) -> bool:
    """Whether the same error comes once every value is returned, and more than the shape of what a module gives."""
    if found.kind != "exception" and not found.where.startswith("exception"):
        return False
    if (whole := text.replace("(x).shape", "(x)")) != text and examine(whole) is None:
        return True
    body = ("\n" + text).partition("\ndef program")[2].partition("\ndef ")[0]
    names = re.findall(r"^    (?:with [^:]*: )?(v\d+) = ", body, re.MULTILINE)
    if not names:
        return False
    other = re.sub(r"^    return .*$", f"    return {', '.join(names)},", body, count=1, flags=re.MULTILINE)
    if "    return " not in body:
        other = body.rstrip() + f"\n    return {', '.join(names)},\n"
    return other != body and examine(text.replace(body, other)) is None


def away_from_infinity(found: Difference, text: str, examine: Examine) -> bool:
    """Whether the results are equal once no infinity goes into gelu."""
    other = re.sub(r"\bgelu\((\w+)", r"gelu(\1.nan_to_num(0.0, 9.0, -9.0)", text)
    return found.kind == "number" and other != text and examine(other) is None


BENT = re.compile(r"\b(hardtanh|relu6|hardswish|elu|celu|selu|hardshrink|softshrink)\((\w+)")


def away_from_nan(found: Difference, text: str, examine: Examine) -> bool:
    """Whether the gradients are equal once no NaN goes into functions that bend."""
    other = BENT.sub(r"\1(\2.nan_to_num()", text)
    return found.kind == "number" and found.where.endswith(".grad") and other != text and examine(other) is None


def away_from_zero(found: Difference, text: str, examine: Examine) -> bool:
    """Whether the results are equal once the normalised numbers, and so what divides by them, are far from 0."""
    other = re.sub(r"= (F\.(?:instance|layer|group|batch|rms)_norm\(.*\))$", r"= \1 + 9", text, flags=re.MULTILINE)
    return found.kind == "number" and other != text and examine(other) is None


@dataclass(frozen=True, slots=True)
class Deviation:
    name: str
    reason: str
    covers: Callable[[Difference, str, Examine], bool] = never
    ends: Callable[[Exception | None, Exception | None], bool] = lambda ours, eager: False


DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        "errors of values that nobody uses",
        "An operator whose result nobody uses is not run, so it raises nothing either (an index out of bounds).",
        unused,
    ),
    Deviation(
        "gradients of what `.data` has changed",
        "Eager's gradient uses the changed values of a saved tensor, which is wrong for the result that was computed.",
        lambda found, text, examine: (
            found.kind == "number" and ".grad" in found.where and ".data" in text and "backward(KEPT.pop" in text
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
        away_from_nan,
    ),
    Deviation(
        "gelu of infinity",
        "Eager's kernel for float32 and halves gives NaN, the one for doubles infinity; ours gives infinity in each.",
        away_from_infinity,
    ),
    Deviation(
        "gradients of a product of elements that are not finite",
        "Eager divides the product by each element; ours multiplies the others, which is the gradient.",
        lambda found, text, examine: (
            found.kind == "number" and found.where.endswith(".grad") and ".prod(" in text and "special=True" in text
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
        "quotients by a normalised zero",
        "Of equal numbers a normalisation leaves 0 or the rounding of their mean, and a quotient by it is anything.",
        away_from_zero,
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
        "Their copies have eager's gaps where the step is known; where it varies they are dense, since what the graph knows "
        "of it does not show that elements lie apart.",
        lambda found, text, examine: (
            found.kind == "strides" and bool(re.search(r"(select|slice|diagonal)_scatter\(", text))
        ),
    ),
    Deviation(
        "what the backward needs was written to",
        "Other tensors are kept for the backward than by eager, so a write in between may be refused, or not, otherwise.",
        ends=lambda ours, eager: (
            "needed for gradient computation has been modified" in f"{ours}{eager}"
            and "before gradients of its gradients" not in str(ours)
        ),
    ),
    Deviation(
        "the node that PyTorch blames for a gradient of a wrong shape",
        "The backward of a compiled function is one node, and its error names that node; the error is eager's otherwise.",
        ends=lambda ours, eager: (
            type(ours) is type(eager)
            and all("returned an invalid gradient at index" in str(error) for error in (ours, eager))
        ),
    ),
    Deviation(
        "what was rounded before it became a double",
        "A float that is turned into a double keeps its rounding; equal once nothing is turned into a double.",
        lambda found, text, examine: (
            found.kind == "number"
            and (other := re.sub(r"\bf64\b", "f32", text).replace(".double()", ".float()")) != text
            and examine(other) is None
        ),
    ),
    Deviation(
        "what autocast has cached under another dtype",
        "Eager's cache of casts is not emptied where autocast's dtype changes, so a leaf meets casts of the other dtype and "
        "the operator raises; ours casts it anew. Equal once the cache is emptied there.",
        lambda found, text, examine: (
            "autocast_dtype('cpu'" in text
            and examine(re.sub(r"(set_autocast_dtype\('cpu', [\w.]+\))", r"\1; torch.clear_autocast_cache()", text)) is None
        ),
    ),
    Deviation("warnings of operators", "They come when a program is captured, not at each call."),
)
