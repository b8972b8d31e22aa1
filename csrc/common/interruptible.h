// Scope object that the bindings hold while an algorithm runs.
#pragma once

#include <pybind11/pybind11.h>

#include "common/interrupt.h"

namespace interlace {

// Releases the GIL, and runs Python's signal handlers from time to time: Ctrl-C ends the call with KeyboardInterrupt.
class Interruptible {
  public:
    Interruptible() : watch_(&handle_signals) {}

  private:
    // Python runs handlers in its main thread only, so calls in other threads need not take the GIL again.
    static bool handle_signals() {
        const pybind11::gil_scoped_acquire acquire;
        const pybind11::module_ threading = pybind11::module_::import("threading");
        if (!threading.attr("get_ident")().equal(threading.attr("main_thread")().attr("ident"))) return false;
        if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
        return true;
    }

    const pybind11::gil_scoped_release release_;
    const Watch watch_;
};

}  // namespace interlace
