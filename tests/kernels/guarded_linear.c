/* Packs a weight and multiplies between pages that nobody may touch: guarded_linear rows outputs inputs bf narrow before in
 * out.
 *
 * The file `in` holds x [rows, inputs], the weight [outputs, inputs], in bfloat16 if it is narrow, and the bias [outputs]; `out` receives y [rows,
 * outputs]. Each lies right before such a page, or right behind one if `before` is 1: reading or writing one byte more
 * ends the process. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void headway_linear_pack(const void *weight, void *packed, int64_t outputs, int64_t inputs, int bf, int threads);
int headway_linear(const void *x, const void *packed, const void *bias, void *y, int64_t rows, int64_t outputs,
                   int64_t inputs, int bf, int narrow, int gelu, int threads);

/* `size` bytes of 0xff, which are NaN in both dtypes. */
static void *guarded(size_t size, int before) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (size + page - 1) / page * page;
    char *all = mmap(NULL, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(all + page, room, PROT_READ | PROT_WRITE)) exit(3);
    memset(all + page, 0xff, room);
    return all + page + (before ? 0 : room - size);
}

int main(int argc, char **argv) {
    if (argc != 9) return 2;
    const int64_t rows = atoll(argv[1]), outputs = atoll(argv[2]), inputs = atoll(argv[3]);
    const int bf = atoi(argv[4]), narrow = atoi(argv[5]), before = atoi(argv[6]);
    const size_t each = bf ? 2 : 4, of_weight = narrow ? 2 : 4;
    const size_t padded = (size_t)((outputs + 31) / 32 * 32 * inputs) * of_weight;
    const size_t sizes[3] = {(size_t)(rows * inputs) * each, (size_t)(outputs * inputs) * of_weight, (size_t)outputs * each};
    void *given[3], *packed = guarded(padded, before), *y = guarded((size_t)(rows * outputs) * each, before);
    FILE *in = fopen(argv[7], "rb"), *out = fopen(argv[8], "wb");
    if (!in || !out) return 4;
    for (int i = 0; i < 3; i++) {
        given[i] = guarded(sizes[i], before);
        if (fread(given[i], 1, sizes[i], in) != sizes[i]) return 4;
    }
    headway_linear_pack(given[1], packed, outputs, inputs, narrow, 1);
    if (headway_linear(given[0], packed, given[2], y, rows, outputs, inputs, bf, narrow, 0, 1)) return 5;
    fwrite(y, each, (size_t)(rows * outputs), out);
    fclose(out);
    return 0;
}
