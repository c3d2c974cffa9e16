#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "cuda/launch_group.h"

namespace fold::cuda {
namespace {

/// What makes a graph may allocate memory, which CUDA forbids while any thread captures in its global mode, as torch
/// does, unless the calling thread says that it knows what it does: nothing here is part of that capture.
class UnsafeCallsAllowed {
 public:
  UnsafeCallsAllowed() { require_success(cudaThreadExchangeStreamCaptureMode(&mode_), "the thread's capture mode"); }
  UnsafeCallsAllowed(const UnsafeCallsAllowed&) = delete;
  UnsafeCallsAllowed& operator=(const UnsafeCallsAllowed&) = delete;
  ~UnsafeCallsAllowed() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // of the thread before, in between
};

/// A graph of kernels one after the other, ready to run on one stream.
class Executable {
 public:
  explicit Executable(std::vector<KernelCall> calls) : calls_(std::move(calls)) {
    const UnsafeCallsAllowed allowed;
    cudaGraph_t graph = nullptr;
    require_success(cudaGraphCreate(&graph, 0), kWhat);
    try {
      for (const KernelCall& call : calls_) add(graph, call);
      require_success(cudaGraphInstantiate(&executable_, graph, 0), kWhat);
    } catch (...) {
      cudaGraphDestroy(graph);
      throw;
    }
    graph_ = graph;
  }
  Executable(const Executable&) = delete;
  Executable& operator=(const Executable&) = delete;
  ~Executable() {
    cudaGraphExecDestroy(executable_);  // what still runs of it runs on
    cudaGraphDestroy(graph_);
  }

  /// calls: of the kernels that it was made of.
  void launch(std::vector<KernelCall> calls, cudaStream_t stream) {
    for (size_t i = 0; i < calls.size(); ++i) {
      if (calls[i] == calls_[i]) continue;
      Arguments of(calls[i]);
      require_success(cudaGraphExecKernelNodeSetParams(executable_, nodes_[i], &of.node), calls[i].step);
      calls_[i] = std::move(calls[i]);
    }
    require_success(cudaGraphLaunch(executable_, stream), kWhat);
  }

 private:
  static constexpr const char* kWhat = "kernels as a graph";

  /// A call as the driver wants it.
  struct Arguments {
    explicit Arguments(KernelCall& call) {
      for (const size_t offset : call.offsets) params.push_back(call.params.data() + offset);
      node.func = const_cast<void*>(call.kernel);
      node.gridDim = dim3(static_cast<unsigned>(call.grid.blocks));
      node.blockDim = dim3(static_cast<unsigned>(call.grid.threads));
      node.sharedMemBytes = static_cast<unsigned>(call.grid.shared_bytes);
      node.kernelParams = params.data();
    }
    std::vector<void*> params;
    cudaKernelNodeParams node{};
  };

  void add(cudaGraph_t graph, KernelCall call) {
    Arguments of(call);
    cudaGraphNode_t node = nullptr;
    require_success(cudaGraphAddKernelNode(&node, graph, nullptr, 0, &of.node), call.step);
    if (call.grid.overlap) {
      cudaLaunchAttributeValue value{};
      value.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
      require_success(cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributePreferredSharedMemoryCarveout, &value),
                      call.step);
    }
    if (!nodes_.empty()) {
      cudaGraphEdgeData edge{};
      if (call.grid.overlap) {
        edge.from_port = cudaGraphKernelNodePortProgrammatic;
        edge.type = cudaGraphDependencyTypeProgrammatic;
      }
      require_success(cudaGraphAddDependencies(graph, &nodes_.back(), &node, &edge, 1), call.step);
    }
    nodes_.push_back(node);
  }

  std::vector<KernelCall> calls_;  // as it stands
  std::vector<cudaGraphNode_t> nodes_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

/// Of every device, stream (a graph does not run beside itself) and list of kernels.
class Executables {
 public:
  static Executables& of_all() {
    static Executables& all = *new Executables;  // never destroyed: CUDA may be gone by then
    return all;
  }

  void launch(std::vector<KernelCall> calls, cudaStream_t stream) {
    Key key{current_device(), stream, {}};
    for (const KernelCall& call : calls) std::get<2>(key).push_back(call.kernel);
    const std::lock_guard lock(mutex_);
    auto at = executables_.find(key);
    if (at == executables_.end()) {
      if (executables_.size() >= kMost) executables_.clear();
      at = executables_.try_emplace(std::move(key), calls).first;
    }
    at->second.launch(std::move(calls), stream);
  }

 private:
  using Key = std::tuple<int, cudaStream_t, std::vector<const void*>>;
  static constexpr size_t kMost = 256;  ///< far more than a program has streams and kinds of steps

  std::mutex mutex_;
  std::map<Key, Executable> executables_;
};

}  // namespace

LaunchGroup::LaunchGroup(cudaStream_t stream) : stream_(stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  require_success(cudaStreamIsCapturing(stream, &status), "the stream's state");
  if (status == cudaStreamCaptureStatusNone) current = this;
}

LaunchGroup::~LaunchGroup() { current = nullptr; }

void LaunchGroup::submit() {
  if (!calls_.empty()) Executables::of_all().launch(std::move(calls_), stream_);
}

}  // namespace fold::cuda
