# kda_compile_options(target): warnings, sanitizers and floating-point rules for our own code.
function(kda_compile_options target)
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -Wshadow -Wno-missing-field-initializers
    $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict> # false alarms of GCC 12 on std::string
    -ffp-contract=off # a fused multiply-add is written where it is meant
  )
  if(KDA_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(KDA_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${KDA_SANITIZE} -fno-omit-frame-pointer -g1)
    target_link_options(${target} PRIVATE -fsanitize=${KDA_SANITIZE})
    if(KDA_SANITIZE MATCHES "undefined")
      target_compile_options(${target} PRIVATE -fno-sanitize-recover=undefined)
    endif()
  endif()
endfunction()

# kda_compile_fast(target [sources...]): code that takes longer to compile than to run, as the bodies of tests; the whole
# target or these of its sources.
function(kda_compile_fast target)
  set(_level -O1)
  if(KDA_SANITIZE)
    set(_level -O0)
  endif()
  if(ARGN)
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS ${_level})
    if(KDA_SANITIZE)
      set_property(SOURCE ${ARGN} PROPERTY SKIP_PRECOMPILE_HEADERS ON) # they are made with an optimiser
    endif()
  else()
    target_compile_options(${target} PRIVATE ${_level})
  endif()
endfunction()

# kda_steer_fuzzing(sources...): code that fuzz targets read with; its branches lead libFuzzer.
function(kda_steer_fuzzing)
  if(KDA_FUZZ)
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -fsanitize=fuzzer-no-link)
    set_property(SOURCE ${ARGN} PROPERTY SKIP_PRECOMPILE_HEADERS ON) # they are made without it
  endif()
endfunction()
