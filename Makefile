# Every target makes its own environment first; nothing but Python >= 3.10 and make is needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
XDIST  ?= 2
export OMP_NUM_THREADS ?= 1
export MPLBACKEND ?= Agg

.PHONY: setup quickstart test test-all lint types bench gpu-check clean
setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "noctowl needs Python >= 3.10, this is %s: name another one with PYTHON=..." % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch torchvision
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: setup
	$(BIN)/python bench/miniature.py --quick

test: setup lint types
	$(BIN)/python -m pytest -n $(XDIST) -m 'not slow'

test-all: setup lint types
	$(BIN)/python -m pytest -n $(XDIST)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

bench: setup
	for file in metric_cost training_cost sweep_cost evaluation_cost store_io lvis_cost comparison_cost; do $(BIN)/python bench/$$file.py --quick || exit 1; done

gpu-check: setup
	$(BIN)/python bench/gpu_check.py

clean:
	rm -rf $(VENV) build dist
