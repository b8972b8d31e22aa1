#include "comm/exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <stdexcept>

namespace interlace {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t PAGE = 4096;
constexpr double LONGEST =
    1.0;  // seconds after which `until` returns though things move: its caller notes that they do

// A place in a region: the top bit, 15 bits of the region's number, 48 bits of the offset. Smaller numbers are slots.
constexpr uint64_t IN_REGION = uint64_t{1} << 63;
constexpr int OFFSET_BITS = 48;

int number_of(uint64_t place) { return static_cast<int>((place & ~IN_REGION) >> OFFSET_BITS); }
uint64_t offset_of(uint64_t place) { return place & ((uint64_t{1} << OFFSET_BITS) - 1); }

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Processor time of this thread, in nanoseconds.
uint64_t processor_time() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}

uint64_t load(const uint64_t &word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
void store(uint64_t &word, uint64_t value) { __atomic_store_n(&word, value, __ATOMIC_RELEASE); }

// CUmemcpyAttributes: accessed in stream order, by copy engines instead of a kernel.
struct CopyAttributes {
    int source_access_order = 1;
    int source_hint[2] = {0, 0}, destination_hint[2] = {0, 0};
    unsigned flags = 1;
};

size_t slots_at(int world) {
    const size_t end = sizeof(RankPage) * world + sizeof(PairPage) * world * world;
    return (end + PAGE - 1) / PAGE * PAGE;
}

}  // namespace

Exchange::Exchange(unsigned char *memory, int rank, int world, size_t slot_bytes)
    : memory_(memory), rank_(rank), world_(world), slot_bytes_(slot_bytes), sent_(world), took_(world),
      slot_readers_(SLOTS), takes_(world), unheard_(world), to_ring_(world), direct_(world) {
    for (int step = 1; step < world; ++step) peers_.push_back((rank + step) % world);
}

size_t Exchange::size(int world, size_t slot_bytes) { return slots_at(world) + slot_bytes * SLOTS * world; }

RankPage &Exchange::page(int rank) const { return reinterpret_cast<RankPage *>(memory_)[rank]; }

PairPage &Exchange::pair(int sender, int receiver) const {
    auto *pairs = reinterpret_cast<PairPage *>(memory_ + sizeof(RankPage) * world_);
    return pairs[sender * world_ + receiver];
}

unsigned char *Exchange::slot(int rank, int slot) const {
    if (on_device_) return reinterpret_cast<unsigned char *>(device_.windows[rank]) + slot * slot_bytes_;
    return memory_ + slots_at(world_) + (static_cast<size_t>(rank) * SLOTS + slot) * slot_bytes_;
}

// ---------------------------------------------------------------------- one batch

void Exchange::begin(uint64_t sequence, const std::vector<std::string> &headers,
                     const std::vector<std::string> &expected, const std::vector<Tensor> &outgoing,
                     const std::vector<Tensor> &incoming) {
    sequence_ = sequence;
    expected_ = expected;
    for (int peer : peers_) {
        PairPage &out = pair(rank_, peer);
        std::memcpy(out.header, headers[peer].data(), HEADER_BYTES);
        std::memcpy(out.header + SEQUENCE_AT, &sequence, sizeof sequence);
        std::memcpy(&expected_[peer][SEQUENCE_AT], &sequence, sizeof sequence);
        store(out.headers, sequence + 1);
        to_ring_[peer] = unheard_[peer] = 1;
        direct_[peer] = 0;
        takes_[peer].clear();
    }
    for (const Tensor &tensor : incoming)
        if (tensor.bytes) takes_[tensor.peer].push_back(tensor);
    stage(outgoing);
    direct_only_ =
        !gives_.empty() && std::all_of(gives_.begin(), gives_.end(), [](const Give &give) { return give.place != 0; });
    all_taken_ = region_ready_ = false;
    halt_ = Status::DONE;
}

