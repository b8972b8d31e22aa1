#include <pybind11/functional.h>

#include "comm/exchange.h"
#include "comm/fingerprint.h"
#include "common/arrays.h"

namespace interlace {

namespace {

constexpr int64_t MAX_WORLD = 4096;
constexpr int64_t MAX_SLOT = int64_t{1} << 40;

uint64_t fingerprint_of(const py::array &data, uint64_t seed) {
    if (!(data.flags() & py::array::c_style)) throw py::value_error("data must be contiguous");
    const auto size = static_cast<size_t>(data.nbytes());
    const void *start = data.data();
    const py::gil_scoped_release release;  // `data` keeps the memory alive: the caller holds a reference
    return fingerprint(start, size, seed);
}

size_t exchange_bytes(int64_t world, int64_t slot_bytes) {
    checked_count(world, "world", 1, MAX_WORLD);
    checked_count(slot_bytes, "slot_bytes", 1, MAX_SLOT);
    return Exchange::size(static_cast<int>(world), static_cast<size_t>(slot_bytes));
}

// An Exchange that keeps its memory mapped. Ranks are checked; addresses of tensors are the caller's responsibility.
class BoundExchange : public Exchange {
  public:
    BoundExchange(const py::array &memory, int64_t rank, int64_t world, int64_t slot_bytes)
        : Exchange(start_of(memory, rank, world, slot_bytes), static_cast<int>(rank), static_cast<int>(world),
                   static_cast<size_t>(slot_bytes)),
          memory_(memory) {}

    int checked(int64_t rank) const { return static_cast<int>(checked_count(rank, "rank", 0, world() - 1)); }
    static int numbered(int64_t number) { return static_cast<int>(checked_count(number, "number", 0, REGIONS - 1)); }

  private:
    static unsigned char *start_of(const py::array &memory, int64_t rank, int64_t world, int64_t slot_bytes) {
        const size_t bytes = exchange_bytes(world, slot_bytes);
        checked_count(rank, "rank", 0, world - 1);
        if (!memory.dtype().equal(py::dtype::of<uint8_t>()) || memory.ndim() != 1 ||
            !(memory.flags() & py::array::c_style) || !memory.writeable())
            throw py::value_error("memory must be a contiguous writable array of uint8 of one dimension");
        if (static_cast<size_t>(memory.nbytes()) != bytes)
            throw py::value_error("memory has " + std::to_string(memory.nbytes()) + " bytes: " + std::to_string(bytes) +
                                  " are needed");
        if (reinterpret_cast<uintptr_t>(memory.data()) % alignof(RankPage))
            throw py::value_error("memory must be aligned to " + std::to_string(alignof(RankPage)) + " bytes");
        return static_cast<unsigned char *>(const_cast<void *>(memory.data()));
    }

