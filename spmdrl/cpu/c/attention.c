// Causal attention in float32: of short sequences, forward and backward, and of one new token for each row of a cache.
//
// A head's last dim is contiguous; strides count elements. Queries are taken ROWS at a time, so that a key that was
// loaded serves them all. Each sequence and key head is computed by one thread, in one order.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "exp.h"
#include "heads.h"

#define LANES 16
#define ROWS 4

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

static inline int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// Room for so many numbers, or NULL.
static inline float *room_for(int64_t numbers) {
    return aligned_alloc(4 * LANES, padded(numbers) * sizeof(float));
}

// Copies rows [length, width] next to each other, [length, padded(width)], with zeros at the ends.
static void pack(const float *from, int64_t stride, int64_t length, int64_t width, float *to) {
    const int64_t wide = padded(width);
    for (int64_t j = 0; j < length; j++) {
        memcpy(to + j * wide, from + j * stride, width * sizeof(float));
        memset(to + j * wide + width, 0, (wide - width) * sizeof(float));
    }
}

// The same transposed, [width, padded(length)].
static void pack_transposed(const float *from, int64_t stride, int64_t length, int64_t width, float *to) {
    const int64_t tall = padded(length);
    for (int64_t d = 0; d < width; d++) {
        for (int64_t j = 0; j < length; j++) to[d * tall + j] = from[j * stride + d];
        for (int64_t j = length; j < tall; j++) to[d * tall + j] = 0.0f;
    }
}

// out[r][j] = sum_i x[r][i] m[i][j] for j < columns, of ROWS rows x [ROWS, x_row] and m [inner, m_row]; rows of out are
// as long as those of m. Whole vectors are written.
static void multiply(const float *x, int64_t x_row, const float *m, int64_t m_row, int64_t inner, int64_t columns,
                     float *out) {
    for (int64_t j = 0; j < columns; j += LANES) {
        vec sum[ROWS] = {0};
        for (int64_t i = 0; i < inner; i++) {
            const vec row = *(const vec *)(m + i * m_row + j);
            for (int r = 0; r < ROWS; r++) sum[r] += x[r * x_row + i] * row;
        }
        for (int r = 0; r < ROWS; r++) *(vec *)(out + r * m_row + j) = sum[r];
    }
}

// total[j][d] += sum_r p[r][j] x[r][d] for j < limit.
static void add_outer(const float *p, int64_t tall, const float *x, int64_t wide, int64_t limit, float *total) {
    for (int64_t d = 0; d < wide; d += LANES) {
        vec row[ROWS];
        for (int r = 0; r < ROWS; r++) row[r] = *(const vec *)(x + r * wide + d);
        for (int64_t j = 0; j < limit; j++) {
            vec sum = *(vec *)(total + j * wide + d);
            for (int r = 0; r < ROWS; r++) sum += p[r * tall + j] * row[r];
            *(vec *)(total + j * wide + d) = sum;
        }
    }
}

// Turns the first `seen` scores of a row into probabilities, and the others up to `limit`, a multiple of LANES, into 0.
static void softmax(float *row, int64_t seen, int64_t limit) {
    float largest = -INFINITY, total = 0.0f;
    for (int64_t j = seen; j < limit; j++) row[j] = -INFINITY;
    for (int64_t j = 0; j < limit; j++) largest = row[j] > largest ? row[j] : largest;
    for (int64_t j = 0; j < limit; j++) row[j] = exp_(row[j] - largest);
    for (int64_t j = seen; j < limit; j++) row[j] = 0.0f;
    for (int64_t j = 0; j < limit; j++) total += row[j];
    const float share = 1.0f / total;
    for (int64_t j = 0; j < limit; j++) row[j] *= share;
}

