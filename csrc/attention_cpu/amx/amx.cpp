// The attention kernels for AMX, chosen at run time. bf16 uses tiles. Other types, and values whose head dimension
// differs from that of the keys, use the avx512 code.
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

// Triggered by the intrinsics' own "undefined" operands in GCC 11 to 13 (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")
namespace interlace {
namespace attention {
namespace amx {
namespace {
#include "attention_cpu/vector/simd.inc"
#include "attention_cpu/mask_tile.inc"
#include "attention_cpu/vector/panel.inc"
#include "attention_cpu/vector/pieces.inc"
#include "attention_cpu/amx/tiles.inc"
#include "attention_cpu/amx/walk.inc"
#include "attention_cpu/amx/forward.inc"
#include "attention_cpu/amx/backward.inc"

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
