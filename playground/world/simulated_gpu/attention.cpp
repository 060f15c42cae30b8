// Attention that CUDA has in one kernel, flash and memory-efficient, by its definition: it computes in float32 and keeps,
// as those do, the logarithm of the sum of each row and no matrix of scores. The CPU gets these operators here.
#include "kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;
constexpr int64_t ROWS = 32;  // memory-efficient attention keeps the sums of a multiple of so many rows

// Where several heads of the query share one of the key, a copy of it for each.
Tensor for_each_head(const Tensor& shared, const Tensor& query) {
  return shared.to(at::kFloat).repeat_interleave(query.size(1) / shared.size(1), 1);
}

Tensor sum_over_heads(const Tensor& gradient, const Tensor& shared) {
  return gradient.unflatten(1, {shared.size(1), -1}).sum(2).to(shared.scalar_type());
}

double scale_of(const Tensor& query, std::optional<double> scale) { return scale.value_or(1 / std::sqrt(double(query.size(-1)))); }

Tensor scores(const Tensor& query, const Tensor& key, const Maybe& bias, bool causal, std::optional<double> scale) {
  auto all = query.to(at::kFloat).matmul(for_each_head(key, query).transpose(-2, -1)).mul_(scale_of(query, scale));
  if (bias && bias->defined()) all.add_(bias->to(at::kFloat));
  if (causal) all.masked_fill_(at::ones({query.size(2), key.size(2)}, at::kBool).tril().logical_not(), -INFINITY);
  return all;
}

// 1 / (1 - p) where a weight is kept, 0 where it is dropped.
Tensor kept(const Tensor& weights, double p, uint64_t seed) {
  return at::rand(weights.sizes(), at::detail::createCPUGenerator(seed), weights.options()).ge(p).to(at::kFloat).div_(1 - p);
}

struct Forward {
  Tensor out, sums;
};

Forward attend(const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& bias, double p, bool causal, std::optional<double> scale) {
  auto all = scores(query, key, bias, causal, scale);
  auto sums = all.logsumexp(-1);
  auto weights = all.sub(sums.masked_fill(sums.eq(-INFINITY), INFINITY).unsqueeze(-1)).exp_();  // no key: 0
  if (p > 0) weights.mul_(kept(weights, p, seed_of_launch));
  return {weights.matmul(for_each_head(value, query)).to(query.scalar_type()), sums};
}

struct Backward {
  Tensor query, key, value, scores;
};

Backward differentiate(const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& bias, const Tensor& out,
                       const Tensor& sums, double p, bool causal, uint64_t seed, std::optional<double> scale) {
  auto kept_sums = sums.narrow(-1, 0, query.size(2));
  auto weights = scores(query, key, bias, causal, scale).sub_(kept_sums.masked_fill(kept_sums.eq(-INFINITY), INFINITY).unsqueeze(-1)).exp_();
  auto wide = gradient.to(at::kFloat), dropped = weights;
  auto of_weights = wide.matmul(for_each_head(value, query).transpose(-2, -1));
  if (p > 0) {
    auto mask = kept(weights, p, seed);
    dropped = weights.mul(mask);
    of_weights.mul_(mask);
  }
  auto of_scores = weights.mul(of_weights.sub_(wide.mul(out.to(at::kFloat)).sum(-1, true)));
  double factor = scale_of(query, scale);
  return {of_scores.matmul(for_each_head(key, query)).mul_(factor).to(query.scalar_type()),
          sum_over_heads(of_scores.transpose(-2, -1).matmul(query.to(at::kFloat)).mul_(factor), key),
          sum_over_heads(dropped.transpose(-2, -1).matmul(wide), value), of_scores};
}

uint64_t seed_in(const Tensor& state) { return *static_cast<const uint64_t*>(state.const_data_ptr()); }

Tensor with_seed(Tensor state) {
  *static_cast<uint64_t*>(state.mutable_data_ptr()) = seed_of_launch;
  return state;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& query, const Tensor& key, const Tensor& value, double p, bool causal, bool, std::optional<double> scale) {
  auto [out, sums] = attend(query, key, value, {}, p, causal, scale);
  return {out, sums, Tensor(), Tensor(), query.sym_size(2), key.sym_size(2), with_seed(at::zeros({2}, at::kUInt64)),
          at::zeros({}, at::kUInt64), at::empty({0}, query.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& sums, const Tensor&,
    const Tensor&, c10::SymInt, c10::SymInt, double p, bool causal, const Tensor& state, const Tensor&, std::optional<double> scale) {
  auto all = differentiate(gradient, query, key, value, {}, out, sums, p, causal, seed_in(state), scale);
  return {all.query, all.key, all.value};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& bias, bool keeps,
                                                     double p, bool causal, std::optional<double> scale) {
  auto [out, sums] = attend(query, key, value, bias, p, causal, scale);
  int64_t more = (ROWS - sums.size(-1) % ROWS) % ROWS;
  return {out, keeps ? at::constant_pad_nd(sums, {0, more}) : sums.narrow(-1, 0, 0), with_seed(at::zeros({}, at::kLong)), at::zeros({}, at::kLong)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor& out, const Tensor& sums,
    const Tensor& state, const Tensor&, double p, std::array<bool, 4> wanted, bool causal, std::optional<double> scale) {
  auto all = differentiate(gradient, query, key, value, bias, out, sums, p, causal, seed_in(state), scale);
  Tensor of_bias;
  if (wanted[3] && bias.defined()) of_bias = all.scores.sum_to_size(bias.sizes()).to(bias.scalar_type());
  return {all.query, all.key, all.value, of_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_scaled_dot_product_flash_attention", &flash);
  library.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  library.impl("_scaled_dot_product_efficient_attention", &efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
}
