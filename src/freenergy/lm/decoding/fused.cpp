// A decoding step: norms, products, attention and the draw, each in few passes over memory.
//
//     x ← x + out(attention(qkv(norm(x)))),     x ← x + down(act(up(norm(x)))),     token ~ softmax(head · norm(x))
//
// Plain C functions on float arrays; the caller owns all memory. Work is shared among as many threads
// as the caller says, in portions that are taken one after the other: a core that is busy elsewhere holds up nobody.
//
// Legend: B contexts, N candidates of each, in C blocks of 64 lanes (the last one may have idle lanes), K groups of G
// heads, D features of a head, P prefix tokens, T suffix tokens so far, L of them in the end. Blocks of activations are
// [B, C, features, 64], keys and values of the suffix [B, C, K, L, D, 64], of the prefix [B, K, P, D].

#include "products.h"

namespace {

constexpr int64_t kBlock = 256;  // tokens in a block of the search, as in the plain way

constexpr int64_t kNear = 3 << 16;  // numbers that stay in the second cache

enum Finish { kPlain, kAdd, kGelu, kSwiglu };

// x · (1 + tanh(c·(x + 0.044715·x³))) / 2; the half of 1 + tanh z is sigmoid(2z).
inline Vector gelu_of(Vector x) {
  return x / (1.0f + exp_of(-x * (1.5957691216057308f + 0.07135481282552399f * x * x)));
}

// Add the bias and apply what is left to do, while the numbers are near. ``through`` is what a gate lets through.
void finish(float* y, const float* through, const float* bias, const float* through_bias, int64_t outputs, Finish how) {
  if (!bias && (how == kPlain || how == kAdd)) return;
  for (int64_t i = 0; i < outputs * kVectors; ++i) {
    const Vector v = vectors(y)[i] + (bias ? bias[i / kVectors] : 0.0f);
    if (how == kGelu)
      vectors(y)[i] = gelu_of(v);
    else if (how == kSwiglu)
      vectors(y)[i] =
          v * (vectors(through)[i] + (through_bias ? through_bias[i / kVectors] : 0.0f)) / (1.0f + exp_of(-v));
    else
      vectors(y)[i] = v;
  }
}

// x, turned by the angles of its place: features d and d + half are the two coordinates of a point.
void turn(const float* x, const float* cosine, const float* sine, int64_t half, int64_t D, float factor, float* out) {
  for (int64_t d = 0; d < half; ++d) {
    const float *a = x + d * kLanes, *b = a + half * kLanes, c = factor * cosine[d], s = factor * sine[d];
    float *to = out + d * kLanes, *also = to + half * kLanes;
#pragma omp simd
    for (int64_t n = 0; n < kLanes; ++n) {
      to[n] = a[n] * c - b[n] * s;
      also[n] = b[n] * c + a[n] * s;
    }
  }
#pragma omp simd
  for (int64_t i = 2 * half * kLanes; i < D * kLanes; ++i) out[i] = factor * x[i];
}

// scores[t] = q · key[t]
void score(const float* q, const float* keys, int64_t T, int64_t D, float* scores) {
  for (int64_t t = 0; t < T; ++t) {
    const Vector* key = vectors(keys + t * D * kLanes);
    Vector sum[kVectors] = {};
    for (int64_t d = 0; d < D; ++d)
#pragma GCC unroll 16
      for (int64_t c = 0; c < kVectors; ++c) sum[c] += vectors(q)[d * kVectors + c] * key[d * kVectors + c];
    for (int64_t c = 0; c < kVectors; ++c) vectors(scores)[t * kVectors + c] = sum[c];
  }
}

// out += Σ_t weights[t] · value[t], four tokens at a time
void mix(const float* weights, const float* values, int64_t T, int64_t D, float* out) {
  for (int64_t t = 0; t < T; t += 4)
    for (int64_t first = 0; first < kVectors; first += kAtOnce) {
      Vector weight[4][kAtOnce];
      const Vector* value[4];
      for (int64_t i = 0; i < 4; ++i) {  // behind the end: the last token, with no weight
        value[i] = vectors(values + std::min(t + i, T - 1) * D * kLanes);
        for (int64_t c = 0; c < kAtOnce; ++c)
          weight[i][c] = t + i < T ? vectors(weights)[(t + i) * kVectors + first + c] : Vector{};
      }
      for (int64_t at = first; at < D * kVectors; at += kVectors)
#pragma GCC unroll 4
        for (int64_t c = 0; c < kAtOnce; ++c)
          vectors(out)[at + c] += (weight[0][c] * value[0][at + c] + weight[1][c] * value[1][at + c]) +
                                  (weight[2][c] * value[2][at + c] + weight[3][c] * value[3][at + c]);
    }
}

// Vectors of numbers, one below the other, ``count`` of them: the largest.
inline Vector largest_of(const Vector* x, int64_t count) {
  Vector largest = x[0];
  for (int64_t i = 1; i < count; ++i) largest = larger_of(largest, x[i * kVectors]);
  return largest;
}

// Scores become exp(score − largest), in place; 1 / Σ of them goes to ``share``.
void powers(float* scores, int64_t count, float* share) {
  for (int64_t c = 0; c < kVectors; ++c) {
    Vector *x = vectors(scores) + c, sum = {};
    const Vector largest = largest_of(x, count);
    for (int64_t i = 0; i < count; ++i) sum += x[i * kVectors] = exp_of(x[i * kVectors] - largest);
    vectors(share)[c] = 1.0f / sum;
  }
}

// Of a block of the vocabulary: the largest logit, Σ exp(logit − largest) and, where asked for (not null), Σ exp ·
// (logit − largest), lane by lane.
void weigh(const float* logits, int64_t count, float* largest, float* sums, float* products) {
  for (int64_t c = 0; c < kVectors; ++c) {
    const Vector *x = vectors(logits) + c, top = largest_of(x, count);
    Vector sum = {}, product = {};
    for (int64_t v = 0; v < count; ++v) sum += exp_of(x[v * kVectors] - top);
    if (products)
      for (int64_t v = 0; v < count; ++v) {
        const Vector below = larger_of(x[v * kVectors] - top, Vector{} - 1e30f);
        product += exp_of(below) * below;
      }
    vectors(largest)[c] = top;
    vectors(sums)[c] = sum;
    if (products) vectors(products)[c] = product;
  }
}

// What ``fused_draw`` knows of one candidate: its logits, and numbers of each of M blocks of the vocabulary.
struct Seen {
  const float *logits, *largest, *sums, *products;
  int64_t V, M;
};

// The token at u by the inverse of the cumulative sum, first the block and then inside it; log P of it, the entropy.
int64_t choose(const Seen& seen, double u, double* masses, double* log_p, double* entropy) {
  float top = seen.largest[0];
  for (int64_t m = 1; m < seen.M; ++m) top = std::max(top, seen.largest[m * kLanes]);
  double total = 0, products = 0;
  for (int64_t m = 0; m < seen.M; ++m) {
    const double below = seen.largest[m * kLanes] - top, factor = below < -200 ? 0.0 : std::exp(below);
    total += masses[m] = factor * seen.sums[m * kLanes];
    if (entropy && factor > 0) products += factor * (seen.products[m * kLanes] + below * seen.sums[m * kLanes]);
  }
  const double target = u * total;
  double before = 0;
  int64_t m = 0, last = 0;  // the last block with any mass, where rounding leaves the target behind the end
  for (double sum = 0; m < seen.M && sum + masses[m] <= target; before = sum += masses[m++])
    if (masses[m] > 0) last = m;
  if (m == seen.M) {
    m = last;
    before = total - masses[m];
  }
  const int64_t first = m * kBlock, end = std::min(first + kBlock, seen.V);
  int64_t chosen = first;
  double sum = before;
  for (int64_t v = first; v < end && sum <= target; ++v) {
    const float e = exp_of(seen.logits[v * kLanes] - top);
    if (e > 0) chosen = v;
    sum += e;
  }
  *log_p = static_cast<double>(seen.logits[chosen * kLanes] - top) - std::log(total);
  if (entropy) *entropy = std::log(total) - products / total;
  return chosen;
}

}  // namespace

