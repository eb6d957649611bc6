// The position bias of deformable attention on a CPU, with its gradient: a table sampled at (query - point).
//
// Queries lie on the cells of a grid, so all of them are the same fraction of a cell away from a point: the bias of one
// point for all queries is a window of the table, moved by this fraction.

#include <cmath>

#include "../shared/vectors.h"

extern "C" {

struct BiasSizes {
    long B, H, G, points, h, w, rows, columns, prefix, threads;  // rows, columns: of a head's bias
};

}

namespace {

// A table (2h - 1, 2w - 1) of a head whose border values go on for h rows and w columns around it.
template <typename T>
struct Around {
    const BiasSizes& s;
    const long height, width, ld;
    Array<T> cells;

    explicit Around(const BiasSizes& s)
        : s(s), height(2 * s.h - 1), width(2 * s.w - 1), ld(width + 2 * s.w + 1), cells((height + 2 * s.h + 1) * ld) {}

    // Visits each cell and its cell of the table.
    template <typename Each>
    void each(Each each) {
        for (long y = 0; y < height + 2 * s.h + 1; ++y)
            for (long x = 0; x < ld; ++x)
                each(cells[y * ld + x], std::clamp(y - s.h, 0L, height - 1) * width + std::clamp(x - s.w, 0L, width - 1));
    }
};

// Where the window of a point starts, and by which fraction of a cell it is moved.
template <typename T>
struct Start {
    long cell;
    T fraction;

