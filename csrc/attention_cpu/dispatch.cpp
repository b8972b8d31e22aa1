#include <cstdlib>
#include <cstring>

#include "attention_cpu/problem.h"

namespace interlace {
namespace attention {

namespace {
const Kernels &choose() {
    const char *asked = std::getenv("INTERLACE_CPU_ISA");
    const auto allowed = [&](const char *name) { return !asked || !*asked || std::strcmp(asked, name) == 0; };
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (allowed("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return avx512_kernels;
    if ((allowed("avx512") || allowed("avx2")) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return avx2_kernels;
#endif
    return baseline_kernels;
}
}  // namespace

const Kernels &kernels() {
    static const Kernels &chosen = choose();
    return chosen;
}

}  // namespace attention
}  // namespace interlace
