# `make demo` and `make test` need Python 3.10+ (with venv) and g++; they set up the rest in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

# Compiled kernels stay here between runs; `make clean` removes them.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-dist test-npu test-browser bench soak check lint types imports format clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

setup: $(READY) ## create .venv and install the package and its tools there

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: Python 3.10 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "       Choose another with: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setup 1/2: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "error: '$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "setup 2/2: installing muon-compile, PyTorch and the development tools (a minute or two, longer on a slow network)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "setup done: PyTorch $$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))') in $(VENV)"

demo: $(READY) ## train a small transformer on real text, eager and compiled
	$(BIN)/python examples/quickstart.py $(ARGS)

test: $(READY) ## run the tests of one process; ARGS="-k muon -x" goes to pytest
	$(BIN)/python -m pytest tests -m "not dist and not npu and not browser" -n 2 --dist loadfile $(ARGS)

test-dist: $(READY) ## run the tests of several ranks, on gloo
	$(BIN)/python -m pytest tests -m "dist and not npu" $(ARGS)

test-npu: $(READY) ## lower the step for Ascend NPUs and run it by the reference interpreter; fetches a wheel's Python once
	$(BIN)/python -m pytest tests/npu -n 2 --dist loadfile $(ARGS)

test-browser: $(READY) ## open reports in Chromium (tools/install_chromium.sh)
	$(BIN)/python -m pytest tests/browser $(ARGS)

bench: $(READY) ## print every figure of the README and draw step times (out/bench.png); ARGS="--minutes 10" runs all sets
	$(BIN)/python tools/figures.py
	$(BIN)/python tools/compile_time.py
	$(BIN)/python tools/bench_step.py --json out/bench.json --png out/bench.png --seconds 3 --minutes 4 $(ARGS)

soak: $(READY) ## 2,000 steps on 4 ranks with faults (10 minutes at most); ARGS="--seed 1 --json out/soak.json"
	$(BIN)/python tools/soak_faults.py $(ARGS)

check: lint types imports test test-dist ## what CI runs: lint, types, import rules, tests
	$(MAKE) test-npu ARGS="-m npu"
	$(MAKE) test-browser

lint: $(READY) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy --strict on the package
	$(BIN)/mypy

imports: $(READY) ## the floors of the house: who may import whom
	$(BIN)/lint-imports --cache-dir .cache/import_linter

format: $(READY) ## let ruff fix and format the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and what the demo wrote
	rm -rf $(VENV) .cache .hypothesis out build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
