// The two passes over a bucket's memory: gradients and momentum into directions, and directions into parameters.
// Each reads and writes every element once; arithmetic is float32.
#include <algorithm>

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
};

template <typename G, typename M, typename O>
void momentum_chunk(const Momentum& t, long row, long begin, long end) {
  const G* g = (const G*)t.grads[row];
  M* m = (M*)t.momentum + row * t.numel;
  O* out = (O*)t.out + row * t.numel;
  if (t.present && !t.present[row]) {  // no gradient: the momentum stays, bit for bit, and nothing will be applied
    std::memset(out + begin, 0, (end - begin) * sizeof(O));
    return;
  }
  const double mu = t.mus[row * t.mu_stride];
  const __m512 look = _mm512_set1_ps((float)mu), add = _mm512_set1_ps((float)(1 - mu));
  for (long i = begin; i < end; i += 16) {
    const __mmask16 k = tail(end - i);
    const __m512 grad = load(g + i, k), old = load(m + i, k);
    const __m512 now = t.ema ? _mm512_fmadd_ps(add, _mm512_sub_ps(grad, old), old) : _mm512_fmadd_ps(look, old, grad);
    store(m + i, k, now);
    __m512 direction = now;
    if (t.nesterov)
      direction = t.ema ? _mm512_fmadd_ps(look, _mm512_sub_ps(now, grad), grad) : _mm512_fmadd_ps(look, now, grad);
    store(out + i, k, direction);
  }
}

struct Update {
  void* const* params;
  const void* update;
  long numel;
  const double *decays, *sizes;
  long decay_stride, size_stride;
};

template <typename P, typename U>
void update_chunk(const Update& t, long row, long begin, long end) {
  const double decay = t.decays[row * t.decay_stride], size = t.sizes[row * t.size_stride];
  if (decay == 1 && size == 0) return;  // no gradient, or lr 0: not even the sign of a zero may change
  P* p = (P*)t.params[row];
  const U* u = (const U*)t.update + row * t.numel;
  const __m512 keep = _mm512_set1_ps((float)decay), step = _mm512_set1_ps((float)size);
  for (long i = begin; i < end; i += 16) {
    const __mmask16 k = tail(end - i);
    // Two roundings, as p.mul_(decay).add_(u, alpha=size) makes them.
    const __m512 kept = rounded(_mm512_mul_ps(keep, load(p + i, k)), p);
    store(p + i, k, _mm512_fmadd_ps(step, load(u + i, k), kept));
  }
}

template <typename Task, typename Run>
void for_chunks(const Task& task, long rows, int threads, Run run) {
  if (rows == 0 || task.numel == 0) return;
  const long per_row = (task.numel + CHUNK - 1) / CHUNK, count = rows * per_row;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * task.numel > SERIAL)
  for (long i = 0; i < count; i++) {
    const long row = i / per_row, begin = i % per_row * CHUNK;
    run(task, row, begin, std::min(task.numel, begin + CHUNK));
  }
}

}  // namespace

extern "C" {

// dtypes: 0 float32, 1 bfloat16. mu_stride 0: one mu for all rows. `present` may be null.
void mc_momentum(const void* const* grads, void* momentum, void* out, long rows, long numel, const double* mus,
                 long mu_stride, const uint8_t* present, int ema, int nesterov, int grad_type, int momentum_type,
                 int out_type, int threads) {
  const Momentum t{grads, momentum, out, numel, mus, mu_stride, present, ema != 0, nesterov != 0};
  using F = float;
  using Chunk = void (*)(const Momentum&, long, long, long);
  static const Chunk chunks[8] = {momentum_chunk<F, F, F>,    momentum_chunk<F, F, bf16>,    momentum_chunk<F, bf16, F>,
                                  momentum_chunk<F, bf16, bf16>, momentum_chunk<bf16, F, F>, momentum_chunk<bf16, F, bf16>,
                                  momentum_chunk<bf16, bf16, F>, momentum_chunk<bf16, bf16, bf16>};
  for_chunks(t, rows, threads, chunks[4 * grad_type + 2 * momentum_type + out_type]);
}

void mc_update(void* const* params, const void* update, long rows, long numel, const double* decays, long decay_stride,
               const double* sizes, long size_stride, int param_type, int update_type, int threads) {
  const Update t{params, update, numel, decays, sizes, decay_stride, size_stride};
  using Chunk = void (*)(const Update&, long, long, long);
  static const Chunk chunks[4] = {update_chunk<float, float>, update_chunk<float, bf16>, update_chunk<bf16, float>,
                                  update_chunk<bf16, bf16>};
  for_chunks(t, rows, threads, chunks[2 * param_type + update_type]);
}
}
