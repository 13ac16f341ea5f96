# Finds LibTorch: the user's own (CMAKE_PREFIX_PATH or Torch_DIR), else the one that scripts/setup.sh put in .venv.

set(GRADUS_LIBTORCH_MIN 2.13.0)
set(GRADUS_LIBTORCH_END 2.14.0)

# .venv comes after the user's folders and before the system's, which may hold an old LibTorch. CMake searches the
# environment's CMAKE_PREFIX_PATH only after the variable, so it is put ahead of .venv here.
file(GLOB gradus_venv_torch "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch/share/cmake")
cmake_path(CONVERT "$ENV{CMAKE_PREFIX_PATH}" TO_CMAKE_PATH_LIST gradus_environment_prefixes)
list(APPEND CMAKE_PREFIX_PATH ${gradus_environment_prefixes} ${gradus_venv_torch})
find_package(Torch QUIET)
if(NOT Torch_FOUND)
  message(FATAL_ERROR
    "[libtorch] LibTorch is required and was not found. Run scripts/setup.sh, or name your own with "
    "-DCMAKE_PREFIX_PATH=/path/to/libtorch (from Python: torch.utils.cmake_prefix_path).")
endif()
include(GradusLibTorchVersion)
gradus_libtorch_version(GRADUS_LIBTORCH_VERSION)
if(GRADUS_LIBTORCH_VERSION VERSION_LESS GRADUS_LIBTORCH_MIN
   OR GRADUS_LIBTORCH_VERSION VERSION_GREATER_EQUAL GRADUS_LIBTORCH_END)
  message(FATAL_ERROR
    "[libtorch] LibTorch must be at least ${GRADUS_LIBTORCH_MIN} and below ${GRADUS_LIBTORCH_END}; got "
    "'${GRADUS_LIBTORCH_VERSION}' at ${TORCH_INSTALL_PREFIX}. The planes use internals that change between "
    "releases: run scripts/setup.sh, which puts a tested release into .venv.")
endif()
message(STATUS "LibTorch ${GRADUS_LIBTORCH_VERSION} at ${TORCH_INSTALL_PREFIX}")

# Installed programs and libraries find each other by relative paths, and LibTorch where the build found it.
# (CMAKE_INSTALL_RPATH_USE_LINK_PATH would leave .venv out, because it lies inside the project.)
include(GNUInstallDirs)
set(CMAKE_INSTALL_RPATH "$ORIGIN" "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}" "${TORCH_INSTALL_PREFIX}/lib")
