# make packages   train modules of public packages with YAML files alone, in a separate environment,
#                 half an hour on two cores. harness/tests/packages/README.md lists them.
PACKAGES_VENV ?= .venv-packages
PACKAGES := harness/tests/packages/requirements.txt

.PHONY: packages
packages: $(PACKAGES_VENV)/installed
	cd harness && OMP_NUM_THREADS=1 $(abspath $(PACKAGES_VENV))/bin/pytest -m packages tests/packages $(ARGS)

$(PACKAGES_VENV)/installed: $(REQUIRED) $(PACKAGES)
	$(PYTHON) -m venv --clear $(PACKAGES_VENV)
	# boto3, which litdata imports, asks for an older python-dateutil.
	sed '/^python-dateutil==/d' requirements.lock > $(PACKAGES_VENV)/constraints.txt
	$(PACKAGES_VENV)/bin/python -m pip --disable-pip-version-check install \
	    -c $(PACKAGES_VENV)/constraints.txt -e .[test] -r $(PACKAGES)
	# Without torchvision, which must be of torch's own build and which streams of tensors do not use.
	$(PACKAGES_VENV)/bin/python -m pip --disable-pip-version-check install --no-deps litdata==0.2.76
	touch $@
