# Two commands do everything: `make demo` and `make test`. Each sets up .venv the first time.

# Where torch comes from. Empty: the pinned version from the default index. On machines where that would fetch a
# CUDA build and none is wanted, name an index that holds the CPU build: make demo TORCH_INDEX=<url>
TORCH_INDEX ?=
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# More flags for pytest: make test MORE="-k drain"
MORE ?=
# Processes that share the tests of `make test`, a file each at a time. With two, two cores are idle for a fifth of the time.
PROCESSES ?= 3
# Those of `make test-long`: most of its tests start whole clusters, which a third process slows down beyond their limits.
LONG_PROCESSES ?= 2

# One compute thread, passive waiting: worker processes that busy-wait on shared cores slow each other 40 times.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help demo test unit test-long check test-system chaos chaos-links chaos-redis chaos-processes soak cancels attack fuzz explore mutants proto settings metrics-docs check-subjects chart chart-golden bench bench-peers bench-routers gpu-check screenshots demo-model clients images clean chaos-mixed

help:  ## Show what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  \033[36mmake %-12s\033[0m %s\n", $$1, $$2 }' Makefile

demo: $(STAMP)  ## Start a cluster, watch text stream from it, see the load generator's table
	@$(BIN)/python -m demo.run

test: $(STAMP)  ## Run the tests (real Redis, real NIXL between real processes, real Ray)
	$(BIN)/python -m pytest -q -m "not system and not gpu and not long" --durations 15 -n $(PROCESSES) --dist loadfile $(MORE)

unit: $(STAMP)  ## The tests that need neither torch, Ray nor NIXL: seconds to start, a few minutes in all
	$(BIN)/python -m pytest -q -m "not system and not gpu and not long" --unit -n $(PROCESSES) --dist loadfile $(MORE)

test-long: $(STAMP)  ## Tests that take long: faults and cancels on a whole cluster, every model family, all kernels, Ray dying, NIXL itself
	$(BIN)/python -m pytest -q -m "long and not system and not gpu" --durations 15 -n $(LONG_PROCESSES) --dist loadfile $(MORE)

check: $(STAMP)  ## Lint, types, import contracts, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory proto-check
	@$(BIN)/python deploy/helm/generate.py --check
	@$(BIN)/python -m deploy.redis_users --check
	@$(BIN)/python -m deploy.settings_doc --check
	@$(BIN)/python -m deploy.observability.metrics_doc --check
	@$(BIN)/python -m engine.model.support --check

SINCE ?= origin/main
check-subjects:  ## Subjects of the commits since SINCE=origin/main: at most 72 characters each
	@git log --format=%s "$(SINCE)..HEAD" | awk 'length($$0) > 72 { print "over 72 characters: " $$0; bad = 1 } END { exit bad }'

SYSTEM_TESTS = $(BIN)/python -m pytest -q -m system --durations 5 -o addopts="-ra --import-mode=importlib --strict-markers"
# Two processes share these in this order, a file each at a time: the longest files first, those of the chart fill the rest.
SYSTEM_FILES = wheel models_and_adapters adapters embeddings first_process messages openai prompt_logprobs redis_tls redis_topologies several_models
SYSTEM_SHARED = tests/engine/kernels tests/engine/test_warm_up.py $(SYSTEM_FILES:%=tests/system/test_%.py) \
	tests/system/ui tests/system/images tests/system/helm
# Then one process runs the others, which watch recoveries and loads.
SYSTEM_LEFT = $(filter tests/system/%,$(SYSTEM_SHARED)) tests/system/containers \
	tests/system/helm_life/test_leader_worker_set.py
# Every part runs whatever the others say. A second try (MORE) may have nothing to do in one: pytest's code 5.
SYSTEM_CODE = { code=$$?; [ $$code = $(if $(MORE),5,none) ] || result=$$code; }
test-system: $(STAMP)  ## Tests that need Debian or npm packages; a skip fails, what the machine forbids is named at the end
	@result=0; \
	$(SYSTEM_TESTS) -n 2 --dist loadfile --no-loadscope-reorder $(SYSTEM_SHARED) $(MORE) || $(SYSTEM_CODE); \
	$(SYSTEM_TESTS) tests/system $(SYSTEM_LEFT:%=--ignore %) $(MORE) || $(SYSTEM_CODE); \
	exit $$result

