# The two commands of the README are `make demo` and `make test`; each does the set-up that it needs.
PYTHON := .venv/bin/python
# Programs start often here: each compiles everything anew where Python may not keep what it compiled.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check unit clean

help:  ## list what there is
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup:  ## packages, .venv, host check, image; at once done when nothing is missing
	@scripts/setup

demo:  ## two real tasks in two VMs: run, review, apply one, drop the other
	@scripts/setup
	@$(PYTHON) demo/demo.py

# Tests without guests run side by side, one process more than there are cores, as some of them wait.
# With guests, two files at a time: a guest has one CPU. What weighs guests against each other comes last.
# ARGS names the tests to run, or has options for all of them; 5 says that no test fits.
test:  ## all tests; boots real guests
	@scripts/setup --tests
ifneq ($(findstring tests,$(ARGS)),)
	@$(PYTHON) -m pytest $(ARGS)
else
	@$(PYTHON) -m pytest -n $$(($$(nproc) + 1)) tests/unit tests/adapter $(ARGS); quick=$$?; \
	$(PYTHON) -m pytest -n 2 tests/vm -m "not alone" $(ARGS); guests=$$?; \
	$(PYTHON) -m pytest tests/vm -m alone $(ARGS); alone=$$?; \
	test $$quick$$guests$$alone != 555 || exit 5; \
	for status in $$quick $$guests $$alone; do case $$status in 0 | 5) ;; *) exit $$status ;; esac; done
endif

check:  ## what to run before a commit: style, types, unit tests; needs no VM
	@scripts/setup --venv
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@$(PYTHON) -m pytest -q tests/unit

unit:  ## the unit tests alone
	@scripts/setup --venv
	@$(PYTHON) -m pytest -q tests/unit

clean:  ## remove what the tools left in the clone; state folder and .venv stay
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
