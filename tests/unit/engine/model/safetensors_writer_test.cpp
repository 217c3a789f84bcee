// Writing one safetensors file: its bytes, misuse, and disks that are too small.
#include "tests/unit/engine/model/safetensors_fixture.h"

#include <sys/resource.h>

#include <csignal>
#include <cstdio>

namespace overspill {
namespace {

namespace fs = std::filesystem;
using namespace test;

class SafetensorsWriterTest : public TemporaryDirectory {};

TEST_F(SafetensorsWriterTest, WritesWhatTheReaderReads) {
  const Strings metadata = {{"format", "pt"}, {"quote\"", "line\n"}};
  SafetensorsWriter writer(path_, {{"z", {2, 2}, "F32"}, {"a\"\\", {}, "BF16"}, {"e", {0}, "U8"}},
                           metadata);
  writer.write(1, 0, bytes_of(std::array<uint16_t, 1>{0x4000}));
  writer.write(0, 2, bytes_of(std::array{3.0f, 4.0f}));
  writer.write(0, 0, bytes_of(std::array{1.0f, 2.0f}));
  writer.finish();
  const SafetensorsFile file(path_);
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.entries().size(), 3u);
  EXPECT_EQ(file.entries()[0].spec.name, "z");
  EXPECT_EQ(file.entries()[0].spec.shape, (std::vector<uint64_t>{2, 2}));
  std::array<float, 4> z{};
  std::array<float, 1> a{};
  file.read_floats(*file.find("z"), 0, z);
  file.read_floats(*file.find("a\"\\"), 0, a);
  EXPECT_EQ(z, (std::array{1.0f, 2.0f, 3.0f, 4.0f}));
  EXPECT_EQ(a[0], 2.0f);
}

TEST_F(SafetensorsWriterTest, KeepsOrderAndPadsHeaderWithSpaces) {
  SafetensorsWriter writer(path_, {{"b", {1}, "U8"}, {"a", {1}, "U8"}}, {});
  writer.write(0, 0, bytes_of(std::array{'x'}));
  writer.write(1, 0, bytes_of(std::array{'y'}));
  writer.finish();
  std::string header = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})";
  ASSERT_NE(header.size() % 8, 0u);
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(read_bytes(path_), file_bytes(header, 0) + "xy");
}

TEST_F(SafetensorsWriterTest, LeavesNoReadableFileBeforeFinish) {
  SafetensorsWriter writer(path_, {{"a", {4}, "U8"}}, {});
  EXPECT_GT(fs::file_size(path_), 12u);
  writer.write(0, 0, bytes_of(std::array{'a', 'b', 'c', 'd'}));
  const std::string message =
      refusal(ErrorCode::invalid_file, [&] { SafetensorsFile file(path_); });
  EXPECT_TRUE(contains(message, "writing was never finished"));
  writer.finish();
  EXPECT_EQ(SafetensorsFile(path_).entries().size(), 1u);
}

TEST_F(SafetensorsWriterTest, DiesOnMisuse) {
  SafetensorsWriter writer(path_, {{"a", {2}, "F32"}}, {});
  EXPECT_DEATH(writer.finish(), "CHECK.*written\\[0\\] == bytes_expected_");
  EXPECT_DEATH(writer.write(0, 1, bytes_of(std::array{1.0f, 2.0f})), "CHECK");
  EXPECT_DEATH(writer.write(1, 0, {}), "CHECK");
  EXPECT_DEATH(SafetensorsWriter(path_, {{"a", {}, "U8"}, {"a", {}, "U8"}}, {}), "CHECK");
  EXPECT_DEATH(SafetensorsWriter(path_, {{"a", {}, "F12"}}, {}), "CHECK");
}

TEST_F(SafetensorsWriterTest, RefusesAtOnceWhatTheDiskCannotHold) {
  const std::string message = refusal(ErrorCode::io, [&] {
    SafetensorsWriter writer(path_, {{"a", {uint64_t{1} << 60}, "U8"}}, {});
  });
  EXPECT_TRUE(contains(message, path_.string()));
  EXPECT_TRUE(contains(message, ": 1152921504606847080 bytes ("));
  EXPECT_TRUE(contains(message, "No space left on device; free space there"));
  EXPECT_FALSE(fs::exists(path_));
}

TEST_F(SafetensorsWriterTest, ReportsARefusedReservation) {
  const auto create_limited = [&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 4096, .rlim_max = 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      SafetensorsWriter writer(path_, {{"a", {100000}, "U8"}}, {});
    } catch (const Error& error) {
      std::fprintf(stderr, "%s: %s", error_code_name(error.code()), error.what());
      ::_exit(3);
    }
    ::_exit(4);
  };
  EXPECT_EXIT(create_limited(), testing::ExitedWithCode(3),
              "io: create .*model.safetensors: 1000.. bytes .*File too large");
}

}  // namespace
}  // namespace overspill
