// What a policy says about an op of a region. A policy is a table: it answers by the op, by how often the op came, or by
// being asked for every instance; it does not see the arguments.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "guards.h"
#include "python_ref.h"

namespace hyper_parallel {

enum class Fate : uint8_t { kRecompute = 0, kSave = 1, kSwap = 2 };

inline Fate fate_from(PyObject* number) {
  const long value = PyLong_AsLong(number);
  if (value == -1 && PyErr_Occurred()) throw python_error();
  TORCH_CHECK(value >= 0 && value <= 2, "a fate is 0, 1 or 2");
  return static_cast<Fate>(value);
}

// The answers for one op.
struct Answers {
  Fate fate = Fate::kRecompute;  // for every instance, where nothing else is given
  std::vector<Fate> by_occurrence;
  PythonRef ask;                    // () -> fate
  PythonRef is_passed_over;         // (first argument) -> whether this instance is neither counted nor asked for
  bool is_constant() const { return by_occurrence.empty() && !ask; }
};

class Fates {
 public:
  explicit Fates(PyObject* resolve) : resolve_(resolve) {}

  // The answers for an op; found once by calling `resolve(name, overload)`, which returns (answers, is_passed_over) where the
  // answers are a fate, a list of fates by occurrence, or a function, and the other is None or a function.
  const Answers& of(const c10::OperatorHandle& op) {
    const auto& name = op.operator_name();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = known_.find(name);
      if (found != known_.end()) return *found->second;
    }
    auto answers = std::make_unique<Answers>();
    {
      WithGil gil;
      PythonRef found = PythonRef::take(
          PyObject_CallFunction(resolve_.get(), "ss", name.name.c_str(), name.overload_name.c_str()));
      if (!found) throw python_error();
      PyObject* given = PyTuple_GetItem(found.get(), 0);
      PyObject* pass_over = given == nullptr ? nullptr : PyTuple_GetItem(found.get(), 1);
      if (pass_over == nullptr) throw python_error();
      if (PyList_Check(given)) {
        for (Py_ssize_t at = 0; at < PyList_GET_SIZE(given); ++at) {
          answers->by_occurrence.push_back(fate_from(PyList_GET_ITEM(given, at)));
        }
      } else if (PyCallable_Check(given)) {
        answers->ask = PythonRef(given);
      } else {
        answers->fate = fate_from(given);
      }
      if (pass_over != Py_None) answers->is_passed_over = PythonRef(pass_over);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    return *known_.emplace(name, std::move(answers)).first->second;
  }

 private:
  PythonRef resolve_;
  std::mutex mutex_;
  std::unordered_map<c10::OperatorName, std::unique_ptr<Answers>> known_;
};

}  // namespace hyper_parallel
