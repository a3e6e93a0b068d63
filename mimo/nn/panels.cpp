// y = x W^T + b for a weight in panels.

#include "panels.h"

namespace {

constexpr int64_t ROWS_OF_ITEM = 8 * ROWS;  // what a thread takes at a time

template <typename Element>
void linear(int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int64_t x_row,
            const Element* x, const Element* panels, const Element* bias, Element* y,
            int num_threads) {
  const int64_t num_panels = ceil_div(num_outputs, PANEL), parts = ceil_div(num_rows, ROWS_OF_ITEM);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic) if (num_threads > 1)
  for (int64_t item = 0; item < num_panels * parts; item++) {
    const int64_t panel = item / parts, first = item % parts * ROWS_OF_ITEM;
    const int64_t end = least(first + ROWS_OF_ITEM, num_rows);
    for (int64_t row = first; row < end; row += ROWS) {
      const int count = least(ROWS, end - row);
      const Element* rows[ROWS];
      for (int r = 0; r < count; r++) rows[r] = x + (row + r) * x_row;
      Outputs outputs[ROWS];
      multiply(count, rows, panels + panel * PANEL * num_inputs, num_inputs, outputs);
      for (int v = 0; v < VECTORS; v++) {
        const int64_t output = panel * PANEL + v * LANES, left = num_outputs - output;
        if (left <= 0) break;
        const Floats added = bias ? load_some(bias + output, left) : Floats{};
        for (int r = 0; r < count; r++)
          store_some(y + (row + r) * num_outputs + output, outputs[r][v] + added, left);
      }
    }
  }
}

}  // namespace

// x: [T, in] with rows x_row apart, panels: of [out, in], bias: [out] or null, y: [T, out].
extern "C" void linear_bfloat16(int64_t num_rows, int64_t num_inputs, int64_t num_outputs,
                                int64_t x_row, const void* x, const void* panels, const void* bias,
                                void* y, int num_threads) {
  linear(num_rows, num_inputs, num_outputs, x_row, (const BFloat16*)x, (const BFloat16*)panels,
         (const BFloat16*)bias, (BFloat16*)y, num_threads);
}

extern "C" void linear_float32(int64_t num_rows, int64_t num_inputs, int64_t num_outputs,
                               int64_t x_row, const void* x, const void* panels, const void* bias,
                               void* y, int num_threads) {
  linear(num_rows, num_inputs, num_outputs, x_row, (const float*)x, (const float*)panels,
         (const float*)bias, (float*)y, num_threads);
}
