"""Builds the one extension module, fusewright._native, from csrc/*.c and csrc/*.cpp (CPython API only: no PyTorch headers)."""

import compileall
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    sys.exit(f"fusewright's native part is built for Python 3.11 to 3.14; this is {sys.version.split()[0]}")


class BuildNative(build_ext):
    """Compiles C and C++ files of one extension with the flags of each language, and, where the package is used in place, Python's
    bytecode, as an ordinary installation does. (Where PYTHONDONTWRITEBYTECODE is set, each start would compile the sources: 0.4 s.)"""

    def run(self) -> None:
        super().run()
        if self.inplace or getattr(self, "editable_mode", False):
            compileall.compile_dir("src/fusewright", quiet=1)

    def build_extension(self, ext: Extension) -> None:
        compile_one = self.compiler._compile

        def compile_with_standard(obj, src, ext_name, cc_args, extra, pp_opts):
            standard = ["-std=c++17"] if src.endswith(".cpp") else ["-std=c11"]
            compile_one(obj, src, ext_name, cc_args, [*extra, *standard], pp_opts)

        self.compiler._compile = compile_with_standard
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "fusewright._native",
            sources=sorted(glob("csrc/*.c") + glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.h")),
            extra_compile_args=[
                "-O2",
                "-g0",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                "-Wno-unused-parameter",
                "-Wno-missing-field-initializers",
                "-Wno-cast-function-type",
            ],
            libraries=["dl"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
