// torch.ops.<LORAQ_NAMESPACE>: checks shapes and dtypes, then passes plain pointers to the kernels.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

#include "elementwise.h"
#include "probe.h"

namespace loraq {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class Body>
void dispatch(at::ScalarType dtype, const Body& body) {
  if (dtype == at::kBFloat16) return body(Bf16{});
  TORCH_CHECK(dtype == at::kFloat, "the kernels support bfloat16 and float32, not ", dtype);
  body(F32{});
}

template <class Value>
Value* pointer(const Tensor& t) {
  return static_cast<Value*>(t.data_ptr());
}

template <class Value>
const Value* pointer_or_null(const OptionalTensor& t) {
  return t.has_value() ? static_cast<const Value*>(t->const_data_ptr()) : nullptr;
}

void check_rows(const Tensor& t, const char* name) {
  TORCH_CHECK(t.dim() == 2 && (t.stride(1) == 1 || t.size(1) == 1), name, " must be two-dimensional with contiguous rows");
}

void check_int32(const Tensor& t, const char* name) {
  TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous(), name, " must be contiguous int32");
}

uint8_t* layer_pages(const Tensor& pool, int64_t layer) {
  TORCH_CHECK(pool.scalar_type() == at::kByte && pool.dim() == 3 && pool.is_contiguous(), "pool must be uint8 [L, P, bytes]");
  TORCH_CHECK(layer >= 0 && layer < pool.size(0), "layer ", layer, " is outside the pool's ", pool.size(0));
  return pointer<uint8_t>(pool) + layer * pool.stride(0);
}

LoraTables lora_tables(const Tensor& pool, const Tensor& adapter_pages, const Tensor& parts, const Tensor& scales,
                       const Tensor& segments, const Tensor& segment_slots, int64_t layer) {
  check_int32(adapter_pages, "adapter_pages");
  check_int32(parts, "parts");
  check_int32(segments, "segments");
  check_int32(segment_slots, "segment_slots");
  TORCH_CHECK(scales.scalar_type() == at::kFloat && scales.is_contiguous(), "scales must be contiguous float32");
  return {layer_pages(pool, layer),
          pool.size(2),
          pointer<int32_t>(adapter_pages),
          adapter_pages.size(1),
          pointer<int32_t>(parts) + layer * kNumProjections * 2,
          pointer<float>(scales) + layer * kNumProjections,
          pool.size(0),
          pointer<int32_t>(segments),
          pointer<int32_t>(segment_slots),
          segment_slots.numel()};
}

LinearShape linear_shape(int64_t num_rows, int64_t in_features, at::IntArrayRef out_features, int64_t values_per_word) {
  TORCH_CHECK(out_features.size() >= 1 && out_features.size() <= kMaxGroup, "a fused linear has one to three projections");
  LinearShape shape{num_rows, in_features, (in_features + values_per_word - 1) / values_per_word, 0, {}, 0};
  for (int64_t n : out_features) {
    shape.out_features[shape.num_projections++] = n;
    shape.num_blocks += (n + kColumns - 1) / kColumns;
  }
  return shape;
}

int64_t sum(at::IntArrayRef values) {
  int64_t total = 0;
  for (int64_t v : values) total += v;
  return total;
}

void linear_op(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, at::IntArrayRef out_features, Tensor& y) {
  check_rows(x, "x");
  check_rows(y, "y");
  TORCH_CHECK(y.size(0) == x.size(0) && y.size(1) == sum(out_features), "y must be [T, sum of out_features]");
  dispatch(x.scalar_type(), [&](auto e) {
    using E = decltype(e);
    LinearShape shape = linear_shape(x.size(0), x.size(1), out_features, E::kPerWord);
    TORCH_CHECK(packed.numel() == shape.num_blocks * shape.words * kColumns, "packed weight does not fit x and out_features");
    auto run = [&](auto out) {
      using Out = decltype(out);
      linear<E, Out>(pointer<typename E::Value>(x), x.stride(0), shape, pointer<uint32_t>(packed), pointer_or_null<float>(bias),
                     nullptr, pointer<typename Out::Value>(y), y.stride(0));
    };
    dispatch(y.scalar_type(), run);
  });
}

