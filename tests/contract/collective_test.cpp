// What every backend of Collective does alike: results, order of sums, bytes, ends.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <numeric>

#include "engine/base/dtype.h"
#include "tests/contract/collective_fixture.h"

namespace overspill::test {
namespace {

using Clock = std::chrono::steady_clock;

float rounded(float value, ReduceType type) {
  return type == ReduceType::bf16 ? bf16_to_float(float_to_bf16(value)) : value;
}
uint64_t width(ReduceType type) { return type == ReduceType::bf16 ? 2 : 4; }

/// Element i of the ranks' contributions, summed in their order, and its error bound in others.
struct Expected {
  float ordered = 0;
  double exact = 0, magnitude = 0;
};
/// What the ranks bring to a sum.
struct Reduction {
  ReduceType type;
  std::vector<std::vector<float>> contributions;
  Expected expected(size_t i) const {
    Expected sum;
    for (size_t r = 0; r < contributions.size(); ++r) {
      const float value = rounded(contributions[r][i], type);
      sum.ordered = r == 0 ? value : sum.ordered + value;
      sum.exact += value;
      sum.magnitude += std::abs(value);
    }
    return sum;
  }
};

/// Of every length, `multiple` times, and both types; one rank alone rounds nothing.
std::vector<Reduction> reductions(const CollectiveCase& on, const std::vector<size_t>& lengths,
                                  size_t multiple) {
  std::vector<Reduction> all;
  for (const ReduceType type : {ReduceType::float32, ReduceType::bf16}) {
    if (on.backend == Backend::local && type == ReduceType::bf16) continue;
    for (const size_t length : lengths) {
      all.push_back({type, {}});
      for (uint32_t r = 0; r < on.size; ++r) {
        all.back().contributions.push_back(random_floats(length * multiple, length * 1000 + r));
      }
    }
  }
  return all;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  });
}

uint64_t broadcast_children(uint32_t rank, uint32_t root, uint32_t size) {
  const uint32_t own = (rank + size - root) % size;
  uint64_t children = 0;
  for (uint32_t k = 1; k < size; k *= 2) children += k > own && own + k < size;
  return children;
}

class CollectiveContract : public testing::TestWithParam<CollectiveCase> {
 protected:
  static void expect_bytes(Collective& collective, uint64_t& before, uint64_t more) {
    EXPECT_EQ(collective.bytes_sent() - before, more);
    before = collective.bytes_sent();
  }
  /// `values` are elements from `begin` on of the sum.
  static void expect_sums(std::span<const float> values, size_t begin, const Reduction& call,
                          bool round_sums) {
    size_t wrong = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const Expected expected = call.expected(begin + i);
      if (GetParam().in_rank_order()) {
        const float sum = round_sums ? rounded(expected.ordered, call.type) : expected.ordered;
        wrong += std::bit_cast<uint32_t>(values[i]) != std::bit_cast<uint32_t>(sum);
      } else {
        const double step = call.type == ReduceType::bf16 ? 0x1p-8 : 0x1p-23;
        wrong +=
            !(std::abs(values[i] - expected.exact) <= expected.magnitude * step * GetParam().size);
      }
    }
    EXPECT_EQ(wrong, 0u) << "of " << values.size();
  }
};

TEST_P(CollectiveContract, AllGatherPutsPartsInRankOrder) {
  expect_no_errors(run_group(GetParam(), [](Collective& collective) {
    const uint32_t rank = collective.rank(), size = collective.size();
    uint64_t before = 0;
    for (const size_t bytes : {0, 1, 7, 4096, 100003, size > 3 ? 4200001 : 9000001}) {
      for (const bool in_place : {false, true}) {
        std::vector<std::byte> part(bytes, std::byte(rank + 1)), whole(bytes * size);
        if (bytes > 0) part[bytes / 2] = std::byte(77);
        std::byte* const own = whole.data() + rank * bytes;
        if (in_place) std::copy(part.begin(), part.end(), own);
        collective.all_gather({in_place ? own : part.data(), bytes}, whole);
        for (uint32_t r = 0; r < size && bytes > 0; ++r) {
          part.assign(bytes, std::byte(r + 1));
          part[bytes / 2] = std::byte(77);
          EXPECT_EQ(std::memcmp(whole.data() + r * bytes, part.data(), bytes), 0);
        }
        expect_bytes(collective, before, bytes * (size - 1));
      }
    }
  }));
}

TEST_P(CollectiveContract, ReduceScatterSumsContributions) {
  const uint32_t size = GetParam().size;
  const auto calls = reductions(GetParam(), {0, 1, 3, 1000, 300001}, size);
  expect_no_errors(run_group(GetParam(), [&](Collective& collective) {
    uint64_t before = 0;
    for (const Reduction& call : calls) {
      std::vector<float> values = call.contributions[collective.rank()];
      collective.reduce_scatter(values, call.type);
      const size_t part = values.size() / size, begin = part * collective.rank();
      expect_sums(std::span(values).subspan(begin, part), begin, call, false);
      expect_bytes(collective, before, (size - 1) * part * width(call.type));
    }
  }));
}

