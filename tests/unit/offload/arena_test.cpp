// Arenas: alignment, zeroed and touched memory, refusal of what the machine does not have.
#include "offload/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <vector>

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

TEST(Arena, IsTouchedAndZero) {
  const Arena arena(6 * kMiB + 1, "host");
  EXPECT_EQ(arena.bytes(), 6 * kMiB + 4 * kKiB);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(arena.memory()) % (2 * kMiB), 0u);
  std::vector<unsigned char> resident(arena.bytes() / (4 * kKiB));
  ASSERT_EQ(mincore(arena.memory(), arena.bytes(), resident.data()), 0);
  for (const unsigned char page : resident) EXPECT_EQ(page & 1, 1);
  for (uint64_t i = 0; i < arena.bytes(); i += 511) EXPECT_EQ(arena.memory()[i], std::byte{0});
}

TEST(Arena, SmallOnesDoNotRoundToHugePages) {
  EXPECT_EQ(Arena(5000, "host").bytes(), 8192u);
  EXPECT_EQ(Arena(0, "host").memory(), nullptr);
}

TEST(Arena, RefusesMoreThanTheMachineHas) {
  try {
    const Arena arena(uint64_t{1} << 46, "device");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::does_not_fit);
    const std::string text = error.what();
    EXPECT_NE(text.find("64.00 TiB"), std::string::npos) << text;
    EXPECT_NE(text.find("lower offload.device_memory"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace overspill
