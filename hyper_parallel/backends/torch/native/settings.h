// Settings of the process under which kernels choose what they do. They are recorded for every op, and an op runs again under its own.
#pragma once

#include <ATen/Context.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <torch/version.h>

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "faults.h"

namespace hyper_parallel {

// Private members of torch's context. Its public functions do not give these as they are: they answer what a setting comes to
// after inheritance, raise where older and newer names were both used, or warn. What they give could not be put back.
namespace context_member {
template <typename Name, auto Member>
struct Reveal {
  friend constexpr auto reveal(Name) { return Member; }
};
struct MatmulPrecision {
  friend constexpr auto reveal(MatmulPrecision);
};
struct CudnnTf32 {
  friend constexpr auto reveal(CudnnTf32);
};
struct Linalg {
  friend constexpr auto reveal(Linalg);
};
struct Blas {
  friend constexpr auto reveal(Blas);
};
template struct Reveal<MatmulPrecision, &at::Context::float32_matmul_precision>;
template struct Reveal<CudnnTf32, &at::Context::allow_tf32_cudnn>;
template struct Reveal<Linalg, &at::Context::linalg_preferred_backend>;
template struct Reveal<Blas, &at::Context::blas_preferred_backend>;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
struct Precisions {
  friend constexpr auto reveal(Precisions);
};
template struct Reveal<Precisions, &at::Context::fp32_precision>;
inline auto& precisions(at::Context& context) { return context.*reveal(Precisions{}); }
#else
inline std::array<int, 0>& precisions(at::Context&) {  // this release has one precision for everything
  static std::array<int, 0> none;
  return none;
}
#endif
template <typename Name>
auto& of(at::Context& context, Name name) {
  return context.*reveal(name);
}
}  // namespace context_member

// The precision of float32 matmuls and convolutions (TF32), of reductions of half precision, and the library that runs them.
struct Precision {
  std::remove_cvref_t<decltype(context_member::of(at::globalContext(), context_member::MatmulPrecision{}))> matmul;
  std::remove_cvref_t<decltype(context_member::precisions(at::globalContext()))> by_backend;
  bool cudnn_tf32;
  bool onednn_tf32;
  decltype(at::globalContext().allowFP16ReductionCuBLAS()) half_reduction;
  decltype(at::globalContext().allowBF16ReductionCuBLAS()) bfloat_reduction;
  bool half_accumulation;
  bool half_reduction_on_cpu;
  at::LinalgBackend linalg;
  at::BlasBackend blas;
  std::optional<int32_t> sm_carveout;

  bool operator==(const Precision&) const = default;

  static Precision read(at::Context& context) {
    using namespace context_member;
    return {of(context, MatmulPrecision{}), precisions(context), of(context, CudnnTf32{}), context.allowTF32OneDNN(),
            context.allowFP16ReductionCuBLAS(), context.allowBF16ReductionCuBLAS(), context.allowFP16AccumulationCuBLAS(),
            context.allowFP16ReductionCPU(), of(context, Linalg{}), of(context, Blas{}), context._SMCarveout_EXPERIMENTAL()};
  }

  // Value by value: other threads may look entries up in torch's table at the same moment.
  static void put_back(auto& table, const auto& wanted) {
    if constexpr (requires { wanted.begin()->second; }) {
      for (auto& [key, value] : table) {
        const auto found = wanted.find(key);
        if (found != wanted.end() && !(value == found->second)) value = found->second;
      }
    }
  }

  void apply(auto& context) const {
    using namespace context_member;
    of(context, MatmulPrecision{}) = matmul;
    put_back(precisions(context), by_backend);
    of(context, CudnnTf32{}) = cudnn_tf32;
    if (context.allowTF32OneDNN() != onednn_tf32) context.setAllowTF32OneDNN(onednn_tf32);  // warns on some processors
    if constexpr (requires { context.setAllowFP16ReductionCuBLAS(true, true); }) {
      // 0: all is allowed; 1: no reduced precision; 2: no split of the reduced dimension either
      context.setAllowFP16ReductionCuBLAS(static_cast<int>(half_reduction) == 0, static_cast<int>(half_reduction) != 2);
      context.setAllowBF16ReductionCuBLAS(static_cast<int>(bfloat_reduction) == 0, static_cast<int>(bfloat_reduction) != 2);
    } else {
      context.setAllowFP16ReductionCuBLAS(static_cast<bool>(half_reduction));
      context.setAllowBF16ReductionCuBLAS(static_cast<bool>(bfloat_reduction));
    }
    context.setAllowFP16AccumulationCuBLAS(half_accumulation);
    if (context.allowFP16ReductionCPU() != half_reduction_on_cpu) context.setAllowFP16ReductionCPU(half_reduction_on_cpu);
    of(context, Linalg{}) = linalg;
    of(context, Blas{}) = blas;
    context._setSMCarveout_EXPERIMENTAL(sm_carveout);
  }
};

// Which kernels of scaled dot product attention may be chosen, and in which order they are tried.
struct Attention {
  std::array<at::SDPBackend, at::num_sdp_backends> order;
  bool flash;
  bool memory_efficient;
  bool math;
  bool cudnn;
  bool overrideable;
  bool reduced_math;
  bool third_flash = false;   // later releases have these two
  bool fourth_flash = false;

