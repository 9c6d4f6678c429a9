"""`python -m benchmarks.libraries`: see running.py."""

from benchmarks.libraries.running import main

if __name__ == "__main__":
    main()
