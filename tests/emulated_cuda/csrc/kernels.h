// Registration of the operators, and twins of kernels that the CPU lacks.
#pragma once
#include "operators.h"

namespace emulated {

// Attention of packed sequences, as flash-attention's `varlen` kernels define it.
struct Varlen {
  std::vector<int64_t> queries, keys;
  bool causal;
  int64_t left, right;
  double scale;

  // True where a query [n, 1] does not see a key [m]; the last query and the last key are the same token.
  Tensor hidden(int64_t n, int64_t m) const {
    auto ahead = at::arange(m) - at::arange(m - n, m).unsqueeze(1);
    auto mask = at::zeros({n, m}, at::kBool);
    if (left >= 0) mask |= ahead < -left;
    if (right >= 0) mask |= ahead > right;
    if (causal) mask |= ahead > 0;
    return mask;
  }
  // [tokens, heads, size] of one sequence as [heads, tokens, size] in float32, each head as often as it is asked for.
  static Tensor rows(const Tensor& x, int64_t begin, int64_t end, int64_t num_heads) {
    auto part = x.slice(0, begin, end).transpose(0, 1).to(at::kFloat);
    return part.repeat_interleave(num_heads / x.size(1), 0);
  }
  void forward(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& out, Tensor& lse) const {
    for (size_t i = 0; i + 1 < queries.size(); ++i) {
      auto a = queries[i], b = queries[i + 1], c = keys[i], d = keys[i + 1];
      if (a == b) continue;
      auto heads = q.size(1);
      auto scores = at::matmul(rows(q, a, b, heads), rows(k, c, d, heads).transpose(1, 2)) * scale;
      scores.masked_fill_(hidden(b - a, d - c), -INFINITY);
      auto normalizer = scores.logsumexp(-1);
      auto weights = (scores - normalizer.unsqueeze(-1)).exp().nan_to_num_(0.0);
      out.slice(0, a, b).copy_(at::matmul(weights, rows(v, c, d, heads)).transpose(0, 1));
      lse.slice(1, a, b).copy_(normalizer);
    }
  }
  void backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                const Tensor& lse, Tensor& dq, Tensor& dk, Tensor& dv) const {
    auto heads = q.size(1), groups = heads / k.size(1);
    auto summed = [&](const Tensor& x) { return x.unflatten(0, {k.size(1), groups}).sum(1).transpose(0, 1); };
    for (size_t i = 0; i + 1 < queries.size(); ++i) {
      auto a = queries[i], b = queries[i + 1], c = keys[i], d = keys[i + 1];
      auto rq = rows(q, a, b, heads), rk = rows(k, c, d, heads), rv = rows(v, c, d, heads);
      auto rg = rows(grad, a, b, heads), ro = rows(out, a, b, heads);
      auto scores = at::matmul(rq, rk.transpose(1, 2)) * scale;
      scores.masked_fill_(hidden(b - a, d - c), -INFINITY);
      auto weights = (scores - lse.slice(1, a, b).unsqueeze(-1)).exp().nan_to_num_(0.0);
      auto slopes = weights * (at::matmul(rg, rv.transpose(1, 2)) - (rg * ro).sum(-1, true)) * scale;
      dq.slice(0, a, b).copy_(at::matmul(slopes, rk).transpose(0, 1));
      dk.slice(0, c, d).copy_(summed(at::matmul(slopes.transpose(1, 2), rq)));
      dv.slice(0, c, d).copy_(summed(at::matmul(weights.transpose(1, 2), rg)));
    }
  }
};

inline std::vector<int64_t> offsets(const Tensor& cumulated) {
  TORCH_CHECK(cumulated.scalar_type() == at::kInt, "cu_seqlens must be int32");
  auto whole = host(cumulated).to(at::kLong).contiguous();
  return {whole.data_ptr<int64_t>(), whole.data_ptr<int64_t>() + whole.numel()};
}

