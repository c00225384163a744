PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BARE   := $(VENV)/.bare
READY  := $(VENV)/.ready
# v0.1.0, with which `make same-as` compares; by its hash, because tags do not come with every clone
REF    ?= ab3897dd3b05deaf25034bb4a34cfd050b7aee94

.PHONY: setup demo test test-slow test-cluster test-federation test-data torture same-as lint wheel golden bench bench-peers bench-curves bench-personalize clean

setup: $(READY)

$(BARE): pyproject.toml constraints.txt    # the package alone
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $(BARE)

$(READY): $(BARE)                          # and what development needs
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(BARE)
	$(BIN)/fedadc demo --out runs/demo --overwrite

test: $(READY)
	$(BIN)/python -m pytest -n 2

test-slow: $(READY)          # minutes: long runs and large partitions
	$(BIN)/python -m pytest -m slow

test-cluster: $(READY)       # a quarter of an hour: Ray clusters of several nodes, which are killed
	$(BIN)/python -m pytest -m cluster

test-federation: $(READY)    # half an hour: all methods across real sites on Flower, which are killed
	$(BIN)/python -m pytest -m federation

test-data: $(READY)          # needs FEDADC_DATA with CIFAR-10, CIFAR-100
	$(BIN)/python -m pytest -m realdata

torture: $(READY)            # half an hour: kills every method again and again; `tests/torture.py --quick` two minutes
	$(BIN)/python tests/torture.py

same-as: $(READY)            # minutes: the working tree and the commit REF give the same bits; before a refactoring is merged
	$(BIN)/python tests/same_as.py $(REF)

lint: $(READY)
	$(BIN)/ruff check fedadc tests benchmarks examples
	$(BIN)/ruff format --check fedadc tests benchmarks examples
	$(BIN)/mypy

wheel: $(READY)
	rm -rf dist && $(BIN)/python -m build --wheel --outdir dist

golden: $(READY)             # rewrites tests/golden.json: look at the difference before you commit it
	$(BIN)/python tests/make_golden.py

bench: $(READY)              # half an hour: ours, a plain loop, the bare limit; wants a quiet machine
	$(BIN)/python benchmarks/run.py

bench-peers: $(READY)        # also pfl-research, Flower and fluke, in environments of their own
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/run.py --peers

bench-curves: $(READY)       # how cost grows with clients, cohort, parameters and workers
	$(BIN)/python benchmarks/curves.py

bench-personalize: $(READY)  # calibrating 1,000 clients beside one forward pass over their data; two minutes
	$(BIN)/python benchmarks/personalize.py

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
