// Model directories, read and written: single files, shards and their index.
#include "tests/unit/engine/model/safetensors_fixture.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;
using namespace test;

class ModelTensorsTest : public TemporaryDirectory {};
class ModelTensorsWriterTest : public TemporaryDirectory {};

TEST_F(ModelTensorsTest, ReadsASingleFile) {
  write_bytes(path_, file_bytes(kTwoTensors, 11));
  const ModelTensors tensors(directory_);
  EXPECT_EQ(tensors.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(tensors.contains("a"));
  EXPECT_FALSE(tensors.contains("c"));
  tensors.require("a", std::array<uint64_t, 2>{1, 2});
}

TEST_F(ModelTensorsTest, SaysWhatIsWrongWithARequiredTensor) {
  write_bytes(path_, file_bytes(R"({"lm_head.weight":{"dtype":"F16","shape":[2,1],)"
                                R"("data_offsets":[0,4]},"q":{"dtype":"I8","shape":[3],)"
                                R"("data_offsets":[4,7]}})",
                                7));
  const ModelTensors tensors(directory_);
  const auto require = [&](const std::string& name, std::vector<uint64_t> shape) {
    return refusal(ErrorCode::invalid_file, [&] { tensors.require(name, shape); });
  };
  EXPECT_TRUE(contains(require("lm_head.weigth", {2, 1}),
                       "no tensor \"lm_head.weigth\" among its 2 (the nearest name is "
                       "\"lm_head.weight\")"));
  EXPECT_TRUE(contains(require("lm_head.weight", {1, 2}),
                       "tensor \"lm_head.weight\": shape is [2, 1], expected [1, 2]"));
  EXPECT_TRUE(contains(require("lm_head.weight", {2}), "shape is [2, 1], expected [2]"));
  EXPECT_TRUE(contains(require("q", {3}), "dtype is I8, expected F32, BF16 or F16"));
  std::array<float, 1> out{};
  EXPECT_TRUE(contains(refusal(ErrorCode::invalid_file, [&] { tensors.read_floats("x", 0, out); }),
                       "no tensor \"x\""));
}

TEST_F(ModelTensorsTest, SaysHowToConvertPickledModels) {
  write_bytes(directory_ / "pytorch_model.bin", "PK");
  const std::string message =
      refusal(ErrorCode::not_found, [&] { ModelTensors tensors(directory_); });
  EXPECT_TRUE(contains(message, "holds pytorch_model.bin but no model.safetensors; convert it"));
}

TEST_F(ModelTensorsTest, ReportsDirectoriesWithoutTensors) {
  EXPECT_TRUE(contains(refusal(ErrorCode::not_found, [&] { ModelTensors tensors(directory_); }),
                       "neither model.safetensors nor model.safetensors.index.json is there"));
  EXPECT_TRUE(contains(refusal(ErrorCode::not_found, [&] { ModelTensors tensors(path_); }),
                       "no such directory; give a Hugging Face model directory"));
}

/// An index that puts tensor "a" into `shard`.
std::string index_text(const std::string& shard) {
  return R"({"metadata":{"total_size":8},"weight_map":{"a":")" + shard + "\"}}";
}

TEST_F(ModelTensorsTest, IgnoresTensorsThatTheIndexDoesNotList) {
  write_bytes(directory_ / "model.safetensors.index.json", index_text("x.safetensors"));
  write_bytes(directory_ / "x.safetensors", file_bytes(kTwoTensors, 11));
  EXPECT_EQ(ModelTensors(directory_).names(), std::vector<std::string>{"a"});
}

TEST_F(ModelTensorsTest, RefusesBadIndexes) {
  const auto refusal_of_index = [&](ErrorCode code, const std::string& text) {
    write_bytes(directory_ / "model.safetensors.index.json", text);
    return refusal(code, [&] { ModelTensors tensors(directory_); });
  };
  EXPECT_TRUE(contains(refusal_of_index(ErrorCode::not_found, index_text("x.safetensors")),
                       "1 of 1 shards are missing: x.safetensors"));
  for (const char* shard : {"../x.safetensors", "/x", "", ".", "..", "x\\u0000y"}) {
    EXPECT_TRUE(contains(refusal_of_index(ErrorCode::invalid_file, index_text(shard)),
                         "tensor \"a\": shard is \"" + std::string(shard) +
                             "\", expected the plain name of a file"));
  }
  EXPECT_TRUE(contains(refusal_of_index(ErrorCode::invalid_file, R"({"weight_map":{"a":1}})"),
                       "shard is 1, expected"));
  EXPECT_TRUE(contains(refusal_of_index(ErrorCode::invalid_file, "{}"), "weight_map is missing"));
  EXPECT_TRUE(contains(refusal_of_index(ErrorCode::invalid_file, "[]"), "weight_map is missing"));
  EXPECT_TRUE(
      contains(refusal_of_index(ErrorCode::invalid_file, R"({"weight_map":{"a":"x","a":"y"}})"),
               "\"a\" appears twice"));
  write_bytes(directory_ / "x.safetensors", file_bytes("{}", 0));
  EXPECT_TRUE(contains(refusal_of_index(ErrorCode::invalid_file, index_text("x.safetensors")),
                       "tensor \"a\" should be in x.safetensors, but that file does not hold it"));
}

