# cmake --install: libraries, headers and a package that find_package(gradus) reads.
include(CMakePackageConfigHelpers)
install(FILES ${PROJECT_SOURCE_DIR}/gradus/gradus.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/gradus)
set(gradus_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/gradus)
install(EXPORT gradusTargets NAMESPACE gradus:: DESTINATION ${gradus_package_dir})
configure_package_config_file(
  cmake/gradusConfig.cmake.in ${PROJECT_BINARY_DIR}/gradusConfig.cmake INSTALL_DESTINATION ${gradus_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/gradusConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/gradusConfig.cmake ${PROJECT_BINARY_DIR}/gradusConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/GradusLibTorchVersion.cmake
  DESTINATION ${gradus_package_dir})
