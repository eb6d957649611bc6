// Mixture of top-k attention (MiTA) on a CPU, one head at a time, with its gradient. Standard C++17 and the vector
// extensions of GCC and Clang; no library. CMakeLists.txt compiles it.
//
// m landmarks l (m, d) score the keys k (M, d): each chooses its `top` best, and the weighted
// sum of all values v (M, e) is its own value. A query of q (N, d) attends to the landmarks with these values and to the
// keys of its `choices` best landmarks. With one, a block of queries is finished at once; with several, the weights of a
// head are in memory, since the softmax of a query ends with its last expert.

#include "../shared/half_products.h"

extern "C" {

struct Sizes {
    long B, H, N, M, m, top, d, e, threads;
    int shared, has_plan;  // whether landmarks are attended to; whether the plan is an input
    int half, further;     // whether products round to bfloat16; experts of a query after its first
    double scale, factor;  // factors of all logits, and again of those of landmarks
};

}

namespace {

constexpr long BLOCK = 32;   // queries at a time

template <typename T>
struct Head {
    Rows<T> q, k, v, l;
    const T* bias;  // of landmarks, then of keys; or null
    int64_t *chosen, *experts;
};

// The pairs (query, choice) of each expert of a head, one expert after the other; a pair is choices query + choice.
struct Sorted {
    std::vector<long> start, pair;

    Sorted(const int64_t* experts, long pairs, long m) : start(m + 1), pair(pairs) {
        for (long i = 0; i < pairs; ++i) ++start[experts[i] + 1];
        for (long j = 0; j < m; ++j) start[j + 1] += start[j];
        std::vector<long> next(start.begin(), start.end() - 1);
        for (long i = 0; i < pairs; ++i) pair[next[experts[i]]++] = i;
    }
};

// A head and its intermediate results. Columns of logits: the landmarks, if shared, padded to `wm`, then the keys of an
// expert, padded to `wk`. Rows of keys and values are in the same places.
template <typename T>
struct Work {
    const Sizes& s;
    const T scale, factor;
    const T inner, outer;  // parts of scale: of keys before their products with queries, and of logits; exact in halves
    Packed packed;
    const long wd, we, wl, wk, wm, wide, ldp;
    const long choices, ws, several, again;      // columns of weights with several experts; queries then, and in its backward pass
    Array<T> probe, values;             // (m, ldp) logits or weights of landmarks with keys, (m, we)
    Array<T> change, means;             // gradients of some columns of probe (m, CHUNK), (m)
    Array<T> route;                     // (N, wl) logits of queries with landmarks, where they are computed once
    Array<T> landmarks, landmarksT;     // scaled, (m, wd), (d, wl)
    Array<T> joint, jointT, all, allT;  // scaled keys (wide, wd), (d, wide), values (wide, we), (e, wide)
    Array<T> bias, queries, grad_rows, w, slope, products, rows, rowsT;
    Array<T> to_landmarks, to_values, to_keys, to_own;
    Array<T> weights, slopes, outs, all_queries, all_grads;  // of several experts: (N, ws), (N, ws), and rows of N
    Array<typename Lanes<T>::Ordered> bits;
    Arena arena;

    Work(const Sizes& s, bool backward)
        : s(s), scale(s.scale), factor(s.factor), inner(s.half ? 1 : s.scale), outer(s.half ? s.scale : 1), wd(padded<T>(s.d)), we(padded<T>(s.e)), wl(padded<T>(s.m)),
          wk(padded<T>(s.top)), wm(s.shared ? wl : 0), wide(wm + wk), ldp(padded<T>(s.M)),
          choices(s.further + 1), ws(wm + choices * wk), several(s.further ? s.N : 0), again(backward ? several : 0), probe(s.m * ldp),
          values(s.m * we), change(backward ? s.m * CHUNK : 0), means(s.m), route(s.has_plan ? 0 : s.N * wl), landmarks(s.m * wd),
          landmarksT(s.d * wl), joint(wide * wd), jointT(s.d * wide), all(wide * we), allT(s.e * wide), bias(wide),
          queries(BLOCK * wd), grad_rows(BLOCK * we), w(BLOCK * wide), slope(BLOCK * wide),
          products(CHUNK * std::max(wd, we)), rows(CHUNK * std::max(wd, we)), rowsT(CHUNK * std::max(s.d, s.e)),
          to_landmarks(s.m * wd), to_values(s.m * we), to_keys(s.top * wd), to_own(s.top * we),
          weights(several * ws), slopes(again * ws), outs(several * std::max(wd, we)), all_queries(again * wd),
          all_grads(again * we), bits(std::max(s.M, s.m)),
          arena(measure()) {
        each([&](auto& array) { array.take(arena); });
    }

