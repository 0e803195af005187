// What the swap engine asks of a tensor that autograd saves, one call for each question, and what it keeps while the bytes are
// away. The same answers as `storages.py` and `tensor_adapter.py` give. A tensor that is not plain (a subclass, a conjugate,
// a wrapped or quantized tensor, one of inference mode) is passed on to them.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>

#include "faults.h"
#include "guards.h"

namespace hyper_parallel {

// Python's functions for tensors that are not plain, and the words of the answers. Python sets them once.
struct PythonWay {
  PyObject* storage_bytes = nullptr;
  PyObject* why_kept = nullptr;
  PyObject* source_of = nullptr;
  PyObject* flat_bytes = nullptr;
  PyObject* parameter_class = nullptr;
  PyObject* empty = nullptr;
  PyObject* parameter = nullptr;
  PyObject* exotic = nullptr;
  PyObject* in_backward = nullptr;
  std::unordered_set<std::string> pass_through;  // names of nodes
  int longest_chain = 0;
};

inline PythonWay& python_way() {
  static auto* way = new PythonWay();
  return *way;
}

// The keys of a tensor without those of autograd and autocast.
inline c10::DispatchKeySet own_keys(const c10::TensorImpl& impl) {
  return impl.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::autocast_dispatch_keyset;
}

// The tensor, if its storage, size, strides, offset and dtype are all there is to it; else null.
inline const at::Tensor* plain(PyObject* object) {
  if (Py_TYPE(object) != reinterpret_cast<PyTypeObject*>(THPVariableClass)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!tensor.defined()) return nullptr;
  const auto& impl = *tensor.unsafeGetTensorImpl();
  const uint64_t functionality = own_keys(impl).raw_repr() & ~c10::full_backend_mask;
  if (functionality != c10::DispatchKeySet(c10::DispatchKey::Dense).raw_repr()) return nullptr;
  if (!impl.has_storage() || !impl.unsafe_storage() || impl.has_symbolic_sizes_strides() || tensor.is_inference()) return nullptr;
  return &tensor;
}

inline at::Tensor base_of(const at::Tensor& view) {
  at::TensorBase base = view._base();
  return at::Tensor(std::move(base));
}

inline size_t storage_bytes_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes();
}

inline size_t bytes_of(const at::Tensor& tensor) {
  return static_cast<size_t>(tensor.numel()) * tensor.unsafeGetTensorImpl()->itemsize();
}

// -- Why a tensor stays --------------------------------------------------------------------------------------------------

enum class Link : uint8_t {
  kEnd,          // neither holds a variable nor passes one through
  kPassThrough,  // a cast or a view
  kVariable,     // accumulates the gradient of a leaf
};

// One answer for each class of nodes; nodes of Python functions are one class. The caller has the GIL.
inline Link link_of(const torch::autograd::Node& node) {
  static auto* known = new std::unordered_map<std::type_index, Link>();
  const std::type_index type(typeid(node));
  const auto found = known->find(type);
  if (found != known->end()) return found->second;
  Link link = Link::kEnd;
  if (dynamic_cast<const torch::autograd::AccumulateGrad*>(&node) != nullptr) {
    link = Link::kVariable;
  } else if (python_way().pass_through.count(node.name()) != 0) {
    link = Link::kPassThrough;
  }
  known->emplace(type, link);
  return link;
}

// As Python's isinstance: 1, 0, or -1 with an exception.
inline int is_parameter(const at::Tensor& tensor) {
  auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  return PyObject_IsInstance(object.ptr(), python_way().parameter_class);
}

// A view of a parameter, or a cast of one: 1, 0, or -1 with an exception.
inline int is_parameter_derived(const at::Tensor& tensor) {
  if (HP_FAULT("saved_parameters")) return 0;
  if (tensor.is_view()) {
    const int answer = is_parameter(base_of(tensor));
    if (answer != 0) return answer;
  }
  auto node = tensor.grad_fn();
  for (int at = 0; at < python_way().longest_chain && node != nullptr; ++at) {
    const Link link = link_of(*node);
    if (link == Link::kEnd) return 0;
    if (link == Link::kVariable) {
      return is_parameter(static_cast<const torch::autograd::AccumulateGrad&>(*node).variable);
    }
    if (node->num_outputs() == 0) return 0;
    node = node->next_edge(0).function;
  }
  return 0;
}

