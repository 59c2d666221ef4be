/* Selection by radix: a histogram of weight over the top bits of the values' order keys finds the digit where the target
 * is reached, then the next bits within that digit. Linear, whatever the values are, and ties come out whole. Many values
 * are first narrowed to one of equal parts of their range, over which they spread better than over floats' top bits. */
#include "select.h"

#define DIGITS 2048

INLINE float float_of_key(uint32_t key) {
    union { uint32_t u; float f; } c = {.u = key >> 31 ? key ^ 0x80000000u : ~key};
    return c.f;
}

INLINE float select_digits(const float *x, const float *weights, int64_t size, double target, const int weighted) {
    static const int shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
    double histogram[DIGITS];
    uint32_t prefix = 0, known = 0;
    for (int pass = 0; pass < 3; pass++) {
        const uint32_t digits = 1u << widths[pass];
        uint32_t lowest = digits - 1, digit = digits - 1;
        memset(histogram, 0, digits * sizeof *histogram);
        for (int64_t i = 0; i < size; i++) {
            const uint32_t key = order_key(x[i]);
            if ((key & known) != prefix) continue;
            const uint32_t mine = (key >> shifts[pass]) & (digits - 1);
            histogram[mine] += weighted ? weights[i] : 1.0;
            if (mine < lowest) lowest = mine;
        }
        while (digit > lowest && histogram[digit] < target) target -= histogram[digit--];
        prefix |= digit << shifts[pass];
        known |= (digits - 1) << shifts[pass];
    }
    return float_of_key(prefix);
}

INLINE vi parts_of(const float *x, int64_t i, int64_t left, float low, float scale) {
    return __builtin_convertvector((load_row(x, i, left, 0) - low) * scale, vi);
}

/* Keeps the elements of the part where the target is reached, in place; returns how many, and lowers the target by what lies
 * above them. Does nothing when the range cannot be cut. size >= LANES. */
INLINE int64_t narrow(float *x, float *weights, int64_t size, double *target, const int weighted) {
    vf low = load(x, size - LANES, 0), high = low;
    for (int64_t i = 0; i + LANES <= size; i += LANES) {
        const vf v = load(x, i, 0);
        low = choose(v < low, v, low);
        high = choose(v > high, v, high);
    }
    const float least = -max_lane(-low), range = max_lane(high) - least, scale = (DIGITS - 1) / range;
    if (!(range > 0) || !(range < INFINITY) || !(scale < INFINITY)) return size;
    double histogram[DIGITS];
    memset(histogram, 0, sizeof histogram);
    for (int64_t i = 0; i < size; i += LANES) {
        const vi part = parts_of(x, i, size - i, least, scale);
        for (int64_t lane = 0; lane < LANES && i + lane < size; lane++)
            histogram[part[lane]] += weighted ? weights[i + lane] : 1.0;
    }
    int digit = DIGITS - 1;
    while (digit > 0 && histogram[digit] < *target) *target -= histogram[digit--];
    int64_t kept = 0;
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        const vi keep = (parts_of(x, i, left, least, scale) == digit) & lanes_before(left);
        if (!any(keep)) continue;
        if (weighted) append(weights, kept, load_row(weights, i, left, 0), keep);
        kept = append(x, kept, load_row(x, i, left, 0), keep);
    }
    return kept;
}

float select_mass(float *x, float *weights, int64_t size, double target) {
    if (!weights) {
        if (size >= MANY) size = narrow(x, NULL, size, &target, 0);
        return select_digits(x, NULL, size, target, 0);
    }
    if (size >= MANY) size = narrow(x, weights, size, &target, 1);
    return select_digits(x, weights, size, target, 1);
}

int64_t strip_count(int64_t vocab) { return (vocab + STRIP - 1) / STRIP; }

INLINE float top_of(const struct row *row, float *strips, const int bf) {
    vf top = splat(-INFINITY);
    for (int64_t begin = 0; begin < row->vocab; begin += STRIP) {
        const int64_t end = begin + STRIP < row->vocab ? begin + STRIP : row->vocab;
        vf strip = splat(-INFINITY);
        for (int64_t i = begin; i < end; i += LANES) {
            const vf x = load_logits(row->logits, i, row->vocab - i, bf);
            strip = choose(x > strip, x, strip);
        }
        if (strips) store(strips, begin / STRIP * LANES, strip / row->heat, 0);
        top = choose(strip > top, strip, top);
    }
    return max_lane(top) / row->heat; /* rounding keeps order: the largest quotient is the quotient of the largest */
}

float row_top(const struct row *row, float *strips) {
    return row->bf ? top_of(row, strips, 1) : top_of(row, strips, 0);
}

INLINE int64_t collect(const struct row *row, float low, float *buffer, const int bf) {
    int64_t found = 0;
    for (int64_t i = 0; i < row->vocab; i += LANES) {
        const int64_t left = row->vocab - i;
        const vf x = load_logits(row->logits, i, left, bf) / row->heat;
        const vi keep = (x >= low) & lanes_before(left);
        if (any(keep)) found = append(buffer, found, x, keep);
    }
    return found;
}

int64_t row_collect(const struct row *row, float low, float *buffer) {
    return row->bf ? collect(row, low, buffer, 1) : collect(row, low, buffer, 0);
}

float row_kth(const struct row *row, float *strips, int64_t k, float *buffer, int64_t *found) {
    /* The k-th largest of the maxima of disjoint parts is a lower bound, and a close one while k is far below their number. */
    const int64_t maxima = strip_count(row->vocab) * LANES;
    const float low = k <= maxima / 4 ? select_mass(strips, NULL, maxima, (double)k) : -INFINITY;
    const int64_t size = row_collect(row, low, buffer);
    *found = size < MANY ? size : -1;
    return select_mass(buffer, NULL, size, (double)k);
}
