# Finds LibTorch: the user's own (CMAKE_PREFIX_PATH or Torch_DIR), else the one that scripts/setup.sh put in .venv.

set(GRADUS_LIBTORCH_MIN 2.13.0)
set(GRADUS_LIBTORCH_END 2.14.0)

if(NOT Torch_DIR AND NOT CMAKE_PREFIX_PATH AND NOT DEFINED ENV{CMAKE_PREFIX_PATH})
  file(GLOB gradus_venv_torch "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch/share/cmake")
  list(APPEND CMAKE_PREFIX_PATH ${gradus_venv_torch})
endif()
find_package(Torch QUIET)
if(NOT Torch_FOUND)
  message(FATAL_ERROR
    "[libtorch] LibTorch is required and was not found. Run scripts/setup.sh, or name your own with "
    "-DCMAKE_PREFIX_PATH=/path/to/libtorch (from Python: torch.utils.cmake_prefix_path).")
endif()
# The CMake package states no version on every platform; the header always does.
set(gradus_version_header "${TORCH_INSTALL_PREFIX}/include/torch/headeronly/version.h")
if(NOT EXISTS "${gradus_version_header}")
  set(gradus_version_header "${TORCH_INSTALL_PREFIX}/include/torch/csrc/api/include/torch/version.h")
endif()
if(EXISTS "${gradus_version_header}")
  file(STRINGS "${gradus_version_header}" gradus_version_line REGEX "define TORCH_VERSION ")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" GRADUS_LIBTORCH_VERSION "${gradus_version_line}")
endif()
if(NOT GRADUS_LIBTORCH_VERSION)
  set(GRADUS_LIBTORCH_VERSION "${Torch_VERSION}")
endif()
if(GRADUS_LIBTORCH_VERSION VERSION_LESS GRADUS_LIBTORCH_MIN
   OR GRADUS_LIBTORCH_VERSION VERSION_GREATER_EQUAL GRADUS_LIBTORCH_END)
  message(FATAL_ERROR
    "[libtorch] LibTorch must be at least ${GRADUS_LIBTORCH_MIN} and below ${GRADUS_LIBTORCH_END}; got "
    "'${GRADUS_LIBTORCH_VERSION}' at ${TORCH_INSTALL_PREFIX}. The planes use internals that change between "
    "releases: run scripts/setup.sh, which puts a tested release into .venv.")
endif()
message(STATUS "LibTorch ${GRADUS_LIBTORCH_VERSION} at ${TORCH_INSTALL_PREFIX}")
