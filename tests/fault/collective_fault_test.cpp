// Ranks that end, stop, leave early or disagree. Over Gloo they are processes of their own.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/contract/collective_fixture.h"

namespace overspill::test {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

/// Processes that are the ranks of a group, with a key-value store in files.
class RankProcesses {
 public:
  using Body = std::function<void(Collective&)>;

  RankProcesses(uint32_t size, milliseconds timeout, const Body& body) {
    std::string pattern = fs::temp_directory_path() / "ranks-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    for (uint32_t rank = 0; rank < size; ++rank) {
      pids_.push_back(fork());
      if (pids_.back() == 0) _exit(run(rank, size, timeout, body));
    }
  }
  ~RankProcesses() {
    for (uint32_t rank = 0; rank < pids_.size(); ++rank) {
      if (pids_[rank] <= 0) continue;
      send(rank, SIGKILL);
      waitpid(pids_[rank], nullptr, 0);
    }
    fs::remove_all(folder_);
  }
  void send(uint32_t rank, int signal) const { kill(pids_[rank], signal); }

  /// What the rank's body threw, "" for nothing, "hangs" or how it ended otherwise.
  std::string result(uint32_t rank, milliseconds time) {
    int status = 0;
    const auto end = Clock::now() + time;
    while (waitpid(pids_[rank], &status, WNOHANG) == 0) {
      if (Clock::now() > end) return "hangs";
      std::this_thread::sleep_for(1ms);
    }
    pids_[rank] = -1;
    if (WIFSIGNALED(status)) return "signal " + std::to_string(WTERMSIG(status));
    return read(folder_ / ("result" + std::to_string(rank)));
  }

 private:
  static std::string read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  int run(uint32_t rank, uint32_t size, milliseconds timeout, const Body& body) const {
    CollectiveGroup group{.name = "world", .rank = rank, .size = size, .timeout = timeout};
    const auto path_of = [this](std::string key) {
      std::replace(key.begin(), key.end(), '/', '_');
      return folder_ / key;
    };
    group.set = [&](const std::string& key, const std::string& value) {
      const fs::path path = path_of(key), unfinished = path.string() + ".new";
      std::ofstream(unfinished, std::ios::binary) << value;
      fs::rename(unfinished, path);
    };
    group.get = [&](const std::string& key) {
      while (!fs::exists(path_of(key))) std::this_thread::sleep_for(1ms);
      return read(path_of(key));
    };
    std::string result;
    try {
      const auto collective = make_gloo_collective(group, open_gloo_device("127.0.0.1"));
      body(*collective);
    } catch (const Error& error) {
      result = std::string(error_code_name(error.code())) + ": " + error.what();
    }
    std::ofstream(folder_ / ("result" + std::to_string(rank))) << result;
    return 0;
  }

  fs::path folder_;
  std::vector<pid_t> pids_;
};