// Without copying a storage that is copied on its first write.
inline bool has_memory(const at::Tensor& tensor) {
  try {
    return tensor.unsafeGetTensorImpl()->unsafe_storage().data() != nullptr;
  } catch (const std::exception&) {
    return false;
  }
}

// See the note "counters of their own" in storages.py.
inline bool is_changed_piece(const at::Tensor& tensor) {
  if (HP_FAULT("own_counters")) return false;
  return tensor._version() > 0 && bytes_of(tensor) != storage_bytes_of(tensor) && !tensor.is_view();
}

// -- What is kept while the bytes are away --------------------------------------------------------------------------------

// A saved tensor without its bytes: how to make its view again, the counter of its changes, and whether its storage lives.
struct Source {
  PyObject_HEAD
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // while it exists, the storage's address names no other one
  c10::VariableVersion counter;
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  caffe2::TypeMeta dtype;
  int64_t offset;
  size_t needed_bytes;
  long long version;
  bool is_wrapped_number;
  const void* address;
  PyObject* storage_key;
  PyObject* share_key;
};

inline PyTypeObject* source_type = nullptr;

inline PyObject* tuple_of(c10::IntArrayRef numbers) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(numbers.size()));
  for (size_t at = 0; tuple != nullptr && at < numbers.size(); ++at) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(at), PyLong_FromLongLong(numbers[at]));
  }
  return tuple;
}

// What a storage and a version counter over it are known by: the storage's key, unless the counter is that of a piece.
inline PyObject* share_key_of(const at::Tensor& tensor, PyObject* storage_key) {
  const at::Tensor root = tensor.is_view() ? base_of(tensor) : tensor;
  if (bytes_of(root) == storage_bytes_of(root) || HP_FAULT("own_counters")) return Py_NewRef(storage_key);
  return Py_BuildValue(
      "(OLNN)", storage_key, static_cast<long long>(root.storage_offset()), tuple_of(root.sizes()), tuple_of(root.strides()));
}

inline Source* new_source(const at::Tensor& tensor) {
  auto* source = reinterpret_cast<Source*>(source_type->tp_alloc(source_type, 0));
  if (source == nullptr) return nullptr;
  const auto& impl = *tensor.unsafeGetTensorImpl();
  const c10::Storage& storage = impl.unsafe_storage();
  new (&source->storage) c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl());
  new (&source->counter) c10::VariableVersion(impl.version_counter());
  new (&source->sizes) c10::SmallVector<int64_t, 5>(impl.sizes().begin(), impl.sizes().end());
  new (&source->strides) c10::SmallVector<int64_t, 5>(impl.strides().begin(), impl.strides().end());
  new (&source->dtype) caffe2::TypeMeta(impl.dtype());
  source->offset = impl.storage_offset();
  source->needed_bytes = at::detail::computeStorageNbytes(
      impl.sizes(), impl.strides(), impl.itemsize(), static_cast<size_t>(impl.storage_offset()));
  source->version = source->counter.current_version();
  source->is_wrapped_number = impl.is_wrapped_number();
  source->address = storage.unsafeGetStorageImpl();
  source->storage_key = PyLong_FromVoidPtr(storage.unsafeGetStorageImpl());
  source->share_key = source->storage_key == nullptr ? nullptr : share_key_of(tensor, source->storage_key);
  if (HP_FAULT("storage_watch")) source->storage.reset();
  if (source->share_key == nullptr) {
    Py_DECREF(source);
    return nullptr;
  }
  return source;
}

inline void drop_source(PyObject* self) {
  auto* source = reinterpret_cast<Source*>(self);
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(source->storage_key);
  Py_XDECREF(source->share_key);
  source->storage.~weak_intrusive_ptr();
  source->counter.~VariableVersion();
  source->sizes.~SmallVector();
  source->strides.~SmallVector();
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* source_is_unchanged(PyObject* self, PyObject*) {
  const auto* source = reinterpret_cast<Source*>(self);
  return PyBool_FromLong(source->counter.current_version() == source->version || HP_FAULT("source_version"));
}

inline PyObject* source_is_alive(PyObject* self, PyObject*) {
  return PyBool_FromLong(!reinterpret_cast<Source*>(self)->storage.expired() || HP_FAULT("storage_watch"));
}

// Whether these bytes are the storage that was saved.
inline PyObject* source_is_of(PyObject* self, PyObject* flat) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(THPVariable_Check(flat), "hyper_parallel: expected a tensor of bytes");
  const auto* storage = THPVariable_Unpack(flat).unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return PyBool_FromLong(storage == reinterpret_cast<Source*>(self)->address);
  END_HANDLE_TH_ERRORS
}

