// Ranks through the C API: each is a thread with an engine of its own over real sockets, and gives
// the native trainer's results of as many ranks, bit for bit.
#include <gtest/gtest.h>

#include <thread>

#include "tests/contract/c_api_trainer.h"
#include "tests/contract/ranks_fixture.h"

namespace overspill {
namespace {

using namespace test;

struct RankSteps {
  std::vector<OtherTrainer::Step> steps;
  std::string error;
};

class CApiRanks : public RanksTest {
 protected:
  /// Steps of every rank, and the checkpoint that they leave.
  std::pair<std::vector<RankSteps>, Files> train(const TrainConfig& config, uint32_t ranks,
                                                 Loop loop) {
    std::vector<RankSteps> results(ranks);
    const fs::path out = root_ / ("api-" + std::to_string(++runs_));
    const std::string address = "127.0.0.1:" + std::to_string(free_port());
    {
      std::vector<std::jthread> threads;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
          osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
          options.rank = rank;
          options.world_size = ranks;
          options.master_address = address.c_str();
          try {
            OtherTrainer trainer(config, loop, options);
            for (uint64_t i = 0; i < *config.max_steps; ++i) {
              results[rank].steps.push_back(trainer.train_step());
            }
            const std::string json = trainer.config_json();
            osp_checkpoint_options_t saving = OSP_CHECKPOINT_OPTIONS_INIT;
            saving.config_json = json.c_str();
            OSP_REQUIRE(osp_checkpoint_save(trainer.engine, out.c_str(), &saving));
            OSP_REQUIRE(osp_checkpoint_wait(trainer.engine));
          } catch (const std::exception& error) {
            results[rank].error = error.what();
          }
        });
      }
    }
    for (const RankSteps& result : results) EXPECT_EQ(result.error, "");
    Files files;
    if (fs::exists(out / "latest")) files = files_in(fs::canonical(out / "latest"));
    files.erase("overspill.json");
    return {results, files};
  }

 private:
  int runs_ = 0;
};

TEST_F(CApiRanks, GiveTheNativeTrainersBits) {
  for (const uint32_t stage : {3u, 2u, 0u}) {
    for (const bool in_backward : {false, true}) {
      SCOPED_TRACE(fmt::format("stage {}, in_backward {}", stage, in_backward));
      TrainConfig config = ranked_config(2);
      config.zero_stage = stage;
      if (in_backward) update_in_backward(config);
      RankedRun native = run_ranked_fresh(config, 2);
      const auto [ranks, files] = train(config, 2, Loop::layer_major_own_sums);
      const std::vector<Json> lines = native.run.steps();
      for (size_t i = 0; i < lines.size(); ++i) {
        ASSERT_LT(i, ranks[0].steps.size());
        EXPECT_EQ(lines[i].at("grad_norm").get<double>(), ranks[0].steps[i].grad_norm);
        EXPECT_EQ(ranks[0].steps[i].grad_norm, ranks[1].steps[i].grad_norm);
        const double loss = (ranks[0].steps[i].loss + ranks[1].steps[i].loss) / 2;
        EXPECT_NEAR(lines[i].at("loss").get<double>(), loss, 1e-12);
      }
      native.run.checkpoint.erase("overspill.json");
      expect_same_files(native.run.checkpoint, files);
    }
  }
}

TEST_F(CApiRanks, AFailureOfOneEndsAllAndLeavesTheProcess) {
  const fs::path out = root_ / "taken";
  fs::create_directories(out / "latest");  // the first rank cannot make its link
  const TrainConfig config = ranked_config(2);
  std::array<std::string, 2> messages;
  std::array<osp_status_t, 2> statuses{};
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
  {
    std::vector<std::jthread> threads;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
        options.rank = rank;
        options.world_size = 2;
        options.master_address = address.c_str();
        OtherTrainer trainer(config, Loop::layer_major, options);
        OSP_REQUIRE(osp_checkpoint_save(trainer.engine, out.c_str(), nullptr));
        statuses[rank] = osp_checkpoint_wait(trainer.engine);
        messages[rank] = osp_last_error();
        EXPECT_EQ(osp_acquire(trainer.engine, 0, nullptr, nullptr, 0), statuses[rank]);
        std::this_thread::sleep_for(std::chrono::seconds(7));  // what it does then is its own
      });
    }
  }
  EXPECT_EQ(statuses[0], OSP_ERROR_IO) << messages[0];
  EXPECT_EQ(statuses[1], OSP_ERROR_RANK_LOST) << messages[1];
  EXPECT_NE(messages[1].find("latest"), std::string::npos) << messages[1];
}

TEST_F(CApiRanks, PagedSumsAreReducedMicroBatchByMicroBatch) {
  TrainConfig config = ranked_config(2, true);
  const FinishedRun one = run_fresh(ranked_config(1, true));
  const auto [ranks, files] = train(config, 2, Loop::micro_batch_major);
  const std::vector<Json> lines = one.steps();
  for (size_t i = 0; i < lines.size(); ++i) {
    ASSERT_LT(i, ranks[0].steps.size());
    const double norm = lines[i].at("grad_norm").get<double>();
    EXPECT_NEAR(norm, ranks[0].steps[i].grad_norm, 1e-5 * norm);
    const double loss = (ranks[0].steps[i].loss + ranks[1].steps[i].loss) / 2;
    EXPECT_NEAR(lines[i].at("loss").get<double>(), loss, 1e-5);
  }
}

}  // namespace
}  // namespace overspill
