# make compare   the trained models side by side: a table, and the report in unilinattn-report/
# make test      the quick tests, most of less than a second: few configurations and examples, no signatures;
#                ARGS="--thorough -m ''" runs all tests with signatures and more examples, as .ci/run does
# make slow      the others: longer ones, every configuration, every pair of values of a test's parameters
# make margins   how far each comparison of numbers is from its limit, on variants of this processor
# make evidence  the studies of docs/evidence.md from the shipped weights; ARGS=--train trains them again
# make bench     every operation timed beside its floor: docs/performance.md, which names the other benchmarks
# make fla, make vision, make oldest   the adapters on flash-linear-attention, on timm, and on the oldest transformers
#                                      that is accepted, each in a separate environment, since these packages change
#                                      the hosts of the others
# make docs      the documentation as a site in site/; needs no torch
# make systems   small models of many packages, traced without an adapter: docs/systems.md; ARGS=--check writes nothing
# make setups    the set-ups of docs/hosts.md with the packages that quantise weights; ARGS=--write writes the page
# Each makes .venv and installs into it first, once. PYTHON= names another interpreter, ARGS= adds arguments.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# glibc returns the memory of every large tensor to the system, which clears it again for the next one: a tenth of the
# time of the study of images.
REUSE := MALLOC_MMAP_THRESHOLD_=2000000000 MALLOC_TRIM_THRESHOLD_=4000000000
# Without stored bytecode each process of pytest rewrites the assertions of all tests, which takes 5 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: compare test slow margins evidence bench lint install browser fla vision oldest setups systems docs

compare: $(STAMP)
	@echo "Comparing the trained models."
	@$(BIN)/unilinattn compare $(ARGS)

test: $(STAMP)
	@echo "Running the tests."
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal $(ARGS)

slow: $(STAMP)
	@echo "Running the slow tests."
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "slow or long" $(ARGS)

margins: $(STAMP)
	@echo "Measuring how far each comparison is from its limit."
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.margins $(ARGS)

evidence: $(STAMP)
	@echo "Evaluating the studies."
	@OMP_NUM_THREADS=1 $(REUSE) $(BIN)/torchrun --nproc-per-node 2 -m evidence $(ARGS)

bench: $(STAMP)
	@echo "Timing every operation beside its floor."
	@$(BIN)/python -m benchmarks $(ARGS)

fla: .venv-fla/.installed
	@echo "Running the tests on flash-linear-attention, its kernels interpreted on the CPU."
	@TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-fla/bin/python -m pytest -q -n 2 --dist worksteal tests/fla $(ARGS)

vision: .venv-vision/.installed
	@echo "Running the tests on timm."
	@OMP_NUM_THREADS=1 .venv-vision/bin/python -m pytest -q tests/models/test_vim.py tests/architectures/test_timm.py $(ARGS)

oldest: .venv-oldest/.installed
	@echo "Running the tests of the adapters on the oldest transformers."
	@OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -q -n 2 --dist worksteal -m "" \
	    tests/architectures/test_conformance.py $(ARGS)
	@OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow" \
	    tests/architectures tests/host tests/discovery tests/tracing tests/frozen tests/reruns \
	    $(patsubst %,--ignore=tests/%.py,$(addprefix architectures/test_,conformance controls reference) \
	    $(addprefix frozen/test_,forms rules slopes) host/test_isolation host/test_threads \
	    $(addprefix discovery/test_,discovery opaque unknown) $(addprefix tracing/test_,prefix trust)) $(ARGS)

setups: .venv-setups/.installed
	@echo "Running the set-ups of docs/hosts.md."
	@.venv-setups/bin/python -m tests.setups $(ARGS)

systems: .venv-systems/.installed
	@echo "Tracing models of other packages."
	@.venv-systems/bin/python -m tools.systems $(ARGS)

docs: .venv-docs/.installed
	@echo "Building the documentation into site/."
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet --strict $(ARGS)

