# Two commands are enough: `make reproduce` and `make test`. `make help` lists the rest.
PYTHON ?= python3
BIN := .venv/bin
LAB := .venv/.lab
STAMP := .venv/.installed
export TOKENIZERS_PARALLELISM := false
# Python keeps the modules that it compiled: else every process would compile PyTorch's again, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install reproduce claims test test-all cells test-slow faults fuzz browser processor sample versions test-gpu \
  lab sync outputs docs readme release clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv and install everything (every command installs what it needs)

# What is wrong with $(PYTHON), in one line; empty if nothing is.
AGAIN = make $(or $(MAKECMDGOALS),install) PYTHON=python3.12
PROBLEM = $(shell \
  version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || \
    { echo "$(PYTHON) does not run here; install Python 3.11 to 3.14 or name one: $(AGAIN)"; exit; }; \
  case $$version in (3.11|3.12|3.13|3.14) ;; (*) \
    echo "$(PYTHON) is Python $$version; the kit needs 3.11 to 3.14, for example: $(AGAIN)"; exit;; esac; \
  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
    echo "$(PYTHON) lacks venv; on Debian or Ubuntu: apt install python3-venv")

PIP = $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt

$(LAB): pyproject.toml setup.py constraints.txt
	$(eval problem := $(PROBLEM))$(if $(problem),$(error $(problem)))
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (minutes; PyTorch is the large part)"
	@$(PIP) -e '.[lab]'
	@touch $@

$(STAMP): $(LAB)
	@echo "Installing what the book and the tests need"
	@$(PIP) -e '.[dev]'
	@touch $@

reproduce: $(LAB) ## run the paper's claims at laptop scale and write a report page (CPU, minutes)
	@$(BIN)/longhorn reproduce --scale laptop

claims: $(LAB) ## print the ledger: the paper's numbers, ours, the verdict
	@$(BIN)/longhorn claims

test: $(STAMP) ## run notebooks, tests, lint and the export check; ARGS="tests/test_op.py -k auto" runs only such tests
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh tests/run.sh $(ARGS)

# One thread per process: two workers share two cores.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n 2

cells: $(STAMP) ## run the pages with cells that `make test` leaves out: rehearsals of whole experiments
	@for page in $$(grep -l '"#| slow' nbs/*/*.ipynb); do $(BIN)/nbdev_test --path $$page --flags slow || exit 1; done

test-slow: cells ## run the tests and cells that `make test` leaves out as too long: processes, compilers, the rest of sweeps
	@$(PYTEST) --dist loadfile -m slow

faults: $(STAMP) ## kill, damage and starve what is stored, at every file operation, and run it again (seeded)
	@$(PYTEST) --dist worksteal -m faults

fuzz: $(STAMP) ## call commands and functions with random arguments (seeded)
	@$(PYTEST) --dist worksteal -m release tests/test_fuzz.py

browser: $(STAMP) ## check the site with a keyboard and a screen reader's rules (needs Chromium and axe-core)
	@$(PYTEST) --dist loadfile -m release tests/test_site.py

processor: $(STAMP) ## run the numeric tests as on a processor without vector instructions
	@ATEN_CPU_CAPABILITY=default $(PYTEST) --dist loadfile -m numeric

versions: $(STAMP) ## compile the fast kernels with every Triton from 3.6 on (downloads 200 to 300 MB each; half an hour)
	@$(BIN)/python -m pytest -q -m release -k every_release_of_triton

test-all: test-slow faults fuzz browser processor versions ## run every long check (under two hours and `versions`; `make test` is apart)

SEED ?= 58
sample: cells ## run what CI runs of `make test-all`: one case of every long test, chosen by SEED
	@LONGHORN_EVERY=3 $(PYTEST) --dist worksteal -m "slow or faults or release" --sample $(SEED)

test-gpu: ## run every test that needs a GPU with the Python that is found, and write tests/gpu.json
	@$(PYTHON) tests/gpu.py

lab: $(STAMP) ## open the book in JupyterLab
	@$(BIN)/jupyter lab --ServerApp.root_dir=. nbs/index.ipynb

sync: $(STAMP) ## export the package from the notebooks and clean them (before a commit)
	@$(BIN)/nbdev_export && $(BIN)/nbdev_clean

outputs: $(STAMP) ## execute the notebooks in place, so that their committed outputs are fresh
	@$(BIN)/jupyter nbconvert --to notebook --execute --inplace --log-level WARN $(or $(NB),$(wildcard nbs/*/*.ipynb nbs/*.ipynb))
	@$(BIN)/python docs/figures.py && $(BIN)/nbdev_clean

docs: $(STAMP) ## build the site from the notebooks into docs/_site
	@$(BIN)/python docs/build.py

readme: $(STAMP) ## bring README.md up to date with the ledger and the figure of nbs/index.ipynb
	@$(MAKE) outputs NB=nbs/index.ipynb && $(BIN)/python docs/build.py readme

release: ## build and check sdist and wheel in a new environment; with VERSION=x.y.z also tag (uploads nothing)
	$(eval problem := $(PROBLEM))$(if $(problem),$(error $(problem)))
	@PYTHON="$(PYTHON)" VERSION="$(VERSION)" sh tests/release.sh

clean: ## remove .venv and everything generated (runs/ stays)
	rm -rf .venv build dist *.egg-info _proc docs/_site docs/_build .pytest_cache .hypothesis