void lora_linear_op(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, at::IntArrayRef out_features,
                    const Tensor& pool, const Tensor& adapter_pages, const Tensor& parts, const Tensor& scales,
                    const Tensor& segments, const Tensor& segment_slots, int64_t layer, int64_t first_projection, Tensor& y) {
  check_rows(x, "x");
  check_rows(y, "y");
  TORCH_CHECK(x.scalar_type() == y.scalar_type(), "x and y must be of one dtype");
  TORCH_CHECK(y.size(0) == x.size(0) && y.size(1) == sum(out_features), "y must be [T, sum of out_features]");
  LoraTables tables = lora_tables(pool, adapter_pages, parts, scales, segments, segment_slots, layer);
  dispatch(x.scalar_type(), [&](auto e) {
    using E = decltype(e);
    LinearShape shape = linear_shape(x.size(0), x.size(1), out_features, E::kPerWord);
    TORCH_CHECK(packed.numel() == shape.num_blocks * shape.words * kColumns, "packed weight does not fit x and out_features");
    LoraPlan& plan = make_plan<E>(tables, static_cast<int>(first_projection), shape.num_projections, shape.in_features);
    linear<E, E>(pointer<typename E::Value>(x), x.stride(0), shape, pointer<uint32_t>(packed), pointer_or_null<float>(bias),
                 plan.segments.empty() ? nullptr : &plan, pointer<typename E::Value>(y), y.stride(0));
  });
}

void lora_apply_op(Tensor& y, const Tensor& x, at::IntArrayRef out_features, const Tensor& pool, const Tensor& adapter_pages,
                 const Tensor& parts, const Tensor& scales, const Tensor& segments, const Tensor& segment_slots, int64_t layer,
                 int64_t first_projection) {
  check_rows(x, "x");
  check_rows(y, "y");
  TORCH_CHECK(y.size(0) == x.size(0) && y.size(1) == sum(out_features), "y must be [T, sum of out_features]");
  LoraTables tables = lora_tables(pool, adapter_pages, parts, scales, segments, segment_slots, layer);
  dispatch(x.scalar_type(), [&](auto e) {
    using E = decltype(e);
    LinearShape shape = linear_shape(x.size(0), x.size(1), out_features, E::kPerWord);
    LoraPlan& plan = make_plan<E>(tables, static_cast<int>(first_projection), shape.num_projections, shape.in_features);
    dispatch(y.scalar_type(), [&](auto out) {
      using Out = decltype(out);
      add_lora<E, Out>(pointer<typename E::Value>(x), x.stride(0), shape, plan, pointer<typename Out::Value>(y), y.stride(0));
    });
  });
}

void pack_op(const Tensor& weight, Tensor& packed) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight must be contiguous [N, K]");
  dispatch(weight.scalar_type(), [&](auto e) {
    using E = decltype(e);
    LinearShape shape = linear_shape(0, weight.size(1), {weight.size(0)}, E::kPerWord);
    TORCH_CHECK(packed.numel() == shape.num_blocks * shape.words * kColumns, "packed has the wrong size");
    pack_rows<E>(pointer<typename E::Value>(weight), weight.size(0), shape, pointer<uint32_t>(packed));
  });
}

void packed_rows_op(const Tensor& ids, const Tensor& packed, int64_t num_rows, Tensor& out) {
  TORCH_CHECK(ids.scalar_type() == at::kLong && ids.is_contiguous(), "ids must be contiguous int64");
  TORCH_CHECK(out.dim() == 2 && out.is_contiguous() && out.size(0) == ids.numel(), "out must be contiguous [ids, K]");
  for (int64_t i = 0; i < ids.numel(); ++i) {
    int64_t id = pointer<int64_t>(ids)[i];
    TORCH_CHECK(id >= 0 && id < num_rows, "row ", id, " is outside the weight's ", num_rows);
  }
  dispatch(out.scalar_type(), [&](auto e) {
    using E = decltype(e);
    LinearShape shape = linear_shape(0, out.size(1), {num_rows}, E::kPerWord);
    packed_rows<E>(pointer<int64_t>(ids), ids.numel(), shape, pointer<uint32_t>(packed), pointer<typename E::Value>(out));
  });
}

