// The sums of linear chains, compiled. R sequences at a time, K labels in vectors:
//
//   forward     s_t(k) = sum_j e_{t-1}(j) W_jk,   e_t = s_t exp(x_t - m_t) / n_t,   W = exp(A - max A),   m_t = max x_t
//               log Z  = sum_t (m_t + log n_t) + (L - 1) max A
//   backward    p_{L-1} = g e_{L-1},   q_t = p_t / s_t,   p_{t-1}(j) = e_{t-1}(j) sum_k W_jk q_t(k),   dA = W o sum_t e_{t-1} q_t'
//   best path   d_t(k) = x_t(k) + max_j (d_{t-1}(j) + A_jk), less its maximum now and then; the maximisers are looked up backwards
//
// x is -inf where a label is forbidden and A where a pair is. E and S are [B, T, P], P = K rounded up to whole vectors,
// with zeros in the padding of E. Rows are grouped by length, and a group runs until its longest row ends. Nothing is
// written to E and S beyond a row's end, and nothing is read there either.
//
// Range. With all pairs allowed and a spread of A up to ``spread``, a label that underflows in e cannot matter: its future
// is at most exp(spread) times better than that of the others. Otherwise every label that a path can reach is watched, and
// a row in which one falls below ``least_s`` or ``least_e`` is marked OUT_OF_RANGE, for the caller to do again.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

enum Status { FINE = 0, OUT_OF_RANGE = 1, CLOSED = 2, BAD = 3 };

template <class F> struct Lanes;
template <> struct Lanes<float> {
    typedef float vec __attribute__((vector_size(64)));
    typedef int32_t bits __attribute__((vector_size(64)));
    static constexpr int width = 16, shift = 23, bias = 127, degree = 7;
    static constexpr float magic = 12582912.0f, high = 0.693359375f, low = -2.12194440e-4f, least = -87.0f;
    static constexpr float least_s = 1e-27f, least_e = 1e-37f, spread = 40;
};
template <> struct Lanes<double> {
    typedef double vec __attribute__((vector_size(64)));
    typedef int64_t bits __attribute__((vector_size(64)));
    static constexpr int width = 8, shift = 52, bias = 1023, degree = 13;
    static constexpr double magic = 6755399441055744.0, high = 6.93147180369123816490e-01, low = 1.90821492927058770002e-10,
                            least = -708.0, least_s = 1e-280, least_e = 1e-300, spread = 300;
};
template <class F> using Vec = typename Lanes<F>::vec;
template <class F> using Bits = typename Lanes<F>::bits;
template <class F> constexpr F INF = std::numeric_limits<F>::infinity();

template <class F> inline Vec<F> load(const F *p) {
    Vec<F> v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class F> inline void store(F *p, Vec<F> v) { std::memcpy(p, &v, sizeof v); }
template <class F> inline Vec<F> all(F value) { return value - Vec<F>{}; }

inline Vec<float> load_first(const float *p, int num, float rest) {
#ifdef __AVX512F__
    return (Vec<float>)_mm512_mask_loadu_ps(_mm512_set1_ps(rest), (__mmask16)((1u << num) - 1), p);
#else
    Vec<float> v = all<float>(rest);
    for (int i = 0; i < num; i++) v[i] = p[i];
    return v;
#endif
}
inline Vec<double> load_first(const double *p, int num, double rest) {
    Vec<double> v = all<double>(rest);
    for (int i = 0; i < num; i++) v[i] = p[i];
    return v;
}
inline void store_first(float *p, Vec<float> v, int num) {
#ifdef __AVX512F__
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << num) - 1), (__m512)v);
#else
    for (int i = 0; i < num; i++) p[i] = v[i];
#endif
}
inline void store_first(double *p, Vec<double> v, int num) {
    for (int i = 0; i < num; i++) p[i] = v[i];
}

// a > b ? a : b, which is one instruction where the compiler is told so
template <class F> inline Vec<F> larger(Vec<F> a, Vec<F> b) {
#ifdef __AVX512F__
    if constexpr (sizeof(F) == 4) return (Vec<F>)_mm512_max_ps((__m512)a, (__m512)b);
    else return (Vec<F>)_mm512_max_pd((__m512d)a, (__m512d)b);
#else
    return a > b ? a : b;
#endif
}

