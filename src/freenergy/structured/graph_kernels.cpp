// The sums over the paths of a graph, compiled, in float64. Weights are exp(log-weights), E_t(c) = exp(x_t(c) - max_c x_t(c)).
//
//   forward    a_t(s) = E_t(symbol of s) sum_{r -> s} w_rs a_{t-1}(r) / n_t,     n_t so that sum_s a_t(s) = 1
//   backward   b_{t-1}(r) = sum_{r -> s} w_rs E_t(symbol of s) b_t(s) / m_t,     m_t so that sum_r b_{t-1}(r) = 1
//   total      sum_t log n_t + log sum_s a_L(s) final(s)
//   posterior  p_t(c) = sum over the states s of symbol c of a_t(s) b_t(s) / o_t,     o_t = sum_s a_t(s) b_t(s)
//
// graph: 8 or 16 sequences in lanes, so that an arc is one product and sum of vectors. A junction adds up states and is read
// by arcs as if it were a state. band: one sequence at a time, the states of one label sequence in vectors; a state is
// entered from itself, from the one before, and over one where ``skip`` is 1.
//
// Range. What underflows at frame t is at most S 2^-1022 / n_t of a unit mass and reaches the total with at most 1 / o_t of it;
// the margin is the smallest of min(n_t, m_t) o_t over t, and a caller that finds it tiny does the row again in log space.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace {

typedef double vec __attribute__((vector_size(64)));
typedef int64_t bits __attribute__((vector_size(64)));
constexpr int W = 8;
constexpr double INF = std::numeric_limits<double>::infinity();

struct Graph {
    int64_t S, J, C;                                 // states, junctions, symbols
    const int32_t *symbol, *join;                    // [S]; junction of a state or -1
    const int32_t *in_first, *in_source;             // arcs by target; sources from S on are junctions
    const double *in_weight;
    const int32_t *out_first, *out_target;           // arcs by source
    const double *out_weight;
    const double *initial, *final;                   // [S]
};

template <int R> struct Group {  // R * 8 sequences
    vec v[R];
    Group &operator+=(const Group &o) { for (int r = 0; r < R; r++) v[r] += o.v[r]; return *this; }
};
template <int R> inline Group<R> zero() { Group<R> g; for (int r = 0; r < R; r++) g.v[r] = vec{}; return g; }
template <int R> inline void add(Group<R> &sum, const Group<R> &x, double w) { for (int r = 0; r < R; r++) sum.v[r] += x.v[r] * w; }
template <int R> inline Group<R> times(const Group<R> &a, const Group<R> &b) {
    Group<R> g;
    for (int r = 0; r < R; r++) g.v[r] = a.v[r] * b.v[r];
    return g;
}

// the sum of w_i values[index_i]: two sums side by side, since one would wait for itself
template <int R> inline Group<R> gathered(const Group<R> *values, const int32_t *index, const double *w, int first, int last) {
    Group<R> one = zero<R>(), two = zero<R>();
    int i = first;
    for (; i + 1 < last; i += 2) {
        add(one, values[index[i]], w[i]);
        add(two, values[index[i + 1]], w[i + 1]);
    }
    if (i < last) add(one, values[index[i]], w[i]);
    one += two;
    return one;
}

