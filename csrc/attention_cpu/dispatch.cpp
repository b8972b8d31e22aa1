#include <cstdlib>
#include <stdexcept>
#include <string>

#include "attention_cpu/problem.h"

namespace interlace {
namespace attention {

namespace {
const Kernels &choose() {
    const char *value = std::getenv("INTERLACE_CPU_ISA");
    const std::string asked = value && *value ? value : "avx512";
    if (asked != "avx512" && asked != "avx2" && asked != "baseline")
        throw std::invalid_argument("INTERLACE_CPU_ISA is \"" + asked + "\"; it must be avx512, avx2 or baseline");
#if defined(INTERLACE_WIDE_VECTORS)
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (asked == "avx512" && avx512) return avx512_kernels;
    if (asked != "baseline" && avx2) return avx2_kernels;
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
