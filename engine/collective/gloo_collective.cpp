// Every rank exchanges pieces with every other one directly; the next piece is under way while the
// present one is summed.
#include "engine/collective/gloo_collective.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "engine/base/error.h"
#include "engine/collective/gloo_mesh.h"
#include "engine/collective/reduction.h"

namespace overspill {
namespace {

constexpr uint64_t kGatherPiece = 4 << 20;  // bytes
constexpr uint64_t kStagingBytes = 16 << 20;
constexpr uint32_t kStages = 2;

/// Values of one rank that are reduced in one go: 1 MiB, less where many ranks share the staging
/// memory.
uint64_t reduce_piece(uint32_t ranks) {
  return std::clamp<uint64_t>(kStagingBytes / (kStages * sizeof(float) * ranks), 4096, 256 << 10);
}

enum class Kind : uint64_t { gather = 1, reduce, broadcast, barrier };

class GlooCollective final : public Collective {
 public:
  GlooCollective(const CollectiveGroup& group, std::shared_ptr<GlooDevice> device)
      : Collective(group.rank, group.size),
        mesh_(group, std::move(device)),
        piece_(reduce_piece(group.size)),
        staging_(std::make_unique_for_overwrite<std::byte[]>(gloo_staging_bytes(group.size))) {}

  void all_gather(std::span<const std::byte> part, std::span<std::byte> whole) override {
    CHECK(whole.size() == part.size() * size());
    std::byte* own = whole.data() + rank() * part.size();
    if (own != part.data() && !part.empty()) std::memmove(own, part.data(), part.size());
    begin();
    gather(whole, {.total = whole.size(), .ranks = size()}, 1);
  }

  void reduce_scatter(std::span<float> values, ReduceType type) override {
    CHECK(values.size() % size() == 0);
    begin();
    reduce(values, type);
  }

  void all_reduce(std::span<float> values, ReduceType type) override {
    begin();
    reduce(values, type);
    const Partition parts{.total = values.size(), .ranks = size()};
    if (type == ReduceType::bf16) {
      gather_rounded(values, parts);
    } else {
      gather(std::as_writable_bytes(values), parts, sizeof(float));
    }
  }

  void all_reduce(std::span<double> values) override {
    constexpr size_t kPiece = 1 << 15;  // a rank holds as many of every rank's at a time
    for (size_t begin = 0; begin < values.size(); begin += kPiece) {
      sum_piece(values.subspan(begin, std::min(kPiece, values.size() - begin)));
    }
  }

  void broadcast(std::span<std::byte> bytes, uint32_t root) override;
  void barrier() override;
  void abort(const std::string& reason) override { mesh_.abort(reason); }

 private:
  void sum_piece(std::span<double> values) {
    std::vector<double> all(values.size() * size());
    all_gather(std::as_bytes(values), std::as_writable_bytes(std::span(all)));
    for (size_t i = 0; i < values.size(); ++i) {
      double sum = all[i];
      for (size_t at = i + values.size(); at < all.size(); at += values.size()) sum += all[at];
      values[i] = sum;
    }
  }

  using PeerBuffer = GlooMesh::PeerBuffer;

  void begin() {
    mesh_.check();
    ++calls_;
  }
  /// What both sides of a transfer must agree on. With another length or another call it never
  /// matches: Gloo would end the process where lengths differ.
  uint64_t slot(Kind kind, uint64_t bytes) const {
    return static_cast<uint64_t>(kind) << 60 | (calls_ & 0xfffffffffull) << 24 | bytes;
  }
  /// Sends go to the ranks after this one and receives come from those before it, the nearest
  /// first, so that no rank is asked by all at once.
  uint32_t after(uint32_t distance) const { return (rank() + distance) % size(); }
  uint32_t before(uint32_t distance) const { return (rank() + size() - distance) % size(); }

  void send(PeerBuffer& to, Kind kind, uint64_t offset, uint64_t bytes) {
    to.send(slot(kind, bytes), offset, bytes);
    bytes_sent_ += bytes;
  }

