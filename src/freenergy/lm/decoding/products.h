// Products with candidates side by side, and the few functions that are applied to them.
//
//     y[o, n] = Σ_i W[o, i] · x[i, n]
//
// Everything that belongs to a candidate lies in blocks of 64 candidates, [features, 64]: an operation on a feature is
// an operation on whole vectors, whatever it is, and nothing is ever summed up across a vector. A tile of 6 outputs of
// a block stays in registers while the inputs pass by; the weights are read where they lie.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>

namespace {

// As wide as the registers: wider vectors would be taken apart element by element.
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
typedef float Vector __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef int32_t Wholes __attribute__((vector_size(VECTOR_BYTES), may_alias));

constexpr int64_t kWidth = VECTOR_BYTES / 4;   // candidates in a vector
constexpr int64_t kLanes = 64;                 // candidates in a block
constexpr int64_t kVectors = kLanes / kWidth;  // vectors of one feature of a block
constexpr int64_t kTile = 6;                   // outputs at once
constexpr int64_t kDepth = 256;                // inputs at once: weights of a tile stay in the first cache
constexpr int64_t kChunk = 4 * kTile;          // outputs that a thread takes on
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t kAtOnce = 4;  // vectors of a feature in registers: 24 of 32 with a tile's
#else
constexpr int64_t kAtOnce = 2;  // 12 of 16
#endif

inline Vector* vectors(float* x) { return reinterpret_cast<Vector*>(x); }
inline const Vector* vectors(const float* x) { return reinterpret_cast<const Vector*>(x); }

// A matrix of weights, wherever its elements lie.
struct Matrix {
  const float* at;
  int64_t by_output, by_input;
  Matrix from(int64_t output, int64_t input) const {
    return {at + output * by_output + input * by_input, by_output, by_input};
  }
};

// exp by 2^n · e^r, |r| ≤ ln 2 / 2, with a polynomial for e^r; 0 below the smallest normal number. Adding 1.5 · 2^23
// rounds to a whole number and leaves it in the low bits, from where it is shifted into the exponent.
template <typename T, typename Whole>
inline T exp_as(T x) {
  const T least = T{} - 87.0f, most = T{} + 88.0f;
  T clamped = x < least ? least : x;
  clamped = clamped > most ? most : clamped;
  const T shifted = clamped * 1.44269504088896341f + 12582912.0f;
  const T n = shifted - 12582912.0f;
  const T r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  T e = T{} + 1.9875691500e-4f;
  e = e * r + 1.3981999507e-3f;
  e = e * r + 8.3334519073e-3f;
  e = e * r + 4.1665795894e-2f;
  e = e * r + 1.6666665459e-1f;
  e = e * r + 5.0000001201e-1f;
  e = (e * r) * r + (r + 1.0f);
  Whole exponent, bits;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  std::memcpy(&bits, &e, sizeof bits);
  bits += exponent << 23;
  std::memcpy(&e, &bits, sizeof e);
  return x < least ? T{} : e;
}

inline float exp_of(float x) { return exp_as<float, int32_t>(x); }
inline Vector exp_of(Vector x) { return exp_as<Vector, Wholes>(x); }
inline Vector larger_of(Vector a, Vector b) { return a < b ? b : a; }

// kOutputs outputs of one block, ``adds`` to what is there or not.
template <int64_t kOutputs>
void tile(Matrix w, int64_t depth, const float* x, float* y, bool adds) {
  for (int64_t first = 0; first < kVectors; first += kAtOnce) {
    Vector sum[kOutputs][kAtOnce];
    for (int64_t o = 0; o < kOutputs; ++o)
      for (int64_t c = 0; c < kAtOnce; ++c) sum[o][c] = adds ? vectors(y)[o * kVectors + first + c] : Vector{};
    const float* weight = w.at;
    for (int64_t i = 0; i < depth; ++i, weight += w.by_input) {
      Vector in[kAtOnce];
      for (int64_t c = 0; c < kAtOnce; ++c) in[c] = vectors(x)[i * kVectors + first + c];
#pragma GCC unroll 6
      for (int64_t o = 0; o < kOutputs; ++o)
#pragma GCC unroll 4
        for (int64_t c = 0; c < kAtOnce; ++c) sum[o][c] += weight[o * w.by_output] * in[c];
    }
    for (int64_t o = 0; o < kOutputs; ++o)
      for (int64_t c = 0; c < kAtOnce; ++c) vectors(y)[o * kVectors + first + c] = sum[o][c];
  }
}

// The last outputs may be fewer than a tile has.
inline void any_tile(int64_t outputs, Matrix w, int64_t depth, const float* x, float* y, bool adds) {
  switch (outputs) {
    case 1: return tile<1>(w, depth, x, y, adds);
    case 2: return tile<2>(w, depth, x, y, adds);
    case 3: return tile<3>(w, depth, x, y, adds);
    case 4: return tile<4>(w, depth, x, y, adds);
    case 5: return tile<5>(w, depth, x, y, adds);
    default: return tile<kTile>(w, depth, x, y, adds);
  }
}

// Some outputs of all blocks; a block of x or y begins ``x_step`` or ``y_step`` after the one before.
inline void multiply(Matrix w, int64_t outputs, int64_t inputs, const float* x, int64_t x_step, float* y,
                     int64_t y_step, int64_t blocks, bool adds) {
  for (int64_t i = 0; i < inputs; i += kDepth)
    for (int64_t o = 0; o < outputs; o += kTile)
      for (int64_t b = 0; b < blocks; ++b)
        any_tile(std::min(kTile, outputs - o), w.from(o, i), std::min(kDepth, inputs - i), x + b * x_step + i * kLanes,
                 y + b * y_step + o * kLanes, adds || i > 0);
}

}  // namespace
