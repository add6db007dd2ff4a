/* Attention of single queries over paged keys and values: bf16 or fp32 in memory, fp32 sums. Threads share walks, or
 * key heads of a walk.
 *
 * A query at position p of a sequence sees that sequence's keys up to p, the last `window` of them if that is not 0.
 * Keys are taken in tiles of TILE, counted from the sequence's first, and tiles are added up in order by an online
 * softmax. So a query's bits depend on its own keys alone: hidden ones of a tile add zeros.
 *
 * Neighbouring queries of a sequence walk together, so that keys are fetched once for up to MOST_ROWS of them.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define TILE 64
#define MOST_ROWS 8
#define MOST_QUERIES 1024 /* of a walk and a key head */
#define TOGETHER 4        /* queries that share a value while it is in registers */

/* Strides and offsets count numbers. Query of (row, head): queries + row * row_stride + head * key_dim. Key of slot s
 * and key head h: cache + s * slot_stride + h * key_dim; its value: cache + s * slot_stride + value_offset + h *
 * value_dim. Mirrored in walk.py. */
struct attention {
    const char *queries, *cache;
    const int32_t *rows, *sequences, *positions; /* of the queries, [n] each; neighbours of a sequence in order */
    const int32_t *tables;                       /* [sequences, table_width] blocks */
    const float *sinks;                          /* [heads], or null: one more key's score, whose value is zero */
    char *out;                                   /* [n, heads, value_dim] */
    long n, row_stride, slot_stride, value_offset, block_size, table_width;
    long heads, kv_heads, key_dim, value_dim, window;
    float scale;
};

/* Some heads of neighbouring rows of a sequence. A query is number row * heads + head. */
struct walk {
    long first, rows, first_head, past_head;
    long begin[MOST_ROWS], end[MOST_ROWS]; /* keys that a row sees */
    float *top, *total, *shares, *sums;    /* [queries], [queries], [queries, TILE], [queries, value_dim] */
};

/* The sums of the numbers of each of 16 registers, which are lost. */
INLINE __m512 sums_of(__m512 *a) {
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d left = _mm512_castps_pd(a[2 * i]), right = _mm512_castps_pd(a[2 * i + 1]);
        a[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
    }
    for (int i = 0; i < 2; i++)
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x44),
                             _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x88), _mm512_shuffle_f32x4(a[0], a[1], 0xdd));
}

/* 16 dot products of a query, of 16 keys. */
INLINE __m512 products(const int wide, const char *query, const char *const *keys, long offset, long dim) {
    __m512 sums[LANES];
    for (int j = 0; j < LANES; j++) sums[j] = _mm512_setzero_ps();
    const long step = 64; /* bytes */
    for (long at = 0; at < dim * (wide ? 4 : 2); at += step) {
        __m512i part = _mm512_loadu_si512(query + at);
        for (int j = 0; j < LANES; j++) {
            __m512i key = _mm512_loadu_si512(keys[j] + offset + at);
            if (wide)
                sums[j] = _mm512_fmadd_ps(_mm512_castsi512_ps(part), _mm512_castsi512_ps(key), sums[j]);
            else
                sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)part, (__m512bh)key);
        }
    }
    return sums_of(sums);
}

/* The lanes of 16 keys from `key` on that lie in [begin, end). */
INLINE __mmask16 seen(long key, long begin, long end) {
    long low = begin - key, high = end - key;
    unsigned below = low <= 0 ? 0 : low >= LANES ? 0xffff : (1u << low) - 1;
    unsigned under = high <= 0 ? 0 : high >= LANES ? 0xffff : (1u << high) - 1;
    return (__mmask16)(under & ~below);
}

