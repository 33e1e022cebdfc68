#include "engine/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/temporary_file.h"

namespace eckpt {
namespace {

using testing::TemporaryFile;

TEST(what_one_mapping_writes_another_reads) {
  const TemporaryFile file(8192);
  Mapping writer(file.fd(), 8192, true), reader(file.fd(), 8192, false);
  writer.Hold()->Write({5000, 1})[0] = std::byte{42};
  CHECK(reader.Hold()->Read({5000, 1})[0] == std::byte{42});
  CHECK_EQ(size_t{8192}, reader.size_bytes());
  CHECK(writer.writable() && !reader.writable());
}

TEST(ranges_are_checked_without_overflow) {
  const TemporaryFile file(4096);
  const Mapping mapping(file.fd(), 4096, true);
  const auto memory = mapping.Hold();
  CHECK_EQ(size_t{4096}, memory->Read({0, 4096}).size());
  CHECK_EQ(size_t{0}, memory->Read({4096, 0}).size());
  for (const ByteRange range :
       {ByteRange{0, 4097}, ByteRange{4096, 1}, ByteRange{4097, 0}, ByteRange{1, SIZE_MAX},
        ByteRange{SIZE_MAX, 2}, ByteRange{SIZE_MAX, SIZE_MAX}}) {
    CHECK_THROWS(std::invalid_argument, memory->Read(range));
    CHECK_THROWS(std::invalid_argument, memory->Write(range));
  }
}

TEST(a_read_only_mapping_gives_nothing_to_write) {
  const TemporaryFile file(4096);
  CHECK_THROWS(std::invalid_argument, Mapping(file.fd(), 4096, false).Hold()->Write({0, 1}));
}

TEST(a_file_that_is_shorter_is_refused) {
  const TemporaryFile file(4095);
  CHECK_THROWS(std::invalid_argument, Mapping(file.fd(), 4096, true));
  CHECK_THROWS(std::invalid_argument, Mapping(file.fd(), SIZE_MAX, true));
}

TEST(last_owner_deletes_the_memory_as_told) {
  static int deleted = 0;
  const TemporaryFile file(4096);
  Mapping mapping(file.fd(), 4096, true, [](const MappedMemory* memory) {
    ++deleted;
    delete memory;
  });
  auto held = mapping.Hold();
  mapping.Close();
  CHECK_EQ(0, deleted);
  held.reset();
  CHECK_EQ(1, deleted);
}

TEST(system_faults_carry_their_number) {
  CHECK_THROWS(std::system_error, Mapping(-1, 1, false));
  const TemporaryFile file(4096);
  const std::string path = "/proc/self/fd/" + std::to_string(file.fd());
  const int read_only = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  try {
    Mapping(read_only, 4096, true);
    CHECK(false);
  } catch (const std::system_error& error) {
    CHECK_EQ(EACCES, error.code().value());
  }
  close(read_only);
}

TEST(an_empty_mapping_has_empty_ranges_only) {
  const TemporaryFile file(0);
  const Mapping mapping(file.fd(), 0, true);
  CHECK(mapping.Hold()->Write({0, 0}).empty());
  CHECK_THROWS(std::invalid_argument, mapping.Hold()->Read({0, 1}));
}

TEST(memory_outlives_close_while_it_is_held) {
  const TemporaryFile file(4096);
  Mapping mapping(file.fd(), 4096, true);
  const auto held = mapping.Hold();
  const auto bytes = held->Write({0, 4096});
  mapping.Close();
  mapping.Close();
  CHECK_THROWS(std::invalid_argument, mapping.Hold());
  bytes[4095] = std::byte{1};  // would fault if it were unmapped
}

// Ends the child with 0 if it does not have the memory, and if the range may belong to something
// else there.
void UseTheRangeInAChild(Mapping& mapping) {
  const auto bytes = mapping.Hold()->Write({0, 4096});
  void* const own = mmap(bytes.data(), 4096, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (own != bytes.data()) _exit(1);
  mapping.Close();
  unsigned char resident;
  _exit(mincore(own, 4096, &resident) == 0 ? 0 : 2);
}

TEST(a_forked_child_has_none_of_the_memory) {
  const TemporaryFile file(4096);
  Mapping mapping(file.fd(), 4096, true);
  const pid_t child = fork();
  if (child == 0) UseTheRangeInAChild(mapping);
  int status = -1;
  CHECK_EQ(child, waitpid(child, &status, 0));
  CHECK_EQ(0, status);
  mapping.Hold()->Write({0, 1})[0] = std::byte{1};
}

TEST(close_may_race_with_use) {
  for (int round = 0; round < 200; ++round) {
    const TemporaryFile file(4096);
    Mapping mapping(file.fd(), 4096, true);
    std::jthread user([&mapping] {
      try {
        while (true) mapping.Hold()->Write({0, 1})[0] = std::byte{1};
      } catch (const std::invalid_argument&) {
      }
    });
    mapping.Close();
  }
}

}  // namespace
}  // namespace eckpt
