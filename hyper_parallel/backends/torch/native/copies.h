// Buffers and copies of a whole batch in one call. Which copies there are, on which stream and behind which event, is decided
// in Python.
#pragma once

#include <ATen/Functions.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "guards.h"

namespace hyper_parallel {

// Queue copies of all bytes, (destination, source) each, on the current stream of their device.
inline void copy_all(const std::vector<std::pair<at::Tensor, at::Tensor>>& copies) {
  const Unseen unseen;
  for (const auto& [destination, source] : copies) destination.copy_(source, /*non_blocking=*/true);
}

// Uninitialised bytes of the current stream's pool, a storage for each size. Where the device has memory for some only, the
// first ones; an error where it has memory for none.
inline std::vector<at::Tensor> allocate_all(const std::vector<int64_t>& sizes, const at::Device& device) {
  const Unseen unseen;
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  std::vector<at::Tensor> made;
  made.reserve(sizes.size());
  for (const int64_t nbytes : sizes) {
    try {
      made.push_back(at::empty({nbytes}, options));
    } catch (const c10::Error&) {  // an allocator's own class, or this one
      if (made.empty()) throw;
      break;
    }
  }
  return made;
}

inline void define_copies(py::module_& module) {
  module.def("copy_all", torch::wrap_pybind_function_no_gil(copy_all));
  module.def("allocate_all", torch::wrap_pybind_function_no_gil(allocate_all));
}

}  // namespace hyper_parallel
