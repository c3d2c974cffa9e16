# Makes CUDA sources C++ for a host compiler: cmake -DSOURCE_DIR=... -DOUTPUT_DIR=... -P translate.cmake
# What changes is shared memory, which becomes a CTA's own, the little assembly outside src/cuda/ptx, and names that
# device_language.h defines as macros.
file(GLOB sources RELATIVE ${SOURCE_DIR} ${SOURCE_DIR}/cuda/*.* ${SOURCE_DIR}/cuda/*/*)
list(FILTER sources EXCLUDE REGEX "^cuda/ptx/") # include/cuda/ptx stands for it
foreach(source ${sources})
  file(READ ${SOURCE_DIR}/${source} text)
  string(REGEX REPLACE "extern __shared__ __align__\\([0-9]+\\) uint8_t ([a-z_]+)\\[\\];"
                       "uint8_t* const \\1 = emu::dynamic_shared();" text "${text}")
  string(REGEX REPLACE "__shared__ ([A-Za-z0-9_<>]+) ([a-z_]+)([^;]*);"
                       "struct Shared_\\2 { \\1 value\\3; }; auto& \\2 = emu::shared<Shared_\\2>().value;" text "${text}")
  string(REPLACE "config.gridDim" "config.grid" text "${text}")
  string(REPLACE "config.blockDim" "config.block" text "${text}")
  string(REPLACE "__noinline__" "EMU_NOINLINE" text "${text}")
  string(REPLACE "asm volatile(\"\");" "" text "${text}")
  string(REPLACE "asm volatile(\"mov.u32 %0, %%tid.x;\" : \"=r\"(thread));" "thread = threadIdx.x;" text "${text}")
  file(CONFIGURE OUTPUT ${OUTPUT_DIR}/${source} CONTENT "${text}" @ONLY)
endforeach()
