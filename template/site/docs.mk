# make docs       write the reference and build the documentation site in build/site, half a minute
# make reference  write harness/docs/reference again, after a change of keys, commands or docstrings
# make pictures   make the screenshots of the documentation again; needs Chromium
.PHONY: docs reference pictures
docs: $(VENV)/installed-docs reference
	$(BIN)/python -m template.site.build

reference: $(TEST_INSTALLED)
	$(BIN)/python -m template.site.reference

pictures: $(INSTALLED)
	$(BIN)/python -m template.site.screenshots

$(VENV)/installed-docs: $(TEST_INSTALLED) template/site/requirements.txt
	@echo "installing the generator of the documentation site into $(VENV)"
	@$(INSTALL) --quiet -c requirements.lock -r template/site/requirements.txt
	@touch $@
