// Products of matrices, after "Anatomy of High-Performance Matrix Multiplication" (2008) and BLIS: the right one is packed
// into panels, in the order in which they are read, and a block of the result is added up in registers.

#pragma once
#include <algorithm>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#include <torch/csrc/stable/ops.h>

#include "lanes.h"

namespace {

constexpr int PANEL = 2 * LANES;  // columns of the right matrix that lie side by side once packed
constexpr int GROUP = 6;          // rows of the left one: with them, 12 of the 16 registers hold sums
constexpr int DEPTH = 256;        // a group so deep stays in the nearest cache, and in the next, 512 KiB or more,
constexpr int COLUMNS = 16 * PANEL;  // so many columns of the right matrix, while its rows pass
constexpr int ROWS = 16 * GROUP;  // that are packed at a time, where they have to be

struct Matrix {  // a view, transposed or not
  const float* data;
  int64_t row, column;  // steps from one to the next
  Matrix from(int64_t i, int64_t j) const { return {data + i * row + j * column, row, column}; }
};

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A block of `left` with so many rows, times a packed panel: all sums in registers.
template <int N>
void tile(Matrix left, const float* panel, int depth, float* out, int64_t out_row, int width, bool add) {
  Lanes low[N], high[N];  // every loop over them is unrolled: otherwise they would go through memory
#pragma GCC unroll 6
  for (int r = 0; r < N; ++r) low[r] = high[r] = Lanes{};
  const float* a = left.data;
#pragma GCC unroll 4
  for (int k = 0; k < depth; ++k, a += left.column, panel += PANEL) {
    const Lanes x = load(panel), y = load(panel + LANES);
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r) {
      low[r] += a[r * left.row] * x;
      high[r] += a[r * left.row] * y;
    }
  }
  if (width < PANEL) {
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r, out += out_row) {
      float row[PANEL];
      store(row, low[r]);
      store(row + LANES, high[r]);
      for (int j = 0; j < width; ++j) out[j] = add ? out[j] + row[j] : row[j];
    }
    return;
  }
#pragma GCC unroll 6
  for (int r = 0; r < N; ++r, out += out_row) {
    store(out, add ? load(out) + low[r] : low[r]);
    store(out + LANES, add ? load(out + LANES) + high[r] : high[r]);
  }
}

void tile(int rows, Matrix left, const float* panel, int depth, float* out, int64_t out_row, int width, bool add) {
  constexpr decltype(&tile<1>) TILES[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};
  TILES[rows - 1](left, panel, depth, out, out_row, width, add);
}

#ifdef __AVX2__
// 8 x 8 numbers, turned over in registers; one by one they would cost as much as a tenth of the products.
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

// Columns of a matrix as panels (panel, row, PANEL), filled up with zeros.
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

// Rows of a matrix whose rows do not lie side by side as groups (group, column, GROUP).
void pack_rows(Matrix from, int rows, int columns, float* to) {
  for (int first = 0; first < rows; first += GROUP, to += int64_t(columns) * GROUP) {
    const int n = std::min(GROUP, rows - first);
    for (int k = 0; k < columns; ++k) {
      const Matrix part = from.from(first, k);
      if (n == GROUP && part.row == 1)
        std::memcpy(to + k * GROUP, part.data, GROUP * sizeof(float));
      else
        for (int r = 0; r < n; ++r) to[k * GROUP + r] = part.data[r * part.row];
    }
  }
}

// Memory of this thread's own, kept between calls; its start is that of a line of the cache.
float* scratch(int which, size_t size) {
  constexpr size_t LINE = 64 / sizeof(float);
  thread_local std::vector<float> memory[8];
  if (memory[which].size() < size + LINE) memory[which].resize(size + LINE);
  float* start = memory[which].data();
  return start + (LINE - reinterpret_cast<uintptr_t>(start) / sizeof(float) % LINE) % LINE;
}

void product_alone(Matrix left, Matrix right, float* out, int64_t out_row, int m, int n, int depth, bool add) {
  float* panels = scratch(0, DEPTH * COLUMNS);
  float* groups = scratch(1, DEPTH * ROWS);
  for (int j0 = 0; j0 < n; j0 += COLUMNS)
    for (int k0 = 0; k0 < depth; k0 += DEPTH) {
      const int columns = std::min(COLUMNS, n - j0), deep = std::min(DEPTH, depth - k0);
      pack_columns(right.from(k0, j0), deep, columns, panels);
      for (int i0 = 0; i0 < m; i0 += ROWS) {
        const int rows = std::min(ROWS, m - i0);
        const bool packed = left.column != 1;
        if (packed) pack_rows(left.from(i0, k0), rows, deep, groups);
        for (int i = 0; i < rows; i += GROUP)
          for (int j = 0; j < columns; j += PANEL)
            tile(std::min(GROUP, rows - i), packed ? Matrix{groups + i * deep, 1, GROUP} : left.from(i0 + i, k0),
                 panels + j * deep, deep, out + (i0 + i) * out_row + j0 + j, out_row, std::min(PANEL, columns - j),
                 add || k0 > 0);
      }
    }
}

// out (m n) = left (m depth) right (depth n), or added to it. Threads share the longer side of `out`.
void product(Matrix left, Matrix right, float* out, int64_t out_row, int m, int n, int depth, bool add) {
  const bool by_rows = m >= n;
  const int unit = by_rows ? GROUP : PANEL, units = up_to(by_rows ? m : n, unit) / unit;
  const int64_t work = int64_t(unit) * depth * (by_rows ? n : m);
  torch::stable::parallel_for(0, units, 1 + (1 << 18) / (1 + work), [&](int64_t begin, int64_t end) {
    const int first = begin * unit, last = std::min<int64_t>(end * unit, by_rows ? m : n);
    if (by_rows)
      product_alone(left.from(first, 0), right, out + first * out_row, out_row, last - first, n, depth, add);
    else
      product_alone(left, right.from(0, first), out + first, out_row, m, last - first, depth, add);
  });
}

}  // namespace