/* Shares of a tile's keys for one query; its older sums and total are scaled to the new top. */
INLINE void weigh(__m512 *scores, const __mmask16 *lanes, long groups, float *top, float *total, float *sums,
                  long value_dim, float *shares) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (long g = 0; g < groups; g++) most = _mm512_mask_max_ps(most, lanes[g], most, scores[g]);
    float raised = fmaxf(*top, _mm512_reduce_max_ps(most));
    __m512 all = _mm512_setzero_ps(), subtract = _mm512_set1_ps(raised);
    for (long g = 0; g < groups; g++) {
        __m512 share = _mm512_maskz_mov_ps(lanes[g], exp16(_mm512_sub_ps(scores[g], subtract)));
        all = _mm512_add_ps(all, share);
        _mm512_storeu_ps(shares + LANES * g, share);
    }
    if (raised > *top) {
        __m512 kept = exp16(_mm512_set1_ps(*top - raised));
        for (long d = 0; d < value_dim; d += LANES)
            _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), kept));
        *total *= _mm512_cvtss_f32(kept);
        *top = raised;
    }
    *total += _mm512_reduce_add_ps(all);
}

/* Adds a tile's values, `width` * 16 numbers of each from byte `offset` on, to the sums of `count` queries. */
INLINE void add_values(const int wide, const int count, const int width, const char *const *values, long offset,
                       long keys, float *const *shares, float *const *sums, long dim) {
    __m512 held[TOGETHER][4], value[4];
    for (int q = 0; q < count; q++)
        for (int d = 0; d < width; d++) held[q][d] = _mm512_loadu_ps(sums[q] + dim + LANES * d);
    for (long key = 0; key < keys; key++) {
        const char *at = values[key] + offset;
        for (int d = 0; d < width; d++)
            value[d] = wide ? _mm512_loadu_ps((const float *)at + LANES * d) : load16((const bf16 *)at + LANES * d);
        for (int q = 0; q < count; q++) {
            __m512 share = _mm512_set1_ps(shares[q][key]);
            for (int d = 0; d < width; d++) held[q][d] = _mm512_fmadd_ps(share, value[d], held[q][d]);
        }
    }
    for (int q = 0; q < count; q++)
        for (int d = 0; d < width; d++) _mm512_storeu_ps(sums[q] + dim + LANES * d, held[q][d]);
}

/* All numbers of the values, for up to TOGETHER queries. */
INLINE void add_all_values(const int wide, const int count, const char *const *values, long offset, long keys,
                           float *const *shares, float *const *sums, long value_dim) {
    long dim = 0, size = wide ? 4 : 2;
    for (; dim + 4 * LANES <= value_dim; dim += 4 * LANES)
        add_values(wide, count, 4, values, offset + dim * size, keys, shares, sums, dim);
    for (; dim < value_dim; dim += LANES)
        add_values(wide, count, 1, values, offset + dim * size, keys, shares, sums, dim);
}

/* Some slots of the next tile: memory is far, and the hardware does not see which blocks come next. Each query of a
 * tile fetches some, so that it goes on beside the products. */
INLINE void prefetch(const struct attention *a, const char *const *slots, long size, long query, long queries) {
    for (long j = query * TILE / queries; j < (query + 1) * TILE / queries; j++)
        for (long at = 0; at < size * a->slot_stride; at += 64) _mm_prefetch(slots[j] + at, _MM_HINT_T0);
}

/* A tile for the queries of one key head. keys, next: addresses of the slots of this tile and of the next, TILE of
 * each, those from num_keys on only somewhere to read. */