TEST_F(ModelTensorsWriterTest, WritesOneFileWhenItFits) {
  ModelTensorsWriter writer(directory_ / "out", {{"a", {2}, "F32"}, {"b", {2}, "BF16"}}, 12);
  writer.write(0, 0, bytes_of(std::array{1.0f, 2.0f}));
  writer.write(1, 0, bytes_of(std::array<uint16_t, 2>{0x3f80, 0x4000}));
  writer.finish();
  EXPECT_TRUE(fs::exists(directory_ / "out" / "model.safetensors"));
  EXPECT_FALSE(fs::exists(directory_ / "out" / "model.safetensors.index.json"));
  EXPECT_EQ(SafetensorsFile(directory_ / "out" / "model.safetensors").metadata(),
            (Strings{{"format", "pt"}}));
}

TEST_F(ModelTensorsWriterTest, FillsShardsGreedilyInOrder) {
  const std::vector<TensorSpec> specs = {
      {"t0", {4}, "U8"}, {"t1", {4}, "U8"}, {"t2", {20}, "U8"}, {"t3", {1}, "F32"}};
  ModelTensorsWriter writer(directory_, specs, 8);
  for (size_t i = 0; i < specs.size(); ++i) {
    const std::vector<float> values(5, static_cast<float>(i));
    writer.write(i, 0, std::as_bytes(std::span(values)).first(specs[i].bytes()));
  }
  writer.finish();
  EXPECT_EQ(read_bytes(directory_ / "model.safetensors.index.json"), R"({
  "metadata": {
    "total_size": 32
  },
  "weight_map": {
    "t0": "model-00001-of-00003.safetensors",
    "t1": "model-00001-of-00003.safetensors",
    "t2": "model-00002-of-00003.safetensors",
    "t3": "model-00003-of-00003.safetensors"
  }
}
)");
  const ModelTensors tensors(directory_);
  EXPECT_EQ(tensors.names().size(), 4u);
  std::array<float, 1> out{};
  tensors.read_floats("t3", 0, out);
  EXPECT_EQ(out[0], 3.0f);
}

// A reader prefers model.safetensors: an older one would hide the shards beside it.
TEST_F(ModelTensorsWriterTest, RemovesWhatWouldHideTheNewFiles) {
  write_bytes(path_, "old");
  write_bytes(directory_ / "model.safetensors.index.json", "old");
  ModelTensorsWriter sharded(directory_, {{"a", {4}, "U8"}, {"b", {4}, "U8"}}, 4);
  EXPECT_FALSE(fs::exists(path_));
  EXPECT_FALSE(fs::exists(directory_ / "model.safetensors.index.json"));
}

TEST_F(ModelTensorsTest, ReadsRealModelsAlike) {
  const fs::path models = test_data() / "models";
  if (!fs::exists(models)) GTEST_SKIP() << "no " << models << "; set OVERSPILL_TEST_DATA";
  const ModelTensors single(models / "stories260K-hf"), half(models / "stories260K-hf-bf16"),
      sharded(models / "stories260K-hf-sharded");
  EXPECT_EQ(single.names().size(), 47u);
  EXPECT_EQ(single.names(), sharded.names());
  EXPECT_EQ(single.names(), half.names());
  single.require("model.embed_tokens.weight", std::array<uint64_t, 2>{512, 64});
  for (const std::string& name : single.names()) {
    std::array<float, 64> a{}, b{}, c{};
    single.read_floats(name, 0, a);
    sharded.read_floats(name, 0, b);
    half.read_floats(name, 0, c);
    ASSERT_EQ(a, b) << name;
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(bf16_to_float(float_to_bf16(a[i])), c[i]) << name << " " << i;
    }
  }
}

// A real file, written again from its own tensors, is the same file byte for byte.
TEST_F(ModelTensorsWriterTest, ReproducesARealFile) {
  const fs::path original = test_data() / "models" / "stories260K-hf" / "model.safetensors";
  if (!fs::exists(original)) GTEST_SKIP() << "no " << original << "; set OVERSPILL_TEST_DATA";
  const SafetensorsFile source(original);
  std::vector<TensorSpec> specs;
  for (const auto& entry : source.entries()) specs.push_back(entry.spec);
  ModelTensorsWriter writer(directory_, specs);
  for (size_t i = 0; i < specs.size(); ++i) {
    std::vector<std::byte> contents(specs[i].bytes());
    source.read_raw(source.entries()[i], 0, contents);
    writer.write(i, 0, contents);
  }
  writer.finish();
  EXPECT_TRUE(read_bytes(path_) == read_bytes(original));
}

}  // namespace
}  // namespace overspill
