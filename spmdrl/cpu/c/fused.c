// What `fused_plain.py` computes, in one pass over each row, in float32.
//
// A row's last dim is contiguous; strides count elements. Sums over rows are made of parts of ROWS_PER_PART rows each,
// added in order, so that the number of threads changes no bit. Sums may be reassociated to use vector registers.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exp.h"
#include "heads.h"

#define ROWS_PER_PART 64

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp_(-x)); }

static inline int64_t parts_of(int64_t rows) { return (rows + ROWS_PER_PART - 1) / ROWS_PER_PART; }

// Adds the parts [parts, width] in order.
static void add_parts(const float *parts, float *total, int64_t num_parts, int64_t width) {
    memset(total, 0, width * sizeof(float));
    for (int64_t part = 0; part < num_parts; part++)
        for (int64_t i = 0; i < width; i++) total[i] += parts[part * width + i];
}

// The gradient of a norm, whose inverse root is rstd: adds that of the weight to `by_weight`, writes that of x [width].
static inline void norm_gradient(const float *restrict grad, const float *restrict x, const float *restrict weight,
                                 float rstd, float *restrict by_weight, float *restrict by_x, int64_t width) {
    float shared = 0.0f;
    for (int64_t i = 0; i < width; i++) {
        const float product = grad[i] * x[i] * rstd;
        by_weight[i] += product;
        shared += product * weight[i];
    }
    shared = shared / (float)width * rstd;
    for (int64_t i = 0; i < width; i++) by_x[i] = (grad[i] * weight[i] - x[i] * shared) * rstd;
}

// x [rows, width] and weight [width] give out [rows, width] and rstd [rows].
int rms_norm(const float *restrict x, const float *restrict weight, float *restrict out, float *restrict rstd,
              int64_t rows, int64_t width, float eps, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *in = x + row * width;
        const float scale = rstd[row] = inverse_root(in, width, eps);
        for (int64_t i = 0; i < width; i++) out[row * width + i] = in[i] * scale * weight[i];
    }
    return 0;
}

// parts [parts_of(rows), width] is for the sums.
int rms_norm_backward(const float *restrict grad, const float *restrict x, const float *restrict weight,
                       const float *restrict rstd, float *restrict grad_x, float *restrict grad_weight,
                       float *restrict parts, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t part = 0; part < parts_of(rows); part++) {
        float *sum = parts + part * width;
        memset(sum, 0, width * sizeof(float));
        const int64_t end = (part + 1) * ROWS_PER_PART < rows ? (part + 1) * ROWS_PER_PART : rows;
        for (int64_t row = part * ROWS_PER_PART; row < end; row++)
            norm_gradient(grad + row * width, x + row * width, weight, rstd[row], sum, grad_x + row * width, width);
    }
    add_parts(parts, grad_weight, parts_of(rows), width);
    return 0;
}

// Rotates heads x [tokens, heads, 2 half] by cos and sin [tokens, ...]; weight, for the norm before, may be NULL.
int rotate(const float *restrict x, const float *restrict weight, const float *restrict cos,
            const float *restrict sin, float *restrict out, int64_t tokens, int64_t heads, int64_t half,
            int64_t x_token, int64_t x_head, int64_t cos_token, int64_t sin_token, float eps, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t token = 0; token < tokens; token++) {
        for (int64_t head = 0; head < heads; head++)
            rotate_head(x + token * x_token + head * x_head, weight, cos + token * cos_token, sin + token * sin_token,
                        out + (token * heads + head) * 2 * half, half, eps);
    }
    return 0;
}

// parts [parts_of(tokens), 2 half] is for the sums; x, weight, grad_weight and parts are NULL without a norm.
int rotate_backward(const float *restrict grad, const float *restrict x, const float *restrict weight,
                     const float *restrict cos, const float *restrict sin, float *restrict grad_x,
                     float *restrict grad_weight, float *restrict parts, int64_t tokens, int64_t heads, int64_t half,
                     int64_t grad_token, int64_t grad_head, int64_t x_token, int64_t x_head, int64_t cos_token,
                     int64_t sin_token, float eps, int64_t threads) {
    const int64_t width = 2 * half;
#pragma omp parallel for num_threads(threads)
    for (int64_t part = 0; part < parts_of(tokens); part++) {
        float *sum = parts + part * width;
        if (weight) memset(sum, 0, width * sizeof(float));
        const int64_t end = (part + 1) * ROWS_PER_PART < tokens ? (part + 1) * ROWS_PER_PART : tokens;
        for (int64_t token = part * ROWS_PER_PART; token < end; token++) {
            const float *c = cos + token * cos_token, *s = sin + token * sin_token;
            for (int64_t head = 0; head < heads; head++) {
                const float *by_out = grad + token * grad_token + head * grad_head;
                float *to = grad_x + (token * heads + head) * width, turned[width];
                for (int64_t i = 0; i < half; i++) {  // by the negative angle
                    turned[i] = by_out[i] * c[i] + by_out[half + i] * s[i];
                    turned[half + i] = by_out[half + i] * c[i] - by_out[i] * s[i];
                }
                if (weight) {
                    const float *in = x + token * x_token + head * x_head;
                    norm_gradient(turned, in, weight, inverse_root(in, width, eps), sum, to, width);
                } else {
                    memcpy(to, turned, sizeof turned);
                }
            }
        }
    }
    if (weight) add_parts(parts, grad_weight, parts_of(tokens), width);
    return 0;
}

// gate and up [rows, width] give out [rows, width].
int swiglu(const float *restrict gate, const float *restrict up, float *restrict out, int64_t rows, int64_t width,
            int64_t gate_row, int64_t up_row, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *g = gate + row * gate_row, *u = up + row * up_row;
        for (int64_t i = 0; i < width; i++) out[row * width + i] = g[i] * sigmoid(g[i]) * u[i];
    }
    return 0;
}

int swiglu_backward(const float *restrict grad, const float *restrict gate, const float *restrict up,
                     float *restrict grad_gate, float *restrict grad_up, int64_t rows, int64_t width, int64_t grad_row,
                     int64_t gate_row, int64_t up_row, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *d = grad + row * grad_row, *g = gate + row * gate_row, *u = up + row * up_row;
        for (int64_t i = 0; i < width; i++) {
            const float share = sigmoid(g[i]);
            grad_gate[row * width + i] = d[i] * u[i] * share * (1.0f + g[i] * (1.0f - share));
            grad_up[row * width + i] = d[i] * g[i] * share;
        }
    }
    return 0;
}
