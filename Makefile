# make demo: an answer from SGLang through this plugin; make test: everything that CI checks.
# Both do all their set-up, in .venv, on a machine that has Python 3.10 to 3.12 and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DOCS := .venv-docs/bin/python
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-deps --progress-bar off
say = @printf '\n== %s\n' "$(1)"
# .pyc files halve every server start; torch's own thread pools fight over few cores.
unexport PYTHONDONTWRITEBYTECODE

NATIVE_SOURCES := setup.py $(wildcard native_bindings/*.py native_bindings/*/* csrc/flagcx_shim/* csrc/include/*)

# A package that was uninstalled by hand is installed again.
ifneq ($(wildcard $(VENV)/.installed),)
ifneq ($(shell $(BIN)/python -c "from importlib.metadata import version; version('sglang_fl'); version('sglang')" 2>&1),)
$(shell rm -f $(VENV)/.installed $(VENV)/.requirements)
endif
endif

.PHONY: setup demo test check lint typecheck pytest test-random test-faults test-tools test-serving test-documents soak hostcx sanitize bench docs clean

setup: $(VENV)/.installed hostcx

$(VENV)/bin/python:
	$(call say,[1/4] creating the virtual environment $(VENV) with $(PYTHON))
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 12) else f"Python 3.10 to 3.12 is needed, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.requirements: requirements/sglang-empty.txt requirements/dev.txt | $(VENV)/bin/python
	$(call say,[2/4] installing SGLang 0.5.11 and what it imports: about 5 GB and two minutes)
	$(PIP) -r requirements/sglang-empty.txt -r requirements/dev.txt
	@touch $@

$(VENV)/.standin: $(wildcard standin/*.py standin/*.toml standin/*.pth standin/*/*.py) | $(VENV)/.requirements
	$(call say,[3/4] sgl_kernel: a stand-in where the real one is not installed)
	$(BIN)/python standin/install.py
	@touch $@

$(VENV)/.installed: pyproject.toml $(NATIVE_SOURCES) $(VENV)/.requirements $(VENV)/.standin
	$(call say,[4/4] building and installing sglang_fl in place)
	$(PIP) --no-build-isolation --config-settings editable_mode=compat --editable .
	@touch $@

hostcx:
	@$(MAKE) --no-print-directory -C csrc/hostcx OUT="$(CURDIR)/build/hostcx"

# FlagCX's API over host memory carries the collectives, unless FLAGCX_PATH is set (empty: torch.distributed).
demo: setup
	@FLAGCX_PATH="$${FLAGCX_PATH-$(CURDIR)/build/hostcx}" $(BIN)/python -m sglang_fl.testing.demo

test: check docs pytest sanitize

check: lint typecheck

lint: setup
	$(call say,ruff: lint and format)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup
	$(call say,mypy)
	$(BIN)/mypy

# They load SGLang a hundred times and start fifty servers: targets of their own, since make test takes half an hour without them.
TOOLS := tests/e2e/test_demo_without.py tests/e2e/test_doctor.py tests/e2e/test_bisect.py tests/multinode/test_doctor.py
SERVING := $(wildcard tests/e2e/test_benchmark_*.py)
DOCUMENTS := tests/distributed/test_document_blocks.py tests/e2e/test_document_blocks.py
FAULTS_OF_SERVERS := tests/e2e/test_failures.py
OWN := $(TOOLS) $(SERVING) $(DOCUMENTS)

pytest: setup $(VENV)/.network-tools
	$(call say,tests in processes of their own: units and the native part and collectives)
	$(BIN)/python -m pytest tests/unit tests/native tests/distributed tests/gpu $(OWN:%=--ignore %) -n 2 --dist loadfile --complete
	$(call say,ranks and schedulers that are killed or stopped or that raise: the promised limits hold on a machine that does nothing else)
	$(BIN)/python -m pytest tests/faults $(FAULTS_OF_SERVERS) --complete
	$(call say,tests that start real SGLang servers: on this host and on two hosts in network namespaces)
	$(BIN)/python -m pytest tests/e2e tests/multinode $(OWN:%=--ignore %) $(FAULTS_OF_SERVERS:%=--ignore %) -n 2 --dist loadfile --complete

# The two hosts are made with ip, which needs root; the documents' blocks call curl.
$(VENV)/.network-tools: | $(VENV)/.requirements
	@{ command -v ip && command -v curl; } >/dev/null || { echo '== ip or curl is missing: installing iproute2 and curl'; apt-get update -qq && apt-get install -y -qq iproute2 curl; } \
		|| { echo 'the tests need the commands ip and curl: install the packages iproute2 and curl'; exit 1; }
	@touch $@

# All of the randomised test, of which make test runs a tenth.
test-random: setup
	$(call say,10000 random calls at each of 2 to 4 ranks on each backend)
	for ranks in 2 3 4; do for backend in torch flagcx; do \
		$(BIN)/python -m tests.distributed.random_calls --ranks $$ranks --backend $$backend --calls 10000 || exit 1; \
	done; done

# Each case of the fault matrix twenty times, without a miss.
test-faults: setup
	$(BIN)/python -m pytest tests/faults --runs 20 --complete

# The demo and the doctor on wrong set-ups, and bisect on real servers with planted faults: eight minutes.
test-tools: setup $(VENV)/.network-tools
	$(BIN)/python -m pytest $(TOOLS) --complete

# The benchmarks that start servers, also that for machines of several accelerators, at two ranks on the CPU: seven
# minutes.
test-serving: setup
	$(BIN)/python -m pytest $(SERVING) --complete

# Every block of the documents that needs neither a GPU nor a network, in its page's order: four minutes.
test-documents: setup $(VENV)/.network-tools
	$(BIN)/python -m pytest $(DOCUMENTS) --complete

# 2,000 requests through a server at tp=2 on hostcx: memory, descriptors and shared memory that they leave behind.
soak: setup
	$(BIN)/python -m tests.e2e.soak --json build/soak.json

# Strict: a warning fails, such as a link or an anchor that leads nowhere, or a page that nothing leads to.
docs: .venv-docs/.requirements
	$(call say,documents: build/docs/html/index.html)
	$(DOCS) -m sphinx -q -W --keep-going --fresh-env -c docs/generator -d build/docs/doctrees -b html . build/docs/html

.venv-docs/.requirements: requirements/docs.txt
	$(call say,installing Sphinx in .venv-docs)
	$(PYTHON) -m venv .venv-docs
	$(DOCS) -m pip --disable-pip-version-check install --no-deps --progress-bar off -q -r requirements/docs.txt
	@touch $@

sanitize:
	@$(MAKE) --no-print-directory -C csrc/hostcx sanitize OUT="$(CURDIR)/build/sanitize"

bench: setup
	@$(BIN)/python -m benchmarks

clean:
	rm -rf build $(VENV) .venv-docs
