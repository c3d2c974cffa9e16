include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
find_package(OpenMP REQUIRED COMPONENTS CXX)

# Options shared by every target of the project. Contraction is off because the bit-exact numerics
# (docs/numerics.md) name each fused multiply-add; the compiler may not add its own.
add_library(fold_options INTERFACE)
target_compile_options(fold_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow -ffp-contract=off -fno-math-errno
                                              -fno-trapping-math $<$<BOOL:${FOLD_WERROR}>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(fold_options INTERFACE -Wno-restrict) # false positives on std::string's operator+ (GCC bug 105651)
endif()
if(FOLD_SANITIZE)
  target_compile_options(fold_options INTERFACE -fsanitize=${FOLD_SANITIZE} -fno-omit-frame-pointer
                                                -fno-sanitize-recover=all)
  target_link_options(fold_options INTERFACE -fsanitize=${FOLD_SANITIZE})
endif()

file(GLOB FOLD_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/api/*.cpp ${PROJECT_SOURCE_DIR}/src/plan/*.cpp
     ${PROJECT_SOURCE_DIR}/src/cpu/*.cpp)
# The objects are compiled once and shared by the library and the C++ tests (which reach internal symbols).
add_library(fold_internal OBJECT ${FOLD_SOURCES})
target_include_directories(fold_internal PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(fold_internal PRIVATE fold_options OpenMP::OpenMP_CXX)
set_target_properties(fold_internal PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
                                               VISIBILITY_INLINES_HIDDEN ON)

add_library(fold SHARED $<TARGET_OBJECTS:fold_internal>)
add_library(fold::fold ALIAS fold)
target_include_directories(
  fold
  PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(fold PUBLIC cxx_std_20)
target_link_libraries(fold PRIVATE $<BUILD_INTERFACE:fold_options> OpenMP::OpenMP_CXX)
set_target_properties(fold PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION 0 LINKER_LANGUAGE CXX)
if(FOLD_SANITIZE) # what links a sanitized library brings the sanitizer's run time
  target_link_options(fold INTERFACE $<BUILD_INTERFACE:-fsanitize=${FOLD_SANITIZE}>)
endif()

# One source file per instruction set: name_<isa>.cpp is compiled for that instruction set only and is entered
# through a run-time check (src/cpu/isa.h).
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  file(GLOB FOLD_AVX2 ${PROJECT_SOURCE_DIR}/src/cpu/*_avx2.cpp)
  file(GLOB FOLD_AVX512 ${PROJECT_SOURCE_DIR}/src/cpu/*_avx512.cpp)
  set(FOLD_AVX2_OPTIONS "-mavx2;-mfma;-mf16c;-mbmi2")
  set(FOLD_AVX512_OPTIONS
      "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx512vnni;-mavx512bf16;-mavx512vbmi;-mavx512vbmi2;-mfma;-mf16c;-mbmi2;-mprefer-vector-width=512;$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>"
  )
  set_source_files_properties(${FOLD_AVX2} PROPERTIES COMPILE_OPTIONS "${FOLD_AVX2_OPTIONS}")
  set_source_files_properties(${FOLD_AVX512} PROPERTIES COMPILE_OPTIONS "${FOLD_AVX512_OPTIONS}")
endif()

install(TARGETS fold EXPORT foldTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fold DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT foldTargets NAMESPACE fold:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fold)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/foldConfig.cmake.in ${PROJECT_BINARY_DIR}/foldConfig.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fold)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/foldConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/foldConfig.cmake ${PROJECT_BINARY_DIR}/foldConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fold)

if(FOLD_BUILD_TESTS)
  enable_testing()
  add_subdirectory(${PROJECT_SOURCE_DIR}/tests/cpp)
  # Its fibers switch stacks in x86-64 assembly, which sanitizers would have to be told of.
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND NOT FOLD_SANITIZE)
    add_subdirectory(${PROJECT_SOURCE_DIR}/tests/emulator)
  endif()
endif()
if(FOLD_BUILD_EXAMPLES AND EXISTS ${PROJECT_SOURCE_DIR}/examples/cpp/CMakeLists.txt)
  add_subdirectory(${PROJECT_SOURCE_DIR}/examples/cpp)
endif()
if(FOLD_BUILD_PYTHON)
  add_subdirectory(${PROJECT_SOURCE_DIR}/bindings)
endif()