inline Vec<float> turned(Vec<float> v, int by) {
    switch (by) {
    case 8: return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    case 4: return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    case 2: return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    default: return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    }
}
inline Vec<double> turned(Vec<double> v, int by) {
    switch (by) {
    case 4: return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    case 2: return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    default: return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
    }
}
template <class F> inline F largest(Vec<F> v) {
    for (int by = Lanes<F>::width / 2; by; by /= 2) v = larger<F>(v, turned(v, by));
    return v[0];
}
template <class F> inline F total(Vec<F> v) {
    for (int by = Lanes<F>::width / 2; by; by /= 2) v += turned(v, by);
    return v[0];
}

template <class F> inline bool any_of(Bits<F> bits) {
    uint64_t words[8];
    std::memcpy(words, &bits, sizeof bits);
    return words[0] | words[1] | words[2] | words[3] | words[4] | words[5] | words[6] | words[7];
}

constexpr double one_over_factorial(int n) { return n < 2 ? 1.0 : one_over_factorial(n - 1) / n; }

template <class F, int N> inline Vec<F> series(Vec<F> r) {  // sum of r^i / i! from the inside out
    constexpr int i = Lanes<F>::degree - N;
    if constexpr (N == 0) return all<F>((F)one_over_factorial(i));
    else return series<F, N - 1>(r) * r + (F)one_over_factorial(i);
}

// exp of numbers <= 0; exactly 0 below the smallest normal number
template <class F> inline Vec<F> exp_of(Vec<F> x) {
    typedef Lanes<F> l;
    Vec<F> safe = larger<F>(x, all<F>(l::least));
    Vec<F> t = safe * (F)1.4426950408889634 + l::magic;
    Vec<F> n = t - l::magic, r = safe - n * l::high - n * l::low;
    Bits<F> two = ((Bits<F>)t - (Bits<F>)all<F>(l::magic) + l::bias) << l::shift;
    Vec<F> value = series<F, l::degree>(r) * (Vec<F>)two;
    return x > l::least ? value : Vec<F>{};
}

template <class F> struct Batch {
    const F *x, *A, *start, *end;  // [B, T, K], [K, K], [K] or null, [K] or null
    const int64_t *lengths;
    int64_t B, T;
    int K, P, threads;
};

// numbers that begin at a whole cache line, which a vector then never crosses
template <class F> struct Lines {
    std::vector<F> all;

    explicit Lines(size_t size = 0, F value = 0) : all(size + 64 / sizeof(F), value) {}
    size_t size() const { return all.size() - 64 / sizeof(F); }
    F *data() { return reinterpret_cast<F *>((reinterpret_cast<uintptr_t>(all.data()) + 63) & ~(uintptr_t)63); }
};

// memory that a thread keeps from call to call, so that its pages need not be fetched again
template <class F> F *scratch(int place, size_t size) {
    thread_local Lines<F> kept[3];
    if (kept[place].size() < size) kept[place] = Lines<F>(size);
    return kept[place].data();
}

// W = exp(A - max A) or A itself, as rows of P numbers, with its transpose
template <class F> struct Matrix {
    Lines<F> here, across;
    F top = -INF<F>, bottom = INF<F>;
    bool is_bad = false;

    Matrix(const Batch<F> &a, bool is_exp) : here((size_t)(a.P + 3) * a.P, is_exp ? 0 : -INF<F>), across(here.size(), is_exp ? 0 : -INF<F>) {
        for (int i = 0; i < a.K * a.K; i++) {
            top = std::max(top, a.A[i]), bottom = std::min(bottom, a.A[i]);
            is_bad |= !(a.A[i] < INF<F>);
        }
        for (int j = 0; j < a.K; j++)
            for (int k = 0; k < a.K; k++) {
                F value = a.A[(size_t)j * a.K + k];
                if (is_exp) value = value > -INF<F> ? std::exp(value - top) : 0;
                here.data()[(size_t)j * a.P + k] = across.data()[(size_t)k * a.P + j] = value;
            }
    }
};

