// A process group by the name of NCCL: its rules, and gloo's data paths on the tensors' memory.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "operators.h"

namespace emulated {

using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

inline Tensors host(const Tensors& tensors) {
  Tensors out;
  for (auto& tensor : tensors) out.push_back(host(tensor));
  return out;
}
inline TensorLists host(const TensorLists& lists) {
  TensorLists out;
  for (auto& tensors : lists) out.push_back(host(tensors));
  return out;
}
inline Tensors flat(const TensorLists& lists) {
  Tensors out;
  for (auto& tensors : lists) out.insert(out.end(), tensors.begin(), tensors.end());
  return out;
}

// What is known of a collective when it is launched: its place in the order of streams.
struct StreamWork final : c10d::Work {
  int device;
  Clock clock;
  Tensors outputs;
  bool asked = false, is_barrier = false;
  StreamWork(int rank, int device_, Clock clock_, Tensors outputs_)
      : c10d::Work(rank), device(device_), clock(std::move(clock_)), outputs(std::move(outputs_)) {}
  // The current stream waits; the host does for a barrier alone.
  bool wait(std::chrono::milliseconds) override {
    Guarded guard(lock());
    auto& current = current_stream(device);
    Runtime::get().stream_waits(current, clock);
    if (is_barrier) Runtime::get().host_waits(current.clock);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  // The first answer is no, as it may be on a device; the second one waits, as an event's does.
  bool isCompleted() override {
    Guarded guard(lock());
    if (Runtime::get().host.covers(clock)) return true;
    if (!std::exchange(asked, true)) return false;
    Runtime::get().host_waits(clock);
    return true;
  }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs));
    return future;
  }
};

