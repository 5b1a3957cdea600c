# Every target sets up .venv by itself, once: pip only. PYTHON and VENV can be given: make PYTHON=python3.12 test
PYTHON ?= python3
VENV ?= .venv
SGLANG_VENV ?= .venv-sglang
ROUTER_VENV ?= .venv-router
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUN_READY := $(VENV)/.ready-run
DEV_READY := $(VENV)/.ready-dev
RAY_READY := $(VENV)/.ready-ray
# SGLang pins its own torch, so it never shares an environment with ours: 2.6 GB, a minute or two.
PLUGIN := rollout/engine/sglang_cpu_plugin
SGLANG_READY := $(SGLANG_VENV)/.ready
ROUTERS := tests/router-requirements.txt
ROUTER_READY := $(ROUTER_VENV)/.ready
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
# Two at a time: most of an end-to-end test is one process. A worker keeps neighbours, and their engine, together.
PARALLEL := -n 2 --dist worksteal

.PHONY: run test test-full test-browser bench lint sglang-cpu routers
.DEFAULT_GOAL := run

run: $(RUN_READY)  ## One batch on the shipped prompts with the embedded engine, into ./lake
	$(BIN)/rollout run

test: $(DEV_READY)  ## Fast tests and one short end-to-end test per part
	$(PYTEST) $(PARALLEL) tests/fast tests/e2e -m "not full"

test-full: $(RAY_READY) $(SGLANG_READY) $(ROUTER_READY)  ## All the rest: long runs, kills, builds, SGLang on the CPU, routers, benchmarks as a smoke test
	ROLLOUT_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python \
	  ROLLOUT_TEST_ROUTER_PYTHON=$(abspath $(ROUTER_VENV))/bin/python $(PYTEST) $(PARALLEL) tests/fast tests/e2e tests/bench -m "full and not browser"

test-browser: $(DEV_READY)  ## Prefect's pages in a real headless Chromium, which is installed where that may be done
	$(PYTEST) tests/e2e/test_browser.py

bench: $(DEV_READY)  ## Ratios on this machine; prints them, asserts none
	BENCH_ROLLOUTS=1024 BENCH_REPEATS=3 $(PYTEST) tests/bench -s

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

sglang-cpu: $(SGLANG_READY)  ## An environment with SGLang for the CPU, beside ours

routers: $(ROUTER_READY)  ## An environment with the routers that tests start, beside ours

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(RUN_READY): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV) (once, some minutes)"
	$(PIP) -e .
	@touch $@

$(DEV_READY): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV) with what the tests need (once, some minutes)"
	$(PIP) -e '.[dev,train,agents]'
	@touch $@ $(RUN_READY)

$(RAY_READY): $(DEV_READY)
	@echo "Installing Ray into $(VENV) (once, half a minute)"
	$(PIP) -e '.[ray]'
	@touch $@

$(SGLANG_READY): $(wildcard $(PLUGIN)/*.txt $(PLUGIN)/*.toml $(PLUGIN)/src/*/*.py)
	@echo "Installing SGLang into $(SGLANG_VENV) (once, some minutes)"
	$(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_PIP) -r $(PLUGIN)/requirements.txt \
	  && $(SGLANG_PIP) --no-deps -r $(PLUGIN)/requirements-nodeps.txt \
	  && $(SGLANG_PIP) --no-deps --force-reinstall ./$(PLUGIN) \
	  || { echo "$(SGLANG_VENV) cannot be built: pip's last lines say why; the tests with SGLang need it" >&2; exit 1; }
	@touch $@

$(ROUTER_READY): $(ROUTERS)
	@echo "Installing smg and sglang-router into $(ROUTER_VENV) (once, half a minute)"
	$(PYTHON) -m venv $(ROUTER_VENV)
	@$(ROUTER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(ROUTERS) \
	  || { echo "$(ROUTER_VENV) cannot be built: pip's last lines say why; the tests with routers need it" >&2; exit 1; }
	@touch $@