template <int R> struct Run {
    const Graph &g;
    const double *E;
    const int64_t *lengths, *rows;  // the sequences of this group, -1 for a lane without one
    int64_t T;
    double *total, *margin, *posterior;
    std::vector<Group<R>> alpha, e, weighted, beta, mass;
    std::vector<double> n;

    double *lane(Group<R> &x, int i) { return reinterpret_cast<double *>(&x) + i; }

    void emissions(int64_t t) {  // e[c] for all lanes; 0 where a sequence has ended
        for (int i = 0; i < R * W; i++) {
            bool inside = rows[i] >= 0 && t < lengths[rows[i]];
            const double *from = inside ? E + (rows[i] * T + t) * g.C : nullptr;
            double *to = lane(e[0], i);
            for (int64_t c = 0; c < g.C; c++) to[c * R * W] = inside ? from[c] : 0.0;
        }
    }

    void junctions(Group<R> *a) {
        for (int64_t j = 0; j < g.J; j++) a[g.S + j] = zero<R>();
        for (int64_t s = 0; s < g.S; s++)
            if (g.join[s] >= 0) a[g.S + g.join[s]] += a[s];
    }

    void forward(int64_t longest) {
        const int64_t nodes = g.S + g.J;
        for (int64_t t = 0; t < longest; t++) {
            Group<R> *a = &alpha[t * nodes], sum = zero<R>();
            emissions(t);
            for (int64_t s = 0; s < g.S; s++) {
                Group<R> in;
                if (t) in = gathered<R>(a - nodes, g.in_source, g.in_weight, g.in_first[s], g.in_first[s + 1]);
                else for (int r = 0; r < R; r++) in.v[r] = g.initial[s] - vec{};
                a[s] = times(in, e[g.symbol[s]]);
                sum += a[s];
            }
            Group<R> scale;
            for (int i = 0; i < R * W; i++) {
                double x = *lane(sum, i);
                n[t * R * W + i] = x;
                *lane(scale, i) = x > 0 ? 1 / x : 0.0;
            }
            for (int64_t s = 0; s < g.S; s++) a[s] = times(a[s], scale);
            junctions(a);
        }
    }

    void totals() {
        const int64_t nodes = g.S + g.J;
        for (int i = 0; i < R * W; i++) {
            if (rows[i] < 0) continue;
            const int64_t L = lengths[rows[i]];
            double sum = 0, logs = 0;
            if (L) for (int64_t s = 0; s < g.S; s++) sum += *lane(alpha[(L - 1) * nodes + s], i) * g.final[s];
            for (int64_t t = 0; t < L; t++) logs += std::log(n[t * R * W + i]);
            total[rows[i]] = logs + std::log(sum);
            margin[rows[i]] = INF;
        }
    }

    void frame(int64_t t, const double *m) {  // posterior of frame t, and the margin
        const int64_t nodes = g.S + g.J;
        for (int64_t c = 0; c < g.C; c++) mass[c] = zero<R>();
        Group<R> overlap = zero<R>();
        for (int64_t s = 0; s < g.S; s++) {
            Group<R> p = times(alpha[t * nodes + s], beta[s]);
            mass[g.symbol[s]] += p;
            overlap += p;
        }
        for (int i = 0; i < R * W; i++) {
            if (rows[i] < 0 || t >= lengths[rows[i]]) continue;
            const double o = *lane(overlap, i), f = o > 0 ? 1 / o : 0.0;
            double *to = posterior + (rows[i] * T + t) * g.C;
            const double *from = lane(mass[0], i);
            for (int64_t c = 0; c < g.C; c++) to[c] = from[c * R * W] * f;
            margin[rows[i]] = std::min(margin[rows[i]], std::min(n[t * R * W + i], m[i]) * o);
        }
    }

    void backward(int64_t longest) {
        double m[R * W], least = 0;
        for (int64_t s = 0; s < g.S; s++) least += g.final[s];
        for (int64_t t = longest - 1; t >= 0; t--) {
            if (t + 1 < longest) step(t + 1, m);
            for (int i = 0; i < R * W; i++) {
                if (rows[i] < 0 || t != lengths[rows[i]] - 1) continue;
                for (int64_t s = 0; s < g.S; s++) *lane(beta[s], i) = g.final[s] / least;
                m[i] = 1.0;
            }
            frame(t, m);
        }
    }

    void step(int64_t t, double *m) {  // beta of frame t -> of frame t - 1
        emissions(t);
        for (int64_t s = 0; s < g.S; s++) weighted[s] = times(beta[s], e[g.symbol[s]]);
        for (int64_t s = 0; s < g.S + g.J; s++)
            beta[s] = gathered<R>(weighted.data(), g.out_target, g.out_weight, g.out_first[s], g.out_first[s + 1]);
        Group<R> sum = zero<R>(), scale;
        for (int64_t s = 0; s < g.S; s++) {
            if (g.join[s] >= 0) beta[s] += beta[g.S + g.join[s]];
            sum += beta[s];
        }
        for (int i = 0; i < R * W; i++) {
            double x = *lane(sum, i);
            m[i] = x;
            *lane(scale, i) = x > 0 ? 1 / x : 0.0;
        }
        for (int64_t s = 0; s < g.S; s++) beta[s] = times(beta[s], scale);
    }

    void all() {
        int64_t longest = 0;
        for (int i = 0; i < R * W; i++) if (rows[i] >= 0) longest = std::max(longest, lengths[rows[i]]);
        const int64_t nodes = g.S + g.J;
        alpha.resize(longest * nodes);
        n.resize(longest * R * W);
        e.resize(g.C);
        mass.resize(g.C);
        weighted.resize(g.S);
        beta.assign(nodes, zero<R>());
        forward(longest);
        totals();
        backward(longest);
    }
};

template <int R> void run(const Graph &g, const double *E, const int64_t *lengths, const int64_t *rows, int64_t T,
                          double *total, double *margin, double *posterior) {
    Run<R> one{g, E, lengths, rows, T, total, margin, posterior, {}, {}, {}, {}, {}, {}};
    one.all();
}

