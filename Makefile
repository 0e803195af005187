# Two commands for people: `make demo` and `make test`. One for the house: `make check`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := HYPER_PARALLEL_PLATFORM=torch $(BIN)/python
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help install demo test test-long test-gpu test-mindspore check format clean

help:
	@echo "make demo       train a small transformer with none / recompute / swap and compare"
	@echo "make test       every test this machine can run"
	@echo "make test-long  what would push 'make test' past 45 minutes"
	@echo "make test-mindspore  the contract suite on MindSpore, in an environment of its own"
	@echo "make test-gpu   the GPU suite; needs a CUDA device"
	@echo "make check      format, lint, types, import rules, unit tests"

# torch first and alone: with a plain or ranged requirement pip would fetch gigabytes of CUDA packages.
$(VENV)/.installed: requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet torch==2.13.0
	$(PIP) install --quiet -r requirements/dev.txt
	$(PIP) install --quiet --no-build-isolation --no-deps -e .
	touch $@

install: $(VENV)/.installed

demo: install
	$(RUN) -m examples.compare

# One thread per op: the tests' tensors are tiny, and a second thread would only spin.
test: install
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests -q -n 2 --dist loadfile --ignore=tests/gpu -m "not long"

test-long: install
	$(RUN) -m pytest tests -q -m long --ignore=tests/gpu

test-gpu:
	HYPER_PARALLEL_PLATFORM=torch python3 -m pytest tests/gpu -q -m gpu -p no:cacheprovider -p no:xdist

# MindSpore's wheel is built against numpy 1, so it has an environment of its own.
.venv-mindspore/.installed: requirements/mindspore.txt pyproject.toml
	$(PYTHON) -m venv .venv-mindspore
	.venv-mindspore/bin/python -m pip --disable-pip-version-check install --quiet torch==2.13.0
	.venv-mindspore/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/mindspore.txt
	.venv-mindspore/bin/python -m pip --disable-pip-version-check install --quiet --no-build-isolation --no-deps -e .
	touch $@

test-mindspore: .venv-mindspore/.installed
	HYPER_PARALLEL_PLATFORM=mindspore .venv-mindspore/bin/python -m pytest tests/contract -q --platform mindspore

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/audit.py
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/unit tests/architecture -q -m "not long"

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-mindspore build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