INLINE void tile_of_head(const int wide, const struct attention *a, const struct walk *w, long head, long first_key,
                         const char *const *keys, const char *const *next, long num_keys) {
    const long size = wide ? 4 : 2, group = a->heads / a->kv_heads, lanes = (num_keys + LANES - 1) / LANES;
    const long from = w->first_head > head * group ? w->first_head : head * group;
    const long past = w->past_head < (head + 1) * group ? w->past_head : (head + 1) * group;
    long chosen[MOST_QUERIES], num_chosen = 0;
    for (long row = 0; row < w->rows; row++) {
        __mmask16 sees[TILE / LANES];
        unsigned any = 0;
        for (long g = 0; g < lanes; g++) any |= sees[g] = seen(first_key + LANES * g, w->begin[row], w->end[row]);
        for (long at = from; any && at < past; at++) {
            const char *query = a->queries + size * (a->rows[w->first + row] * a->row_stride + at * a->key_dim);
            long q = row * a->heads + at;
            __m512 scores[TILE / LANES];
            for (long g = 0; g < lanes; g++) {
                scores[g] = products(wide, query, keys + LANES * g, size * head * a->key_dim, a->key_dim);
                scores[g] = _mm512_mul_ps(scores[g], _mm512_set1_ps(a->scale));
            }
            prefetch(a, next, size, w->rows * (from - w->first_head) + num_chosen,
                     w->rows * (w->past_head - w->first_head));
            weigh(scores, sees, lanes, w->top + q, w->total + q, w->sums + q * a->value_dim, a->value_dim,
                  w->shares + q * TILE);
            chosen[num_chosen++] = q;
        }
    }
    for (long at = 0; at < num_chosen; at += TOGETHER) {
        float *shares[TOGETHER], *sums[TOGETHER];
        long count = num_chosen - at < TOGETHER ? num_chosen - at : TOGETHER;
        for (long i = 0; i < count; i++) {
            shares[i] = w->shares + chosen[at + i] * TILE;
            sums[i] = w->sums + chosen[at + i] * a->value_dim;
        }
        long offset = size * (a->value_offset + head * a->value_dim);
        switch (count) {
            case 1:
                add_all_values(wide, 1, keys, offset, num_keys, shares, sums, a->value_dim);
                break;
            case 2:
                add_all_values(wide, 2, keys, offset, num_keys, shares, sums, a->value_dim);
                break;
            case 3:
                add_all_values(wide, 3, keys, offset, num_keys, shares, sums, a->value_dim);
                break;
            default:
                add_all_values(wide, TOGETHER, keys, offset, num_keys, shares, sums, a->value_dim);
        }
    }
}

/* Addresses of the slots of TILE keys from first_key on; those from `end` on are the first again, so that none is wild.
 */
static void find_slots(const struct attention *a, long size, long sequence, long first_key, long end,
                       const char **slots) {
    const int32_t *table = a->tables + sequence * a->table_width;
    long block = first_key / a->block_size, offset = first_key % a->block_size;
    for (long j = 0; j < TILE; j++) {
        slots[j] =
            first_key + j < end ? a->cache + size * (table[block] * a->block_size + offset) * a->slot_stride : slots[0];
        if (++offset == a->block_size) block++, offset = 0;
    }
}

/* The first key that a query at `position` sees. */
INLINE long first_seen(const struct attention *a, long position) {
    return a->window && position >= a->window ? position + 1 - a->window : 0;
}

/* How many rows from `first` on walk together: neighbours of one sequence. */
static long rows_together(const struct attention *a, long first) {
    long most = a->heads * MOST_ROWS <= MOST_QUERIES ? MOST_ROWS : 1, rows = 1;
    while (rows < most && first + rows < a->n && a->sequences[first + rows] == a->sequences[first]) rows++;
    return rows;
}

/* memory: [MOST_ROWS * heads, 2 + TILE + value_dim] */
static struct walk begin_walk(const struct attention *a, long first, long first_head, long past_head, float *memory) {
    struct walk w = {.first = first, .rows = rows_together(a, first), .first_head = first_head, .past_head = past_head};
    long queries = w.rows * a->heads;
    w.top = memory;
    w.total = w.top + queries;
    w.shares = w.total + queries;
    w.sums = w.shares + queries * TILE;
    for (long row = 0; row < w.rows; row++) {
        w.begin[row] = first_seen(a, a->positions[first + row]);
        w.end[row] = a->positions[first + row] + 1;
        for (long head = first_head; head < past_head; head++) {
            long q = row * a->heads + head;
            w.top[q] = a->sinks ? a->sinks[head] : -INFINITY;
            w.total[q] = a->sinks ? 1.0f : 0.0f;
            memset(w.sums + q * a->value_dim, 0, sizeof(float) * a->value_dim);
        }
    }
    return w;
}

