// Bilinear sampling of maps, zero beyond the border, with its gradient; all channels of a grid cell at a time.
// Standard C++17; CMakeLists.txt compiles it.
//
// Contiguous: x (B, h * w, C), points (B, g, K, L, 2) of (y, x) in grid cells, factors (B, g, K, L) or null, out (B, L, K, C).
// Group i of g has the channels from i C / g on.

#include <cmath>

#include "../shared/native.h"

extern "C" {

struct Sizes {
    long B, C, h, w, g, K, L, threads;
};

}

namespace {

// The four cells around a point, their weights and their indices in x; an index of -1 is beyond the border.
template <typename T>
struct Corners {
    T fy, fx, weight[4];
    long index[4];
    bool outside, is_nan;

    Corners(T y, T x, const Sizes& s) {
        is_nan = std::isnan(y) || std::isnan(x);
        outside = !(y >= -1 && y < s.h && x >= -1 && x < s.w);  // at -1 the right derivative is that of the first cell
        if (outside) return;
        const T low = std::floor(y), left = std::floor(x);
        fy = y - low, fx = x - left;
        for (int i = 0; i < 4; ++i) {
            const long row = long(low) + i / 2, column = long(left) + i % 2;
            weight[i] = (i / 2 ? fy : 1 - fy) * (i % 2 ? fx : 1 - fx);
            index[i] = row >= 0 && row < s.h && column >= 0 && column < s.w ? row * s.w + column : -1;
        }
    }
};

template <typename T>
void forward(const Sizes& s, const T* x, const T* points, const T* factors, T* out) {
    const long width = s.C / s.g;
    divide(s.B * s.L, s.threads, 16.0 * s.B * s.L * s.K * s.C, [&](long first, long last) {
        const std::vector<T> zeros(width, T(0));
        for (long position = first; position < last; ++position) {
            const long b = position / s.L, l = position % s.L;
            for (long k = 0; k < s.K; ++k) {
                for (long i = 0; i < s.g; ++i) {
                    const long tap = ((b * s.g + i) * s.K + k) * s.L + l;
                    const Corners<T> corners(points[2 * tap], points[2 * tap + 1], s);
                    T* to = out + (position * s.K + k) * s.C + i * width;
                    if (corners.outside) {
                        std::fill(to, to + width, corners.is_nan ? points[2 * tap] + points[2 * tap + 1] : T(0));
                        continue;
                    }
                    const T* from[4];
                    T weight[4];
                    for (int c = 0; c < 4; ++c) {
                        from[c] = corners.index[c] < 0 ? zeros.data() : x + (b * s.h * s.w + corners.index[c]) * s.C + i * width;
                        weight[c] = corners.weight[c] * (factors ? factors[tap] : 1);
                    }
#pragma omp simd
                    for (long c = 0; c < width; ++c)
                        to[c] = weight[0] * from[0][c] + weight[1] * from[1][c] + weight[2] * from[2][c] + weight[3] * from[3][c];
                }
            }
        }
    });
}

// grad_out: gradient of out. grad_x is zero at the start; grad_factors may be null.
template <typename T>
void backward(const Sizes& s, const T* x, const T* points, const T* factors, const T* grad_out, T* grad_x, T* grad_points,
              T* grad_factors) {
    const long width = s.C / s.g;
    divide(s.B * s.g, s.threads, 32.0 * s.B * s.L * s.K * s.C, [&](long first, long last) {
        std::vector<T> zeros(width, T(0)), discarded(width);
        for (long group = first; group < last; ++group) {
            const long b = group / s.g, i = group % s.g, begin = b * s.h * s.w * s.C + i * width;
            for (long l = 0; l < s.L; ++l) {
                for (long k = 0; k < s.K; ++k) {
                    const long tap = (group * s.K + k) * s.L + l;
                    const Corners<T> corners(points[2 * tap], points[2 * tap + 1], s);
                    T value = 0, down = 0, right = 0;
                    if (corners.is_nan) value = down = right = points[2 * tap] + points[2 * tap + 1];
                    if (!corners.outside) {
                        const T* grad = grad_out + ((b * s.L + l) * s.K + k) * s.C + i * width;
                        const T factor = factors ? factors[tap] : 1;
                        T dots[4];
                        for (int c = 0; c < 4; ++c) {
                            const bool inside = corners.index[c] >= 0;
                            const T* from = inside ? x + begin + corners.index[c] * s.C : zeros.data();
                            T* to = inside ? grad_x + begin + corners.index[c] * s.C : discarded.data();
                            const T weight = corners.weight[c] * factor;
                            T dot = 0;
#pragma omp simd reduction(+ : dot)
                            for (long j = 0; j < width; ++j) {
                                dot += grad[j] * from[j];
                                to[j] += weight * grad[j];
                            }
                            dots[c] = dot;
                        }
                        for (int c = 0; c < 4; ++c) value += corners.weight[c] * dots[c];
                        down = factor * ((1 - corners.fx) * (dots[2] - dots[0]) + corners.fx * (dots[3] - dots[1]));
                        right = factor * ((1 - corners.fy) * (dots[1] - dots[0]) + corners.fy * (dots[3] - dots[2]));
                    }
                    grad_points[2 * tap] = down;
                    grad_points[2 * tap + 1] = right;
                    if (grad_factors) grad_factors[tap] = value;
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
                             const float* grad_out, float* grad_x, float* grad_points, float* grad_factors) {
    backward(*s, x, points, factors, grad_out, grad_x, grad_points, grad_factors);
}

void sample_backward_float64(const Sizes* s, const double* x, const double* points, const double* factors,
                             const double* grad_out, double* grad_x, double* grad_points, double* grad_factors) {
    backward(*s, x, points, factors, grad_out, grad_x, grad_points, grad_factors);
}

}
