// Calls a store from C++: on the calling thread, or on threads that Python does not know.

#include <pybind11/pybind11.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace py = pybind11;

// As torch declares it.
PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace {

using Store = c10::intrusive_ptr<c10d::Store>;

void get(const Store& store, const std::string& key, int calls) {
  for (int i = 0; i < calls; ++i) {
    store->get(key);
  }
}

// Returns nanoseconds.
template <typename Work>
int64_t timed(Work work) {
  py::gil_scoped_release no_gil;
  auto started = std::chrono::steady_clock::now();
  work();
  auto taken = std::chrono::steady_clock::now() - started;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(taken).count();
}

int64_t call(const Store& store, const std::string& key, int calls) {
  return timed([&] { get(store, key, calls); });
}

int64_t call_from_threads(
    const Store& store, const std::string& key, int calls, int count) {
  return timed([&] {
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) {
      threads.emplace_back([&] { get(store, key, calls); });
    }
    for (auto& thread : threads) {
      thread.join();
    }
  });
}

// Returns at once; the thread waits for the key.
void wait_in_background(const Store& store, const std::string& key) {
  std::thread([store, key] {
    try {
      store->wait({key});
    } catch (const std::exception&) {
    }
  }).detach();
}

} // namespace

PYBIND11_MODULE(caller, module) {
  py::module_::import("torch.distributed"); // registers c10d::Store
  module.def("call", &call);
  module.def("call_from_threads", &call_from_threads);
  module.def("wait_in_background", &wait_in_background);
}
