// Newton-Schulz over a batch of bfloat16 matrices, in place. A matrix is read once and written once; in between it and
// its small matrices stay in cache. Products known to be symmetric are computed in one triangle of blocks.
//
// With as many matrices as threads each thread takes matrices of its own, panel by panel: the panel of the new X that an
// application has just made goes into the next Gram while it is in cache. With fewer, threads form teams, one a matrix.
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <vector>

#include "tiles.h"

namespace {

constexpr long PAGE = 2 << 20;

// Memory that is kept from call to call, so that no step page-faults it anew.
struct Buffer {
  char* data = nullptr;
  size_t size = 0;
  bool reserve(size_t bytes) {
    if (bytes <= size) return true;
    std::free(data);
    size = (bytes + PAGE - 1) / PAGE * PAGE;
    data = (char*)std::aligned_alloc(PAGE, size);
    if (!data) return size = 0, false;
    madvise(data, size, MADV_HUGEPAGE);
    return true;
  }
};

struct Team {
  int rank = 0, size = 1;
  std::atomic<int>* arrived = nullptr;
  std::atomic<int>* phase = nullptr;

  void sync() const {
    if (size == 1) return;
    const int now = phase->load(std::memory_order_acquire);
    if (arrived->fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived->store(0, std::memory_order_relaxed);
      phase->store(now + 1, std::memory_order_release);
      return;
    }
    for (long spins = 0; phase->load(std::memory_order_acquire) == now; spins++)
      if (spins < 4096)
        _mm_pause();
      else
        sched_yield();
  }
};

// A symmetric m x m matrix in the layouts that products read, as one bfloat16 or as a high and a low half.
struct Small {
  bf16* rows[2];
  bf16* paired[2];
};

struct Problem {
  long rows, cols;            // of the matrix in memory
  long m, n;                  // of X: m <= n, X is the transpose of a tall matrix
  long mb, nb;                // in blocks
  long panel;                 // blocks of columns of X that are worked on together
  int num_segments, halves;
  const double* coefficients;
  const int64_t* segments;
  float eps;
  bool eps_add, fold;         // fold: the norm divides the Gram and Q instead of X
};

struct Work {
  bf16* x;                    // mb x nb left blocks
  bf16* paired;               // panel (solo) or all of X (team), for applications
  bf16* transposed;           // the same for Grams; solo, the same memory
  float* gram;                // lower blocks of X X^T
  float* squares;             // sum of squares of every row of blocks: the norm is the same for any team
  Small r, z, q, p, other;
};

long lower_blocks(long nb) { return nb * (nb + 1) / 2; }

// Index of the lower block (i, j), j <= i.
long lower(long i, long j) { return i * (i + 1) / 2 + j; }

// Blocks of columns that are worked on together: their copies stay in the second-level cache.
long panel_of(long nb) { return std::min(nb, STRETCH); }

size_t small_bytes(const Problem& t) { return sizeof(bf16) * AREA * t.halves * 2 * t.mb * t.mb; }

size_t work_bytes(const Problem& t, int team) {
  const size_t columns = team > 1 ? t.nb : t.panel;
  return sizeof(bf16) * AREA * t.mb * (t.nb + (team > 1 ? 2 : 1) * columns) + 4 * AREA * lower_blocks(t.mb) + 5 * small_bytes(t) +
         4 * t.mb + 64 * 32;
}

Work carve(const Problem& t, int team, char* at) {
  auto take = [&](size_t bytes) {
    char* mine = at;
    at += (bytes + 63) / 64 * 64;
    return mine;
  };
  const size_t columns = team > 1 ? t.nb : t.panel;
  Work w;
  w.x = (bf16*)take(sizeof(bf16) * AREA * t.mb * t.nb);
  w.paired = (bf16*)take(sizeof(bf16) * AREA * t.mb * columns);
  w.transposed = team > 1 ? (bf16*)take(sizeof(bf16) * AREA * t.mb * columns) : w.paired;  // one after the other
  w.gram = (float*)take(4 * AREA * lower_blocks(t.mb));
  w.squares = (float*)take(4 * t.mb);
  for (Small* s : {&w.r, &w.z, &w.q, &w.p, &w.other})
    for (int h = 0; h < t.halves; h++) {
      s->rows[h] = (bf16*)take(sizeof(bf16) * AREA * t.mb * t.mb);
      s->paired[h] = (bf16*)take(sizeof(bf16) * AREA * t.mb * t.mb);
    }
  return w;
}

// ---------------------------------------------------------------- small matrices

// Round a block and its mirror image into a small matrix; `paired` too where it will be a right operand.
void put(const Problem& t, const Small& s, long i, long j, const float* value, bool paired) {
  alignas(64) bf16 spare[AREA];
  for (int h = 0; h < t.halves; h++) {
    bf16* rows = s.rows[h] + (i * t.mb + j) * AREA;
    for (long e = 0; e < AREA; e += 16) {
      __m512 v = _mm512_loadu_ps(value + e);
      if (h == 1) v = _mm512_sub_ps(v, widen(narrow(v)));
      _mm256_storeu_si256((__m256i*)(rows + e), narrow(v));
    }
    if (i == j && !paired) continue;
    bf16* pairs = paired ? s.paired[h] + (j * t.mb + i) * AREA : spare;
    pair_rows(rows, pairs);
    if (i == j) continue;
    unpair_transposed(pairs, s.rows[h] + (j * t.mb + i) * AREA);
    if (paired) pair_transposed(rows, s.paired[h] + (i * t.mb + j) * AREA);
  }
}

// value = alpha * value + beta * add + gamma * I
void combine(const Problem& t, float* value, long i, long j, float alpha, const Small* add, float beta, float gamma) {
  const __m512 va = _mm512_set1_ps(alpha), vb = _mm512_set1_ps(beta);
  for (long e = 0; e < AREA; e += 16) {
    __m512 v = _mm512_mul_ps(va, _mm512_loadu_ps(value + e));
    if (add)
      for (int h = 0; h < t.halves; h++) v = _mm512_fmadd_ps(vb, widen(add->rows[h] + (i * t.mb + j) * AREA + e), v);
    _mm512_storeu_ps(value + e, v);
  }
  if (i == j && gamma != 0)
    for (long r = 0; r < BLOCK; r++) value[r * (BLOCK + 1)] += gamma;
}

// Calls run(i, first, count) for this thread's share of the lower blocks (i, first ... first + count). Right operands
// come in columns of blocks; PANEL of them at a time stay in the second-level cache.
template <typename Run>
void for_lower(const Problem& t, const Team& team, Run run) {
  constexpr long PANEL = 2 * STRETCH;
  long task = 0;
  for (long j0 = 0; j0 < t.mb; j0 += PANEL)
    for (long i = j0; i < t.mb; i++)
      for (long j = j0; j <= std::min(i, j0 + PANEL - 1); j += GROUP, task++)
        if (task % team.size == team.rank) run(i, j, std::min({GROUP, i + 1 - j, j0 + PANEL - j}));
}

// What becomes of a product's blocks: out = alpha a b + beta add, and plus = out + gamma I.
struct Target {
  const Small* out;
  bool paired;
  float alpha = 1;
  const Small* add = nullptr;
  float beta = 0;
  const Small* plus = nullptr;
  float gamma = 0;
};

// Lower blocks of a b, whose product is symmetric, this thread's share, each with its mirror image.
// With halves: high high + high low + low high.
void product(const Problem& t, const Team& team, const Small& a, const Small& b, const Target& to) {
  alignas(64) float values[GROUP][AREA];
  float* c[GROUP];
  for (int g = 0; g < GROUP; g++) c[g] = values[g];
  for_lower(t, team, [&](long i, long first, long count) {
    for (int h = 0; h < (t.halves == 2 ? 3 : 1); h++) {
      const bf16* right[GROUP];
      for (long g = 0; g < count; g++) right[g] = b.paired[h == 1] + (first + g) * t.mb * AREA;
      block_row(c, count, h == 0, a.rows[h == 2] + i * t.mb * AREA, right, t.mb);
    }
    for (long g = 0; g < count; g++) {
      const long j = first + g;
      combine(t, c[g], i, j, to.alpha, to.add, to.beta, 0);
      put(t, *to.out, i, j, c[g], to.paired);
      if (!to.plus) continue;
      if (i == j)
        for (long r = 0; r < BLOCK; r++) c[g][r * (BLOCK + 1)] += to.gamma;
      put(t, *to.plus, i, j, c[g], false);
    }
  });
}

// out = alpha * (float32 lower blocks), or alpha * from.
void rescale(const Problem& t, const Team& team, const Small& out, const float* blocks, const Small* from, float alpha) {
  alignas(64) float value[AREA];
  for_lower(t, team, [&](long i, long first, long count) {
    for (long j = first; j < first + count; j++) {
      if (blocks)
        std::memcpy(value, blocks + lower(i, j) * AREA, sizeof value);
      else
        std::memset(value, 0, sizeof value);
      combine(t, value, i, j, alpha, from, alpha, 0);
      put(t, out, i, j, value, blocks != nullptr);
    }
  });
}

// ---------------------------------------------------------------- X

// X's columns of blocks [first, first + width), paired, for applications: a column of blocks after the other.
void pair_panel(const Problem& t, const bf16* x, long first, long width, bf16* out) {
  for (long c = 0; c < width; c++)
    for (long r = 0; r < t.mb; r++) pair_rows(x + (r * t.nb + first + c) * AREA, out + (c * t.mb + r) * AREA);
}

// The same columns' transpose, paired, for Grams: a row of blocks of X after the other, `stride` blocks apart.
void pair_transposed_panel(const Problem& t, const bf16* x, long first, long width, bf16* out, long stride) {
  for (long r = 0; r < t.mb; r++)
    for (long c = 0; c < width; c++)
      pair_transposed(x + (r * t.nb + first + c) * AREA, out + (r * stride + c) * AREA);
}

// The columns' X = F X + a X, F in halves; `paired` holds the old ones.
void apply_panel(const Problem& t, const Small& f, float a, bf16* x, const bf16* paired, long first, long width) {
  alignas(64) float values[GROUP][AREA];
  float* to[GROUP];
  for (int g = 0; g < GROUP; g++) to[g] = values[g];
  const __m512 va = _mm512_set1_ps(a);
  for (long i = 0; i < t.mb; i++)
    for (long c = 0; c < width; c += GROUP) {
      const long count = std::min(GROUP, width - c);
      const bf16* right[GROUP];
      for (long g = 0; g < count; g++) right[g] = paired + (c + g) * t.mb * AREA;
      for (int h = 0; h < t.halves; h++) block_row(to, count, h == 0, f.rows[h] + i * t.mb * AREA, right, t.mb);
      for (long g = 0; g < count; g++) {
        bf16* out = x + (i * t.nb + first + c + g) * AREA;
        for (long e = 0; e < AREA; e += 16) {
          __m512 v = _mm512_loadu_ps(values[g] + e);
          if (a != 0) v = _mm512_fmadd_ps(va, widen(out + e), v);
          _mm256_storeu_si256((__m256i*)(out + e), narrow(v));
        }
      }
    }
}

// This thread's share of the lower blocks of X X^T, over columns [first, first + width).
void gram_panel(const Problem& t, const Team& team, Work& w, long first, long width, const bf16* transposed,
                long stride) {
  for_lower(t, team, [&](long i, long j, long count) {
    float* c[GROUP];
    const bf16* right[GROUP];
    for (long g = 0; g < count; g++) {
      c[g] = w.gram + lower(i, j + g) * AREA;
      right[g] = transposed + (j + g) * stride * AREA;
    }
    block_row(c, count, first == 0, w.x + (i * t.nb + first) * AREA, right, width);
  });
}

// Apply F (unless null) to X, then the lower blocks of the new X X^T (unless it was the last application).
void pass(const Problem& t, const Team& team, Work& w, const Small* f, float a, bool gram) {
  if (team.size == 1) {
    for (long first = 0; first < t.nb; first += t.panel) {
      const long width = std::min(t.panel, t.nb - first);
      if (f) {
        pair_panel(t, w.x, first, width, w.paired);
        apply_panel(t, *f, a, w.x, w.paired, first, width);
      }
      if (!gram) continue;
      pair_transposed_panel(t, w.x, first, width, w.transposed, width);
      gram_panel(t, team, w, first, width, w.transposed, width);
    }
    return;
  }
  const long chunk = std::max(1L, std::min(t.panel, (t.nb + team.size - 1) / team.size));
  for (long first = team.rank * chunk; first < t.nb; first += team.size * chunk) {
    const long width = std::min(chunk, t.nb - first);
    if (f) {
      pair_panel(t, w.x, first, width, w.paired + first * t.mb * AREA);
      apply_panel(t, *f, a, w.x, w.paired + first * t.mb * AREA, first, width);
    }
    if (gram) pair_transposed_panel(t, w.x, first, width, w.transposed + first * AREA, t.nb);
  }
  team.sync();
  if (!gram) return;
  for (long first = 0; first < t.nb; first += t.panel)
    gram_panel(t, team, w, first, std::min(t.panel, t.nb - first), w.transposed + first * AREA, t.nb);
  team.sync();
}

// Rows of blocks of X, this thread's share, zero where X ends, and their sums of squares.
void read_x(const Problem& t, const Team& team, Work& w, const bf16* in) {
  const bool tall = t.rows > t.cols;
  alignas(64) bf16 part[AREA];
  for (long i = team.rank; i < t.mb; i += team.size) {
    const long height = std::min(BLOCK, t.m - i * BLOCK);
    __m512 squares = _mm512_setzero_ps();
    for (long c = 0; c < t.nb; c++) {
      const long width = std::min(BLOCK, t.n - c * BLOCK);
      const bool whole = height == BLOCK && width == BLOCK;
      bf16* out = w.x + (i * t.nb + c) * AREA;
      const bf16* from = in + (tall ? c * BLOCK * t.cols + i * BLOCK : i * BLOCK * t.cols + c * BLOCK);
      bf16* to = tall ? part : out;
      const long rows = tall ? width : height, cols = tall ? height : width;
      if (!whole) std::memset(to, 0, sizeof part);
      if (whole)
        for (long r = 0; r < BLOCK; r++) _mm512_storeu_si512(to + r * BLOCK, _mm512_loadu_si512(from + r * t.cols));
      else
        for (long r = 0; r < rows; r++) std::memcpy(to + r * BLOCK, from + r * t.cols, cols * sizeof(bf16));
      if (tall) transpose(part, out);
      for (long e = 0; e < AREA; e += 16) {
        const __m512 v = widen(out + e);
        squares = _mm512_fmadd_ps(v, v, squares);
      }
    }
    w.squares[i] = _mm512_reduce_add_ps(squares);
  }
}

void divide_x(const Problem& t, const Team& team, Work& w, float norm) {
  const __m512 by = _mm512_set1_ps(norm);
  for (long i = team.rank; i < t.mb; i += team.size)
    for (bf16 *at = w.x + i * t.nb * AREA, *end = at + t.nb * AREA; at < end; at += 16)
      _mm256_storeu_si256((__m256i*)at, narrow(_mm512_div_ps(widen(at), by)));
}

void write_x(const Problem& t, const Team& team, Work& w, bf16* out) {
  const bool tall = t.rows > t.cols;
  alignas(64) bf16 part[AREA];
  for (long i = team.rank; i < t.mb; i += team.size) {
    const long height = std::min(BLOCK, t.m - i * BLOCK);
    for (long c = 0; c < t.nb; c++) {
      const long width = std::min(BLOCK, t.n - c * BLOCK);
      const bf16* from = w.x + (i * t.nb + c) * AREA;
      bf16* to = out + (tall ? c * BLOCK * t.cols + i * BLOCK : i * BLOCK * t.cols + c * BLOCK);
      if (tall) transpose(from, part), from = part;
      const long rows = tall ? width : height, cols = tall ? height : width;
      if (cols == BLOCK)
        for (long r = 0; r < rows; r++) _mm512_storeu_si512(to + r * t.cols, _mm512_loadu_si512(from + r * BLOCK));
      else
        for (long r = 0; r < rows; r++) std::memcpy(to + r * t.cols, from + r * BLOCK, cols * sizeof(bf16));
    }
  }
}

// ---------------------------------------------------------------- one matrix

void orthogonalize(const Problem& t, const Team& team, Work& w, const bf16* in, bf16* out) {
  read_x(t, team, w, in);
  team.sync();
  float squares = 0;
  for (long i = 0; i < t.mb; i++) squares += w.squares[i];
  // Rounded as torch rounds it, so that the results differ by the products alone.
  float norm = to_float(to_bf16(std::sqrt(squares)));
  norm = t.eps_add ? to_float(to_bf16(norm + t.eps)) : std::max(norm, to_float(to_bf16(t.eps)));
  if (norm == 0) norm = 1;
  // Far from 1 the Gram's squares would leave float32's range, or all but: then X itself is divided.
  bool fold = t.fold && norm > 1e-10f && norm < 1e10f;
  if (!fold) {
    divide_x(t, team, w, norm);
    team.sync();
  }
  pass(t, team, w, nullptr, 0, true);
  const double* k = t.coefficients;
  for (int segment = 0; segment < t.num_segments; segment++) {
    const bool last_segment = segment + 1 == t.num_segments;
    const int steps = (int)t.segments[segment];
    rescale(t, team, w.r, w.gram, nullptr, fold ? 1 / (norm * norm) : 1);
    team.sync();
    if (steps == 1 && !fold && t.halves == 1) {  // the standard step: a stays out of the rounded factor
      product(t, team, w.r, w.r, {&w.z, false, (float)k[2], &w.r, (float)k[1]});
      team.sync();
      pass(t, team, w, &w.z, (float)k[0], !last_segment);
      k += 3;
      continue;
    }
    for (int step = 0; step < steps; step++, k += 3) {
      const float a = (float)k[0], b = (float)k[1], c = (float)k[2];
      const bool last = step + 1 == steps;
      product(t, team, w.r, w.r, {&w.z, true, c, &w.r, b, step == 0 ? &w.q : nullptr, a});
      team.sync();
      if (step > 0) product(t, team, w.q, w.z, {&w.other, false, 1, &w.q, a});
      if (!last) product(t, team, w.r, w.z, {&w.p, true, 1, &w.r, a});
      team.sync();
      if (step > 0) std::swap(w.q, w.other);
      if (last) continue;
      product(t, team, w.z, w.p, {&w.r, true, 1, &w.p, a});
      team.sync();
    }
    if (fold) {  // the norm, once, on the way to X
      rescale(t, team, w.other, nullptr, &w.q, 1 / norm);
      team.sync();
      std::swap(w.q, w.other);
      fold = false;
    }
    pass(t, team, w, &w.q, 0, !last_segment);
  }
  write_x(t, team, w, out);
  team.sync();
}

std::mutex pool_mutex;
std::vector<Buffer> pool;

// A child of a fork would find the mutex as it was: maybe held, by a thread that the child does not have.
void after_fork_in_child() { new (&pool_mutex) std::mutex; }
const int fork_handler = pthread_atfork(nullptr, nullptr, after_fork_in_child);

Problem describe(long rows, long cols, const double* coefficients, const int64_t* segments, int num_segments,
                 int halves, float eps, int eps_add) {
  Problem t;
  t.rows = rows, t.cols = cols;
  t.m = std::min(rows, cols), t.n = std::max(rows, cols);
  t.mb = blocks_of(t.m), t.nb = blocks_of(t.n);
  t.panel = panel_of(t.nb);
  t.coefficients = coefficients, t.segments = segments, t.num_segments = num_segments;
  t.halves = halves, t.eps = eps, t.eps_add = eps_add != 0;
  t.fold = num_segments > 0 && segments[0] > 1;
  return t;
}

struct Layout {
  int groups;  // teams that work at the same time
  long solo;   // leading matrices that single threads take
};

// Whole rounds of one matrix a thread; what is left over is shared by teams where it is worth their barriers.
Layout split_work(const Problem& t, long batch, int threads) {
  const bool large = (double)t.m * t.m * t.n > 4e6;
  if (threads == 1 || !large) return {0, batch};
  const long rest = batch % threads;
  return {(int)std::min<long>(rest, threads), batch - rest};
}

// 0: done, 1: out of memory; with too little of it some matrices may be done.
int newton_schulz(const bf16* in, bf16* out, long batch, long rows, long cols, const double* coefficients,
                  const int64_t* segments, int num_segments, int halves, float eps, int eps_add, int threads) {
  if (batch == 0 || rows == 0 || cols == 0) return 0;
  const Problem t = describe(rows, cols, coefficients, segments, num_segments, halves, eps, eps_add);
  const Layout layout = split_work(t, batch, threads);
  std::lock_guard<std::mutex> lock(pool_mutex);
  if ((int)pool.size() < threads) pool.resize(threads);
  const long solo_threads = std::min<long>(threads, layout.solo);
  for (long i = 0; i < solo_threads; i++)
    if (!pool[i].reserve(work_bytes(t, 1))) return 1;
  const int largest = layout.groups ? (threads + layout.groups - 1) / layout.groups : 0;
  for (int i = 0; i < layout.groups; i++)
    if (!pool[i].reserve(work_bytes(t, largest))) return 1;
  std::vector<std::atomic<int>> counters(2 * std::max(1, layout.groups));
  for (auto& counter : counters) counter.store(0);
  std::atomic<long> next{0};
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(threads)
  {
    const int me = omp_get_thread_num();
    // OpenMP may give fewer threads than it is asked for: teams that nobody would be in do not form then.
    const bool teams = layout.groups > 0 && omp_get_num_threads() == threads;
    const long solo = teams ? layout.solo : batch;
    tiles_begin();
    if (teams ? me < solo_threads : pool[me].reserve(work_bytes(t, 1))) {
      Work w = carve(t, 1, pool[me].data);
      for (long i; (i = next.fetch_add(1)) < solo;)
        orthogonalize(t, Team(), w, in + i * rows * cols, out + i * rows * cols);
    } else if (!teams) {
      failed = true;
    }
    if (teams) {
#pragma omp barrier
      const int group = me % layout.groups;
      Team team;
      team.rank = me / layout.groups;
      team.size = (threads - group + layout.groups - 1) / layout.groups;
      team.arrived = &counters[2 * group], team.phase = &counters[2 * group + 1];
      Work w = carve(t, largest, pool[group].data);
      for (long i = layout.solo + group; i < batch; i += layout.groups)
        orthogonalize(t, team, w, in + i * rows * cols, out + i * rows * cols);
    }
    tiles_end();
  }
  return failed ? 1 : 0;
}

}  // namespace

extern "C" {

// 0: done, 1: out of memory.
int mc_newton_schulz(const bf16* in, bf16* out, long batch, long rows, long cols, const double* coefficients,
                     const int64_t* segments, int num_segments, int halves, float eps, int eps_add, int threads) try {
  return newton_schulz(in, out, batch, rows, cols, coefficients, segments, num_segments, halves, eps, eps_add, threads);
} catch (const std::bad_alloc&) {
  return 1;
}

// Bytes of scratch memory that calls have taken so far, and that are kept.
long mc_scratch_held() {
  std::lock_guard<std::mutex> lock(pool_mutex);
  long total = 0;
  for (const Buffer& buffer : pool) total += (long)buffer.size;
  return total;
}

int mc_isa() { return (int)isa(); }
}
