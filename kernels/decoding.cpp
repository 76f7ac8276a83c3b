// The kernels of generation on a CPU: matrix products of few rows, and attention of one query. decoding.py documents
// what they compute.

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "tile.h"

using torch::stable::Tensor;

namespace {

constexpr int TOGETHER = 4 * PANEL;  // outputs whose weights stay in the L1 cache while all rows pass

template <int ROWS, int PANELS, typename Weight>
void tile(const float* x, const Weight* panels, const float* scale, float* y, int d_in, int d_out, int width) {
  Lanes sum[ROWS][PANELS][2];
  multiply({x, d_in, 1}, panels, d_in, sum);
  for (int r = 0; r < ROWS; ++r) {
    if (scale)
      for (int p = 0; p < PANELS; ++p)
        for (int side : {0, 1}) sum[r][p][side] *= load(scale + p * PANEL + side * LANES);
    std::memcpy(y + int64_t(r) * d_out, sum[r], width * sizeof(float));
  }
}

template <typename Weight>
void product(const float* x, const Weight* panels, const float* scale, float* y, int rows, int d_in, int d_out) {
  torch::stable::parallel_for(0, up_to(d_out, TOGETHER) / TOGETHER, 1, [&](int64_t begin, int64_t end) {
    for (int first = begin * TOGETHER; first < std::min<int64_t>(d_out, end * TOGETHER); first += TOGETHER) {
      const int last = std::min(d_out, first + TOGETHER);
      int row = 0;
      auto pass = [&]<int ROWS, int PANELS>() {
        for (; row + ROWS <= rows; row += ROWS)
          for (int at = first; at < last; at += PANELS * PANEL)
            tile<ROWS, PANELS>(
                x + int64_t(row) * d_in, panels + int64_t(at) * d_in, scale ? scale + at : nullptr,
                y + int64_t(row) * d_out + at, d_in, d_out, std::min(PANELS * PANEL, last - at));
      };
      pass.template operator()<6, 1>();
      pass.template operator()<4, 1>();
      pass.template operator()<2, 2>();
      pass.template operator()<1, 4>();
    }
  });
}

// (outputs whose weights are interleaved, the multiple to which outputs are padded)
std::tuple<int64_t, int64_t> layout() { return {PANEL, TOGETHER}; }

Tensor linear(const Tensor& x, const Tensor& panels, std::optional<Tensor> scale, int64_t d_out) {
  STD_TORCH_CHECK(x.is_contiguous() && panels.is_contiguous() && panels.size(0) * PANEL >= d_out &&
                  panels.size(0) * PANEL % TOGETHER == 0 && panels.size(1) == x.size(1) && panels.size(2) == PANEL,
                  "the rows do not fit the panels of weights");
  Tensor y = torch::stable::new_empty(x, {x.size(0), d_out});
  auto in = static_cast<const float*>(x.data_ptr());
  auto out = static_cast<float*>(y.data_ptr());
  auto by = scale ? static_cast<const float*>(scale->data_ptr()) : nullptr;
  if (scale)
    product(in, static_cast<const int8_t*>(panels.data_ptr()), by, out, x.size(0), x.size(1), d_out);
  else
    product(in, static_cast<const float*>(panels.data_ptr()), by, out, x.size(0), x.size(1), d_out);
  return y;
}

// softmax(q k^T / sqrt(d)) v for one query q (d) over the keys that the mask allows; zeros if there are none.
void attend_one(const float* q, const float* k, const float* v, const bool* mask, float* y, int keys, int d,
                int64_t k_step, int64_t v_step, int64_t mask_step) {
  std::vector<float> weights(keys);
  float top = -INFINITY, total = 0;
  for (int j = 0; j < keys; ++j) {
    if (!mask[j * mask_step]) continue;
    const float* key = k + j * k_step;
    Lanes sums{};
    int i = 0;
    for (; i + LANES <= d; i += LANES) sums += load(q + i) * load(key + i);
    float score = 0;
    for (int lane = 0; lane < LANES; ++lane) score += sums[lane];
    for (; i < d; ++i) score += q[i] * key[i];
    weights[j] = score / std::sqrt(float(d));
    top = std::max(top, weights[j]);
  }
  std::fill(y, y + d, 0.0f);
  for (int j = 0; j < keys; ++j) {
    if (!mask[j * mask_step]) continue;
    const float weight = std::exp(weights[j] - top);
    total += weight;
    for (int i = 0; i < d; ++i) y[i] += weight * v[j * v_step + i];
  }
  if (total > 0)
    for (int i = 0; i < d; ++i) y[i] /= total;
}

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask) {
  STD_TORCH_CHECK(q.size(2) == 1 && q.stride(3) == 1 && k.stride(3) == 1 && v.stride(3) == 1,
                  "one query a row, and numbers of a head side by side");
  const int64_t heads = q.size(1), shared = heads / k.size(1);
  Tensor y = torch::stable::new_empty(q, {q.size(0), heads, 1, q.size(3)});
  auto queries = static_cast<const float*>(q.data_ptr());
  auto keys = static_cast<const float*>(k.data_ptr());
  auto values = static_cast<const float*>(v.data_ptr());
  auto seen = static_cast<const bool*>(mask.data_ptr());
  auto out = static_cast<float*>(y.data_ptr());
  torch::stable::parallel_for(0, q.size(0) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t b = n / heads, h = n % heads, g = h / shared;
      attend_one(queries + b * q.stride(0) + h * q.stride(1), keys + b * k.stride(0) + g * k.stride(1),
                 values + b * v.stride(0) + g * v.stride(1), seen + b * mask.stride(0) + h * mask.stride(1),
                 out + n * q.size(3), k.size(2), q.size(3), k.stride(2), v.stride(2), mask.stride(3));
    }
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(inkling, library) {
  library.def("layout() -> (int, int)");
  library.def("linear(Tensor x, Tensor panels, Tensor? scale, int d_out) -> Tensor");
  library.def("attend(Tensor q, Tensor k, Tensor v, Tensor mask) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(inkling, CompositeExplicitAutograd, library) { library.impl("layout", TORCH_BOX(&layout)); }

STABLE_TORCH_LIBRARY_IMPL(inkling, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("attend", TORCH_BOX(&attend));
}
