# make demo   train a real model on a real task and see the difference
# make test   everything that must hold: style, types, tests
# make help   the rest

VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= 2

# Apart from the rest: PEFT imports it wherever it is installed, which costs every process a second.
FEW_BITS := $(abspath $(VENV))/few-bits

# The first interpreter that is new enough; `make PYTHON=/path/to/python` overrides.
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python,$(shell \
	$(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))

.DEFAULT_GOAL := help
.PHONY: help install demo demo-galore test test-bits lint format gpu-test bench docs clean

help:           ## show this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

install: $(STAMP)   ## make .venv with hirank in it (about a minute, once)

$(STAMP): pyproject.toml constraints.txt constraints-cpu.txt scripts/install.py
	@test -n "$(PYTHON)" || { echo "hirank needs Python 3.11 or newer: install one, or name it with PYTHON=." >&2; exit 2; }
	$(PYTHON) scripts/install.py --venv $(VENV)
	@touch $@

demo: $(STAMP)      ## fine-tune SmolLM2-135M (or MODEL=folder or Hub name) and see what it learnt
	$(if $(MODEL),,$(BIN)/python examples/demo/prepare_model.py)
	$(BIN)/python examples/demo/make_data.py --out .cache/demo
	$(BIN)/hirank train examples/demo/config.yaml $(if $(MODEL),--set model.name=$(MODEL))

demo-galore: $(STAMP)   ## the same demo with all weights trained by GaLore
	$(if $(MODEL),,$(BIN)/python examples/demo/prepare_model.py)
	$(BIN)/python examples/demo/make_data.py --out .cache/demo
	$(BIN)/hirank train examples/demo/galore.yaml $(if $(MODEL),--set model.name=$(MODEL))

test: lint          ## style, types and every test that needs no GPU
	$(BIN)/python -m pytest -q -n $(JOBS)
	$(BIN)/python -c 'import triton' 2>/dev/null || { echo "No Triton here: its kernels were not tested."; exit 0; }; \
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n $(JOBS) tests/kernels tests/adapters -k "kernels or capture or d12 or d17 or d19"
	@$(MAKE) --no-print-directory test-bits

test-bits: $(STAMP)   ## the tests of adapters over bitsandbytes, which `make test` runs, too
	@$(MAKE) --no-print-directory $(FEW_BITS)/.installed || { echo "No bitsandbytes here: adapters over its weights were not tested."; exit 0; }; \
	PYTHONPATH=$(FEW_BITS) $(BIN)/python -m pytest -q -n $(JOBS) -k "nf4 or fp4 or int8 or bits or traced or our_words" \
		$(wildcard tests/adapters/test_*quantised*.py) tests/doctor/test_quantised.py tests/kernels/test_nf4.py tests/test_cli.py

$(FEW_BITS)/.installed: constraints.txt
	@rm -rf $(FEW_BITS)
	$(BIN)/python -m pip install --quiet --no-deps --disable-pip-version-check -c constraints.txt --target $(FEW_BITS) bitsandbytes
	@touch $@

lint: $(STAMP)      ## ruff, mypy and the house rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/house_rules.py

format: $(STAMP)    ## let ruff lay out the code and mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-test: $(STAMP)  ## the tests marked gpu, on a machine that has one
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("No CUDA device here: run make gpu-test on a machine with an NVIDIA GPU.")'
	$(BIN)/python -m pytest -q -m gpu

bench: $(STAMP)     ## a training step timed: PEFT LoRA, PEFT DoRA, hirank DoRA
	$(BIN)/python -m pytest -q -n $(JOBS) tests/kernels
	$(if $(MODEL),,$(BIN)/python examples/demo/prepare_model.py)
	$(BIN)/hirank bench model --cpu --model $(or $(MODEL),.cache/smollm2-135m-instruct) \
		--rank 64 --seq 512 --arms peft-lora,peft-dora,hirank-lora,hirank-dora

docs: $(STAMP)      ## bring the tables of results in the texts up to date
	$(BIN)/python scripts/tables.py
	$(BIN)/python scripts/plan_table.py
	$(BIN)/python scripts/doctor_table.py
	$(BIN)/python scripts/support_table.py

clean:              ## remove what was installed and cached; runs/ stays
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
