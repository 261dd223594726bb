# Everything runs in a virtual environment that these targets make: .venv
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOT ?= data
# Tests run beside one another, but for those that start a Ray cluster.
BESIDE := -n logical --maxprocesses 8

.PHONY: run test check quick slow bench soak clean

# Installs the package with what its tests need; repeated when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

run: $(VENV)/.installed  ## the main job on a local log with an embedded Ray
	$(BIN)/python jobs/io_prediction.py --root $(ROOT)

check: $(VENV)/.installed  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

quick: $(VENV)/.installed
	$(BIN)/python -m pytest -q $(BESIDE) -m "not slow and not soak"

slow: $(VENV)/.installed
	$(BIN)/python -m pytest -q $(BESIDE) -m "slow and not ray and not soak"
	$(BIN)/python -m pytest -q -m "ray and not soak"

test: check quick slow  ## all of it: quick tests first

soak: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m soak

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test,bench]"
	touch $@

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.append
	$(BIN)/python -m benchmarks.reads
	$(BIN)/python -m benchmarks.merge
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.cluster

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
