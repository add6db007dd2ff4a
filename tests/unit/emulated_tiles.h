/* AMX tile instructions in plain C, to run kernels/strips.c on CPUs without them: -include it before the source. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static _Thread_local struct {
    int rows, bytes;
    uint8_t data[16][64];
} emulated[8];

static void emulated_loadconfig(const void *config) {
    const uint8_t *bytes = config;
    for (int tile = 0; tile < 8; tile++) {
        uint16_t width;
        memcpy(&width, bytes + 16 + 2 * tile, 2);
        emulated[tile].bytes = width;
        emulated[tile].rows = bytes[48 + tile];
    }
}

static void emulated_loadd(int tile, const void *base, long stride) {
    for (int row = 0; row < emulated[tile].rows; row++)
        memcpy(emulated[tile].data[row], (const char *)base + row * stride, emulated[tile].bytes);
}

static void emulated_stored(int tile, void *base, long stride) {
    for (int row = 0; row < emulated[tile].rows; row++)
        memcpy((char *)base + row * stride, emulated[tile].data[row], emulated[tile].bytes);
}

static float emulated_widened(const uint8_t *at) {
    uint32_t bits = 0;
    float value;
    memcpy((uint8_t *)&bits + 2, at, 2);
    memcpy(&value, &bits, 4);
    return value;
}

static void emulated_dpbf16ps(int sums, int left, int right) {
    for (int row = 0; row < emulated[sums].rows; row++)
        for (int pair = 0; pair < emulated[left].bytes / 4; pair++)
            for (int column = 0; column < emulated[sums].bytes / 4; column++)
                for (int half = 0; half < 2; half++) {
                    float sum;
                    memcpy(&sum, emulated[sums].data[row] + 4 * column, 4);
                    sum += emulated_widened(emulated[left].data[row] + 4 * pair + 2 * half) *
                           emulated_widened(emulated[right].data[pair] + 4 * column + 2 * half);
                    memcpy(emulated[sums].data[row] + 4 * column, &sum, 4);
                }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated_loadconfig(config)
#define _tile_release() ((void)0)
#define _tile_zero(tile) memset(emulated[tile].data, 0, sizeof emulated[tile].data)
#define _tile_loadd(tile, base, stride) emulated_loadd(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated_stored(tile, base, stride)
#define _tile_dpbf16ps(sums, left, right) emulated_dpbf16ps(sums, left, right)
