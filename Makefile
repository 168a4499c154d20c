# Every target does its own set-up in .venv; `make` alone lists the targets.

VENV := .venv
BIN := $(VENV)/bin
# The first of these that fits is used; `make demo PYTHON=/path/to/python3.12` names one.
PYTHON ?= python3.11 python3.12 python3.10 python3
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# tests/support/distribution.py says who runs what; more processes would wait for tests/e2e.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n logical --maxprocesses 4 --no-loadscope-reorder
SERVER := $(VENV)/.stamp-server
DEVELOPMENT := $(VENV)/.stamp-development
BROWSER := $(VENV)/.stamp-browser
LOAD_TOOLS := $(VENV)/load-tools/.stamp
GPU_MACHINE := $(VENV)/gpu-machine/.stamp
STEP = @printf '\n==> %s\n'

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-all soak lint format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(SERVER)  ## set up the server and the client in .venv
	@echo "Installed in $(VENV). Next: make demo, or $(BIN)/inflight --help"

demo: $(SERVER)  ## start a server, stream four counts side by side, stop one, shut down
	@$(BIN)/inflight demo

serve: $(SERVER)  ## serve the demo model, or MODEL=folder or a name on the Hub; more options in ARGS='--http-port 9000'
	@exec $(BIN)/inflight serve $(if $(MODEL),--model '$(MODEL)') $(ARGS)

test: lint  ## every feature once, and the style, in five minutes; PYTEST_ARGS='-n 0 -k name' passes options to pytest
	$(STEP) 'pytest, the fast tests'
	@$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

test-all: test $(LOAD_TOOLS) $(GPU_MACHINE) $(BROWSER)  ## everything, as CI runs it
	$(STEP) 'pytest, the slow tests'
	@$(PYTEST) -m slow $(PYTEST_ARGS)

soak: $(DEVELOPMENT)  ## an hour of mixed load while processes are killed; more options in ARGS='--minutes 10'
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python benchmarks/soak.py --minutes 60 $(ARGS)

lint: $(DEVELOPMENT)  ## style, types and the direction of imports
	$(STEP) 'ruff check'
	@$(BIN)/ruff check .
	$(STEP) 'ruff format --check'
	@$(BIN)/ruff format --check .
	$(STEP) mypy
	@$(BIN)/mypy
	$(STEP) lint-imports
	@$(BIN)/lint-imports

format: $(DEVELOPMENT)  ## rewrite the code in the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove .venv and every cache
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Why an interpreter does not fit, one line; nothing if it does. Any Python can run it.
define PROBE
import glob, os, platform, sys
major_minor = sys.version_info[:2]
name = "%d.%d" % major_minor
if not (3, 10) <= major_minor < (3, 13):
    sys.exit("is Python %s; 3.10, 3.11 or 3.12 is needed" % name)
if sys.platform != "linux" or platform.machine() != "x86_64":
    sys.exit("runs on %s %s; the bundled tritonserver is for Linux x86_64, elsewhere use docker compose"
             % (sys.platform, platform.machine()))
glibc = platform.libc_ver()[1]
if [int(part) for part in glibc.split(".") if part.isdigit()] < [2, 35]:
    sys.exit("uses C library %s; the bundled tritonserver needs glibc 2.35 or newer" % (glibc or "(not glibc)"))
try:
    import ensurepip, venv
except ImportError:
    sys.exit("has no venv module; on Debian and Ubuntu: apt install python%s-venv" % name)
import sysconfig
folders = [sysconfig.get_config_var("LIBDIR") or "", os.path.join(sys.base_prefix, "lib")]
if not any(glob.glob(os.path.join(folder, "libpython%s.so*" % name)) for folder in folders):
    sys.exit("has no shared libpython%s.so, which Triton's Python backend loads; "
             "on Debian and Ubuntu: apt install libpython%s" % (name, name))
endef
export PROBE

$(BIN)/python:
	@reasons=; for python in $(PYTHON); do \
	    if ! command -v "$$python" >/dev/null 2>&1; then reason='is not installed'; \
	    elif reason=$$("$$python" -c "$$PROBE" 2>&1); then \
	        echo "Creating $(VENV) with $$("$$python" --version) ($$python)"; \
	        "$$python" -m venv --clear $(VENV); exit $$?; \
	    fi; \
	    reasons="$$reasons\n  $$python $$reason"; \
	done; \
	printf "No suitable Python was found:$$reasons\nName another one: make PYTHON=/path/to/python3.11\n" >&2; exit 1

# hatchling comes first and pinned, so that building the project itself fetches nothing else.
$(SERVER): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing the server (the first time this downloads several hundred MB and takes minutes)'
	@$(PIP_INSTALL) pip hatchling editables
	@$(PIP_INSTALL) --no-build-isolation -e '.[server,embedded,cpu,openai,kv-events,hub]'
	@touch $@

$(DEVELOPMENT): $(SERVER)
	@echo 'Installing the development tools'
	@$(PIP_INSTALL) --no-build-isolation -e '.[server,embedded,cpu,gpu,guided,openai,kv-events,hub,dev]'
	@touch $@

# For the tests of the live page. CHROMIUM names one that is elsewhere.
$(BROWSER): | $(DEVELOPMENT)
	@if ! command -v "$${CHROMIUM:-chromium}" >/dev/null; then \
	    echo 'Installing chromium for the tests'; \
	    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null || \
	    { echo 'The tests of the page need chromium: apt install chromium, or name one in CHROMIUM' >&2; exit 1; }; \
	fi
	@touch $@

# In folders of their own, which only their processes see: they are no part of the project.
$(LOAD_TOOLS) $(GPU_MACHINE): $(VENV)/%/.stamp: %.txt $(DEVELOPMENT)
	@echo 'Installing $< for the tests'
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $(@D) -r $<
	@touch $@
