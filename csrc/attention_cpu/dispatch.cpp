#include <cstdlib>
#include <stdexcept>
#include <string>

#include "attention_cpu/problem.h"

#if defined(INTERLACE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace interlace {
namespace attention {

namespace {
#if defined(INTERLACE_AMX)
// True if the processor has tiles, bf16 products on them and bf16 conversions, and Linux allows this process to use
// them. Linux requires permission because it saves the tiles' 8 KiB at context switches.
bool may_use_amx() {
    constexpr long ASK_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM of arch_prctl(2), a state component
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    const bool tiles = edx >> 24 & 1, products = edx >> 22 & 1;
    if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) return false;
    const bool conversions = eax >> 5 & 1;
    return tiles && products && conversions && syscall(SYS_arch_prctl, ASK_PERMISSION, TILE_DATA) == 0;
}
#endif

const Kernels &choose() {
    const char *value = std::getenv("INTERLACE_CPU_ISA");
    const std::string asked = value && *value ? value : "amx";
    if (asked != "amx" && asked != "avx512" && asked != "avx2" && asked != "baseline")
        throw std::invalid_argument("INTERLACE_CPU_ISA is \"" + asked + "\"; it must be amx, avx512, avx2 or baseline");
#if defined(INTERLACE_WIDE_VECTORS)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#if defined(INTERLACE_AMX)
    if (asked == "amx" && avx512 && may_use_amx()) return amx_kernels;
#endif
    if ((asked == "amx" || asked == "avx512") && avx512) return avx512_kernels;
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