PROTOC = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto

FAULTS ?= 50
SEED ?= 1
chaos: $(STAMP)  ## Random faults on a cluster under load, every token checked: FAULTS=1000 SEED=1; resumes
	$(BIN)/python -m tests.chaos --faults $(FAULTS) --seed $(SEED)

chaos-links: $(STAMP)  ## The same for the links between routers and workers: cut, silent, broken at named points
	$(BIN)/python -m tests.chaos --kinds links --faults $(FAULTS) --seed links-$(SEED)

chaos-mixed: $(STAMP)  ## make chaos with prefill workers of one rank and KV in bf16, decode workers of two and KV in int8
	$(BIN)/python -m tests.chaos --mixed --faults $(FAULTS) --seed mixed-$(SEED)

chaos-redis: $(STAMP)  ## Redis behind Sentinels (promotion, full, emptied, slow, stopped), then a cluster whose slot moves
	$(BIN)/python -m tests.chaos --kinds redis --faults $(FAULTS) --seed redis-$(SEED)
	$(BIN)/python -m tests.chaos --kinds redis-cluster --faults $(FAULTS) --seed slots-$(SEED)

chaos-processes: $(STAMP)  ## The same for the processes of routers: killed, stopped, their parent killed
	$(BIN)/python -m tests.chaos --kinds processes --processes 2 --faults $(FAULTS) --seed processes-$(SEED)

CLIENTS ?=
clients: $(STAMP)  ## Unmodified clients of others (LangChain, LiteLLM, guidellm, …) against a cluster: CLIENTS="instructor"
	$(BIN)/python -m tests.clients.run $(CLIENTS)

CASES ?= 20000
attack: $(STAMP)  ## Every attack of tests/security/attacks, and lying peers; prints what held (ONLY=name)
	$(BIN)/python -m tests.security.attacks --only "$(ONLY)"

fuzz: $(STAMP)  ## Nonsense against every port, and spoiled model directories: CASES=20000 SEED=1; prints the table
	$(BIN)/python -m tests.fuzz --fresh --cases $(CASES) --seed $(SEED)

ROUNDS ?= 10
explore: $(STAMP)  ## Property tests and state machines with new random events each round: ROUNDS=10
	@for round in $$(seq $(ROUNDS)); do echo "round $$round of $(ROUNDS)"; \
		BATON_EXPLORE=1 $(BIN)/python -m pytest -q --no-header -m "not system" -k "(hypothesis or machine) and not fuzz" tests $(MORE) || exit 1; done

ONLY ?=
mutants: $(STAMP)  ## Apply deliberate mistakes to a scratch copy, one at a time; prints those that no test notices (ONLY=name or area)
	$(BIN)/python -m tests.mutants --only "$(ONLY)"

MINUTES ?= 60
soak: $(STAMP)  ## Load with cancels and faults for a while; memory, descriptors and accounts must stay flat
	$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES) --seed $(SEED)

CANCELS ?= 10000
cancels: $(STAMP)  ## That many requests cancelled at random moments; nothing may stay behind
	$(BIN)/python -m tests.chaos.cancels --cancels $(CANCELS) --seed $(SEED)

