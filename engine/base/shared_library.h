// Libraries opened at run time, so that one binary starts without them. They stay open until the
// process ends.
#pragma once

#include <string>

namespace overspill {

/// What a library is called, and what to do where it is missing.
struct LibraryDescription {
  const char* title;     ///< "NCCL"
  const char* purpose;   ///< "which GPU ranks talk through"
  const char* variable;  ///< environment variable that names another file
  std::string file;      ///< as the system finds it: "libnccl.so.2"
  std::string packages;  ///< what to install it by
  std::string version;   ///< that is needed: "2.14.0 or later"
};

class SharedLibrary {
 public:
  /// Opens nothing that is not there: then opened() is false, and refusal() says why and what to
  /// do.
  explicit SharedLibrary(LibraryDescription description);

  bool opened() const { return handle_ != nullptr; }
  /// The file was named by the variable.
  bool named() const { return named_; }
  const std::string& path() const { return path_; }
  const std::string& refusal() const { return refusal_; }
  /// Throws Error(not_found) with the refusal.
  const SharedLibrary& require() const;

  /// Throws Error(invalid_config) naming the file, the function and the version that is needed.
  template <class F>
  void resolve(F*& function, const char* name) const {
    function = reinterpret_cast<F*>(symbol(name));
  }
  /// Throws Error(invalid_config) for a library of another version.
  [[noreturn]] void refuse_version(const std::string& found) const;

 private:
  void* symbol(const char* name) const;

  LibraryDescription description_;
  bool named_;
  std::string path_, refusal_;
  void* handle_;
};

}  // namespace overspill
