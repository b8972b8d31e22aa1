#include "comm/fingerprint.h"

#include <cstring>

namespace interlace {

namespace {

constexpr int LANES = 4;  // independent chains: a product takes several cycles, and one can begin in each
constexpr size_t BLOCK = LANES * 2 * sizeof(uint64_t);

// Odd numbers without a pattern (the fractional parts of the square roots of 2, 3, 5 and 7).
constexpr uint64_t KEYS[LANES] = {0x6a09e667f3bcc909, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1};

// Both halves of a product of 128 bits: every bit of the result depends on every bit of both factors.
uint64_t fold(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

void absorb(uint64_t (&lanes)[LANES], const unsigned char *block) {
    uint64_t words[2 * LANES];
    std::memcpy(words, block, BLOCK);
    for (int i = 0; i < LANES; ++i) lanes[i] = fold(words[2 * i] ^ KEYS[i], words[2 * i + 1] ^ lanes[i]);
}

}  // namespace

uint64_t fingerprint(const void *data, size_t size, uint64_t seed) {
    const auto *bytes = static_cast<const unsigned char *>(data);
    uint64_t lanes[LANES];
    for (int i = 0; i < LANES; ++i) lanes[i] = fold(seed ^ KEYS[i], KEYS[(i + 1) % LANES]);
    const size_t whole = size - size % BLOCK;
    for (size_t at = 0; at < whole; at += BLOCK) absorb(lanes, bytes + at);
    if (whole < size) {
        unsigned char last[BLOCK] = {};
        std::memcpy(last, bytes + whole, size - whole);
        absorb(lanes, last);
    }
    uint64_t result = static_cast<uint64_t>(size) ^ seed;
    for (int i = 0; i < LANES; ++i) result = fold(result ^ KEYS[i], lanes[i] ^ KEYS[(i + 2) % LANES]);
    return result;
}

}  // namespace interlace
