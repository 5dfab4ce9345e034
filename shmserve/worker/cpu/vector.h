/* Eight float lanes, and the few functions of them that the kernels need.
 *
 * Law: every function gives the same bits on every machine. So sums have a fixed order, a fused multiply-add is always asked
 * for by name (compile with -ffp-contract=off), and nothing calls the C library's exp. Compiler vectors do the arithmetic;
 * intrinsics stand only where they have no word for it. SHM_PORTABLE leaves the intrinsics out.
 */
#ifndef SHM_VECTOR_H
#define SHM_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && !defined(SHM_PORTABLE)
#include <immintrin.h>
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SHM_AVX2 1
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define SHM_AVX512_VNNI 1
#if defined(__AMX_TILE__) && defined(__AMX_INT8__)
#define SHM_AMX 1
#endif
#endif
#endif
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));

INLINE f32x8 load8(const float *p) {
    f32x8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store8(float *p, f32x8 v) { memcpy(p, &v, sizeof v); }

INLINE f32x8 all8(float x) { return (f32x8){x, x, x, x, x, x, x, x}; }

INLINE f32x8 fma8(f32x8 a, f32x8 b, f32x8 c) {
#ifdef SHM_AVX2
    return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    f32x8 r;
    for (int i = 0; i < 8; i++)
        r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}

/* Lanes of `a` where `mask` is all ones, of `b` where it is zero. */
INLINE f32x8 select8(i32x8 mask, f32x8 a, f32x8 b) {
#ifdef SHM_AVX2
    return (f32x8)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
#else
    return (f32x8)((mask & (i32x8)a) | (~mask & (i32x8)b));
#endif
}

INLINE float sum8(f32x8 v) {
#ifdef SHM_AVX2
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
}

INLINE float max8(f32x8 v) {
    float m = v[0];
    for (int i = 1; i < 8; i++)
        m = v[i] > m ? v[i] : m;
    return m;
}

INLINE int32_t max_of_integers(i32x8 v) {
#ifdef SHM_AVX2
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#else
    int32_t m = v[0];
    for (int i = 1; i < 8; i++)
        m = v[i] > m ? v[i] : m;
    return m;
#endif
}

INLINE int32_t sum_of_integers(i32x8 v) {
#ifdef SHM_AVX2
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#else
    int32_t sum = 0;
    for (int i = 0; i < 8; i++)
        sum += v[i];
    return sum;
#endif
}

/* Adding it rounds to the nearest integer, ties to even, and leaves that integer in the low bits. For |x| < 2^22. */
static const float ROUNDER = 12582912.0f; /* 1.5 * 2^23 */
static const int32_t ROUNDER_BITS = 0x4b400000;

/* e^x within 2 ulp for -87 <= x <= 88, clamped outside of that; NaN stays NaN. */
INLINE f32x8 exp8(f32x8 x) {
    x = select8(x < -87.0f, all8(-87.0f), x);
    x = select8(x > 88.0f, all8(88.0f), x);
    f32x8 shifted = fma8(x, all8(1.44269504f), all8(ROUNDER));
    f32x8 n = shifted - ROUNDER;
    f32x8 r = fma8(n, all8(-0.693359375f), x); /* ln 2 in two parts */
    r = fma8(n, all8(2.12194440e-4f), r);
    f32x8 p = all8(1.9875691500e-4f);
    p = fma8(p, r, all8(1.3981999507e-3f));
    p = fma8(p, r, all8(8.3334519073e-3f));
    p = fma8(p, r, all8(4.1665795894e-2f));
    p = fma8(p, r, all8(1.6666665459e-1f));
    p = fma8(p, r, all8(5.0000001201e-1f));
    p = fma8(p, r * r, r + 1.0f);
    i32x8 exponent = (i32x8)shifted - ROUNDER_BITS + 127;
    return p * (f32x8)(exponent << 23);
}

INLINE float float_of_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

INLINE uint32_t bits_of_float(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

INLINE float float_of_half(uint16_t h) {
    uint32_t magnitude = h & 0x7fffu, sign = (uint32_t)(h & 0x8000u) << 16;
    float f = float_of_bits(magnitude << 13) * float_of_bits(0x77800000u); /* 2^112: exact, subnormals too */
    uint32_t bits = magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : bits_of_float(f);
    return float_of_bits(bits | sign);
}

/* Rounds to the nearest half, ties to even. Beyond the range it saturates, so that one large key cannot become infinite. */
INLINE uint16_t half_of_float(float f) {
    uint32_t bits = bits_of_float(f), sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u); /* NaN */
    if (bits >= 0x477fe000u)
        return (uint16_t)(sign | 0x7bffu); /* 65504 and more */
    if (bits < 0x38800000u)                /* subnormal halves: the addition rounds */
        return (uint16_t)(sign | (bits_of_float(float_of_bits(bits) + 0.5f) - 0x3f000000u));
    bits += 0xfffu + ((bits >> 13) & 1u);
    return (uint16_t)(sign | ((bits - 0x38000000u) >> 13));
}

INLINE f32x8 load_halves8(const uint16_t *p) {
#ifdef SHM_AVX2
    return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__ARM_FP16_FORMAT_IEEE) && !defined(SHM_PORTABLE)
    f32x8 v;
    for (int i = 0; i < 8; i++)
        v[i] = (float)((const __fp16 *)p)[i];
    return v;
#else
    f32x8 v;
    for (int i = 0; i < 8; i++)
        v[i] = float_of_half(p[i]);
    return v;
#endif
}

/* Rounds as half_of_float does. */
INLINE void store_halves8(uint16_t *p, f32x8 v) {
#ifdef SHM_AVX2
    v = select8(v > 65504.0f, all8(65504.0f), v);
    v = select8(v < -65504.0f, all8(-65504.0f), v);
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < 8; i++)
        p[i] = half_of_float(v[i]);
#endif
}

INLINE void store_halves(uint16_t *p, const float *x, int n) {
    int i = 0;
    for (; i + 8 <= n; i += 8)
        store_halves8(p + i, load8(x + i));
    for (; i < n; i++)
        p[i] = half_of_float(x[i]);
}

/* The low bytes of 32 integers of -128..127. */
INLINE void store_bytes32(int8_t *p, const i32x8 v[4]) {
#ifdef SHM_AVX2
    __m256i low = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]); /* packs within each half: put right at the end */
    __m256i high = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
    __m256i bytes = _mm256_packs_epi16(low, high);
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)p, bytes);
#else
    for (int i = 0; i < 32; i++)
        p[i] = (int8_t)v[i / 8][i % 8];
#endif
}

INLINE float sum_of_squares(const float *x, int n) {
    f32x8 sums = all8(0.0f);
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        f32x8 v = load8(x + i);
        sums = fma8(v, v, sums);
    }
    for (int lane = 0; i < n; i++, lane++)
        sums[lane] = __builtin_fmaf(x[i], x[i], sums[lane]);
    return sum8(sums);
}

#endif
