/* rms_norm, add_rms_norm, silu_mul: one row at a time, rows in parallel when there is enough of them. */
#include "calls.h"

#define MIN_ELEMENTS 32768 /* less than this is done before a second thread has woken up */

struct norm {
    const void *x, *weight;
    void *residual, *out;
    int64_t rows, size, rows_per_item;
    float eps;
    int bf;
};

/* out = round(x / rms(x)) * weight; with a residual, x is first added into it. */
INLINE void norm_row(const struct norm *a, int64_t row, const int bf) {
    const int64_t base = row * a->size, size = a->size;
    const void *source = a->x;
    vf squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        vf x = load_row(a->x, base + i, size - i, bf);
        if (a->residual) {
            x = round_to(load_row(a->residual, base + i, size - i, bf) + x, bf);
            store_row(a->residual, base + i, x, size - i, bf);
        }
        squares += x * x;
    }
    if (a->residual) source = a->residual;
    const float scale = 1.0f / sqrtf(sum(squares) / (float)size + a->eps);
    for (int64_t i = 0; i < size; i += LANES) {
        vf x = round_to(load_row(source, base + i, size - i, bf) * scale, bf);
        store_row(a->out, base + i, x * load_row(a->weight, i, size - i, bf), size - i, bf);
    }
}

static void norm_item(void *context, int64_t item) {
    const struct norm *a = context;
    int64_t end = (item + 1) * a->rows_per_item;
    if (end > a->rows) end = a->rows;
    for (int64_t row = item * a->rows_per_item; row < end; row++)
        if (a->bf) norm_row(a, row, 1);
        else norm_row(a, row, 0);
}

/* x, out [rows, size]; residual the same or NULL; weight [size]. */
EXPORT void headway_rms_norm(const void *x, void *residual, const void *weight, void *out, int64_t rows, int64_t size,
                             float eps, int bf, int threads) {
    struct norm a = {x, weight, residual, out, rows, size, size ? MIN_ELEMENTS / 2 / size + 1 : rows, eps, bf};
    if (rows && size) parallel_for((rows + a.rows_per_item - 1) / a.rows_per_item, threads, norm_item, &a);
}

struct silu {
    const void *x;
    void *out;
    int64_t rows, size, rows_per_item;
    int bf;
};

INLINE void silu_row(const struct silu *a, int64_t row, const int bf) {
    for (int64_t i = 0; i < a->size; i += LANES) {
        const int64_t left = a->size - i, gate_at = row * 2 * a->size + i;
        vf gate = load_row(a->x, gate_at, left, bf), up = load_row(a->x, gate_at + a->size, left, bf);
        store_row(a->out, row * a->size + i, round_to(gate / (1.0f + vexp(-gate)), bf) * up, left, bf);
    }
}

static void silu_item(void *context, int64_t item) {
    const struct silu *a = context;
    int64_t end = (item + 1) * a->rows_per_item;
    if (end > a->rows) end = a->rows;
    for (int64_t row = item * a->rows_per_item; row < end; row++)
        if (a->bf) silu_row(a, row, 1);
        else silu_row(a, row, 0);
}

/* x [rows, 2 * size] = (gate, up) -> out [rows, size]. */
EXPORT void headway_silu_mul(const void *x, void *out, int64_t rows, int64_t size, int bf, int threads) {
    struct silu a = {x, out, rows, size, size ? MIN_ELEMENTS / 4 / size + 1 : rows, bf};
    if (rows && size) parallel_for((rows + a.rows_per_item - 1) / a.rows_per_item, threads, silu_item, &a);
}
