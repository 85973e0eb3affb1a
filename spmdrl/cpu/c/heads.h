#include <math.h>
#include <stdint.h>

// 1 / sqrt(mean(x^2) + eps)
static inline float inverse_root(const float *x, int64_t width, float eps) {
    float square = 0.0f;
    for (int64_t i = 0; i < width; i++) square += x[i] * x[i];
    return 1.0f / sqrtf(square / (float)width + eps);
}

// Normalizes a head x [2 half], unless weight is NULL, and rotates it by the angles of cos and sin [half].
static inline void rotate_head(const float *restrict x, const float *restrict weight, const float *restrict cos,
                               const float *restrict sin, float *restrict out, int64_t half, float eps) {
    if (weight) {
        const float scale = inverse_root(x, 2 * half, eps);
        for (int64_t i = 0; i < half; i++) {
            const float one = x[i] * scale * weight[i], other = x[half + i] * scale * weight[half + i];
            out[i] = one * cos[i] - other * sin[i];
            out[half + i] = other * cos[i] + one * sin[i];
        }
    } else {
        for (int64_t i = 0; i < half; i++) {
            out[i] = x[i] * cos[i] - x[half + i] * sin[i];
            out[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
        }
    }
}
