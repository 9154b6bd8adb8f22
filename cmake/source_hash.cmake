# KDA_SOURCE_HASH: SHA-256 (16 digits) over the files that the library is built from, in sorted order.
file(GLOB_RECURSE _kda_hashed CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/include/kda/*.h* ${PROJECT_SOURCE_DIR}/src/*.h ${PROJECT_SOURCE_DIR}/src/*.cc
  ${PROJECT_SOURCE_DIR}/src/*.cu ${PROJECT_SOURCE_DIR}/src/*.cuh)
list(SORT _kda_hashed)
set(_kda_text "")
foreach(_file IN LISTS _kda_hashed)
  file(SHA256 ${_file} _hash)
  file(RELATIVE_PATH _name ${PROJECT_SOURCE_DIR} ${_file})
  string(APPEND _kda_text "${_name} ${_hash}\n")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${_file})
endforeach()
string(SHA256 _kda_full "${_kda_text}")
string(SUBSTRING ${_kda_full} 0 16 KDA_SOURCE_HASH)
