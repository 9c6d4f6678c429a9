"""Where PyTorch's libraries are sought, and what is left where they are not found."""

from __future__ import annotations

import subprocess
import sys

from fusewright.base.libraries import library_path

ELSEWHERE = """
import sys, torch
sys.platform = "darwin"  # its libraries have other names, which are not in this folder
import fusewright
from fusewright.base.libraries import library_path

assert library_path("c10").name == "libc10.dylib"
net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
compiled = fusewright.compile(net, backend="aot_eager")
for rows in (2, 5, 1):
    x = torch.randn(rows, 4)
    torch.testing.assert_close(compiled(x), net(x))
with torch.no_grad(), torch.autocast("cpu"):
    assert compiled(x).dtype == net(x).dtype
try:
    fusewright.compile(net)
except fusewright.FusewrightError as error:
    print(error)
"""


def test_where_they_are() -> None:
    assert all(library_path(name).exists() for name in ("c10", "torch_cpu", "torch_python"))


def test_without_them_guards_ask_python_and_the_native_backend_says_what_it_lacks() -> None:
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "libtorch_cpu.dylib" in done.stdout and "another backend" in done.stdout
