// The kernels of training on a CPU: causal attention, norms, rotation, gated products, dropout and loss. training.py
// documents what they compute. The order of every sum depends on the shapes only, so that the number of threads changes
// no bit.

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "tile.h"

using torch::stable::parallel_for;
using torch::stable::Tensor;

namespace {

bool is_float(const Tensor& x) { return x.scalar_type() == torch::headeronly::ScalarType::Float; }

float* numbers(const Tensor& x) {
  STD_TORCH_CHECK(is_float(x), "the kernels compute in float32");
  return static_cast<float*>(x.data_ptr());
}

// --- causal attention: "FlashAttention" (2022). Never holds the square of weights; the backward pass recomputes it --

constexpr int QUERIES = 8 * GROUP;  // queries that pass over the keys together
constexpr int KEYS = 8 * PANEL;     // in the backward pass

Matrix head(const Tensor& x, int64_t b, int64_t h) {
  return {numbers(x) + b * x.stride(0) + h * x.stride(1), x.stride(2), 1};
}

// left (m depth) times packed panels, n columns; each group of rows only as deep, or as wide, as `reach(row)` says.
template <typename Depth>
void groups(Matrix left, const float* panels, int panel_rows, float* out, int64_t out_row, int m, int n, bool add,
            Depth depth) {
  for (int j = 0; j < n; j += PANEL)
    for (int i = 0; i < m; i += GROUP)
      tile(std::min(GROUP, m - i), left.from(i, 0), panels + int64_t(j) * panel_rows, depth(i), out + i * out_row + j,
           out_row, std::min(PANEL, n - j), add);
}

// scores (m, keys) = q k^T, without the panels of keys after the last query of a group; `first` is the position of the
// first query relative to the first key.
void score(Matrix q, const float* keys, int d, float* scores, int64_t step, int m, int n, int first) {
  for (int j = 0; j < n; j += PANEL)
    for (int i = std::max(0, j - first) / GROUP * GROUP; i < m; i += GROUP)
      tile(std::min(GROUP, m - i), q.from(i, 0), keys + int64_t(j) * d, d, scores + i * step + j, step, PANEL, false);
}

// One head: y (t d) and log-sum-exp of each query's scores.
void attend_head(Matrix q, const float* keys, const float* values, float* y, int64_t y_row, float* log_sums, int t,
                 int d) {
  const float scale = 1 / std::sqrt(float(d));
  const int64_t step = up_to(t, PANEL) + PANEL;
  float* scores = scratch(2, QUERIES * step);
  for (int q0 = 0; q0 < t; q0 += QUERIES) {
    const int m = std::min(QUERIES, t - q0);
    score(q.from(q0, 0), keys, d, scores, step, m, q0 + m, q0);
    float over[QUERIES];
    for (int i = 0; i < m; ++i) {
      float* row = scores + i * step;
      const int n = q0 + i + 1, full = up_to(n, LANES);
      std::fill(row + n, row + full, -INFINITY);
      Lanes tops = load(row), sums{};
      for (int j = LANES; j < full; j += LANES) tops = larger(tops, load(row + j));
      const float top = largest(tops);
      for (int j = 0; j < full; j += LANES) {
        const Lanes weights = exp((load(row + j) - top) * scale);
        sums += weights;
        store(row + j, weights);
      }
      store(row + full, Lanes{});  // up to the last query of the group
      const float total = sum(sums);
      over[i] = 1 / total;
      log_sums[q0 + i] = top * scale + std::log(total);
    }
    for (int k0 = 0; k0 < q0 + m; k0 += DEPTH)
      groups({scores + k0, step, 1}, values + int64_t(k0) * PANEL, t, y + q0 * y_row, y_row, m, d, k0 > 0, [&](int i) {
        return std::clamp(q0 + std::min(i + GROUP, m) - k0, 0, DEPTH);
      });
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < d; j += LANES) {
        float* part = y + (q0 + i) * y_row + j;
        store(part, load(part, d - j) * over[i], d - j);
      }
  }
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v) {
  const int64_t b = q.size(0), heads = q.size(1), t = q.size(2), d = q.size(3), shared = heads / k.size(1);
  for (const Tensor& x : {k, v})
    STD_TORCH_CHECK(x.size(0) == b && x.size(1) == k.size(1) && heads % x.size(1) == 0 && x.size(2) == t &&
                    x.size(3) == d, "queries, keys and values do not fit each other");
  for (const Tensor& x : {q, k, v})  // checked here, since threads must not throw
    STD_TORCH_CHECK((d == 1 || x.stride(3) == 1) && is_float(x), "numbers of a head must lie side by side, in float32");
  Tensor y = torch::stable::new_empty(q, {b, t, heads, d}), log_sums = torch::stable::new_empty(q, {b, heads, t});
  parallel_for(0, b * k.size(1), 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t row = n / k.size(1), g = n % k.size(1);
      float* keys = scratch(0, up_to(t, PANEL) * d);
      float* values = scratch(1, t * up_to(d, PANEL));
      const Matrix key = head(k, row, g);
      pack_columns({key.data, 1, key.row}, d, t, keys);
      pack_columns(head(v, row, g), t, d, values);
      for (int64_t h = g * shared; h < (g + 1) * shared; ++h)
        attend_head(head(q, row, h), keys, values, numbers(y) + (row * t * heads + h) * d, heads * d,
                    numbers(log_sums) + (row * heads + h) * t, t, d);
    }
  });
  return {y, log_sums};
}

