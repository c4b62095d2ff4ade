# make demo    set up and stream an answer of a small model in the terminal
# make test    set up, lint, type-check and run the tests (CPU only)
# make check   lint and types alone
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check clean

demo:
	@PYTHON=$(PYTHON) .ci/setup
	@$(BIN)/python examples/hello.py

test:
	@PYTHON=$(PYTHON) .ci/setup test
	@$(MAKE) --no-print-directory check
	@$(BIN)/python -m pytest -m "not gpu" $(ARGS)

check:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
