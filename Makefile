# Everything starts here. `make train` and `make test` set up what they need and can be interrupted and run again.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BOOT := .venv-uv
UV := $(shell command -v uv 2>/dev/null || echo $(BOOT)/bin/uv)
EXTRA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
RUN := $(VENV)/bin

# Without its bytecode every process compiles torch, vLLM and Ray anew: seconds of CPU each.
unexport PYTHONDONTWRITEBYTECODE
# Once, when the environment is made: otherwise the first run spends most of a minute on it. uv would look at every file each time.
COMPILE := $(if $(wildcard $(VENV)/pyvenv.cfg),,--compile-bytecode)

# uv shows its progress in pages of package names only, so the minutes are counted while it makes the environment.
MINUTES := $(if $(wildcard $(VENV)/pyvenv.cfg),,$(shell seq 60))

.PHONY: setup environment train test check house docs site e2e slow bench bundle chaos clean

$(BOOT)/bin/uv:
	@echo "installing uv into $(BOOT)"
	@$(PYTHON) -m venv $(BOOT) && $(BOOT)/bin/pip install --quiet --disable-pip-version-check uv

environment: $(UV)
	@echo "$(if $(wildcard $(VENV)/pyvenv.cfg),checking the python environment ($(EXTRA)) against uv.lock,making the python environment ($(EXTRA)); with empty caches this takes some minutes)"
	@(for minute in $(MINUTES); do sleep 60 >/dev/null 2>&1; echo "still making it: $$minute min"; done) & \
		clock=$$!; trap "kill $$clock 2>/dev/null" EXIT; \
		UV_LINK_MODE=$${UV_LINK_MODE:-hardlink} $(UV) sync --locked --quiet --extra $(EXTRA) --group dev $(COMPILE)

# Temporal's server is compiled while the Python environment is downloaded, if there is a Python 3.11. `ratchet admin setup` waits for it.
ENVIRONMENT = $(MAKE) --no-print-directory environment
setup:
	@($(PYTHON) -c "from enum import StrEnum" 2>/dev/null && exec $(PYTHON) -m stack.temporal_server) & build=$$!; trap "kill $$build 2>/dev/null; wait" EXIT; \
		$(ENVIRONMENT) && $(RUN)/ratchet admin setup

# One clock for the progress of all commands below, so that the last line shows the total.
train: export RATCHET_STARTED := $(shell date +%s)
train: setup
	@$(RUN)/ratchet train configs/quickstart.yaml

check: environment
	@$(RUN)/ruff format --check . && $(RUN)/ruff check . && $(RUN)/mypy && $(RUN)/lint-imports
	@$(RUN)/python tests/house.py --list
	@$(RUN)/python scripts/generate_pages.py --check

# Sizes, names and prose of the product's packages against the limits of CONTRIBUTING.md.
house: environment
	@$(RUN)/python tests/house.py --list

# Pages that are generated from the code.
docs: environment
	@$(RUN)/python scripts/generate_pages.py

# The same pages as a site; open .site/index.html.
site: docs
	@$(RUN)/zensical build --strict

# In the order of collection, not of the number of tests: files that wait for long come first, and the short ones of the
# unit tests fill the end. Four workers on two cores, since many of the tests wait.
WORKERS ?= 4
test: setup
	@$(RUN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 30 tests/integration tests/unit tests/replay --ignore tests/integration/workflows -m "not slow"

# Whole rollouts, on two stacks at a time since they wait for most of it: first with a scripted engine and everything
# else real, then a run whose stack is upgraded beside real agents and real containers, then the whole stack. A broken
# stack fails each test after minutes, so the third failure is the last that is waited for.
E2E = $(RUN)/pytest --maxfail 3 -n 2 --dist loadfile --durations 20
e2e: setup
	@$(E2E) tests/integration/workflows
	@$(E2E) --no-loadscope-reorder tests/upgrade tests/e2e -m "not slow"

# The real vLLM's weight update, a killed rank under the real Ray, a launch over two network namespaces and a chain of SLURM jobs, one
# after the other: twenty minutes, by hand.
slow: setup
	@$(RUN)/pytest tests/integration tests/e2e -m slow

# Without those that need a GPU: `python -m tests.benchmarks.gpu` and `gpu_loop`.
bench: setup
	@failed=; for one in $$($(RUN)/ratchet admin bench | cut -d' ' -f1 | grep -v '^gpu'); do \
		$(RUN)/ratchet admin bench $$one > docs/bench/.new && mv docs/bench/.new docs/bench/$$one.json \
		|| { failed=1; rm -f docs/bench/.new; echo "$$one failed; docs/bench keeps its earlier file"; }; done; [ -z "$$failed" ]

# What scripts/one_gpu.sh needs on a bare machine with a GPU and without a network; the script says how it is run.
bundle: setup
	@UV=$(UV) PYTHON=$(PYTHON) scripts/bundle.sh

# Every fault of the recovery table, in the order that SEED draws; exit code 1 if one of them lost or doubled something.
SEED ?= 0
chaos: setup
	@$(RUN)/python -m tests.benchmarks.recovery --seed $(SEED) $(if $(FAULTS),--faults "$(FAULTS)")

clean:
	rm -rf .ratchet
