// Checked conversion between numpy arrays and plain vectors, shared by every bindings file. Algorithms see std::vector
// only, so that they compile without Python and run with the GIL released.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace interlace {

namespace py = pybind11;

inline std::string format_number(double value) { return py::str(py::float_(value)).cast<std::string>(); }

// A one-dimensional array of real numbers (float or int, not bool) that are finite and >= 0. Integers above 2^53 are
// rounded. Throws ValueError that names the array and the first offending index.
inline std::vector<double> read_costs(const py::array &array, const std::string &name) {
    const char kind = array.dtype().kind();
    if (kind != 'f' && kind != 'i' && kind != 'u')
        throw py::value_error(name + " must be an array of real numbers (float or int), got dtype " +
                              py::str(array.dtype()).cast<std::string>());
    if (array.ndim() != 1)
        throw py::value_error(name + " must have one dimension, got " + std::to_string(array.ndim()));
    if (array.size() == 0) throw py::value_error(name + " is empty: at least one item is needed");
    if (array.size() > INT32_MAX)
        throw py::value_error(name + " has " + std::to_string(array.size()) + " items: more than int32 can index");
    // Bound to a variable: the cast makes a new array unless it is contiguous float64 already.
    const py::array_t<double, py::array::c_style | py::array::forcecast> converted(array);
    std::vector<double> values(converted.data(), converted.data() + converted.size());
    double total = 0.0;
    for (size_t i = 0; i < values.size(); ++i) {
        if (!std::isfinite(values[i]) || values[i] < 0)
            throw py::value_error(name + "[" + std::to_string(i) + "] is " + format_number(values[i]) +
                                  ": values must be finite and not negative");
        total += values[i];
    }
    if (!std::isfinite(total)) throw py::value_error("the sum of " + name + " overflows: use a larger unit");
    return values;
}

// A one-dimensional bool array of the given length.
inline std::vector<char> read_flags(const py::array &array, const std::string &name, size_t length) {
    if (array.dtype().kind() != 'b')
        throw py::value_error(name + " must be an array of bool, got dtype " +
                              py::str(array.dtype()).cast<std::string>());
    if (array.ndim() != 1 || static_cast<size_t>(array.size()) != length)
        throw py::value_error(name + " must have shape (" + std::to_string(length) + ",), got " +
                              py::str(array.attr("shape")).cast<std::string>());
    const py::array_t<bool, py::array::c_style | py::array::forcecast> converted(array);
    return std::vector<char>(converted.data(), converted.data() + length);
}

template <typename T>
py::array_t<T> to_numpy(const std::vector<T> &values) {
    return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace interlace
