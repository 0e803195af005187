// A reference to a Python object that may be dropped on any thread, with or without the GIL.
#pragma once

#include <Python.h>

#include <utility>

namespace hyper_parallel {

inline bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

class PythonRef {
 public:
  PythonRef() = default;
  explicit PythonRef(PyObject* borrowed) : object_(borrowed) { Py_XINCREF(object_); }
  static PythonRef take(PyObject* owned) {
    PythonRef ref;
    ref.object_ = owned;
    return ref;
  }
  PythonRef(const PythonRef&) = delete;
  PythonRef& operator=(const PythonRef&) = delete;
  PythonRef(PythonRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PythonRef& operator=(PythonRef&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~PythonRef() {
    // At interpreter exit nothing of ours calls Python: the reference is leaked there.
    if (object_ == nullptr || !Py_IsInitialized() || is_finalizing()) return;
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(object_);
    PyGILState_Release(state);
  }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

}  // namespace hyper_parallel