// out = in * M for R rows of P numbers, C vectors of columns at a time
template <class F, int R, int C> inline void panel(const F *in, const F *M, F *out, int K, int P, int column) {
    Vec<F> sum[R][C] = {};
    for (int j = 0; j < K; j++) {
        Vec<F> m[C];
        for (int c = 0; c < C; c++) m[c] = load(M + (size_t)j * P + column + c * Lanes<F>::width);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sum[r][c] += in[r * P + j] * m[c];
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * P + column + c * Lanes<F>::width, sum[r][c]);
}
template <class F, int R, int C> inline void max_panel(const F *in, const F *M, F *out, int K, int P, int column) {
    Vec<F> best[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) best[r][c] = all<F>(-INF<F>);
    for (int j = 0; j < K; j++) {
        Vec<F> m[C];
        for (int c = 0; c < C; c++) m[c] = load(M + (size_t)j * P + column + c * Lanes<F>::width);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) best[r][c] = larger<F>(best[r][c], m[c] + in[r * P + j]);
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * P + column + c * Lanes<F>::width, best[r][c]);
}
template <class F, int R, bool MAX, int C> inline void columns(const F *in, const F *M, F *out, int K, int P, int column) {
    if constexpr (MAX) max_panel<F, R, C>(in, M, out, K, P, column);
    else panel<F, R, C>(in, M, out, K, P, column);
}
template <class F, int R, bool MAX> void product(const F *in, const F *M, F *out, int K, int P) {
    constexpr int width = Lanes<F>::width;
    int column = 0;
    if constexpr (R <= 4)
        for (; column + 4 * width <= P; column += 4 * width) columns<F, R, MAX, 4>(in, M, out, K, P, column);
    for (; column + 2 * width <= P; column += 2 * width) columns<F, R, MAX, 2>(in, M, out, K, P, column);
    for (; column < P; column += width) columns<F, R, MAX, 1>(in, M, out, K, P, column);
}

// x of one position with start and end, -inf in the padding; returns the maxima. Marks NaN and +inf in wrong.
template <class F> inline Vec<F> read(const Batch<F> &a, int64_t b, int64_t t, F *x, Bits<F> &wrong) {
    constexpr int width = Lanes<F>::width;
    const F *from = a.x + (b * a.T + t) * a.K;
    const F *first = t == 0 ? a.start : nullptr, *last = t == a.lengths[b] - 1 ? a.end : nullptr;
    Vec<F> top = all<F>(-INF<F>);
    for (int c = 0; c < a.P; c += width) {
        int num = std::min(width, a.K - c);
        Vec<F> v = num == width ? load(from + c) : load_first(from + c, num, -INF<F>);
        if (first) v += num == width ? load(first + c) : load_first(first + c, num, (F)0);
        if (last) v += num == width ? load(last + c) : load_first(last + c, num, (F)0);
        wrong |= ~(v < INF<F>);
        top = larger<F>(top, v);
        store(x + c, v);
    }
    return top;
}

// e = s exp(x - m) / n for one row; returns n
template <class F> inline F weigh(const F *x, F m, const F *s, F *e, int P, bool is_first) {
    constexpr int width = Lanes<F>::width;
    Vec<F> sum = {};
    for (int c = 0; c < P; c += width) {
        Vec<F> v = exp_of<F>(load(x + c) - m);
        if (!is_first) v *= load(s + c);
        sum += v;
        store(e + c, v);
    }
    F n = total<F>(sum), inverse = n > 0 ? 1 / n : 0;
    for (int c = 0; c < P; c += width) store(e + c, load(e + c) * inverse);
    return n;
}

