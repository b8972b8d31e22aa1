// Checked reading of further arguments of the planners (see common/arrays.h for rows of costs and integers).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/arrays.h"
#include "plan/link_cost.h"

namespace interlace {

struct Matrix {
    int64_t rows, columns;
    std::vector<double> values;  // row-major
};

// A two-dimensional array of real numbers that are finite and >= 0.
inline Matrix read_matrix(const py::array &array, const std::string &name) {
    check_real(array, name);
    if (array.ndim() != 2)
        throw py::value_error(name + " must have two dimensions, got " + std::to_string(array.ndim()));
    if (array.size() == 0) throw py::value_error(name + " is empty: at least one row and one column are needed");
    Matrix matrix{array.shape(0), array.shape(1), read_real(array, name)};
    check_costs(matrix.values, name, matrix.columns);
    return matrix;
}

// As read_costs, but rejects 0: for times and speeds used as divisors.
inline std::vector<double> read_positive(const py::array &array, const std::string &name) {
    std::vector<double> values = read_costs(array, name);
    for (size_t i = 0; i < values.size(); ++i)
        if (values[i] <= 0) throw py::value_error(name + "[" + std::to_string(i) + "] is 0: values must be positive");
    return values;
}

// As read_integers, but at least one.
inline std::vector<int64_t> read_some_integers(const py::array &array, const std::string &name, int64_t low,
                                               int64_t high) {
    std::vector<int64_t> values = read_integers(array, name, low, high);
    if (values.empty()) throw py::value_error(name + " is empty: at least one item is needed");
    return values;
}

// (latency, per_byte).
inline LinkCost read_link(const std::pair<double, double> &link, const std::string &name) {
    if (!std::isfinite(link.first) || link.first < 0 || !std::isfinite(link.second) || link.second < 0)
        throw py::value_error(name + " has latency " + format_number(link.first) + " and per_byte " +
                              format_number(link.second) + ": both must be finite and not negative");
    return {link.first, link.second};
}

}  // namespace interlace