KvPages kv_pages(const Tensor& pool, int64_t layer, int64_t num_kv_heads, int64_t head_dim, int64_t value_bytes) {
  int64_t tokens_per_page = pool.size(2) / (2 * num_kv_heads * head_dim * value_bytes);
  TORCH_CHECK(tokens_per_page >= 1, "a page is smaller than one token's keys and values");
  return {layer_pages(pool, layer), pool.size(2), num_kv_heads, tokens_per_page, head_dim};
}

AttentionShape attention_shape(const Tensor& block_tables, const Tensor& query_starts, const Tensor& context_lens,
                               int64_t num_heads, double scale, int64_t window) {
  check_int32(block_tables, "block_tables");
  check_int32(query_starts, "query_starts");
  check_int32(context_lens, "context_lens");
  return {pointer<int32_t>(block_tables),
          block_tables.size(1),
          pointer<int32_t>(query_starts),
          pointer<int32_t>(context_lens),
          context_lens.numel(),
          num_heads,
          static_cast<float>(scale),
          window};
}

void rope_write_kv_op(Tensor& qkv, Tensor& pool, int64_t layer, const Tensor& block_tables, const Tensor& query_starts,
                      const Tensor& context_lens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                      const OptionalTensor& cos_sin, const OptionalTensor& q_norm, const OptionalTensor& k_norm, double eps) {
  check_rows(qkv, "qkv");
  TORCH_CHECK(qkv.size(1) == (num_heads + 2 * num_kv_heads) * head_dim, "qkv must be [T, (heads + 2 kv_heads) * head_dim]");
  AttentionShape shape = attention_shape(block_tables, query_starts, context_lens, num_heads, 1.0, 0);
  Rope rope{pointer_or_null<float>(cos_sin), cos_sin.has_value() ? cos_sin->size(1) : 0};
  dispatch(qkv.scalar_type(), [&](auto e) {
    using E = decltype(e);
    using Value = typename E::Value;
    HeadNorms<E> norms{pointer_or_null<Value>(q_norm), pointer_or_null<Value>(k_norm), static_cast<float>(eps)};
    KvPages pages = kv_pages(pool, layer, num_kv_heads, head_dim, sizeof(Value));
    rope_write_kv<E>(pointer<Value>(qkv), qkv.stride(0), pages, shape, norms, rope);
  });
}

void paged_attention_op(const Tensor& q, const Tensor& pool, int64_t layer, const Tensor& block_tables,
                        const Tensor& query_starts, const Tensor& context_lens, int64_t num_heads, int64_t num_kv_heads,
                        int64_t head_dim, double scale, int64_t window, Tensor& out) {
  check_rows(q, "q");
  check_rows(out, "out");
  TORCH_CHECK(q.size(1) >= num_heads * head_dim && out.size(1) == num_heads * head_dim, "q and out must hold every head");
  TORCH_CHECK(q.scalar_type() == out.scalar_type(), "q and out must be of one dtype");
  AttentionShape shape = attention_shape(block_tables, query_starts, context_lens, num_heads, scale, window);
  dispatch(q.scalar_type(), [&](auto e) {
    using E = decltype(e);
    using Value = typename E::Value;
    KvPages pages = kv_pages(pool, layer, num_kv_heads, head_dim, sizeof(Value));
    paged_attention<E>({pointer<Value>(q), q.stride(0), pages, shape, pointer<Value>(out), out.stride(0)});
  });
}

void rms_norm_op(const Tensor& x, OptionalTensor residual, const Tensor& weight, double eps, Tensor& out) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && out.is_contiguous(), "x and out must be contiguous [T, hidden]");
  TORCH_CHECK(!residual.has_value() || (residual->is_contiguous() && residual->sizes() == x.sizes()), "residual must match x");
  dispatch(x.scalar_type(), [&](auto e) {
    using Value = typename decltype(e)::Value;
    Value* sum = residual.has_value() ? pointer<Value>(*residual) : nullptr;
    rms_norm<decltype(e)>(pointer<Value>(x), sum, pointer<Value>(weight), static_cast<float>(eps), x.size(0), x.size(1),
                          pointer<Value>(out));
  });
}

