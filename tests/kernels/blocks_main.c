/* Packs a weight and multiplies: blocks_main type outputs inputs rows bytes exact in out. The file `in` holds the weight's blocks, `bytes`
 * of them, then x [rows, inputs] float32; `out` receives y [rows, outputs] float32. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int64_t headway_blocks_size(int type, int64_t outputs, int64_t inputs);
void headway_blocks_pack(const uint8_t *rows, uint8_t *packed, int64_t outputs, int64_t inputs, int type, int threads);
int headway_blocks_linear(const void *x, const uint8_t *packed, const void *bias, void *y, const int64_t *parts, int64_t count,
                          int64_t rows, int64_t inputs, int bf, int exact, int threads);
int headway_blocks_set(void);

int main(int argc, char **argv) {
    if (argc != 9) return 2;
    const int type = atoi(argv[1]);
    const int64_t outputs = atoll(argv[2]), inputs = atoll(argv[3]), rows = atoll(argv[4]), bytes = atoll(argv[5]);
    const int64_t size = headway_blocks_size(type, outputs, inputs);
    if (size < 0) return 3;
    uint8_t *blocks = malloc((size_t)bytes), *packed = malloc((size_t)size);
    float *x = malloc((size_t)(rows * inputs) * sizeof *x), *y = malloc((size_t)(rows * outputs) * sizeof *y);
    FILE *in = fopen(argv[7], "rb"), *out = fopen(argv[8], "wb");
    if (!in || !out || fread(blocks, 1, (size_t)bytes, in) != (size_t)bytes) return 4;
    if (fread(x, sizeof *x, (size_t)(rows * inputs), in) != (size_t)(rows * inputs)) return 4;
    headway_blocks_pack(blocks, packed, outputs, inputs, type, 1);
    const int64_t parts[2] = {type, outputs};
    if (headway_blocks_linear(x, packed, NULL, y, parts, 1, rows, inputs, 0, atoi(argv[6]), 1)) return 5;
    fwrite(y, sizeof *y, (size_t)(rows * outputs), out);
    fclose(out);
    printf("%d\n", headway_blocks_set());
    return 0;
}
