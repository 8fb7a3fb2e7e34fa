// The codec's kernels. native.py and shard_codec.py call them; quantization.py, merge.py and outer_optimizer.py say what
// each computes, and are, by torch, the reference for its bits.
//
// Rules of this file:
// 1. Every vector is a pointer and its number of elements, in the order of the reference's arguments.
// 2. Values that all peers compute alike are computed by the same operations in the same order, each rounded: compiled
//    without contraction of a multiplication and an addition (setup: -ffp-contract=off) and without -ffast-math.
// 3. Memory is passed over once: what is between two operations stays in registers. The compiler makes vectors of the
//    loops, for each kind of processor (CLONES), of which the loader picks the one that is here.
// 4. A function whose name ends in ``_avx2`` is written by hand, because the compiler's vectors take up to twice as
//    long there. The plain C beside it is the reference for its bits; it is used on processors without AVX2, and for
//    elements that do not fill a vector.

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define HAS_AVX2 (!is_plain && __builtin_cpu_supports("avx2"))
#endif
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define LANES 32
#define LONGEST_BLOCK 4096
#define LINE 64     // bytes of the cache
// Bytes: a block of 256 parameters. Without it, encoding memory that is in no cache takes 1.3 times as long
// (benchmarks/notes.md).
#define AHEAD 1024

typedef int64_t count;

EXPORT const int32_t revision = 3;  // another one when what was exported changes or goes: see native.py

EXPORT bool is_plain = false;  // tests set it, to compare plain C with the functions for AVX2

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

// Ask memory for what a loop comes to soon, while it computes; the address may lie beyond the vector.
INLINE void ask(const void *at) { __builtin_prefetch((const void *)((uintptr_t)at + AHEAD)); }

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

#ifdef AVX2
// ``values`` = ``x`` - ``less``, with the sum of the squares and the largest absolute value, in one pass. ``n`` is a
// multiple of LANES.
static AVX2 void measure_avx2(const float *x, const float *less, float *values, count n, float *squares, float *most) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    __m256i found[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (count i = 0; i < n; i += LANES) {
        ask(x + i), ask(x + i + LANES / 2);
        if (less) ask(less + i), ask(less + i + LANES / 2);
        for (int l = 0; l < 4; l++) {
            __m256 v = _mm256_loadu_ps(x + i + 8 * l);
            if (less) v = _mm256_sub_ps(v, _mm256_loadu_ps(less + i + 8 * l));
            _mm256_storeu_ps(values + i + 8 * l, v);
            sums[l] = _mm256_add_ps(sums[l], _mm256_mul_ps(v, v));
            found[l % 2] = _mm256_max_epi32(found[l % 2], _mm256_and_si256(_mm256_castps_si256(v), magnitude));
        }
    }
    __m256 half = _mm256_add_ps(_mm256_add_ps(sums[0], sums[2]), _mm256_add_ps(sums[1], sums[3]));
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    *squares = _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
    __m256i both = _mm256_max_epi32(found[0], found[1]);
    __m128i top = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
    *most = value_of(_mm_cvtsi128_si32(_mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1))));
}

// The symbols of 32 values as bytes, in groups of four: 0 to 3, 8 to 11, 16 to 19, 24 to 27, and then those between.
INLINE AVX2 __m256i symbols_avx2(const float *x, __m256 inverse, __m256 largest) {
    __m256i rounded[4];
    for (int l = 0; l < 4; l++) {
        __m256 v = _mm256_min_ps(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * l), inverse), largest);
        rounded[l] = _mm256_cvtps_epi32(_mm256_max_ps(v, _mm256_sub_ps(_mm256_setzero_ps(), largest)));
    }
    return _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]), _mm256_packs_epi32(rounded[2], rounded[3]));
}

// ``pack_half`` for a multiple of 32 values.
static AVX2 void pack_half_avx2(const float *x, const float *y, float x_inverse, float y_inverse, float largest,
                                uint8_t *packed, count n) {
    const __m256 by_x = _mm256_set1_ps(x_inverse), by_y = _mm256_set1_ps(y_inverse), top = _mm256_set1_ps(largest);
    const __m256i nibble = _mm256_set1_epi8(15), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (count i = 0; i < n; i += 32) {
        __m256i low = _mm256_and_si256(symbols_avx2(x + i, by_x, top), nibble);
        __m256i high = _mm256_and_si256(symbols_avx2(y + i, by_y, top), nibble);
        __m256i bytes = _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
        _mm256_storeu_si256((__m256i *)(packed + i), _mm256_permutevar8x32_epi32(bytes, order));
    }
}
#endif

