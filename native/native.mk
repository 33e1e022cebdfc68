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

.PHONY: native-test native-asan native-tsan native-bench native-fuzz

# When these tests last passed: `make test` runs them where a source is newer.
NATIVE_TESTED = build/native/tested
$(NATIVE_TESTED): CMakeLists.txt native/native.mk $(wildcard \
		native/*/CMakeLists.txt native/*/*.cc native/*/*.h native/fuzz/corpus/*/*)
	$(call eckpt_native_run,native)
	touch $@

native-test: $(NATIVE_TESTED)

native-asan:
	$(call eckpt_native_run,native-asan,address$(eckpt_comma)undefined)

native-tsan:
	$(call eckpt_native_run,native-tsan,thread,$(ECKPT_FIXED_ADDRESSES))

FUZZ_CXX ?= clang++ $(addprefix clang++-,22 21 20 19 18 17 16 15 14)
ECKPT_FUZZ_SANITIZE = address$(eckpt_comma)undefined
ECKPT_FUZZ_PROGRAM = extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }
# The first compiler that links a program with libFuzzer and the sanitizers.
eckpt_fuzz_cxx = $(shell for cxx in $(FUZZ_CXX); do echo '$(ECKPT_FUZZ_PROGRAM)' | \
	$$cxx -x c++ -fsanitize=fuzzer$(eckpt_comma)$(ECKPT_FUZZ_SANITIZE) - -o /dev/null 2>/dev/null && echo $$cxx && break; done)

# 77: this machine has no such compiler.
native-fuzz:
	( test -n "$(eckpt_fuzz_cxx)" || { echo "no clang++ with libFuzzer was found; set FUZZ_CXX=" >&2; exit 77; } && \
	$(ECKPT_CMAKE) -B build/native-fuzz -DECKPT_NATIVE_FUZZ=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
		-DCMAKE_CXX_COMPILER=$(eckpt_fuzz_cxx) -DECKPT_SANITIZE=fuzzer-no-link$(eckpt_comma)$(ECKPT_FUZZ_SANITIZE) && \
	$(VENV)/bin/cmake --build build/native-fuzz && \
	native/fuzz/run.sh build/native-fuzz/native/fuzz $(FUZZ_SECONDS) fuzz_out/native ) $(CANNOT)

native-bench:
	$(ECKPT_CMAKE) -B build/native-bench -DECKPT_NATIVE_BENCH=ON
	$(VENV)/bin/cmake --build build/native-bench
	build/native-bench/native/bench/copy_bench $(BENCH_ARGUMENTS)
