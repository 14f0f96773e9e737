# CUDA, where there is a compiler for it: the stages' CUDA_SOURCES (stage.cmake), compiled into the core.
# LOCKS_HAVE_CUDA tells all users of the core.
set(LOCKS_CUDA AUTO CACHE STRING "Compile the CUDA sources: AUTO (where nvcc is found), ON or OFF")
set_property(CACHE LOCKS_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT LOCKS_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "LOCKS_CUDA = ${LOCKS_CUDA}, expected AUTO, ON or OFF")
endif()

if(LOCKS_CUDA STREQUAL OFF)
  message(STATUS "LOCKS_CUDA: off, building for the CPU alone")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(LOCKS_CUDA STREQUAL ON)
    message(FATAL_ERROR "LOCKS_CUDA = ON, but no CUDA compiler was found; put nvcc on the PATH or set CUDACXX")
  endif()
  message(STATUS "LOCKS_CUDA: no CUDA compiler found, building for the CPU alone")
  return()
endif()

# Hopper's own code, which is the tuned one, and PTX that the driver of any other GPU from sm_80 on compiles when it
# loads it. The preset `all-gpus` compiles for each generation.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-virtual 90-real)
endif()
enable_language(CUDA)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc 12 and later have it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit REQUIRED)

get_property(LOCKS_CUDA_SOURCES GLOBAL PROPERTY LOCKS_CUDA_SOURCES)
add_library(locks_cuda OBJECT ${LOCKS_CUDA_SOURCES})
target_include_directories(locks_cuda PRIVATE include src)
target_compile_options(locks_cuda PRIVATE
  --expt-relaxed-constexpr  # std::bit_cast in device code
  -Xcompiler=-Wall,-Wextra)
# What builds records: as on the CPU (options.cmake), a product and a sum stay two roundings, so that records have the
# same bytes.
foreach(source IN LISTS LOCKS_CUDA_SOURCES)
  if(source MATCHES "/summary/[^/]*$|/prepare_cuda.cu$")
    set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS --fmad=false)
  endif()
endforeach()
set_target_properties(locks_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_sources(locks PRIVATE $<TARGET_OBJECTS:locks_cuda>)
target_compile_definitions(locks PUBLIC LOCKS_HAVE_CUDA)
# Static: the wheel then needs a driver, and no toolkit of a certain version.
target_link_libraries(locks PUBLIC CUDA::cudart_static)
message(STATUS "LOCKS_CUDA: ${CMAKE_CUDA_COMPILER}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