// The pieces in the order in which they are published. A receiver gets its tensors in the order of its copies. The
// first pieces of all receivers come first, round-robin. Pieces of the same memory are merged into one for several
// readers.
void Exchange::stage(const std::vector<Tensor> &outgoing) {
    gives_.clear();
    std::vector<size_t> count(world_);
    std::vector<std::vector<Give>> rounds;
    for (const Tensor &tensor : outgoing) {
        const size_t turn = count[tensor.peer]++;
        if (turn == rounds.size()) rounds.emplace_back();
        if (!tensor.bytes) continue;
        std::vector<Give> &round = rounds[turn];
        auto same = std::find_if(round.begin(), round.end(), [&](const Give &give) {
            return give.address == tensor.address && give.bytes == tensor.bytes;
        });
        if (same == round.end())
            round.push_back({tensor.address, tensor.bytes, {tensor.peer}, place_of(tensor)});
        else
            same->readers.push_back(tensor.peer);
    }
    for (const std::vector<Give> &round : rounds) {
        bool more = true;
        for (uint64_t offset = 0; more; offset += slot_bytes_) {
            more = false;
            for (const Give &give : round) {
                if (give.place) {
                    if (offset == 0) gives_.push_back(give);
                } else if (offset < give.bytes) {
                    const uint64_t bytes = std::min<uint64_t>(slot_bytes_, give.bytes - offset);
                    gives_.push_back({give.address + offset, bytes, give.readers, 0});
                    more = true;
                }
            }
        }
    }
}

uint64_t Exchange::place_of(const Tensor &tensor) const {
    for (const Own &own : own_)
        if (tensor.address >= own.address && tensor.address + tensor.bytes <= own.address + own.bytes)
            return IN_REGION | static_cast<uint64_t>(own.number) << OFFSET_BITS | (tensor.address - own.address);
    return 0;
}

Status Exchange::advance(double seconds) {
    return until(
        seconds,
        [&] {
            bool moved = give();
            ring();
            for (int peer : peers_) moved |= hear(peer) | take(peer);
            ring();
            return moved;
        },
        [&] {
            const auto missing = [&](int peer) { return unheard_[peer] || !takes_[peer].empty(); };
            if (!all_taken_) {
                if (!gives_.empty() || std::any_of(peers_.begin(), peers_.end(), missing)) return false;
                if (before) before("taken");
                all_taken_ = true;
            }
            if (!std::all_of(peers_.begin(), peers_.end(), [&](int peer) { return has_all(peer); })) return false;
            for (int peer : peers_)  // from here on the memory that they read may be overwritten
                if (on_device_ && direct_[peer])
                    check(device_.wait(device_.stream, reinterpret_cast<void *>(read_event(peer, rank_, SLOTS)), 0),
                          "cuStreamWaitEvent");
            return true;
        },
        [&] { return lacking(); });
}

Status Exchange::await(int peer, uint64_t count, double seconds) {
    const PairPage &in = pair(peer, rank_);
    return until(
        seconds, [] { return false; }, [&] { return load(in.signals) >= count; },
        [&] { return std::vector<int>{peer}; });
}

void Exchange::signal(int peer) {
    __atomic_add_fetch(&pair(rank_, peer).signals, 1, __ATOMIC_ACQ_REL);
    bell_ring(page(peer).bell);
}

template <typename Advance, typename Done, typename Lacks>
Status Exchange::until(double seconds, Advance advance, Done done, Lacks lacks) {
    Bell &bell = page(rank_).bell;
    const auto start = Clock::now();
    auto moved = start;
    halt_ = Status::DONE;
    while (true) {
        const uint64_t seen = bell_count(bell);
        if (advance()) {
            ++moves_;
            moved = Clock::now();
            if (std::chrono::duration<double>(moved - start).count() > LONGEST) return Status::WAITING;
            continue;
        }
        if (halt_ != Status::DONE) return halt_;
        if (done()) return Status::DONE;
        if (stopped(lacks())) return Status::STOPPED;
        const double left = seconds - since(moved);
        if (left <= 0) return Status::WAITING;
        const uint64_t start_of_wait = measures ? processor_time() : 0;
        bell_wait(bell, seen, left, spins);
        if (measures) waited += processor_time() - start_of_wait;
    }
}