extern "C" {

// LayerNorm; RMSNorm where there is no bias.
void fused_norm(const float* x, const float* weight, const float* bias, float* out, int64_t blocks, int64_t E,
                float eps, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t task = 0; task < blocks * kVectors; ++task) {
    const int64_t at = task / kVectors * E * kVectors + task % kVectors;
    const Vector* from = vectors(x) + at;
    Vector* to = vectors(out) + at;
    Vector mean = {}, squares = {}, scale;
    if (bias) {
      for (int64_t e = 0; e < E; ++e) mean += from[e * kVectors];
      mean /= static_cast<float>(E);
    }
    for (int64_t e = 0; e < E; ++e) squares += (from[e * kVectors] - mean) * (from[e * kVectors] - mean);
    for (int64_t n = 0; n < kWidth; ++n) scale[n] = 1.0f / std::sqrt(squares[n] / static_cast<float>(E) + eps);
    for (int64_t e = 0; e < E; ++e)
      to[e * kVectors] = (from[e * kVectors] - mean) * scale * weight[e] + (bias ? bias[e] : 0.0f);
  }
}

// y = W·x + b, y += W·x + b, or its activation; SwiGLU has twice the outputs, the gate and then what it lets through.
// Where x is large, some of its features at a time are multiplied with everything, so that they stay in the cache.
void fused_affine(const float* weight, int64_t by_output, int64_t by_input, const float* bias, const float* x, float* y,
                  int64_t blocks, int64_t inputs, int64_t outputs, int64_t how, int threads) {
  const Matrix w = {weight, by_output, by_input};
  const int64_t x_step = inputs * kLanes, y_step = outputs * kLanes, aside = kChunk * kLanes;
  const int64_t few = std::max(kNear / (blocks * kLanes) / kDepth, int64_t{1}) * kDepth;
  const int64_t span = how == kSwiglu ? inputs : std::min(few, inputs);
#pragma omp parallel num_threads(threads)
  {
    float* through = how == kSwiglu ? new (std::align_val_t(64)) float[blocks * aside] : nullptr;
    for (int64_t i = 0; i < inputs; i += span) {
      const int64_t depth = std::min(span, inputs - i);
#pragma omp for schedule(dynamic)
      for (int64_t o = 0; o < outputs; o += kChunk) {
        const int64_t some = std::min(kChunk, outputs - o);
        multiply(w.from(o, i), some, depth, x + i * kLanes, x_step, y + o * kLanes, y_step, blocks, how == kAdd || i);
        if (through) multiply(w.from(outputs + o, 0), some, inputs, x, x_step, through, aside, blocks, false);
        for (int64_t b = 0; b < blocks && i + depth == inputs; ++b)
          finish(y + b * y_step + o * kLanes, through + b * aside, bias ? bias + o : nullptr,
                 bias && through ? bias + outputs + o : nullptr, some, static_cast<Finish>(how));
      }
    }
    if (through) operator delete[](through, std::align_val_t(64));
  }
}

