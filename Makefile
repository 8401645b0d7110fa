# One command for each job. The first run builds .venv from any Python >= 3.11.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The first on the PATH that is new enough and can make a virtual environment.
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1 && command -v "$$name" && break; done)

# Caches live in .venv, since HOME may be missing or read-only; certificates are the system's.
export UV_CACHE_DIR := $(CURDIR)/$(VENV)/.cache/uv
export PIP_CACHE_DIR := $(CURDIR)/$(VENV)/.cache/pip
export UV_SYSTEM_CERTS := 1
export UV_NATIVE_TLS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

# Hundreds of processes of the tests import the package, so what was compiled is stored even where the
# environment asks for no such files.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/.cache/pycache

# Tests of one file stay in one process: they share what the file sets up. Five processes for two
# cores, since most tests wait for a server, a lease or a signal half of the time.
WORKERS ?= $(shell $(BIN)/python -c 'import os; print(5 * (os.cpu_count() or 2) // 2)' 2>/dev/null || echo 5)
# RERUN=1: if only a few tests fail, they are run again, alone, and must pass then.
RUN := $(BIN)/python -m $(if $(RERUN),tests.rerun_failed,pytest) -q
PYTEST := $(RUN) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Thousands of tests make a new store, and would wait for the disk. So their files are in memory, where
# two gigabytes are free for them, and are removed as soon as a test passes. `make deep` uses the disk.
IN_MEMORY := $(shell test -w /dev/shm && df -Pk /dev/shm 2>/dev/null | \
	awk 'NR == 2 && $$4 > 2000000 { print "PYTEST_DEBUG_TEMPROOT=/dev/shm" }')

COMPILE := $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --custom-compile-command 'make requirements'

.DEFAULT_GOAL := help
.PHONY: help demo test test-all docs check lint deep state-machine coverage mutants chaos bank chaos-peers soak bench powercut syscalls screenshots \
	format package sbom audit requirements clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r name what; do printf '%-21s %s\n' "$$name" "$$what"; done

demo: $(STAMP) ## see omniq run tasks and survive a kill
	@$(BIN)/python -m omniq demo

test: $(STAMP) ## run the tests
	@$(IN_MEMORY) $(PYTEST) -o tmp_path_retention_policy=failed

test-all: $(STAMP) ## run the tests on every Python from 3.11 that is here
	@$(BIN)/python -m tests.every_python $(ARGS)

docs: $(STAMP) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict
	@echo 'open site/index.html'

check: lint test ## all that must pass before a commit

lint: $(STAMP) ## ruff and mypy
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .
	@$(BIN)/mypy --no-error-summary
	@echo 'ruff and mypy: clean'

deep: $(STAMP) ## run the long state machines and fault sweeps
	@$(RUN) -n 4 --dist worksteal -m deep

state-machine: $(STAMP) ## compare every backend with the model in 500 long runs (EXAMPLES=n: in n)
	@STATE_MACHINE_EXAMPLES=$(or $(EXAMPLES),500) $(BIN)/python -m pytest -q -n 2 -m deep tests/properties

coverage: $(STAMP) ## run the tests and fail below the coverage floor of pyproject.toml
	@rm -f .coverage .coverage.*
	@$(IN_MEMORY) COVERAGE_PROCESS_START=pyproject.toml $(BIN)/python -m coverage run -m pytest -q -n $(WORKERS) \
		--dist loadfile --no-loadscope-reorder -o tmp_path_retention_policy=failed
	@$(BIN)/python -m coverage combine -q
	@$(BIN)/python -m coverage report

mutants: $(STAMP) ## break omniq on purpose and see which test notices
	@$(BIN)/python tests/mutants/run.py

chaos: $(STAMP) ## kill, stop and restart everything, on every backend (HOURS=n: repeat for n hours)
	@HOURS=$(HOURS) $(BIN)/python -m chaos

bank: $(STAMP) ## move money in transactions of tasks, under kills, restarts, failovers and restores
	@$(BIN)/python -m chaos.bank $(ARGS)

chaos-peers: $(STAMP) ## kill the workers of other task queues as well, and count what is lost
	@$(BIN)/python -m chaos.peers $(ARGS)

