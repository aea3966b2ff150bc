# Two commands to start with: make demo, make test. Each line below can also be typed by hand.

PYTHON ?= python3
# As installed before, if something is: "make demo REQUIREMENTS=requirements-cpu.txt" is said once.
REQUIREMENTS ?= $(firstword $(patsubst .venv/installed-%,%,$(wildcard .venv/installed-*)) requirements.txt)
INSTALLED := .venv/installed-$(REQUIREMENTS)

# An older torch to run the tests with. The course's recorded outputs belong to the pinned one.
TORCH ?= 2.11.0

# Ranks share the cores: one thread each.
export OMP_NUM_THREADS = 1

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12
	@echo "Variables: PYTHON=$(PYTHON) TORCH=$(TORCH) REQUIREMENTS=$(REQUIREMENTS) (small CPU builds: requirements-cpu.txt)"

demo: check ## two processes train together on handwritten digits
	.venv/bin/torchrun --standalone --nproc_per_node=2 ddp_basics/train.py
	@echo
	@echo "Two processes have trained one model. What to open next:"
	@echo "  .venv/bin/jupyter lab notebooks   the course: begin with 00_start_here.ipynb"
	@echo "  ddp_basics/README.md              what you just ran, and what to try with it"
	@echo "  make test                         proves what the examples claim"

test: check ## all tests, the notebooks too
	.venv/bin/python -m pytest -n 3

quick: check ## the tests that are not marked slow
	.venv/bin/python -m pytest -n 3 -m "not slow"

test-torch: .venv-$(TORCH)/installed ## all tests but the notebooks, with another torch: TORCH=2.13.0
	.venv-$(TORCH)/bin/python -m pytest -n 3 --ignore=tests/test_notebooks.py

copies: ## bring the files in line that several directories hold
	$(PYTHON) tests/copies.py

lint: $(INSTALLED) ## ruff, over the notebooks too
	.venv/bin/ruff check
	.venv/bin/ruff format --check

notebooks: check ## execute the notebooks and save their outputs
	.venv/bin/python notebooks/execute.py

bench: check ## measure, and write benchmarks/results/
	.venv/bin/python benchmarks/collectives.py
	.venv/bin/python benchmarks/ddp.py
	.venv/bin/python benchmarks/fsdp.py
	.venv/bin/python benchmarks/gpt.py
	.venv/bin/python benchmarks/backend.py
	.venv/bin/python benchmarks/rpc.py
	.venv/bin/python benchmarks/clusters.py

foreign: check ## train 49 models of torchvision and transformers, compare: an hour
	.venv/bin/python tests/foreign/matrix.py --write

mutants: check ## try one-line bugs, each must fail its tests, and record them: an hour
	.venv/bin/python tests/mutants/run.py --write

check: $(INSTALLED) ## what this machine has, what is wrong, what to do
	.venv/bin/python check_environment.py

# Anew whenever a requirements file has changed. The empty file says what is installed. Ray is an
# extra: where there is none for this Python, what needs it says so, and its tests are skipped.
$(INSTALLED): $(wildcard requirements*.txt) | .venv/bin/pip
	.venv/bin/python -m pip install -r $(REQUIREMENTS)
	-.venv/bin/python -m pip install -r requirements-clusters.txt
	@rm -f .venv/installed-*
	@touch $@

# pip finds the torchvision that was made for this torch.
.venv-$(TORCH)/installed: requirements-common.txt | .venv-$(TORCH)/bin/pip
	.venv-$(TORCH)/bin/python -m pip install torch===$(TORCH) torchvision -r requirements-common.txt
	@touch $@

%/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is not Python 3.11 or newer: install one and name it, as in 'make demo PYTHON=python3.12'."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)."; exit 1; }
	$(PYTHON) -m venv $*

.PHONY: help demo test quick test-torch copies lint notebooks bench foreign mutants check
