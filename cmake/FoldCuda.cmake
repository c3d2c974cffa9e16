# Hopper, ahead of time, in a library of its own that is loaded where a CUDA tensor arrives. Contraction is off on the
# device too: the numerics name each fused multiply-add.
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
enable_language(CUDA)
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a;--fmad=false>")

file(GLOB_RECURSE FOLD_CUDA_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cu)
# The objects are compiled once and shared by the library and the tests (which reach internal symbols).
add_library(fold_cuda_internal OBJECT ${FOLD_CUDA_SOURCES})
target_include_directories(fold_cuda_internal PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
# Registers that do not suffice stop the build: a spill is an error.
target_compile_options(
  fold_cuda_internal PRIVATE "--Werror=all-warnings" "-Xptxas=-warn-spills" "-Xcompiler=-Wall,-Wextra")
set_target_properties(
  fold_cuda_internal
  PROPERTIES POSITION_INDEPENDENT_CODE ON
             CUDA_VISIBILITY_PRESET hidden
             VISIBILITY_INLINES_HIDDEN ON)

# The run path stays empty and the run time of CUDA is linked in: only the driver is needed where it is loaded.
set(FOLD_CUDA_EXPORTS ${PROJECT_SOURCE_DIR}/src/cuda/exports.map)
add_library(fold_cuda SHARED $<TARGET_OBJECTS:fold_cuda_internal>)
target_link_options(fold_cuda PRIVATE -Wl,--version-script=${FOLD_CUDA_EXPORTS})
set_target_properties(
  fold_cuda
  PROPERTIES LINKER_LANGUAGE CUDA
             CUDA_RUNTIME_LIBRARY Static
             SKIP_BUILD_RPATH ON
             LINK_DEPENDS ${FOLD_CUDA_EXPORTS})
if(FOLD_BUILD_PYTHON)
  add_dependencies(fold_python fold_cuda)
  install(TARGETS fold_cuda LIBRARY DESTINATION fold_attention COMPONENT python)
else()
  include(GNUInstallDirs)
  install(TARGETS fold_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()

if(FOLD_BUILD_TESTS)
  add_subdirectory(${PROJECT_SOURCE_DIR}/tests/cuda)
endif()
if(PROJECT_IS_TOP_LEVEL)
  add_subdirectory(${PROJECT_SOURCE_DIR}/benchmarks/cuda)
endif()
