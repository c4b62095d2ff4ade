# make demo                  set up, and stream an answer of a small model in the terminal
# make test                  set up, lint, check types and run the tests (on the CPU)
# make test-all              the same with the tests that `make test` leaves out (marked slow)
# make unit                  run the tests only
# make check                 lint and check types only
# make ray-test              install Ray Serve, and run the tests of Ray and of its examples
# make client-test           install clients of OpenAI's and Anthropic's protocols, and test the server with them
# make template-test         download packages with chat templates of published models, and compare the templates
#                            with transformers
# make oldest-triton         compile the kernels of a model with the oldest Triton that the package allows
# make fuzz SECONDS=120      run each fuzz target for this time
# make gpu-test OUT=folder   run the tests for an NVIDIA GPU with PYTHON; reports are written to the folder
# make gpu-perf OUT=folder   run all measurements on a GPU with PYTHON; results are written to the folder
# make clean                 remove .venv and all caches
PYTHON ?= python3
BIN := .venv/bin

OUT ?= gpu-results
JOBS ?= 12
PROCESSES ?= 2
TESTS := not gpu and not perf and not slow
# pytest-benchmark is disabled because, where it is installed, it warns when several processes run tests.
GPU_PYTEST = $(PYTHON) -m pytest -q -W default -p no:cacheprovider -p no:benchmark

# The tests start many processes, which need not compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all unit ray-test client-test template-test check oldest-triton fuzz gpu-test gpu-perf clean

demo:
	@PYTHON=$(PYTHON) .ci/setup
	@$(BIN)/python examples/hello.py

test:
	@PYTHON=$(PYTHON) .ci/setup test
	@$(MAKE) --no-print-directory --jobs 2 check unit

test-all:
	@PYTHON=$(PYTHON) .ci/setup test
	@$(MAKE) --no-print-directory --jobs 2 check unit \
		TESTS="not gpu and not perf"

# No test depends on the clock, so tests may run in parallel. The tests of a module share engines and models:
# each process gets consecutive tests, and takes over tests of another process when it has finished its own.
unit:
	@$(BIN)/python -m pytest -m "$(TESTS)" -n $(PROCESSES) --dist worksteal -p no:benchmark

# In an environment of its own, because clients may need older versions of what the tests use. Warnings of the
# clients are not errors. With CLIENT_REQUESTS=FOLDER, the requests are recorded.
CLIENTS := .venv-clients
client-test:
	@[ -x $(CLIENTS)/bin/python ] || $(PYTHON) -m venv --system-site-packages $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install -q -c .ci/clients.txt -e .[clients,test]
	@$(CLIENTS)/bin/python -m pytest -q -W default -p no:benchmark tests/openai/test_clients.py \
		tests/openai/test_more_clients.py

# In an environment of its own, because Ray Serve brings what the tests do not need.
RAY := .venv-ray
ray-test:
	@[ -x $(RAY)/bin/python ] || $(PYTHON) -m venv --system-site-packages $(RAY)
	@$(RAY)/bin/python -m pip install -q -e .[test] "ray[serve]"
	@$(RAY)/bin/python -m pytest -q -W default -p no:benchmark tests/ray tests/examples/test_ray_cluster.py \
		tests/examples/test_ray_serve.py

# The templates stay in .cache: none becomes a part of this repository.
template-test:
	@PYTHON=$(PYTHON) .ci/setup test
	@$(BIN)/python .ci/templates.py
	@$(BIN)/python -m pytest -q -p no:benchmark tests/text/test_real_templates.py

check:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# Nothing is launched. Versions differ in what they take: the tests have a newer one.
TRITON := 3.6.0
oldest-triton:
	@[ -d .cache/triton-$(TRITON) ] || $(BIN)/python -m pip install -q --no-deps --target .cache/triton-$(TRITON) \
		triton==$(TRITON)
	@PYTHONPATH=.cache/triton-$(TRITON) $(BIN)/python -m perf.cross_compile --model llama-3.1-8b --covering \
		--capability 90

SECONDS ?= 60
TARGETS := $(filter-out runner following test_fuzz,$(notdir $(basename $(wildcard tests/fuzz/*.py))))
fuzz:
	@for target in $(TARGETS); do $(BIN)/python tests/fuzz/runner.py $$target --seconds $(SECONDS) || exit 1; done

# Processes take turns on a GPU: tests that keep it busy run together with tests that mostly compile. Tests of the
# GPU's memory run alone, because they count the memory of all processes.
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

GPUS ?= 0
gpu-perf:
	@PYTHONPATH=src $(PYTHON) -m perf.measure run --gpus $(GPUS) --out $(OUT)

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