// ``values`` = ``x`` - ``less``, where ``less`` may be 0. Zeros follow up to ``block`` values.
INLINE void measure(const float *x, const float *less, float *restrict values, count n, count block, float *squares,
                    float *most) {
#ifdef AVX2
    if (HAS_AVX2 && n == block) {
        measure_avx2(x, less, values, n, squares, most);
        return;
    }
#endif
    if (less) {
        for (count i = 0; i < n; i += LINE / 4) ask(x + i), ask(less + i);
        for (count i = 0; i < n; i++) values[i] = x[i] - less[i];
    } else {
        memcpy(values, x, (size_t)n * sizeof(float));
    }
    memset(values + n, 0, (size_t)(block - n) * sizeof(float));
    *squares = squares_of_block(values, n);
    *most = largest_of(values, n);
}

INLINE void pack_half(const float *restrict x, const float *restrict y, float x_inverse, float y_inverse, float largest,
                      uint8_t *restrict packed, count n) {
#ifdef AVX2
    if (HAS_AVX2) {
        pack_half_avx2(x, y, x_inverse, y_inverse, largest, packed, n);
        return;
    }
#endif
    for (count i = 0; i < n; i++)
        packed[i] = (uint8_t)(symbol(x[i], x_inverse, largest) | (symbol(y[i], y_inverse, largest) << 4));
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
    float squares, absmax, scale = 0.0f;
    measure(x, e->less ? e->less + b * e->block : 0, values, size, e->block, &squares, &absmax);
    float norm = sqrtf(squares);
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

static CLONES bool encode_int4(const float *x, count n, const float *less, count n_less, count block, float step,
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

INLINE float unpacked(int8_t byte, bool is_high, float scale) {
    int32_t wide = (int32_t)byte;
    int32_t value = is_high ? wide >> 4 : (int32_t)((uint32_t)wide << 28) >> 28;
    return (float)value * scale;
}

// 2,048 bytes at most, so that 16 bits hold each lane's sum.
static CLONES void square_int4(const int8_t *restrict packed, count n_packed, count block, int32_t *restrict sums,
                               count blocks) {
    count half = block / 2;
    for (count b = 0; b < blocks; b++) sums[b] = 0;
    for (count h = 0; h < blocks; h++) {
        const int8_t *bytes = packed + h * half;
        count size = least(half, n_packed - h * half), whole = size - size % LANES;
        int16_t low_lanes[LANES] = {0}, high_lanes[LANES] = {0};
        int32_t low_sum = 0, high_sum = 0;
        for (count i = 0; i < size; i += LINE) ask(bytes + i);
        for (count i = 0; i < whole; i += LANES)
            for (int l = 0; l < LANES; l++) {
                int16_t wide = bytes[i + l], high = (int16_t)(wide >> 4), low = (int16_t)((uint16_t)wide << 12) >> 12;
                high_lanes[l] = (int16_t)(high_lanes[l] + high * high);
                low_lanes[l] = (int16_t)(low_lanes[l] + low * low);
            }
        for (count i = whole; i < size; i++) {
            int32_t wide = bytes[i], high = wide >> 4, low = (int32_t)((uint32_t)wide << 28) >> 28;
            high_sum += high * high;
            low_sum += low * low;
        }
        for (int l = 0; l < LANES; l++) high_sum += high_lanes[l], low_sum += low_lanes[l];
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

// -------------------------------------------------------------------------------------------------- bodies as bytes
// A body's header, its length and every scale (of bfloat16: every value) are checked before anything of it is read.

#define CHUNK (1 << 18)
#define HEADER 8
#define VERSION 2
#define INT4 1
#define INT8 2
#define BF16 3
#define LARGEST_SCALE ((119 + 127) << 7)
#define LARGEST 0x1p119f
#define SMALLEST_SCALE 1e-30f
#define INFINITE (255 << 7)
#define MOST_BODIES 64
// Elements that are worked on at a time: what is between two operations stays in the first cache. A step of a chunk
// took 220 to 240 us, and 340 with 2,048 and more (benchmarks/notes.md).
#define RUN 1024

struct body {
    const uint8_t *symbols, *scales;
    count codec, elements, block, blocks, n_symbols, size;
    int shift;  // a block has 1 << shift elements
};

INLINE int32_t scale_bits(const struct body *b, count index) {
    return (int32_t)b->scales[2 * index] | ((int32_t)b->scales[2 * index + 1] << 8);
}

INLINE float scale_of(const struct body *b, count index) {
    return value_of((int32_t)((uint32_t)scale_bits(b, index) << 16));
}

// Of a codec's body of so many elements; false: there is no such body.
INLINE bool lay_out(struct body *b, count codec, count block, count elements) {
    bool has_blocks = block >= 64 && block <= LONGEST_BLOCK && !(block & (block - 1));
    if (codec == BF16 ? block != 0 : (codec != INT4 && codec != INT8) || !has_blocks) return false;
    b->codec = codec, b->block = block, b->elements = elements;
    b->blocks = codec == BF16 ? 0 : (elements + block - 1) / block;
    b->n_symbols = codec == BF16 ? 2 * elements : codec == INT8 ? b->blocks * block : b->blocks * block / 2;
    b->size = HEADER + b->n_symbols + 2 * b->blocks;
    b->shift = block ? __builtin_ctzll((unsigned long long)block) : 0;
    return true;
}

static CLONES bool are_finite(const uint8_t *restrict high, const uint8_t *restrict low, count n) {
    uint16_t worst = 0;
    for (count i = 0; i < n; i++) {
        uint16_t magnitude = (uint16_t)((high[i] << 8 | low[i]) & 0x7fff);
        worst = magnitude > worst ? magnitude : worst;
    }
    return worst < INFINITE;
}

// The body that begins at ``raw``, of which there are ``n`` bytes, of at most CHUNK of the elements that are left.
static bool open_body(const uint8_t *raw, count n, count left, struct body *b) {
    if (n < HEADER || raw[0] != VERSION) return false;
    count claimed = (count)raw[4] | (count)raw[5] << 8 | (count)raw[6] << 16 | (count)raw[7] << 24;
    if (claimed != least(left, CHUNK) || !lay_out(b, raw[1], (count)raw[2] | (count)raw[3] << 8, claimed)) return false;
    b->symbols = raw + HEADER;
    b->scales = b->symbols + b->n_symbols;
    return n >= b->size;
}

static bool is_sound(const struct body *b) {
    if (b->codec == BF16) return are_finite(b->symbols, b->symbols + b->elements, b->elements);
    int32_t worst = 0;
    for (count i = 0; i < b->blocks; i++) worst = scale_bits(b, i) > worst ? scale_bits(b, i) : worst;
    return worst <= LARGEST_SCALE;
}

// All bodies of a shard, one after the other.
static bool are_sound(const uint8_t *bodies, count n, count elements) {
    struct body b;
    count at = 0;
    for (count done = 0; done < elements; done += CHUNK, at += b.size)
        if (!open_body(bodies + at, n - at, elements - done, &b) || !is_sound(&b)) return false;
    return at == n;
}

// ``out`` = the ``n`` values from element ``at`` on, or ``is_added`` to it by ``factor``, both operations rounded.
INLINE void take(const struct body *b, count at, count n, const bool is_added, float factor, float *restrict out) {
#define PUT(value)                                                                                                     \
    do {                                                                                                               \
        float found = (value);                                                                                         \
        out[i] = is_added ? out[i] + found * factor : found;                                                           \
    } while (0)
    if (b->codec == BF16) {
        const uint8_t *high = b->symbols + at, *low = high + b->elements;
        for (count i = 0; i < n; i++) PUT(value_of((int32_t)((uint32_t)high[i] << 24 | (uint32_t)low[i] << 16)));
        return;
    }
    count length = b->codec == INT4 ? b->block / 2 : b->block;
    for (count size; n; at += size, out += size, n -= size) {
        const int8_t *symbols = (const int8_t *)b->symbols + at;
        float scale = scale_of(b, at >> b->shift);
        size = least(n, length - (at & (length - 1)));
        if (b->codec == INT8)
            for (count i = 0; i < size; i++) PUT((float)symbols[i] * scale);
        else if (at < b->n_symbols)
            for (count i = 0; i < size; i++) PUT(unpacked(symbols[i], false, scale));
        else
            for (count i = 0; i < size; i++) PUT(unpacked(symbols[i - b->n_symbols], true, scale));
    }
}

EXPORT CLONES bool decode_body(const uint8_t *raw, count n_raw, bool is_added, float factor, float *out, count n) {
    struct body b;
    if (n < 1 || n > CHUNK || !open_body(raw, n_raw, n, &b) || b.size != n_raw || !is_sound(&b)) return false;
    if (is_added) take(&b, 0, n, true, factor, out);
    else take(&b, 0, n, false, 0, out);
    return true;
}

static CLONES double square_of(const struct body *b) {
    double lanes[LANES] = {0}, total = 0;
    float values[RUN] = {0};
    if (b->codec == INT4) {
        int32_t sums[CHUNK / 64];
        square_int4((const int8_t *)b->symbols, b->n_symbols, b->block, sums, b->blocks);
        for (count i = 0; i < b->blocks; i++) total += (double)sums[i] * ((double)scale_of(b, i) * (double)scale_of(b, i));
        return total;
    }
    if (b->codec == INT8) {
        for (count i = 0; i < b->blocks; i++) {
            const int8_t *symbols = (const int8_t *)b->symbols + i * b->block;
            int32_t sum = 0;
            for (count k = 0; k < b->block; k++) sum += (int32_t)symbols[k] * (int32_t)symbols[k];
            total += (double)sum * ((double)scale_of(b, i) * (double)scale_of(b, i));
        }
        return total;
    }
    for (count at = 0; at < b->elements; at += RUN) {
        count size = least(RUN, b->elements - at);
        take(b, at, size, false, 0, values);
        memset(values + size, 0, (size_t)(RUN - size) * sizeof(float));
        for (count i = 0; i < RUN; i += LANES)
            for (int l = 0; l < LANES; l++) lanes[l] += (double)values[i + l] * (double)values[i + l];
    }
    for (int l = 0; l < LANES; l++) total += lanes[l];
    return total;
}

INLINE bool encode_int8(const struct encoder *e, uint8_t *restrict symbols, count blocks) {
    float values[LONGEST_BLOCK];
    for (count b = 0; b < blocks; b++) {
        const float *x = e->x + b * e->block, *less = e->less ? e->less + b * e->block : 0;
        count size = least(e->block, e->n - b * e->block);
        for (count i = 0; i < size; i++) values[i] = less ? x[i] - less[i] : x[i];
        memset(values + size, 0, (size_t)(e->block - size) * sizeof(float));
        float absmax = largest_of(values, size);
        if (!(absmax <= LARGEST)) return false;
        float wanted = absmax / e->largest;
        float scale = wanted < SMALLEST_SCALE ? 0.0f : value_of(to_bfloat16(bits_of(wanted)));
        float inverse = scale != 0.0f ? 1.0f / scale : 1.0f;
        e->scales[b] = (uint16_t)((uint32_t)bits_of(scale) >> 16);
        for (count i = 0; i < e->block; i++) {
            float v = values[i] * inverse;
            v = v > e->largest ? e->largest : v;
            v = v < -e->largest ? -e->largest : v;
            symbols[b * e->block + i] = (uint8_t)bits_of(v + ROUND);
        }
    }
    return true;
}

INLINE bool encode_bf16(const struct encoder *e, uint8_t *restrict symbols) {
    const float *x = e->x, *less = e->less;
    uint8_t *restrict high = symbols, *restrict low = symbols + e->n;
    int32_t worst = 0;
    for (count i = 0; i < e->n; i++) {
        int32_t exact = bits_of(less ? x[i] - less[i] : x[i]), magnitude = exact & 0x7fffffff;
        int32_t rounded = to_bfloat16(exact);
        worst = magnitude > worst ? magnitude : worst;
        high[i] = (uint8_t)((uint32_t)rounded >> 24);
        low[i] = (uint8_t)((uint32_t)rounded >> 16);
    }
    return worst <= 0x7f7fffff && to_bfloat16(worst) >> 16 <= LARGEST_SCALE;
}

static CLONES bool encode_other(const struct encoder *e, count codec, uint8_t *symbols, count blocks) {
    return codec == INT8 ? encode_int8(e, symbols, blocks) : encode_bf16(e, symbols);
}

// --------------------------------------------------------------------------------------------------- whole shards
// A shard's bodies lie one after the other in ``bodies``; each is of CHUNK elements, the last of what is left. They are
// checked before anything is written: false (a negative sum) where one is not a body of these codecs as it should be.

EXPORT bool square_shard(const uint8_t *bodies, count n, count elements, double *squares_of, count chunks) {
    struct body b;
    count at = 0;
    if (chunks != (elements + CHUNK - 1) / CHUNK || !are_sound(bodies, n, elements)) return false;
    for (count c = 0; c < chunks; c++, at += b.size) {
        if (!open_body(bodies + at, n - at, elements - c * CHUNK, &b)) return false;
        squares_of[c] = square_of(&b);
    }
    return true;
}

#ifdef AVX2
// A body in a run of elements that have one scale: its bytes, and the shift that brings a symbol to the highest bits.
struct term {
    const uint8_t *symbols;
    float scale, factor;
    int32_t shift;
};

// ``out`` = the sum of the terms; its squares are added to ``lanes``. ``n`` is a multiple of LANES.
static AVX2 void sum_run_avx2(const struct term *terms, count n_terms, float *out, count n, double *lanes) {
    for (count i = 0; i < n; i += LANES) {
        __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
        for (const struct term *t = terms; t < terms + n_terms; t++) {
            __m256 scale = _mm256_set1_ps(t->scale), factor = _mm256_set1_ps(t->factor);
            __m256i shift = _mm256_set1_epi32(t->shift);
            for (int l = 0; l < 4; l++) {
                __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(t->symbols + i + 8 * l)));
                __m256i symbols = _mm256_srai_epi32(_mm256_sllv_epi32(bytes, shift), 28);
                __m256 values = _mm256_mul_ps(_mm256_cvtepi32_ps(symbols), scale);
                sums[l] = _mm256_add_ps(sums[l], _mm256_mul_ps(values, factor));
            }
        }
        for (int l = 0; l < 4; l++) {
            __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(sums[l]));
            __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(sums[l], 1));
            double *to = lanes + 8 * l;
            _mm256_storeu_ps(out + i + 8 * l, sums[l]);
            _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), _mm256_mul_pd(low, low)));
            _mm256_storeu_pd(to + 4, _mm256_add_pd(_mm256_loadu_pd(to + 4), _mm256_mul_pd(high, high)));
        }
    }
}
#endif

