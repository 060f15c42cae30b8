// Operators that CUDA has and the CPU has not, by operators that both have. Statistics are float32, as CUDA's are, whatever
// the type of the input.
#include "composed.h"

#include <ATen/Functions.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor wide(const Tensor& tensor) { return c10::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor; }
bool is_given(const Maybe& tensor) { return tensor && tensor->defined(); }

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cudnn_batch_norm(const Tensor& input, const Tensor& weight, const Maybe& bias, const Maybe& mean,
                                                            const Maybe& var, bool training, double momentum, double eps) {
  auto [output, save_mean, save_invstd] = at::native_batch_norm(input, weight, bias, mean, var, training, momentum, eps);
  return {output, save_mean, save_invstd, at::empty({0}, input.options().dtype(at::kByte))};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_batch_norm_backward(const Tensor& input, const Tensor& grad, const Tensor& weight, const Maybe& mean,
                                                             const Maybe& var, const Maybe& save_mean, const Maybe& save_invstd, double eps,
                                                             const Tensor&) {
  return at::native_batch_norm_backward(grad, input, weight, mean, var, save_mean, save_invstd, true, eps, {true, true, true});
}

// SyncBatchNorm's five; a channel is dimension 1.
Tensor by_channel(const Tensor& values, const Tensor& like) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[1] = values.numel();
  return values.view(shape);
}

std::vector<int64_t> but_channels(const Tensor& input) {
  std::vector<int64_t> all{0};
  for (int64_t d = 2; d < input.dim(); ++d) all.push_back(d);
  return all;
}

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  auto dims = but_channels(input);
  return {wide(input).mean(dims), wide(input).var(dims, false).add(eps).rsqrt()};
}

std::tuple<Tensor, Tensor> batch_norm_gather_stats_with_counts(const Tensor& input, const Tensor& means, const Tensor& invstds,
                                                               const Maybe& running_mean, const Maybe& running_var, double momentum, double eps,
                                                               const Tensor& counts) {
  auto share = counts.view({-1, 1}), total = counts.sum();
  auto mean = means.mul(share).sum(0).div(total);
  auto var = invstds.pow(-2).sub(eps).add(means.sub(mean).square()).mul(share).sum(0).div(total);
  if (running_mean) const_cast<Tensor&>(*running_mean).mul_(1 - momentum).add_(mean, momentum);
  if (running_var) const_cast<Tensor&>(*running_var).mul_(1 - momentum).add_(var.mul(total).div(total.sub(1)), momentum);
  return {mean, var.add(eps).rsqrt()};
}

Tensor batch_norm_elemt(const Tensor& input, const Maybe& weight, const Maybe& bias, const Tensor& mean, const Tensor& invstd, double) {
  auto output = wide(input).sub(by_channel(mean, input)).mul(by_channel(invstd, input));
  if (weight) output = output.mul(by_channel(*weight, input));
  return (bias ? output.add(by_channel(*bias, input)) : output).to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                                      const Tensor& invstd, const Maybe&, bool, bool, bool) {
  auto dims = but_channels(input);
  auto sum = wide(grad).sum(dims), product = wide(grad).mul(wide(input).sub(by_channel(mean, input))).sum(dims);
  return {sum, product, product.mul(invstd), sum};
}

Tensor batch_norm_backward_elemt(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd, const Maybe& weight,
                                 const Tensor& sum, const Tensor& product, const Tensor& counts) {
  auto total = counts.sum();
  auto inner = wide(grad)
                   .sub(by_channel(sum.div(total), input))
                   .sub(wide(input).sub(by_channel(mean, input)).mul(by_channel(product.div(total).mul(invstd.square()), input)));
  auto factor = weight ? invstd.mul(*weight) : invstd;
  return inner.mul(by_channel(factor, input)).to(input.scalar_type());
}

