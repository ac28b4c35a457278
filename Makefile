# make train   set up if needed, train, evaluate      make train ARGS="strategy=ddp trainer.devices=2"
# make check   set up if needed, run the linters and the type checker
# make quick   the linters, and the tests that start no training: a minute
# make test    make check, and run the tests, ten minutes  make test ARGS="-k resume"
# make test-harness ARGS="-k resume"   of the library's tests those that you name
# make test-gpu   what only a GPU shows, beside the same on the CPU, five minutes; installs nothing
# make test-all   make test, and what takes longer: kill storms, clusters, all variants, packages
# make lock    move requirements.lock to the newest versions that the bounds allow, then prove them
# uv, where there is one, installs the same versions faster; make UV= leaves it out.
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
# Python compiles what it imports; pip would compile every module of every package, for 90 s.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
endif

# A stamp file is newer than what it was made from, so a second call installs nothing.
INSTALLED := $(VENV)/installed
TEST_INSTALLED := $(VENV)/installed-test
# What an environment is made anew for; the files that are included below need it as well.
REQUIRED := pyproject.toml requirements.lock $(wildcard requirements.txt harness/requirements.txt)

TRAINLESS := checkpoints/test_files.py convert data parity/test_means.py init/test_groups.py \
    init/test_weights.py loaders loggers/test_rewind.py loggers/test_metrics_table.py \
    distributed/test_vote.py strategies/test_rows.py strategies/test_splitting.py test_border.py \
    test_config.py test_files.py compat/test_border.py compat/test_versions.py \
    compat/test_watched_operations.py monitoring/test_throughput.py

.PHONY: train check quick test test-harness test-gpu test-all lock
train: $(INSTALLED)
	$(BIN)/python train.py $(ARGS)

# Strict for the harness, mild for a project's own files. The repository that projects are made from
# is strict throughout.
ifneq ($(wildcard template/make_project.py),)
RUFF_RULES := --config harness/ruff.toml
MYPY_RULES := --strict $(addprefix --enable-error-code=,\
    arg-type assignment index operator override return-value union-attr)
FORMATTED := .
else
FORMATTED := $(wildcard harness)
endif

check: $(TEST_INSTALLED)
	$(if $(FORMATTED),$(BIN)/ruff format --check $(RUFF_RULES) $(FORMATTED))
	$(BIN)/ruff check $(RUFF_RULES)
	$(BIN)/mypy $(MYPY_RULES)

# Three workers, one thread each: tests that start processes of their own share the same cores.
PYTEST := OMP_NUM_THREADS=1 $(abspath $(BIN))/pytest -n 3 --dist worksteal

quick: check
ifneq ($(wildcard harness/tests),)
	cd harness && $(PYTEST) -q $(addprefix tests/,$(TRAINLESS))
else
	$(PYTEST) -q
endif

# Your tests; then those of the library, where they came along: in a folder of its own with small
# configs, and those of its data with the examples here.
test: check
	$(BIN)/python -m compileall -q src $(wildcard harness/src)  # once, not by each process that imports it
	$(PYTEST) $(ARGS)
ifeq ($(ARGS),)
ifneq ($(wildcard harness/tests),)
	$(MAKE) test-harness
endif
endif

ifneq ($(wildcard harness/tests),)
test-harness: $(TEST_INSTALLED)
	cd harness && $(PYTEST) $(ARGS)
ifeq ($(ARGS),)
	cd harness/tests/examples && TEST_PROJECT=$(CURDIR) $(PYTEST) .
endif
else
test-harness:
	@echo "The library's tests are in the template: run make test-harness there." && exit 1
endif

# Tests that are not marked for a GPU see none (harness.testing). These see one, and an environment
# that is there is taken as it is. TEST_DEVICE=cpu runs the cases without a GPU.
WORKERS ?= 6
test-gpu:
	@test -x $(BIN)/pytest || $(MAKE) $(TEST_INSTALLED)
	@if $(BIN)/python -c "import os, sys; from harness.devices import num_gpus; \
	    sys.exit(bool(os.environ.get('TEST_DEVICE') or num_gpus()))"; \
	then echo "make test-gpu: this machine has no GPU, and nothing was run."; \
	else $(MAKE) gpu-cases; fi

gpu-cases:
ifneq ($(wildcard harness/tests),)
	cd harness && TEST_PROJECT=$(CURDIR) OMP_NUM_THREADS=1 $(abspath $(BIN))/pytest -n $(WORKERS) \
	    -m "gpu or multi_gpu" -v -rs -p no:cacheprovider $(ARGS) \
	    $$(grep -rlE "mark\.(multi_)?gpu" --include="test_*.py" tests)
else
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "gpu or multi_gpu" -v -rs $(ARGS) || test $$? = 5  # of none
endif

ALL := -m slow
test-all: test
	$(PYTEST) $(ALL)
ifneq ($(wildcard harness/tests),)
	cd harness && $(PYTEST) $(ALL)
	cd harness/tests/examples && TEST_PROJECT=$(CURDIR) $(PYTEST) $(ALL) .
	$(MAKE) packages
endif
	$(MAKE) test-gpu  # skipped without a GPU, which it says

-include harness/benchmarks/bench.mk  # make bench
-include harness/tests/packages/packages.mk  # make packages

# The new lock takes its place only after the tests have passed with it. It has the versions for
# every system; platform parts of torch (CUDA libraries) are left to the one that installs.
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

# Some systems leave a broken environment behind where venv is half installed: start it anew.
$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11") if sys.version_info < (3, 11) else 0'
	@echo "making $(VENV)"
	@$(NEW_VENV) $(VENV)
	@touch $@

# pip says nothing but what fails.
$(INSTALLED): $(VENV)/made $(REQUIRED)
	@echo "installing the versions of requirements.lock into $(VENV), which takes some minutes"
	@$(INSTALL) --quiet -c requirements.lock -e .
	@touch $@

$(TEST_INSTALLED): $(VENV)/made $(REQUIRED) $(wildcard harness/extras/test.txt)
	@echo "installing the versions of requirements.lock into $(VENV), with what tests need"
	@$(INSTALL) --quiet -c requirements.lock -e .[test]
	@touch $(INSTALLED) $@
