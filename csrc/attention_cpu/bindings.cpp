#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

#include "attention_cpu/block_lists.h"
#include "attention_cpu/problem.h"
#include "common/arrays.h"

namespace interlace {

namespace {

using namespace attention;

std::string shape_of(const py::array &array) { return py::str(array.attr("shape")).cast<std::string>(); }

// Messages are put together only when they are needed: these checks run in every call of every layer.
void require(bool holds, const char *what) {
    if (!holds) throw py::value_error(what);
}

// bf16 has no numpy type: its tensors come as int16.
Dtype dtype_of(const py::array &array, const char *name) {
    if (py::isinstance<py::array_t<float>>(array)) return Dtype::f32;
    if (py::isinstance<py::array_t<int16_t>>(array)) return Dtype::bf16;
    if (py::isinstance<py::array_t<double>>(array)) return Dtype::f64;
    if (array.dtype().kind() == 'f' && array.itemsize() == 2) return Dtype::f16;
    throw py::value_error(std::string(name) + " must be float16, float32, float64 or int16 (the bits of bfloat16), got " +
                          py::str(array.dtype()).cast<std::string>());
}

Matrix matrix(const py::array &array, const char *name, Dtype dtype, std::array<int64_t, 4> shape) {
    if (dtype_of(array, name) != dtype) throw py::value_error(std::string(name) + " has another dtype than q");
    bool fits = array.ndim() == 4;
    for (int axis = 0; fits && axis < 4; ++axis) fits = array.shape(axis) == shape[axis];
    if (!fits) throw py::value_error(std::string(name) + " has an unexpected shape " + shape_of(array));
    const int64_t size = array.itemsize();
    if (array.size() > 0 && array.shape(3) > 1 && array.strides(3) != size)
        throw py::value_error(std::string(name) + " must be contiguous along its last dimension");
    return {array.data(), array.strides(0) / size, array.strides(1) / size, array.strides(2) / size};
}

// A C-contiguous array of T with exactly these sizes.
template <typename T>
const T *contiguous(const py::array &array, const char *name, std::initializer_list<int64_t> shape) {
    bool fits = py::isinstance<py::array_t<T>>(array) && (array.flags() & py::array::c_style) &&
                array.ndim() == static_cast<py::ssize_t>(shape.size());
    for (size_t axis = 0; fits && axis < shape.size(); ++axis) fits = array.shape(axis) == shape.begin()[axis];
    if (!fits)
        throw py::value_error(std::string(name) + " must be a contiguous array of " +
                              py::str(py::dtype::of<T>()).cast<std::string>() + " with the shape of its mask, got " +
                              py::str(array.dtype()).cast<std::string>() + " of shape " + shape_of(array));
    return static_cast<const T *>(array.data());
}

// Five fields (queries) or four (keys, which have no window).
Tokens tokens(const py::array *fields, bool queries, int64_t batch, int64_t length) {
    return {contiguous<int64_t>(fields[0], queries ? "q_bits" : "k_bits", {batch, length}),
            contiguous<int32_t>(fields[1], queries ? "q_doc" : "k_doc", {batch, length}),
            contiguous<int32_t>(fields[2], queries ? "q_span" : "k_span", {batch, length}),
            contiguous<int32_t>(fields[3], queries ? "q_pos" : "k_pos", {batch, length}),
            queries ? contiguous<int32_t>(fields[4], "q_window", {batch, length}) : nullptr,
            length};
}

void list(const py::array *arrays, const char *ptr_name, const char *idx_name, int64_t rows, const int32_t *&ptr,
          const int32_t *&idx) {
    ptr = contiguous<int32_t>(arrays[0], ptr_name, {rows + 1});
    idx = contiguous<int32_t>(arrays[1], idx_name, {arrays[1].size()});
    if (ptr[0] != 0 || ptr[rows] > arrays[1].size())
        throw py::value_error(std::string(ptr_name) + " does not fit " + idx_name);
}

Problem problem(const py::array &q, const py::array &k, const py::array &v, const std::vector<py::array> &mask,
                int64_t block, int64_t sinks, double scale, double softcap, int threads) {
    require(q.ndim() == 4 && k.ndim() == 4, "q and k must have four dimensions");
    require(mask.size() == 13, "the mask must be 13 arrays: nine of tokens, four of block lists");
    require(block >= 1 && threads >= 1 && softcap >= 0, "block and threads must be at least 1, softcap at least 0");
    Problem p{};
    p.batch = q.shape(0);
    p.q_heads = q.shape(1);
    p.kv_heads = k.shape(1);
    p.q_len = q.shape(2);
    p.k_len = k.shape(2);
    p.head_dim = q.shape(3);
    require(p.kv_heads >= 1 && p.head_dim >= 1 && p.q_heads % p.kv_heads == 0,
            "the heads of q must be a multiple of those of k");
    p.block = std::min(block, std::max<int64_t>({p.q_len, p.k_len, 1}));  // a larger one is one block too
    p.sinks = sinks;
    p.scale = scale;
    p.softcap = softcap;
    p.threads = threads;
    p.dtype = dtype_of(q, "q");
    p.q = matrix(q, "q", p.dtype, {p.batch, p.q_heads, p.q_len, p.head_dim});
    p.k = matrix(k, "k", p.dtype, {p.batch, p.kv_heads, p.k_len, p.head_dim});
    p.v = matrix(v, "v", p.dtype, {p.batch, p.kv_heads, p.k_len, p.head_dim});
    p.queries = tokens(&mask[0], true, p.batch, p.q_len);
    p.keys = tokens(&mask[5], false, p.batch, p.k_len);
    const int64_t rows = p.batch * p.q_blocks();
    list(&mask[9], "full_q_ptr", "full_q_idx", rows, p.full_ptr, p.full_idx);
    list(&mask[11], "part_q_ptr", "part_q_idx", rows, p.part_ptr, p.part_idx);
    return p;
}

// Where a result goes: a contiguous, writable array.
void *result(py::array &array, const char *name, int64_t items, int64_t itemsize) {
    if (array.size() != items || array.itemsize() != itemsize || !(array.flags() & py::array::c_style) ||
        !array.writeable())
        throw py::value_error(std::string(name) + " has the wrong size or is not contiguous");
    return array.mutable_data();
}

int64_t computing_size(Dtype dtype) { return dtype == Dtype::f64 ? 8 : 4; }

void attention_forward(const py::array &q, const py::array &k, const py::array &v, const std::vector<py::array> &mask,
                       int64_t block, int64_t sinks, double scale, double softcap, int threads, py::array out,
                       py::array lse) {
    const Problem p = problem(q, k, v, mask, block, sinks, scale, softcap, threads);
    const int64_t rows = p.batch * p.q_heads * p.q_len;
    const ForwardResult to{result(out, "out", rows * p.head_dim, q.itemsize()),
                           result(lse, "lse", rows, computing_size(p.dtype))};
    const py::gil_scoped_release release;
    kernels().forward(p, to);
}

void attention_backward(const py::array &dout, const std::optional<py::array> &dlse, const py::array &q,
                        const py::array &k, const py::array &v, const py::array &out, const py::array &lse,
                        const std::vector<py::array> &mask, int64_t block, int64_t sinks, double scale, double softcap,
                        int threads, py::array dq, py::array dk, py::array dv) {
    const Problem p = problem(q, k, v, mask, block, sinks, scale, softcap, threads);
    const int64_t rows = p.batch * p.q_heads * p.q_len, k_items = p.batch * p.kv_heads * p.k_len * p.head_dim;
    const std::array<int64_t, 4> shape{p.batch, p.q_heads, p.q_len, p.head_dim};
    const auto per_row = [&](const py::array &array) {
        require(array.size() == rows && array.itemsize() == computing_size(p.dtype) &&
                    (array.flags() & py::array::c_style),
                "lse and dlse must be contiguous, one number per query and head");
        return array.data();
    };
    BackwardInput in{};
    in.dout = matrix(dout, "dout", p.dtype, shape);
    in.out = matrix(out, "out", p.dtype, shape);
    in.lse = per_row(lse);
    in.dlse = dlse ? per_row(*dlse) : nullptr;
    in.dq = result(dq, "dq", rows * p.head_dim, q.itemsize());
    in.wide = dk.itemsize() == computing_size(p.dtype);  // the caller's choice: like k, or as they are summed
    const int64_t k_size = in.wide ? computing_size(p.dtype) : q.itemsize();
    in.dk = result(dk, "dk", k_items, k_size);
    in.dv = result(dv, "dv", k_items, k_size);
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
    require(queries.size() == 5 && keys.size() == 4, "queries are five arrays (bits, doc, span, pos, window), keys four");
    require(queries[0].ndim() == 2 && keys[0].ndim() == 2, "bits must have shape [batch, length]");
    require(block >= 1 && threads >= 1, "block and threads must be at least 1");
    const int64_t batch = queries[0].shape(0);
    const Tokens q = tokens(queries.data(), true, batch, queries[0].shape(1));
    const Tokens k = tokens(keys.data(), false, batch, keys[0].shape(1));
    BlockLists lists;
    try {
        const py::gil_scoped_release release;
        lists = block_lists(q, k, batch, sinks, std::min(block, std::max<int64_t>({q.length, k.length, 1})), threads);
    } catch (const std::length_error &error) {
        throw py::value_error(error.what());
    }
    py::list all;
    for (Lists *one : {&lists.full_q, &lists.part_q, &lists.full_k, &lists.part_k}) {
        all.append(hand_over(one->ptr));
        all.append(hand_over(one->idx));
    }
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