void silu_mul_op(const Tensor& gate_up, Tensor& out) {
  TORCH_CHECK(gate_up.is_contiguous() && out.is_contiguous() && gate_up.size(1) == 2 * out.size(1),
              "gate_up must be contiguous [T, 2 * size]");
  dispatch(gate_up.scalar_type(), [&](auto e) {
    using Value = typename decltype(e)::Value;
    silu_mul<decltype(e)>(pointer<Value>(gate_up), out.size(0), out.size(1), pointer<Value>(out));
  });
}

void logit_stats_op(const Tensor& logits, Tensor& argmax, Tensor& logsumexp) {
  TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.dim() == 2 && logits.is_contiguous(), "logits must be float32 [B, V]");
  parallel_ranges(logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      LogitStats stats = logit_stats(pointer<float>(logits) + row * logits.size(1), logits.size(1));
      pointer<int64_t>(argmax)[row] = stats.argmax;
      pointer<float>(logsumexp)[row] = stats.logsumexp;
    }
  });
}

double read_probe_op(const Tensor& bytes) { return read_probe(pointer<uint8_t>(bytes), bytes.numel()); }

double multiply_probe_op(const Tensor& like, int64_t repeats) {
  double per_call = 0;
  dispatch(like.scalar_type(), [&](auto e) { per_call = multiply_probe<decltype(e)>(repeats); });
  return per_call;
}

// For tests: fills scratch memory with NaN, to detect a value that is read before it is written.
void poison_scratch_op(int64_t num_values) {
  std::vector<float>& h = thread_plan().h;
  h.assign(std::max<size_t>(h.size(), static_cast<size_t>(num_values)), std::numeric_limits<float>::quiet_NaN());
}

}  // namespace

#define LORAQ_TABLES \
  "Tensor pool, Tensor adapter_pages, Tensor parts, Tensor scales, Tensor segments, Tensor segment_slots, int layer, int first_projection"
#define LORAQ_KV "int layer, Tensor block_tables, Tensor query_starts, Tensor context_lens, int heads, int kv_heads, int head_dim"

TORCH_LIBRARY(LORAQ_NAMESPACE, m) {
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int[] out_features, Tensor(a!) y) -> ()");
  m.def("lora_linear(Tensor x, Tensor packed, Tensor? bias, int[] out_features, " LORAQ_TABLES ", Tensor(a!) y) -> ()");
  m.def("lora_apply(Tensor(a!) y, Tensor x, int[] out_features, " LORAQ_TABLES ") -> ()");
  m.def("pack(Tensor weight, Tensor(a!) packed) -> ()");
  m.def("packed_rows(Tensor ids, Tensor packed, int num_rows, Tensor(a!) out) -> ()");
  m.def("rope_write_kv(Tensor(a!) qkv, Tensor(b!) pool, " LORAQ_KV ", Tensor? cos_sin, Tensor? q_norm, Tensor? k_norm, float eps) -> ()");
  m.def("paged_attention(Tensor q, Tensor pool, " LORAQ_KV ", float scale, int window, Tensor(a!) out) -> ()");
  m.def("rms_norm(Tensor x, Tensor(a!)? residual, Tensor weight, float eps, Tensor(b!) out) -> ()");
  m.def("silu_mul(Tensor gate_up, Tensor(a!) out) -> ()");
  m.def("logit_stats(Tensor logits, Tensor(a!) argmax, Tensor(b!) logsumexp) -> ()");
  m.def("read_probe(Tensor bytes) -> float");
  m.def("multiply_probe(Tensor like, int repeats) -> float");
  m.def("poison_scratch(int num_values) -> ()", poison_scratch_op);
}

TORCH_LIBRARY_IMPL(LORAQ_NAMESPACE, CPU, m) {
  m.impl("linear", linear_op);
  m.impl("lora_linear", lora_linear_op);
  m.impl("lora_apply", lora_apply_op);
  m.impl("pack", pack_op);
  m.impl("packed_rows", packed_rows_op);
  m.impl("rope_write_kv", rope_write_kv_op);
  m.impl("paged_attention", paged_attention_op);
  m.impl("rms_norm", rms_norm_op);
  m.impl("silu_mul", silu_mul_op);
  m.impl("logit_stats", logit_stats_op);
  m.impl("read_probe", read_probe_op);
  m.impl("multiply_probe", multiply_probe_op);
}

}  // namespace loraq
