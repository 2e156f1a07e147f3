# Everything the project does, each from a fresh clone with only Python 3.11+ and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIGHT := $(VENV)/.light
READY := $(VENV)/.ready
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CHECKED := src tests tools benchmarks examples docs

# Bytecode is kept, whatever the environment says: each worker, and each process that a test starts,
# would compile everything again.
WORKERS ?= 2
TESTS = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# Tests run in the order of their files, or with ORDER=N in a random order that the number N decides.
ORDER ?=
TESTS += $(if $(ORDER),-p randomly --randomly-seed=$(ORDER) --randomly-dont-reset-seed)

# make train: what is trained, what on, and where everything about it lies.
PAIR := examples/pair.toml
RUNS := out/pair
TEXT := $(RUNS)/docstrings.jsonl

.PHONY: help demo test test-slow train check docs format floors floors-extras loggers distributions bench \
	performance campaign mutants derive results clean

help:
	@echo "make demo      scan two small models that come with the package"
	@echo "make test      run the fast tests: before each commit"
	@echo "make test-slow run the other ones: notebooks, browsers, processes, training, every family"
	@echo "make train     train an encoder and a decoder, draw their scores and what they do; PAIR, TEXT=FILE, RUNS=FOLDER"
	@echo "make check     formatter, linter, types, documentation: what CI runs"
	@echo "make format    let the formatter and the linter fix what they can"
	@echo "make floors    the core's tests at the lowest versions of what it needs; floors-extras: of all"
	@echo "make loggers   run the tests with Lightning, W&B, MLflow and trackio, in an environment of their own"
	@echo "make distributions  build a release, check it, and try it in a new environment"
	@echo "make bench     measure against dense products and the machine's own limits"
	@echo "make performance  the same, into docs/performance.md; SECTIONS='scans training'"
	@echo "make campaign  the long fuzz and kill runs"
	@echo "make mutants   plant faults, count those that the tests notice; DATA=N, CODE=N, SEED=N"
	@echo "make results   write the tables of docs/results and docs/theory from their records"
	@echo "make derive    derive families from running every model type; writes their data"

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
	$(TESTS) -m "not campaign and not slow"

test-slow: $(READY)
	$(TESTS) tests -m "slow and not campaign"

# Text that every Python has; a few minutes on two cores. Interrupted, the same command goes on.
$(RUNS)/docstrings.jsonl: | $(READY)
	$(BIN)/python examples/write_docstrings.py $@

$(RUNS)/corpus/store.json: | $(READY) $(TEXT)
	$(BIN)/wqk lab corpus $(TEXT) --text characters -o $(@D)

train: $(READY) $(RUNS)/corpus/store.json
	$(BIN)/wqk lab experiments $(PAIR) --corpora $(RUNS) --out $(RUNS) --jobs 2
	$(BIN)/wqk lab figure fig3 $(RUNS)/encoder-1 $(RUNS)/decoder-1 --out $(RUNS)/fig3.png
	for model in encoder decoder; do \
		$(BIN)/wqk parts $(RUNS)/$$model-1 --corpus $(RUNS)/corpus --mask-share 0.3 --each-layer \
			--curves --picture $(RUNS)/parts-$$model.png || exit; \
	done

results: $(READY)
	$(BIN)/python docs/generate_results.py
	$(BIN)/python docs/generate_theory.py
	$(BIN)/python docs/generate_assumptions.py

check: $(READY)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/sphinx-build --quiet -W --keep-going -b html docs docs/_build/html

# Tests at the lowest versions that pyproject.toml allows, which uv resolves: of the core alone, and of
# every extra together (which downloads PyTorch).
FLOORS := .venv-floors
LOWEST = $(FLOORS)/bin/uv pip install --quiet --python $(FLOORS)/bin/python --resolution lowest-direct
TESTING := "pytest>=8.3" "hypothesis>=6.140" "jaxtyping>=0.2.36" "beartype>=0.19"
CORE := tests/forms/test_forms.py tests/forms/test_scores.py tests/scanning/test_scan.py \
	tests/scanning/test_bars.py tests/scanning/test_details.py \
	tests/test_files.py tests/test_errors.py
EXTRAS := $(CORE) tests/live/test_monitor.py tests/live/test_in_memory.py \
	tests/reporting/test_report.py tests/lab/figures/test_curves.py tests/lab/training/test_models.py

$(FLOORS)/bin/uv:
	$(PYTHON) -m venv $(FLOORS)
	$(FLOORS)/bin/python -m pip install --quiet --disable-pip-version-check uv

floors: $(FLOORS)/bin/uv
	$(LOWEST) -e . $(TESTING)
	$(FLOORS)/bin/python -m pytest --quiet -p no:cacheprovider -m "not campaign" $(CORE)

floors-extras: $(FLOORS)/bin/uv
	$(LOWEST) -e '.[report,train,cluster,gguf]' $(TESTING)
	$(FLOORS)/bin/python -m pytest --quiet -p no:cacheprovider -m "not campaign and not slow" \
		-W ignore::DeprecationWarning $(EXTRAS)

# Loggers that no other test needs, with the versions that they allow: MLflow forbids some of
# constraints.txt. A test whose logger cannot be imported is reported as skipped.
LOGGERS := .venv-loggers
loggers:
	test -d $(LOGGERS) || $(PYTHON) -m venv $(LOGGERS)
	$(LOGGERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-e '.[train]' $(TESTING) wandb 'mlflow>=3' 'trackio>=0.2' pytorch-lightning
	$(LOGGERS)/bin/python -m pytest --quiet -p no:cacheprovider -rs tests/live/test_loggers.py

# What a release consists of, checked, and tried where nothing else is installed.
RELEASE := .venv-release
distributions:
	test -d $(RELEASE) || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check \
		build twine check-wheel-contents cffconvert
	PATH="$(CURDIR)/$(RELEASE)/bin:$$PATH" tools/check_distributions.sh

docs: $(READY)
	$(BIN)/sphinx-build -W -b html docs docs/_build/html

format: $(READY)
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

bench: $(READY)
	$(BIN)/python -m benchmarks

# About a quarter of an hour on two cores, on which nothing else should run.
SECTIONS ?=
performance: $(READY)
	$(BIN)/python -m benchmarks $(SECTIONS) --page docs/performance.md

# Of tests that are repeated for hundreds of cases, one in SHARE runs, others at each commit;
# 1 is all, for hours.
SHARE ?= 10
campaign: export WQK_CAMPAIGN_SHARE = $(SHARE)
campaign: $(READY)
	failed=; $(BIN)/python -m pytest -m campaign || failed=1; \
	$(BIN)/python -m pytest -m "hypothesis and not campaign" --hypothesis-profile campaign && [ -z "$$failed" ]

DATA ?= 60
CODE ?= 60
SEED ?= 0
mutants: $(READY)
	$(BIN)/python -m tools.mutating --data $(DATA) --code $(CODE) --seed $(SEED)

# Every model type of transformers, built tiny and run; an hour and a half on two cores, resumable.
derive: $(READY)
	$(BIN)/python -m tools.deriving out/records --write
	$(BIN)/python -m tools.deriving.parts

clean:
	rm -rf $(VENV) $(FLOORS) $(RELEASE) dist docs/_build .pytest_cache .mypy_cache .ruff_cache
