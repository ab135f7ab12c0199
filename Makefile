# `make demo`, `make test` and the others set everything up by themselves, into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALLED := $(VENV)/.installed

.PHONY: demo test browser lint docs wheel clean

demo: $(READY)
	$(BIN)/insertlm infill - < docs/examples/letter.txt
	$(BIN)/insertlm infill "The conference, ___ was postponed." --show
	$(BIN)/insertlm generate --count 10

test: $(INSTALLED) lint browser
	$(BIN)/python -m pytest

# The page is tested in Chromium: installed where nobody has to be asked. Without it those tests are skipped.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name > /dev/null && exit; done; \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium; } || \
	echo 'no Chromium, and it cannot be installed here: the tests of the page will be skipped'

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# docs/reference/, from the code.
docs: $(INSTALLED)
	$(BIN)/python docs/make_reference.py

# What `pip install` can install: dist/insertlm-*.whl. setuptools copies into build/ and never removes anything there, so a
# file that is gone from src/ would still be packed.
wheel: $(READY)
	rm -rf build
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

# torch comes first and alone: its version is pinned, so that a CPU machine does not pull the CUDA build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

# What tests need beside the package.
$(INSTALLED): $(READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
