// Writes to device counters: the one way in which lengths, bases, positions and slots move.
#include "common/device.cuh"

// counters i32[n_counters]; each becomes value.
KERNEL void set_counters(int32_t* counters, int32_t n_counters, int32_t value) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n_counters) counters[i] = value;
}

// counters i32[n_counters] += delta where mask i32[n_counters] is null or not 0.
KERNEL void add_counters(int32_t* counters, const int32_t* NULLABLE mask, int32_t n_counters,
                         int32_t delta) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n_counters && (mask == nullptr || mask[i] != 0)) counters[i] += delta;
}