// Sums the first elements of a chunk and returns their number, a multiple of LANES. The rest is left to plain C.
INLINE count sum_by_vectors(const struct body *bodies, const float *factors, count n, float *out, count elements,
                            double *lanes) {
#ifdef AVX2
    struct term terms[MOST_BODIES];
    count run = LONGEST_BLOCK, done = 0;
    for (count g = 0; g < n; g++) run = bodies[g].codec == INT4 ? least(run, bodies[g].block / 2) : 0;
    elements -= elements % LANES;
    if (!HAS_AVX2 || !run) return 0;
    for (count size; done < elements; done += size) {
        count n_terms = 0;
        size = least(run, elements - done);
        for (count g = 0; g < n; g++) {
            const struct body *b = bodies + g;
            bool is_high = done >= b->n_symbols;
            if (factors[g] != 0.0f)
                terms[n_terms++] = (struct term){b->symbols + done - (is_high ? b->n_symbols : 0),
                                                 scale_of(b, done >> b->shift), factors[g], is_high ? 24 : 28};
        }
        sum_run_avx2(terms, n_terms, out + done, size, lanes);
    }
    return done;
#else
    (void)bodies, (void)factors, (void)n, (void)out, (void)elements, (void)lanes;
    return 0;
#endif
}

EXPORT CLONES double sum_shard(const int64_t *addresses, count n, const int64_t *sizes, count n_sizes,
                               const float *factors, count n_factors, float *restrict out, count elements) {
    struct body bodies[MOST_BODIES];
    count at[MOST_BODIES] = {0};
    double lanes[LANES] = {0}, total = 0;
    float sum[RUN];
    if (n < 1 || n > MOST_BODIES || n_sizes != n || n_factors != n) return -1;
    for (count g = 0; g < n; g++)
        if (!are_sound((const uint8_t *)addresses[g], sizes[g], elements)) return -1;
    for (count begin = 0; begin < elements; begin += CHUNK) {
        count chunk = least(CHUNK, elements - begin);
        for (count g = 0; g < n; g++) {
            const uint8_t *raw = (const uint8_t *)addresses[g] + at[g];
            if (!open_body(raw, sizes[g] - at[g], elements - begin, bodies + g)) return -1;
            at[g] += bodies[g].size;
        }
        for (count i = sum_by_vectors(bodies, factors, n, out + begin, chunk, lanes); i < chunk; i += RUN) {
            count size = least(RUN, chunk - i), whole = size - size % LANES;
            memset(sum, 0, (size_t)size * sizeof(float));
            for (count g = 0; g < n; g++)
                if (factors[g] != 0.0f) take(bodies + g, i, size, true, factors[g], sum);
            memcpy(out + begin + i, sum, (size_t)size * sizeof(float));
            for (count k = 0; k < whole; k += LANES)
                for (int l = 0; l < LANES; l++) lanes[l] += (double)sum[k + l] * (double)sum[k + l];
            for (count k = whole; k < size; k++) total += (double)sum[k] * (double)sum[k];
        }
    }
    for (int l = 0; l < LANES; l++) total += lanes[l];
    return total;
}

