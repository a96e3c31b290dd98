# Two commands from a fresh clone on a machine with Python and gcc: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test demo bench lint clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

test: $(READY) lint
	$(BIN)/python -m pytest
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/numerics

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(READY)
	$(BIN)/python benchmarks/demo.py

bench: $(READY)
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf $(VENV) .compat build dist
