# Everything is set up in $(VENV); nothing is installed outside it. Targets: demo, test, docs, lint, format, asan, tsan, clean.
# TORCH is pip's argument for torch, e.g. make test TORCH="torch --index-url <a CPU-only index>".
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc)

BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)
CPP_FILES = $(shell git ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cuh' '*.cu' | sort -u)
LIBRARY_FILES := $(shell find CMakeLists.txt pyproject.toml cmake include src bindings python -type f -not -name '*.pyc')

.PHONY: test demo docs lint format cpp-test asan tsan python-test clean

test: lint cpp-test asan python-test
	@echo "make test: lint, C++ tests (release), C++ tests (asan), Python tests: all passed"

## Environment: each stamp is younger than what it was made from.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python >= 3.10 is needed (PYTHON=...)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no venv module: apt-get install python3-venv"; exit 1; }

$(VENV)/tools.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --group dev
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet $(TORCH)
	@touch $@

# Built without isolation in a kept directory, so that only what changed is compiled.
$(VENV)/package.stamp: $(LIBRARY_FILES) $(VENV)/tools.stamp
	$(BIN)/pip install --quiet --no-build-isolation --config-settings=build-dir=build/python '.[cli]'
	@touch $@

## C++
build/%/build.ninja: CMakePresets.json $(VENV)/tools.stamp
	cmake --preset $*
	@touch $@

cpp-test: build/release/build.ninja
	cmake --build --preset release --parallel $(JOBS)
	ctest --preset release --parallel $(JOBS)

asan tsan: %: build/%/build.ninja
	cmake --build --preset $@ --parallel $(JOBS)
	ctest --preset $@ --parallel $(JOBS)

## Python
python-test: $(VENV)/package.stamp
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest

demo: $(VENV)/package.stamp
	$(BIN)/fold-attention demo --output out

lint: $(VENV)/package.stamp
	@echo "clang-format --dry-run"; clang-format --dry-run --Werror $(CPP_FILES)
	ruff check .
	ruff format --check .
	mypy

format: $(VENV)/tools.stamp
	@clang-format -i $(CPP_FILES)
	ruff check --fix .
	ruff format .

## API reference, from docstrings (build/docs/python) and headers (build/docs/cpp)
docs: $(VENV)/package.stamp
	@command -v doxygen >/dev/null || { echo "no doxygen: apt-get install doxygen"; exit 1; }
	$(BIN)/pip install --quiet --group docs
	@mkdir -p build/docs
	$(BIN)/pdoc --docformat google --output-directory build/docs/python fold_attention
	doxygen docs/Doxyfile

clean:
	rm -rf build $(VENV)