    template <typename Visit>
    void each(Visit visit) {
        for (auto* array : {&probe, &values, &change, &means, &route, &landmarks, &landmarksT, &joint, &jointT, &all, &allT,
                            &bias, &queries, &grad_rows, &w, &slope, &products, &rows, &rowsT, &to_landmarks,
                            &to_values, &to_keys, &to_own, &weights, &slopes, &outs, &all_queries, &all_grads})
            visit(*array);
        visit(bits);
    }

    size_t measure() {
        size_t bytes = 0;
        each([&](auto& array) { bytes += array.bytes(); });
        return bytes;
    }

    template <bool ADD>
    void multiply(long rows, long cols, long len, const T* a, long row, long column, const T* b, long ldb, T* c, long ldc) {
        product<T, ADD>(packed, s.half, rows, cols, len, a, row, column, b, ldb, c, ldc);
    }

    // Rows whose length is a multiple of the vector: copies where it is not.
    const T* whole_rows(const Rows<T>& from, long first, long count, long width, long& ld) {
        ld = from.stride;
        if (width % WIDTH<T> == 0) return from(first);
        ld = padded<T>(width);
        for (long i = 0; i < count; ++i) copy(from(first + i), width, &rows[i * ld]);
        return rows.data();
    }

    template <typename Each>
    void chunks(Each each) {
        for (long first = 0; first < s.M; first += CHUNK) each(first, std::min(CHUNK, s.M - first));
    }

    // Logits of landmarks with keys; the padding is -inf.
    void score(const Head<T>& x) {
        for (long j = 0; j < s.m; ++j) copy(x.l(j), s.d, &landmarks[j * wd], scale);
        chunks([&](long first, long count) {
            turn([&](long i) { return x.k(first + i); }, count, s.d, rowsT.data(), CHUNK);
            const T* from = s.half ? x.l(0) : landmarks.data();
            const long row = s.half ? x.l.stride : wd;
            multiply<false>(s.m, padded<T>(count), s.d, from, row, 1, rowsT.data(), CHUNK, &probe[first], ldp);
        });
        for (long j = 0; j < s.m; ++j) {
            if (s.half) copy(&probe[j * ldp], s.M, &probe[j * ldp], outer);
            if (x.bias) add(x.bias + s.m, s.M, &probe[j * ldp]);
            std::fill(&probe[j * ldp] + s.M, &probe[j * ldp] + ldp, -std::numeric_limits<T>::infinity());
        }
    }

    void choose(const Head<T>& x) {
        for (long j = 0; j < s.m; ++j) largest(&probe[j * ldp], s.M, s.top, x.chosen + j * s.top, bits);
        turn([&](long j) { return x.l(j); }, s.m, s.d, landmarksT.data(), wl, inner);
        multiply<false>(s.N, wl, s.d, x.q(0), x.q.stride, 1, landmarksT.data(), wl, route.data(), wl);
        for (long i = 0; i < s.N; ++i) {
            T* row = &route[i * wl];
            if (s.half) copy(row, s.m, row, outer);
            if (x.bias) add(x.bias, s.m, row);
            if (several) largest(row, s.m, choices, x.experts + i * choices, bits);
            else x.experts[i] = best(row);
        }
    }

    // The first of the largest of a row of m.
    long best(T* row) {
        std::fill(row + s.m, row + wl, -std::numeric_limits<T>::infinity());
        Vector<T> most = load(row);
        for (long j = WIDTH<T>; j < wl; j += WIDTH<T>) most = larger<T>(most, load(row + j));
        const T top = reduce<T>(most, larger<T>);
        long first = s.m - 1;  // NaN: any
        for (long j = 0; j < wl; j += WIDTH<T>) where_not(load(row + j) != top, [&](long lane) { first = std::min(first, j + lane); });
        return first;
    }

