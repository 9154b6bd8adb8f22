// CUDA threads on the host: each is a fiber with a stack of its own; a CTA is one operating-system thread, and of a
// cluster's CTAs one runs at a time. A fiber runs until it waits for something that has not happened.
//
// Shared memory is addressed as on the device: 32 bits, byte 0 of a CTA at 0x400, its rank in the cluster from
// bit 24. Everything "asynchronous" happens at once, which is one of the orders that the hardware may choose.
#pragma once

#include <cstdint>
#include <functional>

namespace emulation {

constexpr uint32_t kSharedBytes = 232448;
constexpr uint32_t kSharedBase = 0x400;

// Runs `kernel` in a cluster of `ctas` blocks of `threads` threads, the blocks first_block, ... of `grid`. `memory`
// gives the calling CTA's dynamic shared memory, which is filled with ones before. Ends the process if no thread can
// go on, or where shared memory is misused.
void run_cluster(int ctas, int threads, unsigned first_block, unsigned grid, const std::function<void()>& kernel,
                 const std::function<unsigned char*()>& memory);

int lane();
uint64_t* lane_words(int lane);  // 8 words of each lane of this warp, for exchanges between two warp barriers
void warp_barrier();
void block_barrier();
void named_barrier(uint32_t id, int threads);
void cluster_barrier();

uint32_t cta_rank();
uint32_t shared_address(const void* p);
unsigned char* shared_pointer(uint32_t address, uint32_t bytes);

void mbarrier_init(uint32_t address, int arrivals);
void mbarrier_arrive(uint32_t address);
void mbarrier_add_bytes(uint32_t address, int bytes);  // announced: > 0, delivered: < 0
void mbarrier_wait(uint32_t address, uint32_t parity);

}  // namespace emulation