// Which labels a path can reach, as 0 and 1, and whether one of them has left the range before it was divided by n.
// Returns false where none can be reached.
template <class F>
inline bool reach(const F *x, const F *from, F *here, const F *s, const F *e, F n, int P, bool is_first, int &status) {
    bool any = false, lost = false;
    for (int k = 0; k < P; k++) {
        bool can = x[k] > -INF<F> && (is_first || from[k] > 0);
        here[k] = can;
        any |= can;
        lost |= can && (e[k] * n < Lanes<F>::least_e || (!is_first && s[k] < Lanes<F>::least_s));
    }
    if (lost) status = OUT_OF_RANGE;
    return any;
}

template <class F> struct Forward : Batch<F> {
    F *E, *S;
    double *log_z;
    int32_t *status;
    const F *W, *pairs;  // [K, P]; pairs is 0 and 1, or null where nothing has to be watched
    double top;
};

template <class F, int R> void forward_rows(const Forward<F> &a, const int64_t *rows, F *work) {
    const int P = a.P;
    F *e = work, *s = e + R * P, *can = s + R * P, *from = can + R * P, *x = from + R * P;
    double product_of_n[R], sum[R];
    int state[R];
    Bits<F> wrong[R] = {};
    std::fill(work, work + 5 * R * P, (F)0);
    std::fill(product_of_n, product_of_n + R, 1.0);
    std::fill(sum, sum + R, 0.0);
    std::fill(state, state + R, (int)FINE);
    for (int64_t t = 0; t < a.lengths[rows[0]]; t++) {
        if (t) product<F, R, false>(e, a.W, s, a.K, P);
        if (t && a.pairs) product<F, R, false>(can, a.pairs, from, a.K, P);
        for (int r = 0; r < R; r++) {
            int64_t b = rows[r];
            if (t >= a.lengths[b] || state[r] == CLOSED) continue;
            F m = largest<F>(read(a, b, t, x, wrong[r])), n = 0;
            if (m == -INF<F>) state[r] = CLOSED;
            else {
                n = weigh(x, m, s + r * P, e + r * P, P, t == 0);
                if (a.pairs && !reach(x, from + r * P, can + r * P, s + r * P, e + r * P, n, P, t == 0, state[r]))
                    state[r] = CLOSED;
                else if (!(n > 0)) state[r] = OUT_OF_RANGE;
            }
            product_of_n[r] *= n;
            sum[r] += m;
            if ((t & 7) == 7 || product_of_n[r] < 1e-20) sum[r] += std::log(product_of_n[r]), product_of_n[r] = 1;
            for (int c = 0; c < P; c += Lanes<F>::width) {
                store(a.E + (b * a.T + t) * P + c, load(e + r * P + c));
                store(a.S + (b * a.T + t) * P + c, load(s + r * P + c));
            }
        }
    }
    for (int r = 0; r < R; r++) {
        int64_t b = rows[r], L = a.lengths[b];
        a.status[b] = state[r] = any_of<F>(wrong[r]) ? (int)BAD : state[r];
        a.log_z[b] = state[r] == FINE && L ? sum[r] + std::log(product_of_n[r]) + (L - 1) * a.top : state[r] == CLOSED ? -INF<double> : 0;
    }
}

template <class F> struct Backward : Batch<F> {
    const F *E, *S, *grad;       // grad [B]; 0 where a row is not fine
    F *dx, *dA, *dstart, *dend;  // [B, T, K], [K, K], [K], [K]
    const F *WT;
};

// C += sum over t of e_{t-1} q_t', both [L, P], four rows of C and at most four vectors at a time
template <class F, int C> inline void count(const F *e, const F *q, int64_t L, int P, int j, int column, F *out) {
    constexpr int width = Lanes<F>::width;
    Vec<F> sum[4][C] = {};
    for (int64_t t = 1; t < L; t++)
        for (int c = 0; c < C; c++) {
            Vec<F> v = load(q + t * P + column + c * width);
            for (int i = 0; i < 4; i++) sum[i][c] += e[(t - 1) * P + j + i] * v;
        }
    for (int i = 0; i < 4; i++)
        for (int c = 0; c < C; c++) {
            F *to = out + (size_t)(j + i) * P + column + c * width;
            store(to, load(to) + sum[i][c]);
        }
}
template <class F> void count_pairs(const F *e, const F *q, int64_t L, int K, int P, F *out) {
    constexpr int width = Lanes<F>::width;
    for (int j = 0; j < K; j += 4) {
        int column = 0;
        for (; column + 4 * width <= P; column += 4 * width) count<F, 4>(e, q, L, P, j, column, out);
        for (; column + 2 * width <= P; column += 2 * width) count<F, 2>(e, q, L, P, j, column, out);
        for (; column < P; column += width) count<F, 1>(e, q, L, P, j, column, out);
    }
}