INLINE void end_walk(const int wide, const struct attention *a, const struct walk *w) {
    for (long row = 0; row < w->rows; row++)
        for (long head = w->first_head; head < w->past_head; head++) {
            long q = row * a->heads + head, at = (w->first * a->heads + q) * a->value_dim;
            __m512 total = _mm512_set1_ps(w->total[q]);
            for (long d = 0; d < a->value_dim; d += LANES) {
                __m512 mean = _mm512_div_ps(_mm512_loadu_ps(w->sums + q * a->value_dim + d), total);
                if (wide)
                    _mm512_storeu_ps((float *)a->out + at + d, mean);
                else
                    store16((bf16 *)a->out + at + d, mean);
            }
        }
}

/* What will be read after a tile of the walk: the next one, or the first of the walk that begins with row `after`. */
static void find_next(const struct attention *a, const struct walk *w, long size, long tile, const char **slots) {
    long after = w->first + w->rows, end = w->end[w->rows - 1];
    if (tile + TILE < end) {
        find_slots(a, size, a->sequences[w->first], tile + TILE, end, slots);
    } else if (after < a->n) {
        long position = a->positions[after], begin = first_seen(a, position) / TILE * TILE;
        find_slots(a, size, a->sequences[after], begin, position + 1, slots);
    } else {
        find_slots(a, size, a->sequences[w->first], tile, tile + 1, slots);
    }
}

INLINE void walk(const int wide, const struct attention *a, struct walk *w) {
    const long size = wide ? 4 : 2, end = w->end[w->rows - 1], group = a->heads / a->kv_heads;
    const char *slots[TILE], *next[TILE];
    for (long tile = w->begin[0] / TILE * TILE; tile < end; tile += TILE) {
        find_slots(a, size, a->sequences[w->first], tile, end, slots);
        find_next(a, w, size, tile, next);
        for (long head = w->first_head / group; head * group < w->past_head; head++)
            tile_of_head(wide, a, w, head, tile, slots, next, end - tile < TILE ? end - tile : TILE);
    }
    end_walk(wide, a, w);
}

/* Every walk is one piece of work; if there are fewer than threads, its key heads are, or the heads of an only one. */
INLINE void attend(const int wide, const struct attention *a) {
    long *first = malloc(sizeof(long) * (a->n + 1)), walks = 0, threads = omp_get_max_threads();
    for (long row = 0; row < a->n; row += rows_together(a, row)) first[walks++] = row;
    long units = a->kv_heads > 1 ? a->kv_heads : a->heads, wanted = walks ? (threads + walks - 1) / walks : 1;
    long parts = wanted < units ? wanted : units, heads = a->heads / units;
#pragma omp parallel
    {
        float *memory = malloc(sizeof(float) * MOST_ROWS * a->heads * (2 + TILE + a->value_dim));
#pragma omp for schedule(dynamic)
        for (long piece = 0; piece < walks * parts; piece++) {
            long part = piece % parts;
            struct walk w = begin_walk(a, first[piece / parts], heads * (part * units / parts),
                                       heads * ((part + 1) * units / parts), memory);
            walk(wide, a, &w);
        }
        free(memory);
    }
    free(first);
}

/* key_dim: a multiple of 32 in bf16 and of 16 in fp32; value_dim of 16; heads of kv_heads, at most MOST_QUERIES. */
void phalanx_attend_bf16(const struct attention *a) { attend(0, a); }

void phalanx_attend_fp32(const struct attention *a) { attend(1, a); }
