// Tensors as a tape sees them: a storage and a view of it, and what can be told of a tensor without running an op.
#pragma once

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <typeinfo>

#include "guards.h"
#include "tape.h"

namespace hyper_parallel {

inline Counters& counters() {
  static auto* all = new Counters();  // never destroyed: engine threads may outlive static objects
  return *all;
}

inline size_t mix(size_t seed, size_t value) {
  return seed ^ (value + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2));
}

// -- Views ---------------------------------------------------------------------------------------------------------------

inline c10::DispatchKeySet keys_of(const at::Tensor& tensor) {
  auto keys = tensor.unsafeGetTensorImpl()->key_set();
  if (HP_FAULT("conjugate_bit")) keys = keys.remove(c10::DispatchKey::Conjugate);
  if (HP_FAULT("negative_bit")) keys = keys.remove(c10::DispatchKey::Negative);
  return keys;
}

inline void View::take(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  sizes.assign(impl->sizes().begin(), impl->sizes().end());
  strides.assign(impl->strides().begin(), impl->strides().end());
  offset = impl->storage_offset();
  dtype = impl->dtype();
  keys = keys_of(tensor);
  is_wrapped_number = impl->is_wrapped_number();
}

inline View View::of(const at::Tensor& tensor) {
  View view;
  view.take(tensor);
  return view;
}

inline at::Tensor View::over(c10::Storage storage) const {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, dtype);
  impl->set_sizes_and_strides(sizes, strides);
  impl->set_storage_offset(offset);
  if (is_wrapped_number) impl->set_wrapped_number(true);
  return at::Tensor(std::move(impl));
}

inline at::Tensor View::bits(c10::Storage storage) const {
  View raw = *this;
  raw.keys = keys.remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);
  size_t itemsize = dtype.itemsize();
  if (itemsize == 16) {  // a complex of doubles: two integers each
    for (auto& stride : raw.strides) stride *= 2;
    raw.sizes.push_back(2);
    raw.strides.push_back(1);
    raw.offset *= 2;
    itemsize = 8;
  }
  raw.dtype = c10::scalarTypeToTypeMeta(
      itemsize == 1 ? at::kByte : itemsize == 2 ? at::kShort : itemsize == 4 ? at::kInt : at::kLong);
  raw.is_wrapped_number = false;
  return raw.over(std::move(storage));
}

// The same as `*this == View::of(tensor)`, without making one.
inline bool View::is_of(const at::Tensor& tensor) const {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return offset == impl->storage_offset() && dtype == impl->dtype() && keys == keys_of(tensor) &&
      c10::IntArrayRef(sizes) == impl->sizes() && c10::IntArrayRef(strides) == impl->strides() &&
      is_wrapped_number == impl->is_wrapped_number();
}

inline bool View::operator==(const View& other) const {
  return offset == other.offset && dtype == other.dtype && keys == other.keys && sizes == other.sizes &&
      strides == other.strides && is_wrapped_number == other.is_wrapped_number;
}

// -- Facts about tensors -------------------------------------------------------------------------------------------------

// Why a tensor cannot be described by a storage and a view; null when it can.
inline const char* why_not_plain(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto keys = impl->key_set();
  if (keys.has(c10::DispatchKey::Python)) return "a tensor subclass";
  if (keys.has(kRecorderKey)) return "a fake tensor";  // torch 2.15 has begun to mark them with this key
  if (tensor.layout() != at::kStrided) return "a tensor that is not strided";
  if (keys.has(c10::DispatchKey::ZeroTensor)) return "a tensor without memory";
  if (tensor.is_nested()) return "a nested tensor";
  if (!impl->has_storage() || !impl->storage()) return "a tensor without a storage";
  if (tensor.is_quantized()) return "a quantized tensor";
  if (impl->has_symbolic_sizes_strides()) return "a tensor with symbolic sizes";
  if (tensor.is_meta()) return "a tensor without memory";
  return nullptr;
}

inline bool counts_versions(const at::Tensor& tensor) { return !tensor.is_inference(); }

// A second tensor over the same bytes and with the same version counter, without a graph.
inline at::Tensor alias_of(const at::Tensor& tensor) {
  // Under a dispatch mode torch would ask the mode for the copy.
  const c10::impl::ExcludeDispatchKeyGuard no_mode(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

inline c10::Storage copy_of(const c10::Storage& storage) {
  Unseen unseen;
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
  at::Tensor flat = at::empty({0}, options);
  flat.set_(storage, 0, {nbytes}, {1});
  return flat.clone().storage();
}

// Whether a Python autograd.Function returned it: kernels that the dispatcher does not see may have filled it.
inline bool is_from_python_function(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || !meta->grad_fn_) return false;
  // Torch does not export the type, so its name is compared, and its address remembered.
  static std::atomic<const std::type_info*> python_node{nullptr};
  const auto& node = *meta->grad_fn_;
  const std::type_info& type = typeid(node);
  if (&type == python_node.load(std::memory_order_relaxed)) return true;
  if (std::strcmp(type.name(), "N5torch8autograd6PyNodeE") != 0) return false;
  python_node.store(&type, std::memory_order_relaxed);
  return true;
}

template <typename Visit>
void for_each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    const auto list = value.toOptionalTensorVector();
    for (const auto& tensor : list) {
      if (tensor.has_value() && tensor->defined()) visit(*tensor);
    }
  }
}

}  // namespace hyper_parallel
