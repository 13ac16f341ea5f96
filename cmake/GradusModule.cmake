# gradus_module(<folder> HEADERS ... SOURCES ... DEPS ... [LIBRARIES ...] [TESTS ...])
#
# Makes the shared library gradus_<folder> (alias gradus::<folder>, '/' becomes '_') of one folder below gradus/, its
# install rule, and one test binary of its TESTS. Shared, because planes own process-wide state (a dispatch-key
# fallback, the autograd engine stub, the CPU allocator) that must exist once.
#   DEPS       public dependencies, other gradus modules
#   LIBRARIES  private third-party libraries

if(GRADUS_PCH)
  file(WRITE "${PROJECT_BINARY_DIR}/pch/empty.cpp" "")
  add_library(gradus_pch OBJECT "${PROJECT_BINARY_DIR}/pch/empty.cpp")
  target_link_libraries(gradus_pch PRIVATE torch)
  target_precompile_headers(gradus_pch PRIVATE
    <torch/torch.h> <torch/csrc/autograd/engine.h> <torch/library.h> <algorithm> <array> <atomic> <chrono>
    <cstdint> <filesystem> <fstream> <functional> <map> <memory> <mutex> <optional> <sstream> <string>
    <thread> <unordered_map> <vector>)
endif()

function(gradus_use_pch target)
  if(GRADUS_PCH)
    target_precompile_headers(${target} REUSE_FROM gradus_pch)
  endif()
endfunction()

function(gradus_module folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "HEADERS;SOURCES;DEPS;LIBRARIES;TESTS;TEST_LIBRARIES")
  string(REPLACE "/" "_" name "${folder}")
  set(target gradus_${name})
  add_library(${target} SHARED)
  add_library(gradus::${name} ALIAS ${target})
  target_sources(${target} PRIVATE ${arg_SOURCES})
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS "${PROJECT_SOURCE_DIR}" FILES ${arg_HEADERS})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PUBLIC torch ${arg_DEPS} PRIVATE ${arg_LIBRARIES})
  # DEFINE_SYMBOL would give every library a macro of its own, and so a precompiled header of its own.
  set_target_properties(${target} PROPERTIES
    EXPORT_NAME ${name} DEFINE_SYMBOL "" VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
    VERIFY_INTERFACE_HEADER_SETS ON)
  gradus_use_pch(${target})
  install(TARGETS ${target} EXPORT gradusTargets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  if(GRADUS_BUILD_TESTS AND arg_TESTS)
    gradus_test(${target}_test LABEL unit SOURCES ${arg_TESTS} LIBRARIES ${target} ${arg_TEST_LIBRARIES})
  endif()
endfunction()

# gradus_test(<name> LABEL <unit|integration|parity|slow> SOURCES ... LIBRARIES ...): one binary, one ctest entry.
function(gradus_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LABEL" "SOURCES;LIBRARIES")
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES} gradus_testing GTest::gmock GTest::gtest GTest::gtest_main)
  gradus_use_pch(${name})
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS ${arg_LABEL} TIMEOUT 600)
endfunction()
