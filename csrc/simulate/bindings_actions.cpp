// Action objects to arrays, in one pass over their attributes.
#include <array>
#include <limits>
#include <string>
#include <vector>

#include "common/arrays.h"

namespace interlace {

namespace {

class Reader {
  public:
    explicit Reader(const py::tuple &ops) {
        for (const py::handle op : ops) ops_.push_back(op.ptr());
    }

    // The place of an action's op among the ops, which are singletons.
    int8_t op(PyObject *action, py::ssize_t i) const {
        const py::object value = attribute(action, op_);
        for (size_t code = 0; code < ops_.size(); ++code)
            if (ops_[code] == value.ptr()) return static_cast<int8_t>(code);
        throw py::value_error("actions[" + std::to_string(i) + "].op is " + py::repr(value).cast<std::string>() +
                              ": it must be an Op");
    }

    // Numbers in the order in which the modules appear.
    int64_t module(PyObject *action) {
        py::object name = attribute(action, module_);
        if (name.ptr() != last_name_.ptr()) {
            if (!modules.contains(name)) modules[name] = modules.size();
            last_number_ = modules[name].cast<int64_t>();
            last_name_ = std::move(name);  // kept alive: another object could get its address
        }
        return last_number_;
    }

    int32_t integer(PyObject *action, const py::str &name, py::ssize_t i) const {
        const py::object value = attribute(action, name);
        const long long number = PyLong_AsLongLong(value.ptr());
        if (number == -1 && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_OverflowError)) throw py::error_already_set();
            PyErr_Clear();
        } else if (number >= std::numeric_limits<int32_t>::min() && number <= std::numeric_limits<int32_t>::max()) {
            return static_cast<int32_t>(number);
        }
        throw py::value_error("actions[" + std::to_string(i) + "]." + name.cast<std::string>() + " is " +
                              py::repr(value).cast<std::string>() + ": more than int32 holds");
    }

    bool truth(PyObject *action, const py::str &name) const {
        const int value = PyObject_IsTrue(attribute(action, name).ptr());
        if (value < 0) throw py::error_already_set();
        return value != 0;
    }

    const py::str stage = interned("stage"), microbatch = interned("microbatch"), part = interned("part"),
                  peer = interned("peer"), grad = interned("grad");
    py::dict modules;

  private:
    static py::str interned(const char *name) {
        return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name));
    }

    static py::object attribute(PyObject *action, const py::str &name) {
        PyObject *value = PyObject_GetAttr(action, name.ptr());
        if (value == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(value);
    }

    const py::str op_ = interned("op"), module_ = interned("module");
    std::vector<PyObject *> ops_;
    py::object last_name_;
    int64_t last_number_ = 0;
};

py::tuple action_columns(const py::list &actions, const py::tuple &ops) {
    const size_t n = actions.size();
    Reader reader(ops);
    std::vector<int8_t> op(n);
    std::vector<int64_t> module(n);
    std::vector<char> grad(n);
    std::array<std::vector<int32_t>, 4> columns;
    const std::array<const py::str *, 4> names = {&reader.stage, &reader.microbatch, &reader.part, &reader.peer};
    for (std::vector<int32_t> &column : columns) column.resize(n);
    for (size_t i = 0; i < n; ++i) {
        // Reading an attribute may run any code: the list must still be as long, and the action must live on.
        check_signals(static_cast<int64_t>(i));
        if (actions.size() != n) throw py::value_error("actions changed while they were read");
        const py::object action = actions[i];
        const py::ssize_t place = static_cast<py::ssize_t>(i);
        op[i] = reader.op(action.ptr(), place);
        module[i] = reader.module(action.ptr());
        for (size_t c = 0; c < names.size(); ++c) columns[c][i] = reader.integer(action.ptr(), *names[c], place);
        grad[i] = reader.truth(action.ptr(), reader.grad);
    }
    return py::make_tuple(to_numpy(op), to_numpy(module), to_numpy(columns[0]), to_numpy(columns[1]),
                          to_numpy(columns[2]), to_numpy(columns[3]), to_numpy(grad).attr("view")("bool"),
                          py::list(reader.modules));
}

}  // namespace

void bind_simulate_actions(py::module_ &module) {
    module.def("action_columns", &action_columns, py::arg("actions"), py::arg("ops"));
}

}  // namespace interlace
