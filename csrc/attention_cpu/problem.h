// Input of the attention kernels: raw pointers, whose sizes and block lists are checked in bindings.cpp. Also the table
// of functions that each instruction set provides. Independent of Python.
#pragma once

#include <cstdint>

// Functions for other instruction sets than the compiled one use GCC's target pragma, which Clang lacks. AMX also needs
// GCC 11, and Linux for the permission.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define INTERLACE_WIDE_VECTORS
#if defined(__linux__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>)
#define INTERLACE_AMX
#endif
#endif
#endif

namespace interlace {
namespace attention {

// Columns (queries) of a panel: scores are computed for this many queries at a time. Keys are the rows of the tile.
// Visibility of one key in a panel is one 64-bit word.
constexpr int PANEL = 64;

// Element types of q, k, v, out and their gradients. bf16 and fp16 are computed in fp32.
enum class Dtype { f32, f64, bf16, f16 };

// The fields of the mask rule (see masks/rule.py) for one side, [batch, length] each. Queries that see nothing and keys
// that no query sees have a negative doc (block_lists.h). Their rows are excluded from the computation.
struct Tokens {
    const int64_t *bits;
    const int32_t *doc, *span, *pos, *window;  // window: queries only
    int64_t length;

    Tokens at(int64_t b) const {
        const int64_t o = b * length;
        return {bits + o, doc + o, span + o, pos + o, window ? window + o : nullptr, length};
    }
};

// [batch, heads, tokens, columns] with unit stride along the columns; strides in elements.
struct Matrix {
    const void *data;
    int64_t stride_b, stride_h, stride_t;
};

// head_dim is that of q and k, value_dim that of v and out.
struct Problem {
    int64_t batch, q_heads, kv_heads, q_len, k_len, head_dim, value_dim;
    int64_t block, sinks;
    double scale, softcap;  // softcap 0: none
    Dtype dtype;
    int threads;
    Matrix q, k, v;
    Tokens queries, keys;
    // q-major block lists, rows b * q_blocks + i.
    const int32_t *full_ptr, *full_idx, *part_ptr, *part_idx;

    int64_t group() const { return q_heads / kv_heads; }
    int64_t q_blocks() const { return (q_len + block - 1) / block; }
    int64_t panels() const { return (block + PANEL - 1) / PANEL; }  // of one block of queries
    int64_t rows_of(int64_t q_block) const {
        const int64_t left = q_len - q_block * block;
        return left < block ? left : block;
    }
    int64_t keys_of(int64_t k_block) const {
        const int64_t left = k_len - k_block * block;
        return left < block ? left : block;
    }
};

// Contiguous results: out [batch, q_heads, q_len, value_dim], lse [batch, q_heads, q_len] in the computing type.
struct ForwardResult {
    void *out, *lse;
};

struct BackwardInput {
    Matrix dout, out;
    const void *lse, *dlse;  // contiguous [batch, q_heads, q_len]; dlse may be null
    void *dq, *dk, *dv;      // contiguous, shapes of q, k, v
    bool wide;               // dk and dv are in the computing type
};

// Functions of one instruction set.
struct Kernels {
    const char *name;
    // Bits of one block of the mask: words[key * panels + p] has bit c set when query p * PANEL + c sees that key.
    // Queries q[0..rows), keys k[0..columns); bits beyond the rows are 0.
    void (*mask_tile)(const Tokens &q, int64_t rows, const Tokens &k, int64_t columns, int64_t sinks, int64_t panels,
                      uint64_t *words);
    void (*forward)(const Problem &, const ForwardResult &);
    void (*backward)(const Problem &, const BackwardInput &);
};

extern const Kernels baseline_kernels;
#if defined(INTERLACE_WIDE_VECTORS)
extern const Kernels avx2_kernels, avx512_kernels;
#endif
#if defined(INTERLACE_AMX)
extern const Kernels amx_kernels;
#endif

// The widest instruction set of this processor. INTERLACE_CPU_ISA=avx512, avx2 or baseline selects a lower one.
const Kernels &kernels();

}  // namespace attention
}  // namespace interlace
