"""`make demo`: compiles a small BERT and a ResNet, checks them against eager, and prints the comparison with torch.compile."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.compare import measure, table


def main() -> None:
    rows = []
    for model in ("bert", "resnet50"):
        for engine in ("fusewright", "torch.compile"):
            print(f"measuring {model} with {engine} ...", flush=True)
            with tempfile.TemporaryDirectory() as caches:
                rows.append(measure(model, engine, "float32", 4.0, caches))
    print()
    print(table(rows))
    wrong = [row for row in rows if "error" in row or (row["engine"] == "fusewright" and row["relative_error"] > 1e-5)]
    if wrong:
        raise SystemExit(f"wrong or failed: {wrong}")
    print("\nfusewright's outputs equal eager's within 1e-5.")


if __name__ == "__main__":
    main()
