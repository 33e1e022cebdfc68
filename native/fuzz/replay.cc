// Runs a fuzz target over kept inputs, and over random ones of a seed, without a fuzzing engine:
//   replay CORPUS_DIRECTORY SEED COUNT
// The input of a run that dies stays in replay_input.TARGET in the working directory.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes);

namespace {

using InputBytes = std::vector<uint8_t>;
constexpr size_t kMostBytes = 400;

// The input at hand, in a file, because a sanitizer may end the process without a handler.
class CurrentInput {
 public:
  explicit CurrentInput(std::string path)
      : path_(std::move(path)),
        fd_(open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), path_);
  }
  ~CurrentInput() { close(fd_); }
  CurrentInput(const CurrentInput&) = delete;
  CurrentInput& operator=(const CurrentInput&) = delete;

  void Run(const InputBytes& input) const {
    const auto size = static_cast<off_t>(input.size());
    if (ftruncate(fd_, size) != 0 || pwrite(fd_, input.data(), input.size(), 0) != size) {
      throw std::system_error(errno, std::generic_category(), path_);
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  void Remove() const { unlink(path_.c_str()); }

 private:
  const std::string path_;
  const int fd_;
};

std::vector<InputBytes> ReadCorpus(const std::string& directory) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());  // the order of a directory differs between machines
  std::vector<InputBytes> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot read " + path.string());
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

// One to four changes of a kept input, or random bytes.
InputBytes RandomInput(const std::vector<InputBytes>& corpus, std::mt19937& random) {
  InputBytes input;
  if (corpus.empty() || random() % 4 == 0) {
    input.resize(random() % kMostBytes);
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random());
    return input;
  }
  input = corpus[random() % corpus.size()];
  for (size_t changes = 1 + random() % 4; changes != 0; --changes) {
    const auto at = static_cast<ptrdiff_t>(random() % (input.size() + 1));
    const auto byte = static_cast<uint8_t>(random());
    switch (random() % 3) {
      case 0:
        input.insert(input.begin() + at, byte);
        break;
      case 1:
        if (at < std::ssize(input)) input.erase(input.begin() + at);
        break;
      default:
        if (at < std::ssize(input)) input[static_cast<size_t>(at)] = byte;
    }
  }
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr unsigned kDeadline_s = 110;
  alarm(kDeadline_s);  // SIGALRM ends an input that hangs
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s CORPUS_DIRECTORY SEED COUNT\n", argv[0]);
    return 2;
  }
  try {
    const auto corpus = ReadCorpus(argv[1]);
    std::mt19937 random(static_cast<uint32_t>(std::stoul(argv[2])));
    const unsigned long count = std::stoul(argv[3]);
    const CurrentInput current("replay_input." +
                               std::filesystem::path(argv[0]).filename().string());
    for (const InputBytes& input : corpus) current.Run(input);
    for (unsigned long i = 0; i < count; ++i) current.Run(RandomInput(corpus, random));
    current.Remove();
    std::printf("%zu kept inputs and %lu random ones\n", corpus.size(), count);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "unexpected exception: %s\n", error.what());
    return 1;
  }
}
