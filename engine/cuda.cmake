# The GPU's kernels, compiled by nvcc (overspill_cuda), and where CUDA's headers are
# (OVERSPILL_CUDA_INCLUDE; the emulation's tests need nothing else of CUDA).
set(OVERSPILL_CUDA AUTO CACHE STRING "Kernels for GPUs: ON, OFF, or AUTO (where nvcc is found)")
set_property(CACHE OVERSPILL_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT OVERSPILL_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "OVERSPILL_CUDA=${OVERSPILL_CUDA}: use AUTO, ON or OFF")
endif()

find_path(OVERSPILL_CUDA_INCLUDE cuda_runtime_api.h
          PATHS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES include)
find_program(OVERSPILL_NVCC nvcc PATHS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
if(OVERSPILL_CUDA STREQUAL "ON" AND NOT OVERSPILL_NVCC)
  message(FATAL_ERROR "OVERSPILL_CUDA=ON but there is no nvcc in PATH, CUDA_HOME or /usr/local/cuda: "
          "install CUDA 12.8 or later, or use OVERSPILL_CUDA=OFF")
endif()

# nvcc's objects cannot run without a GPU, so a build for sanitizers has no use for them.
set(OVERSPILL_HAS_CUDA OFF)
if(OVERSPILL_NVCC AND OVERSPILL_CUDA_INCLUDE AND NOT OVERSPILL_CUDA STREQUAL "OFF" AND
   NOT OVERSPILL_SANITIZE)
  set(OVERSPILL_HAS_CUDA ON)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${OVERSPILL_NVCC})
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 89-real 90-real 120)
  endif()
  enable_language(CUDA)
  # CMake before 3.27 does not know nvcc's flag.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  file(GLOB CUDA_SOURCES CONFIGURE_DEPENDS engine/model/cuda_*.cu optim/cuda_*.cu)
  add_library(overspill_cuda STATIC ${CUDA_SOURCES})
  # In place of the options for g++.
  set_target_properties(overspill_cuda PROPERTIES COMPILE_OPTIONS
    "-lineinfo;-Werror=all-warnings;-Xcompiler=-Wall,-Wextra,-Werror")
  target_link_libraries(overspill_cuda PRIVATE overspill_engine)
  message(STATUS "GPU kernels: ${CMAKE_CUDA_COMPILER}, for ${CMAKE_CUDA_ARCHITECTURES}")
else()
  message(STATUS "GPU kernels: not built (OVERSPILL_CUDA=${OVERSPILL_CUDA}, nvcc: ${OVERSPILL_NVCC})")
endif()
