// A block of a matrix product, accumulated in registers, after "Anatomy of High-Performance Matrix Multiplication"
// (2008) and BLIS: the right matrix is packed into panels, in the order in which they are read.

#pragma once
#include <algorithm>
#include <vector>
#include <torch/csrc/stable/ops.h>

#include "lanes.h"

namespace {

constexpr int PANEL = 2 * LANES;  // columns of the right matrix in a panel
constexpr int GROUP = 6;          // rows of the left matrix: 12 of the 16 registers then hold sums
constexpr int DEPTH = 256;        // rows of a panel that fit into the L1 cache

struct Matrix {  // a view, transposed or not
  const float* data;
  int64_t row, column;  // strides
  Matrix from(int64_t i, int64_t j) const { return {data + i * row + j * column, row, column}; }
};

// ROWS rows of `left` times PANELS packed panels, all sums in registers. Every sum runs in the order of `depth`, for
// any ROWS and PANELS: a row's result does not depend on its neighbours.
template <int ROWS, int PANELS, typename Number>
inline void multiply(Matrix left, const Number* panels, int depth, Lanes (&sum)[ROWS][PANELS][2]) {
#pragma GCC unroll 6  // all loops over them are unrolled, to keep them in registers
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p) sum[r][p][0] = sum[r][p][1] = Lanes{};
  const float* a = left.data;
#pragma GCC unroll 4
  for (int k = 0; k < depth; ++k, a += left.column, panels += PANEL)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p) {
      const Number* panel = panels + int64_t(p) * depth * PANEL;
      const Lanes x = load(panel), y = load(panel + LANES);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) {
        sum[r][p][0] += a[r * left.row] * x;
        sum[r][p][1] += a[r * left.row] * y;
      }
    }
}

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A block of N rows of `left` times a packed panel.
template <int N>
void tile(Matrix left, const float* panel, int depth, float* out, int64_t out_row, int width, bool add) {
  Lanes sum[N][1][2];
  multiply(left, panel, depth, sum);
  if (width < PANEL) {
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r, out += out_row) {
      float row[PANEL];
      store(row, sum[r][0][0]);
      store(row + LANES, sum[r][0][1]);
      for (int j = 0; j < width; ++j) out[j] = add ? out[j] + row[j] : row[j];
    }
    return;
  }
#pragma GCC unroll 6
  for (int r = 0; r < N; ++r, out += out_row) {
    store(out, add ? load(out) + sum[r][0][0] : sum[r][0][0]);
    store(out + LANES, add ? load(out + LANES) + sum[r][0][1] : sum[r][0][1]);
  }
}

void tile(int rows, Matrix left, const float* panel, int depth, float* out, int64_t out_row, int width, bool add) {
  constexpr decltype(&tile<1>) TILES[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};
  TILES[rows - 1](left, panel, depth, out, out_row, width, add);
}

#ifdef __AVX2__
// Transposes 8 x 8 numbers in registers; one by one this would take a tenth of the products' time.
void transpose8(const float* from, int64_t step, float* to, int64_t to_step) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * step);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_step, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_step, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#else
void transpose8(const float* from, int64_t step, float* to, int64_t to_step) {
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) to[j * to_step + i] = from[i * step + j];
}
#endif

// Packs the columns of a matrix into panels (panel, row, PANEL), padded with zeros.
void pack_columns(Matrix from, int rows, int columns, float* to) {
  for (int first = 0; first < columns; first += PANEL, to += int64_t(rows) * PANEL) {
    const int width = std::min(PANEL, columns - first);
    const Matrix part = from.from(0, first);
    int k = 0;
    if (width == PANEL && part.column == 1)
      for (; k < rows; ++k) std::memcpy(to + k * PANEL, part.data + k * part.row, PANEL * sizeof(float));
    else if (width == PANEL && part.row == 1)
      for (; k + 8 <= rows; k += 8)
        for (int j = 0; j < PANEL; j += 8) transpose8(part.from(k, j).data, part.column, to + k * PANEL + j, PANEL);
    for (; k < rows; ++k)
      for (int j = 0; j < PANEL; ++j) to[k * PANEL + j] = j < width ? *part.from(k, j).data : 0;
  }
}

// Thread-local memory, kept between calls and aligned to a cache line.
float* scratch(int which, size_t size) {
  constexpr size_t LINE = 64 / sizeof(float);
  thread_local std::vector<float> memory[8];
  if (memory[which].size() < size + LINE) memory[which].resize(size + LINE);
  float* start = memory[which].data();
  return start + (LINE - reinterpret_cast<uintptr_t>(start) / sizeof(float) % LINE) % LINE;
}

}  // namespace
