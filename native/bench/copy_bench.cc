// Measures the engine against what the memory allows: GB/s of each loop, best of several rounds.
//   copy_bench [MiB] [threads] [rounds]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
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

struct Buffers {
  std::vector<std::byte> source;
  std::vector<std::byte> target;
};

// Calls work(offset, nbytes) for each piece of the buffer on the threads.
void InPieces(size_t nbytes, int threads, const std::function<void(size_t, size_t)>& work) {
  eckpt::ParallelFor(nbytes / eckpt::kPieceBytes, threads,
                     [&](size_t i) { work(i * eckpt::kPieceBytes, eckpt::kPieceBytes); });
}

void CopyPastCaches(std::byte* target, const std::byte* source, size_t nbytes) {
#if defined(__x86_64__)
  for (size_t i = 0; i < nbytes; i += 64) {
    for (size_t k = 0; k < 64; k += 16) {
      const auto* from = reinterpret_cast<const __m128i*>(source + i + k);
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + i + k), _mm_loadu_si128(from));
    }
  }
  _mm_sfence();
#else
  std::memcpy(target, source, nbytes);
#endif
}

void Report(const char* name, size_t nbytes, int rounds, const std::function<void()>& work) {
  double best_s = 1e9;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best_s = std::min(best_s, taken.count());
  }
  std::printf("%-40s %6.1f GB/s\n", name, static_cast<double>(nbytes) / best_s / 1e9);
}

}  // namespace

int main(int argc, char** argv) {
  const size_t nbytes = static_cast<size_t>(argc > 1 ? std::atoi(argv[1]) : 256) << 20;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 15;
  Buffers buffers{std::vector<std::byte>(nbytes, std::byte{3}), std::vector<std::byte>(nbytes)};
  std::byte* const target = buffers.target.data();
  const std::byte* const source = buffers.source.data();
  std::printf("%zu MiB, %d threads, best of %d\n", nbytes >> 20, threads, rounds);

  Report("memcpy", nbytes, rounds, [&] {
    InPieces(nbytes, threads,
             [&](size_t at, size_t n) { std::memcpy(target + at, source + at, n); });
  });
  Report("non-temporal copy", nbytes, rounds, [&] {
    InPieces(nbytes, threads,
             [&](size_t at, size_t n) { CopyPastCaches(target + at, source + at, n); });
  });
  for (const Crc32cBackend& backend : eckpt::UsableCrc32cBackends()) {
    const std::string name = backend.name;
    std::vector<uint32_t> sink(nbytes / eckpt::kPieceBytes);
    Report((name + " crc, in cache, 1 thread").c_str(), nbytes, rounds, [&] {
      for (size_t i = 0; i < nbytes; i += 65536) sink[0] ^= backend.feed(0, source, 65536);
    });
    Report((name + " crc").c_str(), nbytes, rounds, [&] {
      InPieces(nbytes, threads, [&](size_t at, size_t n) {
        sink[at / eckpt::kPieceBytes] = backend.feed(0, source + at, n);
      });
    });
    Report((name + " copy with crc").c_str(), nbytes, rounds, [&] {
      InPieces(nbytes, threads, [&](size_t at, size_t n) {
        sink[at / eckpt::kPieceBytes] = backend.copy(0, target + at, source + at, n);
      });
    });
    Report((name + " crc, then copy, in 256 KiB").c_str(), nbytes, rounds, [&] {
      InPieces(nbytes, threads, [&](size_t at, size_t n) {
        for (size_t i = at; i < at + n; i += 256 << 10) {
          sink[at / eckpt::kPieceBytes] ^= backend.feed(0, source + i, 256 << 10);
          CopyPastCaches(target + i, source + i, 256 << 10);
        }
      });
    });
  }
  const std::vector<eckpt::Copy> copies{{{source, nbytes}, target}};
  Report("CopyAllWithCrc32c, one buffer", nbytes, rounds,
         [&] { eckpt::CopyAllWithCrc32c(copies, threads); });
  std::vector<eckpt::Copy> small;
  for (size_t i = 0; i < nbytes; i += 65536) small.push_back({{source + i, 65536}, target + i});
  Report("CopyAllWithCrc32c, 64 KiB buffers", nbytes, rounds,
         [&] { eckpt::CopyAllWithCrc32c(small, threads); });
  return 0;
}