  bool operator==(const Attention&) const = default;

  static Attention read(auto& context) {
    Attention now{context.sDPPriorityOrder(), context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(),
                  context.userEnabledMathSDP(), context.userEnabledCuDNNSDP(), context.userEnabledOverrideableSDP(),
                  context.allowFP16BF16ReductionMathSDP()};
    if constexpr (requires { context.userEnabledFA3SDP(); }) now.third_flash = context.userEnabledFA3SDP();
    if constexpr (requires { context.userEnabledFA4SDP(); }) now.fourth_flash = context.userEnabledFA4SDP();
    return now;
  }

  void apply(auto& context) const {
    std::vector<int64_t> numbers;
    for (auto backend : order) numbers.push_back(static_cast<int64_t>(backend));
    context.setSDPPriorityOrder(numbers);
    context.setSDPUseFlash(flash);
    context.setSDPUseMemEfficient(memory_efficient);
    context.setSDPUseMath(math);
    context.setSDPUseCuDNN(cudnn);
    context.setSDPUseOverrideable(overrideable);
    context.setAllowFP16BF16ReductionMathSDP(reduced_math);
    if constexpr (requires { context.setSDPUseFA3(true); }) context.setSDPUseFA3(third_flash);
    if constexpr (requires { context.setSDPUseFA4(true); }) context.setSDPUseFA4(fourth_flash);
  }
};

struct Settings {
  caffe2::TypeMeta default_dtype;
  bool deterministic;
  bool deterministic_warns;
  bool deterministic_cudnn;
  bool deterministic_mkldnn;
  bool benchmark_cudnn;
  bool cudnn;
  bool mkldnn;
  bool nnpack;
  Precision precision;
  Attention attention;

  bool operator==(const Settings&) const = default;

  static Settings read() {
    auto& context = at::globalContext();
    return {c10::get_default_dtype(), context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(),
            context.deterministicCuDNN(), context.deterministicMkldnn(), context.benchmarkCuDNN(), context.userEnabledCuDNN(),
            context.userEnabledMkldnn(), context.userEnabledNNPACK(), Precision::read(context), Attention::read(context)};
  }

  void apply() const {
    auto& context = at::globalContext();
    c10::set_default_dtype(default_dtype);
    context.setDeterministicAlgorithms(deterministic, deterministic_warns);
    context.setDeterministicCuDNN(deterministic_cudnn);
    context.setDeterministicMkldnn(deterministic_mkldnn);
    context.setBenchmarkCuDNN(benchmark_cudnn);
    context.setUserEnabledCuDNN(cudnn);
    context.setUserEnabledMkldnn(mkldnn);
    context.setUserEnabledNNPACK(nnpack);
    if (!HP_FAULT("settings_of_precision")) precision.apply(context);
    if (!HP_FAULT("settings_of_attention")) attention.apply(context);
  }

  // The settings as they are now: the same object as long as none changes between two calls of this thread.
  static const std::shared_ptr<const Settings>& now();
};

// All bytes of torch's context, and what it keeps outside of them. Equal bytes are equal settings, and to compare them takes less
// time than to ask for each setting.
class ContextBytes {
 public:
  bool are_those_of_now() const {
    return std::memcmp(bytes_.data(), &at::globalContext(), sizeof(at::Context)) == 0 &&
        default_dtype_ == c10::get_default_dtype() && elsewhere_ == digest(context_member::precisions(at::globalContext()));
  }
  void take() {
    std::memcpy(bytes_.data(), &at::globalContext(), sizeof(at::Context));
    default_dtype_ = c10::get_default_dtype();
    elsewhere_ = digest(context_member::precisions(at::globalContext()));
  }

 private:
  // Of the values of a table, in the order in which it has them. No two enumerators come to the same digest.
  template <typename T>
  static size_t digest(const T& value) {
    if constexpr (std::is_enum_v<T> || std::is_integral_v<T>) {
      return static_cast<size_t>(value);
    } else if constexpr (std::is_same_v<T, std::string>) {
      return std::hash<std::string>{}(value);
    } else {
      size_t sum = 0;
      for (const auto& entry : value) sum = sum * 31 + digest(value_of(entry));
      return sum;
    }
  }
  template <typename Key, typename Value>
  static const Value& value_of(const std::pair<const Key, Value>& entry) {
    return entry.second;
  }
  static int value_of(int entry) { return entry; }

  std::array<unsigned char, sizeof(at::Context)> bytes_{};
  caffe2::TypeMeta default_dtype_;
  size_t elsewhere_ = 0;
};

inline const std::shared_ptr<const Settings>& Settings::now() {
  struct Seen {
    ContextBytes bytes;
    std::shared_ptr<const Settings> last;
  };
  thread_local Seen seen;
  Seen& here = seen;  // of this thread, looked up once
  if (here.last != nullptr && here.bytes.are_those_of_now()) return here.last;
  here.bytes.take();
  auto read = std::make_shared<const Settings>(Settings::read());
  if (here.last == nullptr || !(*here.last == *read)) here.last = std::move(read);
  return here.last;
}

}  // namespace hyper_parallel
