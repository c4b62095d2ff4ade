# make demo    set up and stream an answer of a small model in the terminal
# make test    set up, lint, type-check and run the tests (CPU only)
# make check   lint and types alone
# make fuzz SECONDS=120   every fuzz target for so long
# make gpu-test OUT=folder   the tests of an NVIDIA GPU, in this Python; reports go to the folder
# make gpu-perf OUT=folder   all measurements on it, likewise
PYTHON ?= python3
BIN := .venv/bin

OUT ?= gpu-results
JOBS ?= 12
GPU_PYTEST = $(PYTHON) -m pytest -q -W default -p no:cacheprovider -p no:benchmark

# pytest-benchmark, where a Python has it, warns of several.
PROCESSES ?= 2

.PHONY: demo test unit check fuzz gpu-test gpu-perf clean

demo:
	@PYTHON=$(PYTHON) .ci/setup
	@$(BIN)/python examples/hello.py

test:
	@PYTHON=$(PYTHON) .ci/setup test
	@$(MAKE) --no-print-directory --jobs 2 check unit

# No test looks at a clock, so they may run side by side. Modules share engines and models: a process takes a
# run of tests, and from another what that has left when it is through.
unit:
	@$(BIN)/python -m pytest -m "not gpu" -n $(PROCESSES) --dist worksteal -p no:benchmark

check:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

SECONDS ?= 60
TARGETS := $(filter-out runner following test_fuzz,$(notdir $(basename $(wildcard tests/fuzz/*.py))))
fuzz:
	@for target in $(TARGETS); do $(BIN)/python tests/fuzz/runner.py $$target --seconds $(SECONDS) || exit 1; done

# Processes take turns on a GPU: those that keep it busy run beside those that compile. Memory is counted for the
# whole GPU: by tests that run alone.
BUSY := tests/gpu/test_graph_speculation.py tests/gpu/test_graph_ngram.py
gpu-test:
	@mkdir -p $(OUT)
	@$(GPU_PYTEST) tests/_kernels tests/execution $(BUSY) -m "(kernel or gpu) and not interpreter" -n $(JOBS) \
		--dist loadgroup --junitxml $(OUT)/tests-kernels.xml
	@$(GPU_PYTEST) tests/gpu -m gpu -n $(JOBS) --dist loadgroup $(BUSY:%=--ignore=%) \
		--ignore tests/gpu/test_graph_memory.py --junitxml $(OUT)/tests-graph.xml
	@$(GPU_PYTEST) tests/engine/test_constraints.py tests/parity/test_batching.py \
		tests/parity/test_processors.py --executor graph -n $(JOBS) --junitxml $(OUT)/tests-engine-on-graphs.xml
	@$(GPU_PYTEST) tests/gpu/test_graph_memory.py -m gpu --junitxml $(OUT)/tests-memory.xml

LENGTHS := single-8k single-16k
PERF = PYTHONPATH=src $(PYTHON) -m perf
gpu-perf:
	@mkdir -p $(OUT)
	@$(PERF).decode --out $(OUT)/decode.json
	@$(PERF).decode --temperature 0.8 --top-p 0.95 --out $(OUT)/sampled.json
	@$(PERF).decode --model smollm2-135m --scenario single-512 batch64-512 --out $(OUT)/decode.json
	@$(PERF).prefill --tokens 8192 32768 --out $(OUT)/prefill.json
	@$(PERF).speculative --num-draft-tokens 3 --acceptance-length 3.2 --out $(OUT)/speculative.json
	@$(PERF).speculative --num-draft-tokens 2 3 4 5 --acceptance-length 3.2 --scenario $(LENGTHS) \
		--out $(OUT)/speculative.json
	@$(PERF).speculative --model smollm2-135m --draft ngram --num-draft-tokens 3 5 \
		--scenario single-512 batch64-512 --out $(OUT)/speculative.json
	@$(PERF).speculative --policy-sweep --num-draft-tokens 5 --repeats 3 --out $(OUT)/policy.json
	@$(PERF).stages --out $(OUT)/stages.json
	@$(PERF).stages --by-active --out $(OUT)/active.json
	@$(PERF).step_profile --out $(OUT)/profile.json
	@$(PERF).graph_memory --out $(OUT)/memory.json
	@$(PERF).kernel_speed --out $(OUT)/kernels.json
	@$(PERF).startup --out $(OUT)/startup.json
	@$(PERF).serving --out $(OUT)/serving.json
	@$(PERF).serving --draft --out $(OUT)/serving.json

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
