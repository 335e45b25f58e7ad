# Two commands do all the set-up: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: demo test test-slow test-exhaustive lint types imports docs check bench clean

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile "$(TORCH)"
	$(BIN)/pip install --quiet --no-compile --editable ".[dev]"
	touch $@

demo: $(VENV)/ready  ## continue Python code with the small model that ships, then say what ran and why
	$(BIN)/slotline generate "def main("
	$(BIN)/slotline generate --lora typed --temperature 0 --max-tokens 40 "def read_file(path"
	$(BIN)/slotline generate --lora docstrings --temperature 0 --max-tokens 40 "def read_file(path"
	$(BIN)/slotline explain

test: $(VENV)/ready  ## all tests but those marked slow
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -q -m "not slow and not exhaustive"

test-slow: $(VENV)/ready  ## the tests marked slow: whole suites, long texts, more families, new plugins' own tests
	$(BIN)/pytest -n 2 --dist worksteal -q -m "slow and not exhaustive"

test-exhaustive: $(VENV)/ready  ## every family, fault and mutant, over ranks, stages and replicas as well
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -q -m exhaustive

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/mypy core/slotline registry/slotline backends/slotline plugins/slotline proposers/slotline benchmarks

imports: $(VENV)/ready
	$(BIN)/lint-imports

docs: $(VENV)/ready  ## rewrite the generated parts of docs/
	$(BIN)/python docs/generate.py

check: lint types imports
	$(BIN)/python docs/generate.py --check
	$(BIN)/python docs/matrix.py --check

bench: $(VENV)/ready  ## the CPU figures of docs/performance.md
	$(BIN)/python benchmarks/cpu_engine.py
	$(BIN)/python benchmarks/host_step.py

clean:
	rm -rf $(VENV)
