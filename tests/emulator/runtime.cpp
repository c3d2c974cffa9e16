#include <cstdlib>

#include "cuda_runtime.h"
#include "state.h"

// The runtime.
struct CUgraph_st {
  std::vector<emu::Grid> grids;
};
struct CUgraphExec_st {
  std::vector<emu::Grid> grids;
};
struct CUstream_st {};

cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*p, emu::kGarbage, bytes);
  emu::allocations[reinterpret_cast<uintptr_t>(*p)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  emu::run_all();
  emu::allocations.erase(reinterpret_cast<uintptr_t>(p));
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  emu::run_all();
  if (bytes) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) {
  if (bytes > size_t{1} << 36) return cudaErrorInvalidValue;  // more than the device has
  return cudaMalloc(p, bytes);
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  emu::run_all();
  std::memset(p, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaDeviceSynchronize() {
  emu::run_all();
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  emu::run_all();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* n) {
  *n = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int n) { return n == 0 ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaDeviceGetAttribute(int* n, cudaDeviceAttr attribute, int) {
  const bool count = attribute == cudaDevAttrMultiProcessorCount;
  *n = count ? static_cast<int>(emu::env("EMU_SMS", 3)) : attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "emulated error"; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
  *s = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  delete s;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  emu::capturing = new std::vector<emu::Grid>;
  emu::capturing_stream = s;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* g) {
  *g = new CUgraph_st{std::move(*emu::capturing)};
  delete emu::capturing;
  emu::capturing = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) {
  *e = new CUgraphExec_st{g->grids};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t) {
  for (const emu::Grid& g : e->grids) emu::queue.push_back(g);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) {
  delete e;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) {
  delete g;
  return cudaSuccess;
}
