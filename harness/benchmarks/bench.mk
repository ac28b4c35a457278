# make bench   set up if needed, and run benchmarks/, briefly; README.md there has all figures
.PHONY: bench
bench: $(INSTALLED)
	cd harness/benchmarks && for short in "startup.py --repeats 2" "exactness.py --repeats 3" \
	    "overhead.py --repeats 3 --num-train 12800" \
	    "overhead.py --repeats 2 --num-train 3840 --network cnn" \
	    "ddp.py --repeats 1 --num-train 12800" \
	    "memory.py --repeats 1 --sizes 20000 80000"; do \
	    echo; echo "python harness/benchmarks/$$short"; $(abspath $(BIN))/python $$short || exit 1; done
