// Bilinear sampling of maps at given points, zero beyond the border, with its gradient; one cell's channels at a time.
// Standard C++17; compiled by compiled.py when it is asked for.
//
// Contiguous: x (B, h * w, C), points (B, g, K, L, 2) of (y, x) in cells, factors (B, g, K, L) or null, out (B, L, K, C).
// Group i of g has the channels from i C / g.

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

extern "C" {

struct Sizes {
    long B, C, h, w, g, K, L, threads;
};

}

namespace {

// The four cells around a point, their shares, and where they lie in x; a place of -1 is beyond the border.
template <typename T>
struct Corners {
    T fy, fx, share[4];
    long place[4];
    bool nowhere, unknown;

    Corners(T y, T x, const Sizes& s) {
        unknown = std::isnan(y) || std::isnan(x);
        nowhere = !(y > -1 && y < s.h && x > -1 && x < s.w);
        if (nowhere) return;
        const T low = std::floor(y), left = std::floor(x);
        fy = y - low, fx = x - left;
        for (int i = 0; i < 4; ++i) {
            const long row = long(low) + i / 2, column = long(left) + i % 2;
            share[i] = (i / 2 ? fy : 1 - fy) * (i % 2 ? fx : 1 - fx);
            place[i] = row >= 0 && row < s.h && column >= 0 && column < s.w ? row * s.w + column : -1;
        }
    }
};

template <typename Work>
void each(long count, long threads, Work work) {
    threads = std::max(1L, std::min(threads, count));
    std::vector<std::thread> others;
    auto part = [&](long number) { work(number * count / threads, (number + 1) * count / threads); };
    for (long number = 1; number < threads; ++number) others.emplace_back(part, number);
    part(0);
    for (auto& other : others) other.join();
}

template <typename T>
void forward(const Sizes& s, const T* x, const T* points, const T* factors, T* out) {
    const long width = s.C / s.g;
    each(s.B * s.L, s.threads, [&](long first, long last) {
        const std::vector<T> nothing(width, T(0));
        for (long at = first; at < last; ++at) {
            const long b = at / s.L, l = at % s.L;
            for (long k = 0; k < s.K; ++k) {
                for (long i = 0; i < s.g; ++i) {
                    const long tap = ((b * s.g + i) * s.K + k) * s.L + l;
                    const Corners<T> near(points[2 * tap], points[2 * tap + 1], s);
                    T* to = out + (at * s.K + k) * s.C + i * width;
                    if (near.nowhere) {
                        std::fill(to, to + width, near.unknown ? points[2 * tap] + points[2 * tap + 1] : T(0));
                        continue;
                    }
                    const T* from[4];
                    T share[4];
                    for (int c = 0; c < 4; ++c) {
                        from[c] = near.place[c] < 0 ? nothing.data() : x + (b * s.h * s.w + near.place[c]) * s.C + i * width;
                        share[c] = near.share[c] * (factors ? factors[tap] : 1);
                    }
#pragma omp simd
                    for (long c = 0; c < width; ++c)
                        to[c] = share[0] * from[0][c] + share[1] * from[1][c] + share[2] * from[2][c] + share[3] * from[3][c];
                }
            }
        }
    });
}

// ahead: gradient of out. to_x is zero before; to_factors may be null.
template <typename T>
void backward(const Sizes& s, const T* x, const T* points, const T* factors, const T* ahead, T* to_x, T* to_points,
              T* to_factors) {
    const long width = s.C / s.g;
    each(s.B * s.g, s.threads, [&](long first, long last) {
        std::vector<T> nothing(width, T(0)), lost(width);
        for (long group = first; group < last; ++group) {
            const long b = group / s.g, i = group % s.g, begin = b * s.h * s.w * s.C + i * width;
            for (long l = 0; l < s.L; ++l) {
                for (long k = 0; k < s.K; ++k) {
                    const long tap = (group * s.K + k) * s.L + l;
                    const Corners<T> near(points[2 * tap], points[2 * tap + 1], s);
                    T value = 0, down = 0, right = 0;
                    if (near.unknown) value = down = right = points[2 * tap] + points[2 * tap + 1];
                    if (!near.nowhere) {
                        const T* given = ahead + ((b * s.L + l) * s.K + k) * s.C + i * width;
                        const T factor = factors ? factors[tap] : 1;
                        T dots[4];
                        for (int c = 0; c < 4; ++c) {
                            const bool inside = near.place[c] >= 0;
                            const T* from = inside ? x + begin + near.place[c] * s.C : nothing.data();
                            T* to = inside ? to_x + begin + near.place[c] * s.C : lost.data();
                            const T share = near.share[c] * factor;
                            T dot = 0;
#pragma omp simd reduction(+ : dot)
                            for (long j = 0; j < width; ++j) {
                                dot += given[j] * from[j];
                                to[j] += share * given[j];
                            }
                            dots[c] = dot;
                        }
                        for (int c = 0; c < 4; ++c) value += near.share[c] * dots[c];
                        down = factor * ((1 - near.fx) * (dots[2] - dots[0]) + near.fx * (dots[3] - dots[1]));
                        right = factor * ((1 - near.fy) * (dots[1] - dots[0]) + near.fy * (dots[3] - dots[2]));
                    }
                    to_points[2 * tap] = down;
                    to_points[2 * tap + 1] = right;
                    if (to_factors) to_factors[tap] = value;
                }
            }
        }
    });
}

}  // namespace

extern "C" {

void sample_forward_float32(const Sizes* s, const float* x, const float* points, const float* factors, float* out) {
    forward(*s, x, points, factors, out);
}

void sample_forward_float64(const Sizes* s, const double* x, const double* points, const double* factors, double* out) {
    forward(*s, x, points, factors, out);
}

void sample_backward_float32(const Sizes* s, const float* x, const float* points, const float* factors,
                             const float* ahead, float* to_x, float* to_points, float* to_factors) {
    backward(*s, x, points, factors, ahead, to_x, to_points, to_factors);
}

void sample_backward_float64(const Sizes* s, const double* x, const double* points, const double* factors,
                             const double* ahead, double* to_x, double* to_points, double* to_factors) {
    backward(*s, x, points, factors, ahead, to_x, to_points, to_factors);
}

}
