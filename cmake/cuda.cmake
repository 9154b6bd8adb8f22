# The CUDA backend: KDA_CUDA = OFF, ON (nvcc must be there) or AUTO (taken if it is). Sets KDA_CUDA_ENABLED.
# Machine code for sm_90a alone is embedded, no PTX (spec Y-19): a device without an image is refused, never compiled
# for. The runtime is linked statically, so that the library loads on a machine without a driver and can say so.
set(KDA_CUDA_ENABLED OFF)
string(TOUPPER "${KDA_CUDA}" _kda_cuda)
if(_kda_cuda STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  find_package(CUDAToolkit QUIET)
  if(CMAKE_CUDA_COMPILER AND CUDAToolkit_FOUND)
    set(KDA_CUDA_ENABLED ON)
  else()
    message(STATUS "CUDA backend: left out, no CUDA toolkit found")
  endif()
elseif(KDA_CUDA)
  set(KDA_CUDA_ENABLED ON)
endif()

if(KDA_CUDA_ENABLED)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  endif()
  # The toolkit that nvcc belongs to, also where nvcc is not on the PATH.
  find_package(CUDAToolkit REQUIRED)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
  endif()
  enable_language(CUDA)
  # CMake 3.25 does not know how to ask newer nvcc for C++20.
  foreach(_form STANDARD EXTENSION)
    if(NOT CMAKE_CUDA20_${_form}_COMPILE_OPTION)
      set(CMAKE_CUDA20_${_form}_COMPILE_OPTION "-std=c++20")
    endif()
  endforeach()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  message(STATUS "CUDA backend: CUDA ${CMAKE_CUDA_COMPILER_VERSION}, machine code for ${CMAKE_CUDA_ARCHITECTURES}")
endif()

# kda_cuda_compile_options(target): both languages of a target that has CUDA sources.
function(kda_cuda_compile_options target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall,-Wextra>
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wno-missing-field-initializers;-ffp-contract=off>)
  if(KDA_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  endif()
endfunction()

# Kernels whose bits must agree wherever their functions are inlined: no contraction (a fused multiply-add is written
# where it is meant, as on the host), and a register spill is an error.
set(KDA_EXACT_KERNEL_OPTIONS --fmad=false -Xptxas=-warn-spills,-Werror)
