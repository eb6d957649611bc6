// Vectors of numbers, small products of matrices and rows, in the vector extensions of GCC and Clang: no intrinsics, so
// one source serves all instruction sets.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "native.h"

namespace {

constexpr long CHUNK = 128;  // keys at a time where all are read

// Bytes of a vector, and rows of a tile of sums: two vectors of each row stay in registers.
#if defined(__AVX512F__)
constexpr long BYTES = 64, TILE = 8;
#elif defined(__AVX2__)
constexpr long BYTES = 32, TILE = 6;
#else
constexpr long BYTES = 16, TILE = 8;
#endif

// 1 / i! for i below COUNT.
template <typename T, int COUNT>
constexpr std::array<T, COUNT> inverse_factorials() {
    std::array<T, COUNT> terms{};
    double term = 1;
    for (int i = 0; i < COUNT; ++i) {
        terms[i] = T(term);
        term /= i + 1;
    }
    return terms;
}

template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
    typedef float Vector __attribute__((vector_size(BYTES)));
    typedef int32_t Whole __attribute__((vector_size(BYTES)));
    typedef uint32_t Ordered;
    static constexpr float TINY = -87.0f, ROUND = 12582912.0f, HIGH = 0.693359375f, LOW = -2.12194440e-4f;
    static constexpr int BIAS = 127, SHIFT = 23, DEGREE = 7;
    static constexpr auto TERMS = inverse_factorials<float, DEGREE + 1>();
};

template <>
struct Lanes<double> {
    typedef double Vector __attribute__((vector_size(BYTES)));
    typedef int64_t Whole __attribute__((vector_size(BYTES)));
    typedef uint64_t Ordered;
    static constexpr double TINY = -708.0, ROUND = 6755399441055744.0;
    static constexpr double HIGH = 6.93145751953125e-1, LOW = 1.42860682030941723212e-6;
    static constexpr int BIAS = 1023, SHIFT = 52, DEGREE = 13;
    static constexpr auto TERMS = inverse_factorials<double, DEGREE + 1>();
};

template <typename T>
constexpr long WIDTH = BYTES / sizeof(T);

template <typename T>
using Vector = typename Lanes<T>::Vector;

template <typename T>
long padded(long length) {
    return (length + WIDTH<T> - 1) / WIDTH<T> * WIDTH<T>;
}

template <typename T>
Vector<T> load(const T* from) {
    Vector<T> value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename T>
void store(T* to, Vector<T> value) {
    std::memcpy(to, &value, sizeof value);
}

// Lanes of two vectors in another order: lane i of the result is lane Order::at(i) of a, then b.
template <typename T, typename Order, size_t... I>
Vector<T> shuffle(Vector<T> a, Vector<T> b, std::index_sequence<I...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, Order::at(I)...);
#else
    return __builtin_shuffle(a, b, typename Lanes<T>::Whole{Order::at(I)...});
#endif
}

template <typename T, typename Order>
Vector<T> shuffle(Vector<T> a, Vector<T> b) {
    return shuffle<T, Order>(a, b, std::make_index_sequence<WIDTH<T>>());
}

template <int STEP>
struct Exchange {
    static constexpr int at(size_t i) { return int(i) ^ STEP; }
};

// Of a square of lanes whose blocks of STEP are transposed: the upper or lower of two rows that are STEP apart.
template <int STEP, bool LOWER, long ALL>
struct Blocks {
    static constexpr int at(size_t i) {
        return LOWER ? (i & STEP ? int(ALL + i) : int(i) + STEP) : (i & STEP ? int(ALL + i) - STEP : int(i));
    }
};

// One number for all lanes, combined by a tree.
template <typename T, int STEP = WIDTH<T> / 2, typename Combine>
T reduce(Vector<T> x, Combine combine) {
    x = combine(x, shuffle<T, Exchange<STEP>>(x, x));
    if constexpr (STEP > 1) return reduce<T, STEP / 2>(x, combine);
    return x[0];
}

template <typename T>
T total(Vector<T> x) {
    return reduce<T>(x, [](Vector<T> a, Vector<T> b) { return a + b; });
}

// The larger numbers; where one is NaN, either.
template <typename T>
Vector<T> larger(Vector<T> a, Vector<T> b) {
    return b > a ? b : a;
}

// Calls each(i) for the lanes i where a comparison is false.
template <typename Comparison, typename Each>
void where_not(const Comparison& lanes, Each each) {
    constexpr int COUNT = sizeof(lanes) / sizeof(lanes[0]), WORDS = (COUNT + 7) / 8;
    typedef int8_t Bytes __attribute__((vector_size(COUNT)));
    const Bytes bytes = __builtin_convertvector(lanes, Bytes);
    uint64_t words[WORDS];
    std::memset(words, 0xFF, sizeof words);
    std::memcpy(words, &bytes, COUNT);
    for (int w = 0; w < WORDS; ++w)
        for (uint64_t rest = ~words[w]; rest; rest &= ~(uint64_t(0xFF) << (__builtin_ctzll(rest) & ~7)))
            each(8 * w + __builtin_ctzll(rest) / 8);
}