// one sequence on its chain of states; two zeros stand before the first state and after the last
struct Band {
    int64_t S, T, C, begins, ends;
    const double *E;
    const int32_t *symbol;
    const double *skip;
    double *posterior;

    double take(double *a, int64_t S, double *n) const {
        double sum = 0;
        for (int64_t s = 0; s < S; s++) sum += a[s];
        *n = sum;
        const double scale = sum > 0 ? 1 / sum : 0.0;
        for (int64_t s = 0; s < S; s++) a[s] *= scale;
        return sum;
    }

    void all(double *total, double *margin, std::vector<double> &room) const {
        const int64_t P = S + 4;
        room.assign(T * P + 2 * P + T + P, 0.0);
        double *alpha = room.data() + 2, *beta = alpha + T * P, *g = beta + P, *n = g + P, logs = 0;
        for (int64_t t = 0; t < T; t++) {
            double *a = alpha + t * P;
            const double *e = E + t * C, *before = a - P;
            if (!t) for (int64_t s = 0; s < begins; s++) a[s] = e[symbol[s]];
            else
#pragma omp simd
                for (int64_t s = 0; s < S; s++) a[s] = e[symbol[s]] * (before[s] + before[s - 1] + skip[s] * before[s - 2]);
            logs += std::log(take(a, S, n + t));
        }
        double sum = 0, least = INF, m = 1;
        for (int64_t s = S - ends; s < S; s++) { sum += alpha[(T - 1) * P + s]; beta[s] = 1.0 / ends; }
        *total = logs + std::log(sum);
        for (int64_t t = T - 1; t >= 0; t--) {
            if (t < T - 1) {
                const double *e = E + (t + 1) * C;
                for (int64_t s = 0; s < S; s++) g[s] = e[symbol[s]] * beta[s];
#pragma omp simd
                for (int64_t s = 0; s < S; s++) beta[s] = g[s] + g[s + 1] + skip[s + 2] * g[s + 2];
                take(beta, S, &m);
            }
            double o = 0, *p = posterior + t * C;
            const double *a = alpha + t * P;
            for (int64_t s = 0; s < S; s++) o += a[s] * beta[s];
            const double f = o > 0 ? 1 / o : 0.0;
            for (int64_t s = 0; s < S; s++) p[symbol[s]] += a[s] * beta[s] * f;
            least = std::min(least, std::min(n[t], m) * o);
        }
        *margin = least;
    }
};

}  // namespace

extern "C" void graph_sums(const double *E, const int64_t *lengths, const int64_t *sizes, const int32_t *symbol, const int32_t *join,
                           const int32_t *in_first, const int32_t *in_source, const double *in_weight, const int32_t *out_first,
                           const int32_t *out_target, const double *out_weight, const double *initial, const double *final,
                           double *total, double *margin, double *posterior) {
    const int64_t B = sizes[0], T = sizes[1], C = sizes[2], S = sizes[3], J = sizes[4], threads = sizes[5];
    const Graph g{S, J, C, symbol, join, in_first, in_source, in_weight, out_first, out_target, out_weight, initial, final};
    std::vector<int64_t> order(B);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
    const int64_t groups = (B + 15) / 16;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < groups; i++) {
        int64_t rows[16];
        for (int64_t k = 0; k < 16; k++) rows[k] = i * 16 + k < B ? order[i * 16 + k] : -1;
        if (rows[8] >= 0) run<2>(g, E, lengths, rows, T, total, margin, posterior);
        else run<1>(g, E, lengths, rows, T, total, margin, posterior);
    }
}

// symbol and skip are [B, S + 2] with zeros behind the last state; begins and ends say how many states begin and end a path
extern "C" void band_sums(const double *E, const int64_t *lengths, const int64_t *sizes, const int32_t *symbol, const double *skip,
                          const int64_t *states, const int64_t *begins, double *total, double *margin, double *posterior) {
    const int64_t B = sizes[0], T = sizes[1], C = sizes[2], S = sizes[3], threads = sizes[4];
#pragma omp parallel num_threads(threads)
    {
        std::vector<double> room;
#pragma omp for schedule(dynamic)
        for (int64_t b = 0; b < B; b++) {
            const Band band{states[b], lengths[b], C, begins[b], begins[b], E + b * T * C, symbol + b * (S + 2),
                            skip + b * (S + 2), posterior + b * T * C};
            if (states[b] && lengths[b]) band.all(total + b, margin + b, room);
        }
    }
}
