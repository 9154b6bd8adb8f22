// CUDA threads on the host: each is a fiber with a stack of its own; a CTA is one operating-system thread, and of a
// cluster's CTAs one runs at a time. A fiber runs until it waits for something that has not happened.
//
// Shared memory is addressed as on the device: 32 bits, byte 0 of a CTA at 0x400, its rank in the cluster from
// bit 24. Everything "asynchronous" happens at once, which is one of the orders that the hardware may choose.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace emulation {

constexpr uint32_t kSharedBytes = 232448;
constexpr uint32_t kSharedBase = 0x400;

// Runs `kernel` in a cluster of `ctas` blocks of `threads` threads, the blocks first_block, ... of `grid`. `memory`
// gives the calling CTA's dynamic shared memory, which is filled with ones before. Ends the process if no thread can
// go on, or where shared memory is misused. `waits`: set while a thread finds that another cluster has not yet
// written what it polls; clusters on several operating-system threads run at the same time.
void run_cluster(int ctas, int threads, unsigned first_block, unsigned grid, const std::function<void()>& kernel,
                 const std::function<unsigned char*()>& memory, std::atomic<bool>* waits = nullptr);
// A word of global memory that this thread polls is not yet set.
void poll_again();

// What the grid before still writes, until a thread waits for it; by one block at a time.
void set_grid_before(std::function<void()> writes);
void finish_grid_before();

int lane();
// 8 words of each lane of this warp, written before the next meeting, then read until the one after it: there are two
// such sets, in turn.
uint64_t* warp_words();
void warp_meeting();  // a barrier that orders no access to memory, as no shuffle or product does
void warp_barrier();  // __syncwarp
void block_barrier();
void named_barrier(uint32_t id, int threads);
void named_barrier_arrive(uint32_t id, int threads);
void cluster_barrier();

uint32_t cta_rank();
uint32_t shared_address(const void* p);
// Memory for an access of this thread, which is checked against the accesses before it.
enum class Access { kRead, kWrite };
unsigned char* shared_pointer(uint32_t address, uint32_t bytes, Access access);
// The same for a read that goes on until finish_reads: those of a committed group count when the group is waited for.
unsigned char* deferred_pointer(uint32_t address, uint32_t bytes);
void commit_reads();
void finish_reads(int pending_groups);
// A copy on its own: ordered after what this thread knows, and before what waits for `barrier`.
void bulk_copy(uint32_t target, uint32_t source, uint32_t bytes, uint32_t barrier);
// The same from memory that is not shared.
void bulk_load(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier);
// Pairs of unordered accesses to shared memory seen since the process began.
uint64_t race_count();

void mbarrier_init(uint32_t address, int arrivals);
void mbarrier_arrive(uint32_t address);
void mbarrier_expect_bytes(uint32_t address, int bytes);
void mbarrier_complete_bytes(uint32_t address, int bytes);
bool mbarrier_test(uint32_t address, uint32_t parity);
void mbarrier_wait(uint32_t address, uint32_t parity);

}  // namespace emulation