template <class F, int R> void backward_rows(const Backward<F> &a, const int64_t *rows, F *work, F *counts, F *ends) {
    constexpr int width = Lanes<F>::width;
    const int P = a.P, K = a.K;
    F *u = work, *q = u + R * P, *kept = q + R * P;  // kept [R, T, P]
    std::fill(work, work + 2 * R * P, (F)0);
    for (int64_t t = a.T - 1; t >= 0; t--) {
        for (int r = 0; r < R; r++) {
            int64_t b = rows[r], L = a.lengths[b];
            F *dx = a.dx + (b * a.T + t) * K;
            if (t >= L || a.grad[b] == 0) {
                std::fill(dx, dx + K, (F)0);
                continue;
            }
            const F *e = a.E + (b * a.T + t) * P, *s = a.S + (b * a.T + t) * P;
            for (int c = 0; c < P; c += width) {
                int num = std::min(width, K - c);
                Vec<F> p = load(e + c) * (t == L - 1 ? all<F>(a.grad[b]) : load(u + r * P + c));
                if (num == width) store(dx + c, p);
                else store_first(dx + c, p, num);
                if (t == L - 1) store(ends + P + c, load(ends + P + c) + p);
                if (t == 0) store(ends + c, load(ends + c) + p);
                else {
                    Vec<F> below = load(s + c), v = below > 0 ? p / below : Vec<F>{};
                    store(q + r * P + c, v);
                    store(kept + (r * a.T + t) * P + c, v);
                }
            }
        }
        if (t && t < a.lengths[rows[0]]) product<F, R, false>(q, a.WT, u, K, P);
    }
    for (int r = 0; r < R; r++)
        if (a.grad[rows[r]] != 0) count_pairs(a.E + rows[r] * a.T * P, kept + r * a.T * P, a.lengths[rows[r]], K, P, counts);
}

template <class F> struct Best : Batch<F> {
    int64_t *labels;  // [B, T]
    double *score;
    int32_t *status;
    const F *here, *across;  // A and its transpose [K, P], -inf in the padding
};

// the first k with the largest d(k) + a(k), both with P numbers
template <class F> int argmax_of(const F *d, const F *a, int P) {
    constexpr int width = Lanes<F>::width;
    Vec<F> top = all<F>(-INF<F>), at = {}, lane;
    for (int i = 0; i < width; i++) lane[i] = -i;  // minus the place, so that the largest is the first
    for (int c = 0; c < P; c += width) {
        Vec<F> v = load(d + c) + load(a + c);
        at = v > top ? lane - (F)c : at;
        top = larger<F>(top, v);
    }
    return (int)-largest<F>(top == largest<F>(top) ? at : all<F>(-INF<F>));
}

// One step of the way back along a row's best path, i steps from its end; adds up the score again, in float64. The rows of
// a group take turns, so that one need not wait for the other's maximum.
template <class F> inline void trace(const Best<F> &a, int64_t b, int64_t i, const F *D, const F *nothing) {
    int64_t L = a.lengths[b], t = L - 1 - i, *y = a.labels + b * a.T;
    const F *above = i == 0 ? nothing : a.across + (size_t)y[t + 1] * a.P;
    int k = argmax_of(D + t * a.P, above, a.P);
    y[t] = k;
    a.score[b] += (double)a.x[(b * a.T + t) * a.K + k] + (double)above[k];
    if (i == 0 && a.end) a.score[b] += a.end[k];
    if (t == 0 && a.start) a.score[b] += a.start[k];
}