// Publishes the next piece if there is room for it.
bool Exchange::give() {
    if (gives_.empty()) return false;
    const Give &next = gives_.front();
    for (int peer : next.readers)
        if (sent_[peer] - load(pair(rank_, peer).taken) >= PLACES) return false;
    uint64_t place = next.place;
    if (place) {
        if (on_device_ && !region_ready_) {
            check(device_.record(reinterpret_cast<void *>(ready_event(rank_, SLOTS)), device_.stream), "cuEventRecord");
            region_ready_ = true;
        }
    } else {
        const int free = free_slot();
        if (free < 0) return false;
        if (before) before("stage");
        copy_in(free, next);
        slot_readers_[free].clear();
        for (int peer : next.readers) slot_readers_[free].emplace_back(peer, sent_[peer] + 1);
        place = static_cast<uint64_t>(free);
    }
    for (int peer : next.readers) {
        PairPage &out = pair(rank_, peer);
        store(out.places[sent_[peer] % PLACES], place);
        store(out.pieces, ++sent_[peer]);
        to_ring_[peer] = 1;
        direct_[peer] |= next.place != 0;
    }
    gives_.pop_front();
    return true;
}

// Reads the header of a peer, if it has arrived.
bool Exchange::hear(int peer) {
    if (!unheard_[peer] || load(pair(peer, rank_).headers) <= sequence_) return false;
    if (std::memcmp(pair(peer, rank_).header, expected_[peer].data(), HEADER_BYTES) != 0) {
        halt_ = Status::HEADER, peer_ = peer;
        return false;
    }
    unheard_[peer] = 0;
    store(pair(peer, rank_).heard, sequence_ + 1);
    to_ring_[peer] = 1;
    return true;
}

// Takes the next piece of a peer, if it has arrived.
bool Exchange::take(int peer) {
    if (unheard_[peer] || takes_[peer].empty()) return false;
    PairPage &in = pair(peer, rank_);
    if (load(in.pieces) <= took_[peer]) return false;
    const uint64_t place = load(in.places[took_[peer] % PLACES]);
    Tensor &next = takes_[peer].front();
    Tensor piece = next;
    if (place < SLOTS) {
        piece.bytes = std::min<uint64_t>(slot_bytes_, next.bytes);
    } else {
        const int number = number_of(place);
        const auto mapped = mapped_.find({peer, number});
        const bool known = mapped != mapped_.end();
        const bool damaged =
            !(place & IN_REGION) || number >= REGIONS ||
            (known ? offset_of(place) + next.bytes > mapped->second.bytes : !load(page(peer).regions[number].size));
        if (damaged || !known) {
            halt_ = damaged ? Status::DAMAGED : Status::MAP;
            peer_ = peer, number_ = damaged ? place : static_cast<uint64_t>(number);
            return false;
        }
    }
    if (before) before("take");
    copy_out(peer, place, piece);
    next.address += piece.bytes;
    next.bytes -= piece.bytes;
    if (!next.bytes) takes_[peer].pop_front();
    store(in.taken, ++took_[peer]);
    to_ring_[peer] = 1;
    return true;
}

int Exchange::free_slot() const {
    for (int slot = 0; slot < SLOTS; ++slot) {
        const auto &readers = slot_readers_[slot];
        if (std::all_of(readers.begin(), readers.end(),
                        [&](const auto &reader) { return load(pair(rank_, reader.first).taken) >= reader.second; }))
            return slot;
    }
    return -1;
}

void Exchange::copy_in(int number, const Give &give) {
    if (!on_device_) {
        if (!measures) std::memcpy(slot(rank_, number), reinterpret_cast<void *>(give.address), give.bytes);
        return;
    }
    for (const auto &reader : slot_readers_[number])  // they have counted it as read, so their events are recorded
        check(device_.wait(device_.stream, reinterpret_cast<void *>(read_event(reader.first, rank_, number)), 0),
              "cuStreamWaitEvent");
    CopyAttributes attributes;
    uint64_t to = reinterpret_cast<uint64_t>(slot(rank_, number)), from = give.address;
    size_t bytes = give.bytes, first = 0;
    check(device_.copy_batch(&to, &from, &bytes, 1, &attributes, &first, 1, device_.stream), "cuMemcpyBatchAsync");
    check(device_.record(reinterpret_cast<void *>(ready_event(rank_, number)), device_.stream), "cuEventRecord");
}

