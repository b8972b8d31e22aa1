// The attention kernels for AMX: bf16 on tiles, other types and values of another head dimension than the keys' as for
// avx512. Chosen at run time, as those are.
#include "attention_cpu/problem.h"

#if defined(INTERLACE_AMX)
#include <cmath>
#include <cstdint>
#include <immintrin.h>

#include "attention_cpu/tiles.h"
#include "attention_cpu/workspace.h"
#include "common/parallel.h"

#define VECTOR_BYTES 64
#define MAX_N 4
#define THIS_KERNELS amx_kernels

// The intrinsics' own "undefined" operands set it off in GCC 11 to 13 (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")
namespace interlace {
namespace attention {
namespace amx {
namespace {
#include "attention_cpu/simd.inc"
#include "attention_cpu/mask_tile.inc"
#include "attention_cpu/panel.inc"
#include "attention_cpu/pieces.inc"
#include "attention_cpu/amx_tiles.inc"
#include "attention_cpu/amx_walk.inc"
#include "attention_cpu/amx_forward.inc"
#include "attention_cpu/amx_backward.inc"

bool suits_tiles(const Problem &p) { return p.dtype == Dtype::bf16 && p.value_dim == p.head_dim; }

void forward(const Problem &p, const ForwardResult &result) {
    if (!suits_tiles(p)) return avx512_kernels.forward(p, result);
    forward_on_tiles(p, result);
}

void backward(const Problem &p, const BackwardInput &in) {
    if (!suits_tiles(p)) return avx512_kernels.backward(p, in);
    backward_on_tiles(p, in);
}
}  // namespace
}  // namespace amx
#pragma GCC pop_options

extern const Kernels amx_kernels{"amx", amx::mask_tile, amx::forward, amx::backward};

}  // namespace attention
}  // namespace interlace
#endif
