#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "attention_cpu/block_lists.h"
#include "attention_cpu/problem.h"
#include "common/arrays.h"

namespace interlace {

namespace {

using namespace attention;

constexpr int MOST_THREADS = 1024;  // GNU OpenMP ends the process if it cannot start a thread

// Messages are composed only on failure: these checks run in every call of every layer.
void require(bool holds, const char *what) {
    if (!holds) throw py::value_error(what);
}

// numpy has no bf16: bf16 tensors are passed as int16.
Dtype dtype_of(const py::array &array, const char *name) {
    if (py::isinstance<py::array_t<float>>(array)) return Dtype::f32;
    if (py::isinstance<py::array_t<int16_t>>(array)) return Dtype::bf16;
    if (py::isinstance<py::array_t<double>>(array)) return Dtype::f64;
    if (array.dtype().kind() == 'f' && array.itemsize() == 2 && array.dtype().byteorder() == '=') return Dtype::f16;
    throw py::value_error(std::string(name) +
                          " must be float16, float32, float64 or int16 (the bits of bfloat16), got " +
                          dtype_name(array));
}

Matrix matrix(const py::array &array, const char *name, Dtype dtype, std::array<int64_t, 4> shape) {
    if (dtype_of(array, name) != dtype) throw py::value_error(std::string(name) + " has another dtype than q");
    bool fits = array.ndim() == 4;
    for (int axis = 0; fits && axis < 4; ++axis) fits = array.shape(axis) == shape[axis];
    if (!fits) throw py::value_error(std::string(name) + " has an unexpected shape " + shape_of(array));
    if (!is_aligned(array)) throw py::value_error(std::string(name) + " is not aligned: copy it");
    const int64_t size = array.itemsize();
    if (array.size() > 0 && array.shape(3) > 1 && array.strides(3) != size)
        throw py::value_error(std::string(name) + " must be contiguous along its last dimension");
    return {array.data(), array.strides(0) / size, array.strides(1) / size, array.strides(2) / size};
}

// A C-contiguous array of T with exactly these sizes.
template <typename T>
const T *contiguous(const py::array &array, const char *name, std::initializer_list<int64_t> shape) {
    bool fits = py::isinstance<py::array_t<T>>(array) && (array.flags() & py::array::c_style) && is_aligned(array) &&
                array.ndim() == static_cast<py::ssize_t>(shape.size());
    for (size_t axis = 0; fits && axis < shape.size(); ++axis) fits = array.shape(axis) == shape.begin()[axis];
    if (!fits)
        throw py::value_error(std::string(name) + " must be a contiguous array of " +
                              py::str(py::dtype::of<T>()).cast<std::string>() + " with the shape of its mask, got " +
                              dtype_name(array) + " of shape " + shape_of(array));
    return static_cast<const T *>(array.data());
}

// Range of positions and windows, which the mask rule subtracts.
void check_not_negative(const int32_t *values, int64_t count, const char *name) {
    int32_t least = 0;
    for (int64_t i = 0; i < count; ++i) least = std::min(least, values[i]);
    if (least < 0)
        throw py::value_error(std::string(name) + " holds " + std::to_string(least) + ": it must not be negative");
}

// Five fields (queries) or four (keys: no window).
Tokens tokens(const py::array *fields, bool queries, int64_t batch, int64_t length) {
    const Tokens found{
        contiguous<int64_t>(fields[0], queries ? "q_bits" : "k_bits", {batch, length}),
        contiguous<int32_t>(fields[1], queries ? "q_doc" : "k_doc", {batch, length}),
        contiguous<int32_t>(fields[2], queries ? "q_span" : "k_span", {batch, length}),
        contiguous<int32_t>(fields[3], queries ? "q_pos" : "k_pos", {batch, length}),
        queries ? contiguous<int32_t>(fields[4], "q_window", {batch, length}) : nullptr,
        length,
    };
    check_not_negative(found.pos, batch * length, queries ? "q_pos" : "k_pos");
    if (queries) check_not_negative(found.window, batch * length, "q_window");
    return found;
}

// Compressed rows of key blocks. Every entry is checked: a wrong one would cause reads out of bounds.
void list(const py::array *arrays, const char *ptr_name, const char *idx_name, int64_t rows, int64_t k_blocks,
          const int32_t *&ptr, const int32_t *&idx) {
    ptr = contiguous<int32_t>(arrays[0], ptr_name, {rows + 1});
    idx = contiguous<int32_t>(arrays[1], idx_name, {arrays[1].size()});
    bool fits = ptr[0] == 0 && ptr[rows] <= arrays[1].size();
    for (int64_t row = 0; row < rows && fits; ++row) fits = ptr[row] <= ptr[row + 1];
    if (!fits) throw py::value_error(std::string(ptr_name) + " does not fit " + idx_name);
    for (int64_t row = 0; row < rows; ++row) {
        int64_t before = -1;
        for (int64_t at = ptr[row]; at < ptr[row + 1]; before = idx[at++])
            if (idx[at] <= before || idx[at] >= k_blocks)
                throw py::value_error(std::string(idx_name) + "[" + std::to_string(at) + "] is " +
                                      std::to_string(idx[at]) + ": the entries of a row must rise and lie below " +
                                      std::to_string(k_blocks));
    }
}

Problem problem(const py::array &q, const py::array &k, const py::array &v, const std::vector<py::array> &mask,
                int64_t block, int64_t sinks, double scale, double softcap, int threads) {
    require(q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4, "q, k and v must have four dimensions");
    require(mask.size() == 13, "the mask must be 13 arrays: nine of tokens, four of block lists");
    require(block >= 1, "block must be at least 1");
    require(threads >= 1 && threads <= MOST_THREADS, "threads must lie between 1 and 1024");
    require(std::abs(scale) <= 1e30, "scale must be finite, at most 1e30");
    require(softcap == 0 || (softcap >= 1e-30 && softcap <= 1e30), "softcap must lie between 1e-30 and 1e30, or be 0");
    Problem p{};
    p.batch = q.shape(0);
    p.q_heads = q.shape(1);
    p.kv_heads = k.shape(1);
    p.q_len = q.shape(2);
    p.k_len = k.shape(2);
    p.head_dim = q.shape(3);
    p.value_dim = v.shape(3);
    require(p.kv_heads >= 1 && p.q_heads % p.kv_heads == 0, "the heads of q must be a multiple of those of k");
    require(p.head_dim >= 1 && p.value_dim >= 1, "head dimensions must be at least 1");
    p.block = std::min(block, std::max<int64_t>({p.q_len, p.k_len, 1}));  // a larger block is equivalent: one block
    require(p.block <= 1 << 15,
            "blocks of more than 32768 tokens need gigabytes for the bits of one: use smaller ones");
    p.sinks = sinks;
    p.scale = scale;
    p.softcap = softcap;
    p.threads = threads;
    p.dtype = dtype_of(q, "q");
    p.q = matrix(q, "q", p.dtype, {p.batch, p.q_heads, p.q_len, p.head_dim});
    p.k = matrix(k, "k", p.dtype, {p.batch, p.kv_heads, p.k_len, p.head_dim});
    p.v = matrix(v, "v", p.dtype, {p.batch, p.kv_heads, p.k_len, p.value_dim});
    p.queries = tokens(&mask[0], true, p.batch, p.q_len);
    p.keys = tokens(&mask[5], false, p.batch, p.k_len);
    const int64_t rows = p.batch * p.q_blocks();
    const int64_t k_blocks = (p.k_len + p.block - 1) / p.block;
    list(&mask[9], "full_q_ptr", "full_q_idx", rows, k_blocks, p.full_ptr, p.full_idx);
    list(&mask[11], "part_q_ptr", "part_q_idx", rows, k_blocks, p.part_ptr, p.part_idx);
    return p;
}

void check_layout(const py::array &array, const char *name, int64_t items, Dtype dtype) {
    if (array.size() != items || dtype_of(array, name) != dtype || !(array.flags() & py::array::c_style) ||
        !is_aligned(array))
        throw py::value_error(std::string(name) + " has the wrong size or dtype, or is not contiguous: got " +
                              dtype_name(array) + " of shape " + shape_of(array));
}

// Pointer to a result array.
void *result(py::array &array, const char *name, int64_t items, Dtype dtype) {
    check_layout(array, name, items, dtype);
    if (!array.writeable()) throw py::value_error(std::string(name) + " is read-only");
    return array.mutable_data();
}

Dtype computing(Dtype dtype) { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

void attention_forward(const py::array &q, const py::array &k, const py::array &v, const std::vector<py::array> &mask,
                       int64_t block, int64_t sinks, double scale, double softcap, int threads, py::array out,
                       py::array lse) {
    const Problem p = problem(q, k, v, mask, block, sinks, scale, softcap, threads);
    const int64_t rows = p.batch * p.q_heads * p.q_len;
    const ForwardResult to{result(out, "out", rows * p.value_dim, p.dtype),
                           result(lse, "lse", rows, computing(p.dtype))};
    if (rows == 0) return;  // with no rows, other sizes are not checked
    const py::gil_scoped_release release;
    kernels().forward(p, to);
}

void attention_backward(const py::array &dout, const std::optional<py::array> &dlse, const py::array &q,
                        const py::array &k, const py::array &v, const py::array &out, const py::array &lse,
                        const std::vector<py::array> &mask, int64_t block, int64_t sinks, double scale, double softcap,
                        int threads, py::array dq, py::array dk, py::array dv) {
    const Problem p = problem(q, k, v, mask, block, sinks, scale, softcap, threads);
    const std::array<int64_t, 4> shape{p.batch, p.q_heads, p.q_len, p.value_dim};
    const int64_t rows = p.batch * p.q_heads * p.q_len;
    const auto per_row = [&](const py::array &array, const char *name) {
        check_layout(array, name, rows, computing(p.dtype));
        return array.data();
    };
    BackwardInput in{};
    in.dout = matrix(dout, "dout", p.dtype, shape);
    in.out = matrix(out, "out", p.dtype, shape);
    in.lse = per_row(lse, "lse");
    in.dlse = dlse ? per_row(*dlse, "dlse") : nullptr;
    in.dq = result(dq, "dq", q.size(), p.dtype);
    // The caller chooses: dtype of k and v, or dtype of the sums.
    in.wide = dtype_of(dk, "dk") == computing(p.dtype);
    in.dk = result(dk, "dk", k.size(), in.wide ? computing(p.dtype) : p.dtype);
    in.dv = result(dv, "dv", v.size(), in.wide ? computing(p.dtype) : p.dtype);
    if (rows == 0) {
        std::memset(in.dk, 0, static_cast<size_t>(dk.nbytes()));
        std::memset(in.dv, 0, static_cast<size_t>(dv.nbytes()));
        return;
    }
    const py::gil_scoped_release release;
    kernels().backward(p, in);
}

// A vector as a numpy array, without a copy.
py::array_t<int32_t> hand_over(std::vector<int32_t> &values) {
    auto *owned = new std::vector<int32_t>(std::move(values));
    const py::capsule owner(owned, [](void *p) { delete static_cast<std::vector<int32_t> *>(p); });
    return py::array_t<int32_t>(static_cast<py::ssize_t>(owned->size()), owned->data(), owner);
}

py::tuple attention_block_lists(const std::vector<py::array> &queries, const std::vector<py::array> &keys,
                                int64_t sinks, int64_t block, int threads) {
    require(queries.size() == 5 && keys.size() == 4,
            "queries are five arrays (bits, doc, span, pos, window), keys four");
    require(queries[0].ndim() == 2 && keys[0].ndim() == 2, "bits must have shape [batch, length]");
    require(block >= 1, "block must be at least 1");
    require(threads >= 1 && threads <= MOST_THREADS, "threads must lie between 1 and 1024");
    const int64_t batch = queries[0].shape(0);
    const Tokens q = tokens(queries.data(), true, batch, queries[0].shape(1));
    const Tokens k = tokens(keys.data(), false, batch, keys[0].shape(1));
    BlockLists lists;
    try {
        const py::gil_scoped_release release;
        lists = block_lists(q, k, batch, sinks, std::min(block, std::max(q.length, k.length) + 1), threads);
    } catch (const std::length_error &error) {
        throw py::value_error(error.what());
    }
    py::list all;
    for (Lists *one : {&lists.full_q, &lists.part_q, &lists.full_k, &lists.part_k}) {
        all.append(hand_over(one->ptr));
        all.append(hand_over(one->idx));
    }
    all.append(hand_over(lists.q_doc));
    all.append(hand_over(lists.k_doc));
    return py::tuple(all);
}

}  // namespace

void bind_attention(py::module_ &module) {
    module.def("attention_isa", [] { return kernels().name; });
    module.def("attention_block_lists", &attention_block_lists, py::arg("queries"), py::arg("keys"), py::arg("sinks"),
               py::arg("block"), py::arg("threads"));
    module.def("attention_forward", &attention_forward, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("mask"),
               py::arg("block"), py::arg("sinks"), py::arg("scale"), py::arg("softcap"), py::arg("threads"),
               py::arg("out"), py::arg("lse"));
    module.def("attention_backward", &attention_backward, py::arg("dout"), py::arg("dlse"), py::arg("q"), py::arg("k"),
               py::arg("v"), py::arg("out"), py::arg("lse"), py::arg("mask"), py::arg("block"), py::arg("sinks"),
               py::arg("scale"), py::arg("softcap"), py::arg("threads"), py::arg("dq"), py::arg("dk"), py::arg("dv"));
}

}  // namespace interlace
