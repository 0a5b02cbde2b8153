# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Hundreds of tests start a fresh interpreter, which compiles all it imports if nothing is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check bench docs torture clean

# What a user installs, and what the tests need on top of it.
$(VENV)/.user: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt -e ".[report]"
	touch $@

$(VENV)/.dev: $(VENV)/.user
	$(PIP) install --quiet -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.user
	$(BIN)/penstock demo

test: $(VENV)/.dev
	$(PYTEST)

# Kills, fuzzing, all topologies: figures go to docs/reliability.md.
torture: $(VENV)/.dev
	$(BIN)/python -m pytest -m torture --timeout 7200

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST)

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) install --quiet -c constraints.txt -e ".[docs]"
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

clean:
	rm -rf $(VENV) .venv-bench demo stores dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
