# make compare   the trained models side by side: a table, and the report in unilinattn-report/
# make test      the tests
# Each makes .venv and installs into it first, once. PYTHON= names another interpreter, ARGS= adds arguments.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: compare test slow lint install

compare: $(STAMP)
	@echo "Comparing the trained models."
	@$(BIN)/unilinattn compare $(ARGS)

test: $(STAMP)
	@echo "Running the tests."
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal $(ARGS)

slow: $(STAMP)
	@echo "Running the slow tests."
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow $(ARGS)

lint: $(STAMP)
	@echo "Checking style and types."
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy --no-error-summary

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@python="$(PYTHON)"; if [ -x $(BIN)/pip ]; then python=$(BIN)/python; fi; \
	command -v "$$python" >/dev/null || { \
	    echo "No '$$python' here. Name a Python 3.11 or newer: make $(or $(MAKECMDGOALS),compare) PYTHON=python3.12" >&2; exit 1; }; \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "unilinattn needs Python 3.11 or newer; '$$python' is $$("$$python" --version 2>&1)." >&2; \
	    echo "Name another (and remove .venv if it is the old one): make $(or $(MAKECMDGOALS),compare) PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing unilinattn and what it needs into .venv (once, a few minutes)."
	@[ -x $(BIN)/pip ] || "$(PYTHON)" -m venv .venv
	@$(BIN)/python -m pip install -qq -c constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install -qq -c constraints.txt -e ".[dev]"
	@touch $@
