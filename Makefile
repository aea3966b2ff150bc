# Start with two commands: make demo, make test. You can also type each line below by hand.

PYTHON ?= python3
# The requirements that are already installed, if any: pass REQUIREMENTS=requirements-cpu.txt once.
REQUIREMENTS ?= $(firstword $(patsubst .venv/installed-%,%,$(wildcard .venv/installed-*)) requirements.txt)
INSTALLED := .venv/installed-$(REQUIREMENTS)
TESTS := .venv/tests-installed

# An older torch to run the tests with. The course's recorded outputs belong to the pinned one.
TORCH ?= 2.11.0

# Ranks share the cores: one thread each.
export OMP_NUM_THREADS = 1

# $(call install,ENVIRONMENT,WHAT) prints one line and logs the rest; on failure it shows the log's end.
# uv takes a fifth of pip's processor time, but ignores pip's settings (mirror, certificate), so pip
# tries if uv fails. Like pip, uv looks for a version in every index that a file names.
export UV_INDEX_STRATEGY = unsafe-best-match
install = echo "installing $(subst -r ,,$(2)) (progress: tail -f $(1)/install.log)"; { { \
	$(1)/bin/python -m pip install uv==0.13.9 && $(1)/bin/python -m uv pip install $(2) || \
	$(1)/bin/python -m pip install $(2); } >$(1)/install.log 2>&1 || { tail -n 15 $(1)/install.log; \
	echo "could not install $(subst -r ,,$(2)): above is the end of $(1)/install.log, the next make tries again"; false; }; }

# The first import of a package writes its bytecode: thousands of tests import torch.
export PYTHONDONTWRITEBYTECODE =

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12
	@echo "Variables: PYTHON=$(PYTHON) TORCH=$(TORCH) REQUIREMENTS=$(REQUIREMENTS) (small CPU builds: requirements-cpu.txt)"

demo: ready ## train one model with two processes on the CPU, on handwritten digits
	.venv/bin/torchrun --standalone --nproc_per_node=2 ddp_basics/train.py --epochs 5 --device cpu
	@echo
	@echo "Two processes have trained one model. What to open next:"
	@echo "  .venv/bin/jupyter lab notebooks   the course: begin with 00_start_here.ipynb"
	@echo "  ddp_basics/README.md              what you just ran, and what to try with it"
	@echo "  make test                         proves what the examples claim"

test: $(TESTS) ready ## run the tests, with the notebooks: about an hour on two cores
	-@$(MAKE) --no-print-directory .venv-emulated/installed
	.venv/bin/python -m pytest -n 4 -m "not release" $(if $(BUDGET),--budget $(BUDGET))

release: $(TESTS) ready ## run the tests that make test leaves out: a quarter of an hour
	-@$(MAKE) --no-print-directory .venv-emulated/installed
	.venv/bin/python -m pytest -n 4 -m release

quick: $(TESTS) ready ## run the quick tests, with an equivalence test of each strategy: minutes
	.venv/bin/python -m pytest -n 3 -p no:nbval -m "quick or not slow"

test-torch: .venv-$(TORCH)/installed ## run all tests but the notebooks with another torch: TORCH=2.13.0
	.venv-$(TORCH)/bin/python -m pytest -n 4 --ignore=tests/test_notebooks.py

copies: ## update the copies of files that several directories hold
	$(PYTHON) tests/copies.py

lint: $(TESTS) ## run ruff, on the notebooks too
	.venv/bin/ruff check
	.venv/bin/ruff format --check

notebooks: ready ## execute the notebooks and save their outputs
	.venv/bin/python notebooks/execute.py

bench: $(TESTS) ready ## run the benchmarks and write benchmarks/results/
	.venv/bin/python benchmarks/collectives.py
	.venv/bin/python benchmarks/ddp.py
	.venv/bin/python benchmarks/fsdp.py
	.venv/bin/python benchmarks/gpt.py
	.venv/bin/python benchmarks/llama.py
	.venv/bin/python benchmarks/backend.py
	.venv/bin/python benchmarks/rpc.py
	.venv/bin/python benchmarks/clusters.py
	.venv/bin/python benchmarks/planner.py

gpu: ## check and measure on a machine with a GPU, with its own torch: up to 46 minutes
	$(or $(wildcard .venv/bin/python),$(PYTHON)) benchmarks/gpu.py

foreign: $(TESTS) ready ## train 49 models of torchvision and transformers and compare: an hour
	.venv/bin/python tests/foreign/matrix.py --write

readme: $(TESTS) ready ## run every command of the READMEs and docstrings as printed: an hour
	.venv/bin/python tests/readme.py --write

mutants: $(TESTS) ready ## try one-line bugs, each of which must fail its tests, and record them: three hours
	.venv/bin/python tests/mutants/run.py --write

check: $(INSTALLED) ## print what this machine has, what is wrong, what to do
	.venv/bin/python check_environment.py

ready: $(INSTALLED) # make check in one word, if nothing is wrong
	.venv/bin/python check_environment.py --brief

# Install again when a requirements file has changed. The empty file says what is installed.
$(INSTALLED): $(REQUIREMENTS) requirements-common.txt | .venv/bin/pip
	@$(call install,.venv,-r $(REQUIREMENTS))
	@rm -f .venv/installed-*
	@touch $@

# Ray and torchft are extras: if this Python has no build of them, their examples say so, and their
# tests are skipped.
$(TESTS): $(INSTALLED) requirements-test.txt requirements-clusters.txt
	@$(call install,.venv,-r requirements-test.txt)
	-@$(call install,.venv,-r requirements-clusters.txt)
	@touch $@

# uv finds the torchvision that was made for this torch.
.venv-$(TORCH)/installed: requirements-common.txt requirements-test.txt | .venv-$(TORCH)/bin/pip
	@$(call install,.venv-$(TORCH),torch===$(TORCH) torchvision -r requirements-common.txt -r requirements-test.txt)
	@touch $@

# A CPU-only torch with emulated GPUs, from pip's sources (uv ignores pip's find-links) or else from
# PyTorch's index. If this fails, the tests that use it are skipped.
.venv-emulated/installed: export UV_FIND_LINKS = $(shell .venv-emulated/bin/pip config get global.find-links 2>/dev/null)
.venv-emulated/installed: requirements-emulated.txt requirements-common.txt requirements-test.txt | .venv-emulated/bin/pip
	@{ $(call install,.venv-emulated,-r requirements-emulated.txt); } >/dev/null || { $(call \
		install,.venv-emulated,-r requirements-emulated.txt --extra-index-url https://download.pytorch.org/whl/cpu); }
	@echo "compiling the emulated GPU"
	@.venv-emulated/bin/python tests/emulated_gpu/build.py
	@touch $@

%/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is not Python 3.11 or newer: install one and name it, as in 'make demo PYTHON=python3.12'."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)."; exit 1; }
	$(PYTHON) -m venv $*

.PHONY: help demo test quick test-torch copies lint notebooks bench gpu foreign readme mutants check ready
