# make demo: train the embedded demo over four processes. make test: lint, types, tests; make test-all: the slow ones too. All set up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all lint clean

.venv/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: .venv/ready
	$(BIN)/thinpipe train recipes/demo.toml

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

test-all: lint
	$(BIN)/pytest -m ""

clean:
	rm -rf .venv
