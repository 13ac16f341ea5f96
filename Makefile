# The commands of gradus; `make help` lists them. Each sets up and builds first what it needs.
#   CXX=g++ make test    another compiler (clang++-19 is taken where it is installed)
#   JOBS=8 make test     another number of build jobs (one a core is the default)
#   CONFIG=my.toml ARGS="--memory 400MiB" make run

CONFIG ?= examples/configs/gpt_text.toml
ARGS ?=
JOBS ?= $(shell nproc)

# make's own default for CXX is g++; only a user's choice counts.
ifneq ($(filter default undefined,$(origin CXX)),)
unexport CXX
else
export CXX
endif
# A CMake that scripts/setup.sh had to take from PyPI lies here.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export JOBS

.DEFAULT_GOAL := help
.PHONY: help setup run test build asan coverage format lint clean

help: ## list the commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

setup: ## install what is missing on this machine
	@scripts/setup.sh

run: setup ## train the example language model inside its memory limit
	@scripts/configure.sh dev
	@cmake --build build/dev -j $(JOBS) --target gradus
	build/dev/tools/gradus train $(CONFIG) $(ARGS)

test: setup ## run every test that CI runs
	@scripts/run_tests.sh

build: setup ## build libraries, tools, tests and benchmarks
	@scripts/configure.sh dev
	@cmake --build build/dev -j $(JOBS)

asan: setup ## build and run the tests with AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/configure.sh asan
	@cmake --build build/asan -j $(JOBS)
	ctest --preset asan

coverage: setup ## line coverage of every module (needs scripts/setup.sh --dev)
	@scripts/coverage.sh

format: setup ## format the C++ files
	@scripts/format.sh

lint: setup ## clang-tidy on changed C++ files, ruff, codespell, shellcheck (needs scripts/setup.sh --dev)
	@scripts/lint.sh

clean: ## remove the builds (not .venv, not runs)
	rm -rf build
