// A 64-bit fingerprint of memory, as fast as memory is read: says whether two ranks hold the same numbers. It finds
// mistakes, not forgeries: who wants two arrays of one fingerprint can make them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace interlace {

// Of `size` bytes, and of what `seed` stands for (the fingerprint of what came before, say).
uint64_t fingerprint(const void *data, size_t size, uint64_t seed);

}  // namespace interlace
