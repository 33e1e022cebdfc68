// emergency_ckpt._native: the Python interface of the engine. emergency_ckpt/_native.pyi is its
// contract.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <system_error>
#include <utility>

#include "engine/bulk.h"
#include "engine/crc32c.h"
#include "engine/crc32c_combine.h"
#include "engine/mapping.h"
#include "engine/socket_io.h"
#include "glue/arguments.h"

namespace eckpt {
namespace {

using Array = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>, nb::c_contig>;

// Below this size the work may be shorter than the wait for the GIL.
constexpr size_t kKeepGilBytes = 16 * 1024;

// To unmap a gibibyte takes tenths of a second. Each owner of the memory is dropped with the GIL
// held, also in `close` and at the end of a call.
void DeleteWithoutGil(const MappedMemory* memory) {
  nb::gil_scoped_release released;
  delete memory;
}

// The objects that an array over mapped memory keeps alive.
struct ViewOwner {
  std::shared_ptr<const MappedMemory> memory;
  nb::object owner;
};

std::vector<std::span<const std::byte>> ReadableSpans(const MappedMemory& memory,
                                                      const std::vector<ByteRange>& ranges) {
  std::vector<std::span<const std::byte>> spans;
  spans.reserve(ranges.size());
  for (const ByteRange& range : ranges) spans.push_back(memory.Read(range));
  return spans;
}

std::vector<std::span<std::byte>> WritableSpans(const MappedMemory& memory,
                                                const std::vector<ByteRange>& ranges) {
  std::vector<std::span<std::byte>> spans;
  spans.reserve(ranges.size());
  for (const ByteRange& range : ranges) spans.push_back(memory.Write(range));
  return spans;
}

Array View(const Mapping& mapping, nb::handle offset, nb::handle nbytes, nb::object owner) {
  auto memory = mapping.Hold();
  const auto bytes = memory->Read(
      {ParseUnsigned(offset, SIZE_MAX, "offset"), ParseUnsigned(nbytes, SIZE_MAX, "nbytes")});
  auto held = std::make_unique<ViewOwner>(std::move(memory), std::move(owner));
  nb::capsule keeper(held.get(), [](void* p) noexcept { delete static_cast<ViewOwner*>(p); });
  held.release();
  return Array(reinterpret_cast<const uint8_t*>(bytes.data()), {bytes.size()}, keeper);
}

std::vector<Copy> ParseCopies(const MappedMemory& memory, nb::sequence copies,
                              HeldBuffers& sources) {
  std::vector<Copy> parsed;
  parsed.reserve(nb::len(copies));
  for (nb::handle item : copies) {
    const auto [buffer, offset] = ParsePair(item);
    const Bytes source = sources.Hold(buffer);
    const size_t target = ParseUnsigned(offset, SIZE_MAX, "offset");
    parsed.push_back({source, memory.Write({target, source.size()}).data(), {}});
  }
  return parsed;
}

std::vector<uint32_t> CopyCrc32c(const Mapping& mapping, nb::sequence copies, nb::handle threads) {
  const auto memory = mapping.Hold();
  const int thread_count = ParseThreads(threads);
  HeldBuffers sources;
  const std::vector<Copy> parsed = ParseCopies(*memory, copies, sources);
  nb::gil_scoped_release released;
  return CopyAllWithCrc32c(parsed, thread_count);
}

std::pair<std::vector<uint32_t>, std::vector<uint64_t>> CopyAndCountAll(const Mapping& mapping,
                                                                        nb::sequence copies,
                                                                        nb::sequence patterns,
                                                                        nb::handle threads) {
  const auto memory = mapping.Hold();
  const int thread_count = ParseThreads(threads);
  HeldBuffers sources;
  std::vector<Copy> parsed = ParseCopies(*memory, copies, sources);
  const std::vector<ValuePattern> wanted = ParsePatterns(patterns, parsed.size());
  for (size_t i = 0; i < parsed.size(); ++i) parsed[i].pattern = wanted[i];
  nb::gil_scoped_release released;
  CopiedAll copied = CopyAllAndCount(parsed, thread_count);
  return {std::move(copied.crcs), std::move(copied.matches)};
}

std::vector<uint32_t> Crc32cRanges(const Mapping& mapping, nb::sequence ranges,
                                   nb::handle threads) {
  const auto memory = mapping.Hold();
  const auto spans = ReadableSpans(*memory, ParseRanges(ranges));
  const int thread_count = ParseThreads(threads);
  nb::gil_scoped_release released;
  return Crc32cOfAll(spans, thread_count);
}

std::pair<std::vector<uint32_t>, std::vector<uint64_t>> CheckAndCountAll(const Mapping& mapping,
                                                                         nb::sequence ranges,
                                                                         nb::sequence patterns,
                                                                         nb::handle threads) {
  const auto memory = mapping.Hold();
  const auto spans = ReadableSpans(*memory, ParseRanges(ranges));
  const int thread_count = ParseThreads(threads);
  const std::vector<ValuePattern> wanted = ParsePatterns(patterns, spans.size());
  nb::gil_scoped_release released;
  CopiedAll checked = CheckAllAndCount(spans, wanted, thread_count);
  return {std::move(checked.crcs), std::move(checked.matches)};
}

uint32_t Crc32cOfBuffer(nb::handle data, nb::handle value) {
  HeldBuffers buffers;
  const Bytes bytes = buffers.Hold(data);
  const auto before = static_cast<uint32_t>(ParseUnsigned(value, UINT32_MAX, "value"));
  if (bytes.size() < kKeepGilBytes) return Crc32c(bytes, before);
  nb::gil_scoped_release released;
  return Crc32c(bytes, before);
}

uint32_t Combine(nb::handle first, nb::handle second, nb::handle second_nbytes) {
  return Crc32cCombine(static_cast<uint32_t>(ParseUnsigned(first, UINT32_MAX, "first")),
                       static_cast<uint32_t>(ParseUnsigned(second, UINT32_MAX, "second")),
                       ParseUnsigned(second_nbytes, UINT64_MAX, "second_nbytes"));
}

void PrefaultRange(const Mapping& mapping, nb::handle offset, nb::handle nbytes, nb::handle threads,
                   bool written) {
  const auto memory = mapping.Hold();
  const auto range = memory->Write(
      {ParseUnsigned(offset, SIZE_MAX, "offset"), ParseUnsigned(nbytes, SIZE_MAX, "nbytes")});
  const int thread_count = ParseThreads(threads);
  nb::gil_scoped_release released;
  Prefault(range, thread_count, written ? Pages::kWritten : Pages::kReserved);
}

void SendRanges(int fd, const Mapping& mapping, nb::sequence ranges, double timeout_s) {
  const auto memory = mapping.Hold();
  const auto spans = ReadableSpans(*memory, ParseRanges(ranges));
  const auto timeout = ParseTimeout(timeout_s);
  nb::gil_scoped_release released;
  SendAll(fd, spans, timeout);
}

std::vector<uint32_t> ReceiveRanges(int fd, const Mapping& mapping, nb::sequence ranges,
                                    double timeout_s) {
  const auto memory = mapping.Hold();
  const auto spans = WritableSpans(*memory, ParseRanges(ranges));
  const auto timeout = ParseTimeout(timeout_s);
  nb::gil_scoped_release released;
  return ReceiveAll(fd, spans, timeout);
}

void TranslateException(const std::exception_ptr& failure, void*) {
  try {
    std::rethrow_exception(failure);
  } catch (const DeadlineExceeded& error) {
    PyErr_SetString(PyExc_TimeoutError, error.what());
  } catch (const PeerGone& error) {
    PyErr_SetString(PyExc_ConnectionError, error.what());
  } catch (const std::system_error& error) {
    // With two arguments OSError selects its subclass by the error number.
    const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

NB_MODULE(_native, m) {
  // A program that ends while storage hangs leaves a thread with views of a slot behind.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(TranslateException);
  nb::class_<Mapping>(m, "Mapping", nb::is_final())
      .def(
          "__init__",
          [](Mapping* self, int fd, nb::handle size_bytes, bool writable) {
            new (self) Mapping(fd, ParseUnsigned(size_bytes, SIZE_MAX, "size_bytes"), writable,
                               DeleteWithoutGil);
          },
          nb::arg("fd"), nb::arg("size_bytes"), nb::kw_only(), nb::arg("writable"))
      .def_prop_ro("size_bytes", &Mapping::size_bytes)
      .def_prop_ro("writable", &Mapping::writable)
      .def("close", &Mapping::Close)
      .def("view", &View, nb::arg("offset"), nb::arg("nbytes"), nb::arg("owner").none());
  m.def("copy_crc32c", &CopyCrc32c, nb::arg("mapping"), nb::arg("copies"), nb::arg("threads"));
  m.def("copy_and_count", &CopyAndCountAll, nb::arg("mapping"), nb::arg("copies"),
        nb::arg("patterns"), nb::arg("threads"));
  m.def("check_and_count", &CheckAndCountAll, nb::arg("mapping"), nb::arg("ranges"),
        nb::arg("patterns"), nb::arg("threads"));
  m.def("crc32c_ranges", &Crc32cRanges, nb::arg("mapping"), nb::arg("ranges"), nb::arg("threads"));
  m.def("crc32c", &Crc32cOfBuffer, nb::arg("data"), nb::arg("value") = 0);
  m.def("crc32c_combine", &Combine, nb::arg("first"), nb::arg("second"), nb::arg("second_nbytes"));
  m.def("prefault", &PrefaultRange, nb::arg("mapping"), nb::arg("offset"), nb::arg("nbytes"),
        nb::arg("threads"), nb::kw_only(), nb::arg("written") = false);
  m.def("send_ranges", &SendRanges, nb::arg("fd"), nb::arg("mapping"), nb::arg("ranges"),
        nb::arg("timeout_s"));
  m.def("receive_ranges", &ReceiveRanges, nb::arg("fd"), nb::arg("mapping"), nb::arg("ranges"),
        nb::arg("timeout_s"));
  m.def("implementation", &Crc32cImplementation);
}

}  // namespace
}  // namespace eckpt
