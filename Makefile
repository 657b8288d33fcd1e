# Everything works from a fresh clone: the first target that needs it makes .venv (scripts/setup).
PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-all test-gpu test-rdma lint format clean

setup: .venv/ready

.venv/ready: pyproject.toml scripts/setup
	scripts/setup
	@touch $@

demo: setup
	$(PY) -m examples.demo

test: setup
	$(PY) -m pytest -m "not slow and not rdma and not gpu"

test-all: setup
	$(PY) -m pytest -m "not rdma"

test-gpu: setup
	$(PY) -m pytest -m gpu tests

test-rdma: setup
	scripts/test-rdma

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .venv build dist demo-data runs