lint: $(STAMP)
	@echo "Checking style, types and the texts of seeded faults."
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python -m tools.mutants --check

install: $(STAMP) browser

# The tests of pages run in Chromium, and are skipped without it.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Installing Chromium for the tests of pages (once)."; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	        apt-get install -qq -y --no-install-recommends chromium >/dev/null; \
	fi || true; \
	command -v chromium >/dev/null || echo "There is no Chromium: the tests of pages will be skipped."

# Checks the interpreter of an environment, or the one that will make it: $(call check_python,ENVIRONMENT)
define check_python
@python="$(PYTHON)"; if [ -x $(1)/bin/pip ]; then python=$(1)/bin/python; fi; \
command -v "$$python" >/dev/null || { \
    echo "No '$$python' here. Name a Python 3.11 or newer: make $(or $(MAKECMDGOALS),compare) PYTHON=python3.12" >&2; exit 1; }; \
"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
    echo "unilinattn needs Python 3.11 or newer; '$$python' is $$("$$python" --version 2>&1)." >&2; \
    echo "Name another (and remove $(1) if it is the old one): make $(or $(MAKECMDGOALS),compare) PYTHON=python3.12" >&2; exit 1; }
endef

$(STAMP): pyproject.toml constraints.txt Makefile
	$(call check_python,.venv)
	@echo "Installing unilinattn and its dependencies into .venv (once, a few minutes)."
	@[ -x $(BIN)/pip ] || "$(PYTHON)" -m venv .venv
	@$(BIN)/python -m pip install -qq -c constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install -qq -c constraints.txt -e ".[dev]"
	@touch $@

# griffe reads the source: the environment holds the extra `docs` and neither the package nor torch.
.venv-docs/.installed: pyproject.toml constraints.txt Makefile
	$(call check_python,.venv-docs)
	@echo "Installing mkdocs into .venv-docs (once)."
	@[ -x .venv-docs/bin/pip ] || "$(PYTHON)" -m venv .venv-docs
	@.venv-docs/bin/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    print("\n".join(project["optional-dependencies"]["docs"]))' \
	    | xargs .venv-docs/bin/python -m pip install -qq -c constraints.txt
	@touch $@

# The folder of an environment's packages: $$(ENVIRONMENT/bin/$(SITE))
SITE := python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
# Packages that each of the other environments adds.
fla_ADDS := flash-linear-attention==0.6.0 fla-core==0.6.0
vision_ADDS := timm==1.0.31 torchvision==0.28.0
setups_ADDS := torchao==0.18.0 bitsandbytes==0.50.2
# The constraints hold the newest transformers: an older one goes before it, with its dependencies.
oldest_MENDS = .venv-oldest/bin/python -m pip install -qq transformers==5.6.2
# Beside a CPU build of torch the CUDA build of torchvision cannot be imported.
vision_MENDS = .venv-$*/bin/python -c "import torchvision" 2>/dev/null || cp tests/environments/torchvision_operators.py \
    "$$(.venv-$*/bin/$(SITE))/sitecustomize.py"
systems_MENDS = .venv-systems/bin/python -m pip install -qq --no-deps -r tools/systems_packages.txt && { $(vision_MENDS); }

.venv-systems/.installed: tools/systems_packages.txt

# The packages of .venv follow those that the environment adds, so that torch is installed once.
.venv-%/.installed: $(STAMP)
	@echo "Installing into .venv-$* (once)."
	@[ -x .venv-$*/bin/pip ] || $(BIN)/python -m venv .venv-$*
	@echo "import site; site.addsitedir('$$($(BIN)/$(SITE))')" >"$$(.venv-$*/bin/$(SITE))/base.pth"
	@$(if $($*_ADDS),.venv-$*/bin/python -m pip install -qq -c constraints.txt $($*_ADDS))
	@$(or $($*_MENDS),true)
	@touch $@
