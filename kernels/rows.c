/* What is computed row by row, in fp32 or bf16. A row's bits are its own. Roundings are where torch has them: but for
 * the order of sums, and e^x, the bits are torch's.
 */
#include <math.h>
#include <string.h>

#include "vectors.h"

/* Threads share rows if these have enough numbers together: it takes some microseconds to begin. */
#define SHARED(numbers) _Pragma(STRING(omp parallel for if ((numbers) > 100000)))
#define STRING(...) #__VA_ARGS__

INLINE __m512 load(const int wide, const void *x, long at) {
    return wide ? _mm512_loadu_ps((const float *)x + at) : load16((const bf16 *)x + at);
}

INLINE void store(const int wide, void *y, long at, __m512 v) {
    if (wide)
        _mm512_storeu_ps((float *)y + at, v);
    else
        store16((bf16 *)y + at, v);
}

/* The first `count` lanes. */
INLINE __mmask16 lanes_of(long count) { return count >= LANES ? 0xffff : (__mmask16)((1u << count) - 1); }

/* To bf16 and back, unless wide. */
INLINE __m512 rounded(const int wide, __m512 v) {
    if (wide) return v;
    __m512i half = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v));
    return _mm512_castsi512_ps(_mm512_slli_epi32(half, 16));
}

/* Calls `function` for numbers of 4 bytes or of 2, which it knows when it is compiled. */
#define EITHER(function, ...) (wide ? function(1, __VA_ARGS__) : function(0, __VA_ARGS__))

INLINE void norm_row(const int wide, const void *x, long first, long dim, const void *weight, float eps, void *y,
                     long to) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (long d = 0; d < dim; d += 32) {
        __m512 left = load(wide, x, first + d), right = load(wide, x, first + d + 16);
        even = _mm512_fmadd_ps(left, left, even);
        odd = _mm512_fmadd_ps(right, right, odd);
    }
    float mean = _mm512_reduce_add_ps(_mm512_add_ps(even, odd)) / (float)dim;
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(mean + eps));
    for (long d = 0; d < dim; d += 16) {
        __m512 normed = rounded(wide, _mm512_mul_ps(load(wide, x, first + d), scale));
        store(wide, y, to + d, _mm512_mul_ps(normed, load(wide, weight, d)));
    }
}

/* y [rows, dim]: rows of x, `stride` apart, to unit root mean square, times weight [dim]; dim a multiple of 32. */
void phalanx_rms_norm(int wide, const void *x, long rows, long stride, long dim, const void *weight, float eps,
                      void *y) {
    SHARED(rows * dim)
    for (long row = 0; row < rows; row++) EITHER(norm_row, x, row * stride, dim, weight, eps, y, row * dim);
}

INLINE __m512 turned(const int wide, __m512 own, __m512 cos, __m512 other, __m512 sin) {
    return _mm512_add_ps(rounded(wide, _mm512_mul_ps(own, cos)), rounded(wide, _mm512_mul_ps(other, sin)));
}

INLINE void rotate_row(const int wide, void *x, long first, long heads, long head_stride, long dim, const void *cos,
                       const void *sin, long angles) {
    for (long head = 0; head < heads; head++)
        for (long d = 0; d < dim / 2; d += 16) {
            long low_at = first + head * head_stride + d, high_at = low_at + dim / 2, high_angle = angles + d + dim / 2;
            __m512 low = load(wide, x, low_at), high = load(wide, x, high_at);
            __m512 cos_low = load(wide, cos, angles + d), sin_low = load(wide, sin, angles + d);
            store(wide, x, low_at, turned(wide, low, cos_low, high, sin_low));
            store(wide, x, high_at, turned(wide, high, load(wide, cos, high_angle), low, load(wide, sin, high_angle)));
        }
}

/* Rotates x [rows, heads, dim] in place by cos and sin [rows, dim], the lower half's sign in sin; dim a multiple of 32.
 */
