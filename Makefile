# make demo   set up .venv, compile real models, print the comparison
# make test   the tests (slow sweeps are behind the marker `sweep`)
# make bench  benchmarks/compare.py over all models (long)
# make lint   ruff, mypy, import-linter

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Exactly this torch: an unpinned one brings gigabytes of CUDA along.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0

.PHONY: demo test bench lint setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml setup.py $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[dev]"
	# The generator of GPU kernels is tested under Triton's interpreter; without Triton those tests are left out.
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TRITON)
	touch $@

demo: setup
	$(BIN)/python benchmarks/demo.py

test: setup
	$(BIN)/python -m pytest

bench: setup
	$(BIN)/python benchmarks/compare.py

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info src/fusewright/*.so
