// The attention kernels for any processor: 128-bit vectors, which the compiler lowers to the available instructions.
#include <cmath>
#include <cstdint>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "attention_cpu/problem.h"
#include "attention_cpu/tiles.h"
#include "attention_cpu/workspace.h"
#include "common/parallel.h"

#define VECTOR_BYTES 16
#define MAX_N 2
#define THIS_KERNELS baseline_kernels

namespace interlace {
namespace attention {
namespace baseline {
namespace {
#include "attention_cpu/vector/simd.inc"
#include "attention_cpu/mask_tile.inc"
#include "attention_cpu/vector/panel.inc"
#include "attention_cpu/vector/pieces.inc"
#include "attention_cpu/vector/forward.inc"
#include "attention_cpu/vector/backward.inc"
}  // namespace
}  // namespace baseline

extern const Kernels baseline_kernels{"baseline", baseline::mask_tile, baseline::forward, baseline::backward};

}  // namespace attention
}  // namespace interlace
