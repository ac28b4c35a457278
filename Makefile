# make train   set up if needed, train, evaluate      make train ARGS="strategy=ddp trainer.devices=2"
# make check   set up if needed, run the linters, the type checker and the check of phrases
# make quick   make check, and run the tests that do not train, a minute
# make test    make check, and run the tests, some minutes; make test ARGS="-k resume" runs these tests
# make test-harness ARGS="-k resume"   run the library's tests that ARGS selects
# make test-gpu   run the tests that need a GPU, five minutes; installs nothing
# make test-all   make test, and run slow tests: kill storms, clusters, all variants, packages
# make lock    update requirements.lock to the newest versions that the bounds allow, and test them
# If uv is installed, it installs the same versions faster; make UV= uses pip.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
UV ?= $(shell command -v uv 2> /dev/null)
ifneq ($(UV),)
NEW_VENV := $(UV) venv --quiet --seed --clear --python $(PYTHON)
INSTALL := $(UV) pip install --python $(BIN)/python
else
NEW_VENV := $(PYTHON) -m venv --clear
# Without --no-compile pip compiles all modules of all packages, which takes 90 s.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
endif

# Stamp files: a second call installs nothing, unless a required file is newer than the stamp.
INSTALLED := $(VENV)/installed
TEST_INSTALLED := $(VENV)/installed-test
# A change of these files updates the environment. Included makefiles use the variable as well.
REQUIRED := pyproject.toml requirements.lock $(wildcard requirements.txt harness/requirements.txt)

TRAINLESS := checkpoints/test_files.py convert data parity/test_means.py init/test_groups.py \
    init/test_weights.py loaders loggers/test_rewind.py loggers/test_metrics_table.py \
    distributed/test_vote.py strategies/test_rows.py strategies/test_splitting.py test_border.py \
    test_config.py test_files.py compat/test_border.py compat/test_versions.py \
    compat/test_watched_operations.py monitoring/test_throughput.py

.PHONY: train check quick test test-own test-ci test-harness test-gpu test-all lock
train: $(INSTALLED)
	$(BIN)/python train.py $(ARGS)

# Rules are strict for the library, and mild for a project's own files. In the template's repository
# they are strict for all files.
ifneq ($(wildcard template/make_project.py),)
RUFF_RULES := --config harness/ruff.toml
MYPY_RULES := --strict $(addprefix --enable-error-code=,\
    arg-type assignment index operator override return-value union-attr)
FORMATTED := .
STYLE := $(wildcard harness/tests/style/check.py)
else
FORMATTED := $(wildcard harness)
endif

check: $(TEST_INSTALLED)
	$(if $(FORMATTED),$(BIN)/ruff format --check $(RUFF_RULES) $(FORMATTED))
	$(BIN)/ruff check $(RUFF_RULES)
	$(BIN)/mypy $(MYPY_RULES)
	$(if $(STYLE),$(BIN)/python $(STYLE) '*.py' '*.md' '*.yaml' '*.yml' '*.toml')

# Three workers with one thread each, because tests start further processes on the same cores.
PYTEST := OMP_NUM_THREADS=1 $(abspath $(BIN))/pytest -n 3 --dist worksteal

quick: check
ifneq ($(wildcard harness/tests),)
	cd harness && $(PYTEST) -q $(addprefix tests/,$(TRAINLESS))
else
	$(PYTEST) -q
endif

# Runs your tests. In the template's repository it then runs the library's tests, with small configs,
# and tests of the library with the examples here.
test: $(TEST_INSTALLED)
	$(BIN)/python -m compileall -q src $(wildcard harness/src)  # once, instead of in each process
ifeq ($(ARGS),)
	$(MAKE) -j2 check test-own  # beside each other, because mypy uses one core
ifneq ($(wildcard harness/tests),)
	$(MAKE) test-harness
endif
else
	$(PYTEST) $(ARGS)
endif

test-own: $(TEST_INSTALLED)
	$(PYTEST)