// Every candidate's new token looks at its context, its own past and itself, whose key and value go to place T − 1.
// ``at`` says where the features of q, k and v begin and how far apart heads are: {q, step, k, step, v, step}.
void fused_attend(const float* qkv, int64_t features, const int64_t* at, const float* cosine, const float* sine,
                  int64_t half, float scaling, const float* prefix_keys, const float* prefix_values,
                  const int64_t* lengths, float* keys, float* values, float* out, int64_t B, int64_t C, int64_t K,
                  int64_t G, int64_t D, int64_t P, int64_t T, int64_t L, int threads) {
  const int64_t head = D * kLanes;
#pragma omp parallel num_threads(threads)
  {
    float* q = new (std::align_val_t(64)) float[(D + P + T) * kLanes];
    float* scores = q + head;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < B * C * K; ++task) {
      const int64_t block = task / K, k = task % K, b = block / C, last = (task * L + T - 1) * head;
      const float* from = qkv + block * features * kLanes;
      turn(from + (at[2] + k * at[3]) * kLanes, cosine + b * half, sine + b * half, half, D, 1.0f, keys + last);
      std::memcpy(values + last, from + (at[4] + k * at[5]) * kLanes, head * sizeof(float));
    }
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < B * C * K * G; ++task) {
      const int64_t group = task / G, block = group / K, k = group % K, b = block / C, seen = lengths[b];
      const float *own_keys = keys + group * L * head, *own_values = values + group * L * head;
      const Matrix past = {prefix_keys + (b * K + k) * P * D, D, 1};
      const Matrix shown = {prefix_values + (b * K + k) * P * D, 1, D};
      const float* from = qkv + (block * features + at[0] + task % (K * G) * at[1]) * kLanes;
      alignas(64) float share[kLanes];
      float* to = out + task * head;
      turn(from, cosine + b * half, sine + b * half, half, D, scaling, q);
      multiply(past, seen, D, q, 0, scores, 0, 1, false);
      score(q, own_keys, T, D, scores + seen * kLanes);
      powers(scores, seen + T, share);
      multiply(shown, D, seen, scores, 0, to, 0, 1, false);
      mix(scores + seen * kLanes, own_values, T, D, to);
      for (int64_t i = 0; i < D * kVectors; ++i) vectors(to)[i] *= vectors(share)[i % kVectors];
    }
    operator delete[](q, std::align_val_t(64));
  }
}

