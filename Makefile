PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS = 1
NUMBERS := $(addprefix tests/,balance checkpoint data embeddings parity strategy/overlap)

.PHONY: setup demo test test-fast lint clean

setup: .venv/.ready

.venv/.ready: pyproject.toml scripts/setup_environment.py
	$(PYTHON) scripts/setup_environment.py .venv
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

# what is about numbers on two workers, what is about times alone
test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal $(NUMBERS)
	$(BIN)/python -m pytest $(NUMBERS:%=--ignore=%)

# without the tests marked slow: every contract once
test-fast: setup
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal --durations=10

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv demo_output .mypy_cache .ruff_cache .pytest_cache .hypothesis
