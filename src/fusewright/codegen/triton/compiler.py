"""Machine code from kernel text: the program of a compiler process. It imports Triton and library.py, nothing of
fusewright or PyTorch.

Takes, on standard input, one job a line (JSON: text, symbol, signature, aligned, warps, stages, checks, scratch, arch,
whether the PTX is wanted too, and the path of the result); starts a child process for each, as many at a time as there
are processors; writes the result (machine code behind a line of JSON) to the path under another name first, and then
one line of JSON on standard output: {"path", "error", "lasting"}. Ends when its input ends.
Always holds: a file at a job's path is complete; a crash of Triton's is an answer with an error, never silence. An
error that is not lasting is of this moment.
"""

import collections
import hashlib
import importlib.util
import json
import linecache
import os
import selectors
import signal
import sys
import types
from pathlib import Path
from typing import IO, Any

MAGIC = b"fusewright-cubin-2\n"


def load_library() -> Any:
    """`fusewright.codegen.triton.library` without its packages, under the name that kernel texts import."""
    name = "fusewright.codegen.triton.library"
    specification = importlib.util.spec_from_file_location(name, Path(__file__).with_name("library.py"))
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    parents = ("fusewright", "fusewright.codegen", "fusewright.codegen.triton")
    for parent in parents:
        sys.modules.setdefault(parent, types.ModuleType(parent))
    sys.modules[name] = module
    specification.loader.exec_module(module)
    sys.modules[parents[-1]].library = module  # type: ignore[attr-defined]
    return module


def machine_code(job: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """(cubin, what a launch needs to know: shared memory, warps, symbol)."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    name = f"<{job['symbol']}>"
    text = job["text"]
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope: dict[str, Any] = {"__name__": job["symbol"]}
    exec(compile(text, name, "exec"), scope)
    function = scope[job["symbol"]]
    signature = dict(zip(function.arg_names, job["signature"], strict=True))
    source = ASTSource(function, signature, {}, {(k,): [["tt.divisibility", 16]] for k in job["aligned"]})
    target = GPUTarget("cuda", job["arch"], 32)
    backend = make_backend(target)
    # A product is rounded before the next operator adds to it (docs/decisions/round-products-before-sums.md). Kernels
    # of matrix products are left: in attention one instruction subtracts the maximum from scores that it scales.
    fuses = "tl.dot" in text
    options = backend.parse_options(
        {"num_warps": job["warps"], "num_stages": job["stages"], "debug": job["checks"], "sanitize_overflow": False}
        | {"enable_fp_fusion": fuses}
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata: dict[str, Any] = {"hash": job["symbol"], "target": target, **options.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    ptx = {}
    for stage, make in stages.items():
        module = make(module, metadata)
        if stage == "ptx" and job.get("ptx"):
            ptx["ptx"] = module
    if (metadata.get("global_scratch_size") or 0) > job["scratch"] or metadata.get("profile_scratch_size"):
        raise ValueError("the kernel needs more scratch memory of Triton's own than it is given")
    launch = {"name": metadata["name"], "shared": metadata["shared"], "warps": metadata["num_warps"]}
    return module, launch | ptx


def _work(job: dict[str, Any]) -> tuple[str, bool]:
    """Compiles into the job's path; (the error, whether it lasts), or nothing."""
    try:
        code, launch = machine_code(job)
        _write(Path(job["path"]), code, launch)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:3000]
        # The assembler is a process too, and memory may be short for it.
        short = f"failed with error code {-signal.SIGKILL}", "out of memory", "Memory allocation failure"
        return text, not (isinstance(error, (OSError, MemoryError)) or any(part in text for part in short))
    return "", False


def _write(path: Path, code: bytes, launch: dict[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    body = json.dumps(launch).encode() + b"\n" + code
    # Whoever reads it checks the hash (runtime/cache.py), which covers the name too, before a byte of it is used.
    temporary.write_bytes(MAGIC + hashlib.sha256(path.stem.encode() + b"\0" + body).hexdigest().encode() + b"\n" + body)
    temporary.replace(path)


def _answer(answers: IO[str], job: dict[str, Any], error: str, lasting: bool) -> None:
    answers.write(json.dumps({"path": job["path"], "error": error, "lasting": lasting}) + "\n")
    answers.flush()


def _child(job: dict[str, Any]) -> tuple[int, int]:
    """(process, the pipe on which it tells its error). It does nothing but this job."""
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if child:
        os.close(writer)
        return child, reader
    code = 1
    try:
        os.close(reader)
        error, lasting = _work(job)
        os.write(writer, (str(int(lasting)) + error).encode())
        code = 0
    finally:
        os._exit(code)


def serve(limit: int) -> None:
    """Answers jobs until standard input ends; at most `limit` at a time."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Triton and the assembler print is no answer
    load_library()
    waiting: collections.deque[dict[str, Any]] = collections.deque()
    running: dict[int, tuple[dict[str, Any], int]] = {}  # by pipe
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    text = b""
    open_ = True
    while open_ or waiting or running:
        while waiting and len(running) < limit:
            job = waiting.popleft()
            try:
                child, pipe = _child(job)
            except OSError as error:  # no process, or no pipe, to be had
                _answer(answers, job, str(error), lasting=False)
                continue
            running[pipe] = (job, child)
            selector.register(pipe, selectors.EVENT_READ)
        for key, _ in selector.select() if open_ or running else ():
            if key.fd == 0:
                data = os.read(0, 1 << 16)
                if not data:
                    open_ = False
                    selector.unregister(0)
                text += data
                *lines, text = text.split(b"\n")
                waiting.extend(json.loads(line) for line in lines)
                continue
            job, child = running.pop(key.fd)
            selector.unregister(key.fd)
            with os.fdopen(
                key.fd, "rb"
            ) as answer:  # a child writes once, at its end: what is left to read comes at once
                told = answer.read().decode(errors="replace")
            _, status = os.waitpid(child, 0)
            if told:
                _answer(answers, job, told[1:], lasting=told[0] == "1")
            else:  # who kills a process means no kernel; a crash is the kernel's
                by = os.waitstatus_to_exitcode(status)
                crashed = -by in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGFPE)
                _answer(answers, job, f"the compiler process ended with status {by}", crashed)


if __name__ == "__main__":
    serve(max(int(sys.argv[1]), 1))