// A token for each lane by the inverse of the cumulative sum at u, with log P and, where asked for (not null), the
// entropy and the log of its rank. ``logits`` is room for [blocks, V, 64], ``numbers`` for [3, blocks, M, 64].
void fused_draw(const float* weight, int64_t by_output, int64_t by_input, const float* bias, const float* x,
                const double* u, int64_t blocks, int64_t E, int64_t V, float* logits, float* numbers, int64_t* tokens,
                double* log_p, double* entropy, double* log_rank, int threads) {
  const int64_t M = (V + kBlock - 1) / kBlock, all = blocks * M * kLanes;
  const Matrix w = {weight, by_output, by_input};
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t m = 0; m < M; ++m) {
    const int64_t first = m * kBlock, some = std::min(kBlock, V - first);
    float* y = logits + first * kLanes;
    multiply(w.from(first, 0), some, E, x, E * kLanes, y, V * kLanes, blocks, false);
    for (int64_t b = 0; b < blocks; ++b) {
      float *part = y + b * V * kLanes, *number = numbers + (b * M + m) * kLanes;
      if (bias) finish(part, nullptr, bias + first, nullptr, some, kPlain);
      weigh(part, some, number, number + all, entropy ? number + 2 * all : nullptr);
    }
  }
#pragma omp parallel num_threads(threads)
  {
    double* masses = new double[M];
#pragma omp for schedule(dynamic, 16)
    for (int64_t r = 0; r < blocks * kLanes; ++r) {
      const int64_t b = r / kLanes, n = r % kLanes;
      const float *row = logits + b * V * kLanes + n, *number = numbers + b * M * kLanes + n;
      const Seen seen = {row, number, number + all, number + 2 * all, V, M};
      tokens[r] = choose(seen, u[r], masses, log_p + r, entropy ? entropy + r : nullptr);
      if (!log_rank) continue;
      int64_t rank = 1;
      for (int64_t v = 0; v < V; ++v) rank += row[v * kLanes] > row[tokens[r] * kLanes];
      log_rank[r] = std::log(static_cast<double>(rank));
    }
    delete[] masses;
  }
}

}  // extern "C"
