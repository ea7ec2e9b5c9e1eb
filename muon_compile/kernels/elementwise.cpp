// The two passes over a bucket's memory: gradients and momentum into directions, and directions into parameters.
// Each reads and writes every element once; arithmetic is float32.
#include <algorithm>
#include <vector>

#include "tiles.h"

namespace {

constexpr long CHUNK = 8192;          // elements of a task: its streams fit a first-level cache
constexpr long SERIAL = 4 * CHUNK;    // up to here a second thread costs more than it saves

inline __mmask16 tail(long left) { return left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1); }

inline __m512 load(const float* p, __mmask16 k) { return _mm512_maskz_loadu_ps(k, p); }
inline __m512 load(const bf16* p, __mmask16 k) { return widen(_mm256_maskz_loadu_epi16(k, p)); }
// To what a tensor of the type holds, and back.
inline __m512 rounded(__m512 v, const float*) { return v; }
inline __m512 rounded(__m512 v, const bf16*) { return widen(narrow(v)); }
inline __m512 add_square(__m512 sum, __m512 v) { return _mm512_fmadd_ps(v, v, sum); }
inline void store(float* p, __mmask16 k, __m512 v) { _mm512_mask_storeu_ps(p, k, v); }
inline void store(bf16* p, __mmask16 k, __m512 v) { _mm256_mask_storeu_epi16(p, k, narrow(v)); }

struct Momentum {
  const void* const* grads;
  void* momentum;
  void* out;
  long numel;
  const double* mus;
  long mu_stride;
  const uint8_t* present;
  bool ema, nesterov;
  float scale;  // of every gradient
};

// Chunks of the SUMS kind leave sums of squares of what they see in `sums`; the other kind takes no time for it.
template <typename G, typename M, typename O, bool SUMS>
void momentum_chunk(const Momentum& t, long row, long begin, long end, double* sums) {
  const G* g = (const G*)t.grads[row];
  M* m = (M*)t.momentum + row * t.numel;
  O* out = (O*)t.out + row * t.numel;
  if (t.present && !t.present[row]) {  // no gradient: the momentum stays, bit for bit, and nothing will be applied
    std::memset(out + begin, 0, (end - begin) * sizeof(O));
    return;
  }
  const double mu = t.mus[row * t.mu_stride];
  const __m512 look = _mm512_set1_ps((float)mu), add = _mm512_set1_ps((float)(1 - mu));
  const __m512 scale = _mm512_set1_ps(t.scale);
  __m512 squares = _mm512_setzero_ps();
  for (long i = begin; i < end; i += 16) {
    const __mmask16 k = tail(end - i);
    const __m512 grad = _mm512_mul_ps(scale, load(g + i, k)), old = load(m + i, k);
    const __m512 now = t.ema ? _mm512_fmadd_ps(add, _mm512_sub_ps(grad, old), old) : _mm512_fmadd_ps(look, old, grad);
    store(m + i, k, now);
    if (SUMS) squares = add_square(squares, rounded(now, m));
    __m512 direction = now;
    if (t.nesterov)
      direction = t.ema ? _mm512_fmadd_ps(look, _mm512_sub_ps(now, grad), grad) : _mm512_fmadd_ps(look, now, grad);
    store(out + i, k, direction);
  }
  if (SUMS) sums[0] = _mm512_reduce_add_ps(squares);
}

struct Update {
  void* const* params;
  const void* update;
  long numel;
  const double *decays, *sizes;
  long decay_stride, size_stride;
};

