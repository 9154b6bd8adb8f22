# Precompiled headers of the test framework and of the program's dependencies: half the time of compiling those. A
# compiler cache keeps no unit that uses one, so with a cache they are left out unless asked for.
set(_precompile ON)
if(CMAKE_CXX_COMPILER_LAUNCHER)
  set(_precompile OFF)
endif()
option(KDA_PRECOMPILE "Precompile headers of dependencies" ${_precompile})

# kda_precompile(target headers...)
function(kda_precompile target)
  if(KDA_PRECOMPILE)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()
