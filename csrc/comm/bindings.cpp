#include "comm/fingerprint.h"
#include "comm/flags.h"

#include <cmath>

#include "common/arrays.h"

namespace interlace {

namespace {

// The address of one counter. The array is used in place: it lies in memory that other processes map.
uint64_t *flag_at(const py::array &flags, int64_t index) {
    if (!flags.dtype().equal(py::dtype::of<uint64_t>()))
        throw py::value_error("flags must be an array of uint64, got dtype " +
                              py::str(flags.dtype()).cast<std::string>());
    if (flags.ndim() != 1 || !(flags.flags() & py::array::c_style))
        throw py::value_error("flags must have one dimension and be contiguous");
    if (!flags.writeable()) throw py::value_error("flags must be writable");
    if (reinterpret_cast<uintptr_t>(flags.data()) % sizeof(uint64_t))
        throw py::value_error("flags must be aligned to 8 bytes");
    if (index < 0 || index >= flags.size())
        throw py::value_error("index " + std::to_string(index) + " is outside of " + std::to_string(flags.size()) +
                              " flags");
    return static_cast<uint64_t *>(const_cast<void *>(flags.data())) + index;
}

uint64_t load(const py::array &flags, int64_t index) { return flag_load(flag_at(flags, index)); }

void store(const py::array &flags, int64_t index, uint64_t value) { flag_store(flag_at(flags, index), value); }

uint64_t add(const py::array &flags, int64_t index, uint64_t amount) { return flag_add(flag_at(flags, index), amount); }

bool wait_at_least(const py::array &flags, int64_t index, uint64_t value, double timeout) {
    const uint64_t *flag = flag_at(flags, index);
    if (!std::isfinite(timeout) || timeout < 0)
        throw py::value_error("timeout is " + format_number(timeout) + ": it must be finite and not negative");
    const py::gil_scoped_release release;  // `flags` keeps the memory mapped: the caller holds a reference
    return flag_wait_at_least(flag, value, timeout);
}

uint64_t fingerprint_of(const py::array &data, uint64_t seed) {
    if (!(data.flags() & py::array::c_style)) throw py::value_error("data must be contiguous");
    const auto size = static_cast<size_t>(data.nbytes());
    const void *start = data.data();
    const py::gil_scoped_release release;  // `data` keeps the memory alive: the caller holds a reference
    return fingerprint(start, size, seed);
}

}  // namespace

void bind_comm(py::module_ &module) {
    module.def("flag_load", &load, py::arg("flags"), py::arg("index"));
    module.def("flag_store", &store, py::arg("flags"), py::arg("index"), py::arg("value"));
    module.def("flag_add", &add, py::arg("flags"), py::arg("index"), py::arg("amount"));
    module.def("flag_wait_at_least", &wait_at_least, py::arg("flags"), py::arg("index"), py::arg("value"),
               py::arg("timeout"));
    module.def("fingerprint", &fingerprint_of, py::arg("data"), py::arg("seed") = 0);
}

}  // namespace interlace