    py::array memory_;
};

using Triples = std::vector<std::tuple<int64_t, uint64_t, uint64_t>>;

std::vector<Tensor> tensors_of(const BoundExchange &exchange, const Triples &copies) {
    std::vector<Tensor> found;
    found.reserve(copies.size());
    for (const auto &[peer, address, bytes] : copies) {
        if (exchange.checked(peer) == exchange.rank()) throw py::value_error("a copy is from or to this rank itself");
        found.push_back({static_cast<int>(peer), address, bytes});
    }
    return found;
}

std::vector<std::string> headers_of(const BoundExchange &exchange, const std::vector<py::bytes> &headers) {
    if (static_cast<int>(headers.size()) != exchange.world()) throw py::value_error("a header for each rank is needed");
    std::vector<std::string> found;
    found.reserve(headers.size());
    for (int rank = 0; rank < exchange.world(); ++rank) {
        found.emplace_back(headers[rank]);
        if (rank != exchange.rank() && found.back().size() != HEADER_BYTES)
            throw py::value_error("a header has " + std::to_string(HEADER_BYTES) + " bytes");
    }
    return found;
}

double checked_seconds(double seconds) {
    if (!std::isfinite(seconds) || seconds < 0)
        throw py::value_error("seconds is " + format_number(seconds) + ": it must be finite and not negative");
    return seconds;
}

void use_device(BoundExchange &exchange, const std::vector<uint64_t> &functions, uint64_t stream, int64_t slot_bytes,
                const std::vector<uint64_t> &windows, const std::vector<uint64_t> &ready,
                const std::vector<uint64_t> &read) {
    const auto world = static_cast<size_t>(exchange.world());
    checked_count(slot_bytes, "slot_bytes", 1, MAX_SLOT);
    if (functions.size() != 3 || windows.size() != world || ready.size() != world * (SLOTS + 1) ||
        read.size() != world * world * (SLOTS + 1))
        throw py::value_error("3 functions, a window of each rank and the events of all slots are needed");
    Device device;
    device.copy_batch = reinterpret_cast<decltype(device.copy_batch)>(functions[0]);
    device.record = reinterpret_cast<decltype(device.record)>(functions[1]);
    device.wait = reinterpret_cast<decltype(device.wait)>(functions[2]);
    device.stream = reinterpret_cast<void *>(stream);
    device.windows = windows, device.ready = ready, device.read = read;
    exchange.use_device(std::move(device), static_cast<size_t>(slot_bytes));
}

int run(BoundExchange &exchange, uint64_t sequence, const std::vector<py::bytes> &headers,
        const std::vector<py::bytes> &expected, const Triples &outgoing, const Triples &incoming,
        const std::function<void(const char *)> &before, double seconds) {
    const auto sent = headers_of(exchange, headers), wanted = headers_of(exchange, expected);
    const auto gives = tensors_of(exchange, outgoing), takes = tensors_of(exchange, incoming);
    checked_seconds(seconds);
    const py::gil_scoped_release release;
    exchange.before = before;  // calls to it take the GIL
    exchange.begin(sequence, sent, wanted, gives, takes);
    return static_cast<int>(exchange.advance(seconds));
}

int advance(BoundExchange &exchange, double seconds) {
    checked_seconds(seconds);
    const py::gil_scoped_release release;
    return static_cast<int>(exchange.advance(seconds));
}

int await(BoundExchange &exchange, int64_t peer, uint64_t count, double seconds) {
    const int from = exchange.checked(peer);
    checked_seconds(seconds);
    const py::gil_scoped_release release;
    return static_cast<int>(exchange.await(from, count, seconds));
}

void bind_exchange(py::module_ &module) {
    py::class_<BoundExchange> bound(module, "Exchange");
    // Integers, since they compare faster than a py::enum_.
    for (const auto &[name, status] : {std::pair{"DONE", Status::DONE},
                                       {"WAITING", Status::WAITING},
                                       {"STOPPED", Status::STOPPED},
                                       {"HEADER", Status::HEADER},
                                       {"MAP", Status::MAP},
                                       {"DAMAGED", Status::DAMAGED}})
        bound.attr(name) = static_cast<int>(status);
    for (const auto &[name, state] :
         {std::pair{"OPEN", State::OPEN}, {"CLOSED", State::CLOSED}, {"FAILED", State::FAILED}})
        bound.attr(name) = static_cast<int>(state);
    bound.attr("SLOTS") = SLOTS;
    bound.attr("REGIONS") = REGIONS;
    bound.def(py::init<const py::array &, int64_t, int64_t, int64_t>(), py::arg("memory"), py::arg("rank"),
              py::arg("world"), py::arg("slot_bytes"));
    bound.def_static("size", &exchange_bytes, py::arg("world"), py::arg("slot_bytes"));
    bound.def("run", &run, py::arg("sequence"), py::arg("headers"), py::arg("expected"), py::arg("outgoing"),
              py::arg("incoming"), py::arg("before"), py::arg("seconds"));
    bound.def("advance", &advance, py::arg("seconds"));
    bound.def("wait", &await, py::arg("peer"), py::arg("count"), py::arg("seconds"));
    bound.def("signal", [](BoundExchange &self, int64_t peer) { self.signal(self.checked(peer)); }, py::arg("peer"));
    bound.def("lacking", &BoundExchange::lacking);
    bound.def_property_readonly("moves", &BoundExchange::moves);
    bound.def_property_readonly("direct", &BoundExchange::direct);
    bound.def_property_readonly("peer", &BoundExchange::peer);
    bound.def_property_readonly("number", &BoundExchange::number);
    bound.def_readwrite("spins", &BoundExchange::spins);
    bound.def_readwrite("measures", &BoundExchange::measures);
    bound.def_readonly("waited", &BoundExchange::waited);
    bound.def(
        "state",
        [](const BoundExchange &self, int64_t rank) { return static_cast<int>(self.state(self.checked(rank))); },
        py::arg("rank"));
    bound.def(
        "leave",
        [](BoundExchange &self, int64_t state, const py::bytes &reason) {
            checked_count(state, "state", 0, static_cast<int64_t>(State::FAILED));
            self.leave(static_cast<State>(state), reason);
        },
        py::arg("state"), py::arg("reason"));
    bound.def(
        "reason", [](const BoundExchange &self, int64_t rank) { return py::bytes(self.reason(self.checked(rank))); },
        py::arg("rank"));
    bound.def(
        "header_from",
        [](const BoundExchange &self, int64_t peer) { return py::bytes(self.header_from(self.checked(peer))); },
        py::arg("peer"));
    bound.def(
        "add_region",
        [](BoundExchange &self, int64_t number, uint64_t address, uint64_t bytes, const py::bytes &handle) {
            self.add_region(BoundExchange::numbered(number), address, bytes, handle);
        },
        py::arg("number"), py::arg("address"), py::arg("bytes"), py::arg("handle"));
    bound.def(
        "region_of",
        [](const BoundExchange &self, int64_t rank, int64_t number) {
            uint64_t bytes = 0;
            const std::string handle = self.handle_of(self.checked(rank), BoundExchange::numbered(number), bytes);
            return std::make_pair(bytes, py::bytes(handle));
        },
        py::arg("rank"), py::arg("number"));
    bound.def(
        "map_region",
        [](BoundExchange &self, int64_t rank, int64_t number, uint64_t address, uint64_t bytes) {
            self.map_region(self.checked(rank), BoundExchange::numbered(number), address, bytes);
        },
        py::arg("rank"), py::arg("number"), py::arg("address"), py::arg("bytes"));
    bound.def("use_device", &use_device, py::arg("functions"), py::arg("stream"), py::arg("slot_bytes"),
              py::arg("windows"), py::arg("ready"), py::arg("read"));
    bound.def("readers", &BoundExchange::readers);
}

}  // namespace

void bind_comm(py::module_ &module) {
    bind_exchange(module);
    module.def("fingerprint", &fingerprint_of, py::arg("data"), py::arg("seed") = 0);
}

}  // namespace interlace
