# The targets of this repository. `make` alone lists them; each one installs what it needs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
TESTS ?= tests
BENCH ?= engine --adapters docs/examples/adapters --distinct 4 --json
BASE_MODEL = from services.localstack.base_model import ensure_base_model; from services.process.settings import default_cache_dir; \
	print(ensure_base_model(default_cache_dir()))

# Hard links if the cache is on the same file system, otherwise copies; byte code is compiled on first import.
export UV_LINK_MODE ?= hardlink
export UV_COMPILE_BYTECODE ?= 0
export UV_SYSTEM_CERTS ?= 1
export UV_HTTP_TIMEOUT ?= 300
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# uv does not read pip's configuration, so pass on a mirror that is set there.
FOLLOW_PIP = pip_setting() { $(BIN)/python -m pip config get global.$$1 2>/dev/null || true; }; \
	mirror="$${PIP_INDEX_URL:-$$(pip_setting index-url)}"; \
	if [ -n "$$mirror" ] && [ -z "$${UV_DEFAULT_INDEX:-}$${UV_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="$$mirror"; fi

.PHONY: help demo test lint fmt bench faults adapters kernels-full kernels-compiled gpu-check up down reference requirements clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'

demo: $(VENV)/.local ## install everything and run the demo of the whole product
	@$(BIN)/loraq demo

up: $(VENV)/.local ## start the embedded stack: Kafka, Postgres, S3
	@$(BIN)/loraq up

down: $(VENV)/.local ## stop the embedded stack
	@$(BIN)/loraq down

# OpenMP threads that spin while they wait slow down everything else on the machine many times.
PASSIVE_THREADS = OMP_WAIT_POLICY=passive
# Most tests wait for servers, so two processes share the suite, each with its own servers; a file stays in one process.
IN_PARALLEL = -n 2 --dist loadfile --no-loadscope-reorder
test: lint ## run every gate, then the test suite; TESTS=tests/schemas runs a part
	$(PASSIVE_THREADS) $(BIN)/python -m pytest $(if $(filter tests,$(TESTS)),$(IN_PARALLEL)) $(TESTS)

lint: $(VENV)/.dev ## check style, formatting, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(VENV)/.dev ## format the code and apply the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.local ## measure the engine; BENCH="engine --distinct 0 --json" sets the command, LORAQ_BASE_MODEL the model
	@export LORAQ_BASE_MODEL="$${LORAQ_BASE_MODEL:-$$($(BIN)/python -c '$(BASE_MODEL)')}"; $(BIN)/loraq bench $(BENCH)

faults: $(VENV)/.dev ## run every fault on real servers and write docs/reliability.md; FAULTS="2,4" SEEDS=1 FIRST_SEED=3 JOBS=100, MUTANTS=1
	$(BIN)/python -m tests.faults $(if $(FAULTS),--faults "$(FAULTS)") $(if $(SEEDS),--seeds $(SEEDS)) \
		$(if $(FIRST_SEED),--first-seed $(FIRST_SEED)) $(if $(JOBS),--jobs $(JOBS)) $(if $(MUTANTS),--mutants)

adapters: $(VENV)/.dev ## train the example adapters again and score them (about ten minutes on two cores)
	$(PASSIVE_THREADS) $(BIN)/python docs/examples/adapters/train.py

kernels-full: $(VENV)/.dev ## test the CUDA kernels in full: every case in the interpreter, every launch compiled (half an hour)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 KERNEL_GRID=full $(BIN)/python -m pytest -q --timeout 300 tests/engine/kernels/triton/grid
	@$(MAKE) kernels-compiled

kernels-compiled: $(VENV)/.dev ## compile every launch of the CUDA kernels for sm_80, sm_90 and sm_100 and read the machine code
	KERNEL_GRID=full $(BIN)/python -m pytest -q --timeout 3600 tests/engine/kernels/triton/measure/test_compiled.py

# Uses the installed Python with its packages instead of the virtual environment: GPU machines come with their own torch.
gpu-check: ## check and measure kernels and engine on this machine's GPU; ONLY="tests kernels" runs parts; exits with 2 without a GPU
	@python="$${PYTHON:-python3}"; "$$python" engine/check/requirements.py; \
	"$$python" -m engine.check.gpu $(foreach part,$(ONLY),--only $(part))

reference: $(VENV)/.dev ## write docs/reference, docs/configuration.md and docs/errors.md from the code
	$(BIN)/python -m schemas.export docs/reference
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/folders.py

COMPILE = $(UV) pip compile pyproject.toml --excludes requirements/excludes.txt --no-emit-index-url --no-annotate \
	--no-header --python-version 3.11 --upgrade --quiet
requirements: $(VENV)/.uv ## recompile the pinned requirements from pyproject.toml
	@$(FOLLOW_PIP); \
	$(COMPILE) -o requirements/runtime.txt; \
	$(COMPILE) --extra local --constraint requirements/runtime.txt -o requirements/local.txt; \
	$(COMPILE) --extra local --extra dev --constraint requirements/local.txt -o requirements/dev.txt
	@wc -l requirements/*.txt

clean: ## remove files left by builds and tools; keep the environment and the stack's data
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .bench
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

# Each stamp file marks a finished step, so that a second run skips it.
$(VENV)/.uv: requirements/bootstrap.txt
	@for candidate in "$${CXX:-g++}" g++ c++ clang++; do command -v "$$candidate" >/dev/null && exit 0; done; \
		echo "make: no C++ compiler found; install g++ 12 or newer (Debian: apt-get install g++)," \
			"or name one: make CXX=/path/to/clang++" >&2; exit 1
	@found=""; for candidate in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "make: Python 3.11 or newer is needed; found $$(python3 --version 2>&1 || true)." \
			"Install it, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; fi; \
	echo "==> creating $(VENV) with $$("$$found" --version)"; \
	[ -x $(BIN)/python ] || "$$found" -m venv $(VENV) || \
		{ echo "make: $$found cannot create an environment; install its venv module (Debian: apt-get install python3-venv)" >&2; \
		rm -rf $(VENV); exit 1; }
	@$(BIN)/python -m pip install --quiet --requirement requirements/bootstrap.txt
	@touch $@

# The development pins include the local ones; if they are installed, there is nothing left to install.
$(VENV)/.packages-local: requirements/local.txt requirements/excludes.txt $(VENV)/.uv
	@if [ $(VENV)/.packages-dev -nt requirements/local.txt ]; then touch $@; exit 0; fi; \
	echo "==> installing the pinned packages (mostly PyTorch; takes some minutes without a cache)"; \
	$(FOLLOW_PIP); $(UV) pip install --python $(BIN)/python --excludes requirements/excludes.txt -r requirements/local.txt
	@touch $@

$(VENV)/.packages-dev: requirements/dev.txt requirements/excludes.txt $(VENV)/.uv
	@echo "==> installing the pinned packages and the test tools (mostly PyTorch; takes some minutes without a cache)"
	@$(FOLLOW_PIP); $(UV) pip install --python $(BIN)/python --excludes requirements/excludes.txt -r requirements/dev.txt
	@touch $@

$(VENV)/.local: pyproject.toml $(VENV)/.packages-local
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.packages-dev
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@
