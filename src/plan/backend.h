#pragma once
#include <cstdint>

#include "plan/attention_params.h"
#include "plan/decode_params.h"
#include "plan/prefill_params.h"

// The contract between the API and a backend in a library of its own, which is loaded at run time. Everything here is
// plain data: no C++ object crosses the boundary.
namespace fold::plan {

/// Of this header and of every struct that crosses the boundary; API and library must agree.
constexpr int kBackendVersion = 7;

/// What is declared about a cache write. Lengths, page ids and slots lie in device memory, where the host does not
/// look, so grids and workspaces follow from these maxima alone.
struct CacheWriteBounds {
  int64_t tokens;     // T_total: rows of k and v
  int64_t max_pages;  // columns of block_table
};

struct DecodeBounds {
  int64_t max_pages;  // columns of block_table
};

/// Where a launch runs, and the memory it may use meanwhile.
struct LaunchParams {
  int device;
  void* stream;     // of that device
  void* workspace;  // as many bytes as the operation asks for, 256-byte aligned, in any state
};

/// A word of device memory and what it becomes.
struct WordChange {
  int32_t at, value;
};

/// Operations of a backend. Each returns null, or why nothing runs: a text that stays until the thread's next call.
/// Arguments are checked by the caller as far as they can be without reading device memory; every pointer in a params
/// struct is device memory. No operation waits for the device, and all can be captured in a graph.
struct Backend {
  int version;                             // kBackendVersion
  const char* (*unavailable)(int device);  // null: the device can be used

  int64_t (*cache_write_workspace)(const CacheWriteParams& params, const CacheWriteBounds& bounds);  // bytes
  const char* (*cache_write)(const CacheWriteParams& params, const CacheWriteBounds& bounds,
                             const LaunchParams& launch);

  int64_t (*decode_workspace)(const DecodeParams& params, const DecodeBounds& bounds);  // bytes
  /// One step, or (params.numerator set) its partial sums. `gates` is host memory.
  const char* (*decode)(const DecodeParams& params, const DecodeBounds& bounds, const LaunchParams& launch);

  /// A cache write, then a decode whose seqlens and q_lens are what the write says.
  int64_t (*decode_step_workspace)(const StepParams& write, const DecodeParams& decode);  // bytes
  const char* (*decode_step)(const StepParams& write, const DecodeParams& decode, const LaunchParams& launch);

  // None of these needs a workspace.
  const char* (*add_partials)(const AddPartialsParams& params, const LaunchParams& launch);
  const char* (*finish)(const FinishParams& params, const LaunchParams& launch);
  const char* (*cache_read)(const CacheReadParams& params, const LaunchParams& launch);
  const char* (*prefill_keys)(const PrefillKeysParams& params, const LaunchParams& launch);

  int64_t (*attention_forward_workspace)(const ForwardParams& params);  // bytes
  const char* (*attention_forward)(const ForwardParams& params, const LaunchParams& launch);
  int64_t (*attention_backward_workspace)(const BackwardParams& params);  // bytes
  const char* (*attention_backward)(const BackwardParams& params, const LaunchParams& launch);

  // Memory, for a cache that owns its pages. All but `wait` happen in the order of the stream.
  const char* (*allocate)(int64_t bytes, void** memory, const LaunchParams& launch);  // 256-byte aligned
  const char* (*release)(void* memory, const LaunchParams& launch);
  const char* (*clear)(void* memory, int64_t bytes, const LaunchParams& launch);
  /// Either side may be the host's memory, which then stays as it is until the stream has been waited for.
  const char* (*copy)(void* to, const void* from, int64_t bytes, const LaunchParams& launch);
  const char* (*wait)(const LaunchParams& launch);
  /// words[change.at] = change.value for each of them. `changes` (count,) is host memory, free again when this returns.
  const char* (*set_words)(int32_t* words, const WordChange* changes, int64_t count, const LaunchParams& launch);
};

/// The symbol that a backend's library exports, and its type.
constexpr char kBackendSymbol[] = "fold_cuda_backend";
using BackendSymbol = const Backend* (*)();

}  // namespace fold::plan
