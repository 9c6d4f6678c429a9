# find_package(fusewright) where Python's wheel is installed: the library is built from its sources, with your project.
if(NOT TARGET fusewright::fusewright_runtime)
  add_subdirectory(${CMAKE_CURRENT_LIST_DIR}/../runtime ${CMAKE_BINARY_DIR}/fusewright_runtime EXCLUDE_FROM_ALL)
  add_library(fusewright::fusewright_runtime ALIAS fusewright_runtime)
endif()
