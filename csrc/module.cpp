// interlace._core: what the facades in python/interlace/{balance,plan}/ call. Arrays in, arrays out; every function
// checks its arguments and releases the GIL while it computes.
#include <pybind11/pybind11.h>

namespace interlace {
void bind_balance(pybind11::module_ &module);
void bind_plan(pybind11::module_ &module);
}  // namespace interlace

PYBIND11_MODULE(_core, module) {
    module.doc() = "Compiled algorithms of interlace.balance and interlace.plan.";
    interlace::bind_balance(module);
    interlace::bind_plan(module);
}