// One head's contribution to the gradients of queries, keys and values, each with its own row stride.
struct Head {
  Matrix q, y, dy;
  const float *keys_across, *keys, *values_across, *log_sums;
  float *dq, *dk, *dv;
  int64_t dq_row, dk_row;
};

void attend_head_backward(const Head& head, int t, int d) {
  const float scale = 1 / std::sqrt(float(d));
  constexpr int64_t STEP = KEYS + PANEL;  // not a power of two, so that rows do not share a set of the cache
  float* weights = scratch(4, QUERIES * STEP);
  float* slopes = scratch(5, QUERIES * STEP);
  float* queries = scratch(6, QUERIES * up_to(d, PANEL));
  float* changes = scratch(7, QUERIES * up_to(d, PANEL));
  for (int q0 = 0; q0 < t; q0 += QUERIES) {
    const int m = std::min(QUERIES, t - q0);
    const Matrix q = head.q.from(q0, 0), dy = head.dy.from(q0, 0);
    pack_columns(q, m, d, queries);
    pack_columns(dy, m, d, changes);
    float shift[QUERIES];
    for (int i = 0; i < m; ++i) shift[i] = dot(dy.from(i, 0).data, head.y.from(q0 + i, 0).data, d);
    for (int k0 = 0; k0 < q0 + m; k0 += KEYS) {
      const int n = std::min(KEYS, q0 + m - k0);
      score(q, head.keys_across + int64_t(k0) * d, d, weights, STEP, m, n, q0 - k0);
      score(dy, head.values_across + int64_t(k0) * d, d, slopes, STEP, m, n, q0 - k0);
      for (int i = 0; i < m; ++i) {
        float *p = weights + i * STEP, *ds = slopes + i * STEP;
        const int seen = std::clamp(q0 + i + 1 - k0, 0, n);
        std::fill(p + seen, p + up_to(seen, LANES), -INFINITY);
        std::fill(ds + seen, ds + up_to(seen, LANES), 0.0f);
        int j = 0;
        for (; j < seen; j += LANES) {
          const Lanes weight = exp(load(p + j) * scale - head.log_sums[q0 + i]);
          store(p + j, weight);
          store(ds + j, weight * (load(ds + j) - shift[i]) * scale);
        }
        for (; j < n; j += LANES) {
          store(p + j, Lanes{});
          store(ds + j, Lanes{});
        }
      }
      groups({slopes, STEP, 1}, head.keys + int64_t(k0) * PANEL, t, head.dq + q0 * head.dq_row, head.dq_row, m, d,
             k0 > 0, [&](int i) { return std::clamp(q0 + std::min(i + GROUP, m) - k0, 0, n); });
      for (int i = 0; i < n; i += GROUP) {  // keys; earlier queries do not attend to them
        const int from = std::clamp(k0 + i - q0, 0, m), rows = std::min(GROUP, n - i);
        auto into = [&](const float* left, const float* panels, float* out) {
          groups({left + from * STEP + i, 1, STEP}, panels + from * PANEL, m, out + (k0 + i) * head.dk_row, head.dk_row,
                 rows, d, true, [&](int) { return m - from; });
        };
        into(slopes, queries, head.dk);
        into(weights, changes, head.dv);
      }
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& dy, const Tensor& q, const Tensor& k,
                                                      const Tensor& v, const Tensor& y, const Tensor& log_sums) {
  const int64_t b = q.size(0), heads = q.size(1), t = q.size(2), d = q.size(3), kv_heads = k.size(1);
  STD_TORCH_CHECK((d == 1 || dy.stride(3) == 1) && is_float(dy), "numbers of a head must lie side by side, in float32");
  Tensor dq = torch::stable::new_empty(q, {b, t, heads, d});
  Tensor dk = torch::stable::new_empty(q, {b, t, kv_heads, d}), dv = torch::stable::new_empty(q, {b, t, kv_heads, d});
  torch::stable::zero_(dk);
  torch::stable::zero_(dv);
  parallel_for(0, b * kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t row = n / kv_heads, g = n % kv_heads, across = up_to(t, PANEL) * d, along = t * up_to(d, PANEL);
      float *keys_across = scratch(0, across), *values_across = scratch(1, across), *keys = scratch(2, along);
      const Matrix key = head(k, row, g), value = head(v, row, g);
      pack_columns({key.data, 1, key.row}, d, t, keys_across);
      pack_columns({value.data, 1, value.row}, d, t, values_across);
      pack_columns(key, t, d, keys);
      const int64_t at = (row * t * kv_heads + g) * d;
      for (int64_t h = g * (heads / kv_heads); h < (g + 1) * (heads / kv_heads); ++h)
        attend_head_backward(
            {head(q, row, h), head(y, row, h), head(dy, row, h), keys_across, keys, values_across,
             numbers(log_sums) + (row * heads + h) * t, numbers(dq) + (row * t * heads + h) * d, numbers(dk) + at,
             numbers(dv) + at, heads * d, kv_heads * d}, t, d);
    }
  });
  return {dq, dk, dv};
}

