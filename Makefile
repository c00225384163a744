PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup demo test test-slow test-data lint wheel golden clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/fedadc demo --out runs/demo --overwrite

test: $(READY)
	$(BIN)/python -m pytest -n 2

test-slow: $(READY)          # minutes: long runs and large partitions
	$(BIN)/python -m pytest -m slow

test-data: $(READY)          # needs FEDADC_DATA with CIFAR-10, CIFAR-100
	$(BIN)/python -m pytest -m realdata

lint: $(READY)
	$(BIN)/ruff check fedadc tests
	$(BIN)/ruff format --check fedadc tests
	$(BIN)/mypy

wheel: $(READY)
	rm -rf dist && $(BIN)/python -m build --wheel --outdir dist

golden: $(READY)             # rewrites tests/golden.json: look at the difference before you commit it
	$(BIN)/python tests/make_golden.py

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
