// The declarations of cuda/host/cublaslt.h beside the toolkit's header, where there is one.
#if __has_include(<cublasLt.h>)
// The stand-in of CUDA's header is no ground for cuBLAS's: this file sees the toolkit's alone.
#include <cublasLt.h>

#include <type_traits>

#include "cuda/host/cublaslt.h"

namespace lt = kda::cuda::lt;

#define KDA_SAME(ours, theirs) static_assert(static_cast<long>(ours) == static_cast<long>(theirs))
KDA_SAME(lt::kFp32, CUDA_R_32F);
KDA_SAME(lt::kFp16, CUDA_R_16F);
KDA_SAME(lt::kBf16, CUDA_R_16BF);
KDA_SAME(lt::kCompute32, CUBLAS_COMPUTE_32F);
KDA_SAME(lt::kCompute32Pedantic, CUBLAS_COMPUTE_32F_PEDANTIC);
KDA_SAME(lt::kPlain, CUBLAS_OP_N);
KDA_SAME(lt::kTransposed, CUBLAS_OP_T);
KDA_SAME(lt::kDescTransA, CUBLASLT_MATMUL_DESC_TRANSA);
KDA_SAME(lt::kDescTransB, CUBLASLT_MATMUL_DESC_TRANSB);
KDA_SAME(lt::kPreferWorkspace, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
KDA_SAME(lt::kPreferReductions, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
KDA_SAME(lt::kPreferAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
KDA_SAME(lt::kPreferAlignmentB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
KDA_SAME(lt::kPreferAlignmentC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
KDA_SAME(lt::kPreferAlignmentD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
KDA_SAME(lt::kConfigSplitK, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
KDA_SAME(lt::kReduceNone, CUBLASLT_REDUCTION_SCHEME_NONE);
KDA_SAME(lt::kReduceComputeType, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);

static_assert(sizeof(lt::Layout) == sizeof(cublasLtMatrixLayoutOpaque_t));
static_assert(sizeof(lt::Algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(lt::Heuristic) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(lt::Heuristic, workspace) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(lt::Heuristic, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));

// Arguments one for one: pointers to pointers, 32-bit numbers to enumerations, integers to integers of one size.
template <class A, class B>
constexpr bool alike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
                       (std::is_pointer_v<A> || std::is_floating_point_v<A> == std::is_floating_point_v<B>);
template <class A, class B>
struct Signature : std::false_type {};
template <class RA, class... A, class RB, class... B>
requires(sizeof...(A) == sizeof...(B)) struct Signature<RA (*)(A...), RB (*)(B...)>
    : std::bool_constant<alike<RA, RB> && (alike<A, B> && ...)> {
};
#define KDA_SAME_FUNCTION(ours, theirs) \
  static_assert(Signature<decltype(lt::Functions::ours), decltype(&::theirs)>::value)
KDA_SAME_FUNCTION(create, cublasLtCreate);
KDA_SAME_FUNCTION(get_version, cublasLtGetVersion);
KDA_SAME_FUNCTION(get_status_string, cublasLtGetStatusString);
KDA_SAME_FUNCTION(desc_create, cublasLtMatmulDescCreate);
KDA_SAME_FUNCTION(desc_destroy, cublasLtMatmulDescDestroy);
KDA_SAME_FUNCTION(desc_set, cublasLtMatmulDescSetAttribute);
KDA_SAME_FUNCTION(layout_init, cublasLtMatrixLayoutInit_internal);
KDA_SAME_FUNCTION(preference_create, cublasLtMatmulPreferenceCreate);
KDA_SAME_FUNCTION(preference_destroy, cublasLtMatmulPreferenceDestroy);
KDA_SAME_FUNCTION(preference_set, cublasLtMatmulPreferenceSetAttribute);
KDA_SAME_FUNCTION(get_heuristic, cublasLtMatmulAlgoGetHeuristic);
KDA_SAME_FUNCTION(config_get, cublasLtMatmulAlgoConfigGetAttribute);
KDA_SAME_FUNCTION(matmul, cublasLtMatmul);
#endif
