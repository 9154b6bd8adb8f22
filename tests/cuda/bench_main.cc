// kda_gpu_bench [--json FILE] [--filter TEXT] [--rounds N] [--seed N]
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "bench.h"

int main(int argc, char** argv) {
  std::string json, filter, command = argv[0];
  int rounds = 21;
  uint64_t seed = 1;
  for (int i = 1; i < argc; ++i) {
    command += std::string(" ") + argv[i];
    const bool more = i + 1 < argc;
    if (more && std::strcmp(argv[i], "--json") == 0) command += " " + (json = argv[++i]);
    else if (more && std::strcmp(argv[i], "--filter") == 0) command += " " + (filter = argv[++i]);
    else if (more && std::strcmp(argv[i], "--rounds") == 0) rounds = std::atoi(argv[++i]);
    else if (more && std::strcmp(argv[i], "--seed") == 0) seed = std::strtoull(argv[++i], nullptr, 10);
    else {
      std::fprintf(stderr, "usage: %s [--json FILE] [--filter TEXT] [--rounds N] [--seed N]\n", argv[0]);
      return 2;
    }
  }
  if (rounds < 1) rounds = 1;
  (void)kda::cuda_test::context();
  std::printf("%s\n", kda::cuda_test::device_text().c_str());
  kda::cuda_test::Bench bench(rounds, seed, filter);
  kda::cuda_test::bench_launch(bench);
  kda::cuda_test::bench_decode(bench);
  kda::cuda_test::bench_step(bench);
  kda::cuda_test::bench_conv(bench);
  kda::cuda_test::bench_copy(bench);
  kda::cuda_test::bench_metadata(bench);
  if (json.empty()) return 0;
  FILE* file = std::fopen(json.c_str(), "w");
  if (file == nullptr) {
    std::perror(json.c_str());
    return 1;
  }
  std::fputs(bench.json(command).c_str(), file);
  return std::fclose(file) == 0 ? 0 : 1;
}