  /// So many pieces are under way at a time as there are stages.
  template <class Post, class Complete>
  static void pipeline(uint64_t pieces, Post&& post, Complete&& complete) {
    for (uint64_t p = 0; p < pieces; ++p) {
      if (p >= kStages) complete(p - kStages);
      post(p);
    }
    for (uint64_t p = pieces - std::min<uint64_t>(pieces, kStages); p < pieces; ++p) complete(p);
  }

  void gather(std::span<std::byte> whole, const Partition& parts, uint64_t width);
  void gather_rounded(std::span<float> values, const Partition& parts);
  void reduce(std::span<float> values, ReduceType type);
  void reduce_float32(std::span<float> values, const Partition& parts);
  void reduce_bf16(std::span<float> values, const Partition& parts);

  /// Of a stage of the staging memory: one place a rank, of float32 or two of bf16.
  std::byte* place(uint64_t piece, uint32_t index) {
    return staging_.get() + ((piece % kStages) * size() + index) * piece_ * sizeof(float);
  }
  float* incoming_float(uint64_t piece, uint32_t index) {
    return reinterpret_cast<float*>(place(piece, index));
  }
  uint16_t* incoming(uint64_t piece, uint32_t index) {
    return reinterpret_cast<uint16_t*>(place(piece, index));
  }
  uint16_t* outgoing(uint64_t piece, uint32_t index) { return incoming(piece, index) + piece_; }
  /// A buffer over that place for each stage and each other rank, at stage * (size - 1) + distance
  /// - 1.
  template <class Place>
  std::vector<PeerBuffer> staging_buffers(bool receiving, Place&& memory, size_t bytes) {
    std::vector<PeerBuffer> buffers;
    for (uint32_t stage = 0; stage < kStages; ++stage) {
      for (uint32_t d = 1; d < size(); ++d) {
        buffers.emplace_back(mesh_, receiving ? before(d) : after(d), memory(stage, d), bytes);
      }
    }
    return buffers;
  }
  size_t buffer_index(uint64_t piece, uint32_t distance) const {
    return (piece % kStages) * (size() - 1) + distance - 1;
  }