/// A folder for marks that the body of a rank can know before the ranks exist.
class Marks {
 public:
  Marks() {
    std::string pattern = fs::temp_directory_path() / "marks-XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~Marks() { fs::remove_all(folder_); }
  void set(const std::string& name) const { std::ofstream(folder_ / name).put('x'); }
  bool wait_for(const std::string& name, milliseconds time = 20s) const {
    for (const auto end = Clock::now() + time; Clock::now() < end;) {
      if (fs::exists(folder_ / name)) return true;
      std::this_thread::sleep_for(1ms);
    }
    return false;
  }

 private:
  fs::path folder_;
};

/// Gathers without end; says when it is in the midst of it.
void gather_for_ever(Collective& collective, const Marks& marks, size_t bytes) {
  std::vector<std::byte> whole(bytes * collective.size());
  const std::span part(whole.data() + bytes * collective.rank(), bytes);
  collective.all_gather(part, whole);
  marks.set("ready" + std::to_string(collective.rank()));
  for (;;) collective.all_gather(part, whole);
}

void expect_lost(const std::string& result) {
  EXPECT_TRUE(result.starts_with("rank_lost: group \"world\": rank ")) << result;
}

TEST(CollectiveFault, KilledRankEndsTransfersAtOnce) {
  for (const size_t bytes : {1000u, 20'000'000u}) {
    for (int round = 0; round < 5; ++round) {
      const Marks marks;
      RankProcesses ranks(3, 60s, [&](Collective& c) { gather_for_ever(c, marks, bytes); });
      for (int r = 0; r < 3; ++r) ASSERT_TRUE(marks.wait_for("ready" + std::to_string(r)));
      std::this_thread::sleep_for(milliseconds(round * 7));
      ranks.send(1, SIGKILL);
      expect_lost(ranks.result(0, 2s));
      expect_lost(ranks.result(2, 2s));
    }
  }
}

TEST(CollectiveFault, KilledRankIsNamedToARankThatWaitsForIt) {
  const Marks marks;
  RankProcesses ranks(2, 60s, [&](Collective& c) {
    c.barrier();
    marks.set("ready" + std::to_string(c.rank()));
    if (c.rank() == 1) pause();
    c.barrier();
  });
  ASSERT_TRUE(marks.wait_for("ready0") && marks.wait_for("ready1"));
  ranks.send(1, SIGKILL);
  const std::string result = ranks.result(0, 2s);
  expect_lost(result);
  EXPECT_NE(result.find("lost rank 1"), std::string::npos) << result;
}

TEST(CollectiveFault, StoppedRankIsLostAfterTheTimeout) {
  for (const size_t bytes : {1000u, 20'000'000u}) {
    const Marks marks;
    RankProcesses ranks(3, 1s, [&](Collective& c) { gather_for_ever(c, marks, bytes); });
    for (int r = 0; r < 3; ++r) ASSERT_TRUE(marks.wait_for("ready" + std::to_string(r)));
    ranks.send(1, SIGSTOP);
    const auto start = Clock::now();
    const std::string results[] = {ranks.result(0, 5s), ranks.result(2, 5s)};
    EXPECT_GT(Clock::now() - start, 700ms);
    EXPECT_LT(Clock::now() - start, 3s);
    for (const std::string& result : results) expect_lost(result);
    EXPECT_NE((results[0] + results[1]).find("lost rank 1: it"), std::string::npos) << results[0];
    ranks.send(1, SIGCONT);  // finds the others gone
    expect_lost(ranks.result(1, 5s));
  }
}

TEST(CollectiveFault, RanksThatLeaveEarlyAreNoFailureToOthers) {
  for (int round = 0; round < 10; ++round) {
    RankProcesses ranks(4, 20s, [&](Collective& c) {
      std::vector<std::byte> bytes(round % 2 ? 5'000'000 : 100);
      c.broadcast(bytes, 3);
      if (c.rank() == 1) std::this_thread::sleep_for(milliseconds(round * 2));
      c.broadcast(bytes, 0);
    });
    for (uint32_t r = 0; r < 4; ++r) EXPECT_EQ(ranks.result(r, 20s), "");
  }
}

TEST(CollectiveFault, CallsThatDifferEndInATimeout) {
  RankProcesses ranks(2, 500ms, [](Collective& c) {
    std::vector<std::byte> part(c.rank() == 0 ? 100 : 90), whole(part.size() * 2);
    c.all_gather(part, whole);
  });
  for (uint32_t r = 0; r < 2; ++r) expect_lost(ranks.result(r, 5s));
  RankProcesses others(2, 500ms, [](Collective& c) {
    std::vector<float> values(100);
    if (c.rank() == 0) c.reduce_scatter(values, ReduceType::float32);
    if (c.rank() == 1) c.broadcast(std::as_writable_bytes(std::span(values).first(50)), 1);
    c.barrier();
  });
  for (uint32_t r = 0; r < 2; ++r) expect_lost(others.result(r, 5s));
}

TEST(CollectiveFault, AbortAmidLargeTransfersLeavesMemoryAlone) {
  for (int round = 0; round < 10; ++round) {
    const auto errors = run_group({Backend::gloo, 3}, [&](Collective& collective) {
      std::thread aborter([&] {
        std::this_thread::sleep_for(milliseconds(20 + round * 5));
        collective.abort("stopped by the test");
      });
      try {
        for (;;) {
          std::vector<float> values(3'000'000);
          collective.all_reduce(values, round % 2 ? ReduceType::bf16 : ReduceType::float32);
        }
      } catch (const Error&) {
        aborter.join();
        throw;
      }
    });
    for (const std::string& error : errors) EXPECT_TRUE(error.starts_with("rank_lost: ")) << error;
  }
}

TEST(CollectiveFault, AddressOfAnotherHostIsRefused) {
  try {
    open_gloo_device("192.0.2.1");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::rank_lost);
    EXPECT_NE(std::string(error.what()).find("192.0.2.1"), std::string::npos);
  }
}

