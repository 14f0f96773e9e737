# LOCKS: `make demo` shows it in a real engine, `make test` runs every test. Start with `make help`.
VENV := .venv
PYTHON_IN := $(VENV)/bin/python
# CMake and Ninja of the environment come first: Debian's may be older, or absent.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 60
FUZZERS := config_fuzz record_fuzz step_fuzz trace_fuzz
SOURCES := $(shell find include src python cmake -type f -not -name '*.pyc') CMakeLists.txt pyproject.toml
REQUIREMENTS := $(wildcard requirements/*.txt) tools/setup

.DEFAULT_GOAL := help
.PHONY: help setup demo test kernels docs links wheel versions sanitize tsan fuzz clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/.installed ## make .venv: vLLM, the demo's model, and this project built and installed

demo: $(VENV)/.installed ## ask one question about 7,300 tokens, dense and with LOCKS; writes demo/report.html
	@$(PYTHON_IN) -m demo

test: $(VENV)/.installed $(VENV)/.setup-test ## build and run all tests, C++ and Python
	cmake --preset release
	cmake --build --preset release -j $(JOBS)
	@ctest --preset release -j $(JOBS); cpp=$$?; \
	$(PYTHON_IN) -m pytest tests/python; python=$$?; \
	if [ $$cpp -ne 0 ]; then echo "ctest failed: see above" >&2; fi; \
	[ $$cpp -eq 0 ] && [ $$python -eq 0 ]

sanitize: $(VENV)/.setup-sanitize ## run the C++ tests under clang's address and undefined-behaviour sanitizers
	cmake --preset asan
	cmake --build --preset asan -j $(JOBS)
	ctest --preset asan -j $(JOBS)

kernels: $(VENV)/.setup-test $(VENV)/.setup-kernels ## compile every kernel, for sm_90 and as PTX; run those of their tests that need no GPU
	CUDACXX=$$(command -v nvcc || echo $(CURDIR)/$(VENV)/lib/python3*/site-packages/nvidia/cu13/bin/nvcc) cmake --preset kernels
	cmake --build --preset kernels -j $(JOBS)
	ctest --preset kernels

docs: $(VENV)/.installed $(VENV)/.setup-docs ## build the documentation site in build/docs; warnings are errors
	@$(PYTHON_IN) -m sphinx -q -W --keep-going -b html docs build/docs && echo "build/docs/index.html"

links: $(VENV)/.installed $(VENV)/.setup-docs ## check the site's links to other sites, which needs the network
	@$(PYTHON_IN) tools/check_links.py

wheel: $(VENV)/.setup-demo ## build wheel and source archive in dist, and try them in empty environments
	@$(PYTHON_IN) tools/check_wheel.py

versions: $(VENV)/.installed $(VENV)/.setup-test ## check the releases of vLLM that are newer than the tested ones
	@$(PYTHON_IN) tools/check_versions.py

tsan: $(VENV)/.setup-sanitize ## run the C++ tests that use threads under ThreadSanitizer
	cmake --preset tsan
	cmake --build --preset tsan -j $(JOBS)
	ctest --preset tsan -j $(JOBS)

fuzz: $(VENV)/.setup-sanitize ## give the C++ core hostile input, FUZZ_SECONDS (60) for each target of tests/fuzz
	cmake --preset fuzz
	cmake --build --preset fuzz -j $(JOBS)
	@printf '%s\n' $(FUZZERS) | xargs -P $(JOBS) -I{} tests/fuzz/run {} $(FUZZ_SECONDS)

clean: ## remove what was built; .venv and the converted model in .cache stay
	rm -rf build dist demo/result.json demo/report.html $(VENV)/.installed

# One stamp a step, so that only what changed is done again.
$(VENV)/.setup-%: $(REQUIREMENTS)
	@tools/setup $*
	@touch $@

$(VENV)/.installed: $(SOURCES) $(VENV)/.setup-demo
	@echo "==> LOCKS: build and install (a minute or two the first time)"
	@$(PYTHON_IN) -m uv pip install --python $(PYTHON_IN) --no-build-isolation \
	  --reinstall-package locks-vllm -C build-dir=build/wheel .
	@touch $@