// --- norms, rotation, gated products, dropout, loss -----------------------------------------------------------------

constexpr int64_t BATCH = 64;  // rows over which a weight's gradient is summed separately, for any number of threads

// Rows x (rows heads d), each divided by its rms and multiplied by a weight, then rotated by its own angles.
struct Turn {
  int64_t rows, heads, d, angles;
  const float *weight, *cos, *sin;
  bool interleaved;

  // Rotates y (d) in place, forwards or backwards: halves by vectors, interleaved pairs one by one.
  void apply(float* y, int64_t row, float sign) const {
    const int64_t half = d / 2;
    const float *c = cos + row % angles * half, *s = sin + row % angles * half;
    if (interleaved) {
      for (int64_t i = 0; i < half; ++i) {
        const float a = y[2 * i], b = y[2 * i + 1], turn = sign * s[i];
        y[2 * i] = a * c[i] - b * turn;
        y[2 * i + 1] = a * turn + b * c[i];
      }
      return;
    }
    for (int64_t i = 0; i < half; i += LANES) {
      const int64_t n = half - i;
      const Lanes a = load(y + i, n), b = load(y + half + i, n), turn = sign * load(s + i, n), keep = load(c + i, n);
      store(y + i, a * keep - b * turn, n);
      store(y + half + i, a * turn + b * keep, n);
    }
  }
};

Turn turn(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& cos,
          const std::optional<Tensor>& sin, bool interleaved) {
  STD_TORCH_CHECK(x.is_contiguous() && (!weight || weight->numel() == x.size(2)) &&
                  (!cos || (cos->is_contiguous() && sin->is_contiguous() && cos->size(1) == x.size(2) / 2 &&
                            sin->numel() == cos->numel() && x.size(0) % cos->size(0) == 0)),
                  "weight and angles do not fit the heads");
  return {x.size(0), x.size(1), x.size(2), cos ? cos->size(0) : 1, weight ? numbers(*weight) : nullptr,
          cos ? numbers(*cos) : nullptr, sin ? numbers(*sin) : nullptr, interleaved};
}

Tensor norm_turn(const Tensor& x, std::optional<Tensor> weight, double eps, std::optional<Tensor> cos,
                 std::optional<Tensor> sin, bool interleaved) {
  const Turn by = turn(x, weight, cos, sin, interleaved);
  Tensor y = torch::stable::new_empty(x, {by.rows, by.heads, by.d});
  const float* ins = numbers(x);
  float* outs = numbers(y);
  parallel_for(0, by.rows, 1 + 4096 / (by.heads * by.d), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * by.heads; n < end * by.heads; ++n) {
      const float* in = ins + n * by.d;
      float* out = outs + n * by.d;
      const float over = by.weight ? 1 / std::sqrt(dot(in, in, by.d) / by.d + float(eps)) : 1;
      for (int64_t i = 0; i < by.d; i += LANES) {
        const Lanes part = load(in + i, by.d - i);
        store(out + i, by.weight ? part * over * load(by.weight + i, by.d - i) : part, by.d - i);
      }
      if (by.cos) by.apply(out, n / by.heads, 1);
    }
  });
  return y;
}