template <typename P, typename U, bool SUMS>
void update_chunk(const Update& t, long row, long begin, long end, double* sums) {
  const double decay = t.decays[row * t.decay_stride], size = t.sizes[row * t.size_stride];
  const bool still = decay == 1 && size == 0;  // no gradient, or lr 0: not even the sign of a zero may change
  if (still && !SUMS) return;
  P* p = (P*)t.params[row];
  const U* u = (const U*)t.update + row * t.numel;
  __m512 weights = _mm512_setzero_ps(), updates = _mm512_setzero_ps();
  const __m512 keep = _mm512_set1_ps((float)decay), step = _mm512_set1_ps((float)size);
  for (long i = begin; i < end; i += 16) {
    const __mmask16 k = tail(end - i);
    // Two roundings, as p.mul_(decay).add_(u, alpha=size) makes them.
    const __m512 old = load(p + i, k), direction = load(u + i, k);
    if (SUMS) weights = add_square(weights, old), updates = add_square(updates, direction);
    const __m512 kept = rounded(_mm512_mul_ps(keep, old), p);
    if (!SUMS || !still) store(p + i, k, _mm512_fmadd_ps(step, direction, kept));
  }
  if (SUMS) sums[0] = _mm512_reduce_add_ps(weights), sums[1] = _mm512_reduce_add_ps(updates);
}

// `sums`: null, or [width, rows], zero; chunks are added up in their order, whoever ran them.
template <typename Task, typename Run>
void for_chunks(const Task& task, long rows, int threads, Run run, double* sums, long width) {
  if (rows == 0 || task.numel == 0) return;
  const long per_row = (task.numel + CHUNK - 1) / CHUNK, count = rows * per_row;
  std::vector<double> parts(sums ? count * width : 0, 0.0);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * task.numel > SERIAL)
  for (long i = 0; i < count; i++) {
    const long row = i / per_row, begin = i % per_row * CHUNK;
    run(task, row, begin, std::min(task.numel, begin + CHUNK), parts.data() + (sums ? i * width : 0));
  }
  for (long i = 0; i < (long)parts.size(); i++) sums[i % width * rows + i / width / per_row] += parts[i];
}

}  // namespace

extern "C" {

// dtypes: 0 float32, 1 bfloat16. mu_stride 0: one mu for all rows. `present` may be null. `sums`: null, or [rows] for the
// squares of the new momentum. `scale`: null, or a factor for every gradient.
void mc_momentum(const void* const* grads, void* momentum, void* out, long rows, long numel, const double* mus,
                 long mu_stride, const uint8_t* present, int ema, int nesterov, int grad_type, int momentum_type,
                 int out_type, int threads, double* sums, const double* scale) {
  const float factor = scale ? (float)*scale : 1.0f;
  const Momentum t{grads, momentum, out, numel, mus, mu_stride, present, ema != 0, nesterov != 0, factor};
  using F = float;
  using Chunk = void (*)(const Momentum&, long, long, long, double*);
#define BOTH(G, M, O) {momentum_chunk<G, M, O, false>, momentum_chunk<G, M, O, true>}
  static const Chunk chunks[8][2] = {BOTH(F, F, F),    BOTH(F, F, bf16),    BOTH(F, bf16, F),    BOTH(F, bf16, bf16),
                                     BOTH(bf16, F, F), BOTH(bf16, F, bf16), BOTH(bf16, bf16, F), BOTH(bf16, bf16, bf16)};
#undef BOTH
  for_chunks(t, rows, threads, chunks[4 * grad_type + 2 * momentum_type + out_type][sums != nullptr], sums, 1);
}

// `sums`: null, or [2, rows] for the squares of the parameters as they were and of the update before its size.

void mc_update(void* const* params, const void* update, long rows, long numel, const double* decays, long decay_stride,
               const double* sizes, long size_stride, int param_type, int update_type, int threads, double* sums) {
  const Update t{params, update, numel, decays, sizes, decay_stride, size_stride};
  using Chunk = void (*)(const Update&, long, long, long, double*);
#define BOTH(P, U) {update_chunk<P, U, false>, update_chunk<P, U, true>}
  static const Chunk chunks[4][2] = {BOTH(float, float), BOTH(float, bf16), BOTH(bf16, float), BOTH(bf16, bf16)};
#undef BOTH
  for_chunks(t, rows, threads, chunks[2 * param_type + update_type][sums != nullptr], sums, 2);
}
}
