#pragma once
#include <stdexcept>
#include <string>

// Everything the shared library exports is marked FOLD_API; all else has hidden visibility.
#define FOLD_API __attribute__((visibility("default")))

namespace fold {

/// A call that cannot be honoured. The message reads "what=got; allowed", e.g. `head_dim=80; supported: 64, 128, 256`.
/// Thrown before anything is written, so every object is as it was.
class FOLD_API Error : public std::runtime_error {
 public:
  /// Whether the complaint is about a value (Python: ValueError) or about a type (dtype, device; Python: TypeError).
  enum class Kind { value, type };

  Error(Kind kind, std::string what, std::string got, std::string allowed)
      : std::runtime_error(what + "=" + got + "; " + allowed),
        kind_(kind),
        argument_(std::move(what)),
        got_(std::move(got)),
        allowed_(std::move(allowed)) {}

  Kind kind() const { return kind_; }
  const std::string& argument() const { return argument_; }  ///< what was wrong
  const std::string& got() const { return got_; }            ///< its value
  const std::string& allowed() const { return allowed_; }    ///< what would have been accepted

 private:
  Kind kind_;
  std::string argument_, got_, allowed_;
};

}  // namespace fold
