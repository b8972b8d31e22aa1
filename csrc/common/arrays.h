// Checked conversion between numpy arrays and plain vectors, shared by all bindings. Algorithms use std::vector only,
// so that they compile without Python and run with the GIL released.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace interlace {

namespace py = pybind11;

inline bool is_aligned(const py::array &array) {
    return (array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) != 0;
}

// A C-contiguous array of T with aligned elements: a copy, unless the array already is one.
template <typename T>
using Contiguous = py::array_t<T, py::array::c_style | py::array::forcecast | py::detail::npy_api::NPY_ARRAY_ALIGNED_>;

inline std::string format_number(double value) { return py::str(py::float_(value)).cast<std::string>(); }
inline std::string shape_of(const py::array &array) { return py::str(array.attr("shape")).cast<std::string>(); }
inline std::string dtype_name(const py::array &array) { return py::str(array.dtype()).cast<std::string>(); }

// True if sums in another order, or bounds slightly above them, could be infinite.
inline bool overflows(double total) { return !std::isfinite(total * 1.001); }

// For loops over all items of an argument, which run with the GIL: lets Ctrl-C end them. item: counts from 0.
inline void check_signals(int64_t item) {
    constexpr int64_t EVERY = 1 << 16;
    if (item % EVERY == EVERY - 1 && PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Called before any copy: a broadcast array can have terabytes without using memory.
inline void check_items(const py::array &array, const std::string &name) {
    if (array.size() > INT32_MAX)
        throw py::value_error(name + " has " + std::to_string(array.size()) + " items: more than int32 can index");
}

inline void check_real(const py::array &array, const std::string &name) {
    const char kind = array.dtype().kind();
    if (kind != 'f' && kind != 'i' && kind != 'u')
        throw py::value_error(name + " must be an array of real numbers (float or int), got dtype " +
                              dtype_name(array));
}

// The items of a real array in C order. Integers above 2^53 are rounded.
inline std::vector<double> read_real(const py::array &array, const std::string &name) {
    check_real(array, name);
    check_items(array, name);
    const Contiguous<double> converted(array);
    return std::vector<double>(converted.data(), converted.data() + converted.size());
}

// Throws unless the values are finite and >= 0 and have a finite sum. columns: those of the array (0: one dimension).
inline void check_costs(const std::vector<double> &values, const std::string &name, int64_t columns) {
    double total = 0.0;
    for (size_t i = 0; i < values.size(); ++i) {
        check_signals(static_cast<int64_t>(i));
        total += values[i];
        if (std::isfinite(values[i]) && values[i] >= 0) continue;
        const std::string place =
            columns == 0 ? std::to_string(i) : std::to_string(i / columns) + ", " + std::to_string(i % columns);
        throw py::value_error(name + "[" + place + "] is " + format_number(values[i]) +
                              ": values must be finite and not negative");
    }
    if (overflows(total)) throw py::value_error("the sum of " + name + " overflows: use a larger unit");
}

// A one-dimensional array of real numbers (float or int, not bool) that are finite and >= 0. Throws ValueError that
// names the array and the first offending index.
inline std::vector<double> read_costs(const py::array &array, const std::string &name) {
    check_real(array, name);
    if (array.ndim() != 1)
        throw py::value_error(name + " must have one dimension, got " + std::to_string(array.ndim()));
    if (array.size() == 0) throw py::value_error(name + " is empty: at least one item is needed");
    std::vector<double> values = read_real(array, name);
    check_costs(values, name, 0);
    return values;
}

// A one-dimensional array of integers as int64.
inline Contiguous<int64_t> read_whole(const py::array &array, const std::string &name) {
    const char kind = array.dtype().kind();
    if (kind != 'i' && kind != 'u')
        throw py::value_error(name + " must be an array of integers, got dtype " + dtype_name(array));
    if (array.ndim() != 1)
        throw py::value_error(name + " must have one dimension, got " + std::to_string(array.ndim()));
    check_items(array, name);
    if (kind == 'u' && array.itemsize() == 8) {  // the cast would make large ones negative
        const Contiguous<uint64_t> values(array);
        for (py::ssize_t i = 0; i < values.size(); ++i)
            if (values.data()[i] > INT64_MAX)
                throw py::value_error(name + "[" + std::to_string(i) + "] is " + std::to_string(values.data()[i]) +
                                      ": more than int64 can hold");
    }
    return Contiguous<int64_t>(array);
}

// A one-dimensional array of integers in low .. high, as int64.
inline std::vector<int64_t> read_integers(const py::array &array, const std::string &name, int64_t low, int64_t high) {
    const Contiguous<int64_t> values = read_whole(array, name);
    for (py::ssize_t i = 0; i < values.size(); ++i) {
        check_signals(i);
        if (values.data()[i] < low || values.data()[i] > high)
            throw py::value_error(name + "[" + std::to_string(i) + "] is " + std::to_string(values.data()[i]) +
                                  ": values must lie between " + std::to_string(low) + " and " + std::to_string(high));
    }
    return std::vector<int64_t>(values.data(), values.data() + values.size());
}

inline int64_t checked_count(int64_t value, const std::string &name, int64_t low, int64_t high) {
    if (value < low || value > high)
        throw py::value_error(name + " must lie between " + std::to_string(low) + " and " + std::to_string(high) +
                              ", got " + std::to_string(value));
    return value;
}

// Limits bins to the number of items. Further bins stay empty in every method that uses this, so they need no memory.
inline int64_t useful(int64_t bins, const std::vector<double> &items) {
    return std::min(bins, static_cast<int64_t>(items.size()));
}

// A one-dimensional bool array of the given length.
inline std::vector<char> read_flags(const py::array &array, const std::string &name, size_t length) {
    if (array.dtype().kind() != 'b')
        throw py::value_error(name + " must be an array of bool, got dtype " + dtype_name(array));
    if (array.ndim() != 1 || static_cast<size_t>(array.size()) != length)
        throw py::value_error(name + " must have shape (" + std::to_string(length) + ",), got " + shape_of(array));
    check_items(array, name);
    const Contiguous<bool> converted(array);
    return std::vector<char>(converted.data(), converted.data() + length);
}

template <typename T>
py::array_t<T> to_numpy(const std::vector<T> &values) {
    return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace interlace
