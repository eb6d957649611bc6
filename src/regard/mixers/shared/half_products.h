// Products of matrices whose numbers are rounded to bfloat16, with sums in float32, by AMX's tiles. Whether there are any
// is found at run time; a compiler that does not know them leaves them out (no REGARD_HALF). The dot products of
// AVX512-BF16 were tried: with their packing they took 1.4 to 1.8 times as long as float32 on a Xeon that has both.
#pragma once

#include "vectors.h"

#ifdef REGARD_HALF
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#ifdef REGARD_HALF

#define WITH_HALF __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")))

// GCC's functions for tiles do not say that they read memory: what was written before must not be moved behind them.
inline void finish_writing() { asm volatile("" ::: "memory"); }

// Whether this processor and its system have tiles, and numbers of bfloat16 beside them.
inline bool has_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;
    __get_cpuid_count(7, 0, &a, &b, &c, &d);
    if (!(d >> 22 & 1) || !(d >> 24 & 1)) return false;
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // Linux gives their state to programs that ask for it
}

// Sixteen rows of 64 bytes in each of the eight tiles, for the life of a thread's work.
struct TileSetting {
    bool on;
    WITH_HALF explicit TileSetting(bool half) : on(half) {
        if (!on) return;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } setting;
        asm volatile("" : : "r"(&setting) : "memory");
        _tile_loadconfig(&setting);
    }
    WITH_HALF ~TileSetting() {
        if (on) _tile_release();
    }
};

constexpr long SIDE = 16, STRIP = 32;  // of a tile of sums, and of the four that are computed together

// Both factors in bfloat16, two numbers of the summed axis in one word; zeros fill up to whole tiles.
struct Packed {
    std::vector<uint32_t> left, right;
    long pairs = 0;
};

// Two vectors of 16 numbers as words: the first in the lower halves.
WITH_HALF inline __m512i paired(__m512 low, __m512 high) {
    const __m512i lower = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
    return _mm512_or_si512(lower, _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high)), 16));
}

// B (len, cols) as strips of 16 columns, each (pairs, 16); cols is a multiple of 16.
WITH_HALF inline void pack_right(Packed& packed, const float* b, long ldb, long len, long cols) {
    packed.pairs = (len + STRIP - 1) / STRIP * SIDE;
    packed.right.resize((cols + SIDE) * packed.pairs);  // one strip more, which a pair of strips may read
    for (long at = 0; at < cols; at += SIDE) {
        uint32_t* to = &packed.right[at * packed.pairs];
        for (long p = 0; p < packed.pairs; ++p, to += SIDE) {
            const __m512 low = 2 * p < len ? _mm512_loadu_ps(b + 2 * p * ldb + at) : _mm512_setzero_ps();
            const __m512 high = 2 * p + 1 < len ? _mm512_loadu_ps(b + (2 * p + 1) * ldb + at) : _mm512_setzero_ps();
            _mm512_storeu_si512(to, paired(low, high));
        }
    }
}

// Up to 32 rows of A, whose numbers are `column` apart, as (32, pairs).
WITH_HALF inline void pack_left(Packed& packed, const float* a, long row, long column, long rows, long len) {
    const long pairs = packed.pairs;
    packed.left.resize(STRIP * pairs);
    if (row == 1 && column != 1) {  // the rows of A are columns in memory
        for (long first = 0; first < STRIP; first += SIDE) {
            const long count = std::max(0L, std::min(SIDE, rows - first));
            const __mmask16 some = __mmask16((1u << count) - 1);
            for (long at = 0; at < pairs; at += SIDE) {
                Vector<float> square[SIDE];
                for (long p = 0; p < SIDE; ++p) {
                    const long l = 2 * (at + p);
                    const __m512 low = _mm512_maskz_loadu_ps(l < len ? some : 0, a + first + l * column);
                    const __m512 high = _mm512_maskz_loadu_ps(l + 1 < len ? some : 0, a + first + (l + 1) * column);
                    const __m512i words = paired(low, high);
                    std::memcpy(&square[p], &words, sizeof words);
                }
                transpose<float>(square);
                for (long r = 0; r < SIDE; ++r) std::memcpy(&packed.left[(first + r) * pairs + at], &square[r], 64);
            }
        }
        return;
    }
    for (long r = 0; r < STRIP; ++r) {
        uint32_t* to = &packed.left[r * pairs];
        if (r >= rows) {
            std::memset(to, 0, pairs * sizeof *to);
        } else if (column == 1) {
            for (long at = 0; at < pairs; at += SIDE) {
                const float* from = a + r * row + 2 * at;
                const long left = std::max(0L, std::min(STRIP, len - 2 * at));
                const __mmask16 low = __mmask16((1u << std::min(left, SIDE)) - 1);
                const __mmask16 high = __mmask16((1u << std::max(0L, left - SIDE)) - 1);
                const __m512bh words =
                    _mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, from + SIDE), _mm512_maskz_loadu_ps(low, from));
                std::memcpy(to + at, &words, 64);
            }
        } else {
            for (long p = 0; p < pairs; ++p) {
                float two[2] = {2 * p < len ? a[r * row + 2 * p * column] : 0,
                                2 * p + 1 < len ? a[r * row + (2 * p + 1) * column] : 0};
                const __m128bh words = _mm_cvtneps_pbh(_mm_setr_ps(two[0], two[1], 0, 0));
                std::memcpy(to + p, &words, sizeof *to);
            }
        }
    }
}

