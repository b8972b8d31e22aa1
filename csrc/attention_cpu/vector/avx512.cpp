// The attention kernels for avx512: chosen at run time, so that the package stays portable.
#include "attention_cpu/problem.h"

#if defined(INTERLACE_WIDE_VECTORS)
#include <cmath>
#include <cstdint>
#include <immintrin.h>

#include "attention_cpu/tiles.h"
#include "attention_cpu/workspace.h"
#include "common/parallel.h"

#define VECTOR_BYTES 64
#define MAX_N 4
#define THIS_KERNELS avx512_kernels

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")
namespace interlace {
namespace attention {
namespace avx512 {
namespace {
#include "attention_cpu/vector/simd.inc"
#include "attention_cpu/mask_tile.inc"
#include "attention_cpu/vector/panel.inc"
#include "attention_cpu/vector/pieces.inc"
#include "attention_cpu/vector/forward.inc"
#include "attention_cpu/vector/backward.inc"
}  // namespace
}  // namespace avx512
#pragma GCC pop_options

extern const Kernels avx512_kernels{"avx512", avx512::mask_tile, avx512::forward, avx512::backward};

}  // namespace attention
}  // namespace interlace
#endif