static inline float product(const float *x, const float *y, int64_t width) {
    float lanes[LANES] = {0}, sum = 0.0f;
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += x[d + lane] * y[d + lane];
    for (; d < width; d++) sum += x[d] * y[d];
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

// out[d] = sum_j p[j] x[j][d]. Four sums are kept apart, so that none waits for the one before.
static inline void combination(const float *p, const float *x, int64_t length, int64_t width, float *out) {
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) {
        vec sums[4] = {0};
        int64_t j = 0;
        for (; j + 4 <= length; j += 4)
            for (int i = 0; i < 4; i++) sums[i] += p[j + i] * *(const vec *)(x + (j + i) * width + d);
        for (; j < length; j++) sums[0] += p[j] * *(const vec *)(x + j * width + d);
        *(vec *)(out + d) = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    for (; d < width; d++) {
        out[d] = 0.0f;
        for (int64_t j = 0; j < length; j++) out[d] += p[j] * x[j * width + d];
    }
}

// Copies ROWS query heads of a key head, counted over (token, head of the group), times a factor; past the end, zeros.
static void gather(const float *from, int64_t token_stride, int64_t head_stride, int64_t groups, int64_t first,
                   int64_t count, int64_t width, float factor, float *to) {
    const int64_t wide = padded(width);
    memset(to, 0, ROWS * wide * sizeof(float));
    for (int64_t r = 0; r < ROWS && first + r < count; r++) {
        const float *row = from + (first + r) / groups * token_stride + (first + r) % groups * head_stride;
        for (int64_t d = 0; d < width; d++) to[r * wide + d] = row[d] * factor;
    }
}

static void scatter(const float *from, int64_t width, float *to, int64_t token_stride, int64_t head_stride,
                    int64_t groups, int64_t first, int64_t count) {
    for (int64_t r = 0; r < ROWS && first + r < count; r++)
        memcpy(to + (first + r) / groups * token_stride + (first + r) % groups * head_stride, from + r * padded(width),
               width * sizeof(float));
}

// Scores and probabilities of ROWS queries [ROWS, wide], the first of which is number `first` over (token, head).
static int64_t probabilities(const float *queries, const float *keys_t, int64_t first, int64_t count, int64_t groups,
                             int64_t width, int64_t tall, float *p) {
    const int64_t last = first + ROWS < count ? first + ROWS - 1 : count - 1, limit = last / groups + 1;
    multiply(queries, padded(width), keys_t, tall, width, limit, p);
    for (int64_t r = 0; r < ROWS; r++) {
        const int64_t number = first + r < count ? first + r : last;
        softmax(p + r * tall, number / groups + 1, padded(limit));
    }
    return limit;
}

// q [T, heads, width], k and v [..., kv_heads, width] give out [T, heads, width], contiguous. Sequence s has the queries
// starts[s] to starts[s + 1], and the keys from key_starts[s] on: as many as queries, and before them earlier[s], or none
// if that is NULL. Returns 0, or 1 when there is no memory.
int attend(const float *restrict q, const float *restrict k, const float *restrict v, float *restrict out,
           const int64_t *restrict starts, const int64_t *restrict key_starts, const int64_t *restrict earlier,
           int64_t num_sequences, int64_t heads, int64_t kv_heads, int64_t width, int64_t q_token, int64_t q_head,
           int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head, int64_t longest, float scale,
           int64_t threads) {
    const int64_t groups = heads / kv_heads, wide = padded(width), tall_max = padded(longest);
    const int64_t num_tasks = num_sequences * kv_heads, at_once = num_tasks < 16 * threads ? 1 : 4;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *room = room_for(width * tall_max + longest * wide + ROWS * (2 * wide + tall_max));
        float *keys_t = room, *values = keys_t + width * tall_max, *queries = values + longest * wide;
        float *sums = queries + ROWS * wide, *p = sums + ROWS * wide;
        if (!room) failed = 1;
#pragma omp for schedule(dynamic, at_once)
        for (int64_t task = 0; task < num_tasks; task++) {
            if (!room) continue;
            const int64_t sequence = task / kv_heads, head = task % kv_heads;
            const int64_t start = starts[sequence], key_start = key_starts[sequence];
            const int64_t before = earlier ? earlier[sequence] * groups : 0;
            const int64_t count = (starts[sequence + 1] - start) * groups, length = (before + count) / groups;
            const int64_t tall = padded(length);
            pack_transposed(k + key_start * k_token + head * k_head, k_token, length, width, keys_t);
            pack(v + key_start * v_token + head * v_head, v_token, length, width, values);
            for (int64_t first = 0; first < count; first += ROWS) {
                gather(q + start * q_token + head * groups * q_head, q_token, q_head, groups, first, count, width,
                       scale, queries);
                const int64_t limit =
                    probabilities(queries, keys_t, before + first, before + count, groups, width, tall, p);
                multiply(p, tall, values, wide, limit, width, sums);
                scatter(sums, width, out + (start * heads + head * groups) * width, heads * width, width, groups,
                        first, count);
            }
        }
        free(room);
    }
    return failed;
}

