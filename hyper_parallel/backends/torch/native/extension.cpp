// The Python side of the recorder: a boxed fallback that sees every op of an open region, and the two saved-tensor hooks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "copies.h"
#include "forward_end.h"
#include "graph_walk.h"
#include "sources.h"

namespace hyper_parallel {
namespace {

namespace py = pybind11;

// The regions that are open on this thread, the innermost last.
thread_local std::vector<std::shared_ptr<Tape>> open_tapes;

PyObject* make_changed_error = nullptr;  // (where, what, storage, version, now) -> an exception

// A tape on which an op is half recorded records no more: its values stay from there on.
bool begin(
    Tape& tape, const c10::OperatorHandle& op, const OpFacts& facts, const torch::jit::Stack& stack, Tape::Draft& draft) {
  try {
    return tape.begin(op, facts, stack, draft);
  } catch (...) {
    tape.stop("an error in its policy or in the swap engine");
    throw;
  }
}

void end(Tape& tape, const c10::OperatorHandle& op, Tape::Draft& draft, const torch::jit::Stack& stack) {
  try {
    tape.end(op, draft, stack);
  } catch (...) {
    tape.stop("an error in its policy or in the swap engine");
    throw;
  }
}

void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard unseen(kRecorderKey);
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRecorderKey);
  OpFacts scratch;
  const auto& open = open_tapes;  // of this thread, looked up once
  // Code that hides its ops from dispatch modes hides them from tapes too: our own copies, torch's `tensor(data)`.
  if (open.empty() || c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) {
    op.redispatchBoxed(below, stack);
    return;
  }
  const OpFacts& facts = facts_of(op, scratch);
  if (facts.kind == OpKind::kUnrecorded) {
    op.redispatchBoxed(below, stack);
    return;
  }
  if (open.size() == 1) {
    Tape& tape = *open.back();
    Tape::Draft draft;
    auto lock = locked(tape.mutex());
    const bool is_recorded = begin(tape, op, facts, *stack, draft);
    lock.unlock();
    op.redispatchBoxed(below, stack);
    if (!is_recorded) return;
    lock = locked(tape.mutex());
    end(tape, op, draft, *stack);
    return;
  }
  // Regions that lie in one another all record.
  std::vector<Tape::Draft> drafts;
  drafts.reserve(open.size());
  for (const auto& tape : open) {
    drafts.emplace_back();
    auto lock = locked(tape->mutex());
    if (!begin(*tape, op, facts, *stack, drafts.back())) drafts.pop_back();
  }
  op.redispatchBoxed(below, stack);
  for (auto& draft : drafts) {
    auto lock = locked(draft.tape->mutex());
    end(*draft.tape, op, draft, *stack);
  }
}

// What autograd holds in place of a tensor. An object of its own and not a capsule, which would be two allocations.
struct Packed {
  PyObject_HEAD
  std::shared_ptr<Tape> tape;
  int handle;
};

constexpr const char* kTapeName = "hyper_parallel.tape";

void drop_packed(PyObject* object) {
  auto* packed = reinterpret_cast<Packed*>(object);
  packed->tape->release(packed->handle);
  packed->tape.~shared_ptr();
  PyObject_Free(object);
}

PyTypeObject packed_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void make_packed_type() {
  packed_type.tp_name = "hyper_parallel.Packed";
  packed_type.tp_basicsize = sizeof(Packed);
  packed_type.tp_flags = Py_TPFLAGS_DEFAULT;
  packed_type.tp_dealloc = drop_packed;
  packed_type.tp_doc = "A value that a tape keeps or makes again.";
  if (PyType_Ready(&packed_type) < 0) throw pybind11::error_already_set();
}

PyObject* pack(PyObject* self, PyObject* argument) {
  HANDLE_TH_ERRORS
  auto& tape = *static_cast<std::shared_ptr<Tape>*>(PyCapsule_GetPointer(self, kTapeName));
  const int handle = tape->pack(THPVariable_Unpack(argument));
  auto* packed = PyObject_New(Packed, &packed_type);
  if (packed == nullptr) {
    tape->release(handle);
    return nullptr;
  }
  new (&packed->tape) std::shared_ptr<Tape>(tape);
  packed->handle = handle;
  return reinterpret_cast<PyObject*>(packed);
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject*, PyObject* argument) {
  HANDLE_TH_ERRORS
  if (!Py_IS_TYPE(argument, &packed_type)) {
    PyErr_SetString(PyExc_TypeError, "a tape unpacks what a tape has packed");
    return nullptr;
  }
  auto* packed = reinterpret_cast<Packed*>(argument);
  at::Tensor value;
  try {
    value = packed->tape->unpack(packed->handle, /*may_run=*/false);
    if (!value.defined()) {
      WithoutGil released;
      value = packed->tape->unpack(packed->handle, /*may_run=*/true);
    }
  } catch (const ChangedInPlace& error) {
    PyObject* exception = PyObject_CallFunction(
        make_changed_error, "ssnLL", error.where.c_str(), error.what_changed.c_str(),
        reinterpret_cast<Py_ssize_t>(error.storage), static_cast<long long>(error.version), static_cast<long long>(error.now));
    if (exception == nullptr) return nullptr;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
    Py_DECREF(exception);
    return nullptr;
  }
  return THPVariable_Wrap(value);
  END_HANDLE_TH_ERRORS
}

PyMethodDef pack_method = {"pack", pack, METH_O, "The pack hook of one region."};
PyMethodDef unpack_method = {"unpack", unpack, METH_O, "The unpack hook of every region."};

