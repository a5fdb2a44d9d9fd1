# `make demo` and `make test` need Python 3.11 to 3.14 and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint format docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt launchers/torchrun.py
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 to 3.14 is needed, this is " + sys.version + "; name another: make PYTHON=python3.13") if not (3, 11) <= sys.version_info < (3, 15) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	cp launchers/torchrun.py $(BIN)/torchrun.py
	printf '%s\n' '#!/bin/sh' 'exec "$$(dirname "$$0")/python" "$$(dirname "$$0")/torchrun.py" "$$@"' > $(BIN)/torchrun
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
