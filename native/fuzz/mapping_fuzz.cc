// Ranges, sizes and thread counts that another process named, over a mapping: each call refuses
// them by its documented exception, or works on exactly these bytes.
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "engine/bulk.h"
#include "engine/mapping.h"
#include "engine/parallel.h"
#include "fuzz/input.h"
#include "tests/temporary_file.h"

namespace eckpt::fuzz {
namespace {

// Above a piece (1 MiB), so that threads divide one range.
constexpr size_t kMostFileBytes = size_t{5} << 18;
constexpr size_t kMostRanges = 6;

// A mapping, and the bytes that it should have.
class Checked {
 public:
  Checked(int fd, size_t size_bytes, bool writable)
      : mapping_(fd, size_bytes, writable), memory_(mapping_.Hold()), model_(size_bytes) {}

  const std::vector<std::byte>& model() const { return model_; }
  void Close() {
    mapping_.Close();
    Expect(Refuses<std::invalid_argument>([this] { mapping_.Hold(); }), "closed: no memory");
  }

  void Sum(Input& input) {
    std::vector<Bytes> spans, expected;
    for (size_t count = input.AtMost(kMostRanges); count != 0; --count) {
      const ByteRange range = Range(input);
      const auto read = [&] { spans.push_back(memory_->Read(range)); };
      const bool is_inside = IsInside(range, model_.size());
      Expect(Refuses<std::invalid_argument>(read) != is_inside, "read: refused if not inside");
      if (is_inside) expected.push_back(Place(spans.back(), range));
    }
    const int threads = Threads(input);
    std::vector<uint32_t> crcs;
    if (IsRefused(threads, [&] { crcs = Crc32cOfAll(spans, threads); })) return;
    Expect(crcs.size() == expected.size(), "one CRC for each range");
    for (size_t i = 0; i < crcs.size(); ++i) Expect(crcs[i] == NaiveCrc32c(expected[i]), "CRC");
  }

  void Copy(Input& input) {
    std::vector<eckpt::Copy> copies;
    std::vector<ByteRange> targets;
    for (size_t count = input.AtMost(kMostRanges); count != 0; --count) {
      const auto source = PoolPart(input, input.Byte() < 8 ? kMostFileBytes : 5000);
      const ByteRange range{input.Hostile(model_.size()), source.size()};
      std::span<std::byte> target;
      if (!Written(range, target)) continue;
      const auto overlaps = [&](const ByteRange& other) {
        return range.offset < other.offset + other.nbytes &&
               other.offset < range.offset + range.nbytes;
      };
      if (std::any_of(targets.begin(), targets.end(), overlaps)) continue;  // the callers' rule
      copies.push_back({source, target.data()});
      targets.push_back(range);
    }
    const int threads = Threads(input);
    std::vector<uint32_t> crcs;
    if (IsRefused(threads, [&] { crcs = CopyAllWithCrc32c(copies, threads); })) return;
    Expect(crcs.size() == copies.size(), "one CRC for each copy");
    for (size_t i = 0; i < crcs.size(); ++i) {
      Expect(crcs[i] == NaiveCrc32c(copies[i].source), "CRC of a copy");
      std::copy(copies[i].source.begin(), copies[i].source.end(),
                model_.begin() + static_cast<ptrdiff_t>(targets[i].offset));
    }
  }

  void Populate(Input& input) {
    std::span<std::byte> target;
    if (!Written(Range(input), target)) return;
    const int threads = Threads(input);
    const uint8_t kind = input.Byte() % 3;
    IsRefused(threads, [&] {
      if (kind == 0) return PrefaultByTouching(target, threads);
      Prefault(target, threads, kind == 1 ? Pages::kReserved : Pages::kWritten);
    });
  }

  void CheckBytes() const {
    const auto bytes = memory_->Read({0, model_.size()});
    Expect(std::equal(bytes.begin(), bytes.end(), model_.begin(), model_.end()),
           "the bytes that were copied and no others are changed");
  }

 private:
  ByteRange Range(Input& input) const {
    const size_t offset = input.Hostile(model_.size());
    if (input.Byte() % 8 == 0) return {offset, input.Byte() - offset};  // the sum wraps around
    return {offset, input.Hostile(model_.size() - offset)};
  }

  static int Threads(Input& input) {
    const uint8_t kind = input.Byte();
    return kind < 240 ? 1 + kind % 3 : static_cast<int>(input.Hostile(kMaxThreads));
  }

  template <class Body>
  static bool IsRefused(int threads, Body body) {
    const bool is_refused = Refuses<std::invalid_argument>(body);
    Expect(is_refused == (threads < 1 || threads > kMaxThreads), "threads: refused if not allowed");
    return is_refused;
  }

  // Returns the model's bytes of a range that was given as `span`.
  Bytes Place(Bytes span, ByteRange range) const {
    const std::byte* begin = memory_->Read({0, 0}).data();
    Expect(span.data() == begin + range.offset && span.size() == range.nbytes, "place of a range");
    return Bytes(model_).subspan(range.offset, range.nbytes);
  }

  // Returns whether the range may be written; it is in `target` then.
  bool Written(ByteRange range, std::span<std::byte>& target) const {
    const auto write = [&] { target = memory_->Write(range); };
    const bool is_allowed = memory_->writable() && IsInside(range, model_.size());
    Expect(Refuses<std::invalid_argument>(write) != is_allowed, "write: refused if not allowed");
    if (is_allowed) Place(target, range);
    return is_allowed;
  }

  Mapping mapping_;
  const std::shared_ptr<const MappedMemory> memory_;
  std::vector<std::byte> model_;
};

// The file's bytes are those of the model, and zeros after them.
void CheckFile(int fd, size_t file_bytes, std::vector<std::byte> model) {
  std::vector<std::byte> read(file_bytes + 1);
  Expect(pread(fd, read.data(), read.size(), 0) == static_cast<ssize_t>(file_bytes), "file size");
  read.pop_back();
  model.resize(file_bytes);
  Expect(read == model, "the file has what was copied and nothing else");
}

void Run(Input input) {
  const size_t file_bytes = input.AtMost(input.Byte() < 8 ? kMostFileBytes : 20'000);
  const testing::TemporaryFile file(file_bytes);
  const size_t size_bytes = input.Byte() < 200 ? file_bytes : input.Hostile(file_bytes);
  const bool writable = input.Byte() < 240;
  std::optional<Checked> checked;
  const bool is_refused = Refuses<std::invalid_argument>([&] {
    const Mapping mapping(file.fd(), size_bytes, writable);  // before a model of that size is made
    checked.emplace(file.fd(), size_bytes, writable);
  });
  Expect(is_refused == (size_bytes > file_bytes), "mapping: refused if the file is shorter");
  if (is_refused) return;
  for (int calls = 0; calls < 12 && !input.done(); ++calls) {
    switch (input.Byte() % 8) {
      case 0:
        checked->Close();
        break;
      case 1:
        checked->Populate(input);
        break;
      case 2:
      case 3:
      case 4:
        checked->Sum(input);
        break;
      default:
        checked->Copy(input);
    }
  }
  checked->CheckBytes();
  CheckFile(file.fd(), file_bytes, checked->model());
}

}  // namespace
}  // namespace eckpt::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  eckpt::fuzz::Run({data, nbytes});
  return 0;
}
