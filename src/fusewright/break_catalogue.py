"""The catalogue of graph breaks: code → (cause, what the user can do). The codes are raised in `capture` and `graph`."""

from __future__ import annotations

BREAKS: dict[str, tuple[str, str]] = {
    "data-dependent-branch": (
        "a branch depends on the values in a tensor",
        "use torch.where (both results computed) or torch.cond (one of them), or decide before the compiled region",
    ),
    "data-dependent-scalar": (
        "a tensor's value is read into Python",
        "keep it a tensor; for a choice use torch.where or torch.cond; move .item()/.tolist()/float() out of the compiled function",
    ),
    "data-dependent-shape": (
        "the shape of a result depends on the values in a tensor",
        "use a form with a fixed shape (a mask and torch.where instead of boolean indexing or nonzero)",
    ),
    "training-eager": (
        "gradients are wanted for this call, and the backend has no backward for the graph",
        "call it under torch.no_grad() or torch.inference_mode() for inference",
    ),
}
