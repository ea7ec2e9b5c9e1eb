// How far orthogonalized matrices are from orthogonal: |X (X^T v) - v|^2 / r for a vector v of r signs, r the shorter
// side. A strip across the longer side needs nothing of the other strips, so X is read from memory once.
#include <algorithm>
#include <vector>

#include "tiles.h"

namespace {

constexpr long STRIP_NUMEL = 1 << 16;  // 128 KiB: read twice, the second time from a second-level cache
constexpr long LANES = 16;

inline __mmask16 lanes(long left) { return left >= LANES ? 0xffff : (__mmask16)((1u << left) - 1); }
inline __m512 at(const bf16* p, __mmask16 k) {
  return widen(_mm256_maskz_loadu_epi16(k, p));
}

// Of a wide matrix [rows, cols] the columns [begin, end): y += X (X^T v); `t` has room for them.
void wide_strip(const bf16* x, long rows, long cols, long begin, long end, const float* v, float* y, float* t) {
  const long width = end - begin;
  std::fill(t, t + width, 0.0f);
  x += begin;
  for (long i = 0; i < rows; i += 4) {
    const long num = std::min(4L, rows - i);
    for (long j = 0; j < width; j += LANES) {
      const __mmask16 k = lanes(width - j);
      __m512 sum = _mm512_maskz_loadu_ps(k, t + j);
      for (long d = 0; d < num; d++)
        sum = _mm512_fmadd_ps(_mm512_set1_ps(v[i + d]), at(x + (i + d) * cols + j, k), sum);
      _mm512_mask_storeu_ps(t + j, k, sum);
    }
  }
  for (long i = 0; i < rows; i += 4) {
    const long num = std::min(4L, rows - i);
    __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (long j = 0; j < width; j += LANES) {
      const __mmask16 k = lanes(width - j);
      const __m512 now = _mm512_maskz_loadu_ps(k, t + j);
      for (long d = 0; d < num; d++) sums[d] = _mm512_fmadd_ps(now, at(x + (i + d) * cols + j, k), sums[d]);
    }
    for (long d = 0; d < num; d++) y[i + d] += _mm512_reduce_add_ps(sums[d]);
  }
}

// Of a tall matrix [rows, cols] the rows [begin, end): y += X^T (X v).
void tall_strip(const bf16* x, long cols, long begin, long end, const float* v, float* y) {
  for (long i = begin; i < end; i += 4) {
    const long num = std::min(4L, end - i);
    const bf16* row = x + i * cols;
    __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (long j = 0; j < cols; j += LANES) {
      const __mmask16 k = lanes(cols - j);
      const __m512 sign = _mm512_maskz_loadu_ps(k, v + j);
      for (long d = 0; d < num; d++) sums[d] = _mm512_fmadd_ps(sign, at(row + d * cols + j, k), sums[d]);
    }
    for (long d = 0; d < num; d++) sums[d] = _mm512_set1_ps(_mm512_reduce_add_ps(sums[d]));
    for (long j = 0; j < cols; j += LANES) {
      const __mmask16 k = lanes(cols - j);
      __m512 sum = _mm512_maskz_loadu_ps(k, y + j);
      for (long d = 0; d < num; d++) sum = _mm512_fmadd_ps(sums[d], at(row + d * cols + j, k), sum);
      _mm512_mask_storeu_ps(y + j, k, sum);
    }
  }
}

}  // namespace

extern "C" {

// x: [count, rows, cols] bfloat16; signs: [min(rows, cols)]; out: [count]. How strips are cut depends on shapes alone,
// so the result does not depend on the number of threads.
void mc_squared_error(const bf16* x, long count, long rows, long cols, const float* signs, double* out, int threads) {
  const bool wide = rows <= cols;
  const long side = wide ? rows : cols, length = wide ? cols : rows;
  if (count == 0 || side == 0) return;
  const long strip = std::max(64L, STRIP_NUMEL / side / 32 * 32), strips = (length + strip - 1) / strip;
  std::vector<float> sums(count * strips * side, 0.0f);
#pragma omp parallel num_threads(threads) if (count * rows * cols > STRIP_NUMEL)
  {
    std::vector<float> t(wide ? strip : 0);
#pragma omp for schedule(static)
    for (long task = 0; task < count * strips; task++) {
      const long begin = task % strips * strip, end = std::min(length, begin + strip);
      const bf16* matrix = x + task / strips * rows * cols;
      float* y = sums.data() + task * side;
      if (wide)
        wide_strip(matrix, rows, cols, begin, end, signs, y, t.data());
      else
        tall_strip(matrix, cols, begin, end, signs, y);
    }
  }
  for (long b = 0; b < count; b++) {
    double total = 0;
    for (long i = 0; i < side; i++) {
      double y = -signs[i];
      for (long s = 0; s < strips; s++) y += sums[(b * strips + s) * side + i];
      total += y * y;
    }
    out[b] = total / side;
  }
}
}
