// Measures the engine against the bandwidth of the memory.
//   copy_bench [MiB] [threads] [rounds]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "engine/bulk.h"
#include "engine/crc32c_backend.h"
#include "engine/parallel.h"
#include "engine/pieces.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace {

using eckpt::Crc32cBackend;

struct Case {
  std::string name;
  std::function<void()> work;
  std::vector<double> taken_s = {};
};

struct Setting {
  size_t nbytes;
  int threads;
  std::byte* target;
  const std::byte* source;
};

// Calls work(target, source, nbytes) for each piece of the buffers on the threads.
template <class Work>
void InPieces(const Setting& setting, Work work) {
  eckpt::ParallelFor(setting.nbytes / eckpt::kPieceBytes, setting.threads, [&](size_t i) {
    const size_t at = i * eckpt::kPieceBytes;
    work(setting.target + at, setting.source + at, eckpt::kPieceBytes);
  });
}

void CopyPastCaches(std::byte* target, const std::byte* source, size_t nbytes) {
#if defined(__x86_64__)
  for (size_t at = 0; at < nbytes; at += sizeof(__m128i)) {
    const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at));
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + at), part);
  }
  _mm_sfence();
#else
  std::memcpy(target, source, nbytes);
#endif
}

constexpr eckpt::ValuePattern kNonFiniteBfloat16{2, 0x7f80, 0x7f80};

// Prevents the compiler from removing results that no code reads.
std::atomic<uint32_t> sink;

std::vector<Case> BackendCases(const Setting& setting, const Crc32cBackend& backend) {
  const std::string name = backend.name;
  const auto feed = [&backend](const std::byte* source, size_t nbytes) {
    sink.fetch_xor(backend.feed(0, source, nbytes), std::memory_order_relaxed);
  };
  return {
      {name + " crc, in cache, 1 thread",
       [=] {
         for (size_t at = 0; at < setting.nbytes; at += 65536) feed(setting.source, 65536);
       }},
      {name + " crc",
       [=] { InPieces(setting, [&](std::byte*, const std::byte* s, size_t n) { feed(s, n); }); }},
      {name + " crc, then copy, by 256 KiB",
       [=] {
         InPieces(setting, [&](std::byte* t, const std::byte* s, size_t n) {
           constexpr size_t kStep = 256 * 1024;
           for (size_t at = 0; at < n; at += kStep) {
             feed(s + at, kStep);
             CopyPastCaches(t + at, s + at, kStep);
           }
         });
       }},
      {name + " copy with crc",
       [=, &backend] {
         InPieces(setting, [&](std::byte* t, const std::byte* s, size_t n) {
           sink.fetch_xor(backend.copy(0, t, s, n), std::memory_order_relaxed);
         });
       }},
      {name + " copy with crc and look",
       [=, &backend] {
         InPieces(setting, [&](std::byte* t, const std::byte* s, size_t n) {
           bool seen = false;
           sink.fetch_xor(backend.copy_and_look(0, t, s, n, kNonFiniteBfloat16, seen),
                          std::memory_order_relaxed);
         });
       }},
  };
}

std::vector<Case> AllCases(const Setting& setting) {
  std::vector<Case> cases{
      {"memcpy", [=] { InPieces(setting, std::memcpy); }},
      {"non-temporal copy", [=] { InPieces(setting, CopyPastCaches); }},
  };
  for (const Crc32cBackend& backend : eckpt::UsableCrc32cBackends()) {
    for (Case& made : BackendCases(setting, backend)) cases.push_back(std::move(made));
  }
  for (const size_t buffer_bytes : {setting.nbytes, size_t{65536}}) {
    for (const eckpt::ValuePattern& pattern : {eckpt::ValuePattern{}, kNonFiniteBfloat16}) {
      std::vector<eckpt::Copy> copies;
      for (size_t at = 0; at < setting.nbytes; at += buffer_bytes) {
        copies.push_back({{setting.source + at, buffer_bytes}, setting.target + at, pattern});
      }
      const char* counts = pattern.width == 0 ? "" : " and count";
      cases.push_back(
          {"copy all" + std::string(counts) + ", " + std::to_string(copies.size()) + " buffers",
           [=] { eckpt::CopyAllAndCount(copies, setting.threads); }});
    }
  }
  return cases;
}

// One round runs every case once, so that other load of the machine affects all alike.
void RunRound(std::vector<Case>& cases) {
  for (Case& one : cases) {
    const auto start = std::chrono::steady_clock::now();
    one.work();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    one.taken_s.push_back(taken.count());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const size_t nbytes = static_cast<size_t>(argc > 1 ? std::atoi(argv[1]) : 256) << 20;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 15;
  const std::vector<std::byte> source(nbytes, std::byte{3});
  std::vector<std::byte> target(nbytes);
  std::vector<Case> cases = AllCases({nbytes, threads, target.data(), source.data()});
  for (int round = 0; round < rounds; ++round) RunRound(cases);
  std::printf("%zu MiB, %d threads, %d rounds; GB/s\n%-36s %8s %8s\n", nbytes >> 20, threads,
              rounds, "", "best", "median");
  for (Case& one : cases) {
    std::sort(one.taken_s.begin(), one.taken_s.end());
    const double gigabytes = static_cast<double>(nbytes) / 1e9;
    std::printf("%-36s %8.1f %8.1f\n", one.name.c_str(), gigabytes / one.taken_s.front(),
                gigabytes / one.taken_s[one.taken_s.size() / 2]);
  }
  return 0;
}