// The last dimensions, so many as there are in `shape`.
std::tuple<Tensor, Tensor> fused_rms_norm_backward(const Tensor& grad, const Tensor& input, at::IntArrayRef shape, const Tensor& rstd,
                                                   const Maybe& weight, std::array<bool, 2>) {
  std::vector<int64_t> inner, outer;
  for (int64_t d = 0; d < input.dim(); ++d) (d < input.dim() - int64_t(shape.size()) ? outer : inner).push_back(d);
  auto normal = wide(input).mul(wide(rstd)), scaled = is_given(weight) ? wide(grad).mul(wide(*weight)) : wide(grad);
  auto of_input = scaled.sub(normal.mul(scaled.mul(normal).mean(inner, true))).mul(wide(rstd)).to(input.scalar_type());
  if (!is_given(weight)) return {of_input, Tensor()};
  auto of_weight = wide(grad).mul(normal);
  return {of_input, (outer.empty() ? of_weight : of_weight.sum(outer)).to(weight->scalar_type())};
}

// Cells of recurrent networks. The gates are those of the input and of the hidden state, a block each.
Tensor with_bias(const Tensor& gates, const Maybe& bias) { return is_given(bias) ? gates.add(*bias) : gates; }
Tensor sum_over_batch(const Tensor& grad, bool has_bias) { return has_bias ? grad.sum(0) : Tensor(); }

