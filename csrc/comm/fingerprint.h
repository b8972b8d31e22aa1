// A 64-bit fingerprint of memory, computed as fast as memory is read. Tests whether two ranks hold the same numbers. It
// detects errors, not forgeries: two arrays with the same fingerprint can be constructed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace interlace {

// Fingerprint of `size` bytes, combined with `seed` (for example, the fingerprint of the memory before).
uint64_t fingerprint(const void *data, size_t size, uint64_t seed);

}  // namespace interlace
