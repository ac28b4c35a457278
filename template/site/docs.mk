# make docs       write the reference and build the documentation site in build/site, half a minute
# make reference  write harness/docs/reference again, after a change of keys, commands or docstrings
# make pictures   make the screenshots of the documentation again with Chromium
.PHONY: docs reference pictures
docs: $(VENV)/installed-docs reference
	$(BIN)/python -m template.site.build

reference: $(TEST_INSTALLED)
	$(BIN)/python -m template.site.reference

pictures: $(INSTALLED)
	rm -rf build/pictures && $(BIN)/python train.py experiment=synthetic output_dir=build/pictures
	$(BIN)/tensorboard --logdir build/pictures --port 6007 & trap "kill $$!" EXIT; sleep 20; \
	    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1280,780 \
	    --virtual-time-budget=15000 --screenshot=harness/docs/tensorboard.png \
	    "http://localhost:6007/#scalars&_smoothingWeight=0&tagFilter=(train%7Cval)%2F(loss%7Caccuracy)"

$(VENV)/installed-docs: $(TEST_INSTALLED) template/site/requirements.txt
	@echo "installing the generator of the documentation site into $(VENV)"
	@$(INSTALL) --quiet -c requirements.lock -r template/site/requirements.txt
	@touch $@
