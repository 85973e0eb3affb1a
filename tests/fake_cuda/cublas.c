// libcublas.so.13 and libcublasLt.so.13: a product is counted by its type and shape.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

typedef int R;
typedef void *V;
typedef struct { V stream; int pointer_mode, math_mode; } context;

R cublasCreate_v2(context **out) { return *out = calloc(1, sizeof(context)), 0; }
R cublasDestroy_v2(context *of) { return free(of), 0; }
R cublasSetStream_v2(context *of, V stream) { return of->stream = stream, 0; }
R cublasGetStream_v2(context *of, V *stream) { return *stream = of->stream, 0; }
R cublasSetMathMode(context *of, int mode) { return of->math_mode = mode, 0; }
R cublasGetMathMode(context *of, int *mode) { return *mode = of->math_mode, 0; }
R cublasSetPointerMode_v2(context *of, int mode) { return of->pointer_mode = mode, 0; }
R cublasGetPointerMode_v2(context *of, int *mode) { return *mode = of->pointer_mode, 0; }
R cublasGetVersion_v2(context *of, int *version) { return *version = 130000, 0; }
R cublasGetProperty(int which, int *value) { return *value = which ? 0 : 13, 0; }
const char *cublasGetStatusString(int status) { return "status of the fake cuBLAS"; }
const char *cublasGetStatusName(int status) { return "status of the fake cuBLAS"; }

static R count(int in, int out, long m, long n, long k, long batch) {
    static const char *types[] = {[0] = "float32", [1] = "float64", [2] = "float16", [14] = "bfloat16"};
    char text[120];
    snprintf(text, sizeof text, "product of %s to %s, m=%ld n=%ld k=%ld, %ld times", in < 15 && types[in] ? types[in] : "?",
             out < 15 && types[out] ? types[out] : "?", m, n, k, batch);
    fk_count("kernel", text);
    return 0;
}
R cublasGemmEx(V h, int ta, int tb, int m, int n, int k, V al, V a, int at, int lda, V b, int bt, int ldb, V be, V c,
               int ct) {
    return count(at, ct, m, n, k, 1);
}
R cublasGemmStridedBatchedEx(V h, int ta, int tb, int m, int n, int k, V al, V a, int at, int lda, long long sa, V b,
                             int bt, int ldb, long long sb, V be, V c, int ct, int ldc, long long sc, int batch) {
    return count(at, ct, m, n, k, batch);
}
R cublasSgemm_v2(V h, int ta, int tb, int m, int n, int k) { return count(0, 0, m, n, k, 1); }
R cublasSgemmStridedBatched(V h, int ta, int tb, int m, int n, int k, V al, V a, int lda, long long sa, V b, int ldb,
                            long long sb, V be, V c, int ldc, long long sc, int batch) {
    return count(0, 0, m, n, k, batch);
}

typedef struct { int type; unsigned long long rows, columns; int batch; } layout;
typedef struct { int transposed; } description;
R cublasLtCreate(V *out) { return *out = malloc(16), 0; }
size_t cublasLtGetVersion(void) { return 130000; }
R cublasLtMatmulDescCreate(description **out, int compute, int scale) { return *out = calloc(1, sizeof **out), 0; }
R cublasLtMatmulDescDestroy(V of) { return free(of), 0; }
R cublasLtMatmulDescSetAttribute(description *of, int attribute, const void *value, size_t bytes) {
    return attribute == 3 ? of->transposed = *(int *)value, 0 : 0;
}
R cublasLtMatmulDescGetAttribute(V of, int attribute, V out, size_t bytes, size_t *n) { return memset(out, 0, bytes), 0; }
R cublasLtMatrixLayoutCreate(layout **out, int type, unsigned long long rows, unsigned long long columns, long long ld) {
    *out = malloc(sizeof **out);
    **out = (layout){type, rows, columns, 1};
    return 0;
}
R cublasLtMatrixLayoutDestroy(V of) { return free(of), 0; }
R cublasLtMatrixLayoutSetAttribute(layout *of, int attribute, const void *value, size_t bytes) {
    return attribute == 5 ? of->batch = *(int *)value, 0 : 0;
}
R cublasLtMatmulPreferenceCreate(V *out) { return *out = malloc(64), 0; }
R cublasLtMatmulPreferenceDestroy(V of) { return free(of), 0; }
typedef struct { unsigned long long algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } choice;
R cublasLtMatmulAlgoGetHeuristic(V h, V d, V a, V b, V c, V e, V p, int asked, choice *out, int *number) {
    return memset(out, 0, sizeof *out), *number = 1, 0;
}
R cublasLtMatmul(V h, description *of, V al, V a, layout *la, V b, layout *lb, V be, V c, layout *lc, V d, layout *out) {
    return count(la->type, out->type, out->rows, out->columns, of->transposed ? la->rows : la->columns, out->batch);
}