inline Varlen varlen(const Tensor& q, const std::optional<Tensor>& cu_q, const std::optional<Tensor>& cu_k,
                     bool causal, std::optional<double> scale, std::optional<int64_t> left,
                     std::optional<int64_t> right) {
  TORCH_CHECK(cu_q && cu_k && q.dim() == 3, "the emulated device has flash attention of packed sequences alone");
  TORCH_CHECK(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16,
              "FlashAttention only support fp16 and bf16 data type");
  return {offsets(*cu_q), offsets(*cu_k), causal, left.value_or(-1), right.value_or(-1),
          scale.value_or(1.0 / std::sqrt(double(q.size(-1))))};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& cu_q,
    const std::optional<Tensor>& cu_k, int64_t max_q, int64_t max_k, double dropout, bool causal, bool,
    std::optional<double> scale, std::optional<int64_t> left, std::optional<int64_t> right,
    const std::optional<Tensor>& used, const std::optional<Tensor>& slopes, const std::optional<Tensor>& pages,
    std::optional<int64_t>) {
  TORCH_CHECK(dropout == 0 && !used && !slopes && !pages, "the emulated device has plain flash attention alone");
  auto call = varlen(q, cu_q, cu_k, causal, scale, left, right);
  Launch launch(q.device().index(), "flash_attention_forward");
  for (const auto& x : {q, k, v, *cu_q, *cu_k}) launch.access(x, false);
  auto out = at::empty_like(q), lse = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
  auto host_out = host(out), host_lse = host(lse);
  call.forward(host(q), host(k), host(v), host_out, host_lse);
  launch.access(out, true);
  launch.access(lse, true);
  return {out, lse, at::zeros({2}, q.options().dtype(at::kUInt64)), at::empty({0}, q.options()),
          at::empty({0}, q.options())};
}

inline std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const Tensor& cu_q, const Tensor& cu_k, int64_t, int64_t, double, bool causal, const Tensor&, const Tensor&,
    std::optional<double> scale, std::optional<int64_t> left, std::optional<int64_t> right) {
  auto call = varlen(q, cu_q, cu_k, causal, scale, left, right);
  Launch launch(q.device().index(), "flash_attention_backward");
  for (const auto& x : {grad, q, k, v, out, lse, cu_q, cu_k}) launch.access(x, false);
  auto dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  auto hq = host(dq), hk = host(dk), hv = host(dv);
  call.backward(host(grad), host(q), host(k), host(v), host(out), host(lse), hq, hk, hv);
  for (const auto& x : {dq, dk, dv}) launch.access(x, true);
  return {dq, dk, dv};
}

inline std::vector<int64_t> last_dimensions(at::IntArrayRef shape) {
  std::vector<int64_t> last(shape.size());
  std::iota(last.begin(), last.end(), -int64_t(shape.size()));
  return last;
}

// The root mean square of the last dimensions, in float32, as on a device one launch that saves `rstd` [..., 1].
inline std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, at::IntArrayRef shape,
                                           const std::optional<Tensor>& maybe_weight, std::optional<double> eps) {
  auto weight = maybe_weight.value_or(Tensor());
  Launch launch(x.device().index(), "rms_norm");
  for (const auto& each : {x, weight}) launch.access(each, false);
  auto sizes = x.sizes().vec();
  std::fill(sizes.end() - shape.size(), sizes.end(), 1);
  auto out = at::empty(x.sizes(), x.options()), rstd = at::empty(sizes, x.options().dtype(at::kFloat));
  auto last = last_dimensions(shape);
  auto wide = host(x).to(at::kFloat);
  auto scale = (wide.square().mean(last, true) + eps.value_or(std::numeric_limits<float>::epsilon())).rsqrt();
  host(rstd).copy_(scale);
  auto normed = wide * scale;
  host(out).copy_(weight.defined() ? normed * host(weight).to(at::kFloat) : normed);
  launch.access(out, true);
  launch.access(rstd, true);
  return {out, rstd};
}

