# make bench   set up if needed, and run short benchmarks; README.md there has all figures
# make bench ONLY="mlp ddp"             run some of them
# make bench-compare BASE=v0.4.0       compare this checkout with a commit, in turns
.PHONY: bench bench-compare
BENCH = cd harness/benchmarks && $(abspath $(BIN))/python bench.py $(if $(ONLY),--only $(ONLY))
bench: $(INSTALLED)
	$(BENCH) --json $(abspath build)/bench.json

bench-compare: $(INSTALLED)
	$(BENCH) --base $(BASE)

# At most four minutes on one GPU; uses an existing environment without updating it.
.PHONY: bench-gpu
bench-gpu:
	@test -x $(BIN)/python || $(MAKE) $(INSTALLED)
	cd harness/benchmarks && $(abspath $(BIN))/python gpu.py
