# make demo   set up .venv, compile real models, print the comparison
# make test   the tests (slow sweeps are behind the marker `sweep`)
# make bench  benchmarks/compare.py over all models (long)
# make lint   ruff, mypy, import-linter
# make docs   the site in build/site (links are checked; nothing is loaded from the network)
# make sanitize  the native part with AddressSanitizer and UBSan (SANITIZE=thread: ThreadSanitizer), under its own tests
# make dist   sdist and wheel in dist/, checked

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# PyTorch for the CPU. On Linux PyPI's torch brings gigabytes of CUDA along, so it comes from PyTorch's own index and is
# named exactly (+cpu), unless pip is set up for another index. On a GPU machine: make setup TORCH=torch==2.13.0 TORCH_INDEX=
MIRROR := $(shell $(PYTHON) -m pip config list 2>/dev/null | grep -q -E 'index-url|find-links' && echo set)
ifeq ($(shell uname -s)$(MIRROR),Linux)
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
else
TORCH ?= torch==2.13.0
endif
TRITON ?= triton==3.6.0

.PHONY: demo test bench lint sanitize docs dist setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml setup.py $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH) "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[dev]"
	# The generator of GPU kernels is tested under Triton's interpreter; without Triton those tests are left out.
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TRITON)
	touch $@

demo: setup
	$(BIN)/python benchmarks/demo.py

# A process that ends stops the run, which names the test. Where it is replaced instead, the run has waited for ever at its end.
test: setup
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

bench: setup
	$(BIN)/python benchmarks/compare.py

lint: setup
	$(BIN)/ruff check src tests benchmarks docs examples
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

SANITIZE ?= address,undefined
SANITIZED := build/sanitize
# Python itself is not built with the sanitizer, so its library is loaded first; what Python leaves allocated is no leak.
SANITIZER := $(if $(findstring thread,$(SANITIZE)),tsan,asan)

sanitize: setup
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src/fusewright $(SANITIZED)/
	CFLAGS="-fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer -g1" LDFLAGS="-fsanitize=$(SANITIZE)" \
		$(BIN)/python setup.py -q build_ext --force --build-lib $(SANITIZED) --build-temp $(SANITIZED)-objects
	LD_PRELOAD="$$(gcc -print-file-name=lib$(SANITIZER).so) $$(gcc -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 TSAN_OPTIONS="allocator_may_return_null=1 suppressions=$(CURDIR)/tests/native/thread_sanitizer.txt die_after_fork=0" FUSEWRIGHT_CACHE=0 PYTHONPATH=$(abspath $(SANITIZED)):$(CURDIR) \
		$(BIN)/python -m pytest -p no:cacheprovider -o pythonpath=$(SANITIZED) \
		$(or $(TESTS),tests/native tests/runtime tests/test_threads.py tests/fuzz)

dist: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info src/fusewright/*.so
