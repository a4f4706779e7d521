# Everything a developer does. `make test` is the whole check, on a fresh machine too:
# it makes the virtual environment and fetches the tools by itself.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := .tools/bin

.PHONY: help setup lint types unit test docs bench format clean

help:
	@echo "make setup   virtual environment and tools"
	@echo "make test    lint, types and all tests"
	@echo "make lint | types | unit   one of these alone"
	@echo "make docs    fill the tables in README.md and docs/"
	@echo "make format  format the code"
	@echo "make bench   measure what tracing and barriers cost; writes bench-results/"
	@echo "make clean   remove everything that make made"

setup: $(VENV)/.ready $(TOOLS)/promtool

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable ".[otlp,instrument]"
	touch $@

$(TOOLS)/promtool: scripts/fetch-tools.sh
	scripts/fetch-tools.sh $(TOOLS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/validate-pyproject pyproject.toml

types: $(VENV)/.ready
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest

test: lint types unit

docs: $(VENV)/.ready
	$(BIN)/python scripts/update_docs.py

bench: $(VENV)/.ready
	@# Both of them, even if the first one misses a bar.
	$(BIN)/python benchmarks/overhead.py --output bench-results/overhead.json; \
	overhead=$$?; \
	$(BIN)/python benchmarks/barriers.py --output bench-results/barriers.json \
	&& exit $$overhead

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .tools .mypy_cache .pytest_cache .ruff_cache bench-results dist
