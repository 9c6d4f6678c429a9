"""`make demo`: compiles a small BERT and a ResNet, checks them against eager, and prints the comparison with torch.compile."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.compare import first_calls, steady_states, table


def main() -> None:
    engines = ["fusewright", "torch.compile"]
    rows = []
    for model in ("bert", "resnet50"):
        with tempfile.TemporaryDirectory() as caches:
            first = []
            for engine in engines:
                print(f"measuring the first call of {model} with {engine} ...", flush=True)
                first.append(first_calls(model, "float32", engine, Path(caches), warm=False))
            print(f"measuring {model} with both and eager in turn ...", flush=True)
            steady = steady_states(model, "float32", engines, Path(caches), 4.0)
            rows += [a | b for a, b in zip(first, steady, strict=True)]
    print()
    print(table(rows))
    wrong = [row for row in rows if "error" in row or (row["engine"] == "fusewright" and row["relative_error"] > 1e-5)]
    if wrong:
        raise SystemExit(f"wrong or failed: {wrong}")
    print("\nfusewright's outputs equal eager's within 1e-5.")


if __name__ == "__main__":
    main()