void phalanx_rotate(int wide, void *x, long rows, long row_stride, long heads, long head_stride, long dim,
                    const void *cos, const void *sin) {
    SHARED(rows * heads * dim)
    for (long row = 0; row < rows; row++)
        EITHER(rotate_row, x, row * row_stride, heads, head_stride, dim, cos, sin, row * dim);
}

INLINE void sum_row(const int wide, const void *pairs, long first, const float *weights, long k, long dim, void *y,
                    long to) {
    for (long d = 0; d < dim; d += 16) {
        __m512 sum = _mm512_setzero_ps();
        for (long j = 0; j < k; j++) {
            __m512 part = load(wide, pairs, first + j * dim + d);
            sum = _mm512_add_ps(sum, _mm512_mul_ps(part, _mm512_set1_ps(weights[j])));
        }
        store(wide, y, to + d, sum);
    }
}

/* y [tokens, dim] = sum of pairs [tokens, k, dim] times weights [tokens, k], in k order; dim a multiple of 16. */
void phalanx_weighted_sum(int wide, const void *pairs, const float *weights, long tokens, long k, long dim, void *y) {
    SHARED(tokens * k * dim)
    for (long token = 0; token < tokens; token++)
        EITHER(sum_row, pairs, token * k * dim, weights + token * k, k, dim, y, token * dim);
}

#define SCORED 12   /* rows that go through a strip together */
#define WIDENED 256 /* numbers of them that are made fp32 at a time */

/* y [rows, LANES] = rows of x, `stride` apart, times a strip of weights [dim, LANES]; `rows` is known to the compiler.
 */
INLINE void score_block(const int wide, const int rows, const void *x, long first, long stride, long dim,
                        const float *strip, float *y) {
    float inputs[SCORED][WIDENED];
    __m512 sums[SCORED];
    for (int r = 0; r < rows; r++) sums[r] = _mm512_setzero_ps();
    for (long from = 0; from < dim; from += WIDENED) {
        long count = dim - from < WIDENED ? dim - from : WIDENED;
        for (int r = 0; r < rows; r++)
            for (long d = 0; d < count; d += LANES)
                _mm512_storeu_ps(inputs[r] + d, load(wide, x, first + r * stride + from + d));
        for (long d = 0; d < count; d++) {
            __m512 weights = _mm512_loadu_ps(strip + LANES * (from + d));
            for (int r = 0; r < rows; r++) sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(inputs[r][d]), weights, sums[r]);
        }
    }
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(y + LANES * r, sums[r]);
}

static void score_rows(int wide, int rows, const void *x, long first, long stride, long dim, const float *strip,
                       float *y) {
    switch (rows) {
#define CASE(number)                                                  \
    case number:                                                      \
        EITHER(score_block, number, x, first, stride, dim, strip, y); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

/* y fp32 [rows, experts] = x [rows, dim] @ weight.T + bias, rows `stride` apart; bias [experts] may be null; dim a
 * multiple of 16. weight: fp32, strips of 16 experts, each [dim, 16]; what is missing in the last one is not looked at.
 */
void phalanx_scores(int wide, const void *x, long rows, long stride, const float *weight, const float *bias,
                    long experts, long dim, float *y) {
    long blocks = (rows + SCORED - 1) / SCORED, strips = (experts + LANES - 1) / LANES;
    SHARED(rows * experts * dim)
    for (long piece = 0; piece < blocks * strips; piece++) {
        float sums[SCORED][LANES];
        long block = piece / strips, column = LANES * (piece % strips), row = block * rows / blocks;
        long count = (block + 1) * rows / blocks - row;
        __mmask16 lanes = lanes_of(experts - column);
        score_rows(wide, (int)count, x, row * stride, stride, dim, weight + column * dim, sums[0]);
        for (long r = 0; r < count; r++) {
            __m512 sum = _mm512_loadu_ps(sums[r]);
            if (bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(lanes, bias + column));
            _mm512_mask_storeu_ps(y + (row + r) * experts + column, lanes, sum);
        }
    }
}

enum scoring { SOFTMAX, TOPK_SOFTMAX, SIGMOID };

#define MOST_EXPERTS 1024

/* e^(x - most) of x [count], in place -> their sum. */
static float exponentials(float *x, long count, float most) {
    __m512 sum = _mm512_setzero_ps();
    for (long at = 0; at < count; at += LANES) {
        __mmask16 lanes = lanes_of(count - at);
        __m512 e = exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, x + at), _mm512_set1_ps(most)));
        _mm512_mask_storeu_ps(x + at, lanes, e);
        sum = _mm512_mask_add_ps(sum, lanes, sum, e);
    }
    return _mm512_reduce_add_ps(sum);
}

