.DEFAULT_GOAL := help
.PHONY: help setup setup-aot demo check test test-quick test-slow test-aot lint types format lock clean

BIN := .venv/bin
# Set, it has every process parse jax anew, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE
# Two processes, since compiling a step takes one core; a file's tests share what they compiled.
# Files stay in the order that tests/conftest.py gives them, those that compile first.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make or refresh .venv
	@scripts/setup.sh

setup-aot: ## make or refresh .venv-aot, which compiles for GPUs without one
	@scripts/setup_aot.sh

demo: setup ## run the demonstration on the CPU (DEMO_ARGS="--plot FILE" draws it)
	$(BIN)/python -m serving.demo $(DEMO_ARGS)

check: setup ## check style and types, and run the tests that compile nothing: a minute
	@$(MAKE) --no-print-directory -j2 lint types test-quick

test-quick: setup
	$(BIN)/python -m pytest -m "not compiles and not slow"

test: setup ## run the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: setup ## run the tests that take minutes each
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m slow

test-aot: setup-aot ## compile the kernels for an H200 and check what comes out
	.venv-aot/bin/python -m pytest $(PYTEST_ARGS) tests/aot

lint: setup ## check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# The variable stops pyright from asking the network for a newer version of itself.
types: setup ## check types
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --warnings

format: setup ## format, and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock: setup ## lock the dependencies again (LOCK_ARGS=--upgrade for newer ones)
	scripts/lock.sh $(LOCK_ARGS)

clean: ## remove the environments and every cache
	rm -rf .venv .venv-aot .cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