soak: $(STAMP) ## MINUTES=60 of calm work and harm on SQLite: does anything grow?
	@$(BIN)/python -m chaos.soak $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

bench: $(STAMP) ## measure omniq beside the bare drivers (PEERS=1: and beside other queues)
	@$(BIN)/python -m benchmarks $(if $(PEERS),--peers) $(ARGS)

powercut: $(STAMP) ## cut the power of a disk again and again (needs root)
	@$(BIN)/python -m tests.faults.powercut

syscalls: $(STAMP) ## make single system calls fail (needs strace)
	@$(BIN)/python -m tests.faults.syscalls

screenshots: $(STAMP) ## take the pictures of the dashboard in docs/ (needs Chromium)
	@$(BIN)/python -m tests.browser.screenshots

format: $(STAMP) ## format the code and fix what ruff can fix
	@$(BIN)/ruff check -q --fix-only .
	@$(BIN)/ruff format -q .

package: $(STAMP) ## build wheel and sdist, check them, and install them on every Python from 3.11 that is here
	@rm -rf dist
	@$(BIN)/python -m build -q --installer uv --outdir dist/packages .
	@$(BIN)/python -m build -q --installer uv --wheel --outdir dist/packages distributions/omniq-contract
	@$(BIN)/python -m twine check --strict dist/packages/*
	@$(BIN)/python -m tests.install_packages dist/packages

sbom: $(STAMP) ## write the bill of materials of a plain installation to dist/sbom.json
	@rm -rf $(VENV)/sbom && $(BIN)/python -m venv --without-pip $(VENV)/sbom
	@$(BIN)/uv pip install -q --python $(VENV)/sbom/bin/python .
	@mkdir -p dist && $(BIN)/cyclonedx-py environment --of JSON -o dist/sbom.json --pyproject pyproject.toml $(VENV)/sbom/bin/python
	@echo 'dist/sbom.json'

audit: $(VENV)/audit/.installed ## known vulnerabilities, unsafe code, unsafe workflows (exit code 3: could audit nothing)
	@$(BIN)/python -m tests.audit $(VENV)/audit/bin

$(VENV)/audit/.installed: $(STAMP) requirements/audit.txt
	@rm -rf $(VENV)/audit && $(BIN)/python -m venv --without-pip $(VENV)/audit
	@$(BIN)/uv pip install -q --python $(VENV)/audit/bin/python --require-hashes -r requirements/audit.txt
	@touch $@

requirements: $(STAMP) ## pin the newest versions of all dependencies, with hashes, in requirements/
	@$(COMPILE) --upgrade --extra dev -o requirements/dev.txt pyproject.toml
	@$(COMPILE) --upgrade -o requirements/core.txt pyproject.toml
	@$(COMPILE) --upgrade -o requirements/uv.txt requirements/uv.in
	@$(COMPILE) --upgrade -o requirements/audit.txt requirements/audit.in

clean: ## remove everything that was built
	@rm -rf $(VENV) benchmarks/.environments build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The versions in requirements/ are those that CI has tested. An interpreter or platform that they
# have no wheels for gets the newest ones that pyproject.toml allows, unless PINNED is set, as in CI. uv
# is fast, pip is always there.
$(STAMP): pyproject.toml requirements/dev.txt src/omniq/_version.py
	@if [ -z '$(PYTHON)' ]; then \
		echo 'omniq needs Python 3.11 or newer with the venv module; none was found on the PATH.' >&2; \
		echo 'Install one, or name it: make PYTHON=/path/to/python3' >&2; exit 1; fi
	@echo 'setting up $(VENV) …'
	@$(BIN)/python -c '' 2>/dev/null || '$(PYTHON)' -m venv --clear $(VENV)
	@{ $(BIN)/python -m pip install -q --require-hashes -r requirements/uv.txt && \
		$(BIN)/uv pip install -q --python $(BIN)/python --require-hashes -r requirements/dev.txt && \
		$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e .; } >$(VENV)/uv.log 2>&1 || \
		{ if [ -n '$(PINNED)' ]; then cat $(VENV)/uv.log >&2; exit 1; fi; \
		$(BIN)/python -m pip install -q -e '.[dev]'; }
	@touch $@
