# Every verb of this repository. `make help` prints them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PROMPTS := $(or $(MIMO_TRAIN_DIR),$(HOME)/.cache/mimo-train)/prompts
SOURCES := mimo gateway services models tests

export OMP_WAIT_POLICY ?= passive
# One thread a test worker: small matrices are fastest so, and two workers share two cores.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.PHONY: help setup demo up test lint check soak train-tiny eval protos oracles clean

help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv, install everything

$(STAMP): pyproject.toml
	@echo "setup: creating $(VENV) and installing (about a minute; 1.5 GB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "setup: Python 3.11 or newer is needed: make setup PYTHON=python3.11"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH_SPEC)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(STAMP)

demo: setup ## Start everything, ask about a picture, a sound and a video, stop (under 5 minutes)
	@$(BIN)/mimo demo

up: setup ## Start everything and keep it running: REST + playground on :8080, gRPC on :50050
	@$(BIN)/mimo up --rest-port 8080 --grpc-port 50050

test: setup ## The CPU test suite (budget: 10 minutes)
	@$(TEST_ENV) timeout 600 $(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not check and not soak and not gpu"

lint: setup ## Format, lint, types, layers, protos (budget: 3 minutes)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format -d --exit-code

check: setup oracles ## Oracles, clients, browser, longer tests (budget: 45 minutes)
	@$(TEST_ENV) timeout 2100 $(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "check and not alone and not soak and not gpu"
	@$(TEST_ENV) timeout 600 $(BIN)/python -m pytest -q -s -m "alone and not soak and not gpu"

soak: setup oracles ## Minutes of faults and of load: what `make check` has no time for
	@$(TEST_ENV) $(BIN)/python -m pytest -q -s -m "soak and not gpu"

oracles: $(VENV)/.oracles ## Install the independent implementations that `make check` compares with

$(VENV)/.oracles: pyproject.toml | $(STAMP)
	@echo "oracles: installing librosa, transformers, openai, playwright, scikit-learn (about a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,oracles,train]'
	@touch $@

train-tiny: setup ## Train the bundled model; resumes (about three hours on two cores)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train]'
	@$(BIN)/python -m models.training all

eval: setup $(PROMPTS)/prompts.jsonl ## Ask the bundled model 200 questions of every skill (budget: 12 minutes)
	@$(BIN)/mimo eval --prompts $(PROMPTS)

$(PROMPTS)/prompts.jsonl: | $(STAMP)
	@echo "eval: making held-out questions (about a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train]'
	@$(BIN)/python -m models.training prompts

protos: $(STAMP) ## Regenerate mimo/v1 from protos/
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos --python_out=. \
		--grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. protos/mimo/v1/*.proto

clean: ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache *.egg-info
