# Flags that turn a memory error in what is shipped into a stop: canaries and probes on the stack, checked string and
# memory functions, bounds of the standard library's containers, landing pads for indirect calls; nothing writable and
# executable, no table of functions that stays writable. tests/abi/hardening.py looks for them in the files.
# Their cost was measured (docs/performance.md).
option(KDA_HARDEN "Hardened flags for the library and the program" ON)
include(CheckPIESupported)
check_pie_supported(LANGUAGES CXX)

# kda_harden(target): a library, its objects, or a program.
function(kda_harden target)
  if(NOT KDA_HARDEN OR KDA_SANITIZE OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    return()
  endif()
  set(_flow -fcf-protection=full)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
    set(_flow -mbranch-protection=standard)
  elseif(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(_flow "")
  endif()
  set(_cxx -fstack-protector-strong -fstack-clash-protection ${_flow} -D_GLIBCXX_ASSERTIONS)
  # The checked functions need an optimiser.
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${_cxx}>"
    "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release,RelWithDebInfo,MinSizeRel>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=3>")
  get_target_property(_type ${target} TYPE)
  if(_type MATCHES "SHARED_LIBRARY|MODULE_LIBRARY|EXECUTABLE")
    target_link_options(${target} PRIVATE -Wl,-z,relro,-z,now,-z,noexecstack)
  endif()
endfunction()
