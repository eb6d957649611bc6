// Means of patch tokens over windows of the grid, with their gradient; each head by itself. CMakeLists.txt compiles it.

#include "native.h"

extern "C" {

// Tokens x (B, H, N, d), landmarks y (B, H, rows * columns, d). The image begins at token `first` and has `width`
// columns. Windows are pairs of begin and end, first those of rows, then those of columns.
struct PoolSizes {
    long B, H, N, d, first, width, rows, columns, threads;
};

}

namespace {

// Calls each(window, token, 1 / size of the window) for all tokens of all windows.
template <typename T, typename Each>
void windows(const PoolSizes& s, const long* edges, Each each) {
    const long* across = edges + 2 * s.rows;
    for (long i = 0; i < s.rows; ++i)
        for (long j = 0; j < s.columns; ++j) {
            const long top = edges[2 * i], bottom = edges[2 * i + 1], left = across[2 * j], right = across[2 * j + 1];
            const T share = T(1) / T((bottom - top) * (right - left));
            for (long r = top; r < bottom; ++r)
                for (long c = left; c < right; ++c) each(i * s.columns + j, s.first + r * s.width + c, share);
        }
}

template <typename T>
void add(const T* from, long length, T factor, T* to) {
#pragma omp simd
    for (long i = 0; i < length; ++i) to[i] += factor * from[i];
}

enum Step { FORWARD, GRADIENT, ADDED };  // from x to y, or from y to x, in place of what is there or added to it

template <typename T>
void pool(const PoolSizes& s, const long* edges, const View& x, const View& y, int step) {
    divide(s.B * s.H, s.threads, 4.0 * s.B * s.H * s.N * s.d, [&](long begin, long end) {
        for (long g = begin; g < end; ++g) {
            const Rows<T> tokens(x, g / s.H, g % s.H), landmarks(y, g / s.H, g % s.H);
            const Rows<T>& to = step == FORWARD ? landmarks : tokens;
            const long cleared = step == ADDED ? 0 : step == FORWARD ? s.rows * s.columns : s.N;
            for (long i = 0; i < cleared; ++i) std::fill(to(i), to(i) + s.d, T(0));
            windows<T>(s, edges, [&](long window, long token, T share) {
                if (step == FORWARD)
                    add(tokens(token), s.d, share, landmarks(window));
                else
                    add(landmarks(window), s.d, share, tokens(token));
            });
        }
    });
}

}  // namespace

extern "C" {

void pool_float32(const PoolSizes* s, const long* edges, const View* x, const View* y, int step) {
    pool<float>(*s, edges, *x, *y, step);
}

void pool_float64(const PoolSizes* s, const long* edges, const View* x, const View* y, int step) {
    pool<double>(*s, edges, *x, *y, step);
}

}