inline std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, at::IntArrayRef shape,
                                                    const Tensor& rstd, const std::optional<Tensor>& maybe_weight,
                                                    std::array<bool, 2> wanted) {
  auto weight = maybe_weight.value_or(Tensor());
  Launch launch(x.device().index(), "rms_norm_backward");
  for (const auto& each : {grad, x, rstd, weight}) launch.access(each, false);
  auto last = last_dimensions(shape);
  auto wide = host(grad).to(at::kFloat), scale = host(rstd), normed = host(x).to(at::kFloat) * scale;
  auto slope = weight.defined() ? wide * host(weight).to(at::kFloat) : wide;
  Tensor dx, dweight;
  if (wanted[0]) {
    dx = at::empty(x.sizes(), x.options());
    host(dx).copy_((slope - normed * (slope * normed).mean(last, true)) * scale);
    launch.access(dx, true);
  }
  if (wanted[1] && weight.defined()) {
    dweight = at::empty(weight.sizes(), weight.options());
    host(dweight).copy_((wide * normed).reshape({-1, weight.numel()}).sum(0).view(shape));
    launch.access(dweight, true);
  }
  return {dx, dweight};
}

inline Tensor histc(const Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  Launch launch(x.device().index(), "histc");
  launch.access(x, false);
  auto found = at::histc(host(x).to(at::kDouble), bins, low, high).to(x.scalar_type());
  auto out = new_like(found, x.device().index());
  host(out).copy_(found);
  launch.access(out, true);
  return out;
}

inline Tensor& set_source(Tensor& to, c10::Storage storage, int64_t offset, at::IntArrayRef sizes,
                          at::IntArrayRef strides) {
  auto* impl = to.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.empty() && !sizes.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, strides);
  return to;
}

inline at::Scalar item(const Tensor& tensor) {
  Launch launch(tensor.device().index(), "item");
  launch.access(tensor, false);
  Guarded guard(lock());
  Runtime::get().implicit_wait(launch.stream);
  return host(tensor).item();
}

inline void record_stream(Tensor& tensor, c10::Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

inline void register_operators(torch::Library& m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_to);
  m.impl("copy_", [](Tensor& to, const Tensor& from, bool non_blocking) -> Tensor& {
    copy_between(to, from, non_blocking);
    return to;
  });
  m.impl("_copy_from", [](const Tensor& from, const Tensor& to, bool non_blocking) {
    copy_between(to, from, non_blocking);
    return to;
  });
  m.impl("_copy_from_and_resize", [](const Tensor& from, const Tensor& to) {
    resize_to(to, from.sizes(), {});
    copy_between(to, from, false);
    return to;
  });
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Storage", [](Tensor& to, c10::Storage storage) -> Tensor& {
    int64_t count = int64_t(storage.nbytes() / to.itemsize());
    return set_source(to, std::move(storage), 0, {count}, {1});
  });
  m.impl("set_.source_Tensor", [](Tensor& to, const Tensor& from) -> Tensor& {
    return set_source(to, from.storage(), from.storage_offset(), from.sizes(), from.strides());
  });
  m.impl("view", [](const Tensor& x, at::IntArrayRef sizes) { return at::native::view(x, sizes); });
  m.impl("as_strided", [](const Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> at) {
    return at::native::as_strided_tensorimpl(x, sizes, strides, at);
  });
  m.impl("_reshape_alias", [](const Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides) {
    return at::native::_reshape_alias(x, sizes, strides);
  });
  m.impl("unfold", [](const Tensor& x, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(x, dim, size, step);
  });
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("_flash_attention_forward", flash_forward);
  m.impl("_flash_attention_backward", flash_backward);
  m.impl("_fused_rms_norm", rms_norm);
  m.impl("_fused_rms_norm_backward", rms_norm_backward);
  // Not by way of CUDA's own convolutions, which the CPU lacks.
  for (auto* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("histc", histc);
  m.impl("_foreach_copy_", copy_lists);
  // On a device each of these is a few launches, whatever the length of the list; without this, one for each tensor.
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if ((name.name.rfind("aten::_foreach_", 0) == 0 && name.name != "aten::_foreach_copy_") || name.name == "aten::fill_" || name.name == "aten::zero_")
      m.impl(toString(name).c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace emulated
