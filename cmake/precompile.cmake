# Precompiled headers: the test framework and the program's dependencies, half the time of compiling those, and what nearly
# every unit takes of the standard library, a quarter of the time of a small one. A compiler cache keeps no unit that uses
# one, so with a cache they are left out unless asked for.
set(_precompile ON)
if(CMAKE_CXX_COMPILER_LAUNCHER)
  set(_precompile OFF)
endif()
option(KDA_PRECOMPILE "Precompile headers of dependencies" ${_precompile})

# kda_precompile(target [headers...]): these and the standard library's.
function(kda_precompile target)
  if(KDA_PRECOMPILE)
    target_precompile_headers(${target} PRIVATE ${ARGN} <algorithm> <cmath> <cstring> <functional> <memory> <string> <vector>)
  endif()
endfunction()
