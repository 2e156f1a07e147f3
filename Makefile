# Everything the project does, each from a fresh clone with only Python 3.11+ and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIGHT := $(VENV)/.light
READY := $(VENV)/.ready
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CHECKED := src tests benchmarks examples docs

.PHONY: help demo test check docs format bench campaign clean

help:
	@echo "make demo      scan two small models that come with the package"
	@echo "make test      run the tests"
	@echo "make check     formatter, linter, types, documentation: what CI runs"
	@echo "make format    let the formatter and the linter mend what they can"
	@echo "make bench     measure against dense products and the machine's own limits"
	@echo "make campaign  the long fuzz and kill runs"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The demonstration needs neither PyTorch nor the tools of development.
$(LIGHT): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[report]'
	touch $@

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	touch $@

demo: $(LIGHT)
	$(BIN)/wqk demo

test: $(READY)
	$(BIN)/python -m pytest -m "not campaign"

check: $(READY)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/sphinx-build --quiet -W --keep-going -b html docs docs/_build/html

docs: $(READY)
	$(BIN)/sphinx-build -W -b html docs docs/_build/html

format: $(READY)
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

bench: $(READY)
	$(BIN)/python -m benchmarks

campaign: $(READY)
	$(BIN)/python -m pytest -m campaign

clean:
	rm -rf $(VENV) dist docs/_build .pytest_cache .mypy_cache .ruff_cache
