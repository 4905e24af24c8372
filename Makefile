# Every target makes its own .venv on first use and renews it when pyproject.toml or constraints.txt change.
# Needed: Python >= 3.11 with venv, and make. Another interpreter: make PYTHON=python3.12 TARGET

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
STAMP := .venv/.attnlaws
WHEEL := build/wheel

PIP_INSTALL := $(VENV_PYTHON) -m pip install -qq -c constraints.txt
PYTEST := $(VENV_PYTHON) -m pytest -q
# Two test workers on two cores leave no core for threads of BLAS.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore

say = @sed -n 's/^$@:.*\#\# /$@: /p' Makefile

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help reproduce test deep lint docs bench clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*\#\# /make \1|/p' Makefile | while IFS='|' read -r t d; do printf '%-16s %s\n' "$$t" "$$d"; done

reproduce: $(STAMP) ## the tables and figures of both papers: paper, theory, Monte Carlo and trained models
	$(say)
	@.venv/bin/attnlaws reproduce

test: $(STAMP) ## the suite on the tree (theory covered to 95 % of branches at least), then its short part on an installed wheel
	$(say)
	@$(PYTEST) -n 2 --dist loadfile -m "not deep" --cov=theory --cov-branch --cov-report=term --cov-fail-under=95
	@rm -rf build/lib build/bdist.* $(WHEEL)
	@$(VENV_PYTHON) -m pip wheel -qq --no-index --no-deps --no-build-isolation --wheel-dir $(WHEEL) .
	@$(VENV_PYTHON) -m pip install -qq --no-index --no-deps --target $(WHEEL)/site $(WHEEL)/*.whl
	@echo "$@: the short tests on the installed wheel"
	@cd $(WHEEL) && \
	  ATTNLAWS_EXPECT_PREFIX="$(CURDIR)/$(WHEEL)/site" PYTHONPATH="$(CURDIR)/$(WHEEL)/site" PYTHONSAFEPATH=1 \
	  "$(CURDIR)/$(VENV_PYTHON)" -m pytest -q -n 2 --dist loadfile -m "not tree and not long and not deep" -c "$(CURDIR)/pyproject.toml" "$(CURDIR)/tests"

deep: $(STAMP) ## the tests that train or search for tens of seconds, which the suite leaves out
	$(say)
	@$(PYTEST) -m deep

lint: $(STAMP) ## ruff, mypy and the import contracts
	$(say)
	@$(VENV_PYTHON) -m ruff check
	@$(VENV_PYTHON) -m ruff format --check
	@$(VENV_PYTHON) -m mypy
	@.venv/bin/lint-imports

docs: $(STAMP) ## the documentation as HTML in docs/_build/html, warnings as errors, and its examples run
	$(say)
	@$(VENV_PYTHON) docs/prepare.py
	@$(VENV_PYTHON) -m sphinx -q -W --keep-going -b html docs docs/_build/html & html=$$!; \
	  $(VENV_PYTHON) -m sphinx -q -W --keep-going -b doctest docs docs/_build/doctest; examples=$$?; \
	  wait $$html && exit $$examples

bench: $(STAMP) ## the benchmarks
	$(say)
	@$(PYTEST) -s -o python_files='bench_*.py' tests/benchmarks

clean: ## remove what builds, tests and tools leave behind; keep .venv and results
	$(say)
	@rm -rf build dist *.egg-info docs/_build .coverage .coverage.* coverage.xml
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find theory sim validate tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv is used as it stands if it has pip and a new enough Python and was not moved or copied from another folder.
venv_usable = $(shell $(VENV_PYTHON) -c 'import os, sys, pip; stamp = "$(STAMP)"; \
  moved = os.path.exists(stamp) and open(stamp).read().strip() != os.getcwd(); \
  print("" if moved or sys.version_info < (3, 11) else "yes")' 2>/dev/null)
python_version = $(shell $(PYTHON) -c 'import sys; v = sys.version_info[:3]; \
  print("new enough" if v >= (3, 11) else "Python %d.%d.%d" % v)' 2>/dev/null || echo "not there")
need_python = $(if $(filter new,$(python_version)),,$(error attnlaws needs Python 3.11 or newer but "$(PYTHON)" is \
  $(python_version); name another one with make PYTHON=python3.12))
make_venv = $(if $(venv_usable),true,$(need_python)$(PYTHON) -m venv --clear .venv)

ifneq ($(wildcard $(STAMP)),)
ifneq ($(shell cat $(STAMP)),$(CURDIR))
.PHONY: $(STAMP)
endif
endif

$(STAMP): pyproject.toml constraints.txt
	@$(make_venv)
	@echo "installing into .venv (some minutes the first time)"
	@$(PIP_INSTALL) 'setuptools>=77'
	@$(PIP_INSTALL) --no-build-isolation -e '.[train,distributed,docs,dev]'
	@echo "$(CURDIR)" > $@
