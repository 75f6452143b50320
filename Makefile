# Every target does its own set-up: a machine with Python >= 3.11, pip and make needs nothing else.
#
#   make test     the tests
#   make test-thorough     those that `make test` leaves out: whole matrices, campaigns, benchmarks, long pages
#   make test-faults       the long tests of faults, for an hour or two
#   make fault-table       break it on purpose, thousands of times, and write docs/faults.md; more than two hours on 2 cores
#   make test-frameworks   the tests against DeepSpeed, Megatron and all other frameworks themselves, in environments of their own
#   make test-framework-accelerate    the integration of one framework; its environment lies over that of the tests
#   make test-gpu     the tests of devices, on the GPU of this machine
#   make test-package      build sdist and wheel, and try the wheel in an environment of its own, away from this tree
#   make lint     ruff and mypy
#   make demo     train a small GPT, kill it and stop it, resume it on other layouts
#   make bench    how long things take, beside what others take
#   make bench-load    the same of loading
#   make bench-objects    the same with an object store
#   make docs     the site of docs/, into site/; it needs no network when it is read
#   make cli-doc  write what the commands say about their options into docs/cli.md
#   make clean    remove what the above have made

PYTHON ?= python3
# A plain `pip install torch` may pull gigabytes of CUDA, so this one version is installed first and alone. With
# TORCH="torch" or another version on the command line that one is taken.
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
DEMO_FOLDER := demo-out
# A tenth of the full size, for a few minutes; `make bench BENCH_ARGS=` runs all of it, for hours and with 20 GiB.
BENCH_ARGS ?= --size 0.1 --rounds 3
BENCH_LOAD_ARGS ?= --size 0.1
BENCH_RANKS_ARGS ?= --ranks 8 32 --rounds 2 --assign 1024
BENCH_COLD_ARGS ?= --size 0.1 --rounds 3
BENCH_OBJECTS_ARGS ?= --size 0.25
FRAMEWORKS := $(patsubst tests/frameworks/requirements-%.txt,%,$(wildcard tests/frameworks/requirements-*.txt))

.DELETE_ON_ERROR:
.PHONY: test test-thorough test-gpu test-package test-faults fault-table test-frameworks $(FRAMEWORKS:%=test-framework-%) lint docs demo bench bench-load bench-objects \
  cli-doc clean

# Three processes share the files: tests wait as long as they compute. `make test PYTEST_ARGS="-n 0 -k name"` uses one.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-thorough: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "thorough and not frameworks and not long" $(PYTEST_ARGS)

test-faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

# On a machine with a GPU: TORCH=torch installs a torch that has CUDA. Without one they say that they were skipped.
test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 0 -m "not frameworks and not long" tests/gpu $(PYTEST_ARGS)

