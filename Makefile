# Two commands from a fresh clone on a machine with Python and gcc: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test main releases demo bench lint clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

# two at a time: most tests are one process
test: $(READY) lint
	+$(MAKE) --jobs=2 main releases

main:
	$(BIN)/python -m pytest -m "not compat"

releases:
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/numerics
	$(BIN)/python -m pytest -m compat tests/integration/test_compat.py

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
