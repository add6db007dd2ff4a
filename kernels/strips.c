/* bf16 matrix products with packed weights: on AMX tiles where the compiler is told of them, else with AVX-512's bf16
 * products. Threads share strips.
 *
 * At the few rows of a decode step a product is a walk through the weights, so the packed weight is one stream in the
 * order of use, and prefetched by hand: the hardware does not see tile loads coming, and stops at every page.
 *
 * Packed weight [N, K], N and K multiples of 32: strips of 32 outputs; in a strip, for every 32 inputs, two tiles of
 * 16 outputs, 1 KB each: line r holds inputs 2r and 2r+1 of the 16 outputs, as both kinds of products want it.
 * Sums are fp32, in an order that depends on K alone; results are rounded to bf16 once, to nearest even.
 */
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

#define TILE_BYTES 1024
#define AHEAD (16 * TILE_BYTES) /* prefetch distance */

INLINE void prefetch_tiles(const char *w) {
    for (int line = 0; line < 2 * TILE_BYTES; line += 64) _mm_prefetch(w + AHEAD + line, _MM_HINT_T0);
}

#ifdef __AMX_BF16__

#define MOST_ROWS 16 /* of one call of strip_product */

/* 0 if this process may use AMX tiles. */
int phalanx_init(void) { return (int)syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18); }

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
};

/* Before strip_product with this number of rows. Tiles 0, 1: sums [rows, 16] fp32; 2: inputs [rows, 32]; 3, 4: weights.
 */
static void begin_rows(int rows) {
    struct tile_config config = {.palette = 1};
    for (int tile = 0; tile < 5; tile++) {
        config.colsb[tile] = 64;
        config.rows[tile] = tile < 3 ? rows : 16;
    }
    _tile_loadconfig(&config);
}

static void end_rows(void) { _tile_release(); }

/* sums [2][16][16] = x [rows, k] times one strip of 32 outputs. */
INLINE void strip_product(int rows, const bf16 *x, long ldx, const char *w, long k, float *sums) {
    (void)rows;
    _tile_zero(0);
    _tile_zero(1);
    for (long kb = 0; kb < k; kb += 32, w += 2 * TILE_BYTES) {
        prefetch_tiles(w);
        _tile_loadd(2, x + kb, ldx * sizeof(bf16));
        _tile_loadd(3, w, 64);
        _tile_dpbf16ps(0, 2, 3);
        _tile_loadd(4, w + TILE_BYTES, 64);
        _tile_dpbf16ps(1, 2, 4);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
}

#else

#define MOST_ROWS 12 /* 24 of 32 registers hold sums */

int phalanx_init(void) { return 0; }

static void begin_rows(int rows) { (void)rows; }

static void end_rows(void) {}

/* sums [2][16][16] = x [rows, k] times one strip of 32 outputs; `rows` is known to the compiler. */
INLINE void rows_product(const int rows, const bf16 *x, long ldx, const char *w, long k, float *sums) {
    __m512 left[MOST_ROWS], right[MOST_ROWS];
    for (int r = 0; r < rows; r++) left[r] = right[r] = _mm512_setzero_ps();
    for (long kb = 0; kb < k; kb += 32, w += 2 * TILE_BYTES) {
        prefetch_tiles(w);
        for (int line = 0; line < 16; line++) {
            __m512bh w_left = (__m512bh)_mm512_load_si512(w + 64 * line);
            __m512bh w_right = (__m512bh)_mm512_load_si512(w + TILE_BYTES + 64 * line);
            for (int r = 0; r < rows; r++) {
                int two;
                memcpy(&two, x + r * ldx + kb + 2 * line, sizeof two);
                __m512bh inputs = (__m512bh)_mm512_set1_epi32(two);
                left[r] = _mm512_dpbf16_ps(left[r], inputs, w_left);
                right[r] = _mm512_dpbf16_ps(right[r], inputs, w_right);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        _mm512_store_ps(sums + 16 * r, left[r]);
        _mm512_store_ps(sums + 256 + 16 * r, right[r]);
    }
}

static void strip_product(int rows, const bf16 *x, long ldx, const char *w, long k, float *sums) {
    switch (rows) {
#define CASE(number)                              \
    case number:                                  \
        rows_product(number, x, ldx, w, k, sums); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

#endif

/* 16 rows of 16 pairs, rows `ld` elements apart, columns first: a tile of a packed weight. */
static inline void pack_tile(const bf16 *from, long ld, char *to) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * ld);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* then quarter q of a[i + c] is column 4q + c of rows i to i + 3 */
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int c = 0; c < 4; c++) { /* 0x88 takes quarters 0 and 2 of both, 0xdd quarters 1 and 3 */
        __m512i even = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        __m512i even_below = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        __m512i odd_below = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_stream_si512((__m512i *)(to + 64 * c), _mm512_shuffle_i32x4(even, even_below, 0x88));
        _mm512_stream_si512((__m512i *)(to + 64 * (c + 4)), _mm512_shuffle_i32x4(odd, odd_below, 0x88));
        _mm512_stream_si512((__m512i *)(to + 64 * (c + 8)), _mm512_shuffle_i32x4(even, even_below, 0xdd));
        _mm512_stream_si512((__m512i *)(to + 64 * (c + 12)), _mm512_shuffle_i32x4(odd, odd_below, 0xdd));
    }
}

/* New memory is had sooner in pages of 2 MB, and walked through faster. A wish: what comes of it does not matter. */
static void prefer_huge_pages(char *from, long bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)from + page - 1) / page * page;
    uintptr_t past = ((uintptr_t)from + (uintptr_t)bytes) / page * page;
    if (past > first) madvise((void *)first, past - first, MADV_HUGEPAGE);
}

