PYTHON ?= python3
# pytest rewrites every test module, and keeps what it has written: to do so in each session takes a tenth of a minute.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
# The tests that need a GPU, on two simulated ones.
SIMULATED := $(BIN)/python -m playground.world.simulated_gpu 2 $(BIN)/python -m pytest \
	$(shell grep -rl --include='test_*.py' mark.gpu tests)
QUICK := tests/test_house.py tests/algorithms tests/world/test_launch.py tests/world/test_rank.py tests/training/test_sync.py
OLDEST := $(shell sed -n 's/.*"torch>=\([0-9.]*\).*/\1/p' pyproject.toml).0

FETCHED := Fetching PyTorch and what it needs into .venv: on Linux 5.4 GB on the disk, with CUDA libraries, some minutes; \
	for CPUs alone 1 GB, README.md says how. Training fetches MNIST once, 12 MB, and takes a minute.

.PHONY: help demo site quick test test-cpu test-gpu lint stress oldest gpu clean

help: ## this list; what installs something installs it once
	@sed -n 's/^\([a-z]*\):.* ## /make \1\t/p' Makefile | expand -t 16

demo: .venv/.installed ## install into .venv, and train MNIST on two ranks
	$(BIN)/python -m playground sgd

site: .venv/.installed ## write the course as pages: public/index.html, for a browser or any static host
	$(BIN)/python -m playground site public

test: test-cpu test-gpu ## install, run all tests and the linters

# Two workers: while one waits for a timeout or for a process to start, the other goes on. Beside them the simulated GPU
# is compiled, if it is not in the cache, and the linters run: what these say comes after the tests.
test-cpu: .venv/.installed-dev
	@{ $(BIN)/python -m playground.world.simulated_gpu 2 true && $(MAKE) --no-print-directory lint; } >.beside.log 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not stress and not gpu"; tests=$$?; \
	wait $$beside; beside=$$?; cat .beside.log; exit $$((tests || beside))

test-gpu: .venv/.installed-dev
	$(SIMULATED) -n 2 --dist worksteal -m "gpu and not stress"

# Whether the house stands, ranks start and end, and every all-reduce and average is right; without the tests that wait
# for time to pass.
quick: lint ## the linters and some tests, in half a minute
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not stress and not gpu" -k "not stopped and not hang" $(QUICK)

lint: .venv/.installed-dev ## the linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

stress: .venv/.installed-dev ## the tests that take longer
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "stress and not gpu"
	$(SIMULATED) -n 2 --dist worksteal -m "gpu and stress"

oldest: .venv-oldest/.installed ## the tests with the oldest torch that is promised
	.venv-oldest/bin/python -m pytest -n 2 --dist worksteal

gpu: .venv/.installed-dev ## every lesson and tool on nccl, and the tests that need a GPU; N=8 for eight ranks
	$(BIN)/python tests/on_gpu.py $(N)

.venv/.installed: pyproject.toml
	@echo "$(FETCHED)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

.venv-oldest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --editable '.[test]' torch==$(OLDEST)
	touch $@

clean: ## remove what make has installed and written
	rm -rf .venv .venv-oldest build public *.egg-info .coverage* .beside.log .mypy_cache .pytest_cache .ruff_cache .hypothesis
