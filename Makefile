# make demo   install into .venv and compare methods on emulated 100 Mbit/s links
# make test   install into .venv and run the tests
# make lint   ruff and mypy
# make docs   build the site with the API reference into build/site; warnings are errors
# make golden write the digests that a redesign must keep (tests/golden)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.thinwire-installed
DOCS_STAMP := $(VENV)/.thinwire-docs-installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint docs golden format clean

demo: $(STAMP)
	$(BIN)/python -m thinwire compare --config examples/demo.toml

# Side by side what may be; then, one by one, what measures a network. ARGS runs a part by hand.
test: $(STAMP)
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	$(BIN)/python -m pytest -n 3 --dist loadfile -m 'not alone'
	$(BIN)/python -m pytest -m alone
endif

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Not --quiet: mkdocs would then see no warning that --strict could make an error.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

golden: $(STAMP)
	rm -f .golden.json
	GOLDEN=write $(BIN)/python -m pytest tests/golden

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The stamp is written last: an install that was cut short is simply taken up again, and once it
# is there nothing below touches the network.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "thinwire needs Python 3.10 or newer; name one with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev]'
	touch $(STAMP)

# What only the site needs: mkdocs and its plugins.
$(DOCS_STAMP): $(STAMP)
	$(PIP) -e '.[docs]'
	touch $(DOCS_STAMP)

clean:
	rm -rf $(VENV) build runs .pytest_cache .mypy_cache .ruff_cache
