# make demo   set up .venv, then train the digits on 2 ranks
# make test   set up .venv, then run all tests
# Variables go to scripts/setup.sh: TF_VERSION, PYTHON, VENV, MPI, NCCL, WHEELHOUSE (see there).

VENV ?= .venv
SETUP := TF_VERSION PYTHON VENV MPI NCCL CUDA_HOME NCCL_HOME CUDA_ARCHS WHEELHOUSE

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
	$(RUN) ruff format --check .
	$(RUN) mypy

setup:
	@$(foreach name,$(SETUP),$(if $($(name)),$(name)='$($(name))')) scripts/setup.sh

clean:
	@if [ -e '$(VENV)/.hvdvars-made' ]; then rm -rf '$(VENV)'; \
	elif [ -e '$(VENV)' ]; then echo "$(VENV) was not made by scripts/setup.sh: left alone"; fi
	rm -rf build *.egg-info runs
