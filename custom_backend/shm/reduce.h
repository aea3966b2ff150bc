// Arithmetic: reduce the numbers of several ranks elementwise, always in rank order.
//
// The fixed order gives the same bits on every rank and in every run: (a + b) + c and a + (b + c)
// differ in floating point. Half precision is added in float and rounded once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shm {

enum class Dtype : uint32_t {
  // can be copied, not reduced:
  bytes, float8_e5m2, float8_e4m3fn, float8_e5m2fnuz, float8_e4m3fnuz, float8_e8m0fnu,
  // and reduced:
  boolean, uint8, int8, uint16, int16, uint32, int32, uint64, int64, float16, bfloat16, float32,
  float64
};

enum class Op : uint32_t { sum, average, product, min, max, bit_and, bit_or, bit_xor, premul_sum };

size_t size_of(Dtype dtype);
const char* name_of(Dtype dtype);
const char* name_of(Op op);
bool can_reduce(Dtype dtype, Op op);

// targets[t][i] = sources[0][i] + sources[1][i] + ..., for i < count and each t < targets_count.
// A target may be one of the sources. premul_sum multiplies each number with `factor`.
void reduce(Dtype dtype, Op op, const void* const* sources, int sources_count, void* const* targets,
            int targets_count, size_t count, double factor);

}  // namespace shm