/* Packs strips of 16 rows of `left` beside 16 of `right`; rows lie ld elements apart, a strip's rows `step` rows after
 * those of the one before. A weight [N, K]: left is row 0, right row 16, step 32. Two that are interleaved: step 16. */
void phalanx_pack(const bf16 *left, const bf16 *right, long ld, long step, long strips, long k, char *to) {
    prefer_huge_pages(to, strips * 64 * k);
#pragma omp parallel
    {
        struct share own = own_share(strips);
        for (long strip = own.first; strip < own.past; strip++)
            for (long kb = 0; kb < k; kb += 32) {
                char *tiles = to + 64 * (strip * k + kb);
                pack_tile(left + strip * step * ld + kb, ld, tiles);
                pack_tile(right + strip * step * ld + kb, ld, tiles + TILE_BYTES);
            }
        _mm_sfence();
    }
}

/* What becomes of a row's sums over one strip: the first and the last 16 outputs. */
typedef void finish(const void *of, long strip, long row, __m512 left, __m512 right);

/* x [m, k], rows ldx numbers apart, times the strips of `own`. Rows go through a strip in blocks of like size. */
INLINE void product(struct share own, const bf16 *x, long m, long ldx, const char *w, long k, finish done,
                    const void *of) {
    float sums[512] __attribute__((aligned(64)));
    long blocks = (m + MOST_ROWS - 1) / MOST_ROWS;
    int begun = 0;
    for (long strip = own.first; strip < own.past; strip++)
        for (long block = 0; block < blocks; block++) {
            long row = block * m / blocks;
            int rows = (int)((block + 1) * m / blocks - row);
            if (rows != begun) begin_rows(begun = rows);
            strip_product(rows, x + row * ldx, ldx, w + 64 * k * strip, k, sums);
            for (int r = 0; r < rows; r++)
                done(of, strip, row + r, _mm512_load_ps(sums + 16 * r), _mm512_load_ps(sums + 256 + 16 * r));
        }
    end_rows();
}

struct linear {
    const bf16 *bias, *add;
    bf16 *y;
    long n;
};

