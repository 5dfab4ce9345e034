/* The VNNI and AVX-512 intrinsics that the kernels use, lane by lane, so that their variants can be tested on a CPU without.
 *
 * Included before the kernels (-include), with SHM_AVX512_VNNI or __AVXVNNI__ defined. Each function is what Intel's
 * description says.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int32_t emulated_i32 __attribute__((vector_size(64)));
typedef uint8_t emulated_u8 __attribute__((vector_size(64)));
typedef int8_t emulated_i8 __attribute__((vector_size(64)));
typedef uint16_t emulated_u16 __attribute__((vector_size(64)));
#define EMULATED static inline __attribute__((always_inline))

EMULATED __m512i emulated_dpbusd(__m512i sum, __m512i a, __m512i b) {
    emulated_i32 out = (emulated_i32)sum;
    for (int i = 0; i < 64; i++)
        out[i / 4] += (int32_t)((emulated_u8)a)[i] * (int32_t)((emulated_i8)b)[i];
    return (__m512i)out;
}
EMULATED __m256i emulated_dpbusd256(__m256i sum, __m256i a, __m256i b) {
    int32_t out[8];
    memcpy(out, &sum, sizeof out);
    for (int i = 0; i < 32; i++)
        out[i / 4] += (int32_t)((uint8_t *)&a)[i] * (int32_t)((int8_t *)&b)[i];
    memcpy(&sum, out, sizeof out);
    return sum;
}
EMULATED __m512 emulated_cvtph(__m256i halves) {
    __m512 out;
    for (int i = 0; i < 16; i++)
        out[i] = _cvtsh_ss(((uint16_t *)&halves)[i]);
    return out;
}
EMULATED __m512 emulated_fmadd(__m512 a, __m512 b, __m512 c) {
    for (int i = 0; i < 16; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
EMULATED __m512 emulated_cvtepi32(__m512i a) {
    __m512 out;
    for (int i = 0; i < 16; i++)
        out[i] = (float)((emulated_i32)a)[i];
    return out;
}
EMULATED __m512 emulated_set_float(float x) {
    __m512 out;
    for (int i = 0; i < 16; i++)
        out[i] = x;
    return out;
}
EMULATED __m512i emulated_set_int(int32_t x) {
    emulated_i32 out;
    for (int i = 0; i < 16; i++)
        out[i] = x;
    return (__m512i)out;
}
EMULATED __m512i emulated_set_byte(char x) {
    emulated_i8 out;
    for (int i = 0; i < 64; i++)
        out[i] = x;
    return (__m512i)out;
}
EMULATED __m512 emulated_load_floats(const void *p) {
    __m512 out;
    memcpy(&out, p, sizeof out);
    return out;
}
EMULATED __m512i emulated_load_ints(const void *p) {
    __m512i out;
    memcpy(&out, p, sizeof out);
    return out;
}
EMULATED void emulated_store(void *p, __m512 v) { memcpy(p, &v, sizeof v); }

#define _mm512_dpbusd_epi32 emulated_dpbusd
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd256
#define _mm512_cvtph_ps emulated_cvtph
#define _mm512_fmadd_ps emulated_fmadd
#define _mm512_cvtepi32_ps emulated_cvtepi32
#define _mm512_mul_ps(a, b) ((__m512)((a) * (b)))
#define _mm512_add_epi32(a, b) ((__m512i)((emulated_i32)(a) + (emulated_i32)(b)))
#define _mm512_and_si512(a, b) ((__m512i)((emulated_i32)(a) & (emulated_i32)(b)))
#define _mm512_xor_si512(a, b) ((__m512i)((emulated_i32)(a) ^ (emulated_i32)(b)))
#define _mm512_srli_epi16(a, count) ((__m512i)((emulated_u16)(a) >> (count)))
#define _mm512_set1_ps emulated_set_float
#define _mm512_set1_epi32 emulated_set_int
#define _mm512_set1_epi8 emulated_set_byte
#define _mm512_setzero_ps() emulated_set_float(0.0f)
#define _mm512_setzero_si512() emulated_set_int(0)
#define _mm512_loadu_ps emulated_load_floats
#define _mm512_loadu_si512 emulated_load_ints
#define _mm512_storeu_ps emulated_store
