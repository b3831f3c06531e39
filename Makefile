# Everything sets up what it needs: `make serve` and `make test` are all a newcomer has to know.
#
#   make serve    serve the demo model on simulated CPU devices    (CONFIG=..., SET="lanes=3 ...")
#   make test     run the tests                                    (TESTS=...)
#   make nightly  the rest: longer tests, all again with annotations checked, the matrix of layouts
#   make golden   write the files of tests/golden anew; review the diff
#   make check    formatter, linter, type checker, layer rules, links of pages, language
#   make format   format and mend what the linter can mend
#   make fuzz     random deployments and requests                  (DRAWS=60 SEED=10)
#   make matrix   the whole product of layouts: hours, not part of `make test`
#   make vllm     vLLM's own endpoint tests against our server: downloads its source package
#   make bench    measure the pipeline                             (BENCH="pipeline --json F")
#   make release  wheel and images of a tag `vX.Y.Z`, into dist/     (BASE=python:3.12-slim@sha256:...)
#   make lock     newest versions that pyproject.toml allows, with hashes, into requirements/
#   make clean    remove the environment, the caches and the build products

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
CONFIG ?= configs/demo.yaml
SET ?=
TESTS ?=
DRAWS ?= 60
SEED ?= 10
BENCH ?= pipeline
GRPCURL := build/bin/.grpcurl
SCHEMAS := build/schemas/.fetched
# A module of Go, and the file in it.
OTHER_SCHEMAS := \
  sigs.k8s.io/lws@v0.8.0:config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml \
  sigs.k8s.io/jobset@v0.10.1:config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml \
  github.com/prometheus-operator/prometheus-operator@v0.85.0:example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml \
  github.com/kedacore/keda/v2@v2.18.0:config/crd/bases/keda.sh_scaledobjects.yaml \
  github.com/compose-spec/compose-go/v2@v2.9.0:schema/compose-spec.json
GRPCURL_PACKAGE := github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3

# The simulated devices of a machine without an accelerator.
CPU := JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8
# The workers have the cores already; threads of OpenBLAS would spin beside them. A file's tests stay
# on one worker, and files are handed out in the order of tests/conftest.py: the longest first.
PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest \
  --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

# Markers of the tests that need nothing but time.
NIGHTLY := nightly and not (gpu or gpu_aot or hf or matrix)
# Every function checks its arguments and its result against their annotations (tests/typechecker.py).
CHECKED := --jaxtyping-packages=jaxserve,pallas_kernels,tests.typechecker.check

# Packages come in the versions of requirements/, and only if their hashes are those.
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
LOCKED := $(PIP) install --require-hashes --requirement requirements/build.txt
OWN := $(PIP) install --no-deps --no-build-isolation --editable .

# Images are built with it; EXTRAS are the platforms of which each has one.
DOCKER ?= docker
EXTRAS ?= cpu cuda tpu
BASE ?=

.PHONY: help serve prepare test nightly golden check format fuzz matrix vllm bench release lock clean

help:
	@sed -n 's/^#   //p' Makefile

# An environment without a working interpreter (moved, half made) is made again.
ifneq ($(shell $(BIN)/python -c 'print("works")' 2>/dev/null),works)
.PHONY: $(BIN)/python
endif
$(BIN)/python:
	@PYTHON="$(PYTHON)" .ci/create-venv $(VENV)

# Installed again only after these files changed.
$(VENV)/.installed-serve: pyproject.toml requirements/serve.txt | $(BIN)/python
	$(LOCKED) --requirement requirements/serve.txt
	$(OWN)
	touch $@

$(VENV)/.installed-all: pyproject.toml requirements/serve.txt requirements/test.txt | $(BIN)/python
	$(LOCKED) --requirement requirements/test.txt
	$(OWN)
	touch $@ $(VENV)/.installed-serve

# For tests that call the server as people do. Without Go, or what it has to fetch, they are skipped;
# `make clean` tries again.
$(GRPCURL):
	@mkdir -p $(@D); if command -v go > /dev/null; then \
	  GOBIN=$(CURDIR)/$(@D) GOTOOLCHAIN=local timeout 600 go install $(GRPCURL_PACKAGE) \
	    || echo 'grpcurl was not built; its tests are skipped' >&2; \
	fi; touch $@

