// The kernels of kernels.py and step_kernels.py, which say what each does and are the reference for its bits.
//
// Rules of this file:
// 1. Every vector is a pointer and its number of elements, in the order of the reference's arguments.
// 2. Values that all peers compute alike are computed by the same operations in the same order, each rounded: compiled
//    without contraction of a multiplication and an addition (setup: -ffp-contract=off) and without -ffast-math.
// 3. Memory is passed over once: what is between two operations stays in registers. The compiler makes vectors of the
//    loops, for each kind of processor (CLONES), of which the loader picks the one that is here.

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define LANES 32
#define LONGEST_BLOCK 4096

typedef int64_t count;

EXPORT const int32_t revision = 1;  // another one when what was exported changes or goes: see native.py

INLINE int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float value_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE int32_t to_bfloat16(int32_t bits) {
    uint32_t u = (uint32_t)bits;
    return (int32_t)((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}

INLINE count least(count a, count b) { return a < b ? a : b; }

// -------------------------------------------------------------------------------------------------------- encoding

EXPORT CLONES double squares(const float *restrict x, count n) {
    double lanes[LANES] = {0}, total = 0;
    count whole = n - n % LANES;
    for (count i = 0; i < whole; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += (double)x[i + l] * (double)x[i + l];
    for (count i = whole; i < n; i++) total += (double)x[i] * (double)x[i];
    for (int l = 0; l < LANES; l++) total += lanes[l];
    return total;
}

INLINE float squares_of_block(const float *restrict x, count n) {
    float lanes[LANES] = {0}, total = 0;
    count whole = n - n % LANES;
    for (count i = 0; i < whole; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += x[i + l] * x[i + l];
    for (count i = whole; i < n; i++) total += x[i] * x[i];
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) lanes[l] += lanes[l + width];
    return total + lanes[0];
}

// Of absolute values, by their bits: those of infinity and NaN are the largest.
INLINE float largest_of(const float *restrict x, count n) {
    int32_t found = 0;
    for (count i = 0; i < n; i++) {
        int32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        found = magnitude > found ? magnitude : found;
    }
    return value_of(found);
}

// Of a number within +-7: adding this leaves it, rounded to the nearest (ties to even), in the lowest bits.
#define ROUND 12582912.0f

INLINE uint32_t symbol(float value, float inverse, float largest) {
    float v = value * inverse;
    v = v > largest ? largest : v;
    v = v < -largest ? -largest : v;
    return (uint32_t)bits_of(v + ROUND) & 15u;
}

INLINE void pack_half(const float *restrict x, const float *restrict y, float x_inverse, float y_inverse, float largest,
                      uint8_t *restrict packed, count n) {
    for (count i = 0; i < n; i++)
        packed[i] = (uint8_t)(symbol(x[i], x_inverse, largest) | (symbol(y[i], y_inverse, largest) << 4));
}

EXPORT CLONES void pack_int4(const float *restrict x, count n, const float *restrict scales, count blocks, count block,
                             float largest, uint8_t *restrict packed, count n_packed) {
    (void)n_packed;
    count half = block / 2;
    for (count h = 0; h < blocks; h++) {
        count low = h * half, high = (blocks + h) * half;
        float low_scale = scales[h >> 1], high_scale = scales[(blocks + h) >> 1];
        float low_inverse = low_scale != 0.0f ? 1.0f / low_scale : 1.0f;
        float high_inverse = high_scale != 0.0f ? 1.0f / high_scale : 1.0f;
        uint8_t *out = packed + low;
        if (high + half <= n) {
            pack_half(x + low, x + high, low_inverse, high_inverse, largest, out, half);
            continue;
        }
        for (count i = 0; i < half; i++) {  // the chunk's end
            float v = low + i < n ? x[low + i] : 0.0f, w = high + i < n ? x[high + i] : 0.0f;
            out[i] = (uint8_t)(symbol(v, low_inverse, largest) | (symbol(w, high_inverse, largest) << 4));
        }
    }
}

// A block on its way into a body: it stays in the first cache while its scale is found, and until both halves are packed.
struct encoder {
    const float *x, *less;  // of which the difference is encoded; less may be 0
    count n, block;
    float step, tail, largest, smallest_norm, largest_norm;
    uint16_t *scales;
};

INLINE bool open_block(const struct encoder *e, count b, float *restrict values, float *restrict inverse) {
    const float *x = e->x + b * e->block;
    count size = least(e->block, e->n - b * e->block);
    if (e->less) {
        const float *less = e->less + b * e->block;
        for (count i = 0; i < size; i++) values[i] = x[i] - less[i];
    } else {
        memcpy(values, x, (size_t)size * sizeof(float));
    }
    memset(values + size, 0, (size_t)(e->block - size) * sizeof(float));
    float norm = sqrtf(squares_of_block(values, size)), absmax = largest_of(values, size), scale = 0.0f;
    if (e->smallest_norm <= norm && norm <= e->largest_norm) {
        float rounded = value_of(to_bfloat16(bits_of(norm * (float)((double)e->step / sqrt((double)size)))));
        bool is_heavy = absmax * e->step > e->tail * rounded;
        scale = is_heavy ? value_of(to_bfloat16(bits_of(absmax / e->largest))) : rounded;
    } else if (bits_of(absmax)) {
        return false;
    }
    e->scales[b] = (uint16_t)((uint32_t)bits_of(scale) >> 16);
    *inverse = scale != 0.0f ? 1.0f / scale : 1.0f;
    return true;
}

EXPORT CLONES bool encode_int4(const float *x, count n, const float *less, count n_less, count block, float step,
                               float tail, float largest, float smallest_norm, float largest_norm,
                               uint8_t *restrict packed, count n_packed, uint16_t *scales, count blocks) {
    (void)n_packed;
    struct encoder e = {x, n_less ? less : 0, n, block, step, tail, largest, smallest_norm, largest_norm, scales};
    float low[LONGEST_BLOCK], high[LONGEST_BLOCK], low_inverse = 1.0f, high_inverse = 1.0f;
    count half = block / 2;
    for (count h = 0; h < blocks; h++) {
        count at = (h & 1) * half, from = ((blocks + h) & 1) * half;
        if (!at && !open_block(&e, h >> 1, low, &low_inverse)) return false;
        if ((!from || !h) && !open_block(&e, (blocks + h) >> 1, high, &high_inverse)) return false;
        pack_half(low + at, high + from, low_inverse, high_inverse, largest, packed + h * half, half);
    }
    return true;
}

// -------------------------------------------------------------------------------------------------------- decoding

EXPORT CLONES bool widen_scales(const uint8_t *restrict raw, count n_raw, int32_t *restrict scale_bits, count n,
                                int32_t largest) {
    (void)n_raw;
    int32_t worst = 0;
    for (count i = 0; i < n; i++) {
        int32_t bits = (int32_t)raw[2 * i] | ((int32_t)raw[2 * i + 1] << 8);
        worst = bits > worst ? bits : worst;
        scale_bits[i] = (int32_t)((uint32_t)bits << 16);
    }
    return worst <= largest;
}

INLINE float unpacked(int8_t byte, bool is_high, float scale) {
    int32_t wide = (int32_t)byte;
    int32_t value = is_high ? wide >> 4 : (int32_t)((uint32_t)wide << 28) >> 28;
    return (float)value * scale;
}

// What follows goes by half blocks: of each, ``at`` is its first element, ``size`` how many it has.
#define EACH_HALF(n_packed, n_out)                                                                                     \
    count half = block / 2;                                                                                            \
    for (count at = 0, end = least(2 * (n_packed), (n_out)), size; size = least(half, end - at), at < end; at += half)
#define IS_HIGH(n_packed) (at >= (n_packed))
#define BYTES(packed, n_packed) ((packed) + (at >= (n_packed) ? at - (n_packed) : at))

INLINE void unpack_half(const int8_t *restrict bytes, const bool is_high, float scale, float *restrict out, count n) {
    for (count i = 0; i < n; i++) out[i] = unpacked(bytes[i], is_high, scale);
}

EXPORT CLONES void unpack_int4(const int8_t *restrict packed, count n_packed, const float *restrict scales,
                               count n_scales, count block, float *restrict out, count n) {
    (void)n_scales;
    EACH_HALF(n_packed, n) {
        const int8_t *bytes = BYTES(packed, n_packed);
        if (IS_HIGH(n_packed))
            unpack_half(bytes, true, scales[at / block], out + at, size);
        else
            unpack_half(bytes, false, scales[at / block], out + at, size);
    }
}

INLINE void add_half(const int8_t *restrict bytes, const bool is_high, float scale, float factor, float *restrict out,
                     count n) {
    for (count i = 0; i < n; i++) out[i] += unpacked(bytes[i], is_high, scale) * factor;
}

EXPORT CLONES void add_int4(const int8_t *restrict packed, count n_packed, const float *restrict scales, count n_scales,
                            count block, float factor, float *restrict out, count n) {
    (void)n_scales;
    EACH_HALF(n_packed, n) {
        const int8_t *bytes = BYTES(packed, n_packed);
        if (IS_HIGH(n_packed))
            add_half(bytes, true, scales[at / block], factor, out + at, size);
        else
            add_half(bytes, false, scales[at / block], factor, out + at, size);
    }
}

EXPORT CLONES void square_int4(const int8_t *restrict packed, count n_packed, count block, int32_t *restrict sums,
                               count blocks) {
    count half = block / 2;
    for (count b = 0; b < blocks; b++) sums[b] = 0;
    for (count h = 0; h < blocks; h++) {
        const int8_t *bytes = packed + h * half;
        count size = least(half, n_packed - h * half);
        int32_t low_sum = 0, high_sum = 0;
        for (count i = 0; i < size; i++) {
            int32_t wide = bytes[i], high = wide >> 4, low = (int32_t)((uint32_t)wide << 28) >> 28;
            high_sum += high * high;
            low_sum += low * low;
        }
        sums[h / 2] += low_sum;
        sums[(blocks + h) / 2] += high_sum;
    }
}

// ---------------------------------------------------------------------------------------------------- outer steps

INLINE float moved(float t, float gradient, float *m, float rate, float mu) {
    float next = *m * mu + gradient;
    *m = next;
    return t - (next * mu + gradient) * rate;
}

INLINE float moved_narrow(float t, float gradient, int16_t *narrow, float rate, float mu, float carry) {
    float exact = value_of((int32_t)((uint32_t)(int32_t)*narrow << 16)) * mu + gradient;
    int32_t rounded = to_bfloat16(bits_of(exact));
    *narrow = (int16_t)(rounded >> 16);
    float step = (exact * mu + gradient) + (exact - value_of(rounded)) * carry;
    return t - step * rate;
}

EXPORT CLONES void outer_step(float *restrict theta, count n, float *restrict momentum, count n_m,
                              float *restrict gradient, count n_g, float rate, float mu) {
    (void)n_m, (void)n_g;
    for (count i = 0; i < n; i++) {
        float t = theta[i], next = moved(t, gradient[i], momentum + i, rate, mu);
        theta[i] = next;
        gradient[i] = next - t;
    }
}

EXPORT CLONES void outer_step_narrow(float *restrict theta, count n, int16_t *restrict narrow, count n_m,
                                     float *restrict gradient, count n_g, float rate, float mu, float carry) {
    (void)n_m, (void)n_g;
    for (count i = 0; i < n; i++) {
        float t = theta[i], next = moved_narrow(t, gradient[i], narrow + i, rate, mu, carry);
        theta[i] = next;
        gradient[i] = next - t;
    }
}

INLINE void aside_half(const int8_t *restrict bytes, const bool is_high, const bool is_narrow, float scale,
                       const float *restrict theta, const float *restrict momentum, const int16_t *restrict narrow,
                       float *restrict new_theta, float *restrict new_momentum, int16_t *restrict new_narrow, count n,
                       float rate, float mu, float carry) {
    for (count i = 0; i < n; i++) {
        float gradient = unpacked(bytes[i], is_high, scale);
        if (is_narrow) {
            int16_t m = narrow[i];
            new_theta[i] = moved_narrow(theta[i], gradient, &m, rate, mu, carry);
            new_narrow[i] = m;
        } else {
            float m = momentum[i];
            new_theta[i] = moved(theta[i], gradient, &m, rate, mu);
            new_momentum[i] = m;
        }
    }
}

EXPORT CLONES void step_aside_int4(const int8_t *restrict packed, count n_packed, const float *restrict scales,
                                   count n_scales, count block, const float *restrict theta, count n,
                                   const float *restrict momentum, count n_m, const int16_t *restrict narrow,
                                   count n_narrow, float *restrict new_theta, count n_new, float *restrict new_momentum,
                                   count n_new_m, int16_t *restrict new_narrow, count n_new_narrow, float rate,
                                   float mu, float carry) {
    (void)n_scales, (void)n_m, (void)n_new, (void)n_new_m, (void)n_new_narrow;
    EACH_HALF(n_packed, n) {
        const int8_t *bytes = BYTES(packed, n_packed);
        float scale = scales[at / block];
#define ASIDE(is_high, is_narrow)                                                                                      \
    aside_half(bytes, is_high, is_narrow, scale, theta + at, is_narrow ? theta : momentum + at,                        \
               is_narrow ? narrow + at : narrow, new_theta + at, is_narrow ? new_theta : new_momentum + at,            \
               is_narrow ? new_narrow + at : new_narrow, size, rate, mu, carry)
        if (IS_HIGH(n_packed)) {
            if (n_narrow) ASIDE(true, true);
            else ASIDE(true, false);
        } else {
            if (n_narrow) ASIDE(false, true);
            else ASIDE(false, false);
        }
    }
}

INLINE void step_half(const int8_t *restrict bytes, const bool is_high, float scale, const bool has_own,
                      const int8_t *restrict own_bytes, float own_scale, const bool is_narrow, float *restrict theta,
                      float *restrict momentum, int16_t *restrict narrow, const bool has_buffer, const bool is_added,
                      float *restrict buffer, count n, float rate, float mu, float carry) {
    for (count i = 0; i < n; i++) {
        float gradient = unpacked(bytes[i], is_high, scale), t = theta[i], next;
        if (is_narrow)
            next = moved_narrow(t, gradient, narrow + i, rate, mu, carry);
        else
            next = moved(t, gradient, momentum + i, rate, mu);
        theta[i] = next;
        float change = next - t;
        if (has_own) change += unpacked(own_bytes[i], is_high, own_scale);
        if (has_buffer) buffer[i] = is_added ? buffer[i] + change : change;
    }
}

EXPORT CLONES void step_int4(const int8_t *restrict packed, count n_packed, const float *restrict scales,
                             count n_scales, const int8_t *restrict own_packed, count n_own_packed,
                             const float *restrict own_scales, count n_own_scales, count block, float *restrict theta,
                             count n, float *restrict momentum, count n_m, int16_t *restrict narrow, count n_narrow,
                             float *restrict buffer, count n_buffer, bool is_added, float rate, float mu, float carry) {
    (void)n_scales, (void)n_m, (void)n_own_packed;
    bool has_own = n_own_scales != 0, has_buffer = n_buffer != 0;
    EACH_HALF(n_packed, n) {
        const int8_t *bytes = BYTES(packed, n_packed), *own = has_own ? BYTES(own_packed, n_packed) : bytes;
        float scale = scales[at / block], own_scale = has_own ? own_scales[at / block] : 0.0f;
        float *to = has_buffer ? buffer + at : 0;
#define STEP(is_high, has_own, is_narrow, has_buffer, is_added)                                                        \
    step_half(bytes, is_high, scale, has_own, own, own_scale, is_narrow, theta + at, is_narrow ? 0 : momentum + at,    \
              is_narrow ? narrow + at : 0, has_buffer, is_added, to, size, rate, mu, carry)
#define STEP_TO(is_high, has_own, is_narrow)                                                                           \
    do {                                                                                                               \
        if (!has_buffer) STEP(is_high, has_own, is_narrow, false, false);                                              \
        else if (is_added) STEP(is_high, has_own, is_narrow, true, true);                                              \
        else STEP(is_high, has_own, is_narrow, true, false);                                                           \
    } while (0)
#define STEP_OF(is_high)                                                                                               \
    do {                                                                                                               \
        if (has_own) { if (n_narrow) STEP_TO(is_high, true, true); else STEP_TO(is_high, true, false); }               \
        else { if (n_narrow) STEP_TO(is_high, false, true); else STEP_TO(is_high, false, false); }                     \
    } while (0)
        if (IS_HIGH(n_packed)) STEP_OF(true);
        else STEP_OF(false);
    }
}

// --------------------------------------------------------------------------------------------------- whole shards
// A shard's bodies lie one after the other in ``bodies``; each is of CHUNK elements, the last of what is left. Chunk by
// chunk the functions above are called, so that an interpreter is not. They are checked before anything is written:
// false (a negative sum) where one is not an int4 body as it should be, or not of the same block as the others.

#define CHUNK (1 << 18)
#define HEADER 8
#define VERSION 2
#define INT4 1
#define LARGEST_SCALE ((119 + 127) << 7)
#define LARGEST_BLOCKS (CHUNK / 64)
#define MOST_BODIES 64

struct body {
    const int8_t *packed;
    const uint8_t *scales;
    count elements, block, blocks, n_packed, size;
};

INLINE int32_t scale_bits(const struct body *b, count index) {
    return (int32_t)b->scales[2 * index] | ((int32_t)b->scales[2 * index + 1] << 8);
}

INLINE float scale_of(const struct body *b, count index) {
    return value_of((int32_t)((uint32_t)scale_bits(b, index) << 16));
}

// The body that begins at ``raw``, of which there are ``n`` bytes, of at most CHUNK of the elements that are left.
static bool open_body(const uint8_t *raw, count n, count left, struct body *b) {
    if (n < HEADER || raw[0] != VERSION || raw[1] != INT4) return false;
    count claimed = (count)raw[4] | (count)raw[5] << 8 | (count)raw[6] << 16 | (count)raw[7] << 24;
    b->elements = least(left, CHUNK);
    b->block = (count)raw[2] | (count)raw[3] << 8;
    if (claimed != b->elements || b->block < 64 || b->block > LONGEST_BLOCK || b->block & (b->block - 1)) return false;
    b->blocks = (b->elements + b->block - 1) / b->block;
    b->n_packed = b->blocks * b->block / 2;
    b->size = HEADER + b->n_packed + 2 * b->blocks;
    if (n < b->size) return false;
    b->packed = (const int8_t *)(raw + HEADER);
    b->scales = raw + HEADER + b->n_packed;
    int32_t worst = 0;
    for (count i = 0; i < b->blocks; i++) worst = scale_bits(b, i) > worst ? scale_bits(b, i) : worst;
    return worst <= LARGEST_SCALE;
}

// All bodies, in blocks of ``*block`` elements (0: of any; it becomes theirs).
static bool are_sound(const uint8_t *bodies, count n, count elements, count *block) {
    struct body b;
    count at = 0;
    for (count done = 0; done < elements; done += CHUNK, at += b.size) {
        if (!open_body(bodies + at, n - at, elements - done, &b) || (*block && b.block != *block)) return false;
        *block = b.block;
    }
    return at == n;
}

static void widen_all(const struct body *b, float *scales) {
    for (count i = 0; i < b->blocks; i++) scales[i] = scale_of(b, i);
}

EXPORT bool square_shard(const uint8_t *bodies, count n, count elements, double *squares_of, count chunks) {
    struct body b;
    count block = 0, at = 0;
    int32_t sums[LARGEST_BLOCKS];
    if (chunks != (elements + CHUNK - 1) / CHUNK || !are_sound(bodies, n, elements, &block)) return false;
    for (count c = 0; c < chunks; c++, at += b.size) {
        double total = 0;
        if (!open_body(bodies + at, n - at, elements - c * CHUNK, &b)) return false;
        square_int4(b.packed, b.n_packed, b.block, sums, b.blocks);
        for (count i = 0; i < b.blocks; i++) total += (double)sums[i] * ((double)scale_of(&b, i) * (double)scale_of(&b, i));
        squares_of[c] = total;
    }
    return true;
}

EXPORT CLONES double sum_shard(const int64_t *addresses, count n, const int64_t *sizes, count n_sizes,
                               const float *factors, count n_factors, float *restrict out, count elements) {
    struct body bodies[MOST_BODIES];
    count at[MOST_BODIES] = {0}, block = 0;
    double lanes[LANES] = {0}, total = 0;
    float sum[LONGEST_BLOCK];
    if (n < 1 || n > MOST_BODIES || n_sizes != n || n_factors != n) return -1;
    for (count g = 0; g < n; g++)
        if (!are_sound((const uint8_t *)addresses[g], sizes[g], elements, &block)) return -1;
    for (count begin = 0; begin < elements; begin += CHUNK) {
        count chunk = least(CHUNK, elements - begin), half = block / 2, n_packed = (chunk + block - 1) / block * half;
        for (count g = 0; g < n; g++) {
            const uint8_t *raw = (const uint8_t *)addresses[g] + at[g];
            if (!open_body(raw, sizes[g] - at[g], elements - begin, bodies + g)) return -1;
            at[g] += bodies[g].size;
        }
        for (count i = 0; i < chunk; i += half) {
            count size = least(half, chunk - i);
            memset(sum, 0, (size_t)size * sizeof(float));
            for (count g = 0; g < n; g++) {
                const int8_t *bytes = bodies[g].packed + (i >= n_packed ? i - n_packed : i);
                if (factors[g] == 0.0f) continue;
                if (i >= n_packed) add_half(bytes, true, scale_of(bodies + g, i / block), factors[g], sum, size);
                else add_half(bytes, false, scale_of(bodies + g, i / block), factors[g], sum, size);
            }
            memcpy(out + begin + i, sum, (size_t)size * sizeof(float));
            count whole = size - size % LANES;
            for (count k = 0; k < whole; k += LANES)
                for (int l = 0; l < LANES; l++) lanes[l] += (double)sum[k + l] * (double)sum[k + l];
            for (count k = whole; k < size; k++) total += (double)sum[k] * (double)sum[k];
        }
    }
    for (int l = 0; l < LANES; l++) total += lanes[l];
    return total;
}

EXPORT bool step_shard(const uint8_t *bodies, count n_bodies, const uint8_t *own, count n_own, float *theta, count n,
                       float *momentum, count n_m, int16_t *narrow, count n_narrow, float *buffer, count n_buffer,
                       bool is_added, float rate, float mu, float carry) {
    struct body b, mine = {0};
    count block = 0, at = 0, own_at = 0;
    float scales[LARGEST_BLOCKS], own_scales[LARGEST_BLOCKS];
    if (!are_sound(bodies, n_bodies, n, &block) || (n_own && !are_sound(own, n_own, n, &block))) return false;
    if ((n_m ? n_m : n_narrow) != n || (n_buffer && n_buffer != n)) return false;
    for (count begin = 0; begin < n; begin += CHUNK, at += b.size) {
        if (!open_body(bodies + at, n_bodies - at, n - begin, &b)) return false;
        widen_all(&b, scales);
        if (n_own) {
            if (!open_body(own + own_at, n_own - own_at, n - begin, &mine)) return false;
            widen_all(&mine, own_scales);
            own_at += mine.size;
        }
        step_int4(b.packed, b.n_packed, scales, b.blocks, mine.packed, n_own ? b.n_packed : 0, own_scales,
                  n_own ? b.blocks : 0, block, theta + begin, b.elements, n_m ? momentum + begin : momentum,
                  n_m ? b.elements : 0, n_narrow ? narrow + begin : narrow, n_narrow ? b.elements : 0,
                  n_buffer ? buffer + begin : buffer, n_buffer ? b.elements : 0, is_added, rate, mu, carry);
    }
    return true;
}

EXPORT bool encode_shard(const float *x, count n, const float *less, count n_less, count block, float step, float tail,
                         float largest, float smallest_norm, float largest_norm, uint8_t *bodies, count n_bodies) {
    count at = 0;
    for (count begin = 0; begin < n; begin += CHUNK) {
        count elements = least(CHUNK, n - begin), blocks = (elements + block - 1) / block, n_packed = blocks * block / 2;
        uint8_t *raw = bodies + at;
        if (n_bodies - at < HEADER + n_packed + 2 * blocks) return false;
        uint8_t header[HEADER] = {VERSION, INT4, (uint8_t)block, (uint8_t)(block >> 8), (uint8_t)elements,
                                  (uint8_t)(elements >> 8), (uint8_t)(elements >> 16), (uint8_t)(elements >> 24)};
        memcpy(raw, header, HEADER);
        if (!encode_int4(x + begin, elements, n_less ? less + begin : less, n_less ? elements : 0, block, step, tail,
                         largest, smallest_norm, largest_norm, raw + HEADER, n_packed,
                         (uint16_t *)(raw + HEADER + n_packed), blocks))
            return false;
        at += HEADER + n_packed + 2 * blocks;
    }
    return at == n_bodies;
}