  GlooMesh mesh_;
  const uint64_t piece_;
  const std::unique_ptr<std::byte[]> staging_;
  uint64_t calls_ = 0;
};

/// `parts` counts elements of `width` bytes.
void GlooCollective::gather(std::span<std::byte> whole, const Partition& parts, uint64_t width) {
  const auto begin_of = [&](uint32_t r) { return parts.begin(r) * width; };
  const auto length = [&](uint32_t r, uint64_t p) {
    return piece_length(parts.length(r) * width, kGatherPiece, p);
  };
  std::vector<PeerBuffer> from, to;
  for (uint32_t d = 1; d < size(); ++d) {
    const uint32_t source = before(d);
    from.emplace_back(mesh_, source, whole.data() + begin_of(source), parts.length(source) * width);
    to.emplace_back(mesh_, after(d), whole.data() + begin_of(rank()), parts.length(rank()) * width);
  }
  const auto post = [&](uint64_t p) {
    for (uint32_t d = 1; d < size(); ++d) {
      const uint64_t in = length(before(d), p), out = length(rank(), p);
      if (in > 0) from[d - 1].receive(slot(Kind::gather, in), p * kGatherPiece, in);
      if (out > 0) send(to[d - 1], Kind::gather, p * kGatherPiece, out);
    }
  };
  const auto complete = [&](uint64_t p) {
    for (uint32_t d = 1; d < size(); ++d) {
      if (length(before(d), p) > 0) from[d - 1].wait_received();
      if (length(rank(), p) > 0) to[d - 1].wait_sent();
    }
  };
  pipeline((parts.length(0) * width + kGatherPiece - 1) / kGatherPiece, post, complete);
}

/// The parts travel as bf16; every rank then holds what that rounding left, the sender too.
void GlooCollective::gather_rounded(std::span<float> values, const Partition& parts) {
  const auto length = [&](uint32_t r, uint64_t p) {
    return piece_length(parts.length(r), piece_, p);
  };
  const auto piece_of = [&](uint32_t r, uint64_t p) {
    return values.subspan(parts.begin(r) + std::min(p * piece_, parts.length(r)), length(r, p));
  };
  auto from = staging_buffers(
      true, [&](uint32_t stage, uint32_t d) { return incoming(stage, d); }, piece_ * 2);
  auto to = staging_buffers(
      false, [&](uint32_t stage, uint32_t) { return outgoing(stage, 0); }, piece_ * 2);
  const auto post = [&](uint64_t p) {
    const std::span<float> own = piece_of(rank(), p);
    round_to_bf16(own, outgoing(p, 0));
    widen_bf16(outgoing(p, 0), own);
    for (uint32_t d = 1; d < size(); ++d) {
      const uint64_t in = length(before(d), p) * 2, out = own.size() * 2;
      if (in > 0) from[buffer_index(p, d)].receive(slot(Kind::gather, in), 0, in);
      if (out > 0) send(to[buffer_index(p, d)], Kind::gather, 0, out);
    }
  };
  const auto complete = [&](uint64_t p) {
    for (uint32_t d = 1; d < size(); ++d) {
      const std::span<float> piece = piece_of(before(d), p);
      if (!piece.empty()) {
        from[buffer_index(p, d)].wait_received();
        widen_bf16(incoming(p, d), piece);
      }
      if (length(rank(), p) > 0) to[buffer_index(p, d)].wait_sent();
    }
  };
  pipeline((parts.length(0) + piece_ - 1) / piece_, post, complete);
}

/// This rank's part of `values` becomes the sum.
void GlooCollective::reduce(std::span<float> values, ReduceType type) {
  const Partition parts{.total = values.size(), .ranks = size()};
  type == ReduceType::bf16 ? reduce_bf16(values, parts) : reduce_float32(values, parts);
}

void GlooCollective::reduce_float32(std::span<float> values, const Partition& parts) {
  const auto length = [&](uint32_t r, uint64_t p) {
    return piece_length(parts.length(r), piece_, p);
  };
  auto from = staging_buffers(
      true, [&](uint32_t stage, uint32_t d) { return place(stage, d); }, piece_ * sizeof(float));
  std::vector<PeerBuffer> to;
  for (uint32_t d = 1; d < size(); ++d) {
    to.emplace_back(mesh_, after(d), values.data() + parts.begin(after(d)),
                    parts.length(after(d)) * sizeof(float));
  }
  const auto post = [&](uint64_t p) {
    const uint64_t in = length(rank(), p) * sizeof(float);
    for (uint32_t d = 1; d < size(); ++d) {
      const uint64_t out = length(after(d), p) * sizeof(float);
      if (in > 0) from[buffer_index(p, d)].receive(slot(Kind::reduce, in), 0, in);
      if (out > 0) send(to[d - 1], Kind::reduce, p * piece_ * sizeof(float), out);
    }
  };
  const auto complete = [&](uint64_t p) {
    const uint64_t count = length(rank(), p);
    if (count > 0) {
      float* own = values.data() + parts.begin(rank()) + p * piece_;
      std::vector<const float*> contributions(size(), own);
      for (uint32_t d = 1; d < size(); ++d) {
        from[buffer_index(p, d)].wait_received();
        contributions[before(d)] = incoming_float(p, d);
      }
      sum_in_rank_order(contributions, {own, count});
    }
    for (uint32_t d = 1; d < size(); ++d) {
      if (length(after(d), p) > 0) to[d - 1].wait_sent();
    }
  };
  pipeline((parts.length(0) + piece_ - 1) / piece_, post, complete);
}

void GlooCollective::reduce_bf16(std::span<float> values, const Partition& parts) {
  const auto length = [&](uint32_t r, uint64_t p) {
    return piece_length(parts.length(r), piece_, p);
  };
  const auto piece_of = [&](uint32_t r, uint64_t p) {
    return values.subspan(parts.begin(r) + std::min(p * piece_, parts.length(r)), length(r, p));
  };
  auto from = staging_buffers(
      true, [&](uint32_t stage, uint32_t d) { return incoming(stage, d); }, piece_ * 2);
  auto to = staging_buffers(
      false, [&](uint32_t stage, uint32_t d) { return outgoing(stage, d); }, piece_ * 2);
  const auto post = [&](uint64_t p) {
    const uint64_t in = length(rank(), p) * 2;
    round_to_bf16(piece_of(rank(), p), outgoing(p, 0));
    for (uint32_t d = 1; d < size(); ++d) {
      const std::span<const float> piece = piece_of(after(d), p);
      if (in > 0) from[buffer_index(p, d)].receive(slot(Kind::reduce, in), 0, in);
      if (piece.empty()) continue;
      round_to_bf16(piece, outgoing(p, d));
      send(to[buffer_index(p, d)], Kind::reduce, 0, piece.size() * 2);
    }
  };
  const auto complete = [&](uint64_t p) {
    const std::span<float> own = piece_of(rank(), p);
    if (!own.empty()) {
      std::vector<const uint16_t*> contributions(size(), outgoing(p, 0));
      for (uint32_t d = 1; d < size(); ++d) {
        from[buffer_index(p, d)].wait_received();
        contributions[before(d)] = incoming(p, d);
      }
      sum_in_rank_order(contributions, own);
    }
    for (uint32_t d = 1; d < size(); ++d) {
      if (length(after(d), p) > 0) to[buffer_index(p, d)].wait_sent();
    }
  };
  pipeline((parts.length(0) + piece_ - 1) / piece_, post, complete);
}

void GlooCollective::broadcast(std::span<std::byte> bytes, uint32_t root) {
  CHECK(root < size());
  begin();
  const uint32_t own = (rank() + size() - root) % size();
  const auto rank_of = [&](uint32_t place) { return (place + root) % size(); };
  std::vector<PeerBuffer> parent, children;
  if (own > 0) {
    parent.emplace_back(mesh_, rank_of(own - std::bit_floor(own)), bytes.data(), bytes.size());
  }
  for (uint32_t step = std::bit_ceil(own + 1); own + step < size(); step *= 2) {
    children.emplace_back(mesh_, rank_of(own + step), bytes.data(), bytes.size());
  }
  const auto length = [&](uint64_t p) { return piece_length(bytes.size(), kGatherPiece, p); };
  const auto post = [&](uint64_t p) {
    if (own == 0) return;
    parent[0].receive(slot(Kind::broadcast, length(p)), p * kGatherPiece, length(p));
  };
  const auto complete = [&](uint64_t p) {
    if (own > 0) parent[0].wait_received();
    for (PeerBuffer& child : children) {
      send(child, Kind::broadcast, p * kGatherPiece, length(p));
      if (p > 0) child.wait_sent();
    }
  };
  const uint64_t pieces = (bytes.size() + kGatherPiece - 1) / kGatherPiece;
  pipeline(pieces, post, complete);
  if (pieces == 0) return;
  for (PeerBuffer& child : children) child.wait_sent();
}

/// After round k a rank knows of the 2^(k+1) - 1 ranks before it.
void GlooCollective::barrier() {
  begin();
  for (uint32_t step = 1; step < size(); step *= 2) {
    PeerBuffer from(mesh_, before(step), nullptr, 0), to(mesh_, after(step), nullptr, 0);
    from.receive(slot(Kind::barrier, 0), 0, 0);
    send(to, Kind::barrier, 0, 0);
    from.wait_received();
    to.wait_sent();
  }
}

}  // namespace

std::unique_ptr<Collective> make_gloo_collective(const CollectiveGroup& group,
                                                 std::shared_ptr<GlooDevice> device) {
  CHECK(group.rank < group.size);
  if (group.size == 1) return make_local_collective();
  return std::make_unique<GlooCollective>(group, std::move(device));
}

uint64_t gloo_staging_bytes(uint32_t ranks) {
  return ranks == 1 ? 0 : kStages * reduce_piece(ranks) * ranks * sizeof(float);
}

}  // namespace overspill
