# `make demo` and `make test` need Python 3.11+ and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint format docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt launchers/torchrun.py
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	{ echo '#!$(CURDIR)/$(BIN)/python'; cat launchers/torchrun.py; } > $(BIN)/torchrun
	touch $@

demo: install
	rm -rf runs/demo
	$(BIN)/torchrun launchers/train.py --nproc 4 --out runs/demo
	$(BIN)/sattle predict runs/demo --source iris_baker --relation mother_of --top 5
	$(BIN)/sattle predict runs/demo --source mia_baker --relation cousin_of --top 5

test: lint
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/python docs/reference.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