    Start(T point, long side) {
        T at = std::clamp(side - 1 - point, T(-side), T(2 * side - 1));
        cell = long(std::floor(at));
        fraction = at - cell;
        cell += side;
    }
};

template <typename T>
void position_bias(const BiasSizes& s, const T* table, const T* points, T* out) {
    divide(s.B * s.H, s.threads, 8.0 * s.B * s.H * s.rows * s.columns, [&](long first, long last) {
        Around<T> around(s);
        Array<T> tile(WIDTH<T> * padded<T>(s.w)), turned(padded<T>(s.w) * WIDTH<T>);
        Arena arena(around.cells.bytes() + tile.bytes() + turned.bytes());
        for (auto* array : {&around.cells, &tile, &turned}) array->take(arena);
        const long ldt = padded<T>(s.w);
        for (long g = first; g < last; ++g) {
            const long b = g / s.H, h = g % s.H;
            const T* own = table + h * around.height * around.width;
            const T* point = points + (b * s.G + h * s.G / s.H) * s.points * 2;
            T* bias = out + g * s.rows * s.columns;
            around.each([&](T& cell, long from) { cell = own[from]; });
            for (long p = 0; p < s.points; p += WIDTH<T>) {
                const long count = std::min(WIDTH<T>, s.points - p);
                for (long i = 0; i < s.h; ++i) {
                    for (long c = 0; c < count; ++c) {
                        T* line = &tile[c * ldt];
                        const T y = point[2 * (p + c)], x = point[2 * (p + c) + 1];
                        if (y != y || x != x) {
                            std::fill(line, line + s.w, y + x);
                            continue;
                        }
                        const Start<T> down(y, s.h), right(x, s.w);
                        const T* a = &around.cells[(down.cell + i) * around.ld + right.cell];
                        const T *below = a + around.ld, fy = down.fraction, fx = right.fraction;
                        const T w[4] = {(1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx};
                        for (long j = 0; j < s.w; ++j)
                            line[j] = w[0] * a[j] + w[1] * a[j + 1] + w[2] * below[j] + w[3] * below[j + 1];
                    }
                    turn([&](long c) { return &tile[c * ldt]; }, count, s.w, turned.data(), WIDTH<T>);
                    T* to = bias + (s.prefix + i * s.w) * s.columns + p;
                    for (long j = 0; j < s.w; ++j, to += s.columns)
                        if (count == WIDTH<T>) store(to, load(&turned[j * WIDTH<T>]));
                        else copy(&turned[j * WIDTH<T>], count, to);
                }
            }
        }
    });
}

// to_table (H, 2h - 1, 2w - 1), to_points (B, H, points, 2): of each head.
template <typename T>
void position_bias_backward(const BiasSizes& s, const T* points, const T* table, const T* grad, T* to_table, T* to_points) {
    divide(s.H, s.threads, 16.0 * s.B * s.H * s.rows * s.columns, [&](long first, long last) {
        Around<T> around(s), sums(s);
        const long ldt = padded<T>(s.w);
        Array<T> tile(WIDTH<T> * ldt);
        Arena arena(around.cells.bytes() + sums.cells.bytes() + tile.bytes());
        for (auto* array : {&around.cells, &sums.cells, &tile}) array->take(arena);
        for (long h = first; h < last; ++h) {
            const T* own = table + h * around.height * around.width;
            T* to_own = to_table + h * around.height * around.width;
            around.each([&](T& cell, long from) { cell = own[from]; });
            std::fill(sums.cells.begin(), sums.cells.end(), T(0));
            for (long b = 0; b < s.B; ++b) {
                const long g = b * s.H + h;
                const T* point = points + (b * s.G + h * s.G / s.H) * s.points * 2;
                T* to_point = to_points + g * s.points * 2;
                const T* bias = grad + g * s.rows * s.columns;
                for (long p = 0; p < s.points; p += WIDTH<T>) {
                    const long count = std::min(WIDTH<T>, s.points - p);
                    for (long i = 0; i < s.h; ++i) {
                        const T* from = bias + (s.prefix + i * s.w) * s.columns + p;
                        turn([&](long j) { return from + j * s.columns; }, s.w, count, tile.data(), ldt);
                        for (long c = 0; c < count; ++c) {
                            const T y = point[2 * (p + c)], x = point[2 * (p + c) + 1];
                            if (y != y || x != x) {
                                to_point[2 * (p + c)] = to_point[2 * (p + c) + 1] = y + x;
                                continue;
                            }
                            const Start<T> down(y, s.h), right(x, s.w);
                            const long at = (down.cell + i) * around.ld + right.cell;
                            const T *a = &around.cells[at], *below = a + around.ld, *change = &tile[c * ldt];
                            T *to = &sums.cells[at], *to_below = to + around.ld;
                            const T fy = down.fraction, fx = right.fraction;
                            const T w[4] = {(1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx};
                            T by_y = 0, by_x = 0;
#pragma omp simd reduction(+ : by_y, by_x)
                            for (long j = 0; j < s.w; ++j) {
                                by_y += change[j] * ((1 - fx) * (below[j] - a[j]) + fx * (below[j + 1] - a[j + 1]));
                                by_x += change[j] * ((1 - fy) * (a[j + 1] - a[j]) + fy * (below[j + 1] - below[j]));
                            }
                            to_point[2 * (p + c)] -= by_y;
                            to_point[2 * (p + c) + 1] -= by_x;
                            add(change, s.w, to, w[0]);
                            add(change, s.w, to + 1, w[1]);
                            add(change, s.w, to_below, w[2]);
                            add(change, s.w, to_below + 1, w[3]);
                        }
                    }
                }
            }
            sums.each([&](T& cell, long from) { to_own[from] += cell; });
        }
    });
}

}  // namespace

extern "C" {

void position_bias_forward_float32(const BiasSizes* s, const float* table, const float* points, float* out) {
    position_bias(*s, table, points, out);
}

void position_bias_forward_float64(const BiasSizes* s, const double* table, const double* points, double* out) {
    position_bias(*s, table, points, out);
}

void position_bias_backward_float32(const BiasSizes* s, const float* points, const float* table, const float* grad,
                                    float* to_table, float* to_points) {
    position_bias_backward(*s, points, table, grad, to_table, to_points);
}

void position_bias_backward_float64(const BiasSizes* s, const double* points, const double* table, const double* grad,
                                    double* to_table, double* to_points) {
    position_bias_backward(*s, points, table, grad, to_table, to_points);
}

}
