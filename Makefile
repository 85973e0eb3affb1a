# Every target works as the first command on a fresh clone: it makes .venv when it is not there yet.
#   make setup TORCH=cuda                 the versions of constraints/cuda.txt instead of constraints/cpu.txt
#   make setup TORCH_INDEX=URL            the package index that torch, and torch alone, comes from
#   make setup EXTRAS=dev,docs,flash      other extras of pyproject.toml
#   make setup-lmeval                     lm-eval-harness in .venv-lmeval, for a test of `spmdrl serve`
#   make setup-verifiers                  verifiers in .venv-verifiers, whose packages clash with those of .venv
#   make setup-sglang                     SGLang too, with its CUDA packages where TORCH=cuda, without them elsewhere
#   make PYTHON=python3.12 ...            the interpreter that .venv is made with
#   make demo ARGS="key=value ..."        overrides of configs/demo.toml; the test targets hand ARGS to pytest
#   make demo TASK=tool                   learn to use a tool; game: a game of several turns; vision: to see; notes: to note; distill: a teacher; pairs: preferences
#   make demo ENGINE=sglang               sampling by SGLang instead of the embedded engine
#   make test-browser CHROMIUM=FILE       a Chromium that is there, instead of the one of constraints/browser.txt
#   make test-gpu DEVICE=emulated         tests/gpu without a GPU, and whole runs; DEVICES=4 for more than 2 devices
#   make test-floor PARTS=test-unit       a part of the tests with the oldest versions
#   make test-newest NEWEST_TESTS=FILE    some of the tests with the newest transformers

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev,docs
TORCH_INDEX ?=
ARGS ?=
ENGINE ?=
TASK ?=
PARTS ?= test-unit test-spmd test-e2e
# Processes that share the tests without ranks, and those whose ranks are short-lived.
WORKERS ?= 2
UNIT_WORKERS ?= 3  # unit tests wait for processes a part of their time
# The oldest versions are tried with the Python of GPU machines, where there is one.
FLOOR_PYTHON ?= $(shell python3.12 -c 'print("python3.12")' 2>/dev/null || echo $(PYTHON))

# Triton for its interpreter, in a folder that test-kernels alone puts on the path: SGLang, torch and transformers take
# an installed Triton for one that has a device.
TRITON := $(VENV)/triton

# The newest transformers, in a folder that test-newest alone puts on the path: SGLang pins the one of .venv.
NEWEST := $(VENV)/newest

# A Chromium for the tests of pages, from a package of npm: without npm and without a Chromium they are skipped.
BROWSER := $(VENV)/browser
CHROMIUM ?= $(if $(shell command -v npm),$(BROWSER)/chromium)
UNPACK_BROWSER := const fs = require("fs"), zlib = require("zlib"); for (const name of [\
  "chromium", "al2023.tar", "swiftshader.tar"]) \
  fs.writeFileSync(name, zlib.brotliDecompressSync(fs.readFileSync("package/bin/" + name + ".br")))

# Environments of their own: the pins of verifiers clash with those of SGLang, a harness brings what nobody else needs,
# and a release needs little.
VERIFIERS := .venv-verifiers
LMEVAL := .venv-lmeval
DIST := .venv-dist

# The choice of `make setup TORCH=...` is remembered by the name of the stamp it leaves.
STAMPS := $(wildcard $(VENV)/.installed-*)
ifndef TORCH
TORCH := $(or $(patsubst $(VENV)/.installed-%,%,$(firstword $(STAMPS))),cpu)
endif
CONSTRAINTS := constraints/$(TORCH).txt
ifeq ($(wildcard $(CONSTRAINTS)),)
$(error TORCH=$(TORCH): there is no $(CONSTRAINTS); use TORCH=cpu or TORCH=cuda)
endif
SITE_CONSTRAINTS := constraints/docs.txt
INSTALLED := $(VENV)/.installed-$(TORCH)
# Two more stamps: SGLang is there, and `make setup` was asked for, which means without it.
WITH_SGLANG := $(VENV)/.with-sglang
LIGHT := $(VENV)/.light
# On a CPU without SGLang's own requirements: they would replace torch by a CUDA build, and bring what no CPU can run.
SGLANG_cpu := --no-deps -r constraints/sglang-cpu.txt
SGLANG_cuda := -c $(CONSTRAINTS) -e '.[$(EXTRAS),sglang]'

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
CHECK_VERSION := import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python %d.%d, but spmdrl needs 3.11 \
  or newer; name one: make setup PYTHON=python3.12" % sys.version_info[:2])
