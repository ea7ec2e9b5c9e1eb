// Blocks of 32 x 32 out of bfloat16 products, accumulated in float32: AMX tiles, or AVX512-BF16 where there is no AMX.
//
// Operands are sequences of blocks along k, 2 KiB each. A left block is row-major. A right block is "paired": 16 rows of
// 32 pairs, the elements of rows 2k and 2k + 1 side by side, as both instruction sets want them.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

using bf16 = uint16_t;

constexpr long BLOCK = 32;              // side of a block
constexpr long AREA = BLOCK * BLOCK;    // its elements
constexpr long PAIRED_ROW = 2 * BLOCK;  // elements in one row of pairs

inline long blocks_of(long n) { return (n + BLOCK - 1) / BLOCK; }

// ---------------------------------------------------------------- instruction sets

enum Isa { AVX512_BF16 = 1, AMX_BF16 = 2 };

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void tiles_begin() {
  TileConfig config;
  for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
  _tile_loadconfig(&config);
}

inline void tiles_end() { _tile_release(); }

// Linux hands out the tile registers on request, once per process.
inline bool amx_granted() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

inline void block_amx(float* c, bool zero, const bf16* a, const bf16* b, long num) {
  constexpr long C_STRIDE = BLOCK * 4, A_STRIDE = BLOCK * 2, B_STRIDE = PAIRED_ROW * 2;
  if (zero) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, c, C_STRIDE);
    _tile_loadd(1, c + 16, C_STRIDE);
    _tile_loadd(2, c + 16 * BLOCK, C_STRIDE);
    _tile_loadd(3, c + 16 * BLOCK + 16, C_STRIDE);
  }
  for (long i = 0; i < num; i++, a += AREA, b += AREA) {
    _tile_loadd(4, a, A_STRIDE);
    _tile_loadd(6, b, B_STRIDE);
    _tile_loadd(5, a + 16 * BLOCK, A_STRIDE);
    _tile_loadd(7, b + 32, B_STRIDE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, C_STRIDE);
  _tile_stored(1, c + 16, C_STRIDE);
  _tile_stored(2, c + 16 * BLOCK, C_STRIDE);
  _tile_stored(3, c + 16 * BLOCK + 16, C_STRIDE);
}
#else
inline void tiles_begin() {}
inline void tiles_end() {}
inline bool amx_granted() { return false; }
inline void block_amx(float*, bool, const bf16*, const bf16*, long) {}
#endif

inline void block_avx512(float* c, bool zero, const bf16* a, const bf16* b, long num) {
  constexpr int ROWS = 8;
  for (long r = 0; r < BLOCK; r += ROWS) {
    __m512 acc[ROWS][2];
    for (int i = 0; i < ROWS; i++)
      for (int h = 0; h < 2; h++)
        acc[i][h] = zero ? _mm512_setzero_ps() : _mm512_loadu_ps(c + (r + i) * BLOCK + 16 * h);
    for (long k = 0; k < num; k++) {
      const bf16 *left = a + k * AREA + r * BLOCK, *right = b + k * AREA;
      for (int p = 0; p < 16; p++, left += 2, right += PAIRED_ROW) {
        const auto b0 = (__m512bh)_mm512_loadu_si512(right);
        const auto b1 = (__m512bh)_mm512_loadu_si512(right + 32);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
          int pair;
          std::memcpy(&pair, left + i * BLOCK, 4);
          const auto value = (__m512bh)_mm512_set1_epi32(pair);
          acc[i][0] = _mm512_dpbf16_ps(acc[i][0], value, b0);
          acc[i][1] = _mm512_dpbf16_ps(acc[i][1], value, b1);
        }
      }
    }
    for (int i = 0; i < ROWS; i++)
      for (int h = 0; h < 2; h++) _mm512_storeu_ps(c + (r + i) * BLOCK + 16 * h, acc[i][h]);
  }
}

inline Isa choose_isa() {
  const char* asked = std::getenv("MUON_COMPILE_CPU_ISA");
  if (asked && std::strcmp(asked, "avx512_bf16") == 0) return AVX512_BF16;
  return amx_granted() ? AMX_BF16 : AVX512_BF16;
}

inline Isa isa() {
  static const Isa chosen = choose_isa();
  return chosen;
}

// c (32 x 32, float32) = or += the sum of `num` products of left blocks with paired right blocks.
inline void block(float* c, bool zero, const bf16* a, const bf16* b, long num) {
  if (isa() == AMX_BF16)
    block_amx(c, zero, a, b, num);
  else
    block_avx512(c, zero, a, b, num);
}

// The same for up to GROUP blocks of one row: a stretch of the left operand stays in the first-level cache while the
// right operands' stretches stream by. Both lengths are what was fastest of 4-24 and 1-8 on a core with 48 KiB of it.
constexpr long GROUP = 3, STRETCH = 8;

inline void block_row(float* const* c, long count, bool zero, const bf16* a, const bf16* const* b, long num) {
  for (long k = 0; k < num; k += STRETCH)
    for (long g = 0; g < count; g++)
      block(c[g], zero && k == 0, a + k * AREA, b[g] + k * AREA, num - k < STRETCH ? num - k : STRETCH);
}

// ---------------------------------------------------------------- roundings and layouts

inline __m512 widen(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

inline __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

inline __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

inline float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline bf16 to_bf16(float x) {
  alignas(32) bf16 out[16];
  _mm256_store_si256((__m256i*)out, narrow(_mm512_set1_ps(x)));
  return out[0];
}

// 16 x 16 transpose of 32-bit elements; strides in 32-bit elements.
inline void transpose16(const uint32_t* in, long in_stride, uint32_t* out, long out_stride) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(in + i * in_stride);
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + i * out_stride, r[i]);
}

// A row-major block, paired.
inline void pair_rows(const bf16* in, bf16* out) {
  for (int r = 0; r < 16; r++, in += 2 * BLOCK, out += PAIRED_ROW)
    for (int h = 0; h < 32; h += 16) {
      const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(in + h)));
      const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(in + BLOCK + h)));
      _mm512_storeu_si512(out + 2 * h, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
}

// The transpose of a row-major block, paired.
inline void pair_transposed(const bf16* in, bf16* out) {
  transpose16((const uint32_t*)in, BLOCK / 2, (uint32_t*)out, BLOCK);
  transpose16((const uint32_t*)(in + 16 * BLOCK), BLOCK / 2, (uint32_t*)out + 16, BLOCK);
}

// The transpose, row-major, of a block that is given paired.
inline void unpair_transposed(const bf16* paired, bf16* out) {
  transpose16((const uint32_t*)paired, BLOCK, (uint32_t*)out, BLOCK / 2);
  transpose16((const uint32_t*)paired + 16, BLOCK, (uint32_t*)(out + 16 * BLOCK), BLOCK / 2);
}

inline void transpose(const bf16* in, bf16* out) {
  alignas(64) bf16 paired[AREA];
  pair_rows(in, paired);
  unpair_transposed(paired, out);
}
