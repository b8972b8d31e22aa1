// Checked reading of what the planners take beyond rows of costs (common/arrays.h): matrices and whole numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/arrays.h"

namespace interlace {

struct Matrix {
    int64_t rows, columns;
    std::vector<double> values;  // row-major
};

// A two-dimensional array of real numbers that are finite and >= 0.
inline Matrix read_matrix(const py::array &array, const std::string &name) {
    const char kind = array.dtype().kind();
    if (kind != 'f' && kind != 'i' && kind != 'u')
        throw py::value_error(name + " must be an array of real numbers (float or int), got dtype " +
                              py::str(array.dtype()).cast<std::string>());
    if (array.ndim() != 2)
        throw py::value_error(name + " must have two dimensions, got " + std::to_string(array.ndim()));
    if (array.size() == 0) throw py::value_error(name + " is empty: at least one row and one column are needed");
    if (array.size() > INT32_MAX) throw py::value_error(name + " is larger than int32 can index");
    const py::array_t<double, py::array::c_style | py::array::forcecast> converted(array);
    Matrix matrix{array.shape(0), array.shape(1), {converted.data(), converted.data() + array.size()}};
    double total = 0.0;
    for (int64_t i = 0; i < array.size(); ++i) {
        if (!std::isfinite(matrix.values[i]) || matrix.values[i] < 0)
            throw py::value_error(name + "[" + std::to_string(i / matrix.columns) + ", " +
                                  std::to_string(i % matrix.columns) + "] is " + format_number(matrix.values[i]) +
                                  ": values must be finite and not negative");
        total += matrix.values[i];
    }
    if (!std::isfinite(total)) throw py::value_error("the sum of " + name + " overflows: use a larger unit");
    return matrix;
}

// As read_costs, but 0 is refused: times and speeds that something is divided by.
inline std::vector<double> read_positive(const py::array &array, const std::string &name) {
    std::vector<double> values = read_costs(array, name);
    for (size_t i = 0; i < values.size(); ++i)
        if (values[i] <= 0) throw py::value_error(name + "[" + std::to_string(i) + "] is 0: values must be positive");
    return values;
}

// A one-dimensional array of integers in low .. high.
inline std::vector<int64_t> read_integers(const py::array &array, const std::string &name, int64_t low, int64_t high) {
    const char kind = array.dtype().kind();
    if (kind != 'i' && kind != 'u')
        throw py::value_error(name + " must be an array of integers, got dtype " +
                              py::str(array.dtype()).cast<std::string>());
    if (array.ndim() != 1)
        throw py::value_error(name + " must have one dimension, got " + std::to_string(array.ndim()));
    if (array.size() == 0) throw py::value_error(name + " is empty: at least one item is needed");
    const py::array_t<int64_t, py::array::c_style | py::array::forcecast> converted(array);
    std::vector<int64_t> values(converted.data(), converted.data() + converted.size());
    for (size_t i = 0; i < values.size(); ++i)
        if (values[i] < low || values[i] > high)
            throw py::value_error(name + "[" + std::to_string(i) + "] is " + std::to_string(values[i]) +
                                  ": values must be " + std::to_string(low) + " to " + std::to_string(high));
    return values;
}

inline int64_t checked_count(int64_t value, const std::string &name, int64_t low, int64_t high) {
    if (value < low || value > high)
        throw py::value_error(name + " must be " + std::to_string(low) + " to " + std::to_string(high) + ", got " +
                              std::to_string(value));
    return value;
}

}  // namespace interlace
