/* What the kernels share: 16 numbers at a time, bf16 in memory, fp32 in registers; and how threads share work. Each
 * result is one thread's alone, so its bits do not depend on their number. */
#ifndef PHALANX_VECTORS_H
#define PHALANX_VECTORS_H

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

INLINE void store16(bf16 *y, __m512 v) { _mm256_storeu_si256((__m256i *)y, (__m256i)_mm512_cvtneps_pbh(v)); }

INLINE __m512 load16(const bf16 *y) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)y)), 16));
}

/* e^x: 2^n times a polynomial on [-ln2/2, ln2/2]; relative error below 2e-7. x is taken as at least -87, at most 88. */
INLINE __m512 exp16(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* The calling thread's share of `count` pieces: [first, past). */
struct share {
    long first, past;
};

INLINE struct share own_share(long count) {
    long threads = omp_get_num_threads(), own = omp_get_thread_num();
    return (struct share){own * count / threads, (own + 1) * count / threads};
}

#endif