// The gradients of q, k and v, contiguous, for that of the result, which may be strided.
int attend_backward(const float *restrict grad, const float *restrict q, const float *restrict k,
                    const float *restrict v, float *restrict grad_q, float *restrict grad_k, float *restrict grad_v,
                    const int64_t *restrict starts, int64_t num_sequences, int64_t heads, int64_t kv_heads,
                    int64_t width, int64_t grad_token, int64_t grad_head, int64_t q_token, int64_t q_head,
                    int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head, int64_t longest, float scale,
                    int64_t threads) {
    const int64_t groups = heads / kv_heads, wide = padded(width), tall_max = padded(longest);
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *room = room_for(2 * width * tall_max + 3 * longest * wide + ROWS * (3 * wide + 2 * tall_max));
        float *keys_t = room, *values_t = keys_t + width * tall_max, *keys = values_t + width * tall_max;
        float *by_keys = keys + longest * wide, *by_values = by_keys + longest * wide;
        float *queries = by_values + longest * wide, *by_out = queries + ROWS * wide, *sums = by_out + ROWS * wide;
        float *p = sums + ROWS * wide, *by_p = p + ROWS * tall_max;
        if (!room) failed = 1;
#pragma omp for schedule(dynamic, 4)
        for (int64_t task = 0; task < num_sequences * kv_heads; task++) {
            if (!room) continue;
            const int64_t start = starts[task / kv_heads], length = starts[task / kv_heads + 1] - start;
            const int64_t head = task % kv_heads, count = length * groups, tall = padded(length);
            pack_transposed(k + start * k_token + head * k_head, k_token, length, width, keys_t);
            pack_transposed(v + start * v_token + head * v_head, v_token, length, width, values_t);
            pack(k + start * k_token + head * k_head, k_token, length, width, keys);
            memset(by_keys, 0, 2 * longest * wide * sizeof(float));
            for (int64_t first = 0; first < count; first += ROWS) {
                gather(q + start * q_token + head * groups * q_head, q_token, q_head, groups, first, count, width,
                       scale, queries);
                gather(grad + start * grad_token + head * groups * grad_head, grad_token, grad_head, groups, first,
                       count, width, 1.0f, by_out);
                const int64_t limit = probabilities(queries, keys_t, first, count, groups, width, tall, p);
                multiply(by_out, wide, values_t, tall, width, limit, by_p);
                add_outer(p, tall, by_out, wide, limit, by_values);
                for (int64_t r = 0; r < ROWS; r++) {  // by scores, from by probabilities
                    float shared = 0.0f;
                    for (int64_t j = 0; j < padded(limit); j++) shared += p[r * tall + j] * by_p[r * tall + j];
                    for (int64_t j = 0; j < padded(limit); j++)
                        by_p[r * tall + j] = p[r * tall + j] * (by_p[r * tall + j] - shared);
                }
                add_outer(by_p, tall, queries, wide, limit, by_keys);  // queries have the scale
                multiply(by_p, tall, keys, wide, limit, width, sums);
                for (int64_t i = 0; i < ROWS * wide; i++) sums[i] *= scale;
                scatter(sums, width, grad_q + (start * heads + head * groups) * width, heads * width, width, groups,
                        first, count);
            }
            for (int64_t j = 0; j < length; j++) {
                const int64_t place = ((start + j) * kv_heads + head) * width;
                memcpy(grad_k + place, by_keys + j * wide, width * sizeof(float));
                memcpy(grad_v + place, by_values + j * wide, width * sizeof(float));
            }
        }
        free(room);
    }
    return failed;
}

