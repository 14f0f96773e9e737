# Build options, and the flags that every target of the project shares.
option(LOCKS_BUILD_TESTS "Build the C++ tests (GoogleTest, Eigen and nlohmann-json from the system)" OFF)
option(LOCKS_BUILD_FUZZ "Build the libFuzzer targets (clang alone has it)" OFF)
option(LOCKS_BUILD_TORCH "Build the torch extension" OFF)
option(LOCKS_WERROR "Treat warnings as errors" OFF)
set(LOCKS_SANITIZE "" CACHE STRING "Sanitizers to compile with, e.g. address,undefined or thread")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")

add_library(locks_flags INTERFACE)
# For C++ alone: cuda.cmake has what nvcc understands.
target_compile_options(locks_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wconversion\
;-Wsign-conversion;-Wshadow;$<$<BOOL:${LOCKS_WERROR}>:-Werror>>")
# Records must have the same bytes at every instruction-set level: a product and a sum stay two roundings. Where speed
# wants a fused one, the kernel says so. The other two change no value; both let loops vectorise.
target_compile_options(locks_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off;-fno-math-errno;-fno-trapping-math>")
if(LOCKS_SANITIZE)
  target_compile_options(locks_flags INTERFACE -fsanitize=${LOCKS_SANITIZE} -fno-omit-frame-pointer -g
                         -fno-sanitize-recover=all)
  target_link_options(locks_flags INTERFACE -fsanitize=${LOCKS_SANITIZE})
endif()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(LOCKS_CPU_LEVELS baseline avx2 avx512)
  target_compile_definitions(locks_flags INTERFACE LOCKS_HAVE_X86_LEVELS)
else()
  set(LOCKS_CPU_LEVELS baseline)
endif()
set(LOCKS_CPU_FLAGS_baseline "")
set(LOCKS_CPU_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi2)
set(LOCKS_CPU_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c -mbmi2
    -mprefer-vector-width=512)
