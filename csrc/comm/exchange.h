// Exchange: one rank's endpoint for batches of copies between processes of one host, through shared memory.
// Independent of Python: one call moves a whole batch.
//
// Each rank owns SLOTS slots. A tensor is sent in pieces of slot size: the owner copies piece p + 1 in while the
// readers copy piece p out. A piece for several readers is copied in once. A tensor in registered memory (a region of
// its owner that the readers have mapped) is not copied in: readers take it from its own place, in one piece.
// Published and taken pieces are counters that only grow, one per pair of ranks and direction. A rank that raises one
// rings the bell of its peer.
//
// On a GPU slots and regions are in device memory. The counters then count enqueued copies. Interprocess events signal
// their completion:
//
//     sender     wait for the events of a slot's last readers; copy a piece in; record "ready"; count it as published
//     receiver   see the count; wait for "ready"; copy the piece out; record "read"; count it as taken
//
// Events are recorded before they are counted, so a wait for one is a wait for that record or a later one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "comm/bell.h"

namespace interlace {

constexpr int SLOTS = 4;
constexpr int PLACES = 16;  // maximum number of pieces of one pair that are published and not taken
constexpr int REGIONS = 64;
constexpr size_t HEADER_BYTES = 1024;
constexpr size_t SEQUENCE_AT = 8;  // offset of the batch number in a header
constexpr size_t REASON_BYTES = 1024;
constexpr size_t HANDLE_BYTES = 64;

enum class State : uint64_t { OPEN = 0, CLOSED = 1, FAILED = 2 };

struct Region {
    uint64_t size;
    unsigned char handle[HANDLE_BYTES];  // data with which peers map it, in the transport's format
};

// Both pages fill whole cache lines, and each line is written by one rank only.
static_assert(sizeof(Bell) == 64, "a cache line");

// Page of one rank, readable by all. The rank writes everything except the bell itself.
struct RankPage {
    Bell bell;
    uint64_t state;
    unsigned char reason[REASON_BYTES];
    Region regions[REGIONS];
    char rest_of_line[56];
};

// Page from one rank to another.
struct PairPage {
    uint64_t headers;  // these three are written by the sender
    uint64_t pieces;
    uint64_t signals;
    char rest_of_first_line[40];
    uint64_t heard;  // these two are written by the receiver
    uint64_t taken;
    char rest_of_second_line[48];
    uint64_t places[PLACES];  // of the n-th piece at n % PLACES: a slot, or a place in a region
    unsigned char header[HEADER_BYTES];
};

// Functions of the CUDA driver by their C signatures (cuda.h of CUDA 13), and the events of all ranks.
struct Device {
    int (*copy_batch)(uint64_t *to, uint64_t *from, size_t *sizes, size_t count, void *attributes, size_t *starts,
                      size_t attribute_count, void *stream);
    int (*record)(void *event, void *stream);
    int (*wait)(void *stream, void *event, unsigned flags);
    void *stream;
    std::vector<uint64_t> windows;  // [world]: addresses of the slots of each rank in this process
    std::vector<uint64_t> ready;    // [world, SLOTS + 1]: recorded by a sender; the last one is for its regions
    std::vector<uint64_t> read;     // [world readers, world senders, SLOTS + 1]
};

struct Tensor {
    int peer;
    uint64_t address, bytes;
};

enum class Status {
    DONE,
    WAITING,  // nothing moved for the given time
    STOPPED,  // a rank that is waited for closed or aborted, any rank aborted, or this one was closed
    HEADER,   // `peer` announced a different header
    MAP,      // map region `number` of `peer`, then continue
    DAMAGED,  // `peer` sent the invalid place `number`
};

class Exchange {
  public:
    Exchange(unsigned char *memory, int rank, int world, size_t slot_bytes);
    static size_t size(int world, size_t slot_bytes);  // of the shared memory