// What a step works on; of momentum and narrow one is 0, buffer may be.
struct vectors {
    float *theta, *momentum;
    int16_t *narrow;
    float *buffer;
    bool is_added;
    float rate, mu, carry;
};

INLINE void step_run(const struct vectors *v, count at, count n, const float *restrict gradient, const bool has_own,
                     const float *restrict own, const bool is_narrow, const bool has_buffer, const bool is_added) {
    float *restrict theta = v->theta + at, *restrict momentum = is_narrow ? 0 : v->momentum + at;
    float *restrict buffer = has_buffer ? v->buffer + at : 0, rate = v->rate, mu = v->mu, carry = v->carry;
    int16_t *restrict narrow = is_narrow ? v->narrow + at : 0;
    for (count i = 0; i < n; i++) {
        float t = theta[i], next;
        if (is_narrow)
            next = moved_narrow(t, gradient[i], narrow + i, rate, mu, carry);
        else
            next = moved(t, gradient[i], momentum + i, rate, mu);
        theta[i] = next;
        float change = next - t;
        if (has_own) change += own[i];
        if (has_buffer) buffer[i] = is_added ? buffer[i] + change : change;
    }
}

static CLONES void step_body(const struct body *b, const struct body *mine, const struct vectors *v) {
    float gradient[RUN], own[RUN];
    for (count at = 0; at < b->elements; at += RUN) {
        count size = least(RUN, b->elements - at);
        take(b, at, size, false, 0, gradient);
        if (mine) take(mine, at, size, false, 0, own);
#define STEP(has_own, is_narrow, has_buffer, is_added)                                                                 \
    step_run(v, at, size, gradient, has_own, own, is_narrow, has_buffer, is_added)
#define STEP_TO(has_own, is_narrow)                                                                                    \
    do {                                                                                                               \
        if (!v->buffer) STEP(has_own, is_narrow, false, false);                                                        \
        else if (v->is_added) STEP(has_own, is_narrow, true, true);                                                    \
        else STEP(has_own, is_narrow, true, false);                                                                    \
    } while (0)
        if (mine) { if (v->narrow) STEP_TO(true, true); else STEP_TO(true, false); }
        else { if (v->narrow) STEP_TO(false, true); else STEP_TO(false, false); }
    }
}