INLINE void put_linear(const void *of, long strip, long row, __m512 left, __m512 right) {
    const struct linear *to = of;
    long column = 32 * strip, at = row * to->n + column;
    if (to->bias) {
        left = _mm512_add_ps(left, load16(to->bias + column));
        right = _mm512_add_ps(right, load16(to->bias + column + 16));
    }
    if (to->add) {
        left = _mm512_add_ps(left, load16(to->add + at));
        right = _mm512_add_ps(right, load16(to->add + at + 16));
    }
    store16(to->y + at, left);
    store16(to->y + at + 16, right);
}

/* y [m, n] = x [m, k] @ w.T, plus `bias` [n] and `add` [m, n] unless they are null. Rows of x lie ldx numbers apart. */
void phalanx_linear(const bf16 *x, long m, long ldx, const char *w, long n, long k, const bf16 *bias, const bf16 *add,
                    bf16 *y) {
    struct linear to = {bias, add, y, n};
#pragma omp parallel
    product(own_share(n / 32), x, m, ldx, w, k, put_linear, &to);
}

static inline __m512 sigmoid16(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

/* silu(gate) * up */
static inline __m512 silu16(__m512 gate, __m512 up) {
    __m512 one = _mm512_set1_ps(1.0f);
    __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate))));
    return _mm512_mul_ps(silu, up);
}

/* gate * sigmoid(1.702 gate) * (up + 1), gate at most 7, up in [-7, 7] */
static inline __m512 swiglu_oai16(__m512 gate, __m512 up) {
    __m512 limit = _mm512_set1_ps(7.0f);
    gate = _mm512_min_ps(gate, limit);
    up = _mm512_max_ps(_mm512_min_ps(up, limit), _mm512_set1_ps(-7.0f));
    __m512 open = _mm512_mul_ps(gate, sigmoid16(_mm512_mul_ps(gate, _mm512_set1_ps(1.702f))));
    return _mm512_mul_ps(open, _mm512_add_ps(up, _mm512_set1_ps(1.0f)));
}

/* A strip has 16 outputs of gate and the same 16 of up, and so has `bias` [2 n] unless it is null. y: [m, n] */
struct gated {
    const bf16 *bias;
    bf16 *y;
    long n;
    int clamped;
};

INLINE void put_gated(const void *of, long strip, long row, __m512 gate, __m512 up) {
    const struct gated *to = of;
    if (to->bias) {
        gate = _mm512_add_ps(gate, load16(to->bias + 32 * strip));
        up = _mm512_add_ps(up, load16(to->bias + 32 * strip + 16));
    }
    store16(to->y + row * to->n + 16 * strip, to->clamped ? swiglu_oai16(gate, up) : silu16(gate, up));
}

/* Gated networks over rows [sum(counts), hidden] grouped by expert; scratch [max(counts), inner]. A bias may be null.
 */
void phalanx_experts(const bf16 *rows, const long *counts, long experts, const char *const *gate_up,
                     const char *const *down, const bf16 *const *gate_up_bias, const bf16 *const *down_bias,
                     long hidden, long inner, int clamped, bf16 *scratch, bf16 *out) {
#pragma omp parallel
    {
        struct share of_inner = own_share(inner / 16), of_hidden = own_share(hidden / 32);
        const bf16 *x = rows;
        bf16 *y = out;
        for (long e = 0; e < experts; e++) {
            if (!counts[e]) continue;
            struct gated between = {gate_up_bias[e], scratch, inner, clamped};
            struct linear to = {down_bias[e], 0, y, hidden};
            product(of_inner, x, counts[e], hidden, gate_up[e], hidden, put_gated, &between);
#pragma omp barrier
            product(of_hidden, scratch, counts[e], inner, down[e], inner, put_linear, &to);
#pragma omp barrier
            x += counts[e] * hidden;
            y += counts[e] * hidden;
        }
    }
}