// Rows of a square become its columns.
template <typename T, int STEP = WIDTH<T> / 2>
void transpose(Vector<T>* rows) {
    for (int i = 0; i < WIDTH<T>; ++i) {
        if (i & STEP) continue;
        const Vector<T> upper = rows[i], lower = rows[i + STEP];
        rows[i] = shuffle<T, Blocks<STEP, false, WIDTH<T>>>(upper, lower);
        rows[i + STEP] = shuffle<T, Blocks<STEP, true, WIDTH<T>>>(upper, lower);
    }
    if constexpr (STEP > 1) transpose<T, STEP / 2>(rows);
}

// exp of numbers that are at most 0; what is too small becomes exactly 0, NaN stays NaN
template <typename T>
Vector<T> exp_below(Vector<T> x) {
    using L = Lanes<T>;
    Vector<T> steps = (x * T(1.44269504088896340736) + L::ROUND) - L::ROUND;
    Vector<T> rest = (x - steps * L::HIGH) - steps * L::LOW;
    Vector<T> sum = rest * 0 + L::TERMS[L::DEGREE];
    for (int i = L::DEGREE; i-- > 0;) sum = sum * rest + L::TERMS[i];
    typename L::Whole power = __builtin_convertvector(steps, typename L::Whole);
    power = (power + L::BIAS) << L::SHIFT;
    Vector<T> scale;
    std::memcpy(&scale, &power, sizeof scale);
    return x < L::TINY ? Vector<T>{} : sum * scale;
}

// C (rows, cols) = or += A (rows, len) B (len, cols); cols is a multiple of the vector, A has any strides

template <typename T, int ROWS, int VECTORS, bool ADD>
void tile(const T* a, long row, long column, const T* b, long ldb, T* c, long ldc, long len) {
    Vector<T> sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < VECTORS; ++j) sums[r][j] = ADD ? load(c + r * ldc + j * WIDTH<T>) : Vector<T>{};
    for (long l = 0; l < len; ++l) {
        Vector<T> right[VECTORS];
        for (int j = 0; j < VECTORS; ++j) right[j] = load(b + l * ldb + j * WIDTH<T>);
        for (int r = 0; r < ROWS; ++r)
            for (int j = 0; j < VECTORS; ++j) sums[r][j] += a[r * row + l * column] * right[j];
    }
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < VECTORS; ++j) store(c + r * ldc + j * WIDTH<T>, sums[r][j]);
}

// The last rows of a strip, fewer than a tile.
template <typename T, int ROWS, int VECTORS, bool ADD>
void rest(long rows, const T* a, long row, long column, const T* b, long ldb, T* c, long ldc, long len) {
    if (rows == ROWS) return tile<T, ROWS, VECTORS, ADD>(a, row, column, b, ldb, c, ldc, len);
    if constexpr (ROWS > 1) rest<T, ROWS - 1, VECTORS, ADD>(rows, a, row, column, b, ldb, c, ldc, len);
}

template <typename T, int VECTORS, bool ADD>
void strip(long rows, const T* a, long row, long column, const T* b, long ldb, T* c, long ldc, long len) {
    for (; rows >= TILE; rows -= TILE, a += TILE * row, c += TILE * ldc)
        tile<T, TILE, VECTORS, ADD>(a, row, column, b, ldb, c, ldc, len);
    rest<T, TILE - 1, VECTORS, ADD>(rows, a, row, column, b, ldb, c, ldc, len);
}

template <typename T, bool ADD>
void product(long rows, long cols, long len, const T* a, long row, long column, const T* b, long ldb, T* c, long ldc) {
    long at = 0;
    for (; at + 2 * WIDTH<T> <= cols; at += 2 * WIDTH<T>)
        strip<T, 2, ADD>(rows, a, row, column, b + at, ldb, c + at, ldc, len);
    if (at < cols) strip<T, 1, ADD>(rows, a, row, column, b + at, ldb, c + at, ldc, len);
}

// weights in place of logits; a row without any key gets zeros
template <typename T>
void softmax(T* row, long length) {
    Vector<T> most = load(row);
    for (long i = WIDTH<T>; i < length; i += WIDTH<T>) most = larger<T>(most, load(row + i));
    const T top = reduce<T>(most, larger<T>);
    if (top == -std::numeric_limits<T>::infinity() && std::none_of(row, row + length, [](T x) { return x != x; })) {
        std::fill(row, row + length, T(0));
        return;
    }
    Vector<T> sums{};
    for (long i = 0; i < length; i += WIDTH<T>) {
        Vector<T> weight = exp_below<T>(load(row + i) - top);
        sums += weight;
        store(row + i, weight);
    }
    const T share = 1 / total<T>(sums);
    for (long i = 0; i < length; i += WIDTH<T>) store(row + i, load(row + i) * share);
}