std::tuple<Tensor, Tensor> norm_turn_backward(const Tensor& dy, const Tensor& x, std::optional<Tensor> weight,
                                              double eps,
                                              std::optional<Tensor> cos, std::optional<Tensor> sin, bool interleaved) {
  STD_TORCH_CHECK(dy.is_contiguous(), "must be contiguous");
  const Turn by = turn(x, weight, cos, sin, interleaved);
  const int64_t batches = up_to(by.rows, BATCH) / BATCH, d = by.d;
  Tensor dx = torch::stable::new_empty(x, {by.rows, by.heads, d}), dweight = torch::stable::new_empty(x, {batches, d});
  torch::stable::zero_(dweight);
  const float *ins = numbers(x), *changes = numbers(dy);
  float *outs = numbers(dx), *shares = numbers(dweight);
  parallel_for(0, batches, 1, [&](int64_t begin, int64_t end) {
    float* turned = scratch(0, d);
    for (int64_t n = begin * BATCH * by.heads; n < std::min(by.rows, end * BATCH) * by.heads; ++n) {
      const float* in = ins + n * d;
      float *out = outs + n * d, *share = shares + n / by.heads / BATCH * d;
      std::memcpy(by.weight ? turned : out, changes + n * d, d * sizeof(float));
      if (by.cos) by.apply(by.weight ? turned : out, n / by.heads, -1);
      if (!by.weight) continue;
      const float over = 1 / std::sqrt(dot(in, in, d) / d + float(eps));
      Lanes products{};
      for (int64_t i = 0; i < d; i += LANES) {
        const Lanes change = load(turned + i, d - i), part = load(in + i, d - i);
        store(share + i, load(share + i, d - i) + change * part * over, d - i);
        store(turned + i, change * load(by.weight + i, d - i), d - i);
        products += load(turned + i, d - i) * part;
      }
      const float along = sum(products) * over * over / d;
      for (int64_t i = 0; i < d; i += LANES)
        store(out + i, (load(turned + i, d - i) - load(in + i, d - i) * along) * over, d - i);
    }
  });
  for (int64_t n = 1; n < batches; ++n)
    for (int64_t i = 0; i < d; ++i) shares[i] += shares[n * d + i];
  return {dx, torch::stable::narrow(dweight, 0, 0, batches ? 1 : 0)};
}

// f(begin, end) on ranges of the vectors of n numbers, split among threads
template <typename F>
void each(int64_t numbers, F f) {
  parallel_for(0, up_to(numbers, LANES) / LANES, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * LANES; i < std::min(numbers, end * LANES); i += LANES) f(i, numbers - i);
  });
}

Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exp(-(x < -88.0f ? Lanes{} - 88.0f : x))); }

void silu_times(const Tensor& gate, const Tensor& up, Tensor out) {
  STD_TORCH_CHECK(gate.is_contiguous() && up.is_contiguous() && gate.numel() == up.numel(), "gates do not fit");
  each(gate.numel(), [g = numbers(gate), u = numbers(up), y = numbers(out)](int64_t i, int64_t n) {
    const Lanes x = load(g + i, n);
    store(y + i, x * sigmoid(x) * load(u + i, n), n);
  });
}

void silu_times_backward(const Tensor& dy, const Tensor& gate, const Tensor& up, Tensor dgate, Tensor dup) {
  STD_TORCH_CHECK(dy.is_contiguous(), "must be contiguous");
  each(gate.numel(), [c = numbers(dy), g = numbers(gate), u = numbers(up), dg = numbers(dgate),
                      du = numbers(dup)](int64_t i, int64_t n) {
    const Lanes x = load(g + i, n), s = sigmoid(x), change = load(c + i, n);
    store(du + i, change * x * s, n);
    store(dg + i, change * load(u + i, n) * s * (1.0f + x * (1.0f - s)), n);
  });
}

