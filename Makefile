# What a developer runs. Everything it makes lies inside this checkout: .venv, .demo, build.
#
#   make help          this list
#   make setup         the environment .venv, which the others make if it is not there
#   make lint          linters and types
#   make demo          train and serve a small model here, from nothing but Python
#   make test          linters, types, unit and end-to-end tests without Docker
#   make test-heavy    the tests that take many seconds
#   make test-long     those that take minutes: more processes, more tasks, full disks
#   make test-versions the recipe under older versions of transformers
#   make test-xla      the recipe on torch-xla, in an environment of its own (.venv-xla, 5.5 GB)
#   make test-vllm     decoders served by vLLM's CPU build, in an environment of its own (build/vllm, 3.5 GB)
#   make test-docker   build the images on stand-in bases, and run them
#   make audit         known vulnerabilities of what images install, compared with container/locks/vex.json
#   make docs          the documentation site, in build/site; a warning or a broken link fails it
#
# PYTHON          the Python to make .venv with, 3.11 or later (default: python3)
# TORCH_PIP_ARGS  for the pip that installs torch. On Linux the package index's torch brings CUDA
#                 (3 GB); for the small CPU build:
#                 make setup TORCH_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH_PIP_ARGS ?=
TORCH = torch==2.13.0
TORCH_XLA = 2.9.0
BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
INSTALL = sh tests/install.sh
XLA_BIN = .venv-xla/bin
XLA = PJRT_DEVICE=CPU XLA_FLAGS=--xla_backend_optimization_level=0 $(XLA_BIN)/python
# SDK v3's container drivers, whose files tests run; the SDK around them is not wanted.
SDK_DRIVERS = $(shell sed -n 's/^    "\(sagemaker-[a-z-]*==.*\)", *\# files only/\1/p' pyproject.toml)
UV = $(shell sed -n 's/^\(uv==[^ ]*\).*/\1/p' container/locks/dev.txt)
SAGEMAKER_TRAINING = $(shell sed -n 's/^\(sagemaker-training==[^ ]*\).*/\1/p' container/locks/image.txt)

UNCOMPILED = /tests/|/(transformers/models|torch/testing|databricks|debugpy|google|IPython|mlflow|mypy|networkx|nltk|openai|pip|sagemaker|setuptools|sphinx|trl|wandb)/

export TORCH_PIP_ARGS

.PHONY: help docs gpu-kit gpu-lent gpu-truth gpu-speed gpu-serve gpu-smoke ordeal audit licences setup demo test test-heavy test-long test-versions test-vllm test-xla test-docker lint lock clean bench-serve bench-train

setup: .venv/.made

# The list at the top of this file.
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

