// See reduce.h. On x86 the compiler makes two versions, with AVX2 and for any processor; the loader
// selects one at run time. (Short loops without branches help the compiler's vectoriser; half.h
// converts half precision to float and back, a block at a time.)

#include "reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "half.h"

// One version of the function per instruction set; the loader selects one. Other processors, such
// as ARM, need one version only. (ThreadSanitizer is not initialised yet when the loader selects.)
#if SHM_LEVEL >= 3 && !defined(__SANITIZE_THREAD__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

namespace shm {
namespace {

template <class T>
constexpr bool is_half = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

// The type of a sum: float for half precision, else the type itself. A bool counts as one bit.
template <class T>
using Accumulator = std::conditional_t<is_half<T>, float, T>;

template <class T, Op op>
INLINE Accumulator<T> combine(Accumulator<T> a, Accumulator<T> b) {
  using A = Accumulator<T>;
  if constexpr (std::is_same_v<T, bool>) {
    if constexpr (op == Op::product || op == Op::min || op == Op::bit_and) return a & b;
    if constexpr (op == Op::bit_xor) return a ^ b;
    return a | b;  // sum, max, bit_or
  } else if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<A>;  // signed overflow is undefined
    if constexpr (op == Op::product) return static_cast<A>(uint64_t{U(a)} * uint64_t{U(b)});
    if constexpr (op == Op::min) return b < a ? b : a;
    if constexpr (op == Op::max) return a < b ? b : a;
    if constexpr (op == Op::bit_and) return a & b;
    if constexpr (op == Op::bit_or) return a | b;
    if constexpr (op == Op::bit_xor) return a ^ b;
    return static_cast<A>(U(a) + U(b));
  } else {
    if constexpr (op == Op::product) return a * b;
    if constexpr (op == Op::min) return b < a || b != b ? b : a;  // a NaN of any rank stays
    if constexpr (op == Op::max) return a < b || b != b ? b : a;
    return a + b;
  }
}

constexpr size_t kBlock = 1024;  // numbers per block: the sums stay in the first-level cache

// A block of a source as accumulators: the source itself, or half precision as floats in `buffer`.
template <class T>
INLINE const Accumulator<T>* load(const void* source, size_t begin, size_t n, float* buffer) {
  const T* block = static_cast<const T*>(source) + begin;
  if constexpr (is_half<T>) {
    blocks<T>().widen(block, buffer, n);
    return buffer;
  } else {
    return block;
  }
}

template <class T, Op op>
INLINE void reduce_blocks(const void* const* sources, int sources_count, void* const* targets,
                          int targets_count, size_t count, double factor) {
  using A = Accumulator<T>;
  A sums[kBlock];
  float buffer[2][is_half<T> ? kBlock : 1];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    const A* first = load<T>(sources[0], begin, n, buffer[0]);
    const A f = static_cast<A>(factor);
    // Two sources: the sums go straight to the first target, which may be one of the sources.
    const bool direct = !is_half<T> && op != Op::premul_sum && sources_count == 2;
    A* sum = direct ? static_cast<A*>(targets[0]) + begin : sums;
    if constexpr (op == Op::premul_sum) {
      for (size_t i = 0; i < n; ++i) sum[i] = static_cast<A>(first[i]) * f;
    } else if (sources_count == 1) {
      std::memcpy(sum, first, n * sizeof(A));
    } else {
      const A* second = load<T>(sources[1], begin, n, buffer[1]);
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) sum[i] = combine<T, op>(first[i], second[i]);
    }
    for (int s = op == Op::premul_sum ? 1 : 2; s < sources_count; ++s) {
      const A* source = load<T>(sources[s], begin, n, buffer[0]);
      for (size_t i = 0; i < n; ++i) {
        A next = source[i];
        if constexpr (op == Op::premul_sum) next = next * f;
        sum[i] = combine<T, op>(sum[i], next);
      }
    }
    if constexpr (op == Op::average) {
      for (size_t i = 0; i < n; ++i) sum[i] = sum[i] / static_cast<A>(sources_count);
    }
    for (int t = 0; t < targets_count; ++t) {
      T* target = static_cast<T*>(targets[t]) + begin;
      if constexpr (is_half<T>) {
        blocks<T>().narrow(sum, target, n);
      } else if (target != sum) {
        std::memcpy(target, sum, n * sizeof(T));
      }
    }
  }
}

template <class T>
INLINE void reduce_type(Op op, const void* const* sources, int sources_count, void* const* targets,
                        int targets_count, size_t count, double factor) {
#define CASE(name)                                                                             \
  case Op::name:                                                                               \
    return reduce_blocks<T, Op::name>(sources, sources_count, targets, targets_count, count, factor)
  switch (op) {
    CASE(sum);
    CASE(product);
    CASE(min);
    CASE(max);
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      CASE(bit_and);
      CASE(bit_or);
      CASE(bit_xor);
      default:
        break;
    }
  }
  if constexpr (!std::is_integral_v<T>) {  // no average of integers, as in Gloo
    switch (op) {
      CASE(average);
      CASE(premul_sum);
      default:
        break;
    }
  }
#undef CASE
}

}  // namespace

FOR_EACH_PROCESSOR
void reduce(Dtype dtype, Op op, const void* const* sources, int sources_count, void* const* targets,
            int targets_count, size_t count, double factor) {
#define CASE(name, T)   \
  case Dtype::name:     \
    return reduce_type<T>(op, sources, sources_count, targets, targets_count, count, factor)
  switch (dtype) {
    CASE(boolean, bool);
    CASE(uint8, uint8_t);
    CASE(int8, int8_t);
    CASE(uint16, uint16_t);
    CASE(int16, int16_t);
    CASE(uint32, uint32_t);
    CASE(int32, int32_t);
    CASE(uint64, uint64_t);
    CASE(int64, int64_t);
    CASE(float16, Float16);
    CASE(bfloat16, BFloat16);
    CASE(float32, float);
    CASE(float64, double);
    default:
      return;
  }
#undef CASE
}

size_t size_of(Dtype dtype) {
  static const size_t sizes[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
  return sizes[static_cast<uint32_t>(dtype)];
}

const char* name_of(Dtype dtype) {
  static const char* names[] = {"bytes", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz",
                                "float8_e4m3fnuz", "float8_e8m0fnu", "bool", "uint8", "int8",
                                "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
                                "bfloat16", "float32", "float64"};
  return names[static_cast<uint32_t>(dtype)];
}

const char* name_of(Op op) {
  static const char* names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR",
                                "PREMUL_SUM"};
  return names[static_cast<uint32_t>(op)];
}

bool can_reduce(Dtype dtype, Op op) {
  if (dtype < Dtype::boolean) return false;
  const bool is_float = dtype >= Dtype::float16;
  if (op == Op::bit_and || op == Op::bit_or || op == Op::bit_xor) return !is_float;
  if (op == Op::average || op == Op::premul_sum) return is_float;
  return true;
}

}  // namespace shm