TEST_P(CollectiveContract, AllReduceGivesTheSameBitsToAll) {
  const uint32_t size = GetParam().size;
  const auto calls = reductions(GetParam(), {0, 1, 2, 5, 1001, 600007}, 1);
  std::vector<std::vector<std::vector<float>>> results(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) results[i] = calls[i].contributions;
  expect_no_errors(run_group(GetParam(), [&](Collective& collective) {
    const uint32_t rank = collective.rank();
    uint64_t before = 0;
    for (size_t i = 0; i < calls.size(); ++i) {
      std::vector<float>& values = results[i][rank];
      collective.all_reduce(values, calls[i].type);
      const uint64_t count = values.size(), own = count / size + (rank < count % size);
      const uint64_t sent = size == 1 ? 0 : (count + (size - 2) * own) * width(calls[i].type);
      expect_bytes(collective, before, sent);
    }
  }));
  for (size_t i = 0; i < calls.size(); ++i) {
    expect_sums(results[i][0], 0, calls[i], true);
    for (const auto& of_rank : results[i]) EXPECT_TRUE(same_bits(of_rank, results[i][0]));
  }
}

TEST_P(CollectiveContract, AllReduceOfDoublesSumsInRankOrder) {
  expect_no_errors(run_group(GetParam(), [](Collective& collective) {
    uint64_t before = 0;
    const auto value = [](uint32_t rank, size_t i) { return std::sin(rank * 100.0 + i) * 1e3; };
    for (const size_t count : {0, 1, 3, 1000}) {
      std::vector<double> values(count);
      for (size_t i = 0; i < count; ++i) values[i] = value(collective.rank(), i);
      collective.all_reduce(values);
      for (size_t i = 0; i < count; ++i) {
        double sum = value(0, i);
        for (uint32_t r = 1; r < collective.size(); ++r) sum += value(r, i);
        ASSERT_EQ(std::bit_cast<uint64_t>(values[i]), std::bit_cast<uint64_t>(sum));
      }
      expect_bytes(collective, before, (collective.size() - 1) * count * sizeof(double));
    }
  }));
}

TEST_P(CollectiveContract, BroadcastReachesAllFromEveryRoot) {
  expect_no_errors(run_group(GetParam(), [](Collective& collective) {
    uint64_t before = 0;
    for (uint32_t root = 0; root < collective.size(); ++root) {
      for (const size_t count : {0, 1, 4099, 9000001}) {
        const std::vector<std::byte> sent(count, std::byte(root + count % 100));
        std::vector<std::byte> bytes(count);
        if (collective.rank() == root) bytes = sent;
        collective.broadcast(bytes, root);
        EXPECT_EQ(bytes, sent);
        expect_bytes(collective, before,
                     count * broadcast_children(collective.rank(), root, collective.size()));
      }
    }
  }));
}

TEST_P(CollectiveContract, NobodyLeavesABarrierBeforeAllCame) {
  std::atomic<uint32_t> came{0};
  expect_no_errors(run_group(GetParam(), [&](Collective& collective) {
    for (uint32_t round = 1; round <= 20; ++round) {
      if (round % collective.size() == collective.rank()) std::this_thread::sleep_for(2ms);
      ++came;
      collective.barrier();
      EXPECT_GE(came.load(), round * collective.size());
    }
    EXPECT_EQ(collective.bytes_sent(), 0u);
  }));
}

/// Bits that all ranks hold after a random call, to be compared.
uint64_t random_call(Collective& collective, std::mt19937_64& same, std::mt19937_64& own) {
  const uint32_t size = collective.size();
  const uint64_t kind = same() % 5, count = same() % 10 == 0 ? same() % 100000 : same() % 50;
  const ReduceType type = same() % 2 ? ReduceType::bf16 : ReduceType::float32;
  const uint32_t root = same() % size;
  if (own() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 1000));
  std::vector<float> values = random_floats(count * size, own());
  const std::span<float> mine(values.data() + collective.rank() * count, count);
  if (kind == 0) collective.all_reduce(values, type);
  if (kind == 1) collective.broadcast(std::as_writable_bytes(std::span(values)), root);
  if (kind == 2) collective.barrier();
  if (kind == 3) collective.reduce_scatter(values, type);
  if (kind >= 3)
    collective.all_gather(std::as_bytes(mine), std::as_writable_bytes(std::span(values)));
  if (kind == 2) return 0;
  uint64_t hash = 0;
  for (const float value : values) hash = hash * 31 + std::bit_cast<uint32_t>(value);
  return hash;
}