void drop_tape(PyObject* capsule) {
  delete static_cast<std::shared_ptr<Tape>*>(PyCapsule_GetPointer(capsule, kTapeName));
}

py::object pack_hook_of(const std::shared_ptr<Tape>& tape) {
  auto self = py::reinterpret_steal<py::object>(PyCapsule_New(new std::shared_ptr<Tape>(tape), kTapeName, drop_tape));
  return py::reinterpret_steal<py::object>(PyCFunction_New(&pack_method, self.ptr()));
}

// Ops that are not recorded, views above all, do not come here at all: the dispatcher passes over our key for them.
void pass_over_unrecorded() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", kRecorderKey, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = name.name.compare(0, 6, "aten::") == 0 ? dispatcher.findSchema(name) : c10::nullopt;
    if (!op || examine(*op).kind != OpKind::kUnrecorded) continue;
    const std::string full_name = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library->impl(full_name.c_str(), torch::CppFunction::makeFallthrough());
  }
}

void open_tape(const std::shared_ptr<Tape>& tape) {
  open_tapes.push_back(tape);
  c10::impl::tls_set_dispatch_key_included(kRecorderKey, true);
}

void leave_tape() {
  open_tapes.pop_back();
  if (open_tapes.empty()) c10::impl::tls_set_dispatch_key_included(kRecorderKey, false);
}

}  // namespace
}  // namespace hyper_parallel

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace hyper_parallel;
  // Here and not in a static object: where the key has a fallback already (a later torch, another build of this extension),
  // the import fails with torch's message. A static object would end the process.
  static auto* library = new torch::Library(torch::Library::IMPL, "_", kRecorderKey, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<&record>());
  pass_over_unrecorded();
  make_packed_type();
  pack_of_tapes = &pack;
  define_sources(module);
  define_copies(module);
  module.def("reachable_numbers", &reachable_numbers);
  py::class_<RegionHistory, std::shared_ptr<RegionHistory>>(module, "RegionHistory")
      .def(py::init<>())
      .def("__len__", [](RegionHistory& region_history) { return region_history.get()->size(); });
  py::class_<Fates, std::shared_ptr<Fates>>(module, "Fates").def(py::init([](py::object resolve) {
    return std::make_shared<Fates>(resolve.ptr());
  }));
  py::class_<Tape, std::shared_ptr<Tape>>(module, "Tape")
      .def(
          py::init([](std::string where, std::shared_ptr<RegionHistory> region_history, size_t copied_before_write, size_t steering_output,
                      std::shared_ptr<Fates> fates, py::object swaps) {
            return std::make_shared<Tape>(
                std::move(where), std::move(region_history), Limits{copied_before_write, steering_output}, std::move(fates),
                swaps.is_none() ? Swaps() : Swaps(swaps.ptr()));
          }),
          py::arg("where"), py::arg("region_history"), py::arg("copied_before_write_bytes"), py::arg("steering_output_bytes"),
          py::arg("fates") = nullptr, py::arg("swaps") = py::none())
      .def("pack_hook", &pack_hook_of)
      .def("open", &open_tape)
      .def("abandon", &Tape::abandon)
      .def("close", &Tape::close)
      .def(
          "show_arguments",
          [](Tape& tape, const std::vector<at::Tensor>& tensors, py::object pack, py::object unpack) {
            tape.show_arguments(tensors, pack.ptr(), unpack.ptr());
          })
      .def(
          "show_held",
          [](Tape& tape, py::object pack, py::object unpack) {
            tape.show_held(pack.is_none() ? nullptr : pack.ptr(), unpack.is_none() ? nullptr : unpack.ptr());
          })
      .def("handed_bytes", &Tape::handed_bytes)
      .def("copy_held", &Tape::copy_held)
      .def(
          "given_in_order",
          [](Tape& tape) {
            py::list tokens;
            for (PyObject* token : tape.given_in_order()) tokens.append(py::reinterpret_borrow<py::object>(token));
            return tokens;
          })
      .def("prove", &Tape::prove, py::call_guard<py::gil_scoped_release>())
      .def("stop", &Tape::stop)
      .def_property_readonly("is_proven", &Tape::is_proven)
      .def_property_readonly("reason", &Tape::reason)
      .def_property_readonly("op_count", &Tape::op_count)
      .def_property_readonly("handle_count", &Tape::handle_count)
      .def_property_readonly("kept_bytes", &Tape::kept_bytes)
      .def_property_readonly("saved_bytes", &Tape::saved_bytes)
      .def_property_readonly("stuck_bytes", &Tape::stuck_bytes)
      .def_property_readonly("recomputed_bytes", &Tape::recomputed_bytes)
      .def_property_readonly("held_count", &Tape::held_count);
  module.def(
      "without_recorder",  // as numbers: torch's own class is another module's, and not every release shares it
      [](uint64_t keys) { return c10::DispatchKeySet(c10::DispatchKeySet::RAW, keys).remove(kRecorderKey).raw_repr(); },
      "The same keys without the recorder's.");
  module.def("leave", &leave_tape, "Take the innermost open tape off this thread.");
  module.def("depth", [] { return open_tapes.size(); });
  module.def("set_changed_error", [](py::object make) { make_changed_error = make.release().ptr(); });
  module.def("counters", [] {
    py::dict all;
    all["recorded_ops"] = counters().recorded_ops.load();
    all["replayed_ops"] = counters().replayed_ops.load();
    all["replays"] = counters().replays.load();
    all["live_tapes"] = counters().live_tapes.load();
    return all;
  });
  module.attr("unpack") = py::reinterpret_steal<py::object>(PyCFunction_New(&unpack_method, nullptr));
}
