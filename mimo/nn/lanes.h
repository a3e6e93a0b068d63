// Sixteen numbers at a time, as the vectors of GCC and Clang: in as many registers as it takes.
//
// All arithmetic is float32; bfloat16 is a way to store it.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct BFloat16 {
  uint16_t bits;
};

inline Floats all(float x) { return x - Floats{}; }

template <typename To, typename From>
inline To copy_bits(const From* from) {
  To to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

inline Floats load(const float* from) { return copy_bits<Floats>(from); }

inline Floats load(const BFloat16* from) {
  return (Floats)(__builtin_convertvector(copy_bits<Halves>(from), Words) << 16);
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// Rounded to the nearest, ties to even; a NaN stays one.
inline void store(BFloat16* to, Floats x) {
  const Words bits = (Words)x, is_nan = (Words)(x != x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words high = (rounded & ~is_nan) | (0x7fc0 & is_nan);
  const Halves halves = __builtin_convertvector(high, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

// The first `count` lanes, for the end of a row whose length is no multiple of LANES.
template <typename Element>
inline Floats load_some(const Element* from, int64_t count) {
  if (count >= LANES) return load(from);
  Element padded[LANES] = {};
  std::memcpy(padded, from, count * sizeof(Element));
  return load(padded);
}

template <typename Element>
inline void store_some(Element* to, Floats x, int64_t count) {
  if (count >= LANES) return store(to, x);
  Element padded[LANES];
  store(padded, x);
  std::memcpy(to, padded, count * sizeof(Element));
}

// e^x for x <= 0 with an error of about one unit in the last place, 0 below -87. Splits x into a
// multiple of ln 2 and a rest, with the polynomial of Cephes' expf (Moshier) for the rest.
inline Floats exponential(Floats x) {
  const Floats scaled = x * 1.44269504f;
  const Floats bounded = scaled > -126.0f ? scaled : all(-126.0f);  // also for a NaN
  const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction
  const Floats power = (bounded + to_integer) - to_integer;
  const Floats rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  Floats y = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * (rest * rest) + rest + 1.0f;
  const Ints exponent = (__builtin_convertvector(power, Ints) + 127) << 23;
  const Ints too_small = x < -87.0f;
  return (Floats)((Ints)(y * (Floats)exponent) & ~too_small);
}

}  // namespace