EXPORT bool step_shard(const uint8_t *bodies, count n_bodies, const uint8_t *own, count n_own, float *theta, count n,
                       float *momentum, count n_m, int16_t *narrow, count n_narrow, float *buffer, count n_buffer,
                       bool is_added, float rate, float mu, float carry) {
    struct body b, mine;
    count at = 0, own_at = 0;
    if (!are_sound(bodies, n_bodies, n) || (n_own && !are_sound(own, n_own, n))) return false;
    if ((n_m ? n_m : n_narrow) != n || (n_buffer && n_buffer != n)) return false;
    for (count begin = 0; begin < n; begin += CHUNK, at += b.size) {
        if (!open_body(bodies + at, n_bodies - at, n - begin, &b)) return false;
        if (n_own) {
            if (!open_body(own + own_at, n_own - own_at, n - begin, &mine)) return false;
            own_at += mine.size;
        }
        struct vectors v = {theta + begin, n_m ? momentum + begin : 0, n_narrow ? narrow + begin : 0,
                            n_buffer ? buffer + begin : 0, is_added, rate, mu, carry};
        step_body(&b, n_own ? &mine : 0, &v);
    }
    return true;
}

INLINE void aside_run(const float *restrict gradient, const float *restrict theta, const float *restrict momentum,
                      const int16_t *restrict narrow, float *restrict new_theta, float *restrict new_momentum,
                      int16_t *restrict new_narrow, count n, float rate, float mu, float carry) {
    for (count i = 0; i < n; i++) {
        if (narrow) {
            int16_t m = narrow[i];
            new_theta[i] = moved_narrow(theta[i], gradient[i], &m, rate, mu, carry);
            new_narrow[i] = m;
        } else {
            float m = momentum[i];
            new_theta[i] = moved(theta[i], gradient[i], &m, rate, mu);
            new_momentum[i] = m;
        }
    }
}