static float largest(const float *x, long count) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (long at = 0; at < count; at += LANES) {
        __mmask16 lanes = lanes_of(count - at);
        most = _mm512_mask_max_ps(most, lanes, most, _mm512_maskz_loadu_ps(lanes, x + at));
    }
    return _mm512_reduce_max_ps(most);
}

/* The k best of choice [count], which is lost; the first of equals first. */
static void best(float *choice, long count, long k, int64_t *ids) {
    for (long j = 0; j < k; j++) {
        float most = largest(choice, count);
        long at = 0;
        while (at < count - 1 && choice[at] != most) at++;
        ids[j] = at;
        choice[at] = -INFINITY;
    }
}

static void route(float *logits, long experts, long k, int scoring, const float *correction, int normalize, float scale,
                  float *weights, int64_t *ids) {
    float choice[MOST_EXPERTS];
    if (scoring == SOFTMAX) {
        float total = exponentials(logits, experts, largest(logits, experts));
        for (long e = 0; e < experts; e++) logits[e] /= total;
    } else if (scoring == SIGMOID) {
        for (long e = 0; e < experts; e++) logits[e] = -logits[e];
        exponentials(logits, experts, 0.0f);
        for (long e = 0; e < experts; e++) logits[e] = 1.0f / (1.0f + logits[e]);
    }
    for (long e = 0; e < experts; e++) choice[e] = correction ? logits[e] + correction[e] : logits[e];
    best(choice, experts, k, ids);
    for (long j = 0; j < k; j++) weights[j] = logits[ids[j]];
    float total = scoring == TOPK_SOFTMAX ? exponentials(weights, k, weights[0]) : 0.0f;
    if (scoring == TOPK_SOFTMAX)
        for (long j = 0; j < k; j++) weights[j] /= total;
    if (normalize) {
        total = scoring == SIGMOID ? 1e-20f : 0.0f;
        for (long j = 0; j < k; j++) total += weights[j];
        for (long j = 0; j < k; j++) weights[j] /= total;
    }
    for (long j = 0; j < k; j++) weights[j] *= scale;
}

/* The rule of ep/routing.py without groups: logits [rows, experts], which are lost -> weights, ids [rows, k].
 * correction [experts] or null; at most MOST_EXPERTS; logits are finite. */
void phalanx_route(float *logits, long rows, long experts, long k, int scoring, const float *correction, int normalize,
                   float scale, float *weights, int64_t *ids) {
    SHARED(rows * experts * 8)
    for (long row = 0; row < rows; row++)
        route(logits + row * experts, experts, k, scoring, correction, normalize, scale, weights + row * k,
              ids + row * k);
}

/* Row i of `rows`, `bytes` long and `stride` bytes apart, to place `slots[i]` of `to`, whose rows lie side by side. */
void phalanx_put_rows(char *to, const int64_t *slots, const char *rows, long count, long stride, long bytes) {
    SHARED(count * bytes)
    for (long i = 0; i < count; i++) memcpy(to + slots[i] * bytes, rows + i * stride, bytes);
}
