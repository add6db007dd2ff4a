# `make serve` and `make test` set everything up on a bare machine (Python >= 3.11 with venv); later calls start at once.

PYTHON ?= python3
BIN := .venv/bin
CREATED := .venv/.created
INSTALLED := .venv/.installed
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help serve test lint model setup clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16
	@echo '  ARGS="..." is handed to phalanx serve or pytest; PYTHON=... names another interpreter for the set-up'

serve: model  ## serve the demo model on two ranks
	@exec $(BIN)/phalanx serve configs/demo.yaml $(ARGS)

test: lint model  ## lint, then the tests (ARGS="-m slow": those that take long)
	@exec $(BIN)/python -m pytest -n 2 $(ARGS)

lint: setup  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/mypy

setup: $(INSTALLED)  ## virtual environment and pinned requirements

model: setup  ## the demo model, in the user's cache
	@$(BIN)/phalanx demo-model >/dev/null

clean:  ## remove the environment and what tools cached here; the demo model stays
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("phalanx needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	@echo "Setting up .venv (once)"
	@$(PYTHON) -m venv .venv || { echo "python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

$(INSTALLED): $(CREATED) pyproject.toml constraints.txt
	@$(BIN)/python .ci/install.py
	@touch $@
