"""One compiled version for several cases: `serve` (serve.py) is the way in, `remembered` what a compile leaves it."""
