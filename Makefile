# Each target installs $(VENV) first. Requires Python >= 3.11, a C++20 compiler, make.
VENV ?= .venv
BIN = $(VENV)/bin
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
INSTALLED = $(VENV)/installed
EXTRAS ?= demo,test,check
TF_VENV ?= .venv-tf
RAY_VENV ?= .venv-ray
# Rooms that meet the versions of others: dtypes, Orbax, JAX, storage, msgspec before 0.23.
VERSION_TESTS ?= tests/state tests/config tests/checkpointer tests/orbax tests/storage tests/maxtext tests/axlearn \
	tests/test_json_decoders.py
# Twice the cores of a small machine: tests of jobs wait a good part of their time.
TEST_WORKERS ?= 4
MINUTES ?= 60
SEED ?= 1
FUZZ_SECONDS ?= 60
SEEDS ?= 200
# New warnings of a newer compiler are errors in .ci/run only.
WERROR ?= OFF
NATIVE_SOURCES = CMakeLists.txt $(wildcard native/engine/* native/glue/*)
CXX_FILES = $(wildcard native/*/*.cc native/*/*.h)

.PHONY: help size demo sdist test test-tf tf-tests test-dist test-slurm test-ray test-slow soak soak-kill fuzz simulate simulate-mutants kill-matrix model check bench bench-minutes bench-scale bench-recovery bench-dcn clean

help:
	@echo "make demo    train on a simulated job, lose a slice, be preempted, lose all RAM, and recover each time"
	@echo "make test    what to run at each change: tests that start no process, and a chosen few that do (five minutes)"
	@echo "make test-all   all but the slow ones, and the C++ tests under sanitizers (25 minutes)"
	@echo "make test-night   what takes long: slow tests, soak, fuzzing, the model, clusters, images, packages, mutants"
	@echo "make test-versions   run VERSION_TESTS with the lowest versions that pyproject.toml admits, and with the newest"
	@echo "             on each Python; test-lowest and test-newest-3.13 are two of them"
	@echo "make test-tf run the tests of tf.data iterators, with TensorFlow in its own venv"
	@echo "make test-ray  run deploy/ray on Ray's local cluster, in its own venv (five minutes)"
	@echo "make test-slurm   run deploy/slurm on five real slurmd; needs root and Debian (ten minutes)"
	@echo "make test-dist build the sdist and the wheel, install each, save and restore"
	@echo "make test-image   build deploy/Dockerfile with buildah and run it as a pod; needs root (five minutes)"
	@echo "make test-report test-monitoring   the report in a browser (chromium, chromedriver); the rules and"
	@echo "             the dashboard in Prometheus (prometheus, promtool); 77 where these are missing"
	@echo "make test-device   what every link keeps, on the link of the accelerator that is there"
	@echo "make test-slow   run the slow tests: more faults, more preemption notices"
	@echo "make soak    random faults in jobs of real processes for MINUTES (60), from SEED (1)"
	@echo "make explore   each operation on storage beside each second actor, stopped at each change (an hour); EXPLORE_FLAGS"
	@echo "make soak-kill   SIGKILL at every point of a persistent save (about half an hour)"
	@echo "make simulate   run SEEDS (200) histories of a job under a scheduler that each seed decides; SIMULATE_FLAGS"
	@echo "make simulate-mutants   put known defects back, one at a time: the simulation must find each"
	@echo "make kill-matrix   put the defects of the reliability record back, one at a time: which tests notice? KILL_FLAGS;"
	@echo "             hours, and goes on where it was interrupted"
	@echo "make model   check the model of the step log with TLC, and find each defect in it; needs Java, else 77 (an hour)"
	@echo "make fuzz    fuzz every decoder for FUZZ_SECONDS (60) each"
	@echo "make size    count lines, classes, settings, commands, calls of a save and a restore; AGAINST=REVISION"
	@echo "make check-documents   the documents alone, and the commands that they show"
	@echo "make dist    build the sdist and the wheel of PYTHON into dist/"
	@echo "make check   format, lint, types, import layers, documents, mutants that still apply"
	@echo "make docs    build the documentation as a site, in build/site, in its own venv; a dead link ends it"
	@echo "make bench   compare with Orbax in 20 minutes, BENCH_FLAGS=--quick in two (needs an idle machine)"
	@echo "make bench-minutes   minutes to 2,000 steps with a failure every 100 to 300, beside Orbax"
	@echo "make bench-dcn   a lost slice among 2, 4, 8 over slow links; needs root (about ten minutes)"
	@echo "make bench-recovery bench-recovery-slurm   from a lost slice to the next step, part by part (ten minutes"
	@echo "             each); under eckpt launch, or under Slurm as make test-slurm"
	@echo "make bench-scale   planner and coordination of up to 10,000 processes"
	@echo "make native-test native-asan native-tsan   the C++ tests, plain and under sanitizers"
	@echo "make native-fuzz   fuzz the native engine for FUZZ_SECONDS (60) a target (clang++ with libFuzzer, else 77)"

$(INSTALLED): pyproject.toml $(NATIVE_SOURCES)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found; set PYTHON=" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--config-settings cmake.define.ECKPT_WERROR=$(WERROR) --editable '.[$(EXTRAS)]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -m examples.demo $(DEMO_FLAGS)

# Tests wait for processes, deadlines and disks half of the time. Test files share no state.
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
# Each worker imports all tests, and many tests start programs: images often turn bytecode off.
export PYTHONDONTWRITEBYTECODE =
# DURATIONS=print: what each file cost, and which grew; DURATIONS=write keeps that in tests/durations.json.
COSTS = $(if $(DURATIONS),--file-costs $(DURATIONS))

test: TEST_WORKERS = 3
test: $(INSTALLED) native-test
	$(PYTEST) --timeout 60 --hypothesis-profile quick \
		-m "not slow and (core or not (process or dear))" $(COSTS) $(TEST_FLAGS)

.PHONY: test-all test-but-slow test-night
# The C++ tests beside the others, which wait a good part of their time.
test-all: $(INSTALLED)
	$(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j2) test-but-slow native-test native-asan native-tsan

# Builds beside it make a second of CPU worth less: four times as many as in `make test`.
test-but-slow: $(INSTALLED)
	$(PYTEST) -m "not slow" --most-cpu-s 8 $(COSTS) $(TEST_FLAGS)

# All of them, whichever fail. One that ends with 77 cannot run here, and has said why. `test-dist` is in `test-slow`.
NIGHT = test-slow soak soak-kill fuzz native-fuzz model simulate simulate-mutants kill-matrix \
	test-slurm test-ray test-image test-versions test-tf test-report test-monitoring check-history
test-night: $(INSTALLED)
	$(MAKE) --keep-going --no-print-directory SEEDS=20000 KILL_FLAGS="--sample 10" \
		CANNOT='|| { test $$$$? -eq 77 && echo "$$@: cannot run here, for the reason above"; }' $(NIGHT)

# Each with VERSION_TESTS. Lowest: of direct requirements; what they need themselves is the newest that fits.
VERSIONS = lowest-3.11 newest-3.11 newest-3.12 newest-3.13
.PHONY: test-lowest test-versions $(VERSIONS:%=test-%)
test-lowest: test-lowest-3.11
test-versions: $(VERSIONS:%=test-%)
$(VERSIONS:%=test-%): test-%:
	test -x .venv-$*/bin/python || python$(lastword $(subst -, ,$*)) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-$*/bin/uv pip install --quiet --python .venv-$*/bin/python \
		--resolution $(if $(findstring lowest,$*),lowest-direct,highest) --editable '.[demo,test]'
	.venv-$*/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(VERSION_TESTS) $(TEST_FLAGS)

# TensorFlow is large, and with it etils.epath uses another client for gs://.
test-tf:
	$(MAKE) VENV=$(TF_VENV) EXTRAS=demo,test,tf tf-tests

tf-tests: $(INSTALLED)
	$(BIN)/python -m pytest tests_tf $(TEST_FLAGS)

# 77: this machine or user cannot run it; the program has printed the reason.
test-slurm: $(INSTALLED)
	$(BIN)/python tests/deploy/slurm/enter.py $(BIN)/python -m pytest -s tests/deploy/slurm/slurm_jobs.py $(TEST_FLAGS) $(CANNOT)

# In the namespace of test-slurm, under its template; 77 as there.
bench-recovery-slurm: $(INSTALLED)
	$(BIN)/python tests/deploy/slurm/enter.py $(BIN)/python -m benchmarks.recovery --engine slurm $(BENCH_FLAGS)

.PHONY: test-report test-monitoring bench-recovery-slurm
# 77: this machine lacks a program that the test needs; it has printed which.
test-report test-monitoring: test-%: $(INSTALLED)
	$(BIN)/python tests/system/$*_check.py $(CANNOT)
# As for Slurm. Ray is large, and has a virtual environment of its own.
test-ray: ray-venv
	$(RAY_VENV)/bin/python tests/deploy/ray/enter.py $(RAY_VENV)/bin/python -m pytest -s \
		--confcutdir tests/deploy/ray tests/deploy/ray/recovery.py $(TEST_FLAGS) $(CANNOT)

.PHONY: ray-venv
ray-venv:
	test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[ray]' pytest pytest-timeout || echo 'Ray could not be installed' >&2

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow $(TEST_FLAGS)

# One incident again: SOAK_FLAGS='--only 123'.
soak: $(INSTALLED)
	$(BIN)/python verification/soak/soak.py --minutes $(MINUTES) --seed $(SEED) $(SOAK_FLAGS)

# The sdist and the wheel of deploy/Dockerfile, each installed into an empty environment. Packages are downloaded.
test-dist: $(INSTALLED)
	$(BIN)/python -m pytest -m slow tests/test_package.py $(TEST_FLAGS)

# 77: this machine or user cannot build an image; the program has printed the reason.
.PHONY: test-image
test-image: $(INSTALLED)
	$(BIN)/python tests/deploy/image_check.py $(CANNOT)

# What every link keeps, on the link of the accelerator that is there.
.PHONY: test-device
test-device: $(INSTALLED)
	EMERGENCY_CKPT_TEST_PLATFORM= $(BIN)/python -m pytest -k machine tests/state/test_link.py $(TEST_FLAGS)

# One case again, or a bucket: EXPLORE_FLAGS='--place bucket --operation remove --actor newer_life --k 5'.
.PHONY: explore
explore: $(INSTALLED)
	$(BIN)/python verification/explorer/run.py $(EXPLORE_FLAGS)

# The file's name keeps it out of `make test`.
soak-kill: $(INSTALLED)
	$(BIN)/python -m pytest -s tests/system/soak_persistent_kills.py $(TEST_FLAGS)

fuzz: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'atheris>=3'
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(FUZZ_SECONDS) $(FUZZ_FLAGS)

size: $(INSTALLED)
	$(BIN)/python tests/size.py $(if $(AGAINST),--against $(AGAINST))

simulate: $(INSTALLED)
	$(BIN)/python verification/simulation/run.py --seeds $(SEEDS) $(SIMULATE_FLAGS)

simulate-mutants: $(INSTALLED)
	$(BIN)/python verification/simulation/run.py --mutants $(SIMULATE_FLAGS)

# One mutant: KILL_FLAGS='--only NAME'. Ten, drawn anew: KILL_FLAGS='--sample 10 --seed 7'.
kill-matrix: $(INSTALLED)
	$(BIN)/python verification/kill_matrix/matrix.py $(KILL_FLAGS)

# Some checks alone: MODEL_FLAGS=order-by-clock. 77: there is no Java, or no TLC; the program has printed which.
model: $(INSTALLED)
	$(BIN)/python verification/model/run.py $(MODEL_FLAGS) $(CANNOT)

.PHONY: check-documents
check-documents: $(INSTALLED)
	$(BIN)/python tests/documents/run.py
	$(BIN)/python verification/given_up_words.py
	$(BIN)/python -m pytest tests/cli/test_commands.py tests/cli/test_recipes.py $(TEST_FLAGS)

# The sdist and the wheel for the Python of PYTHON, for the oldest glibc that the wheel runs with, in dist/.
.PHONY: dist
dist:
	PYTHON=$(PYTHON) deploy/image/build_wheel.sh . dist

# The wheels of a release are made by cibuildwheel: see pyproject.toml.
sdist:
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet --disable-pip-version-check build
	build/tools/bin/python -m build --sdist

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python verification/kill_matrix/matrix.py --check
	$(BIN)/python tests/documents/run.py
	$(BIN)/python verification/given_up_words.py

# Apart from `check`: a copy whose history was rewritten lacks commits, and is whole nevertheless.
.PHONY: check-history
check-history: $(INSTALLED)
	$(BIN)/python tests/documents/run.py --history

# The packages of the site have nothing to do with those of the library, whose source the site reads.
.PHONY: docs
docs:
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r docs/site/requirements.txt
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.compare --minutes 10 $(BENCH_FLAGS)

bench-minutes bench-recovery bench-scale: bench-%: $(INSTALLED)
	$(BIN)/python -m benchmarks.$* $(BENCH_FLAGS)

# 77: this machine or user cannot simulate such hosts; the benchmark has printed the reason.
bench-dcn: $(INSTALLED)
	$(BIN)/python -m benchmarks.dcn $(BENCH_FLAGS) || test $$? -eq 77

clean:
	rm -rf build dist demo_out bench_out fuzz_out simulation_out soak_out kill_matrix_out

include native/native.mk
native-asan native-tsan native-bench native-fuzz: $(INSTALLED)
$(NATIVE_TESTED): | $(INSTALLED)