// rows

// Rows are short: calling memcpy for each would take longer than copying.
template <typename T>
void copy(const T* from, long length, T* to, T factor = 1) {
    for (long i = 0; i < length; ++i) to[i] = from[i] * factor;
}

template <typename T>
void add(const T* from, long length, T* to, T factor = 1) {
    for (long i = 0; i < length; ++i) to[i] += from[i] * factor;
}

// Rows as columns of `to` (width, wide), a vector's worth of rows at a time; the last row fills what is left of it.
template <typename T, typename Row>
void turn(Row row, long count, long width, T* to, long wide, T factor = 1) {
    for (long first = 0; first < count; first += WIDTH<T>) {
        const T* at[WIDTH<T>];
        for (long c = 0; c < WIDTH<T>; ++c) at[c] = row(std::min(first + c, count - 1));
        long i = 0;
        for (; i + WIDTH<T> <= width; i += WIDTH<T>) {
            Vector<T> square[WIDTH<T>];
            for (long c = 0; c < WIDTH<T>; ++c) square[c] = load(at[c] + i);
            transpose<T>(square);
            for (long c = 0; c < WIDTH<T>; ++c) store(to + (i + c) * wide + first, square[c] * factor);
        }
        for (; i < width; ++i) {
            T* line = to + i * wide + first;
            for (long c = 0; c < WIDTH<T>; ++c) line[c] = at[c][i] * factor;
        }
    }
}

// Zeroed memory of one call, taken piece by piece. A thread keeps up to KEPT bytes of it for its next call, because
// memory that the system gives anew costs more than the work on short inputs.
struct Arena {
    static constexpr size_t KEPT = 4 << 20, LINE = 64;
    size_t used = 0;
    char* start;
    std::vector<char> own;

    explicit Arena(size_t bytes) {
        static thread_local std::vector<char> kept;
        std::vector<char>& from = bytes <= KEPT ? kept : own;
        if (from.size() < bytes + LINE) from = std::vector<char>(bytes + LINE);
        start = from.data() + (LINE - reinterpret_cast<uintptr_t>(from.data()) % LINE) % LINE;
        std::memset(start, 0, bytes);
    }
};

template <typename T>
struct Array {
    T* first = nullptr;
    size_t length;
    Array(size_t length) : length(length) {}
    size_t bytes() const { return (length * sizeof(T) + Arena::LINE - 1) / Arena::LINE * Arena::LINE; }
    void take(Arena& arena) {
        first = reinterpret_cast<T*>(arena.start + arena.used);
        arena.used += bytes();
    }
    T& operator[](size_t i) { return first[i]; }
    T* data() { return first; }
    T* begin() { return first; }
    T* end() { return first + length; }
};

// Numbers as integers in the same order, and back; NaN is the largest.
template <typename T, typename U = typename Lanes<T>::Ordered>
U ordered(T number) {
    constexpr U SIGN = U(1) << (8 * sizeof(U) - 1);
    U raw;
    std::memcpy(&raw, &number, sizeof raw);
    raw = raw & SIGN ? ~raw : raw | SIGN;
    return number != number ? ~U(0) : raw;
}

template <typename T, typename U = typename Lanes<T>::Ordered>
T number(U bits) {
    constexpr U SIGN = U(1) << (8 * sizeof(U) - 1);
    bits = bits & SIGN ? bits & ~SIGN : ~bits;
    T result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// The `top`-th largest of some integers, bit by bit.
template <typename U>
U threshold(const U* bits, long length, long top) {
    U least = 0;
    for (U bit = U(1) << (8 * sizeof(U) - 1); bit; bit >>= 1) {
        U tried = least | bit, count = 0;
        for (long i = 0; i < length; ++i) count += bits[i] >= tried;
        if (count >= U(top)) least = tried;
        if (count == U(top)) break;
    }
    return least;
}

// Indices of the `top` largest, in their order; of equals the first; NaN is the largest.
template <typename T>
void largest(const T* row, long length, long top, int64_t* indices, Array<typename Lanes<T>::Ordered>& bits) {
    for (long i = 0; i < length; ++i) bits[i] = ordered(row[i]);
    const auto least = threshold(bits.data(), length, top);
    long above = 0;
    for (long i = 0; i < length; ++i) above += bits[i] > least;
    long equal = top - above, i = 0;
    auto take = [&](long at) {
        if (bits[at] > least || equal-- > 0) *indices++ = at;
    };
    typedef decltype(ordered(T())) Whole __attribute__((vector_size(BYTES)));
    for (Whole some; i + WIDTH<T> <= length; i += WIDTH<T>) {
        std::memcpy(&some, &bits[i], sizeof some);
        where_not(some < least, [&](long lane) { take(i + lane); });
    }
    for (; i < length; ++i)
        if (bits[i] >= least) take(i);
}

}  // namespace