class NcclFault : public testing::TestWithParam<CollectiveCase> {};

TEST_P(NcclFault, FailedRankEndsTheCallsOfAll) {
  const auto fail_rank = fake_nccl<void(int)>("fake_nccl_fail_rank");
  const auto start = Clock::now();
  const auto errors = run_group(GetParam(), [&](Collective& collective) {
    std::vector<float> values(10 * collective.size());
    collective.reduce_scatter(values, ReduceType::bf16);
    if (collective.rank() == 1) fail_rank(1);
    for (;;) collective.all_reduce(values, ReduceType::float32);
  });
  fail_rank(-1);
  EXPECT_LT(Clock::now() - start, 2s);
  for (const std::string& error : errors) {
    EXPECT_TRUE(error.starts_with("rank_lost: group \"world\": rank ")) << error;
    EXPECT_NE(error.find("rank 1 was told to fail"), std::string::npos) << error;
  }
  EXPECT_EQ(fake_nccl<int()>("fake_nccl_live_communicators")(), 0);
}

TEST_P(NcclFault, CallsThatDifferAreNamed) {
  const auto errors = run_group(GetParam(), [](Collective& collective) {
    std::vector<std::byte> part(collective.rank() == 0 ? 100 : 90), whole(part.size() * 2);
    collective.all_gather(part, whole);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("call 0 differs"), std::string::npos) << error;
  }
}

INSTANTIATE_TEST_SUITE_P(Both, NcclFault,
                         testing::Values(CollectiveCase{Backend::nccl, 2},
                                         CollectiveCase{Backend::nccl_deterministic, 2}),
                         case_name);

TEST(NcclStart, MissingRankEndsTheStart) {
  const auto errors =
      run_ranks({Backend::nccl, 2}, [](uint32_t rank, MemoryStore& store, const MakeGroup& make) {
        if (rank == 0) make(group_over(store, "world", rank, 2, 200ms));
      });
  EXPECT_NE(errors[0].find("ncclCommInitRankConfig has waited 200 ms"), std::string::npos)
      << errors[0];
}

TEST(NcclStart, LibraryThatIsMissingOrNoNcclSaysWhatToDo) {
  const auto message_for = [](const char* path) -> std::string {
    setenv("OVERSPILL_NCCL_LIBRARY", path, 1);
    HostStream stream;
    MemoryStore store;
    std::vector<std::byte> staging(nccl_staging_bytes(2));
    try {
      make_nccl_collective(group_over(store, "world", 0, 2), stream, {.staging = staging});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message_for("/none/libnccl.so").find("pip install nvidia-nccl"), std::string::npos);
  EXPECT_NE(message_for("libc.so.6").find("has no function ncclGetVersion"), std::string::npos);
}

}  // namespace
}  // namespace overspill::test
