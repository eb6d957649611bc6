# `make quickstart` (a first study and its report), `make test`, `make docs`. They make .venv when it is missing.
#
#   make UV=1 ...                                     install with uv instead of pip
#   make CONSTRAINTS=requirements/constraints.txt ... install exactly the versions that CI uses
#   make PYTHON=/path/to/python3.12 VENV=env ...      another interpreter, another place

SHELL := /bin/bash
VENV ?= .venv
UV ?=
CONSTRAINTS ?=
WORKERS ?= 2
FUZZ_MINUTES ?= 60
SLOW_PART ?=
SLOW_PARTS := 8
RESULTS ?= results
# `make release`: interpreters to install with, and the folder for environments of about 15 GB
PYTHONS ?= $(PYTHON)
FOLDER ?=
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	if command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$p; break; fi; done)

BIN := $(VENV)/bin
INSTALL := -e '.[lab]' --group dev $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
PART := $(if $(SLOW_PART),--part $(SLOW_PART)/$(SLOW_PARTS))
LIBRARY := $(filter-out tests/lab/ tests/cli/ tests/tools/ tests/fuzz/ tests/__pycache__/,$(wildcard tests/*/)) $(addprefix tests/test_,\
	arguments.py contract.py generated.py import.py layers.py)
# One thread a process: small tensors are slower on several, and results then do not depend on the machine.
ONE_THREAD := OMP_NUM_THREADS=1

.PHONY: quickstart test test-library typed untyped slow fuzz docs generated lint format clean release audit
.DEFAULT_GOAL := quickstart

$(VENV)/.ready: pyproject.toml CMakeLists.txt $(wildcard src/regard/mixers/*/*.cpp src/regard/mixers/*/*.h)
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 was found; install one (apt install python3.11 python3.11-venv," \
		"brew install python@3.12) or say where it is: make PYTHON=/path/to/python3" >&2; exit 1; }
ifeq ($(UV),)
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) could not make $(VENV); on Debian and" \
		"Ubuntu the venv module is a package of its own: apt install python3-venv; or use uv: make UV=1" >&2; exit 1; }
	@{ $(BIN)/python -m pip install --quiet --upgrade "pip>=25.1" && $(BIN)/python -m pip install $(INSTALL); } || \
		{ echo "the packages could not be installed (about 6 GB with torch). Without a network, point pip at a" \
		"mirror or a folder of wheels (PIP_INDEX_URL, PIP_FIND_LINKS) and repeat the command" >&2; exit 1; }
else
	@command -v uv >/dev/null || { echo "uv is not installed: pip install uv, or leave UV=1 out" >&2; exit 1; }
	@test -x $(BIN)/python || uv venv --python $(PYTHON) $(VENV)
	@uv pip install --python $(BIN)/python $(INSTALL) || { echo "the packages could not be installed; without a" \
		"network, point uv at a mirror or a folder of wheels (UV_INDEX_URL, UV_FIND_LINKS)" >&2; exit 1; }
endif
	@touch $@

quickstart: $(VENV)/.ready  ## a few minutes: train on real data, compare, draw the report
	$(BIN)/regard study run quickstart --scale desk --workers $(WORKERS) --results $(RESULTS)
	$(BIN)/regard report quickstart --results $(RESULTS) --out $(RESULTS)/report
	@echo "open $(RESULTS)/report/quickstart-desk.html"

test: $(VENV)/.ready
	@failed=0; for pass in typed untyped; do $(MAKE) --no-print-directory $$pass || failed=1; done; exit $$failed

test-library: $(VENV)/.ready  ## after a change of a mechanism, a port or a host: all but the laboratory and the command line
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) $(LIBRARY)
	$(ONE_THREAD) JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -n $(WORKERS) -m 'untyped and not slow' $(LIBRARY)

typed: $(VENV)/.ready  ## with annotation checks
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS)

untyped: $(VENV)/.ready  ## torch.compile and wrong use, which annotation checks would answer first
	$(ONE_THREAD) JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -n $(WORKERS) -m 'untyped and not slow'

slow: $(VENV)/.ready  ## what takes more than five seconds a test; SLOW_PART=3 runs the third of eight parts
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) -m 'slow and not untyped' --durations=10 $(PART) || test $$? -eq 5
	$(ONE_THREAD) JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -n $(WORKERS) -m 'slow and untyped' --durations=10 $(PART) \
		|| test $$? -eq 5

fuzz: $(VENV)/.ready  ## new random values and damaged files, in rounds for an hour; stops at the first failure
	end=$$(( $$(date +%s) + 60 * $(FUZZ_MINUTES) )); while [ $$(date +%s) -lt $$end ]; do \
		$(ONE_THREAD) JAXTYPING_DISABLE=1 HYPOTHESIS_PROFILE=fuzz \
		$(BIN)/python -m pytest -q -n $(WORKERS) -m 'not slow' tests/fuzz || exit 1; done

docs: $(VENV)/.ready  ## the offline site: build/site/index.html; about a minute
	$(ONE_THREAD) $(BIN)/python -m tools.site

generated: $(VENV)/.ready  ## write what follows from the table of mechanisms and the evidence, and the pages of docs
	$(BIN)/python tools/generate.py
	$(BIN)/python -m tools.docs_pages
	$(BIN)/python -m tools.findings
	$(BIN)/python -m tools.real_networks
	$(BIN)/python -m tools.claims_page
	$(BIN)/python -m tools.papers_page
	$(BIN)/python -m tools.advice_table
	$(BIN)/python -m tools.probes_table
	$(BIN)/ruff format -q src

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

release:  ## wheel, sdist and SBOM into dist/; the quickstart from clean environments, newest and lowest versions
	$(PYTHON) tools/release.py --python $(PYTHONS) $(if $(FOLDER),--folder $(FOLDER))

audit: $(VENV)/.ready  ## known vulnerabilities of all installed packages; asks a service in the network
	$(BIN)/python tools/audit.py

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
