// dlopen and dlsym.
#include "engine/base/shared_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <utility>

#include "engine/base/error.h"

namespace overspill {

SharedLibrary::SharedLibrary(LibraryDescription description)
    : description_(std::move(description)) {
  const char* const chosen = std::getenv(description_.variable);
  named_ = chosen != nullptr && *chosen != '\0';
  path_ = named_ ? chosen : description_.file;
  handle_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ != nullptr) return;
  const char* const why = dlerror();
  refusal_ = fmt::format(
      "cannot open {}, {}: {}; install it ({}) and put its folder on LD_LIBRARY_PATH, or set {} to "
      "the path of {}",
      description_.title, description_.purpose, why != nullptr ? why : "no reason given",
      description_.packages, description_.variable, description_.file);
}

const SharedLibrary& SharedLibrary::require() const {
  if (!opened()) throw Error(ErrorCode::not_found, refusal_);
  return *this;
}

void* SharedLibrary::symbol(const char* name) const {
  void* const found = dlsym(handle_, name);
  if (found != nullptr) return found;
  fail(ErrorCode::invalid_config,
       "{} has no function {}: it is no {} of version {}; install one or set {} to its path", path_,
       name, description_.title, description_.version, description_.variable);
}

void SharedLibrary::refuse_version(const std::string& found) const {
  fail(ErrorCode::invalid_config,
       "{} is {} {}, version {} is needed; install one or set {} to its path", path_,
       description_.title, found, description_.version, description_.variable);
}

}  // namespace overspill
