# Two commands to start with: make demo, make test. Each line below can also be typed by hand.

PYTHON ?= python3
# As installed before, if something is: "make demo REQUIREMENTS=requirements-cpu.txt" is said once.
REQUIREMENTS ?= $(firstword $(patsubst .venv/installed-%,%,$(wildcard .venv/installed-*)) requirements.txt)
INSTALLED := .venv/installed-$(REQUIREMENTS)
TESTS := .venv/tests-installed

# An older torch to run the tests with. The course's recorded outputs belong to the pinned one.
TORCH ?= 2.11.0

# Ranks share the cores: one thread each.
export OMP_NUM_THREADS = 1

# $(call install,ENVIRONMENT,WHAT) prints one line and logs the rest; on failure it shows the log's end.
# uv takes a fifth of pip's processor time, but reads none of pip's settings (mirror, certificate):
# where uv fails, pip tries. Like pip, uv looks for a version in every index that a file names.
export UV_INDEX_STRATEGY = unsafe-best-match
install = echo "installing $(subst -r ,,$(2)) (progress: tail -f $(1)/install.log)"; { { \
	$(1)/bin/python -m pip install uv==0.13.9 && $(1)/bin/python -m uv pip install $(2) || \
	$(1)/bin/python -m pip install $(2); } >$(1)/install.log 2>&1 || { tail -n 15 $(1)/install.log; \
	echo "could not install $(subst -r ,,$(2)): above is the end of $(1)/install.log, the next make tries again"; false; }; }

# uv leaves bytecode to the first import, which is quicker for one demo, but not for thousands of tests
# where PYTHONDONTWRITEBYTECODE is set. (Some packages hold files that are no Python.)
compile = echo "compiling bytecode"; $(1)/bin/python -m compileall -qq -j 0 $(1)/lib || true

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12
	@echo "Variables: PYTHON=$(PYTHON) TORCH=$(TORCH) REQUIREMENTS=$(REQUIREMENTS) (small CPU builds: requirements-cpu.txt)"

demo: ready ## two processes train together on handwritten digits
	.venv/bin/torchrun --standalone --nproc_per_node=2 ddp_basics/train.py --epochs 5
	@echo
	@echo "Two processes have trained one model. What to open next:"
	@echo "  .venv/bin/jupyter lab notebooks   the course: begin with 00_start_here.ipynb"
	@echo "  ddp_basics/README.md              what you just ran, and what to try with it"
	@echo "  make test                         proves what the examples claim"

test: $(TESTS) ready ## all tests, the notebooks too
	-@$(MAKE) --no-print-directory .venv-emulated/installed
	.venv/bin/python -m pytest -n 3

quick: $(TESTS) ready ## what takes little time, an equivalence test of each strategy among it
	.venv/bin/python -m pytest -n 2 -m "quick or not slow"

test-torch: .venv-$(TORCH)/installed ## all tests but the notebooks, with another torch: TORCH=2.13.0
	.venv-$(TORCH)/bin/python -m pytest -n 3 --ignore=tests/test_notebooks.py

copies: ## bring the files in line that several directories hold
	$(PYTHON) tests/copies.py

lint: $(TESTS) ## ruff, over the notebooks too
	.venv/bin/ruff check
	.venv/bin/ruff format --check

notebooks: ready ## execute the notebooks and save their outputs
	.venv/bin/python notebooks/execute.py

bench: $(TESTS) ready ## measure, and write benchmarks/results/
	.venv/bin/python benchmarks/collectives.py
	.venv/bin/python benchmarks/ddp.py
	.venv/bin/python benchmarks/fsdp.py
	.venv/bin/python benchmarks/gpt.py
	.venv/bin/python benchmarks/backend.py
	.venv/bin/python benchmarks/rpc.py
	.venv/bin/python benchmarks/clusters.py
	.venv/bin/python benchmarks/planner.py

gpu: ## on a machine with a GPU: check and measure for 30 minutes, with what is installed there
	$(or $(wildcard .venv/bin/python),$(PYTHON)) benchmarks/gpu.py

foreign: $(TESTS) ready ## train 49 models of torchvision and transformers, compare: an hour
	.venv/bin/python tests/foreign/matrix.py --write

readme: $(TESTS) ready ## run every command of the READMEs and docstrings as printed: an hour
	.venv/bin/python tests/readme.py --write

mutants: $(TESTS) ready ## try one-line bugs, each must fail its tests, and record them: an hour
	.venv/bin/python tests/mutants/run.py --write

check: $(INSTALLED) ## what this machine has, what is wrong, what to do
	.venv/bin/python check_environment.py

ready: $(INSTALLED) # the same, in one word if nothing is wrong
	.venv/bin/python check_environment.py --brief

# Anew whenever a requirements file has changed. The empty file says what is installed.
$(INSTALLED): $(REQUIREMENTS) requirements-common.txt | .venv/bin/pip
	@$(call install,.venv,-r $(REQUIREMENTS))
	@rm -f .venv/installed-*
	@touch $@

# Ray and torchft are extras: where there is none for this Python, their examples say so, and their
# tests are skipped.
$(TESTS): $(INSTALLED) requirements-test.txt requirements-clusters.txt
	@$(call install,.venv,-r requirements-test.txt)
	-@$(call install,.venv,-r requirements-clusters.txt)
	@$(call compile,.venv)
	@touch $@

# uv finds the torchvision that was made for this torch.
.venv-$(TORCH)/installed: requirements-common.txt requirements-test.txt | .venv-$(TORCH)/bin/pip
	@$(call install,.venv-$(TORCH),torch===$(TORCH) torchvision -r requirements-common.txt -r requirements-test.txt)
	@$(call compile,.venv-$(TORCH))
	@touch $@

# A CPU-only torch with emulated GPUs, from where pip finds it (uv does not read where pip looks for
# wheels) or else from PyTorch's index. Where this fails, the tests that use it are skipped.
.venv-emulated/installed: export UV_FIND_LINKS = $(shell .venv-emulated/bin/pip config get global.find-links 2>/dev/null)
.venv-emulated/installed: requirements-emulated.txt requirements-common.txt requirements-test.txt | .venv-emulated/bin/pip
	@{ $(call install,.venv-emulated,-r requirements-emulated.txt); } >/dev/null || { $(call \
		install,.venv-emulated,-r requirements-emulated.txt --extra-index-url https://download.pytorch.org/whl/cpu); }
	@$(call compile,.venv-emulated)
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