IN_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
PYTEST := $(IN_VENV) python -m pytest --durations=10 $(ARGS)
ONE_THREAD := OMP_NUM_THREADS=1
unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes would each compile the package and the tests again
SHELL_SCRIPTS := $(wildcard launch/*.sh) launch/slurm.sbatch $(wildcard benchmarks/*.sh) .ci/run

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-sglang setup-lmeval test-lmeval setup-verifiers test-verifiers test-trackers sglang-unless-light demo test test-unit test-attack test-kernels test-spmd test-engine \
  test-processes test-e2e test-docs test-browser pictures test-slurm test-levels test-fake-cuda test-long test-floor test-newest test-gpu lint format bench bench-table bench-check dist docs \
  site clean

help: ## list the targets
	@awk -F':[^#]*## ' '/^[a-z0-9-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install spmdrl and its tools into .venv
	@rm -f $(STAMPS)
	@$(MAKE) --no-print-directory $(INSTALLED) TORCH=$(TORCH)
	@test -e $(WITH_SGLANG) || touch $(LIGHT)

setup-sglang: ## the same and SGLang; it needs no GPU
	@$(MAKE) --no-print-directory $(WITH_SGLANG) TORCH=$(TORCH)

setup-lmeval: $(LMEVAL)/.installed ## lm-eval-harness, into .venv-lmeval, for the tests of `spmdrl serve`

# torch first and alone; the versions of .venv for what the two share.
$(LMEVAL)/.installed: constraints/cpu.txt
	@$(PYTHON) -c '$(CHECK_VERSION)'
	test -x $(LMEVAL)/bin/python || $(PYTHON) -m venv $(LMEVAL)
	$(LMEVAL)/bin/python -m pip --disable-pip-version-check install "$$(grep '^torch==' $<)"
	$(LMEVAL)/bin/python -m pip --disable-pip-version-check install $$(grep -E '^(torch|transformers|tokenizers|accelerate|numpy)==' $<) \
	  'lm_eval[api,hf]==0.4.13'
	@touch $@

setup-verifiers: $(VERIFIERS)/.installed ## verifiers, into .venv-verifiers

# The file has all that it needs, so nothing else can come, such as a torch with its CUDA packages.
$(VERIFIERS)/.installed: constraints/verifiers.txt
	@$(PYTHON) -c '$(CHECK_VERSION)'
	test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip --disable-pip-version-check install --no-deps -r $<
	@touch $@

# torch first and alone, so that TORCH_INDEX is asked for nothing else. The constraints go to every later install:
# without them pip would replace this torch by its newest release.
$(INSTALLED): pyproject.toml $(CONSTRAINTS) $(SITE_CONSTRAINTS)
	@$(PYTHON) -c '$(CHECK_VERSION)'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' $(CONSTRAINTS))"
	$(PIP) install -c $(CONSTRAINTS) -c $(SITE_CONSTRAINTS) -e '.[$(EXTRAS)]'
	@rm -f $(STAMPS)
	@touch $@

$(WITH_SGLANG): $(INSTALLED) $(filter constraints/%,$(SGLANG_$(TORCH)))
	$(PIP) install $(SGLANG_$(TORCH))
	@rm -f $(LIGHT)
	@touch $@

$(TRITON): constraints/triton.txt $(INSTALLED)
	rm -rf $@
	$(PIP) install --no-deps --target $@ -r $<
	@touch $@

$(NEWEST): constraints/newest.txt $(INSTALLED)
	rm -rf $@
	$(PIP) install --no-deps --target $@ -r $<
	@touch $@

# `npm pack` fetches the package and runs nothing of it. The libraries go with it, because servers lack them.
$(BROWSER)/chromium: constraints/browser.txt
	rm -rf $(@D) && mkdir -p $(@D)
	cd $(@D) && npm pack --silent "$$(grep '^@' $(CURDIR)/$<)" && tar -xzf *.tgz
	cd $(@D) && node -e '$(UNPACK_BROWSER)' && cat *.tar | tar -xi && rm -r package *.tgz *.tar
	chmod +x $@

# The tests are complete unless the user decided against SGLang.
WITHOUT_SGLANG := "tests/engine is skipped: 'make setup' installed spmdrl without SGLang, and 'make setup-sglang' adds it"
sglang-unless-light: $(INSTALLED)
	@test -e $(LIGHT) || $(MAKE) --no-print-directory $(WITH_SGLANG) TORCH=$(TORCH)

demo: $(if $(filter sglang,$(ENGINE)),$(WITH_SGLANG),$(INSTALLED)) ## train a tiny model on 2 CPU ranks and watch it learn; ARGS="key=value ..."
	$(IN_VENV) $(if $(TASK),TASK=$(TASK) )$(if $(ENGINE),ENGINE=$(ENGINE) )bash launch/demo.sh $(ARGS)

test: test-unit test-kernels test-processes ## all tests that need no GPU

# In the order of tests/conftest.py, which has long files first and keeps those with SGLang together.
BY_FILE := --dist loadfile --no-loadscope-reorder
test-unit: $(INSTALLED) ## tests without ranks, in UNIT_WORKERS processes
	$(ONE_THREAD) $(PYTEST) -n $(UNIT_WORKERS) $(BY_FILE) -m "not slow" \
	  --ignore-glob='*/test_triton*.py' tests/unit

test-attack: $(INSTALLED) ## programs and answers that attack the sandbox
	$(ONE_THREAD) $(PYTEST) -n $(WORKERS) $(BY_FILE) -m "not slow" tests/attack

test-kernels: $(if $(filter cpu,$(TORCH)),$(TRITON)) $(INSTALLED) ## tests of Triton kernels, in its interpreter
	PYTHONPATH="$(CURDIR)/$(TRITON):$$PYTHONPATH" $(PYTEST) -n $(WORKERS) --dist loadfile tests/unit/test_triton*.py

test-spmd: $(INSTALLED) ## tests on 2 and 4 gloo ranks, two files at a time
	$(ONE_THREAD) $(PYTEST) -n $(WORKERS) $(BY_FILE) -m "not slow" tests/spmd

test-engine: sglang-unless-light ## tests with SGLang itself
	@if test -e $(LIGHT); then \
	  echo $(WITHOUT_SGLANG); \
	else \
	  set -x; $(ONE_THREAD) $(PYTEST) -m "not slow" tests/engine; \
	fi

test-e2e: $(INSTALLED) ## whole runs from the command line, two files at a time
	$(ONE_THREAD) $(PYTEST) -n $(WORKERS) $(BY_FILE) -m "not slow" tests/e2e

test-processes: sglang-unless-light ## attack, spmd, engine and e2e in one run, whose workers import torch once
	@test ! -e $(LIGHT) || echo $(WITHOUT_SGLANG)
	$(ONE_THREAD) $(PYTEST) -n $(WORKERS) $(BY_FILE) -m "not slow" \
	  $$(test -e $(LIGHT) || echo tests/engine) tests/attack tests/e2e tests/spmd

test-docs: $(INSTALLED) ## every command and example of the documentation, and its site
	$(ONE_THREAD) $(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow" tests/docs

test-browser: $(CHROMIUM) $(INSTALLED) ## pages in a real browser
	@if test -z "$(CHROMIUM)"; then \
	  echo "tests/browser is skipped: there is no npm to install Chromium with; CHROMIUM=FILE names one that is there"; \
	else \
	  set -x; CHROMIUM="$(abspath $(CHROMIUM))" $(PYTEST) tests/browser; \
	fi

pictures: $(CHROMIUM) $(INSTALLED) ## draw the pictures in docs/images that show recorded runs
	CHROMIUM="$(abspath $(CHROMIUM))" PICTURES=docs/images $(PYTEST) tests/browser/test_compare_page.py

test-lmeval: $(LMEVAL)/.installed $(INSTALLED) ## lm-eval-harness against `spmdrl serve`; test-long has it where it is installed
	$(ONE_THREAD) $(PYTEST) -m slow tests/e2e/test_lm_eval.py

test-verifiers: $(VERIFIERS)/.installed $(INSTALLED) ## episodes of verifiers itself; test-long has them where it is installed
	$(ONE_THREAD) $(PYTEST) tests/unit/test_verifiers.py

# Each in a folder of its own, which the tests put on the path: their requirements clash.
$(VENV)/trackers/%: $(INSTALLED)
	$(PIP) install --quiet --target $@.part $*
	mv $@.part $@

test-trackers: $(addprefix $(VENV)/trackers/,wandb trackio mlflow swanlab) ## trackers' own files; test-long has them where they are installed
	$(ONE_THREAD) $(PYTEST) tests/unit/test_trackers.py

test-slurm: $(INSTALLED) ## launch/slurm.sbatch on SLURM itself, where its packages are; SLURM_REPORT=FILE gets what happened
	$(ONE_THREAD) $(PYTEST) tests/slurm

# In an environment with the CUDA build of torch: make VENV=.venv-cuda TORCH=cuda EXTRAS=dev setup
test-fake-cuda: ## torch's CUDA build on stand-ins for CUDA's libraries; test-long has it where .venv-cuda is
	@if test -x .venv-cuda/bin/python; then \
	  set -x; $(ONE_THREAD) .venv-cuda/bin/python -m pytest $(ARGS) tests/fake_cuda; \
	else \
	  echo "tests/fake_cuda is skipped: there is no .venv-cuda with the CUDA build of torch"; \
	fi

test-long: sglang-unless-light test-docs test-browser test-slurm test-levels test-fake-cuda test-floor test-newest ## the tests that `make test` leaves out because they take minutes
	$(ONE_THREAD) $(PYTEST) -m slow tests/unit tests/docs tests/attack tests/spmd tests/engine tests/e2e || test $$? -eq 5  # 5: there are none

test-levels: $(INSTALLED) ## tests whose numbers depend on the processor, with AVX2, with AVX-512 and as it is
	$(ONE_THREAD) $(IN_VENV) python -m tests.helpers.levels $(ARGS)

test-floor: ## the oldest versions that pyproject.toml allows, in .venv-floor; without SGLang and the site's packages
	$(MAKE) --no-print-directory VENV=.venv-floor TORCH=floor PYTHON=$(FLOOR_PYTHON) EXTRAS=dev $(PARTS)

NEWEST_TESTS ?= tests/unit tests/spmd
test-newest: $(NEWEST) ## test-unit and test-spmd with the newest transformers that pyproject.toml allows
	PYTHONPATH="$(CURDIR)/$(NEWEST):$$PYTHONPATH" $(ONE_THREAD) $(PYTEST) -n $(WORKERS) --dist loadfile -m "not slow" \
	  --ignore-glob='*/test_triton*.py' $(NEWEST_TESTS)

# DEVICE=emulated: without a GPU, on DEVICES devices of tests/emulated_cuda, which a C++ compiler builds. Triton's
# interpreter is slow: tests of kernels alone have it, the others twins of kernels in torch. Whole runs start their
# devices themselves, beside one rank on the CPU. TESTS="FILE ..." takes a part, and ARGS="-k ..." of these.
DEVICES ?= 2
EMULATED_RUNS := tests/e2e/test_emulated_runs.py
TESTS ?= tests/gpu $(if $(filter emulated,$(DEVICE)),$(EMULATED_RUNS))
WHOLE_RUNS := $(filter $(EMULATED_RUNS)%,$(TESTS))
GPU_TESTS := $(filter-out $(WHOLE_RUNS),$(TESTS))
EMULATED := $(ONE_THREAD) TRITON_INTERPRET=1 EMULATED_CUDA_DEVICES=$(DEVICES) \
  PYTHONPATH="$(CURDIR)/tests/emulated_cuda/startup:$(CURDIR)/$(TRITON):$$PYTHONPATH"
ON_EMULATED := $(PYTEST) --timeout=1800
NONE_IS_FINE := || test $$? -eq 5

ifeq ($(DEVICE),emulated)
test-gpu: $(TRITON) $(INSTALLED)
	$(if $(GPU_TESTS),$(EMULATED) EMULATED_CUDA_PLAIN_KERNELS=1 $(ON_EMULATED) -m "not kernels" $(GPU_TESTS) $(NONE_IS_FINE))
	$(if $(GPU_TESTS),$(EMULATED) $(ON_EMULATED) -m kernels $(GPU_TESTS) $(NONE_IS_FINE))
	$(if $(WHOLE_RUNS),$(ONE_THREAD) $(ON_EMULATED) $(WHOLE_RUNS) $(NONE_IS_FINE))
else
test-gpu: $(INSTALLED) ## tests that need a CUDA device; DEVICE=emulated does without one
	$(PYTEST) $(TESTS) $(NONE_IS_FINE)
endif

lint: $(INSTALLED) ## ruff, mypy, shellcheck
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) mypy
	$(IN_VENV) shellcheck $(SHELL_SCRIPTS)

format: $(INSTALLED) ## let ruff lay out the code and fix what it can
	$(IN_VENV) ruff check --fix .
	$(IN_VENV) ruff format .

bench: $(INSTALLED) ## measure the rows of README.md again; ARGS="NAME ..." measures others
	$(IN_VENV) bash benchmarks/run.sh $(ARGS)

bench-table: $(INSTALLED) ## put what was measured into README.md and docs/benchmarks.md
	$(IN_VENV) python benchmarks/check.py --write

bench-check: $(INSTALLED) ## do README.md and docs/benchmarks.md show what was measured?
	$(IN_VENV) python benchmarks/check.py

# build and twine alone: a wheel is made of files, and imports nothing.
$(DIST)/.installed: $(CONSTRAINTS)
	@$(PYTHON) -c '$(CHECK_VERSION)'
	test -x $(DIST)/bin/python || $(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip --disable-pip-version-check install -c $< build twine
	@touch $@

dist: $(DIST)/.installed ## build the sdist and the wheel of a release into dist/, and check them; it needs no .venv
	rm -rf dist build *.egg-info
	$(DIST)/bin/python -m build --outdir dist .
	$(DIST)/bin/python -m twine check --strict dist/*

docs: $(INSTALLED) ## write what is generated from the code into docs/ and configs/
	$(VENV)/bin/python -m tests.gpu.proof.gpu_report
	$(VENV)/bin/python -m docs.gen.config_reference > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md
	$(VENV)/bin/python -m docs.gen.algorithms_reference > docs/algorithms.md.new
	mv docs/algorithms.md.new docs/algorithms.md
	$(VENV)/bin/python -m docs.gen.tools_reference > docs/tools.md.new
	mv docs/tools.md.new docs/tools.md
	$(VENV)/bin/python -m docs.gen.predictions
	$(VENV)/bin/python -m docs.gen.models_reference

# The variable: mkdocs-material would print that mkdocs 2 will not do.
site: $(INSTALLED) ## the documentation as a site that needs no network, in site/
	$(IN_VENV) NO_MKDOCS_2_WARNING=1 python -m mkdocs build --clean
	@echo "open site/index.html, or serve it: python -m http.server -b 127.0.0.1 -d site"

clean: ## remove caches and build products; .venv and runs/ stay
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