template <class F, int R> void best_rows(const Best<F> &a, const int64_t *rows, F *work) {
    constexpr int width = Lanes<F>::width;
    const int P = a.P;
    F *d = work, *s = d + R * P, *x = s + R * P, *nothing = x + P, *D = nothing + P;  // D [R, T, P]
    int state[R];
    Bits<F> wrong[R] = {};
    std::fill(work, D, (F)0);
    std::fill(state, state + R, (int)FINE);
    for (int64_t t = 0; t < a.lengths[rows[0]]; t++) {
        if (t) product<F, R, true>(d, a.here, s, a.K, P);
        for (int r = 0; r < R; r++) {
            if (t >= a.lengths[rows[r]] || state[r] != FINE) continue;
            read(a, rows[r], t, x, wrong[r]);
            Vec<F> top = all<F>(-INF<F>);
            for (int c = 0; c < P; c += width) {
                Vec<F> v = load(x + c) + load(s + r * P + c);
                store(d + r * P + c, v);
                store(D + (r * a.T + t) * P + c, v);
                top = larger<F>(top, v);
            }
            if ((t & 3) != 3 && t != a.lengths[rows[r]] - 1) continue;
            F m = largest<F>(top);
            if (m == -INF<F>) state[r] = CLOSED;
            else
                for (int c = 0; c < P; c += width) store(d + r * P + c, load(d + r * P + c) - m);
        }
    }
    for (int r = 0; r < R; r++) {
        int64_t b = rows[r];
        a.status[b] = state[r] = any_of<F>(wrong[r]) ? (int)BAD : state[r];
        std::fill(a.labels + b * a.T, a.labels + (b + 1) * a.T, (int64_t)-1);
        a.score[b] = state[r] == FINE ? 0 : -INF<double>;
    }
    for (int64_t i = 0; i < a.lengths[rows[0]]; i++)
        for (int r = 0; r < R; r++)
            if (state[r] == FINE && i < a.lengths[rows[r]]) trace(a, rows[r], i, D + r * a.T * P, nothing);
}

// Rows in groups, longest first: of 8 where a row is one or two vectors, else of 4, and single ones at the end.
template <class F> struct Groups {
    std::vector<int64_t> order;
    int64_t size, whole, num;

    explicit Groups(const Batch<F> &a) : order(a.B), size(a.P <= 2 * Lanes<F>::width ? 8 : 4) {
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return a.lengths[i] > a.lengths[j]; });
        whole = a.B / size, num = whole + a.B % size;
    }
    int64_t rows(int64_t g) const { return g < whole ? size : 1; }
    const int64_t *first(int64_t g) const { return order.data() + (g < whole ? g * size : whole * size + g - whole); }
};

template <class F> void forward(Forward<F> a) {
    Matrix<F> W(a, true);
    if (W.is_bad) return std::fill(a.status, a.status + a.B, (int32_t)BAD);
    Lines<F> pairs;
    bool is_watched = !(W.top - W.bottom <= Lanes<F>::spread);
    if (is_watched) {
        pairs = Lines<F>(W.here.size());
        for (int j = 0; j < a.K; j++)
            for (int k = 0; k < a.K; k++) pairs.data()[(size_t)j * a.P + k] = a.A[(size_t)j * a.K + k] > -INF<F>;
    }
    a.W = W.here.data(), a.pairs = is_watched ? pairs.data() : nullptr, a.top = W.top > -INF<F> ? W.top : 0;
    Groups<F> groups(a);
#pragma omp parallel for schedule(dynamic) num_threads(a.threads) if (a.threads > 1)
    for (int64_t g = 0; g < groups.num; g++) {
        F *work = scratch<F>(0, (size_t)5 * 8 * a.P);
        const int64_t *rows = groups.first(g);
        if (groups.rows(g) == 8) forward_rows<F, 8>(a, rows, work);
        else if (groups.rows(g) == 4) forward_rows<F, 4>(a, rows, work);
        else forward_rows<F, 1>(a, rows, work);
    }
}