# The wheel is built out of the sdist, so this finds what either lacks; the environment has what a plain install brings.
test-package: $(VENV)/.installed-test
	@$(PIP) install build
	@rm -rf dist .venv-package && mkdir dist
	$(BIN)/python -m build --outdir dist . >dist/build.log 2>&1 || { tail -20 dist/build.log; exit 1; }
	@$(PYTHON) -m venv --without-pip .venv-package
	@$(PIP) --python .venv-package/bin/python install "$(TORCH)"
	@$(PIP) --python .venv-package/bin/python install dist/*.whl
	folder=$$(mktemp -d) && cp tests/package_smoke.py $$folder && cd $$folder \
	  && $(CURDIR)/.venv-package/bin/python package_smoke.py $(CURDIR)/README.md && rm -rf $$folder

# FAULT_ARGS="kill-calls flip-data" runs these rows only; --minutes 5 takes as many trials of each as fit.
fault-table: $(VENV)/.installed-test
	$(BIN)/python tests/faults/fault_table.py $(FAULT_ARGS)

# Frameworks pin what they need, so they get an environment of their own: the same rules, under another name.
test-frameworks: $(FRAMEWORKS:%=test-framework-%)
	@$(MAKE) VENV=.venv-frameworks run-test-frameworks

.PHONY: run-test-frameworks
run-test-frameworks: $(VENV)/.installed-frameworks
	$(BIN)/python -m pytest -m frameworks tests/frameworks/*.py $(PYTEST_ARGS)

$(FRAMEWORKS:%=test-framework-%): test-framework-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest -m frameworks tests/frameworks/$* $(PYTEST_ARGS)

# Saves of a framework's own job, by itself and through its integration.
bench-framework-%: .venv-%/.installed $(VENV)/.installed-bench
	$(BIN)/python benchmarks/run.py in_trainers --framework $* $(BENCH_FRAMEWORK_ARGS)

# Over the environment of the tests: torch and the test tools are there already. alone-NAME.txt lists what is installed
# without what it asks for.
.venv-%/.installed: tests/frameworks/requirements-%.txt $(VENV)/.installed-test
	@echo "installing $*"
	@$(PYTHON) -m venv --clear --without-pip .venv-$*
	@.venv-$*/bin/python -c 'import sysconfig, pathlib; pathlib.Path(sysconfig.get_path("purelib"), "tests.pth").write_text("import site; site.addsitedir(\"%s\")\n" % pathlib.Path("$(VENV)").absolute().joinpath(*pathlib.Path(sysconfig.get_path("purelib")).parts[-3:]))'
	@DS_BUILD_OPS=0 $(PIP) --python .venv-$*/bin/python install --requirement $<
	@if [ -e tests/frameworks/alone-$*.txt ]; then $(PIP) --python .venv-$*/bin/python install --no-deps --requirement tests/frameworks/alone-$*.txt; fi
	@touch $@

lint: $(VENV)/.installed-lint
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# A dead link, a page outside the navigation or a name that is gone fails it. `make docs` and then
# `python -m http.server --directory site` shows it with its search.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/demo.py --out $(DEMO_FOLDER)

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/run.py startup
	$(BIN)/python benchmarks/run.py manifest
	$(BIN)/python benchmarks/run.py codec
	$(BIN)/python benchmarks/run.py plan_cache
	$(BIN)/python benchmarks/run.py planning
	$(BIN)/python benchmarks/run.py ranks $(BENCH_RANKS_ARGS)
	$(BIN)/python benchmarks/run.py save $(BENCH_ARGS)

bench-load: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/run.py load $(BENCH_LOAD_ARGS)
	$(BIN)/python benchmarks/run.py cold $(BENCH_COLD_ARGS)

bench-objects: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/run.py object_store $(BENCH_OBJECTS_ARGS)

cli-doc: $(VENV)/.installed-test
	$(BIN)/python tests/tools/cli_page.py

clean:
	rm -rf $(VENV) .venv-* build dist site $(DEMO_FOLDER) *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: one for the venv, one for torch, one for each set of extras; only the last kind is redone when
# pyproject.toml changes, and finds nearly everything in place then.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bytecheckpoint needs Python 3.11 or newer, and $(PYTHON) is %d.%d: name another with make PYTHON=..." % sys.version_info[:2])'
	@echo "making a virtual environment in $(VENV)"
	@rm -rf $(VENV)
	@# Some distributions ship a venv module that cannot put pip into what it makes.
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --quiet --python $(BIN)/python install pip; }
	@touch $@

$(VENV)/.installed-torch: | $(VENV)/.created
	@echo "installing $(TORCH)"
	@$(PIP) install "$(TORCH)"
	@touch $@

$(VENV)/.installed-bench: benchmarks/requirements.txt $(VENV)/.installed-test
	@$(PIP) install --requirement benchmarks/requirements.txt
	@touch $@

$(VENV)/.installed-frameworks: $(wildcard tests/frameworks/requirements*.txt) $(VENV)/.installed-test
	@echo "installing the frameworks"
	@DS_BUILD_OPS=0 $(PIP) install --requirement tests/frameworks/requirements.txt
	@$(PIP) install --no-deps --requirement tests/frameworks/requirements_alone.txt
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(VENV)/.installed-torch
	@echo "installing bytecheckpoint with what '$*' needs"
	@$(PIP) install --editable ".[$*]"
	@touch $@
