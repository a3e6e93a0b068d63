// Products of rows with a weight that lies in panels of 64 outputs; panels.py makes them.
//
// A panel holds, for one input after the other (bfloat16: one pair of inputs after the other), the
// weights of its 64 outputs. A product reads it from its first byte to its last, whatever the number
// of rows. Sums are float32, each one a chain of its own over the inputs, so the bits of an output
// do not depend on the other rows.

#pragma once

#include "lanes.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int VECTORS = 4;  // of a panel
constexpr int PANEL = VECTORS * LANES;
constexpr int ROWS = 6;  // at a time: 24 sums, 4 weights and an input fit into 32 registers

template <typename Element>
constexpr int INPUTS = 4 / sizeof(Element);  // that lie together: one float32 or two bfloat16

typedef Floats Outputs[VECTORS];

inline void multiply_add(Floats& sum, const float* x, Words weights) { sum += *x * (Floats)weights; }

inline void multiply_add(Floats& sum, const BFloat16* x, Words weights) {
  const uint32_t pair = copy_bits<uint32_t>(x);
#if defined(__AVX512BF16__)
  sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights);
#else
  const uint32_t low = pair << 16, high = pair & 0xffff0000;
  sum += copy_bits<float>(&low) * (Floats)(weights << 16);
  sum += copy_bits<float>(&high) * (Floats)(weights & 0xffff0000);
#endif
}

// x: R rows of num_inputs -> outputs: [R][64].
template <int R, typename Element>
inline void multiply_rows(const Element* const* x, const Element* panel, int64_t num_inputs,
                          Outputs* outputs) {
  Floats sums[R][VECTORS] = {};
  for (int64_t i = 0; i < num_inputs; i += INPUTS<Element>) {
    Words weights[VECTORS];
    for (int v = 0; v < VECTORS; v++, panel += LANES * INPUTS<Element>)
      weights[v] = copy_bits<Words>(panel);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECTORS; v++) multiply_add(sums[r][v], x[r] + i, weights[v]);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) outputs[r][v] = sums[r][v];
}

// The same for up to ROWS rows.
template <typename Element>
inline void multiply(int num_rows, const Element* const* x, const Element* panel,
                     int64_t num_inputs, Outputs* outputs) {
  static_assert(ROWS == 6);
  switch (num_rows) {
    case 1: return multiply_rows<1>(x, panel, num_inputs, outputs);
    case 2: return multiply_rows<2>(x, panel, num_inputs, outputs);
    case 3: return multiply_rows<3>(x, panel, num_inputs, outputs);
    case 4: return multiply_rows<4>(x, panel, num_inputs, outputs);
    case 5: return multiply_rows<5>(x, panel, num_inputs, outputs);
    default: return multiply_rows<6>(x, panel, num_inputs, outputs);
  }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace
