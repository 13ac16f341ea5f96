# Compiler flags, the compiler cache and the shared precompiled header, for the whole tree.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

# One set of flags for libraries and programs lets them share one precompiled header; hence -fPIC everywhere.
add_compile_options(-fPIC -Wall -Wextra -Wno-unused-parameter)
if(GRADUS_WERROR)
  add_compile_options(-Werror)
endif()

set(GRADUS_SANITIZE "" CACHE STRING "Sanitizers, as -fsanitize= takes them (address,undefined)")
if(GRADUS_SANITIZE)
  # vptr needs type information of LibTorch's own build, which the wheel does not export.
  add_compile_options(-fsanitize=${GRADUS_SANITIZE} -fno-sanitize=vptr -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${GRADUS_SANITIZE} -fno-sanitize=vptr)
endif()

# A precompiled header pays with clang (one LibTorch file 4.7 s against 20 s) and hardly with g++ (716 MB of it).
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  set(gradus_pch_default ON)
else()
  set(gradus_pch_default OFF)
endif()
option(GRADUS_PCH "Share one precompiled header of LibTorch" ${gradus_pch_default})

find_program(GRADUS_CCACHE ccache)
if(GRADUS_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${GRADUS_CCACHE})
endif()
if(GRADUS_PCH AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  add_compile_options("SHELL:-Xclang -fno-pch-timestamp")
endif()

find_program(GRADUS_LLD NAMES ld.lld-19 ld.lld)
find_program(GRADUS_MOLD mold)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND GRADUS_LLD)
  add_link_options(--ld-path=${GRADUS_LLD})
elseif(GRADUS_MOLD)
  add_link_options(-fuse-ld=mold)
endif()
