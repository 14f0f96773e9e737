# Finds torch for extensions on its stable ABI: headers, and libtorch.so to name at link time.
# Target: TorchStable::TorchStable. Variables: TorchStable_ROOT_DIR, TorchStable_VERSION.
#
# TorchConfig.cmake is not used: it asks for CUDA and MKL development files and adds flags and
# libraries (libc10, libtorch_python) that a stable-ABI extension must not depend on.
find_package(Python REQUIRED COMPONENTS Interpreter)

execute_process(
  COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/python/packaging/locate_torch.py
  OUTPUT_VARIABLE TorchStable_ROOT_DIR OUTPUT_STRIP_TRAILING_WHITESPACE)

if(TorchStable_ROOT_DIR)
  set(TorchStable_INCLUDE_DIR ${TorchStable_ROOT_DIR}/include)
  set(TorchStable_LIBRARY_DIR ${TorchStable_ROOT_DIR}/lib)
  file(STRINGS ${TorchStable_INCLUDE_DIR}/torch/headeronly/version.h version_lines
       REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9]*([0-9]+)[^0-9]+([0-9]+)[^0-9]+([0-9]+).*" "\\1.\\2.\\3"
         TorchStable_VERSION "${version_lines}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchStable
  REQUIRED_VARS TorchStable_INCLUDE_DIR TorchStable_LIBRARY_DIR
  VERSION_VAR TorchStable_VERSION
  REASON_FAILURE_MESSAGE
    "${Python_EXECUTABLE} has no torch with stable-ABI headers. Install torch >= ${TorchStable_FIND_VERSION} into it, or pass -DPython_EXECUTABLE=...")

if(TorchStable_FOUND AND NOT TARGET TorchStable::TorchStable)
  add_library(TorchStable::TorchStable INTERFACE IMPORTED)
  target_include_directories(TorchStable::TorchStable SYSTEM INTERFACE ${TorchStable_INCLUDE_DIR})
  # 2.11.0 in the encoding of torch/csrc/stable/version.h: the oldest torch that loads the library.
  target_compile_definitions(TorchStable::TorchStable INTERFACE TORCH_TARGET_VERSION=0x020b000000000000)
  # libtorch.so itself holds no symbol that the linker could see as needed, yet it is the stable name of
  # the libraries that do. No run path: `import torch` has loaded it by then.
  target_link_options(TorchStable::TorchStable INTERFACE -L${TorchStable_LIBRARY_DIR}
                      -Wl,--push-state,--no-as-needed,-ltorch,--pop-state)
endif()
