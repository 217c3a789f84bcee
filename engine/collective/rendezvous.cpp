// A rank's part in the rendezvous: its client, and on rank 0 the server.
#include "engine/collective/rendezvous.h"

#include <unistd.h>

#include "engine/base/error.h"
#include "engine/base/version.h"
#include "engine/collective/store_client.h"
#include "engine/collective/store_server.h"

namespace overspill {
namespace {

RankHello hello_of(const RankIdentity& identity, const Rendezvous::Options& options) {
  char host[256] = {};
  if (gethostname(host, sizeof host - 1) != 0) host[0] = '?';
  return {.version = kVersion,
          .rank = identity.rank,
          .ranks = identity.ranks,
          .host = host,
          .process = static_cast<uint32_t>(getpid()),
          .config = options.config};
}

}  // namespace

struct Rendezvous::Impl {
  Impl(const RankIdentity& id, const Options& options) : identity(id) {
    CHECK(id.rank < id.ranks);
    const RankHello hello = hello_of(id, options);
    std::optional<boost::asio::ip::tcp::endpoint> own;
    if (id.rank == 0) {
      server.emplace(id, options, hello);
      own = server->own_endpoint();
    }
    client.emplace(id, options, hello, own);
  }

  const RankIdentity identity;
  std::optional<StoreServer> server;  ///< ends after the client, whose goodbye it hears
  std::optional<StoreClient> client;
};

Rendezvous::Rendezvous(const RankIdentity& identity, const Options& options)
    : impl_(std::make_unique<Impl>(identity, options)) {}

Rendezvous::~Rendezvous() = default;

const RankIdentity& Rendezvous::identity() const { return impl_->identity; }

std::string Rendezvous::own_address() const { return impl_->client->own_address(); }

void Rendezvous::set(const std::string& key, const std::string& value) {
  impl_->client->set(key, value);
}

std::string Rendezvous::get(const std::string& key, std::chrono::milliseconds timeout) {
  return impl_->client->get(key, timeout);
}

void Rendezvous::on_failure(std::function<void(const std::string& what)> callback) {
  impl_->client->on_failure(std::move(callback));
}

std::optional<std::string> Rendezvous::failure(std::chrono::milliseconds wait) const {
  return impl_->client->failure(wait);
}

void Rendezvous::report_failure(const std::string& what) { impl_->client->report_failure(what); }

}  // namespace overspill
