# Hopper, ahead of time. Contraction is off on the device too: the numerics name each fused multiply-add.
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
enable_language(CUDA)
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a;--fmad=false>")

if(FOLD_BUILD_TESTS)
  add_subdirectory(${PROJECT_SOURCE_DIR}/tests/cuda)
endif()
