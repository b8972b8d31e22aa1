// The attention kernels for avx2: chosen at run time, so that the package stays portable.
#include "attention_cpu/problem.h"

#if defined(INTERLACE_WIDE_VECTORS)
#include <cmath>
#include <cstdint>
#include <immintrin.h>

#include "attention_cpu/tiles.h"
#include "attention_cpu/workspace.h"
#include "common/parallel.h"

#define VECTOR_BYTES 32
#define MAX_N 2
#define THIS_KERNELS avx2_kernels

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace interlace {
namespace attention {
namespace avx2 {
namespace {
#include "attention_cpu/vector/simd.inc"
#include "attention_cpu/mask_tile.inc"
#include "attention_cpu/vector/panel.inc"
#include "attention_cpu/vector/pieces.inc"
#include "attention_cpu/vector/forward.inc"
#include "attention_cpu/vector/backward.inc"
}  // namespace
}  // namespace avx2
#pragma GCC pop_options

extern const Kernels avx2_kernels{"avx2", avx2::mask_tile, avx2::forward, avx2::backward};

}  // namespace attention
}  // namespace interlace
#endif