// The same size, strides, offset and dtype over other bytes, with a version counter of its own.
inline PyObject* source_over(PyObject* self, PyObject* flat) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(THPVariable_Check(flat), "hyper_parallel: expected a tensor of bytes");
  const auto* source = reinterpret_cast<Source*>(self);
  const auto& bytes = *THPVariable_Unpack(flat).unsafeGetTensorImpl();
  const c10::Storage& storage = bytes.unsafe_storage();
  TORCH_CHECK(
      storage.nbytes() >= source->needed_bytes, "hyper_parallel: cannot make a saved view again, because it needs ",
      source->needed_bytes, " bytes and the storage has ", storage.nbytes(), ". Do not resize the storage of a saved tensor.");
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), bytes.key_set(), source->dtype);
  impl->set_sizes_and_strides(source->sizes, source->strides);
  impl->set_storage_offset(source->offset);
  if (source->is_wrapped_number) impl->set_wrapped_number(true);
  return THPVariable_Wrap(at::Tensor(std::move(impl)));
  END_HANDLE_TH_ERRORS
}

// Let a view that was just made count its changes with the source.
inline PyObject* source_share_counter(PyObject* self, PyObject* view) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(THPVariable_Check(view), "hyper_parallel: expected a view");
  if (HP_FAULT("source_counter")) return Py_NewRef(view);
  THPVariable_Unpack(view).unsafeGetTensorImpl()->set_version_counter(reinterpret_cast<Source*>(self)->counter);
  return Py_NewRef(view);
  END_HANDLE_TH_ERRORS
}

inline PyObject* source_version_now(PyObject* self, void*) {
  return PyLong_FromLongLong(reinterpret_cast<Source*>(self)->counter.current_version());
}

inline PyObject* source_size(PyObject* self, void*) { return tuple_of(reinterpret_cast<Source*>(self)->sizes); }

inline PyObject* source_dtype(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  return py::cast(reinterpret_cast<Source*>(self)->dtype.toScalarType()).release().ptr();
  END_HANDLE_TH_ERRORS
}

inline PyObject* source_version(PyObject* self, void*) {
  return PyLong_FromLongLong(reinterpret_cast<Source*>(self)->version);
}

inline PyObject* source_storage_key(PyObject* self, void*) {
  return Py_NewRef(reinterpret_cast<Source*>(self)->storage_key);
}

inline PyObject* source_share_key(PyObject* self, void*) {
  return Py_NewRef(reinterpret_cast<Source*>(self)->share_key);
}

inline PyMethodDef source_methods[] = {
    {"is_unchanged", source_is_unchanged, METH_NOARGS, "Whether no change in place was counted since the save."},
    {"is_alive", source_is_alive, METH_NOARGS, "Whether the storage is still alive."},
    {"is_of", source_is_of, METH_O, "Whether these bytes are the storage that was saved."},
    {"over", source_over, METH_O, "The saved view over these bytes."},
    {"share_counter", source_share_counter, METH_O, "Let a new view count its changes with the source."},
    {nullptr, nullptr, 0, nullptr}};

inline PyGetSetDef source_values[] = {
    {"_version", source_version_now, nullptr, "The number of changes in place counted so far.", nullptr},
    {"version", source_version, nullptr, "The same when the tensor was saved.", nullptr},
    {"storage_key", source_storage_key, nullptr, "Names the storage while it lives.", nullptr},
    {"share_key", source_share_key, nullptr, "Names the storage and the version counter.", nullptr},
    {"size", source_size, nullptr, "The size of the view.", nullptr},
    {"dtype", source_dtype, nullptr, "The dtype of the view.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

inline PyType_Slot source_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(drop_source)},
    {Py_tp_methods, source_methods},
    {Py_tp_getset, source_values},
    {Py_tp_doc, const_cast<char*>("A saved tensor without its bytes.")},
    {0, nullptr}};

inline PyType_Spec source_spec = {"_hyper_parallel_tape.Source", sizeof(Source), 0, Py_TPFLAGS_DEFAULT, source_slots};

// -- The questions -------------------------------------------------------------------------------------------------------

