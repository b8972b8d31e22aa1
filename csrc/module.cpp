// interlace._core: functions for python/interlace/{attention,balance,comm,plan,schedule,simulate}/. They take and
// return arrays. Every function checks its arguments and releases the GIL while it computes or waits. Ctrl-C ends
// functions of balance/, plan/, schedule/ and simulate/.
#include <pybind11/pybind11.h>

namespace interlace {
void bind_attention(pybind11::module_ &module);
void bind_balance(pybind11::module_ &module);
void bind_comm(pybind11::module_ &module);
void bind_microbatch(pybind11::module_ &module);
void bind_plan(pybind11::module_ &module);
void bind_schedule(pybind11::module_ &module);
void bind_simulate(pybind11::module_ &module);
void bind_plan_oobleck(pybind11::module_ &module);
void bind_plan_orchestrate(pybind11::module_ &module);
void bind_plan_partition_limits(pybind11::module_ &module);
void bind_plan_search(pybind11::module_ &module);
}  // namespace interlace

PYBIND11_MODULE(_core, module) {
    module.doc() =
        "Compiled parts of interlace.attention, interlace.balance, interlace.comm, interlace.plan, interlace.schedule, "
        "interlace.simulate.";
    interlace::bind_attention(module);
    interlace::bind_balance(module);
    interlace::bind_comm(module);
    interlace::bind_microbatch(module);
    interlace::bind_plan(module);
    interlace::bind_schedule(module);
    interlace::bind_simulate(module);
    interlace::bind_plan_oobleck(module);
    interlace::bind_plan_orchestrate(module);
    interlace::bind_plan_partition_limits(module);
    interlace::bind_plan_search(module);
}