class Nccl final : public c10d::Backend {
 public:
  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : c10d::Backend(rank, size), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return uint64_t(sequence_); }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { together_.emplace(); }
  WorkPtr endCoalescing() override {
    auto works = std::exchange(together_, std::nullopt).value();
    auto all = c10::make_intrusive<StreamWork>(rank_, the_device, Clock{}, Tensors{});
    for (auto& work : works) all->clock.join(static_cast<StreamWork*>(work.get())->clock);
    return all;
  }

  WorkPtr broadcast(Tensors& x, const c10d::BroadcastOptions& o) override {
    return collective("broadcast", x, x, {numel(x), o.rootRank}, o.asyncOp, [&, h = host(x)]() mutable {
      return gloo_->broadcast(h, o);
    });
  }
  WorkPtr allreduce(Tensors& x, const c10d::AllreduceOptions& o) override { return reduced("all_reduce", x, o); }
  WorkPtr allreduce_coalesced(Tensors& x, const c10d::AllreduceCoalescedOptions& o) override {
    WorkPtr last;
    for (auto& one : x) {
      Tensors alone{one};
      last = reduced("all_reduce", alone, o);
    }
    return last;
  }
  WorkPtr reduce(Tensors& x, const c10d::ReduceOptions& o) override {
    auto p = o;
    p.reduceOp = c10d::ReduceOp::SUM;
    bool mean = is_mean(o.reduceOp);
    if (!mean) p.reduceOp = o.reduceOp;
    return collective("reduce", x, x, {numel(x), o.rootRank, op(o.reduceOp)}, o.asyncOp,
                      [&, h = host(x)]() mutable { return gloo_->reduce(h, p); },
                      mean && o.rootRank == rank_ ? size_ : 1);
  }
  WorkPtr allgather(TensorLists& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return collective("all_gather", from, flat(to), {numel(from)}, o.asyncOp,
                      [&, a = host(to), b = host(from)]() mutable { return gloo_->allgather(a, b, o); });
  }
  WorkPtr _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(to.numel() == from.numel() * size_, "output tensor size must be equal to world_size times input tensor size");
    return collective("all_gather_into_tensor", {from}, {to}, {from.numel()}, o.asyncOp,
                      [&, a = host(to), b = host(from)]() mutable { return gloo_->_allgather_base(a, b, o); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    WorkPtr last;
    for (size_t i = 0; i < to.size(); ++i) last = _allgather_base(to[i], from[i], o);
    return last;
  }
  WorkPtr gather(TensorLists& to, Tensors& from, const c10d::GatherOptions& o) override {
    return collective("gather", from, flat(to), {numel(from), o.rootRank}, o.asyncOp,
                      [&, a = host(to), b = host(from)]() mutable { return gloo_->gather(a, b, o); });
  }
  WorkPtr scatter(Tensors& to, TensorLists& from, const c10d::ScatterOptions& o) override {
    return collective("scatter", flat(from), to, {numel(to), o.rootRank}, o.asyncOp,
                      [&, a = host(to), b = host(from)]() mutable { return gloo_->scatter(a, b, o); });
  }
  WorkPtr reduce_scatter(Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& o) override {
    auto p = o;
    if (is_mean(o.reduceOp)) p.reduceOp = c10d::ReduceOp::SUM;
    return collective("reduce_scatter", flat(from), to, {numel(to), op(o.reduceOp)}, o.asyncOp,
                      [&, a = host(to), b = host(from)]() mutable { return gloo_->reduce_scatter(a, b, p); },
                      is_mean(o.reduceOp) ? size_ : 1);
  }
  WorkPtr _reduce_scatter_base(Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(from.numel() == to.numel() * size_, "input tensor must be the same size as output size times world size");
    auto p = o;
    if (is_mean(o.reduceOp)) p.reduceOp = c10d::ReduceOp::SUM;
    return collective("reduce_scatter_tensor", {from}, {to}, {to.numel(), op(o.reduceOp)}, o.asyncOp,
                      [&, a = host(to), b = host(from)]() mutable { return gloo_->_reduce_scatter_base(a, b, p); },
                      is_mean(o.reduceOp) ? size_ : 1);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& o) override {
    WorkPtr last;
    for (size_t i = 0; i < to.size(); ++i) last = _reduce_scatter_base(to[i], from[i], o);
    return last;
  }
  WorkPtr alltoall_base(Tensor& to, Tensor& from, std::vector<int64_t>& received, std::vector<int64_t>& sent,
                        const c10d::AllToAllOptions& o) override {
    return collective("all_to_all_single", {from}, {to}, {}, o.asyncOp, [&, a = host(to), b = host(from)]() mutable {
      return gloo_->alltoall_base(a, b, received, sent, o);
    }, 1, &received, &sent);
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& o) override {
    return collective("all_to_all", from, to, {}, o.asyncOp, [&, a = host(to), b = host(from)]() mutable {
      return gloo_->alltoall(a, b, o);
    });
  }
  WorkPtr send(Tensors& x, int to, int tag) override {
    return launch("send", x, {}, true, [&, h = host(x)]() mutable { return gloo_->send(h, to, tag); }, 1);
  }
  WorkPtr recv(Tensors& x, int from, int tag) override {
    return launch("recv", {}, x, true, [&, h = host(x)]() mutable { return gloo_->recv(h, from, tag); }, 1);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto one = at::zeros({1}, at::TensorOptions().device(Guard::device(the_device)));
    Tensors all{one};
    c10d::AllreduceOptions o;
    o.asyncOp = false;
    auto work = allreduce(all, o);
    static_cast<StreamWork*>(work.get())->is_barrier = true;
    return work;
  }

 private:
  using Start = std::function<WorkPtr()>;
  static int64_t numel(const Tensors& tensors) {
    int64_t sum = 0;
    for (auto& tensor : tensors) sum += tensor.numel();
    return sum;
  }
  static bool is_mean(const c10d::ReduceOp& op) { return op == c10d::ReduceOp::AVG; }
  static int64_t op(const c10d::ReduceOp& op) { return int64_t(c10d::ReduceOp::RedOpType(op)); }

  template <typename Options>
  WorkPtr reduced(const char* name, Tensors& x, const Options& o) {
    auto p = o;
    if (is_mean(o.reduceOp)) p.reduceOp = c10d::ReduceOp::SUM;
    return collective(name, x, x, {numel(x), op(o.reduceOp)}, o.asyncOp,
                      [&, h = host(x)]() mutable { return gloo_->allreduce(h, p); }, is_mean(o.reduceOp) ? size_ : 1);
  }
  WorkPtr collective(const std::string& name, const Tensors& from, const Tensors& to, std::vector<int64_t> facts,
                     bool async, const Start& start, int divisor = 1, const std::vector<int64_t>* received = nullptr,
                     const std::vector<int64_t>* sent = nullptr) {
    check_tensors(name, from);
    check_tensors(name, to);
    compare(name, from.empty() ? to : from, std::move(facts), received, sent, to);
    ++sequence_;
    return launch(name, from, to, async, start, divisor);
  }
  void check_tensors(const std::string& name, const Tensors& tensors) const {
    for (auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type ", tensor.device().type(), ": ", name,
                  " over nccl takes tensors of the device alone");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    }
  }
  // Ranks exchange what each of them is about to do: its name, then numbers.
  void compare(const std::string& name, const Tensors& like, std::vector<int64_t> facts,
               const std::vector<int64_t>* received, const std::vector<int64_t>* sent, const Tensors& to) {
    constexpr int64_t NAME = 32, FACTS = 4;
    TORCH_CHECK(int64_t(name.size()) < NAME && int64_t(facts.size()) <= FACTS, name);
    int64_t device = like.empty() ? the_device : like[0].device().index();
    auto mine = at::zeros({NAME / 8 + FACTS + 2 + 2 * size_}, at::kLong);
    auto* words = mine.data_ptr<int64_t>();
    std::memcpy(words, name.data(), name.size());
    words += NAME / 8;
    std::copy(facts.begin(), facts.end(), words);
    words[FACTS] = like.empty() ? -1 : int64_t(like[0].scalar_type());
    words[FACTS + 1] = Ledger::get().physical(int(device));
    auto fill = [&](int64_t* at, const std::vector<int64_t>* splits, const Tensor& whole) {
      for (int i = 0; i < size_; ++i) at[i] = splits->empty() ? whole.size(0) / size_ : splits->at(i);
    };
    if (received) fill(words + FACTS + 2, received, to[0]);
    if (sent) fill(words + FACTS + 2 + size_, sent, like[0]);
    TensorLists all(1);
    for (int i = 0; i < size_; ++i) all[0].push_back(at::empty_like(mine));
    Tensors own{mine};
    gloo_->allgather(all, own, c10d::AllgatherOptions())->wait();
    auto word = [&](int rank, int64_t at) { return all[0][rank].data_ptr<int64_t>()[NAME / 8 + at]; };
    auto described = [&](int rank) {
      std::ostringstream out;
      auto dtype = word(rank, FACTS);
      out << "rank " << rank << " calls " << reinterpret_cast<const char*>(all[0][rank].data_ptr<int64_t>()) << "("
          << word(rank, 0) << " elements of " << (dtype < 0 ? "nothing" : c10::toString(c10::ScalarType(dtype)))
          << "; " << word(rank, 1) << ", " << word(rank, 2) << ")";
      return out.str();
    };
    for (int one = 0; one < size_; ++one)
      for (int other = one + 1; other < size_; ++other) {
        auto same = [&](int64_t count) {
          return std::memcmp(all[0][one].data_ptr(), all[0][other].data_ptr(), size_t(NAME + 8 * count)) == 0;
        };
        TORCH_CHECK(same(FACTS + 1), "ranks disagree on collective ", sequence_, " of this group: ", described(one),
                    ", but ", described(other));
        TORCH_CHECK(word(one, FACTS + 1) != word(other, FACTS + 1), "Duplicate GPU detected : rank ", one,
                    " and rank ", other, " both on CUDA device ", word(one, FACTS + 1));
      }
    for (int from = 0; received && from < size_; ++from)
      for (int into = 0; into < size_; ++into)
        TORCH_CHECK(word(from, FACTS + 2 + size_ + into) == word(into, FACTS + 2 + from), "rank ", from, " sends ",
                    word(from, FACTS + 2 + size_ + into), " rows to rank ", into, ", which expects ",
                    word(into, FACTS + 2 + from));
  }
  // On the group's own stream, or on the current one where the caller does not ask for a work to wait for.
  WorkPtr launch(const std::string& name, const Tensors& from, const Tensors& to, bool async, const Start& start,
                 int divisor) {
    int device = from.empty() ? (to.empty() ? the_device : to[0].device().index()) : from[0].device().index();
    Guarded guard(lock());
    auto& runtime = Runtime::get();
    auto& current = current_stream(device);
    auto& own = streams_.count(device) ? *streams_.at(device) : *(streams_[device] = &runtime.add(device));
    auto& stream = async ? own : current;
    if (async) runtime.stream_waits(own, current.clock);
    the_streams[device] = stream.number;
    Launch op(device, name);
    the_streams[device] = current.number;
    for (auto& tensor : from) op.access(tensor, false);
    for (auto& tensor : to) op.access(tensor, true);
    auto finish = [work = start(), from, to, divisor] {
      work->wait();
      if (divisor > 1)
        for (auto& tensor : to) host(tensor).div_(divisor);
    };
    if (async) own.deferred.push_back({own.clock.of(own.number), false, finish});
    else finish();
    auto work = c10::make_intrusive<StreamWork>(rank_, device, stream.clock, to);
    if (together_) together_->push_back(work);
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<int, StreamState*> streams_;
  std::optional<std::vector<WorkPtr>> together_;
  int64_t sequence_ = 0;
};

}  // namespace emulated
