# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
CONSTRAINTS := constraints.txt

# Hundreds of tests start a fresh interpreter, which compiles all it imports if nothing is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-floors check dist docs bench size torture clean

# What a user installs, and what the tests need on top of it.
$(VENV)/.user: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c $(CONSTRAINTS) -e ".[report]"
	touch $@

$(VENV)/.dev: $(VENV)/.user
	$(PIP) install --quiet -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

demo:
	@test -e $(VENV)/.user || echo "Installing into $(VENV) first, which takes 1 to 3 minutes."
	@$(MAKE) --silent --no-print-directory $(VENV)/.user
	$(BIN)/penstock demo

# make test TESTS=tests/order runs a part of them.
test: $(VENV)/.dev
	@$(BIN)/python -c "import os; print(f'The whole suite takes about 8 minutes on 2 quiet cores; this machine has {os.cpu_count()}.', flush=True)"
	$(PYTEST) $(TESTS)

# The same with the lowest version of each dependency that pyproject.toml declares, in a separate
# environment. On Linux, torch 2.6 brings 5 GB of CUDA libraries. Warnings are no errors here: old
# packages warn of what their newer dependencies will remove.
test-floors:
	$(MAKE) test VENV=.venv-floors CONSTRAINTS=constraints-floors.txt TESTS="-W default $(TESTS)"

# Kills, fuzzing, all topologies: figures go to docs/reliability.md.
torture: $(VENV)/.dev
	$(BIN)/python -m pytest -m torture --timeout 7200
	HYPOTHESIS_PROFILE=torture $(BIN)/python -m pytest -m "hypothesis and not torture and not gpu" --timeout 7200

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST)
	$(MAKE) dist

# Build the sdist, and the wheel from it; check the files in both, and run the wheel in a new
# environment, without the repository. `make dist TAG=v1.2.3` also compares the version (RELEASING.md).
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/check_dist.py dist $(TAG)

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) install --quiet -c $(CONSTRAINTS) -e ".[docs]"
	touch $@

# The site is build/docs/site. Needs no network; fails on a broken link or anchor, on a public name
# without a description or an example, and on a block of code that does not run.
docs: $(VENV)/.docs
	$(BIN)/python docs/site/build.py
	$(PYTEST) tests/test_surface.py tests/test_docs.py

# The peers live in an environment of their own, so that they cannot change ours.
BENCH_PIP := .venv-bench/bin/python -m pip --disable-pip-version-check

.venv-bench/.done: pyproject.toml constraints.txt benchmarks/requirements.txt benchmarks/requirements-bare.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	$(BENCH_PIP) install --quiet -c constraints.txt -e . -r benchmarks/requirements.txt
	$(BENCH_PIP) install --quiet --no-deps -r benchmarks/requirements-bare.txt
	touch $@

# Half an hour on a quiet machine; benchmarks/data then holds the corpus and the tokens. What
# needs a GPU is benchmarks/gpu.py.
bench: .venv-bench/.done
	.venv-bench/bin/python benchmarks/build.py
	.venv-bench/bin/python benchmarks/loader.py
	.venv-bench/bin/python benchmarks/scale.py
	.venv-bench/bin/python benchmarks/dataset.py
	.venv-bench/bin/python benchmarks/formats.py
	.venv-bench/bin/python benchmarks/packing.py
	.venv-bench/bin/python benchmarks/multiplex.py --render
	.venv-bench/bin/python benchmarks/streaming.py
	.venv-bench/bin/python benchmarks/remote.py

# Lines, tokens, files, names and pages, beside their goals; `make size SIZE=record` records lower ones.
size: $(VENV)/.dev
	$(BIN)/python tests/size.py $(SIZE)

clean:
	rm -rf $(VENV) .venv-bench .venv-floors demo stores dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
