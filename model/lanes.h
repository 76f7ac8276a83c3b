// Several numbers at once, for the kernels of this folder: GCC's and clang's vectors, on any processor.

#pragma once
#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 8;  // numbers that one instruction multiplies
typedef float Lanes __attribute__((vector_size(4 * LANES)));

inline Lanes load(const float* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

inline void store(float* x, Lanes lanes) { std::memcpy(x, &lanes, sizeof lanes); }

}  // namespace
