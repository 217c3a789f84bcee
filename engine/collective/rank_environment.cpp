// This process among the ranks, from what launchers leave in the environment. The first that is
// there counts: RANK (overspill's launcher, torchrun, or by hand), Open MPI, Slurm, nothing.
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>

#include "engine/base/error.h"
#include "engine/base/random.h"
#include "engine/collective/rendezvous.h"
#include "engine/collective/slurm_environment.h"

namespace overspill {
namespace {

constexpr uint32_t kMaxRanks = 1u << 20;
constexpr uint32_t kMaxPort = 65535;
/// Ports for jobs that name none: below Linux's ephemeral range, of which others take at random.
constexpr uint32_t kFirstPort = 20000, kPorts = 12000;

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

uint32_t number_of(const char* name, const std::string& text, uint32_t least, uint32_t most) {
  uint32_t value = 0;
  const char* end = text.data() + text.size();
  const auto [parsed, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || parsed != end || value < least || value > most) {
    fail(ErrorCode::invalid_config, "{}={}: must be a whole number from {} to {}", name, text,
         least, most);
  }
  return value;
}

std::optional<uint32_t> number(const char* name, uint32_t least, uint32_t most) {
  const auto text = variable(name);
  if (!text) return std::nullopt;
  return number_of(name, *text, least, most);
}

uint32_t required(const char* name, const char* beside, uint32_t least, uint32_t most) {
  if (const auto value = number(name, least, most)) return *value;
  fail(ErrorCode::invalid_config,
       "{} is set in the environment, but {} is not; set both, or neither", beside, name);
}

void check_below(const char* name, uint32_t value, const char* count_name, uint32_t count) {
  if (value < count) return;
  fail(ErrorCode::invalid_config, "{}={} with {}={}: ranks count from 0 to {}", name, value,
       count_name, count, count - 1);
}

/// Rank and size from one launcher's pairs of variables.
RankIdentity read_pair(const char* rank_name, const char* count_name) {
  RankIdentity identity;
  identity.rank = required(rank_name, count_name, 0, kMaxRanks - 1);
  identity.ranks = required(count_name, rank_name, 1, kMaxRanks);
  check_below(rank_name, identity.rank, count_name, identity.ranks);
  return identity;
}

void read_local_pair(RankIdentity& identity, const char* rank_name, const char* count_name) {
  identity.local_rank = required(rank_name, count_name, 0, kMaxRanks - 1);
  identity.local_ranks = required(count_name, rank_name, 1, identity.ranks);
  check_below(rank_name, identity.local_rank, count_name, identity.local_ranks);
}

/// What names a job becomes its port, so that two jobs on a host rarely meet.
uint16_t port_of_job(const std::string& job) {
  uint64_t mixed = job.size();
  for (const char c : job) mixed = mix64(mixed ^ static_cast<uint8_t>(c));
  return static_cast<uint16_t>(kFirstPort + mixed % kPorts);
}

/// Address, port and token: those in the environment go before the launcher's.
void read_place(RankIdentity& identity, std::optional<std::string> address, uint16_t port,
                const std::string& token, const std::string& how_to_set) {
  identity.master_port = port;
  if (const auto given = number("MASTER_PORT", 1, kMaxPort)) {
    identity.master_port = static_cast<uint16_t>(*given);
  }
  if (const auto given = variable("MASTER_ADDR")) address = given;
  identity.token = variable("OVERSPILL_TOKEN").value_or(token);
  if (address) identity.master_addr = *address;
  if (address || identity.local_ranks == identity.ranks) return;
  fail(
      ErrorCode::invalid_config,
      "rank {} of {} ({}): MASTER_ADDR is not set, and the ranks are on several hosts; set it to a "
      "host name or address of rank 0 that the others reach: {}",
      identity.rank, identity.ranks, identity.launcher, how_to_set);
}

RankIdentity from_rank() {
  RankIdentity identity = read_pair("RANK", "WORLD_SIZE");
  const bool own = variable("OVERSPILL_LAUNCHER") == "overspill";
  const auto run = own ? std::nullopt : variable("TORCHELASTIC_RUN_ID");
  identity.launcher = own ? "overspill" : run ? "torchrun" : "RANK and WORLD_SIZE";
  if (variable("LOCAL_RANK") || variable("LOCAL_WORLD_SIZE")) {
    read_local_pair(identity, "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  } else if (variable("MASTER_ADDR").value_or("127.0.0.1").starts_with("127.")) {
    identity.local_rank = identity.rank;
    identity.local_ranks = identity.ranks;
  }
  const std::string token =
      run ? "torchrun " + *run + " " + variable("TORCHELASTIC_RESTART_COUNT").value_or("0") : "";
  read_place(identity, std::nullopt, identity.master_port, token, "export MASTER_ADDR=...");
  // torchrun's agent itself listens at MASTER_PORT then.
  if (run && variable("TORCHELASTIC_USE_AGENT_STORE") == "True") {
    const bool last = identity.master_port == kMaxPort;
    identity.master_port = static_cast<uint16_t>(identity.master_port + (last ? -1 : 1));
  }
  return identity;
}

RankIdentity from_open_mpi() {
  RankIdentity identity = read_pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  read_local_pair(identity, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  identity.launcher = "Open MPI";
  const auto job = variable("PMIX_NAMESPACE");
  const uint16_t port = job ? port_of_job(*job) : identity.master_port;
  read_place(identity, std::nullopt, port, "Open MPI " + job.value_or(""),
             "mpirun -x MASTER_ADDR=...");
  return identity;
}

uint32_t slurm_local_ranks(const RankIdentity& identity) {
  if (const auto list = variable("SLURM_STEP_TASKS_PER_NODE")) {
    const uint32_t node = number("SLURM_NODEID", 0, kMaxRanks).value_or(0);
    if (const auto count = slurm_count_at(*list, node)) return *count;
    fail(ErrorCode::invalid_config,
         "SLURM_STEP_TASKS_PER_NODE={} has no count for SLURM_NODEID={}; start the ranks with srun",
         *list, node);
  }
  const auto per_node = number("SLURM_NTASKS_PER_NODE", 1, kMaxRanks);
  return std::min(per_node.value_or(identity.ranks), identity.ranks);
}

RankIdentity from_slurm() {
  // SLURM_NTASKS may be the allocation's, of which this step is a part.
  const bool step_count = variable("SLURM_STEP_NUM_TASKS").has_value();
  RankIdentity identity =
      read_pair("SLURM_PROCID", step_count ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS");
  identity.launcher = "Slurm";
  identity.local_rank = number("SLURM_LOCALID", 0, kMaxRanks - 1).value_or(0);
  identity.local_ranks = slurm_local_ranks(identity);
  check_below("SLURM_LOCALID", identity.local_rank, "tasks on this node", identity.local_ranks);
  const auto list = variable("SLURM_STEP_NODELIST");
  const std::string nodes = list ? *list : variable("SLURM_JOB_NODELIST").value_or("");
  const std::string first = first_slurm_host(nodes);
  const std::string job =
      variable("SLURM_JOB_ID").value_or("") + "." + variable("SLURM_STEP_ID").value_or("");
  read_place(identity, first.empty() ? std::nullopt : std::optional(first), port_of_job(job),
             "Slurm " + job, "export MASTER_ADDR=... before srun");
  return identity;
}

RankIdentity from_launcher() {
  if (variable("RANK")) return from_rank();
  if (variable("OMPI_COMM_WORLD_RANK")) return from_open_mpi();
  // A shell of an allocation has SLURM_PROCID too; only srun's tasks have a step.
  if (variable("SLURM_PROCID") && variable("SLURM_STEP_ID")) return from_slurm();
  if (number("WORLD_SIZE", 1, kMaxRanks).value_or(1) > 1) return from_rank();
  RankIdentity alone;
  alone.launcher = "none";
  alone.token = variable("OVERSPILL_TOKEN").value_or("");
  return alone;
}

}  // namespace

RankIdentity rank_from_environment() {
  RankIdentity identity = from_launcher();
  if (const auto port = number("OVERSPILL_MASTER_PORT", 1, kMaxPort)) {
    identity.master_port = static_cast<uint16_t>(*port);
  }
  return identity;
}

}  // namespace overspill
