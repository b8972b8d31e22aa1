// EMPTY / PARTIAL / FULL classification of the blocks of a mask, as compressed rows.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_cpu/problem.h"

namespace interlace {
namespace attention {

// Compressed rows: the entries of row r are idx[ptr[r]..ptr[r + 1]), ascending.
struct Lists {
    std::vector<int32_t> ptr, idx;
};

// full_q, part_q: key blocks of each row b * q_blocks + i; full_k, part_k: query blocks of each row b * k_blocks + j.
// q_doc, k_doc [batch, length]: documents as given, but -1 for queries that see nothing and for keys that no query
// sees. This does not change which pairs are visible. It lets kernels exclude such rows from products by one number.
struct BlockLists {
    Lists full_q, part_q, full_k, part_k;
    std::vector<int32_t> q_doc, k_doc;
};

// Exact, in O(q_blocks * k_blocks) time per batch row, with memory only for the lists. Bounds on documents, positions,
// spans and bits per block decide most pairs of blocks. The others are tested token by token. A last block that is
// short is never full. Throws std::length_error if a list would have more than 2^31 - 1 entries.
BlockLists block_lists(const Tokens &queries, const Tokens &keys, int64_t batch, int64_t sinks, int64_t block,
                       int threads);

}  // namespace attention
}  // namespace interlace
