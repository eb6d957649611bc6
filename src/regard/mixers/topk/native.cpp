// Exact top-k attention on a CPU, a block of queries at a time, with its gradient. The logits of a block are computed
// and dropped: only the chosen keys are kept.
//
// A query of q (N, d) attends to those `top` of the keys k (M, d) that have its largest logits, with values v (M, e).

#include "../shared/vectors.h"

extern "C" {

struct TopKSizes {
    long B, H, N, M, top, d, e, threads;
    int has_plan;  // whether the keys of each query are an input
    double scale;
};

}

namespace {

constexpr long BLOCK = 32;  // queries at a time

// sum of factor[c] * row(c), for `count` rows of any width
template <typename T, typename Row>
void weighted_sum(Row row, const T* factor, long count, long width, T* to) {
    long at = 0;
    for (; at + 4 * WIDTH<T> <= width; at += 4 * WIDTH<T>) {
        Vector<T> sums[4] = {};
        for (long c = 0; c < count; ++c)
            for (int j = 0; j < 4; ++j) sums[j] += factor[c] * load(row(c) + at + j * WIDTH<T>);
        for (int j = 0; j < 4; ++j) store(to + at + j * WIDTH<T>, sums[j]);
    }
    for (; at + WIDTH<T> <= width; at += WIDTH<T>) {
        Vector<T> sum{};
        for (long c = 0; c < count; ++c) sum += factor[c] * load(row(c) + at);
        store(to + at, sum);
    }
    for (; at < width; ++at) {
        T sum = 0;
        for (long c = 0; c < count; ++c) sum += factor[c] * row(c)[at];
        to[at] = sum;
    }
}

template <typename T>
T dot(const T* a, const T* b, long width) {
    Vector<T> sums{};
    long at = 0;
    for (; at + WIDTH<T> <= width; at += WIDTH<T>) sums += load(a + at) * load(b + at);
    T sum = total<T>(sums);
    for (; at < width; ++at) sum += a[at] * b[at];
    return sum;
}

template <typename T>
struct TopKWork {
    const TopKSizes& s;
    const T scale;
    const long ldp, wt, groups;          // padded keys and top; vectors of maxima
    Array<T> panels, logits, w, change;  // keys as columns, CHUNK of them after the other; of BLOCK queries; of one
    Array<T> maxima, candidates;
    Array<int64_t> places;
    Array<typename Lanes<T>::Ordered> bits;
    Arena arena;

    TopKWork(const TopKSizes& s, bool backward)
        : s(s), scale(s.scale), ldp(padded<T>(s.M)), wt(padded<T>(s.top)),
          groups((2 * s.top + WIDTH<T> - 1) / WIDTH<T>), panels(scores(backward) * ((s.M + CHUNK - 1) / CHUNK) * CHUNK * s.d),
          logits(scores(backward) * BLOCK * ldp), w(wt), change(backward ? wt : 0), maxima(groups * WIDTH<T>),
          candidates(ldp), places(ldp), bits(std::max(ldp, groups * WIDTH<T>)), arena(measure()) {
        each([&](auto& array) { array.take(arena); });
    }

    long scores(bool backward) const { return backward || s.has_plan ? 0 : 1; }

    template <typename Visit>
    void each(Visit visit) {
        for (auto* array : {&panels, &logits, &w, &change, &maxima, &candidates}) visit(*array);
        visit(places);
        visit(bits);
    }

    size_t measure() {
        size_t bytes = 0;
        each([&](auto& array) { bytes += array.bytes(); });
        return bytes;
    }

    // The `top` largest of a row of M logits, padded by -inf. At least `top` of them reach the `top`-th largest maximum
    // of any groups of the row, so what is below it needs no look.
    void choose(const T* row, int64_t* keys) {
        if (ldp < 4 * groups * WIDTH<T>) return largest(row, s.M, s.top, keys, bits);
        const long wide = groups * WIDTH<T>;
        for (long i = 0; i < wide; i += WIDTH<T>) {
            Vector<T> most = load(row + i);
            for (long j = i + wide; j < ldp; j += wide) most = larger<T>(most, load(row + j));
            store(&maxima[i], most);
        }
        for (long i = 0; i < wide; ++i) bits[i] = ordered(maxima[i]);
        const T bound = number<T>(threshold(bits.data(), wide, s.top));
        long count = 0;
        for (long i = 0; i < ldp; i += WIDTH<T>)
            where_not(load(row + i) < bound, [&](long lane) {
                candidates[count] = row[i + lane];
                places[count++] = i + lane;
            });
        largest(candidates.data(), count, s.top, keys, bits);
        for (long c = 0; c < s.top; ++c) keys[c] = places[keys[c]];
    }