# Schemas of Kubernetes, of its extensions and of CycloneDX, for the tests of rendered files. A
# schema that cannot be fetched is left out; its tests are skipped.
$(SCHEMAS): requirements/schemas.txt | $(BIN)/python
	@mkdir -p $(@D); $(PIP) download --no-deps --require-hashes --dest $(@D) \
	  --requirement $< || echo 'schemas of Kubernetes and of CycloneDX: not fetched' >&2
	@if command -v go > /dev/null; then for schema in $(OTHER_SCHEMAS); do \
	  folder=$$(cd $(@D) && GOTOOLCHAIN=local timeout 90 go mod download -json "$${schema%%:*}" \
	    | sed -n 's/.*"Dir": "\(.*\)".*/\1/p') && cp "$$folder/$${schema#*:}" $(@D) \
	    || { echo "$$schema and what follows: not fetched" >&2; break; }; done; fi; touch $@

serve: $(VENV)/.installed-serve
	@echo 'Starting. When a line says "ready", call the gRPC address in it from another terminal:'
	@echo '  $(BIN)/python -m jaxserve.generate --server 127.0.0.1:50051 --prompt "def fibonacci(n):"'
	$(CPU) $(BIN)/python -m jaxserve.serve --config $(CONFIG) $(addprefix --set ,$(SET))

# What the tests and the checks need.
prepare: $(VENV)/.installed-all $(GRPCURL) $(SCHEMAS)

test: prepare
	$(PYTEST) $(TESTS)

# Prints first how many tests it adds. A part that fails does not end the others.
nightly: prepare
	@failed=0; \
	$(BIN)/python -m pytest --collect-only -q -m "$(NIGHTLY)" $(TESTS) | tail -1; \
	$(PYTEST) -m "$(NIGHTLY)" $(CHECKED) $(TESTS) || failed=1; \
	echo 'Now what make test runs, with annotations checked'; \
	$(PYTEST) $(CHECKED) $(TESTS) || failed=1; \
	$(MAKE) matrix || failed=1; exit $$failed

golden: prepare
	WRITE_GOLDEN=1 $(PYTEST) $(or $(TESTS),$(shell grep -rl 'golden\.check' tests --include='test_*.py'))

# All four run, so that one round shows everything.
check: $(VENV)/.installed-all
	@failed=0; for tool in 'ruff format --check --quiet' 'ruff check' mypy 'lint-imports --no-cache --no-logo'; do \
	  echo "$$tool"; $(BIN)/$$tool || failed=1; \
	done; exit $$failed
	@find jaxserve pallas_kernels launch -name '*.py' -exec wc -l {} + | awk '$$1 > 500 && $$2 != "total" \
	  { print $$2 ": " $$1 " lines, 500 at most"; long = 1 } END { exit long }'
	@$(BIN)/python -m pytest -q tests/test_readme.py tests/test_language.py

format: $(VENV)/.installed-all
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Any draws; those of `make test` and `make nightly` are in the file.
fuzz: $(VENV)/.installed-all
	FUZZ_DRAWS=$(DRAWS) FUZZ_SEED=$(SEED) $(PYTEST) --dist load tests/jaxserve/test_fuzz.py

matrix: $(VENV)/.installed-all
	LAYOUT_TOKENS=64 JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(PYTEST) -m matrix $(TESTS)

vllm: $(VENV)/.installed-all
	$(BIN)/python -m pytest -m vllm tests/vllm --capture=no --override-ini=faulthandler_timeout=0

# Resolves in an environment of its own, whose packages are locked, too.
lock: | $(BIN)/python
	$(BIN)/python -m venv --clear build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
	  --requirement requirements/lock.txt
	build/lock/bin/python .ci/lock

bench: $(VENV)/.installed-serve
	$(CPU) $(BIN)/python -m jaxserve.bench $(BENCH)

release: $(VENV)/.installed-serve
	rm -rf dist
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m jaxserve.launch --target image --config demo --write dist/image
	@[ -n "$(BASE)" ] || { echo 'dist/ has the wheel; images need BASE=python:3.12-slim@sha256:DIGEST' >&2; exit 1; }
	version=$$(basename dist/jaxserve-*.whl | cut -d- -f2); for extra in $(EXTRAS); do \
	  $(DOCKER) build --tag "jaxserve:$${version/+/-}-$$extra" --build-arg BASE="$(BASE)" \
	    --build-arg EXTRA="$$extra" --build-arg JAXSERVE_VERSION="$$version" \
	    --file dist/image/Dockerfile .; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find jaxserve pallas_kernels tests launch -name __pycache__ -prune -exec rm -rf {} +