void Exchange::copy_out(int peer, uint64_t place, const Tensor &piece) {
    const bool staged = place < SLOTS;
    uint64_t to = piece.address;
    uint64_t from = staged ? reinterpret_cast<uint64_t>(slot(peer, static_cast<int>(place)))
                           : mapped_.at({peer, number_of(place)}).address + offset_of(place);
    if (!on_device_) {
        if (!measures) std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), piece.bytes);
        return;
    }
    const int event = staged ? static_cast<int>(place) : SLOTS;
    check(device_.wait(device_.stream, reinterpret_cast<void *>(ready_event(peer, event)), 0), "cuStreamWaitEvent");
    CopyAttributes attributes;
    size_t bytes = piece.bytes, first = 0;
    check(device_.copy_batch(&to, &from, &bytes, 1, &attributes, &first, 1, device_.stream), "cuMemcpyBatchAsync");
    check(device_.record(reinterpret_cast<void *>(read_event(rank_, peer, event)), device_.stream), "cuEventRecord");
}

// True if a peer has read every header and piece that was published to it.
bool Exchange::has_all(int peer) const {
    const PairPage &out = pair(rank_, peer);
    return load(out.heard) >= out.headers && load(out.taken) >= sent_[peer];
}

std::vector<int> Exchange::lacking() const {
    std::vector<int> found;
    for (int peer : peers_)
        if (unheard_[peer] || !takes_[peer].empty() || ((all_taken_ || !gives_.empty()) && !has_all(peer)))
            found.push_back(peer);
    return found;
}

bool Exchange::stopped(const std::vector<int> &waited) const {
    if (state(rank_) == State::CLOSED) return true;
    return std::any_of(peers_.begin(), peers_.end(), [&](int peer) { return state(peer) == State::FAILED; }) ||
           std::any_of(waited.begin(), waited.end(), [&](int peer) { return state(peer) == State::CLOSED; });
}

void Exchange::ring() {
    for (int peer : peers_) {
        if (to_ring_[peer]) bell_ring(page(peer).bell);
        to_ring_[peer] = 0;
    }
}

void Exchange::check(int result, const char *function) const {
    if (result != 0) throw std::runtime_error(std::string(function) + ": CUDA error " + std::to_string(result));
}

// ---------------------------------------------------------------------- shared state of ranks

State Exchange::state(int rank) const { return static_cast<State>(load(page(rank).state)); }

void Exchange::leave(State state, const std::string &reason) {
    RankPage &own = page(rank_);
    if (this->state(rank_) == State::FAILED) return;
    std::memset(own.reason, 0, REASON_BYTES);
    std::memcpy(own.reason, reason.data(), std::min(reason.size(), REASON_BYTES));
    store(own.state, static_cast<uint64_t>(state));
    for (int rank = 0; rank < world_; ++rank) bell_ring(page(rank).bell);  // this one too: its threads may wait
}

std::string Exchange::reason(int rank) const {
    const auto *text = reinterpret_cast<const char *>(page(rank).reason);
    return std::string(text, strnlen(text, REASON_BYTES));
}

std::string Exchange::header_from(int peer) const {
    return std::string(reinterpret_cast<const char *>(pair(peer, rank_).header), HEADER_BYTES);
}

void Exchange::add_region(int number, uint64_t address, uint64_t bytes, const std::string &handle) {
    Region &region = page(rank_).regions[number];
    std::memcpy(region.handle, handle.data(), std::min(handle.size(), HANDLE_BYTES));
    store(region.size, bytes);
    own_.push_back({address, bytes, number});
}

std::string Exchange::handle_of(int rank, int number, uint64_t &bytes) const {
    const Region &region = page(rank).regions[number];
    bytes = load(region.size);
    return std::string(reinterpret_cast<const char *>(region.handle), HANDLE_BYTES);
}

void Exchange::map_region(int rank, int number, uint64_t address, uint64_t bytes) {
    mapped_[{rank, number}] = {address, bytes};
}

std::vector<std::pair<int, int>> Exchange::readers() const {
    std::vector<std::pair<int, int>> found;
    for (int slot = 0; slot < SLOTS; ++slot)
        for (const auto &reader : slot_readers_[slot]) found.emplace_back(slot, reader.first);
    for (int peer : peers_)
        if (direct_[peer]) found.emplace_back(SLOTS, peer);
    return found;
}

}  // namespace interlace