    // The landmarks' values, from their weights in place of their logits; and what all experts share.
    void compress(const Head<T>& x) {
        const T none = -std::numeric_limits<T>::infinity();
        std::fill(bias.begin(), bias.end(), none);
        if (!s.shared) return;
        std::fill(values.begin(), values.end(), T(0));
        for (long j = 0; j < s.m; ++j) softmax(&probe[j * ldp], ldp);
        chunks([&](long first, long count) {
            long ld;
            const T* from = whole_rows(x.v, first, count, s.e, ld);
            multiply<true>(s.m, we, count, &probe[first], ldp, 1, from, ld, values.data(), we);
        });
        for (long j = 0; j < s.m; ++j) {
            copy(&landmarks[j * wd], s.d, &joint[j * wd], factor);
            copy(&values[j * we], s.e, &all[j * we]);
            bias[j] = x.bias ? x.bias[j] : 0;
        }
        turn([&](long j) { return s.half ? x.l(j) : &joint[j * wd]; }, s.m, s.d, jointT.data(), wide);
        turn([&](long j) { return &all[j * we]; }, s.m, s.e, allT.data(), wide);
    }

    // The keys and values of an expert.
    void take(const Head<T>& x, const int64_t* chosen, bool backward) {
        for (long c = 0; c < s.top; ++c) {
            copy(x.v(chosen[c]), s.e, &all[(wm + c) * we]);
            bias[wm + c] = x.bias ? x.bias[s.m + chosen[c]] : 0;
            if (backward) copy(x.k(chosen[c]), s.d, &joint[(wm + c) * wd], scale);
        }
        turn([&](long c) { return x.k(chosen[c]); }, s.top, s.d, &jointT[wm], wide, inner);
        if (backward) turn([&](long c) { return x.v(chosen[c]); }, s.top, s.e, &allT[wm], wide);
    }

    // Gathers some queries and computes their weights.
    void weigh(const Head<T>& x, const long* query, long count) {
        for (long r = 0; r < count; ++r) copy(x.q(query[r]), s.d, &queries[r * wd]);
        const long known = s.has_plan || x.bias ? 0 : wm;  // logits of landmarks that chose the experts
        multiply<false>(count, wide - known, s.d, queries.data(), wd, 1, &jointT[known], wide, &w[known], wide);
        for (long r = 0; r < count; ++r) {
            T* row = &w[r * wide];
            if (s.half) {
                copy(row + known, wm - known, row + known, outer * factor);
                copy(row + wm, wk, row + wm, outer);
            }
            if (known) {
                copy(&route[query[r] * wl], s.m, row, factor);
                std::fill(row + s.m, row + known, -std::numeric_limits<T>::infinity());
            }
            add(&bias[known], wide - known, row + known);
            softmax(row, wide);
        }
    }

    template <typename Each>
    void blocks(const Head<T>& x, bool backward, Each each) {
        Sorted sorted(x.experts, s.N * choices, s.m);
        for (long j = 0; j < s.m; ++j) {
            if (sorted.start[j] == sorted.start[j + 1]) continue;
            take(x, x.chosen + j * s.top, backward);
            for (long at = sorted.start[j]; at < sorted.start[j + 1]; at += BLOCK)
                each(j, &sorted.pair[at], std::min(BLOCK, sorted.start[j + 1] - at), at + BLOCK >= sorted.start[j + 1]);
        }
    }

    void forward(const Head<T>& x, Rows<T> out) {
        if (s.shared || !s.has_plan) score(x);
        if (!s.has_plan) choose(x);
        compress(x);
        if (several) return forward_several(x, out);
        blocks(x, false, [&](long, const long* query, long count, bool) {
            weigh(x, query, count);
            multiply<false>(count, we, wide, w.data(), wide, 1, all.data(), we, products.data(), we);
            for (long r = 0; r < count; ++r) copy(&products[r * we], s.e, out(query[r]));
        });
    }

