#include <math.h>
#include <stdint.h>

// exp(x): 2^n times a polynomial in what is left of x / ln 2, relative error below 2e-7; nan stays nan.
static inline float exp_(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = rintf(x * 1.44269504f);
    const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));  // fmaf, because it is not reassociated
    float p = 1.98756912e-4f;
    p = p * r + 1.39819994e-3f;
    p = p * r + 8.33345186e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666655e-1f;
    p = p * r + 5.00000012e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } power = {.bits = ((int32_t)n + 127) << 23};
    return p * power.value;
}
