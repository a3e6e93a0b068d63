// Attention over cached keys, one query row after the other.
//
// A row reads its keys and values where they lie, block by block, and keeps a running softmax
// (Milakov and Gimelshein, 2018) over chunks of keys. All arithmetic is float32. The chunks begin at
// multiples of CHUNK positions, and no row shares a sum with another one, so the bits of a row depend
// on its own query and keys and on nothing else in the batch.

#include <type_traits>

#include "lanes.h"

namespace {

constexpr int CHUNK = 128;         // keys; their scores stay in the first cache
constexpr int MAX_HEAD_DIM = 512;  // native.py knows it, too

template <typename Element>
inline void prefetch(const Element* row, int64_t width) {
  for (int64_t d = 0; d < width; d += 64 / (int64_t)sizeof(Element)) __builtin_prefetch(row + d);
}

// Lane i of the result is the sum of the lanes of x[i].
inline Floats sums(const Floats* x) {
  Floats a[8], b[4], c[2];
#define PICK(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
  for (int i = 0; i < 8; i++)
    a[i] = PICK(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PICK(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int i = 0; i < 4; i++)
    b[i] = PICK(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           PICK(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int i = 0; i < 2; i++)
    c[i] = PICK(b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           PICK(b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  return PICK(c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         PICK(c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#undef PICK
}

inline float sum(Floats x) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
}

inline float largest(Floats x) {
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
}

}  // namespace

// Sizes and strides; strides count elements. native.py has the same fields.
struct Shape {
  int64_t num_rows, num_heads, num_kv_heads, head_dim, v_head_dim;
  int64_t block_size;
  int64_t left;  // keys visible before the query's own; -1 is all of them
  int64_t q_row, table_row;
  int64_t k_block, k_offset, k_head;
  int64_t v_block, v_offset, v_head;
  float scale;
};

namespace {

// G query heads of one row that read the same keys. q: [G, H], out: [G, Hv], sinks: [G] or null.
template <typename Element, int G>
void attend(const Shape& shape, const Element* q, const Element* k, const Element* v,
            const int32_t* table, int64_t position, const float* sinks, Element* out) {
  const int64_t H = shape.head_dim, Hv = shape.v_head_dim;
  const int64_t first = shape.left < 0 || position < shape.left ? 0 : position - shape.left;

  float query[G * MAX_HEAD_DIM], sum_of_values[G * MAX_HEAD_DIM];
  float top[G], total[G];  // the largest score so far, and the sum of e^(score - top)
  for (int g = 0; g < G; g++) {
    for (int64_t d = 0; d < H; d += LANES) store(query + g * H + d, load(q + g * H + d) * shape.scale);
    for (int64_t d = 0; d < Hv; d += LANES) store(sum_of_values + g * Hv + d, Floats{});
    top[g] = sinks ? sinks[g] : -__builtin_inff();
    total[g] = sinks ? 1.0f : 0.0f;
  }

  for (int64_t chunk = first / CHUNK * CHUNK; chunk <= position; chunk += CHUNK) {
    const int64_t start = chunk < first ? first : chunk;
    const int64_t stop = chunk + CHUNK <= position ? chunk + CHUNK : position + 1;
    const int64_t num_keys = stop - start;
    const int64_t num_padded = (num_keys + LANES - 1) / LANES * LANES;

    const Element *keys[CHUNK + LANES], *values[CHUNK];
    int64_t block = start / shape.block_size, offset = start % shape.block_size;
    for (int64_t s = 0; s < num_keys; s++) {
      keys[s] = k + table[block] * shape.k_block + offset * shape.k_offset;
      values[s] = v + table[block] * shape.v_block + offset * shape.v_offset;
      if (++offset == shape.block_size) block++, offset = 0;
    }
    for (int64_t s = num_keys; s < num_padded + LANES; s++) keys[s] = keys[0];
    for (int64_t s = num_keys; s < num_padded; s++) values[s] = values[0];

    float weights[G][CHUNK], shrink[G];
    for (int64_t s = 0; s < num_padded; s += LANES) {
      Floats products[G][LANES];
      for (int i = 0; i < LANES; i++) {
        // What is needed soon: the keys after these, and the values of these.
        prefetch(keys[s + i + LANES], H);
        prefetch(values[s + i], Hv);
        Floats dot[G] = {};
        for (int64_t d = 0; d < H; d += LANES) {
          const Floats key = load(keys[s + i] + d);
          for (int g = 0; g < G; g++) dot[g] += load(query + g * H + d) * key;
        }
        for (int g = 0; g < G; g++) products[g][i] = dot[g];
      }
      for (int g = 0; g < G; g++) store(weights[g] + s, sums(products[g]));
    }
    for (int g = 0; g < G; g++) {
      for (int64_t s = num_keys; s < num_padded; s++) weights[g][s] = -__builtin_inff();
      Floats most = all(top[g]);
      for (int64_t s = 0; s < num_padded; s += LANES) {
        const Floats score = load(weights[g] + s);
        most = score > most ? score : most;
      }
      const float new_top = largest(most);
      Floats added = {};
      for (int64_t s = 0; s < num_padded; s += LANES) {
        const Floats weight = exponential(load(weights[g] + s) - new_top);
        store(weights[g] + s, weight);
        added += weight;
      }
      shrink[g] = exponential(all(top[g] - new_top))[0];
      total[g] = total[g] * shrink[g] + sum(added);
      top[g] = new_top;
    }

    const auto add_values = [&](int64_t d, auto width) {
      constexpr int W = decltype(width)::value;
      Floats part[G][W];
      for (int g = 0; g < G; g++)
        for (int w = 0; w < W; w++) part[g][w] = load(sum_of_values + g * Hv + d + w * LANES) * shrink[g];
      for (int64_t s = 0; s < num_keys; s++)
        for (int w = 0; w < W; w++) {
          const Floats value = load(values[s] + d + w * LANES);
          for (int g = 0; g < G; g++) part[g][w] += weights[g][s] * value;
        }
      for (int g = 0; g < G; g++)
        for (int w = 0; w < W; w++) store(sum_of_values + g * Hv + d + w * LANES, part[g][w]);
    };
    int64_t d = 0;
    for (; d + 4 * LANES <= Hv; d += 4 * LANES) add_values(d, std::integral_constant<int, 4>{});
    for (; d < Hv; d += LANES) add_values(d, std::integral_constant<int, 1>{});
  }

  for (int g = 0; g < G; g++)
    for (int64_t d = 0; d < Hv; d += LANES)
      store(out + g * Hv + d, load(sum_of_values + g * Hv + d) / total[g]);
}

template <typename Element>
void attend_all(const Shape& shape, const void* queries, const void* keys, const void* values,
                const int32_t* tables, const int32_t* requests, const int32_t* positions,
                const float* sinks, void* outputs, int num_threads) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic) if (num_threads > 1)
  for (int64_t item = 0; item < shape.num_rows * shape.num_kv_heads; item++) {
    const int64_t row = item / shape.num_kv_heads, kv_head = item % shape.num_kv_heads;
    const Element* q = (const Element*)queries + row * shape.q_row;
    const Element* k = (const Element*)keys + kv_head * shape.k_head;
    const Element* v = (const Element*)values + kv_head * shape.v_head;
    Element* out = (Element*)outputs + row * shape.num_heads * shape.v_head_dim;
    int64_t head = kv_head * group;
    const int64_t end = head + group;
    const auto advance = [&](auto heads) {
      constexpr int G = decltype(heads)::value;
      for (; head + G <= end; head += G)
        attend<Element, G>(shape, q + head * shape.head_dim, k, v,
                           tables + requests[row] * shape.table_row, positions[row],
                           sinks ? sinks + head : nullptr, out + head * shape.v_head_dim);
    };
    advance(std::integral_constant<int, 4>{});
    advance(std::integral_constant<int, 2>{});
    advance(std::integral_constant<int, 1>{});
  }
}

}  // namespace

// queries: [T, N, H] with rows q_row apart, outputs: [T, N, Hv], tables: [B, max_blocks],
// requests and positions: [T], sinks: [N] or null.
extern "C" void attend_bfloat16(const Shape* shape, const void* queries, const void* keys,
                                const void* values, const int32_t* tables, const int32_t* requests,
                                const int32_t* positions, const float* sinks, void* outputs,
                                int num_threads) {
  attend_all<BFloat16>(*shape, queries, keys, values, tables, requests, positions, sinks, outputs,
                       num_threads);
}

extern "C" void attend_float32(const Shape* shape, const void* queries, const void* keys,
                               const void* values, const int32_t* tables, const int32_t* requests,
                               const int32_t* positions, const float* sinks, void* outputs,
                               int num_threads) {
  attend_all<float>(*shape, queries, keys, values, tables, requests, positions, sinks, outputs,
                    num_threads);
}
