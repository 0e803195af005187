# For users: `make demo` and `make test`. For contributors, before every commit: `make check`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := HYPER_PARALLEL_PLATFORM=torch $(BIN)/python
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help install native demo test test-long test-gpu test-mindspore test-machines test-without-native test-versions coverage docs format clean
.PHONY: check check-style check-types check-tests check-docs check-packages

help:
	@echo "make demo       train a small language model four ways under a memory budget, and write a report"
	@echo "make test       every test this machine can run, on torch and on MindSpore"
	@echo "make test-long  what would push 'make test' past 45 minutes"
	@echo "make test-mindspore  the tests on MindSpore alone, in an environment of their own"
	@echo "make test-gpu   the GPU suite; needs a CUDA device"
	@echo "make test-without-native  the engine's suites with the native recorder switched off; a part of 'make test'"
	@echo "make test-machines  the suites that compare numbers, with other kernels and threads"
	@echo "make test-versions  the engine's suites on every tested torch release; downloads gigabytes"
	@echo "make check      format, lint, types, import rules, docs without warnings, unit tests; under a minute"
	@echo "make coverage   which lines of the engine and the planner the unit tests run"
	@echo "make docs       the documentation, into site/index.html"

# torch first and alone: with a plain or ranged requirement pip would fetch gigabytes of CUDA packages.
$(VENV)/.installed: requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet torch==2.13.0
	$(PIP) install --quiet -r requirements/dev.txt
	$(PIP) install --quiet --no-build-isolation --no-deps -e .
	touch $@

install: $(VENV)/.installed

demo: install
	$(RUN) -m hyper_parallel.cli demo -o build/demo

# Built here, so that no test has to wait for it. Without a compiler everything works: the reason is said, and this succeeds.
native: install
	-@$(RUN) -c 'from hyper_parallel.backends.torch import native; native.load() or print("no native recorder:", native.why_not())' >&2

# One thread per op: the tests' tensors are tiny, and a second thread would only spin.
# A failure in one part does not keep the others from running; the target fails at the end.
test: install native .venv-mindspore/.installed
	@failed=0; \
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests -q -n 2 --dist loadfile --ignore=tests/gpu --ignore=tests/on_mindspore -m "not long" || failed=1; \
	$(MAKE) --no-print-directory test-without-native || failed=1; \
	$(MAKE) --no-print-directory test-mindspore || failed=1; \
	if [ $$failed = 1 ]; then echo "make test: a part failed (see above)" >&2; fi; exit $$failed

test-long: install
	$(RUN) -m pytest tests -q -m long --ignore=tests/gpu --ignore=tests/on_mindspore

test-gpu:
	HYPER_PARALLEL_PLATFORM=torch python3 -m pytest tests/gpu -q -m gpu -p no:cacheprovider -p no:xdist

# MindSpore's wheel is built against numpy 1, so it has an environment of its own. Nothing is skipped when it cannot be had.
MS := .venv-mindspore/bin/python
MS_PIP := $(MS) -m pip --disable-pip-version-check install --quiet

.venv-mindspore/.installed: requirements/mindspore.txt pyproject.toml
	$(PYTHON) -m venv .venv-mindspore
	$(MS_PIP) torch==2.13.0
	$(MS_PIP) -r requirements/mindspore.txt || { echo "make: cannot install MindSpore, whose tests are a part of 'make test';\
	 because pip failed (see above): there are wheels for CPython 3.10 to 3.12 on Linux, of about 800 MB;\
	 choose such a python with 'make test PYTHON=python3.11'." >&2; exit 1; }
	$(MS_PIP) --no-build-isolation --no-deps -e .
	$(MS) -c "import mindspore, numpy; assert numpy.__version__ < '2', numpy.__version__"
	touch $@

# Two processes: the contract suite starts worlds of its own, and its checks must not share ports and time with others.
test-mindspore: .venv-mindspore/.installed
	@failed=0; \
	OMP_NUM_THREADS=1 HYPER_PARALLEL_PLATFORM=mindspore $(MS) -m pytest tests/on_mindspore -q -n 2 || failed=1; \
	OMP_NUM_THREADS=1 HYPER_PARALLEL_PLATFORM=mindspore $(MS) -m pytest tests/contract -q --platform mindspore || failed=1; \
	exit $$failed

# The engine's suites where every recomputed region runs Python again, as on a machine without a compiler.
test-without-native: install
	OMP_NUM_THREADS=1 HYPER_PARALLEL_NATIVE=0 $(RUN) -m pytest tests/integration/activation tests/fuzz -q -n 2 --dist loadfile -m "not long"

# The suites that compare numbers, under eight choices of kernels and threads: no verdict may depend on the processor.
test-machines: install
	PYTHON=$(BIN)/python scripts/test_machines.sh

# The engine's suites on the other torch releases of the list in hyper_parallel/_version.py; some gigabytes each, so not in 'make test'.
test-versions:
	PYTHON=$(PYTHON) scripts/test_versions.sh

# The framework-free packages alone, by the unit tests alone: what those miss is left to slower tests. Settings: pyproject.toml.
coverage: install
	OMP_NUM_THREADS=1 $(RUN) -m coverage run -m pytest tests/unit -q -p no:xdist -m "not long"
	$(BIN)/python -m coverage report

# Two parts at a time: the type check and the tests take longest, and each uses one core. All parts run, also after a failure.
# The gate has the unit tests that answer in seconds; `make test` has all tests, these included.
check: install
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target \
		check-types check-style check-tests check-docs check-packages

check-style: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

check-types: install
	$(BIN)/mypy

check-tests: install
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/unit tests/architecture -q -m "not long and not slow"

check-docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check-packages: install
	$(BIN)/python scripts/audit.py

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-mindspore .venv-torch-* build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