proto: $(STAMP)  ## Regenerate wire/ from proto/
	$(PROTOC) --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. proto/wire/*.proto

chart: $(STAMP)  ## Regenerate the chart's schema and README table from the comments in values.yaml, and Redis's users
	$(BIN)/python deploy/helm/generate.py
	$(BIN)/python -m deploy.redis_users

settings: $(STAMP)  ## Regenerate docs/settings.md from the settings' models
	$(BIN)/python -m deploy.settings_doc

metrics-docs: $(STAMP)  ## Regenerate docs/metrics.md from the metrics' declarations
	$(BIN)/python -m deploy.observability.metrics_doc

chart-golden: $(STAMP)  ## Write the rendered examples that the tests compare with, after a wanted change
	BATON_WRITE_GOLDEN=1 $(BIN)/python -m pytest -q -m system -o addopts="--import-mode=importlib --strict-markers" \
		tests/system/helm/test_golden.py

TARGETS ?=
BASE ?=
images: $(STAMP)  ## Build the images with buildah, print sizes and contents, run them (root): TARGETS="router redis" BASE="--base IMAGE"
	$(BIN)/python -m deploy.images $(BASE) $(TARGETS)
	$(BIN)/python -m pytest -q -m system -rs -o addopts="--import-mode=importlib --strict-markers" tests/system/images tests/images

# Both with the machine's own Python: what publishes has no environment.
.PHONY: image-tag release-check
image-tag:  ## The tag by which the chart names IMAGE=prefill, with SUFFIX=-cuda
	@python3 -m deploy.versions tag $(IMAGE) $(SUFFIX)

release-check:  ## Fail unless git's TAG=v1.2.3 is the version of chart and package
	@python3 -m deploy.versions check $(TAG)

.PHONY: images-if-possible
images-if-possible: $(STAMP)  ## The images that test-system runs; where this machine cannot build them it says why, and succeeds
	$(BIN)/python -m deploy.images --if-possible redis rclone router

# Where images cannot be run: make helm-test IMAGES=optional
IMAGES ?= required

.PHONY: helm-test
helm-test: $(STAMP)  ## The chart with Helm 3 and 4: lint, render, schemas, properties, its whole life on processes, and on containers of `make images` (root)
	BATON_IMAGES=$(IMAGES) $(BIN)/python -m pytest -q -m system --durations 10 -o addopts="-ra --import-mode=importlib --strict-markers" \
		tests/system/helm tests/system/helm_life tests/system/kubelet tests/system/containers

.PHONY: proto-check
proto-check: $(STAMP)
	@rm -rf out/proto && mkdir -p out/proto
	@$(PROTOC) --python_out=out/proto --grpc_python_out=out/proto --mypy_out=out/proto --mypy_grpc_out=out/proto \
		proto/wire/*.proto 2>/dev/null
	@diff -rq -x __init__.py -x __pycache__ out/proto/wire wire \
		|| { echo "wire/ is not what proto/ generates: run make proto"; exit 1; }
	@echo "wire/ is up to date"

bench: $(STAMP)  ## Measure beside the machine's own limits; writes out/bench/report.json
	$(BIN)/python -m bench

bench-peers: $(STAMP)  ## The same workloads against vLLM's CPU build and llama.cpp, in turns
	$(BIN)/python -m bench.peers

bench-routers: $(STAMP)  ## Processor time of Baton's router, Dynamo's frontend and sglang-router before stub workers, in turns
	$(BIN)/python -m bench.peers --router --rounds 5

gpu-check:  ## Correctness and figures on this machine's CUDA card, with the Python and torch found here
	@python3 -m tests.gpu $(MORE)

screenshots: $(STAMP)  ## The pictures of docs/screens.md, of a real cluster under load (needs Chromium)
	$(BIN)/python -m tests.system.ui.screenshots

demo-model: $(STAMP)  ## Train the demo model again (about 80 minutes on one core)
	$(BIN)/python -m demo.train --minutes 80

clean:  ## Remove what was made here
	rm -rf out $(VENV)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Baton needs Python 3.11 or later; name one: make PYTHON=/path/to/python3.11 …"; exit 1; }
	@echo "setting up $(VENV) (once, a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  torch"
	@$(BIN)/python -m pip install -q -c constraints.txt torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 2>$(VENV)/pip.log \
		|| { tail -20 $(VENV)/pip.log; exit 1; }
	@echo "  everything else"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[all,dev]' 2>$(VENV)/pip.log || { tail -20 $(VENV)/pip.log; exit 1; }
	@touch $@
