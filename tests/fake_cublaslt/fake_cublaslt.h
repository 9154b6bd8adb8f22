// What the stand-in has counted; exported under this name beside cuBLASLt's own.
#pragma once

extern "C" {
struct FakeCublasLtCounts {
  long descs, preferences;  // that exist
  long heuristics, products, cut_products, uneven_products;
};
FakeCublasLtCounts fake_cublaslt_counts();
}