// One query over keys and values [length, width]; p has room for as many whole vectors.
static inline void attend_one(const float *query, const float *keys, const float *values, int64_t length,
                              int64_t width, float scale, float *p, float *out) {
    for (int64_t j = 0; j < length; j++) p[j] = product(query, keys + j * width, width) * scale;
    softmax(p, length, padded(length));
    combination(p, values, length, width, out);
}

// The first key of `length` that is seen through a window, which is none if it is 0.
static inline int64_t first_seen(int64_t length, int64_t window) {
    return window && window < length ? length - window : 0;
}

// One query for each row: q [rows, heads, width] over keys and values [rows, kv_heads, ..., width], whose tokens are
// neighbours; a row sees its last `window` of lengths[row] keys, all of them if window is 0. out is contiguous.
int attend_to_cache(const float *restrict q, const float *restrict keys, const float *restrict values,
                    float *restrict out, const int64_t *restrict lengths, int64_t rows, int64_t heads,
                    int64_t kv_heads, int64_t width, int64_t q_row, int64_t q_head, int64_t keys_row,
                    int64_t keys_head, int64_t values_row, int64_t values_head, int64_t longest, int64_t window,
                    float scale, int64_t threads) {
    const int64_t groups = heads / kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *p = room_for(padded(longest));
        if (!p) failed = 1;
#pragma omp for schedule(dynamic, 16)
        for (int64_t task = 0; task < rows * heads; task++) {
            if (!p) continue;
            const int64_t row = task / heads, head = task % heads, start = first_seen(lengths[row], window);
            const float *key = keys + row * keys_row + head / groups * keys_head;
            const float *value = values + row * values_row + head / groups * values_head;
            attend_one(q + row * q_row + head * q_head, key + start * width, value + start * width,
                       lengths[row] - start, width, scale, p, out + task * width);
        }
        free(p);
    }
    return failed;
}

// The same for heads as the product of weights gives them, qkv [rows, heads + 2 kv_heads, width]: queries and keys are
// normalized, unless q_norm and k_norm are NULL, and rotated by cos and sin [rows, ...]; keys and values are stored at
// lengths[row] - 1, in a cache whose keys and values have the same strides.
int attend_newest(const float *restrict qkv, const float *restrict q_norm, const float *restrict k_norm,
                  const float *restrict cos, const float *restrict sin, float *restrict keys, float *restrict values,
                  float *restrict out, const int64_t *restrict lengths, int64_t rows, int64_t heads, int64_t kv_heads,
                  int64_t width, int64_t qkv_row, int64_t cos_row, int64_t sin_row, int64_t cache_row,
                  int64_t cache_head, int64_t longest, int64_t window, float scale, float eps, int64_t threads) {
    const int64_t groups = heads / kv_heads, half = width / 2;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *p = room_for(padded(longest) + width), *query = p + padded(longest);
        if (!p) failed = 1;
#pragma omp for schedule(dynamic, 16)
        for (int64_t task = 0; task < rows * kv_heads; task++) {
            if (!p) continue;
            const int64_t row = task / kv_heads, kv_head = task % kv_heads, start = first_seen(lengths[row], window);
            const int64_t place = row * cache_row + kv_head * cache_head, newest = (lengths[row] - 1) * width;
            const float *c = cos + row * cos_row, *s = sin + row * sin_row, *mine = qkv + row * qkv_row;
            float *key = keys + place, *value = values + place;
            rotate_head(mine + (heads + kv_head) * width, k_norm, c, s, key + newest, half, eps);
            memcpy(value + newest, mine + (heads + kv_heads + kv_head) * width, width * sizeof(float));
            for (int64_t head = kv_head * groups; head < (kv_head + 1) * groups; head++) {
                rotate_head(mine + head * width, q_norm, c, s, query, half, eps);
                attend_one(query, key + start * width, value + start * width, lengths[row] - start, width, scale, p,
                           out + (row * heads + head) * width);
            }
        }
        free(p);
    }
    return failed;
}
