"""The catalogue of graph breaks: code → (cause, what the user can do). The codes are raised in `capture` and
`graph`."""

from __future__ import annotations

_MOVE_OUT = "move it out of the compiled function, or leave it: the code around it is still compiled"

BREAKS: dict[str, tuple[str, str]] = {
    # values of tensors that Python would need
    "data-dependent-branch": (
        "a branch depends on the values in a tensor",
        "use torch.where (both results computed) or torch.cond (one of them), or decide before the compiled region",
    ),
    "data-dependent-scalar": (
        "a tensor's value is read into Python",
        "keep it a tensor; for a choice use torch.where or torch.cond; "
        "options={'capture_scalar_outputs': True} records item() and tolist(); or move the read out of the compiled "
        "function",
    ),
    "data-dependent-shape": (
        "the shape of a result depends on the values in a tensor",
        "use options={'capture_dynamic_output_shape_ops': True}, or a form with a fixed shape (a mask and torch.where "
        "instead of boolean indexing or nonzero)",
    ),
    "data-dependent-gradient": (
        "a gradient is wanted through a size or a number that depends on the values in a tensor",
        "use torch.no_grad() where none is needed, or a form with a fixed shape; under fullgraph=True PyTorch's "
        "operators run the whole graph",
    ),
    "print-tensor": (
        "a tensor is printed or formatted",
        "print its shape or dtype instead, or move the print out of the compiled function",
    ),
    "tensor-address": ("the memory of a tensor is asked for (data_ptr, numpy, storage)", _MOVE_OUT),
    "tensor-attribute": ("an attribute of a tensor that a traced tensor cannot answer or set", _MOVE_OUT),
    "tensor-construction": (
        "a tensor or Parameter is constructed in a way that is not traced",
        "make it before the compiled function, or with torch.tensor / torch.empty",
    ),
    "unsupported-tensor": (
        "a kind of tensor that is not traced (sparse, quantised, nested, a subclass, ...)",
        "convert it to a plain dense tensor first",
    ),
    "inplace-metadata": (
        "an in-place operator changes a tensor's shape or storage",
        "use the operator without the underscore and assign its result",
    ),
    "overlapping-inputs": (
        "arguments that share memory are written to",
        "pass tensors that do not overlap, or clone one of them",
    ),
    "no-pure-form": (
        "tensors are written to in a way that has no pure equivalent",
        "write to fresh tensors instead of views, or use out-of-place operators",
    ),
    # calls
    "untraceable-call": (
        "a call that cannot be traced",
        "wrap it with torch.library.custom_op if it works on tensors; otherwise " + _MOVE_OUT,
    ),
    "cached-function": (
        "a function that keeps its results (functools.lru_cache) is called with a container, or keeps too few",
        "call the function that it wraps (f.__wrapped__), or drop the cache: a compiled function needs none",
    ),
    "disabled-function": ("a function marked with disable is called", "remove the marker if it should be compiled"),
    "explicit-graph-break": ("graph_break() was called", "remove the call"),
    "numpy-call": (
        "NumPy is used in a way that has no operator of exactly the same meaning",
        "use torch operators, or leave it: the code around it is still compiled",
    ),
    "torchscript": (
        "a TorchScript function or module is called",
        "pass the Python original instead of the scripted one",
    ),
    "higher-order-operator": ("a higher-order operator is called", _MOVE_OUT),
    "autograd-call": (
        "the autograd engine is called inside the compiled function",
        "call backward() and torch.autograd.grad outside of it",
    ),
    "operator-failed": (
        "an operator could not be traced",
        "if the program fails without the compiler too, the error is its own; otherwise " + _MOVE_OUT,
    ),
    "inline-depth": ("calls are nested too deeply", "turn deep recursion into a loop"),
    "autograd-function": (
        "a custom torch.autograd.Function is applied",
        "register it with torch.library.custom_op and register_autograd, or leave it: the code around it is compiled",
    ),
    "checkpoint": (
        "activation checkpointing is used inside",
        "compile the checkpointed block itself, or checkpoint around the compiled module",
    ),
    "functorch-transform": (
        "vmap, grad or jvp is called inside",
        "apply the transform outside of the compiled function, or batch by hand",
    ),
    "distributed-call": (
        "a collective that is no operator of the graph, or a module that communicates, is called",
        "nothing for DistributedDataParallel (the module inside is compiled by itself); else a collective that is an "
        "operator of the graph (docs/distributed.md), or a call between compiled functions",
    ),
    "clock": (
        "a clock is read in another way than by time.time, perf_counter, monotonic, process_time or thread_time, or "
        "what it shows decides what happens next",
        "read it by one of these, or read it before the call and pass it in: a break would cut what is timed in two",
    ),
    "random-state": (
        "a random generator of a GPU is seeded or given to an operator, or a seed is asked for",
        "do it before the call: a seed may be passed in, and torch.manual_seed and generators of the CPU may be used "
        "inside",
    ),
    "host-random": (
        "Python's or NumPy's random generator decides between more than 8 ways through the function, is seeded, or is "
        "a NumPy generator of the program's own",
        "draw before the call and pass what was drawn, or draw a tensor with torch.rand or torch.randint and choose "
        "with torch.where",
    ),
    "inference-mode": (
        "inference_mode is entered inside",
        "enter it around the compiled function, or use torch.no_grad inside",
    ),
    # Python objects
    "opaque-object": (
        "an object whose behaviour is unknown (a C extension, a file, a lock, a generator from outside) is used",
        _MOVE_OUT,
    ),
    "cannot-rebuild": (
        "an object made in the compiled function cannot be made again outside of it",
        "return or keep plain containers, dataclasses and tensors",
    ),
    "class-creation": (
        "a class is defined in a way that is not traced",
        "define the class outside of the compiled function",
    ),
    "class-mutation": ("an attribute of a class is changed", "change it outside of the compiled function"),
    "function-mutation": ("an attribute of a function is changed", "change it outside of the compiled function"),
    "container-with-slots": ("a container subclass with __slots__ is used", "use a plain container or a dataclass"),
    "set-of-objects": ("a set or dict is keyed by objects whose hash is Python code", "key it by strings or ints"),
    "loop-goes-on": (
        "a loop goes on behind a graph break in its body",
        "see the break in its body: each turn runs in the same compiled parts",
    ),
    "outside-iterator": (
        "an iterator made outside is advanced whose elements code makes (a generator, a map, a file), or many of them",
        "pass a list or tuple and iterate over it inside",
    ),
    "import": ("an import that runs code", "import at the top of the module"),
    "first-import": (
        "a called function imports what is not loaded yet: this call runs eagerly, the next one is compiled",
        "nothing: it happens once; or import at the top of the module",
    ),
    "open-context": (
        "a context manager is entered that cannot be left and entered again",
        "put the with-block outside of the compiled function",
    ),
    # whole frames
    "evaluator-replaced": (
        "a debugger or another compiler took over Python's frames during the capture",
        "nothing: the call is captured again the next time",
    ),
    "exception-escapes": (
        "the function raises an exception",
        "nothing: it runs eagerly, so that the exception and its traceback are genuine",
    ),
    "compile-time": (
        "the compile took longer than it may",
        "raise options={'compile_seconds': ...}, or compile smaller parts",
    ),
    "finalizer": (
        "an object is made whose class has a finalizer (__del__), or that a weak reference with a callback watches: it "
        "runs when the program lets go of the object",
        "make the object outside of the compiled function",
    ),
    "frame-access": ("a call reads or changes the frame that makes it (globals, eval, exec, sys._getframe)", _MOVE_OUT),
    "frame-kind": (
        "a generator, coroutine, class body or module is not compiled by itself",
        "compile the function that consumes it",
    ),
    "generator-abandoned": (
        "a generator is left suspended inside a try or with block",
        "exhaust it, or close it inside the compiled function",
    ),
    "instruction-budget": (
        "the function runs too many Python instructions",
        "turn Python loops into tensor operators, or raise options={'instruction_limit': ...}",
    ),
    "large-container": (
        "lists and other objects from outside hold more elements than can be looked at again at each call",
        "make a tensor or an array of the numbers, or pass what is needed of them",
    ),
    "no-attempts": ("capture was not allowed to try", "raise max_attempts"),
    "outside-exception": ("an exception made outside is raised or examined", _MOVE_OUT),
    "memory-short": (
        "the function, or its compile, asked for more memory than there was",
        "nothing: that call runs eagerly, and the next one is captured again",
    ),
    "recursion": ("Python's recursion limit was met", "turn deep recursion into a loop"),
    "size-out-of-range": ("a size is outside the range that it was marked with", "mark it with a range that holds it"),
    "uninitialised-parameter": (
        "a lazy module has not seen its first input",
        "nothing: that call runs eagerly and makes its parameters, and the next one is compiled",
    ),
    "unsupported-instruction": (
        "a bytecode instruction that is not interpreted",
        "rewrite the statement that the report names",
    ),
    "transform-active": (
        "the call is made inside vmap, grad, jvp, forward-mode differentiation, a tracer, a mode of the user or "
        "anomaly detection",
        "nothing: such calls run eagerly, so that the transform or mode sees every operator",
    ),
    "compile-cost": (
        "compiling the function's versions, and the parts behind its breaks, has cost more than they can have saved",
        "mend the break that is named, or leave the function out with fusewright.disable; "
        "options={'cost_limit': ...} allows more",
    ),
    "training-eager": (
        "gradients are wanted for this call, and the backend has no backward for the graph",
        "call it under torch.no_grad() or torch.inference_mode() for inference",
    ),
}

TRANSIENT_SKIPS = frozenset(
    {
        "evaluator-replaced",
        "exception-escapes",
        "first-import",
        "memory-short",
        "transform-active",
        "uninitialised-parameter",
    }
)
"""Reasons to run one call eagerly that say nothing about the next one."""