    void backward(const Head<T>& x, Rows<T> grad_out, Rows<T> to_q, Rows<T> to_k, Rows<T> to_v, Rows<T> to_l) {
        if (s.shared) score(x);
        compress(x);
        for (auto* sums : {&to_landmarks, &to_values, &to_keys, &to_own}) std::fill(sums->begin(), sums->end(), T(0));
        for (long i = 0; i < s.M; ++i) {
            std::fill(to_k(i), to_k(i) + s.d, T(0));
            std::fill(to_v(i), to_v(i) + s.e, T(0));
        }
        if (several) backward_several(x, grad_out, to_q, to_k, to_v);
        else backward_one(x, grad_out, to_q, to_k, to_v);
        for (long j = 0; j < s.m; ++j) copy(&to_landmarks[j * wd], s.d, to_l(j), scale * factor);
        if (s.shared) expand(x, to_k, to_v, to_l);
    }

    void backward_one(const Head<T>& x, Rows<T> grad_out, Rows<T> to_q, Rows<T> to_k, Rows<T> to_v) {
        blocks(x, true, [&](long j, const long* query, long count, bool last) {
            weigh(x, query, count);
            for (long r = 0; r < count; ++r) copy(grad_out(query[r]), s.e, &grad_rows[r * we]);
            multiply<false>(count, wide, s.e, grad_rows.data(), we, 1, allT.data(), wide, slope.data(), wide);
            for (long r = 0; r < count; ++r) descend(&w[r * wide], &slope[r * wide], wide);
            multiply<false>(count, wd, wide, slope.data(), wide, 1, joint.data(), wd, products.data(), wd);
            for (long r = 0; r < count; ++r) copy(&products[r * wd], s.d, to_q(query[r]));
            multiply<true>(s.top, wd, count, &slope[wm], 1, wide, queries.data(), wd, to_keys.data(), wd);
            multiply<true>(s.top, we, count, &w[wm], 1, wide, grad_rows.data(), we, to_own.data(), we);
            if (s.shared) {
                multiply<true>(s.m, wd, count, slope.data(), 1, wide, queries.data(), wd, to_landmarks.data(), wd);
                multiply<true>(s.m, we, count, w.data(), 1, wide, grad_rows.data(), we, to_values.data(), we);
            }
            if (last) give(x.chosen + j * s.top, to_k, to_v);
        });
    }

    // Adds the gradients of an expert's keys and values to theirs.
    void give(const int64_t* chosen, Rows<T> to_k, Rows<T> to_v) {
        for (long c = 0; c < s.top; ++c) {
            add(&to_keys[c * wd], s.d, to_k(chosen[c]), scale);
            add(&to_own[c * we], s.e, to_v(chosen[c]));
        }
        std::fill(to_keys.begin(), to_keys.end(), T(0));
        std::fill(to_own.begin(), to_own.end(), T(0));
    }

    // Of a matrix (N, ws), the columns of the keys of a pair's expert.
    T* keys_of(Array<T>& matrix, long pair) { return &matrix[pair / choices * ws + wm + pair % choices * wk]; }

    // The weights of all queries: of the landmarks, and of the keys of each of their experts.
    void weigh_all(const Head<T>& x) {
        for (long first = 0; s.shared && first < s.N; first += BLOCK) {
            const long count = std::min(BLOCK, s.N - first);
            for (long r = 0; r < count; ++r) copy(x.q(first + r), s.d, &queries[r * wd]);
            multiply<false>(count, wm, s.d, queries.data(), wd, 1, jointT.data(), wide, &weights[first * ws], ws);
            for (long r = 0; r < count; ++r) {
                T* row = &weights[(first + r) * ws];
                if (s.half) copy(row, wm, row, outer * factor);
                add(bias.data(), wm, row);
            }
        }
        blocks(x, false, [&](long, const long* pair, long count, bool) {
            for (long r = 0; r < count; ++r) copy(x.q(pair[r] / choices), s.d, &queries[r * wd]);
            multiply<false>(count, wk, s.d, queries.data(), wd, 1, &jointT[wm], wide, w.data(), wide);
            for (long r = 0; r < count; ++r) {
                T* row = keys_of(weights, pair[r]);
                copy(&w[r * wide], wk, row, outer);
                add(&bias[wm], wk, row);
            }
        });
        for (long i = 0; i < s.N; ++i) softmax(&weights[i * ws], ws);
    }

