// A run that stops after step k and resumes gives the bits of the run that never stopped; and what
// cannot be resumed is refused by name.
#include <gtest/gtest.h>

#include <set>

#include "tests/contract/devices.h"
#include "tests/fault/training_fixture.h"

namespace overspill {
namespace {

using namespace test;

class ResumeContract : public TrainingTest {
 protected:
  static constexpr uint64_t kSteps = 5;

  /// Shuffled data and a schedule, so that both must go on where they were.
  TrainConfig config() const {
    TrainConfig made = tiny_config();
    made.max_steps = kSteps;
    made.lr_scheduler = LrScheduler::cosine;
    made.warmup_steps = 2;
    made.shuffle = true;
    // 18 sequences, so that step 5 (sequences 16 to 19) crosses into another epoch.
    made.gradient_accumulation_steps = 4;
    made.datasets[0].path = root_ / "val.bin";
    return made;
  }
  static void elsewhere(TrainConfig& c) {
    c.offload.chunk_parameters = 4096;
    c.offload.device = discrete_device();
    c.offload.weights = Placement::host;
    c.offload.optimizer = Placement::device;
    c.offload.activations = Placement::automatic;
    c.offload.prefetch_depth = 2;
  }
  static std::string lines_after(const std::vector<Json>& lines, uint64_t step) {
    std::vector<Json> kept;
    for (const Json& line : lines) {
      if (line.at("step").get<uint64_t>() > step) kept.push_back(line);
    }
    return step_text(kept);
  }

  /// Resumes from every checkpoint of a run, that before its first step included.
  void expect_resumes(const TrainConfig& config) {
    const FinishedRun whole = run_fresh(config);
    TrainConfig saving = config;
    saving.output_dir = root_ / "saves";
    saving.save_steps = 1;
    {
      testing::internal::CaptureStdout();
      Trainer trainer(saving);
      EXPECT_TRUE(trainer.run(std::atomic<bool>{true}).interrupted);
      testing::internal::GetCapturedStdout();
      EXPECT_TRUE(fs::exists(saving.output_dir / "checkpoint-0"));
    }
    saving.resume_from_checkpoint = "true";
    run(saving);
    for (uint64_t k = 0; k < kSteps; ++k) {
      for (const bool moved : {false, true}) {
        SCOPED_TRACE(fmt::format("after step {}{}", k, moved ? ", another placement" : ""));
        TrainConfig resumed = config;
        resumed.resume_from_checkpoint = saving.output_dir / fmt::format("checkpoint-{}", k);
        if (moved) elsewhere(resumed);
        if (moved && config.offload.update == UpdateTiming::next_forward) {
          resumed.offload.gradients = Placement::host;
        }
        const FinishedRun rest = run_fresh(resumed);
        EXPECT_EQ(rest.report.steps, kSteps - k);
        EXPECT_EQ(lines_after(whole.lines, k), step_text(rest.lines));
        EXPECT_TRUE(rest.checkpoint.contains("optimizer.safetensors"));
        expect_same_files(whole.checkpoint, rest.checkpoint);
      }
    }
  }

