/* Intel's tiles (AMX) in C, put before linear.c: what the instructions do to eight registers, for CPUs that have none.
 * Linux always hands the registers out. Memory that nobody has written (FE, by the compiler and malloc, as the test starts
 * them) or that may not count (FF) ends the process when it is loaded as an operand. */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_release

struct software_tiles { uint8_t bytes[8], rows[8]; char data[8][16][64]; };
static _Thread_local struct software_tiles soft;

static inline void soft_config(const void *from) {
    const uint8_t *shapes = from;
    memset(soft.data, 0xff, sizeof soft.data);
    for (int t = 0; t < 8; t++) soft.bytes[t] = shapes[16 + 2 * t], soft.rows[t] = shapes[48 + t];
}
static inline void soft_load(int t, const void *from, int64_t stride) {
    for (int r = 0; r < soft.rows[t]; r++) {
        memcpy(soft.data[t][r], (const char *)from + r * stride, soft.bytes[t]);
        for (int i = 0; t > 3 && i < soft.bytes[t]; i += 2)
            if (!memcmp(soft.data[t][r] + i, "\xfe\xfe", 2) || !memcmp(soft.data[t][r] + i, "\xff\xff", 2)) abort();
    }
}
static inline void soft_store(int t, void *to, int64_t stride) {
    for (int r = 0; r < soft.rows[t]; r++) memcpy((char *)to + r * stride, soft.data[t][r], soft.bytes[t]);
}
static inline float soft_half(const char *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline void soft_product(int sums, int x, int w) {
    for (int r = 0; r < soft.rows[sums]; r++)
        for (int c = 0; c < soft.bytes[sums] / 4; c++) {
            float sum;
            memcpy(&sum, soft.data[sums][r] + 4 * c, 4);
            for (int k = 0; k < soft.bytes[x] / 2; k++)
                sum += soft_half(soft.data[x][r] + 2 * k) * soft_half(soft.data[w][k / 2] + 4 * c + 2 * (k % 2));
            memcpy(soft.data[sums][r] + 4 * c, &sum, 4);
        }
}

#define _tile_loadconfig(from) soft_config(from)
#define _tile_loadd(t, from, stride) soft_load(t, from, stride)
#define _tile_stored(t, to, stride) soft_store(t, to, stride)
#define _tile_zero(t) memset(soft.data[t], 0, sizeof soft.data[t])
#define _tile_dpbf16ps(sums, x, w) soft_product(sums, x, w)
#define _tile_release() memset(soft.data, 0xff, sizeof soft.data)
#define syscall(...) 0