ifneq ($(wildcard harness/tests),)
test-harness: $(TEST_INSTALLED)
	cd harness && $(PYTEST) $(ARGS)
ifeq ($(ARGS),)
	cd harness/tests/examples && TEST_PROJECT=$(CURDIR) $(PYTEST) .
endif

# What continuous integration runs besides make test.
test-ci: $(TEST_INSTALLED)
	cd harness && $(PYTEST) -m "ci and not slow"
	cd harness/tests/examples && TEST_PROJECT=$(CURDIR) $(PYTEST) -m "ci and not slow" .
else
test-harness:
	@echo "The library's tests are in the template: run make test-harness there." && exit 1
endif

# harness.testing hides GPUs from tests that are not marked for a GPU. test-gpu uses an existing
# environment without updating it. TEST_DEVICE=cpu runs these tests without a GPU.
WORKERS ?= 6
test-gpu:
	@test -x $(BIN)/pytest || $(MAKE) $(TEST_INSTALLED)
	@if $(BIN)/python -c "import os, sys; from harness.devices import num_gpus; \
	    sys.exit(bool(os.environ.get('TEST_DEVICE') or num_gpus()))"; \
	then echo "make test-gpu: this machine has no GPU, so no test was run."; \
	else $(MAKE) gpu-cases; fi

gpu-cases:
ifneq ($(wildcard harness/tests),)
	cd harness && TEST_PROJECT=$(CURDIR) OMP_NUM_THREADS=1 $(abspath $(BIN))/pytest -n $(WORKERS) \
	    -m "gpu or multi_gpu" -v -rs -p no:cacheprovider $(ARGS) \
	    $$(grep -rlE "mark\.(multi_)?gpu" --include="test_*.py" tests)
else
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "gpu or multi_gpu" -v -rs $(ARGS) || test $$? = 5  # 5: there are none
endif

ALL := -m "slow or ci"
test-all: test
	$(PYTEST) $(ALL)
ifneq ($(wildcard harness/tests),)
	cd harness && $(PYTEST) $(ALL)
	cd harness/tests/examples && TEST_PROJECT=$(CURDIR) $(PYTEST) $(ALL) .
	$(MAKE) packages
endif
	$(MAKE) test-gpu  # without a GPU it prints that it runs no test

-include harness/benchmarks/bench.mk  # make bench
-include template/site/docs.mk  # make docs
-include harness/tests/packages/packages.mk  # make packages

# The new lock replaces the old one only after the tests have passed with it. It has versions for
# all systems. It leaves out torch's CUDA libraries, whose versions pip chooses for each platform.
lock:
	rm -rf build/lock build/requirements.lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install "uv>=0.9,<1"
	build/lock/bin/uv pip compile --universal --quiet --upgrade --no-header --no-annotate \
	    pyproject.toml --extra test \
	    | sed '/^\(nvidia-[^m]\|cuda-\|triton\|setuptools\|harness \)/d' > build/requirements.lock
	build/lock/bin/pip install -c build/requirements.lock -e .[test]
	touch build/lock/made build/lock/installed build/lock/installed-test
	$(MAKE) test VENV=build/lock
	mv build/requirements.lock requirements.lock

# If venv is only partly installed, some systems leave a broken environment: --clear removes it.
$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11") if sys.version_info < (3, 11) else 0'
	@echo "making $(VENV)"
	@$(NEW_VENV) $(VENV)
	@touch $@

# With --quiet, pip prints only errors.
$(INSTALLED): $(VENV)/made $(REQUIRED)
	@echo "installing the versions of requirements.lock into $(VENV); this takes some minutes"
	@$(INSTALL) --quiet -c requirements.lock -e .
	@touch $@

$(TEST_INSTALLED): $(VENV)/made $(REQUIRED) $(wildcard harness/extras/test.txt)
	@echo "installing the versions of requirements.lock into $(VENV), with the packages for tests"
	@$(INSTALL) --quiet -c requirements.lock -e .[test]
	@touch $(INSTALLED) $@