  /// The message with which resuming from a checkpoint, changed by `damage`, is refused.
  Error refusal_after(const std::function<void(const fs::path&)>& damage) {
    TrainConfig first = config();
    first.max_steps = 1;
    fs::remove_all(first.output_dir);
    const fs::path checkpoint = run(first).report.checkpoint;
    damage(checkpoint);
    TrainConfig resumed = config();
    resumed.resume_from_checkpoint = checkpoint;
    return refusal(resumed);
  }
  static void flip_bit(const fs::path& path, size_t at) {
    std::string bytes = bytes_of_file(path);
    ASSERT_LT(at, bytes.size());
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    put_file(path, bytes);
  }
};

TEST_F(ResumeContract, EveryStepBf16) { expect_resumes(config()); }

TEST_F(ResumeContract, EveryStepFloat32) {
  TrainConfig made = config();
  made.precision = Precision::float32;
  expect_resumes(made);
}

TEST_F(ResumeContract, EveryStepUpdatedTwice) {
  TrainConfig made = config();
  made.offload.update_twice = true;
  expect_resumes(made);
}

TEST_F(ResumeContract, EveryStepWithUpdatesInTheBackward) {
  for (const Precision precision : {Precision::bf16, Precision::float32}) {
    TrainConfig made = config();
    made.precision = precision;
    update_in_backward(made);
    expect_resumes(made);
    fs::remove_all(root_ / "saves");
  }
}

/// Runs that die of a drive at some request; `true` finds their last checkpoint.
TEST_F(ResumeContract, TrueContinuesTheNewestAfterACrash) {
  const FinishedRun whole = run_fresh(config());
  std::set<std::string> stopped_at;
  for (const uint64_t request : {10u, 60u, 110u, 150u}) {
    SCOPED_TRACE(fmt::format("request {}", request));
    TrainConfig dying = config();
    fs::remove_all(dying.output_dir);
    dying.save_steps = 1;
    dying.resume_from_checkpoint = "true";  // nothing yet: starts from the beginning
    dying.offload.io.wrap = [&](std::unique_ptr<AsyncIo> io) {
      return make_faulty_io(std::move(io), {.fail_request = request, .error = ENODEV});
    };
    EXPECT_EQ(refusal(dying).code(), ErrorCode::io);
    std::error_code none;
    stopped_at.insert(fs::read_symlink(dying.output_dir / "latest", none));
    TrainConfig resumed = config();
    resumed.resume_from_checkpoint = "true";
    const FinishedRun rest = run(resumed);
    // The file holds every step once: those before the crash are kept, the lost one is not.
    EXPECT_EQ(step_text(whole.lines), step_text(rest.lines));
    EXPECT_EQ(rest.final().at("steps").get<uint64_t>(), rest.report.steps);
    expect_same_files(whole.checkpoint, rest.checkpoint);
  }
  EXPECT_GE(stopped_at.size(), 3u) << "the crashes should hit different steps";
}

TEST_F(ResumeContract, MetricsKeepEvaluationsAndDropATornLine) {
  TrainConfig made = config();
  made.max_steps = 3;
  made.save_steps = 2;
  made.eval_steps = 1;
  made.datasets.push_back({.path = root_ / "train.bin", .type = TokenFormat::nanogpt});
  made.datasets.back().evaluation = true;
  run(made);
  std::ofstream(made.output_dir / "metrics.jsonl", std::ios::app) << R"({"step": 4, "lo)";
  made.max_steps = 4;
  made.lr_scheduler = LrScheduler::constant;
  made.resume_from_checkpoint = made.output_dir / "checkpoint-2";
  std::string seen;
  for (const Json& line : run(made).lines) {
    seen += line.at("step").dump() + (line.contains("eval_loss") ? "e" : "") +
            (line.contains("final") ? "f" : "") + " ";
  }
  EXPECT_EQ(seen, "1 1e 2 2e 3 3e 4 4e 4f ");
}

TEST_F(ResumeContract, AFinishedRunHasNothingToDo) {
  TrainConfig made = config();
  const FinishedRun first = run(made);
  made.resume_from_checkpoint = "true";
  const FinishedRun again = run(made);
  EXPECT_EQ(again.report.steps, 0u);
  EXPECT_FALSE(again.report.interrupted);
  EXPECT_EQ(step_text(first.lines), step_text(again.lines));
  expect_same_files(first.checkpoint, files_in(made.output_dir / "checkpoint-5"));
}

TEST_F(ResumeContract, LimitKeepsTheNewestAndTheOneJustSaved) {
  TrainConfig made = config();
  made.save_steps = 1;
  made.save_total_limit = 2;
  run(made);
  const std::vector<std::string> expected = {"checkpoint-4",  "checkpoint-5",         "latest",
                                             "metrics.jsonl", "trace-predicted.json", "trace.json"};
  EXPECT_EQ(names_in(made.output_dir), expected);
  EXPECT_EQ(fs::read_symlink(made.output_dir / "latest"), "checkpoint-5");
  // Going back to an earlier step: what the abandoned future left must not push out the present.
  made.save_total_limit = 1;
  made.max_steps = 6;
  made.resume_from_checkpoint = made.output_dir / "checkpoint-4";
  fs::rename(made.output_dir / "checkpoint-5", made.output_dir / "checkpoint-9");
  run(made);
  const fs::path latest = fs::canonical(made.output_dir / "latest");
  EXPECT_EQ(latest.filename(), "checkpoint-6");
  EXPECT_EQ(open_checkpoint(latest).position.step, 6u);
}

TEST_F(ResumeContract, SavesOfTheModelOnlyCannotBeResumedButTrainedFrom) {
  TrainConfig made = config();
  made.save_only_model = true;
  made.max_steps = 1;
  const fs::path saved = run(made).report.checkpoint;
  EXPECT_EQ(names_in(saved), (std::vector<std::string>{"config.json", "model.safetensors"}));
  EXPECT_FALSE(fs::exists(fs::symlink_status(made.output_dir / "latest")));
  TrainConfig resumed = config();
  resumed.resume_from_checkpoint = saved;
  const Error error = refusal(resumed);
  EXPECT_EQ(error.code(), ErrorCode::not_found);
  EXPECT_TRUE(has(error.what(), saved.string() + ": no overspill.json there"));
  EXPECT_TRUE(has(error.what(), "use it as base_model"));
  TrainConfig tuned = config();
  tuned.init_from_scratch = false;
  tuned.base_model = saved;
  tuned.base_model_config.clear();
  tuned.output_dir = root_ / "tuned";
  EXPECT_EQ(run(tuned).steps().size(), kSteps);
}

TEST_F(ResumeContract, OtherDataOrderOrPrecisionIsRefused) {
  TrainConfig first = config();
  first.max_steps = 1;
  first.resume_from_checkpoint = run(first).report.checkpoint;
  const std::string name = first.resume_from_checkpoint;
  const auto refused = [&](const std::function<void(TrainConfig&)>& change) {
    TrainConfig changed = first;
    change(changed);
    const Error error = refusal(changed);
    EXPECT_EQ(error.code(), ErrorCode::invalid_config) << error.what();
    EXPECT_TRUE(has(error.what(), name));
    return std::string(error.what());
  };
  EXPECT_TRUE(has(refused([](TrainConfig& c) { c.seed = 7; }),
                  "data order (seed 42, shuffle true, sequence_len 32) is not this run's (seed 7"));
  EXPECT_TRUE(has(refused([](TrainConfig& c) { c.sequence_len = 16; }), "sequence_len 16)"));
  EXPECT_TRUE(has(refused([](TrainConfig& c) { c.shuffle = false; }), "shuffle false"));
  EXPECT_TRUE(has(refused([](TrainConfig& c) { c.precision = Precision::float32; }),
                  "was written with precision: bf16; this run has precision: float32"));
}

TEST_F(ResumeContract, AnotherModelsShapeIsRefused) {
  TrainConfig first = config();
  first.max_steps = 1;
  first.resume_from_checkpoint = run(first).report.checkpoint;
  first.base_model_config = root_ / "wide";
  Json shape = shape_json(false);
  shape["intermediate_size"] = 192;
  fs::create_directory(root_ / "wide");
  put_file(root_ / "wide" / "config.json", shape.dump());
  const Error error = refusal(first);
  EXPECT_EQ(error.code(), ErrorCode::invalid_file);
  EXPECT_TRUE(has(error.what(), "model.layers.0.mlp.gate_proj.weight"));
}

TEST_F(ResumeContract, DamagedFilesAreRefusedByName) {
  const auto refused = [&](const char* file, const char* why,
                           const std::function<void(const fs::path&)>& damage) {
    const Error error = refusal_after(damage);
    EXPECT_EQ(error.code(), ErrorCode::invalid_file) << error.what();
    EXPECT_TRUE(has(error.what(), std::string("checkpoint-1/") + file));
    EXPECT_TRUE(has(error.what(), why));
    EXPECT_TRUE(has(error.what(), "resume from another one"));
  };
  refused("model.safetensors", "does not match the checksum",
          [](const fs::path& c) { flip_bit(c / "model.safetensors", 100'000); });
  refused("config.json", "does not match the checksum",
          [](const fs::path& c) { flip_bit(c / "config.json", 30); });
  refused("optimizer.safetensors", "overspill.json says", [](const fs::path& c) {
    fs::resize_file(c / "optimizer.safetensors", fs::file_size(c / "optimizer.safetensors") - 1);
  });
  refused("optimizer.safetensors", "missing",
          [](const fs::path& c) { fs::remove(c / "optimizer.safetensors"); });
  refused("overspill.json", "parse error",
          [](const fs::path& c) { fs::resize_file(c / "overspill.json", 50); });
  refused("overspill.json", "its checksum", [](const fs::path& c) {
    Json manifest = Json::parse(bytes_of_file(c / "overspill.json"));
    manifest.erase("data_cursor");
    put_file(c / "overspill.json", manifest.dump());
  });
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    refused("overspill.json", "its checksum", [&](const fs::path& c) {
      Json manifest = Json::parse(bytes_of_file(c / "overspill.json"));
      manifest["files"].erase(file);
      put_file(c / "overspill.json", manifest.dump());
    });
  }
  refused("overspill.json", "its checksum", [](const fs::path& c) {
    Json manifest = Json::parse(bytes_of_file(c / "overspill.json"));
    manifest["data_cursor"] = manifest["data_cursor"].get<uint64_t>() + 1;
    put_file(c / "overspill.json", manifest.dump(2) + "\n");
  });
}

TEST_F(ResumeContract, ANewRunNeverMixesWithAnOldOnesCheckpoints) {
  TrainConfig made = config();
  made.max_steps = 1;
  const FinishedRun first = run(made);
  const Error error = refusal(made);
  EXPECT_EQ(error.code(), ErrorCode::invalid_config);
  EXPECT_TRUE(has(error.what(), made.output_dir.string() + " holds checkpoints"));
  EXPECT_TRUE(has(error.what(), "resume_from_checkpoint: true"));
  expect_same_files(first.checkpoint, files_in(made.output_dir / "checkpoint-1"));
  EXPECT_EQ(metrics_of(made.output_dir).size(), first.lines.size());
}

TEST_F(ResumeContract, LatestThatNamesNothingIsRefused) {
  TrainConfig first = config();
  first.max_steps = 1;
  fs::remove_all(run(first).report.checkpoint);
  first.resume_from_checkpoint = "true";
  const Error error = refusal(first);
  EXPECT_EQ(error.code(), ErrorCode::not_found) << error.what();
  EXPECT_TRUE(has(error.what(), (first.output_dir / "latest").string()));
  EXPECT_TRUE(has(error.what(), "checkpoint-1"));
}

TEST_F(ResumeContract, LeftoversOfAnInterruptedSaveAreRemoved) {
  TrainConfig made = config();
  made.max_steps = 1;
  const fs::path partial = made.output_dir / ".checkpoint-7.tmp";
  fs::create_directories(partial);
  put_file(partial / "model.safetensors", "half");
  fs::create_directories(made.output_dir / "checkpoint-notes");  // somebody's own
  run(made);
  EXPECT_FALSE(fs::exists(partial));
  EXPECT_TRUE(fs::exists(made.output_dir / "checkpoint-notes"));
}

}  // namespace
}  // namespace overspill
