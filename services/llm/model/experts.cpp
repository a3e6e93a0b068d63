// A mixture of experts whose weights lie in panels: every chosen expert reads its weights once.

#include "panels.h"

// Rows, experts per row, experts, hidden size, size of an expert; x_row counts elements.
struct Sizes {
  int64_t num_rows, top_k, num_experts, hidden, inner, x_row;
};

namespace {

inline Floats silu(Floats x) {
  const Ints is_negative = x < 0.0f;
  const Floats e = exponential(is_negative ? x : -x);
  return x * (is_negative ? e : all(1.0f)) / (1.0f + e);
}

// order: pairs of row and choice, expert after expert; those of e begin at starts[e].
void sort_by_expert(int64_t num_pairs, int64_t num_experts, const int64_t* chosen, int64_t* order,
                    int64_t* starts) {
  for (int64_t e = 0; e <= num_experts; e++) starts[e] = 0;
  for (int64_t pair = 0; pair < num_pairs; pair++) starts[chosen[pair] + 1]++;
  for (int64_t e = 0; e < num_experts; e++) starts[e + 1] += starts[e];
  for (int64_t pair = 0; pair < num_pairs; pair++) order[starts[chosen[pair]]++] = pair;
  for (int64_t e = num_experts; e > 0; e--) starts[e] = starts[e - 1];
  starts[0] = 0;
}

// Calls use(pair, outputs) for every pair of one expert with the outputs of one panel.
template <typename Element, typename RowOf, typename Use>
inline void for_each_pair(const int64_t* order, int64_t start, int64_t stop, const Element* panel,
                          int64_t num_inputs, RowOf row_of, Use use) {
  for (int64_t i = start; i < stop; i += ROWS) {
    const int count = least(ROWS, stop - i);
    const Element* rows[ROWS];
    for (int r = 0; r < count; r++) rows[r] = row_of(order[i + r]);
    Outputs outputs[ROWS];
    multiply(count, rows, panel, num_inputs, outputs);
    for (int r = 0; r < count; r++) use(order[i + r], outputs[r]);
  }
}

template <typename Element>
void experts(const Sizes& sizes, const Element* x, const int64_t* chosen, const float* weights,
             const Element* gate_up, const Element* down, int64_t* order, Element* hidden,
             float* outs, Element* y, int num_threads) {
  const int64_t D = sizes.hidden, I = sizes.inner, k = sizes.top_k;
  int64_t* starts = order + sizes.num_rows * k;
  sort_by_expert(sizes.num_rows * k, sizes.num_experts, chosen, order, starts);

  const int64_t inner_panels = ceil_div(I, PANEL / 2), outer_panels = ceil_div(D, PANEL);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    // A panel of gate_up: 32 gates, then the 32 ups of the same numbers.
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < sizes.num_experts * inner_panels; item++) {
      const int64_t expert = item / inner_panels, first = item % inner_panels * (PANEL / 2);
      for_each_pair(
          order, starts[expert], starts[expert + 1], gate_up + item * PANEL * D, D,
          [&](int64_t pair) { return x + pair / k * sizes.x_row; },
          [&](int64_t pair, const Floats* outputs) {
            for (int64_t v = 0, i = first; v < VECTORS / 2 && i < I; v++, i += LANES)
              store_some(hidden + pair * I + i, silu(outputs[v]) * outputs[v + VECTORS / 2], I - i);
          });
    }
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < sizes.num_experts * outer_panels; item++) {
      const int64_t expert = item / outer_panels, first = item % outer_panels * PANEL;
      for_each_pair(
          order, starts[expert], starts[expert + 1], down + item * PANEL * I, I,
          [&](int64_t pair) { return hidden + pair * I; },
          [&](int64_t pair, const Floats* outputs) {
            for (int64_t v = 0, d = first; v < VECTORS && d < D; v++, d += LANES)
              store_some(outs + pair * D + d, outputs[v], D - d);
          });
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < sizes.num_rows; row++)
      for (int64_t d = 0; d < D; d += LANES) {
        Floats sum = {};
        for (int64_t pair = row * k; pair < (row + 1) * k; pair++)
          sum += weights[pair] * load_some(outs + pair * D + d, D - d);
        store_some(y + row * D + d, sum, D - d);
      }
  }
}

}  // namespace

// x and y: [T, D], chosen and weights: [T, k]; gate_up and down: panels of every expert. Room for
// what is in between: order [T * k + E + 1], hidden [T * k, I], outs [T * k, D].
extern "C" void experts_bfloat16(const Sizes* sizes, const void* x, const int64_t* chosen,
                                 const float* weights, const void* gate_up, const void* down,
                                 int64_t* order, void* hidden, float* outs, void* y,
                                 int num_threads) {
  experts(*sizes, (const BFloat16*)x, chosen, weights, (const BFloat16*)gate_up,
          (const BFloat16*)down, order, (BFloat16*)hidden, outs, (BFloat16*)y, num_threads);
}

extern "C" void experts_float32(const Sizes* sizes, const void* x, const int64_t* chosen,
                                const float* weights, const void* gate_up, const void* down,
                                int64_t* order, void* hidden, float* outs, void* y,
                                int num_threads) {
  experts(*sizes, (const float*)x, chosen, weights, (const float*)gate_up, (const float*)down, order,
          (float*)hidden, outs, (float*)y, num_threads);
}
