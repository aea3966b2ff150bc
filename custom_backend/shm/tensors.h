// torch's tensors as the core sees them: addresses, bytes, a type of numbers.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <numeric>

#include "agreement.h"

namespace adapter {

using at::Tensor;
using shm::Dtype;
using shm::Numbers;
using shm::Span;
using Tensors = std::vector<Tensor>;

inline Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat8_e5m2: return Dtype::float8_e5m2;
    case at::kFloat8_e4m3fn: return Dtype::float8_e4m3fn;
    case at::kFloat8_e5m2fnuz: return Dtype::float8_e5m2fnuz;
    case at::kFloat8_e4m3fnuz: return Dtype::float8_e4m3fnuz;
    case at::kFloat8_e8m0fnu: return Dtype::float8_e8m0fnu;
    case at::kBool: return Dtype::boolean;
    case at::kByte: return Dtype::uint8;
    case at::kChar: return Dtype::int8;
    case at::kUInt16: return Dtype::uint16;
    case at::kShort: return Dtype::int16;
    case at::kUInt32: return Dtype::uint32;
    case at::kInt: return Dtype::int32;
    case at::kUInt64: return Dtype::uint64;
    case at::kLong: return Dtype::int64;
    case at::kHalf: return Dtype::float16;
    case at::kBFloat16: return Dtype::bfloat16;
    case at::kFloat: return Dtype::float32;
    case at::kDouble: return Dtype::float64;
    default: return Dtype::bytes;
  }
}

// A user's tensor in contiguous memory: the tensor itself, or memory for a copy if it has gaps. The
// operation copies, not the call: an earlier operation in the queue may still change the numbers.
struct Dense {
  Tensor user, tensor;
  bool is_complex;

  Dense(const Tensor& given, const char* operation) {
    TORCH_CHECK(given.device().is_cpu() && given.layout() == at::kStrided, "shm: ", operation,
                " takes dense tensors on the CPU, not ", given.layout(), " on ", given.device());
    is_complex = given.is_complex();
    user = is_complex ? at::view_as_real(given) : given;
    tensor = user.is_contiguous() ? user : at::empty_like(user, at::MemoryFormat::Contiguous);
  }
  uint8_t* data() const { return static_cast<uint8_t*>(tensor.data_ptr()); }
  Span span() const { return {data(), tensor.nbytes()}; }
  size_t count() const { return tensor.numel(); }
  void read() const {
    if (!tensor.is_same(user)) tensor.copy_(user);
  }
  void write_back() const {
    if (!tensor.is_same(user)) user.copy_(tensor);
  }
};

inline Numbers numbers_of(const Dense& data, const c10d::ReduceOp& op, const char* operation) {
  const Tensor& tensor = data.tensor;
  Numbers numbers{dtype_of(tensor), static_cast<shm::Op>(static_cast<uint8_t>(op.op_)), 1};
  // A complex number counts as two real ones: correct for sums, not for a product or maximum.
  const bool adds = numbers.op == shm::Op::sum || numbers.op == shm::Op::average ||
                    numbers.op == shm::Op::premul_sum;
  TORCH_CHECK(op.op_ <= c10d::ReduceOp::PREMUL_SUM && shm::can_reduce(numbers.dtype, numbers.op) &&
                  (adds || !data.is_complex),
              "shm: ", operation, " of ", data.is_complex ? "complex " : "", tensor.scalar_type(),
              " does not know ReduceOp.",
              op.op_ <= c10d::ReduceOp::PREMUL_SUM ? shm::name_of(numbers.op) : "UNUSED");
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    const auto* factor = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    numbers.factor = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>()
                                                     : factor->double_factor;
  }
  return numbers;
}

inline std::vector<Dense> dense(const Tensors& tensors, const char* operation) {
  std::vector<Dense> all;
  for (auto& tensor : tensors) all.emplace_back(tensor, operation);
  return all;
}

inline std::vector<Span> spans(const std::vector<Dense>& tensors) {
  std::vector<Span> all;
  for (auto& tensor : tensors) all.push_back(tensor.span());
  return all;
}

inline void read(const std::vector<Dense>& tensors) {
  for (auto& tensor : tensors) tensor.read();
}

inline void write_back(const std::vector<Dense>& tensors) {
  for (auto& tensor : tensors) tensor.write_back();
}

// Split one tensor into one part per rank, of the given sizes, or of equal sizes.
inline std::vector<Span> parts(const Dense& whole, int size, const std::vector<int64_t>& split,
                        const char* operation) {
  const int64_t rows = whole.tensor.dim() ? whole.tensor.size(0) : 1;
  const int64_t sum = std::accumulate(split.begin(), split.end(), int64_t{0});
  TORCH_CHECK(split.empty() ? whole.tensor.numel() % size == 0
                            : split.size() == static_cast<size_t>(size) && sum == rows &&
                                  *std::min_element(split.begin(), split.end()) >= 0,
              "shm: ", operation, ": a tensor of shape ", whole.tensor.sizes(),
              " can not be split among ", size, " ranks as asked");
  const size_t row = rows ? whole.tensor.nbytes() / rows : 0;
  std::vector<Span> all;
  uint8_t* next = whole.data();
  for (int rank = 0; rank < size; ++rank) {
    const size_t bytes = split.empty() ? whole.tensor.nbytes() / size : split[rank] * row;
    all.push_back({next, bytes});
    next += bytes;
  }
  return all;
}

}  // namespace adapter
