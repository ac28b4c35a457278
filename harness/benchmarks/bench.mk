# make bench   set up if needed, and run short benchmarks; README.md there has all figures
.PHONY: bench
bench: $(INSTALLED)
	cd harness/benchmarks && export PYTHONUNBUFFERED=1 && for short in "startup.py --repeats 2" "checkpoint.py --repeats 3" \
	    "convert.py --repeats 2 --gigabytes 0.2" "overhead.py --repeats 3 --num-train 12800" \
	    "overhead.py --repeats 2 --num-train 3840 --network cnn" \
	    "ddp.py --repeats 1 --num-train 12800" "ddp.py --check" strangers_files.py; do \
	    echo; echo "python harness/benchmarks/$$short"; $(abspath $(BIN))/python $$short || exit 1; done

# At most four minutes on one GPU; uses an existing environment without updating it.
.PHONY: bench-gpu
bench-gpu:
	@test -x $(BIN)/python || $(MAKE) $(INSTALLED)
	cd harness/benchmarks && $(abspath $(BIN))/python gpu.py