// C (32, 32) = or += packed A times two strips of packed B, by tiles.
template <bool ADD>
WITH_HALF void by_tiles(const Packed& packed, long at, float* c, long ldc) {
    const long pairs = packed.pairs, bytes = ldc * sizeof(float);
    const uint32_t *a = packed.left.data(), *b = &packed.right[at * pairs];
    finish_writing();
    if (ADD) {
        _tile_loadd(0, c, bytes);
        _tile_loadd(1, c + SIDE, bytes);
        _tile_loadd(2, c + SIDE * ldc, bytes);
        _tile_loadd(3, c + SIDE * ldc + SIDE, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long p = 0; p < pairs; p += SIDE) {
        _tile_loadd(4, a + p, pairs * 4);
        _tile_loadd(5, a + SIDE * pairs + p, pairs * 4);
        _tile_loadd(6, b + p * SIDE, 64);
        _tile_loadd(7, b + (pairs + p) * SIDE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, bytes);
    _tile_stored(1, c + SIDE, bytes);
    _tile_stored(2, c + SIDE * ldc, bytes);
    _tile_stored(3, c + SIDE * ldc + SIDE, bytes);
}

// As `product`, for float32 whose rows and columns are rounded.
template <bool ADD>
WITH_HALF void half_product(Packed& packed, long rows, long cols, long len, const float* a, long row, long column,
                            const float* b, long ldb, float* c, long ldc) {
    pack_right(packed, b, ldb, len, cols);
    for (long first = 0; first < rows; first += STRIP) {
        const long count = std::min(STRIP, rows - first);
        pack_left(packed, a + first * row, row, column, count, len);
        for (long at = 0; at < cols; at += STRIP) {
            const long width = std::min(STRIP, cols - at);
            float* to = c + first * ldc + at;
            alignas(64) float part[STRIP * STRIP];
            if (count == STRIP && width == STRIP) {
                by_tiles<ADD>(packed, at, to, ldc);
                continue;
            }
            by_tiles<false>(packed, at, part, STRIP);
            for (long r = 0; r < count; ++r)
                for (long j = 0; j < width; j += SIDE) {
                    const Vector<float> sums = load(part + r * STRIP + j);
                    store(to + r * ldc + j, ADD ? load(to + r * ldc + j) + sums : sums);
                }
        }
    }
}

#else

inline bool has_tiles() { return false; }

struct TileSetting {
    explicit TileSetting(bool) {}
};

struct Packed {};

#endif

// C = or += A B as `product`; half: in bfloat16, for numbers of float32.
template <typename T, bool ADD>
void product(Packed& packed, bool half, long rows, long cols, long len, const T* a, long row, long column, const T* b,
             long ldb, T* c, long ldc) {
#ifdef REGARD_HALF
    if constexpr (sizeof(T) == sizeof(float)) {
        if (half) return half_product<ADD>(packed, rows, cols, len, a, row, column, b, ldb, c, ldc);
    }
#endif
    product<T, ADD>(rows, cols, len, a, row, column, b, ldb, c, ldc);
}

}  // namespace
