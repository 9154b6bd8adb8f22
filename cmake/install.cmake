# Installation: library, headers, CMake package kda::kda, pkg-config file.
install(TARGETS kda EXPORT kda_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/kda DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT kda_targets NAMESPACE kda:: FILE kda-targets.cmake DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kda)

file(WRITE ${PROJECT_BINARY_DIR}/kda-config.cmake "include(\${CMAKE_CURRENT_LIST_DIR}/kda-targets.cmake)\n")
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kda-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kda-config.cmake ${PROJECT_BINARY_DIR}/kda-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kda)

configure_file(cmake/kda.pc.in ${PROJECT_BINARY_DIR}/kda.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/kda.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