    void forward_several(const Head<T>& x, Rows<T> out) {
        weigh_all(x);
        std::fill(outs.begin(), outs.end(), T(0));
        if (s.shared) multiply<true>(s.N, we, wm, weights.data(), ws, 1, all.data(), we, outs.data(), we);
        blocks(x, false, [&](long, const long* pair, long count, bool) {
            for (long r = 0; r < count; ++r) copy(keys_of(weights, pair[r]), wk, &w[r * wide]);
            multiply<false>(count, we, wk, w.data(), wide, 1, &all[wm * we], we, products.data(), we);
            for (long r = 0; r < count; ++r) add(&products[r * we], s.e, &outs[pair[r] / choices * we]);
        });
        for (long i = 0; i < s.N; ++i) copy(&outs[i * we], s.e, out(i));
    }

    void backward_several(const Head<T>& x, Rows<T> grad_out, Rows<T> to_q, Rows<T> to_k, Rows<T> to_v) {
        weigh_all(x);
        std::fill(outs.begin(), outs.end(), T(0));
        for (long i = 0; i < s.N; ++i) {
            copy(x.q(i), s.d, &all_queries[i * wd]);
            copy(grad_out(i), s.e, &all_grads[i * we]);
        }
        if (s.shared) multiply<false>(s.N, wm, s.e, all_grads.data(), we, 1, allT.data(), wide, slopes.data(), ws);
        blocks(x, true, [&](long, const long* pair, long count, bool) {
            for (long r = 0; r < count; ++r) copy(&all_grads[pair[r] / choices * we], we, &grad_rows[r * we]);
            multiply<false>(count, wk, s.e, grad_rows.data(), we, 1, &allT[wm], wide, slope.data(), wide);
            for (long r = 0; r < count; ++r) copy(&slope[r * wide], wk, keys_of(slopes, pair[r]));
        });
        for (long i = 0; i < s.N; ++i) descend(&weights[i * ws], &slopes[i * ws], ws);
        if (s.shared) {
            multiply<true>(s.N, wd, wm, slopes.data(), ws, 1, joint.data(), wd, outs.data(), wd);
            multiply<true>(s.m, wd, s.N, slopes.data(), 1, ws, all_queries.data(), wd, to_landmarks.data(), wd);
            multiply<true>(s.m, we, s.N, weights.data(), 1, ws, all_grads.data(), we, to_values.data(), we);
        }
        blocks(x, true, [&](long j, const long* pair, long count, bool last) {
            for (long r = 0; r < count; ++r) {
                const long query = pair[r] / choices;
                copy(keys_of(slopes, pair[r]), wk, &slope[r * wide]);
                copy(keys_of(weights, pair[r]), wk, &w[r * wide]);
                copy(&all_queries[query * wd], wd, &queries[r * wd]);
                copy(&all_grads[query * we], we, &grad_rows[r * we]);
            }
            multiply<false>(count, wd, wk, slope.data(), wide, 1, &joint[wm * wd], wd, products.data(), wd);
            for (long r = 0; r < count; ++r) add(&products[r * wd], s.d, &outs[pair[r] / choices * wd]);
            multiply<true>(s.top, wd, count, slope.data(), 1, wide, queries.data(), wd, to_keys.data(), wd);
            multiply<true>(s.top, we, count, w.data(), 1, wide, grad_rows.data(), we, to_own.data(), we);
            if (last) give(x.chosen + j * s.top, to_k, to_v);
        });
        for (long i = 0; i < s.N; ++i) copy(&outs[i * wd], s.d, to_q(i));
    }

    // From the gradient of weights to that of logits, in its place; columns without weight get 0.
    static void descend(const T* weight, T* change, long length) {
        Vector<T> sums{};
        for (long i = 0; i < length; i += WIDTH<T>) sums += load(weight + i) * load(change + i);
        descend(weight, change, length, total<T>(sums));
    }

    // The same for a part of a row; mean: of the gradient of weights, by these weights.
    static void descend(const T* weight, T* change, long length, T mean) {
        for (long i = 0; i < length; i += WIDTH<T>) store(change + i, load(weight + i) * (load(change + i) - mean));
    }

