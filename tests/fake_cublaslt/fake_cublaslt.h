// What the stand-in has counted; exported under this name beside cuBLASLt's own.
#pragma once

extern "C" {
struct FakeCublasLtCounts {
  long descs = 0, preferences = 0;  // that exist
  long heuristics = 0, products = 0, cut_products = 0, uneven_products = 0;
};
FakeCublasLtCounts fake_cublaslt_counts();
}