EXPORT CLONES bool step_aside(const uint8_t *raw, count n_raw, const float *theta, count n, const float *momentum,
                              count n_m, const int16_t *narrow, count n_narrow, float *new_theta, count n_new,
                              float *new_momentum, count n_new_m, int16_t *new_narrow, count n_new_narrow, float rate,
                              float mu, float carry) {
    struct body b;
    float gradient[RUN];
    if (n < 1 || n > CHUNK || n_new != n || (n_m ? n_m : n_narrow) != n || n_new_m != n_m || n_new_narrow != n_narrow)
        return false;
    if (!open_body(raw, n_raw, n, &b) || b.size != n_raw || !is_sound(&b)) return false;
    for (count at = 0; at < n; at += RUN) {
        count size = least(RUN, n - at);
        take(&b, at, size, false, 0, gradient);
        if (n_narrow)
            aside_run(gradient, theta + at, 0, narrow + at, new_theta + at, 0, new_narrow + at, size, rate, mu, carry);
        else
            aside_run(gradient, theta + at, momentum + at, 0, new_theta + at, new_momentum + at, 0, size, rate, mu,
                      carry);
    }
    return true;
}

EXPORT bool encode_shard(const float *x, count n, const float *less, count n_less, count codec, count block, float step,
                         float tail, float largest, float smallest_norm, float largest_norm, uint8_t *bodies,
                         count n_bodies) {
    struct body b;
    count at = 0;
    for (count begin = 0; begin < n; begin += CHUNK, at += b.size) {
        uint8_t *raw = bodies + at, *symbols = raw + HEADER;
        if (!lay_out(&b, codec, block, least(CHUNK, n - begin)) || n_bodies - at < b.size) return false;
        uint8_t header[HEADER] = {VERSION, (uint8_t)codec, (uint8_t)block, (uint8_t)(block >> 8), (uint8_t)b.elements,
                                  (uint8_t)(b.elements >> 8), (uint8_t)(b.elements >> 16), (uint8_t)(b.elements >> 24)};
        uint16_t *scales = (uint16_t *)(symbols + b.n_symbols);
        struct encoder e = {x + begin, n_less ? less + begin : 0, b.elements, block, step, tail, largest, smallest_norm,
                            largest_norm, scales};
        memcpy(raw, header, HEADER);
        bool is_done = codec == INT4 ? encode_int4(e.x, e.n, e.less, n_less ? e.n : 0, block, step, tail, largest,
                                                   smallest_norm, largest_norm, symbols, b.n_symbols, scales, b.blocks)
                                     : encode_other(&e, codec, symbols, b.blocks);
        if (!is_done) return false;
    }
    return at == n_bodies;
}
