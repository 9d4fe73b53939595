# Every target sets up what it needs. Variables:
#   PYTHON=python3.12   the interpreter that .venv is made from (python3)
#   VENV=none           no set-up: the ambient python3, with the repository on its path (a GPU machine without network)
#   PIP_ARGS="..."      handed to pip install
#   WORKERS=2            processes of `make test`; WORKERS= for none, where pytest-xdist is missing
#   ARGS="..."          handed to pytest (or to conformance.mutants)
#   IMPL= DEVICE= EFFORT= SEED= K=   become --impl, --device, --effort, --seed and -k of `make conformance`
#                       (IMPL and K of `make bench`, IMPL, DEVICE and SEED of `make lives` and `make replay` too)
#   BENCH=.whichslot/bench   where `make bench` writes .json and .md, and `make roofline` reads the one and writes .png and .svg

VENV    ?= .venv
PYTHON  ?= python3
WORKERS ?= 2
BENCH   ?= .whichslot/bench

ifeq ($(VENV),none)
RUN   := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
READY :=
else
RUN   := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

JUDGE := $(if $(IMPL),--impl "$(IMPL)") $(if $(DEVICE),--device "$(DEVICE)") $(if $(EFFORT),--effort "$(EFFORT)") \
         $(if $(SEED),--seed "$(SEED)") $(if $(K),-k "$(K)")

.PHONY: help setup conformance lives replay test bench roofline judging lint mutants ranks clean distclean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@sed -n 's/^#   /  /p' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv and install what is needed into it; redone only when pyproject.toml or constraints.txt change

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(VENV): the first time it takes some minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) --editable '.[dev]'
	@touch $@

conformance: $(READY)  ## judge gpu_impl/, or IMPL=pkg.module | IMPL=pkg.module:object | IMPL=path/to/file.py
	@$(RUN) -m pytest conformance/ -p no:benchmark $(JUDGE) $(ARGS)

lives: $(READY)  ## long lives of sequences in a small pool, until one breaks a clause; IMPL=, ARGS="--runs 200 --steps 50"
	@$(RUN) -m conformance.lives $(if $(IMPL),--impl "$(IMPL)") $(if $(DEVICE),--device "$(DEVICE)") $(if $(SEED),--seed "$(SEED)") $(ARGS)

replay: $(READY)  ## a trace of real requests through IMPL=, judged as it goes; ARGS="--requests 1000"
	@$(RUN) -m conformance.replay_trace $(if $(IMPL),--impl "$(IMPL)") $(if $(DEVICE),--device "$(DEVICE)") $(if $(SEED),--seed "$(SEED)") $(ARGS)

# one thread a worker: two workers with two threads each are slower on two cores
test: $(READY)  ## the project's own tests, the doctests of reference/ among them
	@$(RUN) -m pytest --doctest-modules reference -q -p no:benchmark
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) -m pytest tests/ $(if $(WORKERS),-n $(WORKERS)) -p no:benchmark $(ARGS)

bench: $(READY)  ## how fast, against the reference and peers; nothing is timed that has not first been judged correct
	@mkdir -p $(dir $(BENCH))
	@$(RUN) -m pytest benchmarks/ --benchmark-only --benchmark-columns=median,iqr,min,rounds --benchmark-json=$(BENCH).json -rs $(if $(IMPL),--impl "$(IMPL)") $(if $(K),-k "$(K)") $(ARGS); \
	status=$$?; $(RUN) -m benchmarks.summary $(BENCH).json --write $(BENCH).md && exit $$status

roofline: $(READY)  ## what `make bench` measured under the measured roof, as a picture: BENCH.png and BENCH.svg
	@test -e $(BENCH).json || $(MAKE) bench
	@$(RUN) -m benchmarks.roofline $(BENCH).json --write $(BENCH)

judging: $(READY)  ## what judging costs: the oracle by its tokens, seconds of each file of the suite, mutants a minute
	@$(RUN) -m benchmarks.judging $(ARGS)

lint: $(READY)  ## ruff and mypy
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

mutants: $(READY)  ## every planted fault, and which clause caught it
	@$(RUN) -m conformance.mutants $(ARGS)

ranks: $(READY)  ## what several ranks hold together, over NCCL where each of RANKS (2) has a GPU, else over gloo; ARGS="--parallel-sample ..."
	@$(RUN) -m conformance.ranks_main --ranks $(or $(RANKS),2) --impl $(or $(IMPL),gpu_impl) $(or $(ARGS),$(if $(IMPL),,--parallel-sample gpu_impl.sharded:parallel_sample))

clean:  ## remove caches and reports
	@rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks .whichslot build dist *.egg-info
	@find reference gpu_impl conformance benchmarks tests examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv too
	@rm -rf .venv
