# Included by the Makefile at the root. Needs cmake and ninja in $(VENV)/bin and a C++20 compiler;
# its targets need neither Python nor nanobind.
VENV ?= .venv

ECKPT_CMAKE = $(VENV)/bin/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja) -S .
# Random addresses can be in ThreadSanitizer's shadow memory, so they are switched off if allowed.
ECKPT_FIXED_ADDRESSES = $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)
eckpt_comma := ,

define eckpt_native_run
	$(ECKPT_CMAKE) -B build/$(1) -DECKPT_NATIVE_TESTS=ON -DECKPT_WERROR=ON -DECKPT_SANITIZE=$(2) -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(VENV)/bin/cmake --build build/$(1)
	$(3) $(VENV)/bin/ctest --test-dir build/$(1) --output-on-failure
endef

.PHONY: native-test native-asan native-tsan native-bench

native-test:
	$(call eckpt_native_run,native)

native-asan:
	$(call eckpt_native_run,native-asan,address$(eckpt_comma)undefined)

native-tsan:
	$(call eckpt_native_run,native-tsan,thread,$(ECKPT_FIXED_ADDRESSES))

native-bench:
	$(ECKPT_CMAKE) -B build/native-bench -DECKPT_NATIVE_BENCH=ON
	$(VENV)/bin/cmake --build build/native-bench
	build/native-bench/native/bench/copy_bench $(BENCH_ARGUMENTS)