std::tuple<Tensor, Tensor, Tensor> fused_lstm_cell(const Tensor& of_input, const Tensor& of_hidden, const Tensor& cx, const Maybe& input_bias,
                                                   const Maybe& hidden_bias) {
  auto gates = with_bias(of_input, input_bias).add(with_bias(of_hidden, hidden_bias)).chunk(4, 1);
  auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  auto cy = f.mul(cx).add(i.mul(g));
  return {o.mul(cy.tanh()), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> fused_lstm_cell_backward(const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx, const Tensor& cy,
                                                            const Tensor& workspace, bool has_bias) {
  if (!is_given(grad_hy) && !is_given(grad_cy)) return {};
  auto gates = workspace.chunk(4, 1);
  auto i = gates[0], f = gates[1], g = gates[2], o = gates[3], tanh = cy.tanh();
  auto gh = is_given(grad_hy) ? *grad_hy : at::zeros_like(cy);
  auto gc = gh.mul(o).mul(tanh.square().neg().add(1));
  if (is_given(grad_cy)) gc = gc.add(*grad_cy);
  auto grad = at::cat({gc.mul(g).mul(i).mul(i.neg().add(1)), gc.mul(cx).mul(f).mul(f.neg().add(1)), gc.mul(i).mul(g.square().neg().add(1)),
                       gh.mul(tanh).mul(o).mul(o.neg().add(1))}, 1);
  return {grad, gc.mul(f), sum_over_batch(grad, has_bias)};
}

std::tuple<Tensor, Tensor> fused_gru_cell(const Tensor& of_input, const Tensor& of_hidden, const Tensor& hx, const Maybe& input_bias,
                                          const Maybe& hidden_bias) {
  auto input = with_bias(of_input, input_bias).chunk(3, 1), hidden = with_bias(of_hidden, hidden_bias).chunk(3, 1);
  auto r = input[0].add(hidden[0]).sigmoid(), z = input[1].add(hidden[1]).sigmoid();
  auto n = input[2].add(r.mul(hidden[2])).tanh();
  return {n.add(z.mul(hx.sub(n))), at::cat({r, z, n, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fused_gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  auto r = kept[0], z = kept[1], n = kept[2], hx = kept[3], hidden = kept[4];
  auto of_n = grad.mul(z.neg().add(1)).mul(n.square().neg().add(1));
  auto of_z = grad.mul(hx.sub(n)).mul(z).mul(z.neg().add(1)), of_r = of_n.mul(hidden).mul(r).mul(r.neg().add(1));
  auto input = at::cat({of_r, of_z, of_n}, 1), recurrent = at::cat({of_r, of_z, of_n.mul(r)}, 1);
  return {input, recurrent, grad.mul(z), sum_over_batch(input, has_bias), sum_over_batch(recurrent, has_bias)};
}

// Products in a type that is wider than the factors': it is the type of the sums.
Tensor mm_into(const Tensor& a, const Tensor& b, at::ScalarType type) { return at::mm(a.to(type), b.to(type)); }
Tensor bmm_into(const Tensor& a, const Tensor& b, at::ScalarType type) { return at::bmm(a.to(type), b.to(type)); }
Tensor addmm_into(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType type, const at::Scalar& beta, const at::Scalar& alpha) {
  return at::addmm(self.to(type), a.to(type), b.to(type), beta, alpha);
}
Tensor baddbmm_into(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType type, const at::Scalar& beta, const at::Scalar& alpha) {
  return at::baddbmm(self.to(type), a.to(type), b.to(type), beta, alpha);
}

// The same, into a tensor that is given.
template <auto function, class... Args>
Tensor& into(Args... args, Tensor& out) {
  auto made = function(args...);
  out.resize_(made.sizes());
  return out.copy_(made);
}
using Factor = const Tensor&;
using Number = const at::Scalar&;

Tensor nansum(const Tensor& self, at::OptionalIntArrayRef dim, bool keepdim, std::optional<at::ScalarType> type) {
  return at::where(self.isnan(), at::zeros({}, self.options()), self).sum(dim, keepdim, type);
}

// The devices may differ, as in any copy.
void copy_each(at::TensorList to, at::TensorList from, bool non_blocking) {
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
}

// Whether to leave CTC to cuDNN or MIOpen: there are none.
bool use_library_for_ctc(const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) { return false; }
bool use_library_for_ctc_of(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) { return false; }

}  // namespace

#define COMPOSE(name, function) {name, +[](torch::Library& library) { library.impl(name, &function); }}
const std::map<std::string, void (*)(torch::Library&)>& composed() {
  static const std::map<std::string, void (*)(torch::Library&)> all{
      COMPOSE("native_dropout", native_dropout),
      COMPOSE("cudnn_batch_norm", cudnn_batch_norm),
      COMPOSE("cudnn_batch_norm_backward", cudnn_batch_norm_backward),
      COMPOSE("batch_norm_stats", batch_norm_stats),
      COMPOSE("batch_norm_gather_stats_with_counts", batch_norm_gather_stats_with_counts),
      COMPOSE("batch_norm_elemt", batch_norm_elemt),
      COMPOSE("batch_norm_backward_reduce", batch_norm_backward_reduce),
      COMPOSE("batch_norm_backward_elemt", batch_norm_backward_elemt),
      COMPOSE("_fused_rms_norm_backward", fused_rms_norm_backward),
      COMPOSE("_thnn_fused_lstm_cell", fused_lstm_cell),
      COMPOSE("_thnn_fused_lstm_cell_backward_impl", fused_lstm_cell_backward),
      COMPOSE("_thnn_fused_gru_cell", fused_gru_cell),
      COMPOSE("_thnn_fused_gru_cell_backward", fused_gru_cell_backward),
      COMPOSE("mm.dtype", mm_into),
      COMPOSE("bmm.dtype", bmm_into),
      COMPOSE("addmm.dtype", addmm_into),
      COMPOSE("baddbmm.dtype", baddbmm_into),
      COMPOSE("mm.dtype_out", (into<&mm_into, Factor, Factor, at::ScalarType>)),
      COMPOSE("bmm.dtype_out", (into<&bmm_into, Factor, Factor, at::ScalarType>)),
      COMPOSE("addmm.dtype_out", (into<&addmm_into, Factor, Factor, Factor, at::ScalarType, Number, Number>)),
      COMPOSE("baddbmm.dtype_out", (into<&baddbmm_into, Factor, Factor, Factor, at::ScalarType, Number, Number>)),
      COMPOSE("nansum", nansum),
      COMPOSE("_foreach_copy_", copy_each),
      COMPOSE("_use_cudnn_ctc_loss", use_library_for_ctc),
      COMPOSE("_use_cudnn_ctc_loss.Tensor", use_library_for_ctc_of),
      COMPOSE("_use_miopen_ctc_loss", use_library_for_ctc),
      COMPOSE("_use_miopen_ctc_loss.Tensor", use_library_for_ctc_of),
  };
  return all;
}
