// float16 and bfloat16: to float and back, one number or a block of numbers at a time.
//
// A block takes the instructions of the processor: F16C or AVX-512 for float16, and for bfloat16
// plain loops that the compiler vectorises for AVX2 or AVX-512. On ARM the compiler vectorises both.
// All versions round to nearest, ties to even, and give equal bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

// SHM_LEVEL limits the x86 instructions: 4 = AVX-512, 3 = AVX2 and F16C, 0 = those of any processor.
#ifndef SHM_LEVEL
#if defined(__x86_64__) && defined(__GNUC__)
#define SHM_LEVEL 4
#else
#define SHM_LEVEL 0
#endif
#endif
#if SHM_LEVEL > 0
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace shm {

template <class To, class From>
INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// bfloat16 is the upper half of a float.
struct BFloat16 {
  uint16_t bits;
  INLINE operator float() const { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }
  INLINE static BFloat16 from(float value) {
    const uint32_t x = bits_as<uint32_t>(value);
    const uint32_t rounded = (x + 0x7fff + ((x >> 16) & 1)) >> 16;  // to nearest, ties to even
    const bool nan = (x & 0x7fffffff) > 0x7f800000;
    return {static_cast<uint16_t>(nan ? 0x7fc0 | (x >> 16) : rounded)};
  }
};

// float16: 1 bit of sign, 5 of exponent (bias 15), 10 of fraction. A float has 8 (bias 127) and 23.
struct Float16 {
  uint16_t bits;
#if defined(__aarch64__)  // one instruction each
  INLINE operator float() const { return static_cast<float>(bits_as<__fp16>(bits)); }
  INLINE static Float16 from(float value) {
    return {bits_as<uint16_t>(static_cast<__fp16>(value))};
  }
#else
  INLINE operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t rest = static_cast<uint32_t>(bits & 0x7fff) << 13;
    // Too small by 2^112, the difference of the biases; the multiplication also fixes subnormals.
    const uint32_t finite = bits_as<uint32_t>(bits_as<float>(rest) * 0x1p112f);
    const uint32_t infinite_or_nan = rest | 0x7f800000;
    return bits_as<float>(sign | ((bits & 0x7c00) == 0x7c00 ? infinite_or_nan : finite));
  }
  INLINE static Float16 from(float value) {
    const uint32_t x = bits_as<uint32_t>(value), sign = (x >> 16) & 0x8000, rest = x & 0x7fffffff;
    const uint32_t normal = ((rest + 0xfff + ((rest >> 13) & 1)) >> 13) - (112 << 10);
    // Below 2^-14: adding 0.5 rounds the float to the last bit of a subnormal float16.
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(rest) + 0.5f) - 0x3f000000;
    const uint32_t finite = rest < 0x38800000 ? subnormal : std::min(normal, uint32_t{0x7c00});
    const uint32_t nan = 0x7e00 | ((rest >> 13) & 0x3ff);  // as the processors do it
    return {static_cast<uint16_t>(sign | (rest > 0x7f800000 ? nan : finite))};
  }
#endif
};

// How to convert a block.
template <class T>
struct Blocks {
  void (*widen)(const T*, float*, size_t);
  void (*narrow)(const float*, T*, size_t);
};

namespace plain {
template <class T>
INLINE void widen(const T* from, float* to, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
}
template <class T>
INLINE void narrow(const float* from, T* to, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] = T::from(from[i]);
}
template <class T>
constexpr Blocks<T> blocks = {[](const T* from, float* to, size_t n) { widen(from, to, n); },
                          [](const float* from, T* to, size_t n) { narrow(from, to, n); }};
}  // namespace plain

#if SHM_LEVEL >= 3
namespace avx2 {
#define TARGET __attribute__((target("avx2,f16c")))
TARGET inline void widen(const Float16* from, float* to, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(eight));
  }
  plain::widen(from + i, to + i, n - i);
}
TARGET inline void narrow(const float* from, Float16* to, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), eight);
  }
  plain::narrow(from + i, to + i, n - i);
}
TARGET inline void widen(const BFloat16* from, float* to, size_t n) { plain::widen(from, to, n); }
TARGET inline void narrow(const float* from, BFloat16* to, size_t n) { plain::narrow(from, to, n); }
#undef TARGET
}  // namespace avx2
#endif

#if SHM_LEVEL >= 4
namespace avx512 {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl")))
TARGET inline void widen(const Float16* from, float* to, size_t n) {
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i sixteen = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(sixteen));
  }
  plain::widen(from + i, to + i, n - i);
}
TARGET inline void narrow(const float* from, Float16* to, size_t n) {
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i sixteen = _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), sixteen);
  }
  plain::narrow(from + i, to + i, n - i);
}
TARGET inline void widen(const BFloat16* from, float* to, size_t n) { plain::widen(from, to, n); }
TARGET inline void narrow(const float* from, BFloat16* to, size_t n) { plain::narrow(from, to, n); }
#undef TARGET
}  // namespace avx512
#endif

// The fastest version that this processor has.
template <class T>
Blocks<T> fastest_blocks() {
#if SHM_LEVEL >= 3
  __builtin_cpu_init();
#endif
#if SHM_LEVEL >= 4
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    return {avx512::widen, avx512::narrow};
  }
#endif
#if SHM_LEVEL >= 3
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return {avx2::widen, avx2::narrow};
  }
#endif
  return plain::blocks<T>;
}

// In a namespace without a name: the loader would share the static variable of two such libraries in
// one process, and so the choice of the first one.
namespace {
template <class T>
const Blocks<T>& blocks() {
  static const Blocks<T> fastest = fastest_blocks<T>();
  return fastest;
}
}  // namespace

}  // namespace shm