    // From the gradient of the landmarks' values through their weights to values, keys and landmarks.
    void expand(const Head<T>& x, Rows<T> to_k, Rows<T> to_v, Rows<T> to_l) {
        std::fill(to_landmarks.begin(), to_landmarks.end(), T(0));
        for (long j = 0; j < s.m; ++j) {  // the mean of a row is that of its values
            means[j] = 0;
            for (long c = 0; c < s.e; ++c) means[j] += to_values[j * we + c] * values[j * we + c];
        }
        chunks([&](long first, long count) {
            const long cols = padded<T>(count);
            turn([&](long i) { return x.v(first + i); }, count, s.e, rowsT.data(), CHUNK);
            multiply<false>(s.m, cols, s.e, to_values.data(), we, 1, rowsT.data(), CHUNK, change.data(), CHUNK);
            for (long j = 0; j < s.m; ++j) descend(&probe[j * ldp + first], &change[j * CHUNK], cols, means[j]);
            multiply<false>(count, we, s.m, &probe[first], 1, ldp, to_values.data(), we, products.data(), we);
            for (long i = 0; i < count; ++i) add(&products[i * we], s.e, to_v(first + i));
            multiply<false>(count, wd, s.m, change.data(), 1, CHUNK, landmarks.data(), wd, products.data(), wd);
            for (long i = 0; i < count; ++i) add(&products[i * wd], s.d, to_k(first + i));
            long ld;
            const T* from = whole_rows(x.k, first, count, s.d, ld);
            multiply<true>(s.m, wd, count, change.data(), CHUNK, 1, from, ld, to_landmarks.data(), wd);
        });
        for (long j = 0; j < s.m; ++j) add(&to_landmarks[j * wd], s.d, to_l(j), scale);
    }
};

// Divides the heads among threads.
template <typename T, typename Each>
void heads(const Sizes& s, const View* in, const T* bias, int64_t* chosen, int64_t* experts, bool backward, Each each) {
    const double products = 1.0 * s.B * s.H * s.N * (3 * s.m + s.top * (s.further + 1)) * (s.d + s.e);
    divide(s.B * s.H, s.threads, backward ? 2 * products : products, [&](long first, long last) {
        Work<T> work(s, backward);
        const TileSetting tiles(s.half);
        for (long g = first; g < last; ++g) {
            const long b = g / s.H, h = g % s.H;
            Head<T> x{{in[0], b, h}, {in[1], b, h}, {in[2], b, h}, {in[3], b, h}, bias ? bias + g * (s.m + s.M) : bias,
                      chosen + g * s.m * s.top, experts + g * s.N * (s.further + 1)};
            each(work, x, b, h);
        }
    });
}

// in: q, k, v, l. out: the output.
template <typename T>
void forward(const Sizes& s, const View* in, const T* bias, int64_t* chosen, int64_t* experts, const View* out) {
    heads<T>(s, in, bias, chosen, experts, false, [&](Work<T>& work, const Head<T>& x, long b, long h) {
        work.forward(x, {out[0], b, h});
    });
}

// in: q, k, v, l and the gradient of the output. out: the gradients of q, k, v, l.
template <typename T>
void backward(const Sizes& s, const View* in, const T* bias, int64_t* chosen, int64_t* experts, const View* out) {
    heads<T>(s, in, bias, chosen, experts, true, [&](Work<T>& work, const Head<T>& x, long b, long h) {
        work.backward(x, {in[4], b, h}, {out[0], b, h}, {out[1], b, h}, {out[2], b, h}, {out[3], b, h});
    });
}

}  // namespace

extern "C" {

// Whether products can round to bfloat16 here.
int half_products() { return has_tiles(); }

void mita_forward_float32(const Sizes* s, const View* in, const float* bias, int64_t* chosen, int64_t* experts, const View* out) {
    forward(*s, in, bias, chosen, experts, out);
}

void mita_forward_float64(const Sizes* s, const View* in, const double* bias, int64_t* chosen, int64_t* experts, const View* out) {
    forward(*s, in, bias, chosen, experts, out);
}

void mita_backward_float32(const Sizes* s, const View* in, const float* bias, int64_t* chosen, int64_t* experts, const View* out) {
    backward(*s, in, bias, chosen, experts, out);
}

void mita_backward_float64(const Sizes* s, const View* in, const double* bias, int64_t* chosen, int64_t* experts, const View* out) {
    backward(*s, in, bias, chosen, experts, out);
}

}