TEST_P(CollectiveContract, RandomCallsInSequenceStayInStep) {
  std::vector<std::vector<uint64_t>> hashes(GetParam().size);
  expect_no_errors(run_group(GetParam(), [&](Collective& collective) {
    std::mt19937_64 same(5), own(collective.rank() + 100);
    for (int call = 0; call < 100; ++call) {
      hashes[collective.rank()].push_back(random_call(collective, same, own));
    }
  }));
  for (const auto& of_rank : hashes) EXPECT_EQ(of_rank, hashes[0]);
}

/// Groups across one another: at least four ranks.
class CollectiveGroups : public CollectiveContract {};
/// How calls end that cannot succeed: at least two ranks.
class CollectiveEnd : public CollectiveContract {};

TEST_P(CollectiveGroups, WorkSideBySide) {
  expect_no_errors(
      run_ranks(GetParam(), [](uint32_t rank, MemoryStore& store, const MakeGroup& make) {
        const uint32_t size = GetParam().size, half = size / 2;
        const auto world = make(group_over(store, "world", rank, size));
        const auto shard =
            make(group_over(store, "shard" + std::to_string(rank / half), rank % half, half));
        const auto replica =
            make(group_over(store, "replica" + std::to_string(rank % half), rank / half, 2));
        const auto sums = [rank](Collective& collective, double expected) {
          for (int call = 0; call < 20; ++call) {
            std::vector<double> one = {static_cast<double>(rank)};
            collective.all_reduce(one);
            EXPECT_EQ(one[0], expected);
          }
        };
        std::thread of_world(sums, std::ref(*world), size * (size - 1) / 2);
        std::thread of_shard(sums, std::ref(*shard),
                             half * (half - 1) / 2 + (rank / half) * half * half);
        sums(*replica, 2 * (rank % half) + half);
        of_world.join();
        of_shard.join();
      }));
}

TEST_P(CollectiveEnd, AbortEndsACallUnderWay) {
  std::atomic<uint32_t> failed{0}, ended{0};
  const auto errors = run_group(GetParam(), [&](Collective& collective) {
    std::thread aborter([&] {
      std::this_thread::sleep_for(100ms);
      collective.abort("rank 7 is gone: told so");
    });
    std::vector<float> values(2000 * collective.size());
    const auto start = Clock::now();
    try {
      if (collective.rank() > 0) collective.reduce_scatter(values, ReduceType::float32);
    } catch (const Error&) {
      ++failed;
    }
    aborter.join();
    EXPECT_LT(Clock::now() - start, 1s);
    EXPECT_THROW(collective.barrier(), Error);
    // Who leaves first would be the lost rank to those that have not been told yet.
    for (++ended; ended < collective.size();) std::this_thread::yield();
    collective.all_reduce(values, ReduceType::float32);  // throws for good
  });
  EXPECT_EQ(failed, GetParam().size - 1);
  for (const std::string& error : errors) EXPECT_EQ(error, "rank_lost: rank 7 is gone: told so");
}

TEST_P(CollectiveEnd, ARankThatDoesNotTakePartIsLostAfterTheTimeout) {
  const auto start = Clock::now();
  const auto errors = run_group(
      GetParam(),
      [](Collective& collective) {
        std::vector<std::byte> part(100000), whole(100000 * collective.size());
        collective.all_gather(part, whole);
        if (collective.rank() == 0) {
          std::this_thread::sleep_for(500ms);
          return;
        }
        collective.all_gather(part, whole);
      },
      200ms);
  EXPECT_LT(Clock::now() - start, 4s);
  EXPECT_EQ(errors[0], "");
  for (size_t rank = 1; rank < errors.size(); ++rank) {
    EXPECT_NE(errors[rank].find("rank_lost: group \"world\""), std::string::npos) << errors[rank];
  }
}

constexpr CollectiveCase kLocal{Backend::local, 1}, kGloo2{Backend::gloo, 2},
    kGloo3{Backend::gloo, 3}, kGloo4{Backend::gloo, 4}, kGloo8{Backend::gloo, 8},
    kNccl1{Backend::nccl, 1}, kNccl2{Backend::nccl, 2}, kNccl4{Backend::nccl, 4},
    kOrdered2{Backend::nccl_deterministic, 2}, kOrdered3{Backend::nccl_deterministic, 3},
    kOrdered8{Backend::nccl_deterministic, 8};

INSTANTIATE_TEST_SUITE_P(All, CollectiveContract,
                         testing::Values(kLocal, kGloo2, kGloo3, kGloo4, kGloo8, kNccl1, kNccl2,
                                         kNccl4, kOrdered2, kOrdered3, kOrdered8),
                         case_name);
INSTANTIATE_TEST_SUITE_P(All, CollectiveGroups, testing::Values(kGloo4, kGloo8, kNccl4, kOrdered8),
                         case_name);
INSTANTIATE_TEST_SUITE_P(All, CollectiveEnd,
                         testing::Values(kGloo2, kGloo3, kGloo8, kNccl2, kNccl4, kOrdered3),
                         case_name);

}  // namespace
}  // namespace overspill::test
