# make demo   set up .venv, then train the digits on 2 ranks
# make test   set up .venv, then run all tests
# Variables go to scripts/setup.sh: TF_VERSION, PYTHON, VENV, MPI, NCCL, WHEELHOUSE (see there).

VENV ?= .venv
export TF_VERSION PYTHON VENV MPI NCCL CUDA_HOME NCCL_HOME CUDA_ARCHS WHEELHOUSE

PY := $(VENV)/bin/python
# horovodrun and mpirun of the environment go before any other.
RUN := PATH="$(abspath $(VENV))/bin:$$PATH"
TESTS ?= tests
NP ?= 2

.PHONY: demo test bench lint setup clean

demo: setup
	$(RUN) horovodrun -np $(NP) hvdvars train --data digits --variable_update parameter_server --train_dir runs/demo

test: setup
	$(RUN) $(PY) -m pytest $(TESTS)

bench: setup
	$(RUN) $(PY) -m benchmarks $(BENCH)

lint: setup
	@$(PY) -c 'import ruff, mypy' 2>/dev/null || $(PY) -m pip install --quiet -e '.[lint]' --no-build-isolation
	$(RUN) ruff check .
	$(RUN) mypy

setup:
	@scripts/setup.sh

clean:
	rm -rf $(VENV) build *.egg-info runs
