# Everything runs from .venv, which the first target that needs it creates.
VENV := .venv
PY   := $(VENV)/bin/python
STAMP := $(VENV)/.complete
BENCH_VENV  := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.complete
# What the environment is made from: a change here brings it up to date at the next call.
STAMP_INPUTS := pyproject.toml $(wildcard requirements/*.txt) scripts/venv.sh \
	$(shell find tests/sglang_cpu -name test_*.py -prune -o -type f -not -path '*/__pycache__/*' -print)

PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-cluster demo-dualpath demo-pd test test-slow test-redis bench lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create or update .venv: SGLang on CPU, this project, test tools

$(STAMP): $(STAMP_INPUTS)
	@scripts/venv.sh $(VENV)
	@touch $@

demo: $(STAMP) ## an agent session on a real server, killed and continued from storage
	$(PY) -m examples.demo $(DEMO_ARGS)

demo-cluster: $(STAMP) ## an agent session that moves between two servers with one Redis
	$(PY) -m examples.demo_cluster $(DEMO_ARGS)

demo-dualpath: $(STAMP) ## hits read by three nodes at once: a server and two agents, one of them killed
	$(PY) -m examples.demo_dualpath $(DEMO_ARGS)

demo-pd: $(STAMP) ## agents on prefill and decode servers behind the router
	$(PY) -m examples.demo_pd $(DEMO_ARGS)

test: $(STAMP) ## every test but the slow ones
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP) ## the slow tests: stress, crash loops, long fault runs
	$(PY) -m pytest -m slow $(PYTEST_ARGS)

test-redis: $(STAMP) ## the tests of the cache and of servers once more, with the index in Redis
	$(PY) -m tests.support.on_redis $(PYTEST_ARGS)

bench: $(BENCH_STAMP) ## compare storage backends through SGLang's interface
	$(BENCH_VENV)/bin/python -m bench.backend $(BENCH_ARGS)

# The peers live beside .venv, not in it: nothing else needs them.
$(BENCH_STAMP): $(STAMP) bench/peers.txt scripts/bench_venv.sh
	@scripts/bench_venv.sh $(VENV) $(BENCH_VENV)
	@touch $@

lint: $(STAMP) ## ruff (style, format) and mypy --strict
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP) ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove caches (not .venv)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