// Dropout: a fraction of x times zero, the rest times 1 / (1 - fraction). The choice is a hash of seed and index (two
// rounds of one of the best of "hash-prospector", Wellons, 2018): the same for x and for its gradient, with nothing to
// store. Seeds must be random: those of two consecutive seeds are the same choice, shifted by one index.
void dropout(const Tensor& x, Tensor out, double share, int64_t seed) {
  STD_TORCH_CHECK(x.is_contiguous() && out.is_contiguous() && x.numel() == out.numel(), "must be contiguous, and fit");
  typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
  const Words places{0, 1, 2, 3, 4, 5, 6, 7};
  const uint32_t low = seed, high = seed >> 32, bound = std::min(share * 0x1p32, 0x1p32 - 1);
  const float scale = 1 / (1 - share);
  each(x.numel(), [=, a = numbers(x), b = numbers(out)](int64_t i, int64_t n) {
    Words word = places + ((uint32_t)i + low);
    for (int round = 0; round < 2; ++round) {
      word = (word ^ (word >> 16)) * 0x21f0aaadu;
      word = (word ^ (word >> 15)) * 0x735a2d97u;
      word = (word ^ (word >> 15)) ^ high;
    }
    store(b + i, load(a + i, n) * (word >= bound ? Lanes{} + scale : Lanes{}), n);  // NaN stays NaN
  });
}

// The loss of each row of logits (rows vocab) and, with `slopes`, its gradient: the softmax, minus 1 at the target. A
// target equal to `ignore` has no loss.
std::tuple<Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore, bool slopes) {
  STD_TORCH_CHECK(logits.is_contiguous() && targets.is_contiguous() && targets.numel() == logits.size(0) &&
                  targets.scalar_type() == torch::headeronly::ScalarType::Long, "one target a row, int64");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  auto right = static_cast<const int64_t*>(targets.data_ptr());
  for (int64_t row = 0; row < rows; ++row)
    STD_TORCH_CHECK(right[row] == ignore || (right[row] >= 0 && right[row] < vocab), "a target is beyond the vocabulary");
  Tensor losses = torch::stable::new_empty(logits, {rows});
  Tensor changes = torch::stable::new_empty(logits, {slopes ? rows : 0, vocab});
  const float* all = numbers(logits);
  float *loss = numbers(losses), *out = numbers(changes);
  parallel_for(0, rows, 1 + 4096 / vocab, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x = all + row * vocab;
      float* y = out + row * vocab;
      Lanes tops = Lanes{} - INFINITY, sums{};
      for (int64_t j = 0; j < vocab; j += LANES) tops = larger(tops, load(x + j, vocab - j, -INFINITY));
      const float top = largest(tops);
      for (int64_t j = 0; j < vocab; j += LANES) {
        const Lanes power = exp(load(x + j, vocab - j, -INFINITY) - top);
        sums += power;
        if (slopes) store(y + j, power, vocab - j);
      }
      const float total = sum(sums), over = right[row] == ignore ? 0 : 1 / total;
      loss[row] = right[row] == ignore ? 0 : std::log(total) - (x[right[row]] - top);
      if (!slopes) continue;
      for (int64_t j = 0; j < vocab; j += LANES) store(y + j, load(y + j, vocab - j) * over, vocab - j);
      if (right[row] != ignore) y[right[row]] -= 1;
    }
  });
  return {losses, changes};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(inkling, library) {
  library.def("attention(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)");
  library.def("attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor log_sums)"
              " -> (Tensor, Tensor, Tensor)");
  library.def("norm_turn(Tensor x, Tensor? weight, float eps, Tensor? cos, Tensor? sin, bool interleaved) -> Tensor");
  library.def("norm_turn_backward(Tensor dy, Tensor x, Tensor? weight, float eps, Tensor? cos, Tensor? sin,"
              " bool interleaved) -> (Tensor, Tensor)");
  library.def("silu_times(Tensor gate, Tensor up, Tensor(a!) out) -> ()");
  library.def("silu_times_backward(Tensor dy, Tensor gate, Tensor up, Tensor(a!) dgate, Tensor(b!) dup) -> ()");
  library.def("dropout(Tensor x, Tensor(a!) out, float share, int seed) -> ()");
  library.def("cross_entropy(Tensor logits, Tensor targets, int ignore, bool slopes) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(inkling, CPU, library) {
  library.impl("attention", TORCH_BOX(&attention));
  library.impl("attention_backward", TORCH_BOX(&attention_backward));
  library.impl("norm_turn", TORCH_BOX(&norm_turn));
  library.impl("norm_turn_backward", TORCH_BOX(&norm_turn_backward));
  library.impl("silu_times", TORCH_BOX(&silu_times));
  library.impl("silu_times_backward", TORCH_BOX(&silu_times_backward));
  library.impl("dropout", TORCH_BOX(&dropout));
  library.impl("cross_entropy", TORCH_BOX(&cross_entropy));
}