// The sums over rows are taken in at most 8 parts, in one order: the result does not depend on the number of threads.
template <class F> void backward(Backward<F> a) {
    Matrix<F> W(a, true);
    a.WT = W.across.data();
    Groups<F> groups(a);
    const int64_t parts = std::min<int64_t>(8, groups.num), P = a.P, size = (P + 3) * P + 2 * P;
    F *sums = scratch<F>(1, parts * size);
    std::fill(sums, sums + parts * size, (F)0);
#pragma omp parallel for schedule(dynamic) num_threads(a.threads) if (a.threads > 1)
    for (int64_t i = 0; i < parts; i++) {
        F *work = scratch<F>(0, (size_t)groups.size * P * (a.T + 2)), *ends = sums + i * size, *counts = ends + 2 * P;
        for (int64_t g = i * groups.num / parts; g < (i + 1) * groups.num / parts; g++) {
            const int64_t *rows = groups.first(g);
            if (groups.rows(g) == 8) backward_rows<F, 8>(a, rows, work, counts, ends);
            else if (groups.rows(g) == 4) backward_rows<F, 4>(a, rows, work, counts, ends);
            else backward_rows<F, 1>(a, rows, work, counts, ends);
        }
    }
    for (int64_t i = 1; i < parts; i++)
        for (int64_t n = 0; n < size; n++) sums[n] += sums[i * size + n];
    for (int j = 0; j < a.K; j++)
        for (int k = 0; k < a.K; k++) a.dA[(size_t)j * a.K + k] = sums[2 * P + j * P + k] * W.here.data()[j * P + k];
    std::copy(sums, sums + a.K, a.dstart);
    std::copy(sums + P, sums + P + a.K, a.dend);
}

template <class F> void best(Best<F> a) {
    Matrix<F> A(a, false);
    if (A.is_bad) return std::fill(a.status, a.status + a.B, (int32_t)BAD);
    a.here = A.here.data(), a.across = A.across.data();
    Groups<F> groups(a);
#pragma omp parallel for schedule(dynamic) num_threads(a.threads) if (a.threads > 1)
    for (int64_t g = 0; g < groups.num; g++) {
        F *work = scratch<F>(2, (size_t)(2 * groups.size + 2 + groups.size * a.T) * a.P);
        const int64_t *rows = groups.first(g);
        if (groups.rows(g) == 8) best_rows<F, 8>(a, rows, work);
        else if (groups.rows(g) == 4) best_rows<F, 4>(a, rows, work);
        else best_rows<F, 1>(a, rows, work);
    }
}

template <class F>
Batch<F> batch(const F *x, const F *A, const F *start, const F *end, const int64_t *lengths, const int64_t *sizes) {
    constexpr int width = Lanes<F>::width;
    int K = (int)sizes[2];
    return {x, A, start, end, lengths, sizes[0], sizes[1], K, (K + width - 1) / width * width, (int)sizes[3]};
}

}  // namespace

// sizes are B, T, K and the number of threads
#define CHAIN(F, SUFFIX)                                                                                               \
    extern "C" void chain_forward_##SUFFIX(const F *x, const F *A, const F *start, const F *end, const int64_t *lengths, \
                                           const int64_t *sizes, F *E, F *S, double *log_z, int32_t *status) {         \
        forward<F>({batch<F>(x, A, start, end, lengths, sizes), E, S, log_z, status});                                 \
    }                                                                                                                  \
    extern "C" void chain_backward_##SUFFIX(const F *x, const F *A, const F *start, const F *end, const int64_t *lengths, \
                                            const int64_t *sizes, const F *E, const F *S, const F *grad, F *dx, F *dA, \
                                            F *dstart, F *dend) {                                                      \
        backward<F>({batch<F>(x, A, start, end, lengths, sizes), E, S, grad, dx, dA, dstart, dend});                   \
    }                                                                                                                  \
    extern "C" void chain_best_##SUFFIX(const F *x, const F *A, const F *start, const F *end, const int64_t *lengths,  \
                                        const int64_t *sizes, int64_t *labels, double *score, int32_t *status) {       \
        best<F>({batch<F>(x, A, start, end, lengths, sizes), labels, score, status});                                  \
    }

CHAIN(float, f32)
CHAIN(double, f64)
