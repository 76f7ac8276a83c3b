# make train    a fresh machine: installs, prepares Shakespeare, trains, prints a sample
# make test     a fresh machine: installs the test extras, runs the suite
# make quick    the same without the slow tests: about a minute on 2 cores
# make lint     ruff and mypy
# Settings for training go into ARGS:  make train ARGS="steps=100 seed=1"

VENV := .venv
BIN := $(VENV)/bin
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c "$(SUPPORTED)" 2>/dev/null && echo $$p && break; done)

.PHONY: train test quick lint clean

train: $(VENV)/train.stamp
	$(BIN)/python train.py $(ARGS)

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(ARGS)

quick: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) inkling_lm.egg-info

# Runs once, and again if the dependencies have changed. requirements.lock pins every version.
$(VENV)/train.stamp: requirements.lock pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat -c requirements.lock -e .
	touch $@

$(VENV)/test.stamp: requirements.lock pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat -c requirements.lock -e ".[test]"
	touch $@ $(VENV)/train.stamp

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11, 3.12 or 3.13 found: install one, or make PYTHON=PATH" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
