# make docs       write the reference and build the documentation site in build/site, half a minute
# make reference  write harness/docs/reference again, after a change of keys, commands or docstrings
# make pictures   make the pictures of the documentation again, with Chromium; best on an idle machine
.PHONY: docs reference pictures
docs: $(VENV)/installed-docs reference
	$(BIN)/python -m template.site.build

reference: $(TEST_INSTALLED)
	$(BIN)/python -m template.site.reference

SHOT := chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=15000

pictures: $(INSTALLED)
	$(BIN)/python harness/docs/terminal.py
	$(BIN)/python -m template.site.strategies_picture
	rm -rf build/report && $(BIN)/python train.py -m seed=1,2,3 model.optimizer.lr=0.001,0.01 \
	    trainer.max_epochs=8 output_dir=build/report
	$(BIN)/python scripts/runs.py report build/report -o build/report.html
	$(SHOT) --window-size=1280,860 --screenshot=harness/docs/sweep_report.png file://$(abspath build/report.html)
	rm -rf build/pictures && $(BIN)/python train.py experiment=synthetic output_dir=build/pictures
	$(BIN)/tensorboard --logdir build/pictures --port 6007 & trap "kill $$!" EXIT; sleep 20; \
	    $(SHOT) --window-size=1280,780 --screenshot=harness/docs/tensorboard.png \
	    "http://localhost:6007/#scalars&_smoothingWeight=0&tagFilter=(train%7Cval)%2F(loss%7Caccuracy)"

$(VENV)/installed-docs: $(TEST_INSTALLED) template/site/requirements.txt
	@echo "installing the generator of the documentation site into $(VENV)"
	@$(INSTALL) --quiet -c requirements.lock -r template/site/requirements.txt
	@touch $@