    void forward(Rows<T> q, Rows<T> k, Rows<T> v, int64_t* chosen, Rows<T> out) {
        for (long first = 0; !s.has_plan && first < s.M; first += CHUNK)
            turn([&](long i) { return k(first + i); }, std::min(CHUNK, s.M - first), s.d, &panels[first * s.d], CHUNK, scale);
        for (long at = 0; at < s.N; at += BLOCK) {
            const long count = std::min(BLOCK, s.N - at);
            for (long first = 0; !s.has_plan && first < s.M; first += CHUNK)
                product<T, false>(count, padded<T>(std::min(CHUNK, s.M - first)), s.d, q(at), q.stride, 1,
                                  &panels[first * s.d], CHUNK, &logits[first], ldp);
            for (long r = 0; r < count; ++r) {
                int64_t* keys = chosen + (at + r) * s.top;
                if (!s.has_plan) {
                    T* row = &logits[r * ldp];
                    std::fill(row + s.M, row + ldp, -std::numeric_limits<T>::infinity());
                    choose(row, keys);
                    for (long c = 0; c < s.top; ++c) w[c] = row[keys[c]];
                } else {
                    for (long c = 0; c < s.top; ++c) w[c] = scale * dot(q(at + r), k(keys[c]), s.d);
                }
                weigh();
                weighted_sum([&](long c) { return v(keys[c]); }, w.data(), s.top, s.e, out(at + r));
            }
        }
    }

    void weigh() {
        std::fill(&w[s.top], &w[wt], -std::numeric_limits<T>::infinity());
        softmax(w.data(), wt);
    }

    void backward(Rows<T> q, Rows<T> k, Rows<T> v, const int64_t* chosen, Rows<T> grad, Rows<T> to_q, Rows<T> to_k,
                  Rows<T> to_v) {
        for (long i = 0; i < s.M; ++i) {
            std::fill(to_k(i), to_k(i) + s.d, T(0));
            std::fill(to_v(i), to_v(i) + s.e, T(0));
        }
        for (long i = 0; i < s.N; ++i) {
            const int64_t* keys = chosen + i * s.top;
            for (long c = 0; c < s.top; ++c) w[c] = scale * dot(q(i), k(keys[c]), s.d);
            weigh();
            T mean = 0;
            for (long c = 0; c < s.top; ++c) {
                change[c] = dot(grad(i), v(keys[c]), s.e);
                mean += w[c] * change[c];
            }
            for (long c = 0; c < s.top; ++c) {
                change[c] = scale * w[c] * (change[c] - mean);
                add(q(i), s.d, to_k(keys[c]), change[c]);
                add(grad(i), s.e, to_v(keys[c]), w[c]);
            }
            weighted_sum([&](long c) { return k(keys[c]); }, change.data(), s.top, s.d, to_q(i));
        }
    }
};

// in: q, k, v. out: the output.
template <typename T>
void topk_forward(const TopKSizes& s, const View* in, int64_t* chosen, const View* out) {
    divide(s.B * s.H, s.threads, 1.0 * s.B * s.H * s.N * s.M * s.d, [&](long first, long last) {
        TopKWork<T> work(s, false);
        for (long g = first; g < last; ++g) {
            const long b = g / s.H, h = g % s.H;
            work.forward({in[0], b, h}, {in[1], b, h}, {in[2], b, h}, chosen + g * s.N * s.top, {out[0], b, h});
        }
    });
}

// in: q, k, v and the gradient of the output. out: the gradients of q, k, v.
template <typename T>
void topk_backward(const TopKSizes& s, const View* in, int64_t* chosen, const View* out) {
    divide(s.B * s.H, s.threads, 2.0 * s.B * s.H * s.N * s.top * (s.d + s.e), [&](long first, long last) {
        TopKWork<T> work(s, true);
        for (long g = first; g < last; ++g) {
            const long b = g / s.H, h = g % s.H;
            work.backward({in[0], b, h}, {in[1], b, h}, {in[2], b, h}, chosen + g * s.N * s.top, {in[3], b, h},
                          {out[0], b, h}, {out[1], b, h}, {out[2], b, h});
        }
    });
}

}  // namespace

extern "C" {

void topk_forward_float32(const TopKSizes* s, const View* in, int64_t* chosen, const View* out) {
    topk_forward<float>(*s, in, chosen, out);
}

void topk_forward_float64(const TopKSizes* s, const View* in, int64_t* chosen, const View* out) {
    topk_forward<double>(*s, in, chosen, out);
}

void topk_backward_float32(const TopKSizes* s, const View* in, int64_t* chosen, const View* out) {
    topk_backward<float>(*s, in, chosen, out);
}

void topk_backward_float64(const TopKSizes* s, const View* in, int64_t* chosen, const View* out) {
    topk_backward<double>(*s, in, chosen, out);
}

}
