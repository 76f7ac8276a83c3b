// Vectors of numbers for the kernels, by the vector extensions of GCC and clang, on any processor.

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 8;  // numbers in a vector
typedef float Lanes __attribute__((vector_size(4 * LANES)));

inline Lanes load(const float* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

inline Lanes load(const int8_t* x) {
#ifdef __AVX2__  // compilers do not find these two instructions by themselves
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x)));
#else
  Lanes lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = x[i];
  return lanes;
#endif
}

inline void store(float* x, Lanes lanes) { std::memcpy(x, &lanes, sizeof lanes); }

// exp to 2 units in the last place for x <= 88; 0 below -87, where float32 underflows.
Lanes exp(Lanes x) {
  const Lanes inside = x < -87.0f ? Lanes{} - 87.0f : x;  // NaN stays NaN
  const Lanes shifted = inside * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the low bits are x / ln 2, rounded
  const Lanes n = shifted - 12582912.0f;
  const Lanes r = inside - n * 0.693359375f + n * 2.12194440e-4f;
  Lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;  // the polynomial is that of the Cephes library
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
  const Ints power = ((Ints)shifted << 23) + 0x3f800000;
  return x < -87.0f ? Lanes{} : y * (Lanes)power;
}

float sum(Lanes x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }

Lanes larger(Lanes x, Lanes y) { return x > y ? x : y; }

float largest(Lanes x) {
  return std::max({x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]});
}

// The last numbers of a row, fewer than LANES.
Lanes load(const float* x, int64_t n, float rest = 0) {
  if (n >= LANES) return load(x);
  Lanes lanes = Lanes{} + rest;
  std::memcpy(&lanes, x, n * sizeof(float));
  return lanes;
}

void store(float* x, Lanes lanes, int64_t n) {
  if (n >= LANES) return store(x, lanes);
  std::memcpy(x, &lanes, n * sizeof(float));
}

float dot(const float* x, const float* y, int n) {
  Lanes sums{};
  for (int i = 0; i < n; i += LANES) sums += load(x + i, n - i) * load(y + i, n - i);
  return sum(sums);
}

}  // namespace
