# `make demo` runs the whole pipeline on this machine, `make test` the tests; both make `.venv` themselves.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo test test-all slow bench lint compile clean

demo: .venv/ready
	$(BIN)/kfp-gate demo

test: .venv/ready
	$(BIN)/pytest

test-all: .venv/ready
	$(BIN)/pytest -m 'not slow'

slow: .venv/ready
	$(BIN)/pytest -m slow

bench: .venv/bench
	for file in benchmarks/*.py; do $(BIN)/python $$file || exit 1; done

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

compile: .venv/ready
	$(BIN)/kfp-gate compile
	KFP_GATE_RENEW=1 $(BIN)/pytest tests/components tests/test_readme.py

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	# Ultralytics asks for the OpenCV build that needs a screen's libraries; the headless one has the same modules.
	$(BIN)/pip uninstall --quiet --yes opencv-python
	$(BIN)/pip install --quiet --force-reinstall --no-deps opencv-python-headless
	touch $@

.venv/bench: .venv/ready
	$(BIN)/pip install --quiet --editable '.[bench]'
	touch $@

clean:
	rm -rf .venv kfp-gate-demo kfp-gate-runs