inline PyObject* storage_bytes(PyObject*, PyObject* argument) {
  const at::Tensor* tensor = plain(argument);
  if (tensor == nullptr) return PyObject_CallOneArg(python_way().storage_bytes, argument);
  return PyLong_FromSize_t(storage_bytes_of(*tensor));
}

// (tensor, bytes of its storage, whether it is an op's output) -> a reason, or None
inline PyObject* why_kept(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const at::Tensor* tensor = count == 3 ? plain(arguments[0]) : nullptr;
  const PythonWay& way = python_way();
  if (tensor == nullptr) return PyObject_Vectorcall(way.why_kept, arguments, count, nullptr);
  if (storage_bytes_of(*tensor) == 0 || tensor->numel() == 0) return Py_NewRef(way.empty);
  const bool is_output = arguments[2] == Py_True;
  if (!is_output) {
    const int answer = is_parameter_derived(*tensor);
    if (answer != 0) return answer < 0 ? nullptr : Py_NewRef(way.parameter);
  }
  if (!has_memory(*tensor) || is_changed_piece(*tensor)) return Py_NewRef(way.exotic);
  const bool is_in_backward = torch::autograd::get_current_graph_task_id() != -1 && !HP_FAULT("in_backward");
  return Py_NewRef(!is_output && is_in_backward ? way.in_backward : Py_None);
  END_HANDLE_TH_ERRORS
}

// (tensor, whether the caller is below autograd) -> its Source. The counter is taken from the tensor itself, wherever it is.
inline PyObject* source_of(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const at::Tensor* tensor = count == 2 ? plain(arguments[0]) : nullptr;
  if (tensor == nullptr) return PyObject_Vectorcall(python_way().source_of, arguments, count, nullptr);
  return reinterpret_cast<PyObject*>(new_source(*tensor));
  END_HANDLE_TH_ERRORS
}

// The number of the node that saves a tensor now: it was numbered before it saves.
inline PyObject* sequence_of_save(PyObject*, PyObject*) {
  return PyLong_FromLongLong(static_cast<long long>(at::sequence_number::peek()) - 1);
}

inline PyObject* flat_bytes(PyObject*, PyObject* argument) {
  HANDLE_TH_ERRORS
  const at::Tensor* tensor = plain(argument);
  if (tensor == nullptr) return PyObject_CallOneArg(python_way().flat_bytes, argument);
  const auto& source = *tensor->unsafeGetTensorImpl();
  const c10::Storage& storage = source.unsafe_storage();
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), own_keys(source), caffe2::TypeMeta::Make<uint8_t>());
  impl->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return THPVariable_Wrap(at::Tensor(std::move(impl)));
  END_HANDLE_TH_ERRORS
}

inline PyMethodDef source_functions[] = {
    {"storage_bytes", storage_bytes, METH_O, "The size of a tensor's storage."},
    {"why_kept", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(why_kept)), METH_FASTCALL, "Why it stays, or None."},
    {"source_of", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(source_of)), METH_FASTCALL, "Its Source."},
    {"sequence_of_save", sequence_of_save, METH_NOARGS, "The number of the node that saves a tensor now."},
    {"flat_bytes", flat_bytes, METH_O, "All bytes of a tensor's storage, as one flat tensor over it."},
    {nullptr, nullptr, 0, nullptr}};

inline void set_python_way(
    py::object adapter, py::object parameter_class, py::object reasons, std::unordered_set<std::string> pass_through,
    int longest_chain) {
  const auto held = [](py::object object) { return object.release().ptr(); };  // for the rest of the process
  PythonWay& way = python_way();
  way.storage_bytes = held(adapter.attr("storage_bytes"));
  way.why_kept = held(adapter.attr("why_kept"));
  way.source_of = held(adapter.attr("source_of"));
  way.flat_bytes = held(adapter.attr("flat_bytes"));
  way.parameter_class = held(parameter_class);
  way.empty = held(reasons.attr("EMPTY"));
  way.parameter = held(reasons.attr("PARAMETER"));
  way.exotic = held(reasons.attr("EXOTIC"));
  way.in_backward = held(reasons.attr("IN_BACKWARD"));
  way.pass_through = std::move(pass_through);
  way.longest_chain = longest_chain;
}

inline void define_sources(py::module_& module) {
  source_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&source_spec));
  if (source_type == nullptr || PyModule_AddFunctions(module.ptr(), source_functions) != 0) throw py::error_already_set();
  module.attr("Source") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(source_type));
  module.def("set_python_way", &set_python_way);
}

}  // namespace hyper_parallel