.venv/.made: container/locks/dev.txt container/pyproject.toml pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or later is needed. Name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || \
	    { echo "$(PYTHON) cannot make virtual environments. On Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --no-compile $(UV)
	$(PIP) install --quiet --no-compile $(TORCH_PIP_ARGS) $(TORCH)
	$(INSTALL) $(BIN)/python --requirement container/locks/dev.txt
	$(INSTALL) $(BIN)/python --no-deps $(SDK_DRIVERS) --editable container
	@$(INSTALL) $(BIN)/python --no-deps $(SAGEMAKER_TRAINING) >.venv/sagemaker-training.log 2>&1 || \
	    echo "$(SAGEMAKER_TRAINING) is left out (it needs a C compiler): the tests that compare with it will be skipped."
	@# On all cores, where pip takes one. What few tests import, half of it all, is compiled when they do;
	@# what no version of Python compiles stays as it is.
	@$(BIN)/python -m compileall -q -j 0 -x '$(UNCOMPILED)' .venv/lib >/dev/null 2>&1 || true
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest -m "not docker and not heavy and not xla and not versions and not vllm" -n 2 --dist loadfile

# First, since a test that made the environments of the SDKs would run out of its time.
test-heavy: setup build/fuzz/.made
	@PYTHON=$(PYTHON) tests/sdk_venvs.sh >/dev/null
	$(BIN)/python -m pytest -m "heavy and not long and not vllm" -n 2 --dist loadfile

# Half an hour. Not in .ci/run, where a sibling of each stands for it.
test-long: setup .venv-xla/.made build/vllm/.made
	$(BIN)/python -m pytest -m "long and not xla and not vllm and not docker" -n 2 --dist loadfile
	$(BIN)/python -m pytest -m "long and vllm" tests/vllm
	$(BIN)/python -m pytest -m "long and docker" tests/docker
	$(XLA) -m pytest -m "xla and long" -n 2 --dist loadfile tests/xla
	$(MAKE) gpu-smoke

test-versions: $(patsubst tests/versions/%.txt,build/versions/%/.made,$(wildcard tests/versions/*.txt))
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m versions -n 2 --dist load tests/versions

build/versions/%/.made: tests/versions/%.txt tests/versions/environment.sh .venv/.made
	sh tests/versions/environment.sh $(BIN)/python $< $(@D)

test-xla: .venv-xla/.made
	$(XLA) -m pytest -m "xla and not long" -n 2 --dist loadfile tests/xla

# As an image of the XLA stack, from its lock, but without optimum-neuron, which needs torch 2.8 and
# torch-neuronx. torch from the package index does not load without CUDA libraries; those that loading it
# does not need are left out.
.venv-xla/.made: container/locks/neuron-xla.txt .venv/.made
	$(PYTHON) -m venv .venv-xla
	$(INSTALL) $(XLA_BIN)/python sympy networkx
	$(INSTALL) $(XLA_BIN)/python --no-deps $(TORCH_PIP_ARGS) torch==$(TORCH_XLA)
	sed -nE '/cusolver|nvrtc/d; s/^Requires-Dist: (nvidia-[^;]*);.*/\1/p' .venv-xla/lib/python3*/site-packages/torch-$(TORCH_XLA)*/METADATA | \
	    xargs -r $(INSTALL) $(XLA_BIN)/python --no-deps
	rm -f .venv-xla/lib/python3*/site-packages/nvidia/cudnn/lib/libcudnn_*
	grep -vE '^(sagemaker-training|optimum|optimum-neuron)==' container/locks/neuron-xla.txt >.venv-xla/lock.txt
	grep -E '^(pytest-timeout|pytest-xdist|execnet|httpx|httpcore)==' container/locks/dev.txt >>.venv-xla/lock.txt
	$(INSTALL) $(XLA_BIN)/python --no-deps torch-xla==$(TORCH_XLA) --requirement .venv-xla/lock.txt --editable container
	@touch $@

test-vllm: build/vllm/.made
	$(BIN)/python -m pytest -m "vllm and not long" -n 2 --dist loadfile tests/vllm

build/vllm/.made: tests/vllm/environment.sh tests/vllm/install.sh .venv/.made
	sh tests/vllm/environment.sh $(PYTHON) $(@D)

# In the order of the files: one process builds and tries the CPU image while the other builds Trainium's.
test-docker: setup
	$(BIN)/python -m pytest -m "docker and not long" -n 2 --dist loadfile --no-loadscope-reorder tests/docker

docs: setup
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs/site -d build/doctrees docs build/site
	@echo build/site/index.html

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Beside the servers of today, which it installs below build/peers: several GB, the first time.
# ARGS="--workload embeddings --texts FILE --rounds 3"
bench-serve: setup
	$(BIN)/python benchmarks/bench_serve.py $(ARGS)

# After a change of pyproject.toml. The newest versions it allows: make lock UPGRADE=--upgrade
lock: setup
	sh container/locks/lock.sh $(BIN)/uv $(UPGRADE)

# The product broken on purpose, an hour or more: docs/RELIABILITY.md.
# ARGS="--only kill,requests --short --seed 7"
ordeal: setup build/fuzz/.made
	$(BIN)/python -m ordeal $(ARGS)

# Beside what is tested, not in it.
build/fuzz/.made: tests/locks/fuzz.txt .venv/.made
	rm -rf $(@D)
	mkdir -p $(@D)
	$(INSTALL) $(BIN)/python --no-deps --target $(@D) --requirement $<
	@touch $@

# Known vulnerabilities of the locks, compared with container/locks/vex.json; it needs a network.
audit: setup
	$(BIN)/python -m ordeal.audit $(ARGS)

licences: setup
	$(BIN)/python -m ordeal.licences

# Packed batches beside HF Trainer's padded ones. ARGS="--data FOLDER --rounds 3"
bench-train: setup
	$(BIN)/python benchmarks/bench_train.py $(ARGS)

# On a machine with a CUDA device, half an hour in all: docs/GPU.md. ARGS="--smoke" tries them on a CPU.
gpu-truth gpu-speed gpu-serve: setup
	$(BIN)/python benchmarks/gpu/$(@:gpu-%=%).py $(ARGS)

# What matters most on a lent one, in 30 minutes or in several shorter calls.
gpu-lent: setup
	$(BIN)/python benchmarks/gpu/lent.py $(ARGS)

# All, small, on whatever is here.
gpu-smoke: setup
	$(BIN)/python benchmarks/gpu/graph.py
	for stage in truth speed compiled serve; do $(BIN)/python benchmarks/gpu/$$stage.py --smoke --seconds 1500 || exit 1; done

# What such a machine lacks if it has no network: build/gpu-kit.
gpu-kit: setup
	$(BIN)/python benchmarks/gpu/kit.py

clean:
	rm -rf .venv .venv-xla .demo build .pytest_cache .mypy_cache .ruff_cache .hypothesis container/build container/*.egg-info