    // Starts a batch. headers, expected: one per peer (the own one is ignored), HEADER_BYTES each without the sequence.
    void begin(uint64_t sequence, const std::vector<std::string> &headers, const std::vector<std::string> &expected,
               const std::vector<Tensor> &outgoing, const std::vector<Tensor> &incoming);
    Status advance(double seconds);                          // until the batch is done
    Status await(int peer, uint64_t count, double seconds);  // until the peer has sent that many signals
    void signal(int peer);

    std::vector<int> lacking() const;  // peers for which the batch waits
    uint64_t moves() const { return moves_; }
    bool direct() const { return direct_only_; }  // true if all outgoing tensors of the last batch were in regions
    int peer() const { return peer_; }            // see Status
    uint64_t number() const { return number_; }

    State state(int rank) const;
    void leave(State state, const std::string &reason);  // notifies all peers
    std::string reason(int rank) const;
    std::string header_from(int peer) const;

    void add_region(int number, uint64_t address, uint64_t bytes, const std::string &handle);  // of this rank
    std::string handle_of(int rank, int number, uint64_t &bytes) const;
    void map_region(int rank, int number, uint64_t address, uint64_t bytes);

    // From now on slots are in device memory; slot_bytes: their size.
    void use_device(Device device, size_t slot_bytes) {
        device_ = std::move(device), slot_bytes_ = slot_bytes, on_device_ = true;
    }
    std::vector<std::pair<int, int>> readers() const;  // (slot, peer): their events tell when slots may be freed

    std::function<void(const char *)> before;  // called before each step ("stage", "take", "taken"); may be empty
    uint64_t spins = SPINS;                    // checks of the bell before this rank sleeps
    bool measures = false;                     // for measuring the driver: no copies are made, and waiting is counted
    uint64_t waited = 0;                       // nanoseconds of processor time, if `measures`

    int rank() const { return rank_; }
    int world() const { return world_; }

  private:
    struct Give {
        uint64_t address, bytes;
        std::vector<int> readers;
        uint64_t place;  // in a region; 0: by a slot
    };
    struct Own {
        uint64_t address, bytes;
        int number;
    };
    struct Mapped {
        uint64_t address, bytes;
    };

    RankPage &page(int rank) const;
    PairPage &pair(int sender, int receiver) const;
    unsigned char *slot(int rank, int slot) const;
    void stage(const std::vector<Tensor> &outgoing);
    uint64_t place_of(const Tensor &tensor) const;
    bool give();
    bool hear(int peer);
    bool take(int peer);
    bool has_all(int peer) const;
    bool stopped(const std::vector<int> &waited) const;
    int free_slot() const;
    void copy_in(int slot, const Give &give);
    void copy_out(int peer, uint64_t place, const Tensor &piece);
    void ring();
    void check(int result, const char *function) const;
    uint64_t ready_event(int sender, int slot) const { return device_.ready[sender * (SLOTS + 1) + slot]; }
    uint64_t read_event(int reader, int sender, int slot) const {
        return device_.read[(reader * world_ + sender) * (SLOTS + 1) + slot];
    }
    template <typename Advance, typename Done, typename Lacks>
    Status until(double seconds, Advance advance, Done done, Lacks lacks);

    unsigned char *memory_;
    int rank_, world_;
    size_t slot_bytes_;
    std::vector<int> peers_;
    std::vector<uint64_t> sent_, took_;
    std::vector<std::vector<std::pair<int, uint64_t>>> slot_readers_;  // (rank, its count once it has read)
    std::vector<Own> own_;
    std::map<std::pair<int, int>, Mapped> mapped_;  // by rank and number
    Device device_{};
    bool on_device_ = false;

    uint64_t sequence_ = 0, moves_ = 0, number_ = 0;
    int peer_ = -1;
    std::vector<std::string> expected_;
    std::deque<Give> gives_;
    std::vector<std::deque<Tensor>> takes_;
    std::vector<char> unheard_, to_ring_, direct_;  // by peer; direct_: reads this rank's regions in this batch
    bool all_taken_ = true, direct_only_ = false, region_ready_ = false;
    Status halt_ = Status::DONE;  // result of a step that the caller must handle
};

}  // namespace interlace
