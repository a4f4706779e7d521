// The native recording base: a c10d::Store that forwards every virtual to another
// store and records the call.
//
// Counting takes no lock and no GIL. Python is called for a notable call only (slow,
// failed, contended, or within the span budget), and only on a thread that Python
// knows. Notable calls of other threads go to a bounded ring, which Python drains.
//
// The builder defines HAS_<name> for each virtual of the installed torch's Store that
// not every supported torch has, and TRACEDSTORE_KEY, the build's exact match.
//
// Nothing global is ever destroyed and no thread's record is ever freed: threads of
// torch may be in a call while the process ends, and a reader may hold a record.

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cxxabi.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace py = pybind11;

// As torch declares it.
PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace torch {
// Of libtorch_python. Its header takes ten seconds to compile.
void translate_exception_to_python(const std::exception_ptr& error);
} // namespace torch

namespace {

using Bytes = std::vector<uint8_t>;
using Keys = std::vector<std::string>;
using Milliseconds = std::chrono::milliseconds;

// Names as Python callers spell them; `recording.operation.METHODS` describes them.
enum Method : int {
  SET,
  GET,
  ADD,
  CHECK,
  WAIT,
  COMPARE_SET,
  DELETE_KEY,
  NUM_KEYS,
  APPEND,
  MULTI_GET,
  MULTI_SET,
  QUEUE_PUSH,
  QUEUE_POP,
  QUEUE_LEN,
  LIST_KEYS,
  BARRIER,
  CLONE,
  METHOD_COUNT,
};
constexpr std::array<const char*, METHOD_COUNT> METHOD_NAMES = {
    "set",        "get",        "add",       "check",     "wait",     "compare_set",
    "delete_key", "num_keys",   "append",    "multi_get", "multi_set", "queue_push",
    "queue_pop",  "queue_len",  "list_keys", "barrier",   "clone",
};

bool blocks(Method method) {
  return method == GET || method == WAIT || method == MULTI_GET ||
      method == QUEUE_POP || method == BARRIER;
}

// Kinds of stores (`store` label). torch has four C++ classes.
constexpr int MAX_KINDS = 8;
// The layout of `recording.counters`: four sums, then the buckets.
constexpr int NANOSECONDS = 0, BYTES = 1, SWAPS_WON = 2, SWAPS_LOST = 3, BUCKETS = 4;
constexpr int MAX_COUNTS = 96;
// Calls of one thread inside each other that are shown in flight.
constexpr int MAX_DEPTH = 4;
// Keys of a call in flight that are kept. The diagnosis asks for those that a blocked
// call waits for; of other calls the first ones are shown.
constexpr size_t MAX_BLOCKED_KEYS = 8192, MAX_SHOWN_KEYS = 16;
constexpr size_t RING_SIZE = 1024;
// Of barriers that C++ takes; `common.ranges.MAX_RANKS` is the same.
constexpr int64_t MAX_RANKS = 1'000'000;
constexpr double MAX_TIMEOUT_SECONDS = 1e9;

int64_t ticks() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// ---------------------------------------------------------------------- rules

struct Rules {
  std::atomic<bool> on{false};
  std::atomic<bool> counting{false};
  std::atomic<int64_t> opens_at{INT64_MAX};
  std::atomic<int64_t> slow_ns{INT64_MAX};
  std::atomic<int64_t> contended_after{INT64_MAX};
};
Rules& rules = *new Rules;

std::vector<int64_t>& bounds = *new std::vector<int64_t>;

// Python functions, set once and never released.
PyObject* on_thread = nullptr;
PyObject* on_return = nullptr;
PyObject* on_fail = nullptr;
PyObject* make_state = nullptr;

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Whether this thread may take the GIL. One that Python does not know would get a new
// thread state for every call, and none can take it while Python ends.
bool python_knows_this_thread() {
  return Py_IsInitialized() != 0 && !is_finalizing() &&
      PyGILState_GetThisThreadState() != nullptr;
}

// ------------------------------------------------------ telling Python of a call

int raise_now(void* exception) {
  auto value = py::reinterpret_steal<py::object>(static_cast<PyObject*>(exception));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
  return -1;
}

// Takes the exception that is set.
py::object take_exception() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (value != nullptr && traceback != nullptr) {
    PyException_SetTraceback(value, traceback);
  }
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return value == nullptr ? py::object(py::none())
                          : py::reinterpret_steal<py::object>(value);
}

// The thread that runs signal handlers, by pthread_self.
std::atomic<pthread_t> main_thread{};

// The helper threads of `common.signal_safety`, set once and never released.
PyObject* idle_helpers = nullptr;
PyObject* unfinished_work = nullptr;
PyObject* start_thread = nullptr;
PyObject* serve = nullptr;
PyObject* new_lock = nullptr;

// What became of telemetry in Python.
struct Told {
  py::object result = py::none(); // None too if it was not waited for
  bool failed = false;
};

py::object call_method(PyObject* object, const char* name) {
  return py::reinterpret_steal<py::object>(PyObject_CallMethod(object, name, nullptr));
}

// Gives work to a helper thread, as `HelperThreads._submit` does; false if there is
// none. All of it is C: no signal handler runs.
bool submit(const py::object& lock, const py::tuple& work) {
  const py::float_ now(static_cast<double>(ticks()) / 1e9); // as time.monotonic()
  if (PyDict_SetItem(unfinished_work, lock.ptr(), now.ptr()) != 0) {
    PyErr_Clear();
  }
  auto queue = call_method(idle_helpers, "pop");
  py::object done;
  if (queue) {
    done = py::reinterpret_steal<py::object>(
        PyObject_CallMethod(queue.ptr(), "put", "(O)", work.ptr()));
  } else {
    PyErr_Clear(); // none is idle
    py::list first;
    first.append(work);
    done = py::reinterpret_steal<py::object>(
        PyObject_CallFunction(start_thread, "O(O)", serve, first.ptr()));
  }
  if (!done) {
    PyErr_Clear();
    if (PyDict_DelItem(unfinished_work, lock.ptr()) != 0) {
      PyErr_Clear();
    }
  }
  return static_cast<bool>(done);
}

// Waits for work of a helper thread. Handlers run meanwhile. What one raises ends the
// wait, unless it has to be finished, and is kept.
void wait_for_helper(const py::object& lock, bool to_the_end, py::object& raised) {
  const pid_t pid = getpid();
  while (to_the_end || raised.is_none()) {
    auto acquired = py::reinterpret_steal<py::object>(
        PyObject_CallMethod(lock.ptr(), "acquire", "Od", Py_True, 1.0));
    if (!acquired) {
      raised = take_exception();
    } else if (acquired.is(py::bool_(true)) || getpid() != pid) {
      return; // done, or a handler has forked, and the child has no such thread
    }
  }
}

// Runs telemetry in Python, inside a call and with the GIL.
//
// The main thread lets a helper thread run it: the telemetry would take what a signal
// handler raises for a failure of its own. That is raised when the call has returned to
// Python, as with a bare store.
Told tell(PyObject* function, const py::tuple& arguments, bool to_the_end = false) {
  Told told;
  if (!pthread_equal(pthread_self(), main_thread.load(std::memory_order_relaxed))) {
    told.result =
        py::reinterpret_steal<py::object>(PyObject_Call(function, arguments.ptr(), nullptr));
    if (!told.result) {
      told.result = py::none();
      told.failed = PyErr_ExceptionMatches(PyExc_Exception) != 0;
      if (!told.failed) { // raised from outside into this thread, such as SystemExit
        auto raised = take_exception();
        PyThreadState_SetAsyncExc(
            PyThread_get_thread_ident(), reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())));
      }
      PyErr_Clear();
    }
    return told;
  }
  py::object raised = py::none();
  if (PyErr_CheckSignals() != 0) { // one that arrived during the call
    raised = take_exception();
  }
  py::list results, errors;
  auto lock = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(new_lock));
  auto context = py::reinterpret_steal<py::object>(PyContext_CopyCurrent());
  if (lock && context && call_method(lock.ptr(), "acquire") &&
      submit(lock, py::make_tuple(
          context, py::reinterpret_borrow<py::object>(function), arguments, results,
          errors, lock))) {
    wait_for_helper(lock, to_the_end, raised);
    if (!results.empty()) {
      told.result = results[0];
    }
    told.failed = !errors.empty();
  }
  PyErr_Clear();
  // Only now: no Python code of this thread may run before the call has returned.
  if (!raised.is_none() && Py_AddPendingCall(raise_now, raised.ptr()) == 0) {
    raised.release();
  }
  return told;
}

// ------------------------------------------------------- the end of the process

// Set when the process ends. A thread that returns from a call to Python while CPython
// before 3.14 finalizes is ended in a destructor of C++, which aborts the process.
std::atomic<bool> ending{false};
// Milliseconds between the exit hook and the moment from which on a thread is let go:
// exit hooks that run later may wait for it.
constexpr int MAX_HOLD_MS = 500;

// Holds a thread of Python that ends a call while the process ends: until the
// interpreter finalizes, and then for ever, as CPython 3.14 does.
void hold_at_exit() {
  if (!ending.load(std::memory_order_relaxed) ||
      pthread_equal(pthread_self(), main_thread.load(std::memory_order_relaxed)) ||
      PyGILState_GetThisThreadState() == nullptr) {
    return;
  }
  for (int waited = 0; waited < MAX_HOLD_MS; ++waited) {
    while (is_finalizing() || Py_IsInitialized() == 0) {
      pause();
    }
    usleep(1000);
  }
}

// -------------------------------------------------- Python references from C++

// References that wait to be released. A forked child gets a new list: a thread that
// the child has not may hold the lock.
struct Released {
  std::mutex lock;
  std::vector<PyObject*> objects;
};
std::atomic<Released*> released{new Released};

void release_later(PyObject* object) {
  Released* into = released.load(std::memory_order_acquire);
  std::lock_guard<std::mutex> lock(into->lock);
  into->objects.push_back(object);
}

// Releases a Python reference, now or, on a thread that may not take the GIL, when
// Python drains the ring.
void release(PyObject* object) {
  if (object == nullptr) {
    return;
  }
  if (python_knows_this_thread()) {
    py::gil_scoped_acquire gil;
    py::error_scope errors;
    Py_DECREF(object);
    return;
  }
  release_later(object);
}

// A Python object that C++ shares.
struct Shared {
  PyObject* object;
  explicit Shared(py::object from) : object(from.release().ptr()) {}
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() {
    release(object);
  }
};

// -------------------------------------------------------------------- records

class NativeStore;

struct Arguments {
  const std::string* key = nullptr;
  const Keys* keys = nullptr;
  int64_t world_size = -1;
  const Milliseconds* timeout = nullptr;
};

// A copy of the arguments that telemetry shows; values are not among them.
struct Shown {
  bool has_keys = false;
  bool many = false;
  Keys keys;
  size_t used = 0; // of `keys`, which keeps its strings for the next call
  size_t count = 0;
  int64_t world_size = -1;
  int64_t timeout_ms = -1;

  void take(const Arguments& args, size_t limit) {
    has_keys = args.key != nullptr || args.keys != nullptr;
    many = args.keys != nullptr;
    count = many ? args.keys->size() : (has_keys ? 1 : 0);
    used = std::min(count, limit);
    if (keys.size() < used) {
      keys.resize(used);
    }
    for (size_t i = 0; i < used; ++i) {
      keys[i].assign(many ? (*args.keys)[i] : *args.key);
    }
    world_size = args.world_size;
    timeout_ms = args.timeout == nullptr ? -1 : args.timeout->count();
  }
};

// A call in flight. The lock is held for a copy of a few words; only a reader of all
// calls ever waits for it, or makes a call wait.
struct Slot {
  std::atomic_flag lock = ATOMIC_FLAG_INIT;
  NativeStore* store = nullptr; // null: no call
  Method method = SET;
  int64_t started = 0;
  uint64_t number = 0;
  Shown shown;
};

class Locked {
 public:
  explicit Locked(Slot& slot) : slot_(slot) {
    while (slot_.lock.test_and_set(std::memory_order_acquire)) {
      sched_yield();
    }
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() {
    slot_.lock.clear(std::memory_order_release);
  }

 private:
  Slot& slot_;
};

// A count with one writer, so adding needs no locked instruction.
class Count {
 public:
  void add(int64_t number) {
    value_.store(value_.load(std::memory_order_relaxed) + number,
                 std::memory_order_relaxed);
  }
  int64_t get() const {
    return value_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<int64_t> value_{0};
};

using Cells = std::array<Count, MAX_COUNTS>;

void count_call(Cells& cells, int64_t duration) {
  auto bucket = std::lower_bound(bounds.begin(), bounds.end(), duration) - bounds.begin();
  cells[BUCKETS + bucket].add(1);
  cells[NANOSECONDS].add(duration);
}

struct Registry;

// What one thread records. It passes to the next new thread when its thread ends.
struct Record {
  Registry* registry = nullptr;
  int64_t id = 0;
  std::atomic<bool> in_use{true};
  std::atomic<unsigned long> thread_id{0};
  uint64_t calls = 0;
  int depth = 0;
  std::array<Slot, MAX_DEPTH> slots;
  Count over_budget;
  std::array<std::atomic<Cells*>, MAX_KINDS * METHOD_COUNT> cells{};

  Cells& cells_of(int kind, Method method) {
    auto& place = cells[kind * METHOD_COUNT + method];
    Cells* found = place.load(std::memory_order_relaxed);
    if (found == nullptr) {
      found = new Cells;
      place.store(found, std::memory_order_release);
    }
    return *found;
  }
};

// A notable call of a thread that Python does not know.
struct Entry {
  std::shared_ptr<Shared> identity;
  Method method = SET;
  Shown shown;
  int64_t record = 0;
  uint64_t number = 0;
  unsigned long thread_id = 0;
  int64_t started = 0;
  int64_t ended = 0;
  int64_t bytes = 0;
  int swapped = -1;
  int64_t losses = 0;
  std::exception_ptr error;
};

// All that is recorded since the start, a fork or a reset. A forked child gets a new
// one: locks of the parent's may be held by threads that the child has not.
struct Registry {
  std::mutex lock;
  std::vector<Record*> records;
  std::mutex ring_lock;
  std::deque<Entry> ring;
  int64_t dropped = 0;
  // Failed calls that the full ring had no room for; they have no error type.
  std::map<std::pair<int, int>, Cells> dropped_failures;
};

std::atomic<Registry*> registry{new Registry};
std::atomic<int64_t> next_record{1};

void start_from_zero() {
  registry.store(new Registry, std::memory_order_release);
}

struct ThreadState {
  Record* record = nullptr;
  int unrecorded = 0;
  int unsampled = 0;
  // The note on the exception that this thread's last failed call threw.
  std::exception_ptr noted;
  PyObject* note = nullptr;
  ~ThreadState() {
    if (record != nullptr) {
      record->in_use.store(false, std::memory_order_release);
    }
    if (note != nullptr) {
      release_later(note);
    }
  }
};
thread_local ThreadState this_thread;

Record* take_record(Registry* current) {
  std::lock_guard<std::mutex> lock(current->lock);
  for (Record* record : current->records) {
    bool free = false;
    if (record->in_use.compare_exchange_strong(free, true)) {
      record->depth = 0;
      record->thread_id = static_cast<unsigned long>(pthread_self());
      return record;
    }
  }
  auto* record = new Record;
  record->registry = current;
  record->id = next_record++;
  record->thread_id = static_cast<unsigned long>(pthread_self());
  current->records.push_back(record);
  return record;
}

// ---------------------------------------------------------- arguments in Python

py::object key_object(const std::string& key) {
  PyObject* text = PyUnicode_DecodeUTF8(
      key.data(), static_cast<Py_ssize_t>(key.size()), "strict");
  if (text == nullptr) {
    PyErr_Clear();
    return py::bytes(key);
  }
  return py::reinterpret_steal<py::object>(text);
}

// (a key, a tuple of keys or None, number of keys, world size, timeout in ms)
py::tuple arguments_object(const Shown& shown) {
  py::object keys = py::none();
  if (shown.many) {
    py::tuple all(shown.used);
    for (size_t i = 0; i < shown.used; ++i) {
      all[i] = key_object(shown.keys[i]);
    }
    keys = std::move(all);
  } else if (shown.has_keys) {
    keys = key_object(shown.keys[0]);
  }
  return py::make_tuple(
      keys,
      shown.count,
      shown.world_size < 0 ? py::object(py::none()) : py::cast(shown.world_size),
      shown.timeout_ms < 0 ? py::object(py::none()) : py::cast(shown.timeout_ms));
}

// What Python knows a call by: (record, number, method, arguments, started).
py::tuple call_object(
    int64_t record,
    uint64_t number,
    Method method,
    const Shown& shown,
    int64_t started) {
  return py::make_tuple(
      record, number, static_cast<int>(method), arguments_object(shown), started);
}

// A call that ended: (call, ended, losses, bytes, swapped).
py::tuple ended_object(
    const py::tuple& call, int64_t ended, int64_t losses, int64_t bytes, int swapped) {
  return py::make_tuple(
      call, ended, losses, bytes,
      swapped < 0 ? py::object(py::none()) : py::cast(swapped > 0));
}

// The exception that torch makes of a C++ one; None where it makes none.
py::object exception_object(const std::exception_ptr& error) {
  try {
    torch::translate_exception_to_python(error);
  } catch (...) {
    return py::none();
  }
  return take_exception();
}

// ------------------------------------------------------------------- the store

// One call, from before it is forwarded until after.
struct Call {
  NativeStore* store;
  Method method;
  Arguments args;
  Record* record = nullptr; // null: not recorded
  int64_t started = 0;
  uint64_t number = 0;

  Call(NativeStore* of, Method called, Arguments given) noexcept;
  void returned(int64_t bytes = 0, int swapped = -1) noexcept;
  void failed() noexcept;
  void abandoned() noexcept;

 private:
  void begin();
  void leave();
  void note_return(int64_t now, int64_t bytes, int swapped);
  void note_failure(int64_t now, const std::exception_ptr& error);
  py::tuple for_python(int64_t now, int64_t bytes = 0, int swapped = -1) const;
  void push(Entry&& entry);
};

// The inner call, with its exceptions recorded and passed on as they are. The forced
// unwinding of a thread that is cancelled must not be caught.
#define FORWARD(call, ...)                 \
  try {                                    \
    __VA_ARGS__                            \
  } catch (const abi::__forced_unwind&) {  \
    (call).abandoned();                    \
    throw;                                 \
  } catch (...) {                          \
    (call).failed();                       \
    throw;                                 \
  }

int64_t total_size(const std::vector<Bytes>& values) {
  int64_t total = 0;
  for (const auto& value : values) {
    total += static_cast<int64_t>(value.size());
  }
  return total;
}

class NativeStore : public c10d::Store {
 public:
  NativeStore(
      c10::intrusive_ptr<c10d::Store> inner,
      std::shared_ptr<Shared> identity,
      int kind)
      : c10d::Store(inner->getTimeout()),
        inner_(std::move(inner)),
        below_(bottom_of(inner_.get())),
        identity_(std::move(identity)),
        kind_(kind) {}

  ~NativeStore() override {
    release(std::exchange(state_, nullptr));
  }

  // Runs when the last reference is dropped. The state refers to this store weakly, so
  // the destructor runs after the state is freed, which may be later.
  void release_resources() override {
    release(std::exchange(state_, nullptr));
    inner_.reset();
  }

  c10::intrusive_ptr<c10d::Store> clone() override {
    Call call(this, CLONE, {});
    c10::intrusive_ptr<c10d::Store> cloned;
    FORWARD(call, cloned = inner_->clone();)
    call.returned();
    // HashStore's clone is the store itself.
    if (cloned.get() == inner_.get()) {
      return c10::intrusive_ptr<NativeStore>::reclaim_copy(this);
    }
    return c10::make_intrusive<NativeStore>(std::move(cloned), identity_, kind_);
  }

  void set(const std::string& key, const Bytes& value) override {
    Call call(this, SET, {&key});
    FORWARD(call, inner_->set(key, value);)
    call.returned(static_cast<int64_t>(value.size()));
  }

  Bytes compareSet(
      const std::string& key, const Bytes& expected, const Bytes& desired) override {
    Call call(this, COMPARE_SET, {&key});
    Bytes result;
    FORWARD(call, result = inner_->compareSet(key, expected, desired);)
    // Nothing can change if both are equal: that reads the key. For a missing key the
    // result is the expected value, so only the desired one means that it was won.
    int swapped = expected == desired ? -1 : (result == desired ? 1 : 0);
    call.returned(static_cast<int64_t>(desired.size()), swapped);
    return result;
  }

  Bytes get(const std::string& key) override {
    Call call(this, GET, {&key});
    Bytes result;
    FORWARD(call, result = inner_->get(key);)
    call.returned(static_cast<int64_t>(result.size()));
    return result;
  }

  int64_t add(const std::string& key, int64_t value) override {
    Call call(this, ADD, {&key});
    int64_t result = 0;
    FORWARD(call, result = inner_->add(key, value);)
    call.returned();
    return result;
  }

  bool deleteKey(const std::string& key) override {
    Call call(this, DELETE_KEY, {&key});
    bool result = false;
    FORWARD(call, result = inner_->deleteKey(key);)
    call.returned();
    return result;
  }

  bool check(const Keys& keys) override {
    Call call(this, CHECK, {nullptr, &keys});
    bool result = false;
    FORWARD(call, result = inner_->check(keys);)
    call.returned();
    return result;
  }

  int64_t getNumKeys() override {
    Call call(this, NUM_KEYS, {});
    int64_t result = 0;
    FORWARD(call, result = inner_->getNumKeys();)
    call.returned();
    return result;
  }

  void wait(const Keys& keys) override {
    Call call(this, WAIT, {nullptr, &keys});
    FORWARD(call, inner_->wait(keys);)
    call.returned();
  }

  void wait(const Keys& keys, const Milliseconds& timeout) override {
    Call call(this, WAIT, {nullptr, &keys, -1, &timeout});
    FORWARD(call, inner_->wait(keys, timeout);)
    call.returned();
  }

  const Milliseconds& getTimeout() const noexcept override {
    return inner_->getTimeout();
  }

  void setTimeout(const Milliseconds& timeout) override {
    inner_->setTimeout(timeout);
    // Store::barrier without a timeout reads this field, and is not virtual.
    c10d::Store::setTimeout(timeout);
  }

#ifdef HAS_watchKey
  void watchKey(const std::string& key, c10d::WatchKeyCallback callback) override {
    inner_->watchKey(key, std::move(callback));
  }
#endif

  void append(const std::string& key, const Bytes& value) override {
    Call call(this, APPEND, {&key});
    FORWARD(call, inner_->append(key, value);)
    call.returned(static_cast<int64_t>(value.size()));
  }

  std::vector<Bytes> multiGet(const Keys& keys) override {
    Call call(this, MULTI_GET, {nullptr, &keys});
    std::vector<Bytes> result;
    FORWARD(call, result = inner_->multiGet(keys);)
    call.returned(total_size(result));
    return result;
  }

  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    Call call(this, MULTI_SET, {nullptr, &keys});
    FORWARD(call, inner_->multiSet(keys, values);)
    call.returned(total_size(values));
  }

  bool hasExtendedApi() const override {
    return inner_->hasExtendedApi();
  }

#ifdef HAS_queuePush
  void queuePush(const std::string& key, const Bytes& value) override {
    Call call(this, QUEUE_PUSH, {&key});
    FORWARD(call, inner_->queuePush(key, value);)
    call.returned(static_cast<int64_t>(value.size()));
  }

  Bytes queuePop(const std::string& key, bool block) override {
    Call call(this, QUEUE_POP, {&key});
    Bytes result;
    FORWARD(call, result = inner_->queuePop(key, block);)
    call.returned(static_cast<int64_t>(result.size()));
    return result;
  }

  int64_t queueLen(const std::string& key) override {
    Call call(this, QUEUE_LEN, {&key});
    int64_t result = 0;
    FORWARD(call, result = inner_->queueLen(key);)
    call.returned();
    return result;
  }
#endif

#ifdef HAS_listKeys
  Keys listKeys() override {
    Call call(this, LIST_KEYS, {});
    Keys result;
    FORWARD(call, result = inner_->listKeys();)
    call.returned();
    return result;
  }
#endif

#ifdef HAS_barrier
  void barrier(
      const std::string& key,
      int64_t world_size,
      const Milliseconds& timeout) override {
    Call call(this, BARRIER, {&key, nullptr, world_size, &timeout});
    FORWARD(call, inner_->barrier(key, world_size, timeout);)
    call.returned();
  }
#endif

  // Whether this store's calls go through another one.
  bool stands_on(const NativeStore* other) const {
    const NativeStore* below = below_;
    while (below != nullptr && below != other) {
      below = below->below_;
    }
    return below == other;
  }

  // The Python state of this store; made when it is first needed. With the GIL.
  py::object state();

  const c10::intrusive_ptr<c10d::Store>& inner() const {
    return inner_;
  }

  int kind() const {
    return kind_;
  }

  const std::shared_ptr<Shared>& identity() const {
    return identity_;
  }

  // Counts a compare-and-set; returns how many were lost since one was won.
  int64_t count_swap(bool won) {
    if (won) {
      losses_.store(0, std::memory_order_relaxed);
      return 0;
    }
    return losses_.fetch_add(1, std::memory_order_relaxed) + 1;
  }

  int64_t losses() const {
    return losses_.load(std::memory_order_relaxed);
  }

 private:
  static const NativeStore* bottom_of(c10d::Store* store) {
    if (auto* prefix = dynamic_cast<c10d::PrefixStore*>(store)) {
      // `inner_` keeps it alive.
      store = prefix->getUnderlyingNonPrefixStore().get();
    }
    return dynamic_cast<const NativeStore*>(store);
  }

  c10::intrusive_ptr<c10d::Store> inner_;
  const NativeStore* below_;
  std::shared_ptr<Shared> identity_;
  int kind_;
  PyObject* state_ = nullptr;
  std::atomic<int64_t> losses_{0};
};

// Gives no span within the budget to calls of this thread.
class Unsampled {
 public:
  Unsampled() {
    this_thread.unsampled++;
  }
  Unsampled(const Unsampled&) = delete;
  Unsampled& operator=(const Unsampled&) = delete;
  ~Unsampled() {
    this_thread.unsampled--;
  }
};

Bytes bytes_of(const std::string& text) {
  return Bytes(text.begin(), text.end());
}

py::object bytes_object(const Bytes& value) {
  return py::bytes(
      reinterpret_cast<const char*>(value.data()), static_cast<Py_ssize_t>(value.size()));
}

// The entry of a rank in the ledger, as `coordination.arrivals.encode_arrival` makes
// it: the rank and the time, in seconds since the epoch, with the highest byte first.
Bytes arrival(int64_t rank) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  double seconds = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  uint64_t bits = 0;
  std::memcpy(&bits, &seconds, sizeof bits);
  Bytes entry;
  for (int shift = 24; shift >= 0; shift -= 8) {
    entry.push_back(static_cast<uint8_t>(rank >> shift));
  }
  for (int shift = 56; shift >= 0; shift -= 8) {
    entry.push_back(static_cast<uint8_t>(bits >> shift));
  }
  return entry;
}

// Whether a ledger has each rank once, and nothing else.
bool is_complete(const Bytes& entries, int64_t world_size) {
  constexpr size_t SIZE = 12; // of an entry
  const auto ranks = static_cast<size_t>(world_size);
  if (entries.size() != SIZE * ranks) {
    return false;
  }
  std::vector<bool> seen(ranks);
  for (size_t at = 0; at < entries.size(); at += SIZE) {
    const size_t rank = static_cast<size_t>(entries[at]) << 24 |
        static_cast<size_t>(entries[at + 1]) << 16 |
        static_cast<size_t>(entries[at + 2]) << 8 | entries[at + 3];
    if (rank >= ranks || seen[rank]) {
      return false;
    }
    seen[rank] = true;
  }
  return true;
}

// Reads a key that exists, in one round trip; false if that fails.
bool try_to_read(NativeStore& store, const std::string& key, Bytes& value) {
  try {
    // Equal values change nothing. A TCPStore's get takes two round trips.
    value = store.compareSet(key, Bytes(), Bytes());
    return true;
  } catch (const abi::__forced_unwind&) {
    throw;
  } catch (...) { // it is recorded
    return false;
  }
}

// What a rank does at a barrier, and what came of it: each step is one call from Python,
// because most of what a barrier takes is Python code in cold caches. For stores that
// have append; `coordination.arrivals.Meeting` is the same in Python, for all others. The
// calls are recorded like any other. None gets a span within the budget, because the
// span of the barrier covers it.
//
// The results are set with the GIL held: other threads of Python read them meanwhile.
class Meeting {
 public:
  int64_t order = 0; // the position of the arrival, from 1
  int64_t arrived = 0; // when the store had counted it, in ticks
  bool in_ledger = true;
  bool is_last = false;
  std::optional<Bytes> last; // what the last rank wrote, if it was read
  std::optional<Bytes> entries; // as the last rank: the ledger, if it is not as it should be

  // Null if the arguments are others than C++ can take, or the store has no append.
  static std::unique_ptr<Meeting> make(
      const NativeStore& store, const py::object& prefix, const py::object& rank,
      const py::object& world_size, const py::object& timeout_seconds, bool observed) {
    std::unique_ptr<Meeting> made(new Meeting);
    made->observed_ = observed;
    const bool valid =
        made->take(prefix, rank, world_size, timeout_seconds) && store.hasExtendedApi();
    return valid ? std::move(made) : nullptr;
  }

  // Records and counts the arrival.
  void arrive(NativeStore& store) {
    bool appended = true;
    int64_t position = 0;
    {
      py::gil_scoped_release no_gil;
      Unsampled unsampled;
      try {
        store.append(prefix_ + "/ARRIVALS", arrival(rank_));
      } catch (const abi::__forced_unwind&) {
        throw;
      } catch (...) { // it is recorded, and does not fail a barrier
        appended = false;
      }
      position = store.add(prefix_ + "/num_members", 1);
    }
    in_ledger = appended;
    arrived = ticks();
    order = position;
  }

  // Waits for the last rank.
  void wait(NativeStore& store) {
    Bytes value;
    bool was_read = false;
    {
      py::gil_scoped_release no_gil;
      Unsampled unsampled;
      const std::string key = prefix_ + "/last_member";
      store.wait({key}, timeout_);
      was_read = observed_ && try_to_read(store, key, value);
    }
    if (was_read) {
      last = std::move(value);
    }
  }

  // Completes the barrier as its last rank: writes its rank for the others, and makes a
  // round trip, because a TCPStore does not reply to a set. That reads the ledger, if
  // this rank is in it.
  void complete(NativeStore& store) {
    // As `coordination.arrivals.last_arrival` makes it.
    const Bytes written = bytes_of("{\"rank\": " + std::to_string(rank_) + "}");
    Bytes read;
    bool suspicious = !in_ledger;
    {
      py::gil_scoped_release no_gil;
      Unsampled unsampled;
      const std::string key = prefix_ + "/last_member";
      store.set(key, written);
      if (in_ledger) {
        suspicious = try_to_read(store, prefix_ + "/ARRIVALS", read) &&
            !is_complete(read, world_size_);
      } else {
        store.check({key});
      }
    }
    last = written;
    if (suspicious) {
      entries = std::move(read);
    }
    is_last = true;
  }

 private:
  std::string prefix_;
  int64_t rank_ = 0;
  int64_t world_size_ = 0;
  Milliseconds timeout_{0};
  bool observed_ = false;

  bool take(
      const py::object& prefix, const py::object& rank, const py::object& world_size,
      const py::object& seconds) {
    if (!PyUnicode_CheckExact(prefix.ptr()) || !PyLong_CheckExact(rank.ptr()) ||
        !PyLong_CheckExact(world_size.ptr()) ||
        !(PyLong_CheckExact(seconds.ptr()) || PyFloat_CheckExact(seconds.ptr()))) {
      return false;
    }
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(prefix.ptr(), &length);
    bool valid = false;
    if (text != nullptr) {
      rank_ = PyLong_AsLongLong(rank.ptr());
      world_size_ = PyLong_AsLongLong(world_size.ptr());
      const double given_timeout = PyFloat_AsDouble(seconds.ptr());
      if (0 <= rank_ && rank_ < world_size_ && world_size_ < MAX_RANKS &&
          0 < given_timeout && given_timeout < MAX_TIMEOUT_SECONDS) {
        prefix_.assign(text, static_cast<size_t>(length));
        // As a timedelta, which has whole microseconds.
        timeout_ = Milliseconds(std::llround(given_timeout * 1e6) / 1000);
        valid = true;
      }
    }
    PyErr_Clear(); // of a text or a number that C++ cannot take
    return valid;
  }
};

// Bytes, or None.
py::object optional_bytes(const std::optional<Bytes>& value) {
  return value ? bytes_object(*value) : py::none();
}

// What Python refers to a store by without keeping it: a store that is kept keeps its
// server and its port.
class WeakStore {
 public:
  explicit WeakStore(NativeStore* store)
      : store_(c10::intrusive_ptr<NativeStore>::reclaim_copy(store)) {}

  // Null, which is None, once the store is freed.
  c10::intrusive_ptr<NativeStore> store() const {
    return store_.lock();
  }

  c10::intrusive_ptr<c10d::Store> inner() const {
    auto store = store_.lock();
    return store ? store->inner() : nullptr;
  }

 private:
  c10::weak_intrusive_ptr<NativeStore> store_;
};

py::object NativeStore::state() {
  if (state_ == nullptr) {
    Told told = tell(
        make_state,
        py::make_tuple(
            py::reinterpret_borrow<py::object>(identity_->object), WeakStore(this)),
        true);
    // Another thread may have run while Python made it.
    if (state_ == nullptr) {
      if (told.result.is_none()) {
        throw std::runtime_error("the state of a traced store cannot be made");
      }
      state_ = told.result.release().ptr();
    }
  }
  return py::reinterpret_borrow<py::object>(state_);
}

// --------------------------------------------------------------- recording a call

void stop_recording() {
  rules.on.store(false, std::memory_order_relaxed);
}

Call::Call(NativeStore* of, Method called, Arguments given) noexcept
    : store(of), method(called), args(given) {
  if (!rules.on.load(std::memory_order_relaxed) || this_thread.unrecorded > 0) {
    return;
  }
  try {
    begin();
  } catch (...) { // no memory
    record = nullptr;
    stop_recording();
  }
}

void Call::begin() {
  Registry* current = registry.load(std::memory_order_acquire);
  Record* own = this_thread.record;
  if (own == nullptr || own->registry != current) {
    own = this_thread.record = take_record(current);
    if (python_knows_this_thread()) {
      py::gil_scoped_acquire gil;
      py::error_scope errors;
      tell(on_thread, py::tuple());
    }
  }
  if (own->depth > 0 && own->depth <= MAX_DEPTH) {
    const NativeStore* outer = own->slots[own->depth - 1].store;
    // A traced store above, with a PrefixStore between, records the call.
    if (outer != nullptr && outer->stands_on(store)) {
      return;
    }
  }
  number = ++own->calls;
  started = ticks();
  if (own->depth < MAX_DEPTH) {
    Slot& slot = own->slots[own->depth];
    Locked lock(slot);
    slot.shown.take(args, blocks(method) ? MAX_BLOCKED_KEYS : MAX_SHOWN_KEYS);
    slot.store = store;
    slot.method = method;
    slot.started = started;
    slot.number = number;
  }
  own->depth++;
  record = own;
}

void Call::leave() {
  record->depth--;
  if (record->depth < MAX_DEPTH) {
    Slot& slot = record->slots[record->depth];
    Locked lock(slot);
    slot.store = nullptr;
  }
}

void Call::abandoned() noexcept {
  if (record != nullptr) {
    leave();
  }
}

void Call::returned(int64_t bytes, int swapped) noexcept {
  hold_at_exit();
  if (record == nullptr) {
    return;
  }
  leave();
  try {
    int64_t now = ticks();
    int64_t duration = now - started;
    Cells& cells = record->cells_of(store->kind(), method);
    count_call(cells, duration);
    if (bytes != 0) {
      cells[BYTES].add(bytes);
    }
    int64_t losses = 0;
    if (swapped >= 0) {
      cells[swapped > 0 ? SWAPS_WON : SWAPS_LOST].add(1);
      losses = store->count_swap(swapped > 0);
    }
    // A cheap necessary condition; Recorder._reasons decides.
    bool sampling = this_thread.unsampled == 0;
    if ((sampling && now >= rules.opens_at.load(std::memory_order_relaxed)) ||
        duration >= rules.slow_ns.load(std::memory_order_relaxed) ||
        losses >= rules.contended_after.load(std::memory_order_relaxed)) {
      note_return(now, bytes, swapped);
    } else if (sampling && rules.counting.load(std::memory_order_relaxed)) {
      record->over_budget.add(1);
    }
  } catch (...) {
    stop_recording();
  }
}

void Call::note_return(int64_t now, int64_t bytes, int swapped) {
  if (python_knows_this_thread()) {
    py::gil_scoped_acquire gil;
    py::error_scope errors;
    Told told = tell(
        on_return,
        py::make_tuple(
            record->thread_id.load(), store->state(), for_python(now, bytes, swapped)));
    if (told.failed) {
      stop_recording();
    } else if (
        told.result.is(py::bool_(false)) &&
        rules.counting.load(std::memory_order_relaxed)) {
      record->over_budget.add(1);
    }
    return;
  }
  Entry entry;
  entry.bytes = bytes;
  entry.swapped = swapped;
  entry.ended = now;
  push(std::move(entry));
}

py::tuple Call::for_python(int64_t now, int64_t bytes, int swapped) const {
  Shown shown;
  shown.take(args, MAX_BLOCKED_KEYS);
  return ended_object(
      call_object(record->id, number, method, shown, started), now, store->losses(),
      bytes, swapped);
}

void Call::failed() noexcept {
  hold_at_exit();
  if (record == nullptr) {
    return;
  }
  leave();
  try {
    note_failure(ticks(), std::current_exception());
  } catch (...) {
    stop_recording();
  }
}

void Call::note_failure(int64_t now, const std::exception_ptr& error) {
  if (!python_knows_this_thread()) {
    Entry entry;
    entry.ended = now;
    entry.error = error;
    push(std::move(entry));
    return;
  }
  py::gil_scoped_acquire gil;
  py::error_scope errors;
  Told told = tell(
      on_fail,
      py::make_tuple(
          record->thread_id.load(), store->state(), for_python(now),
          exception_object(error)));
  Py_XDECREF(this_thread.note);
  this_thread.note = told.result.is_none() ? nullptr : told.result.release().ptr();
  this_thread.noted = this_thread.note == nullptr ? nullptr : error;
  if (told.failed) {
    stop_recording();
  }
}

void Call::push(Entry&& entry) {
  Registry* into = record->registry;
  std::lock_guard<std::mutex> lock(into->ring_lock);
  if (into->ring.size() >= RING_SIZE) {
    into->dropped++;
    if (entry.error) {
      Cells& cells = into->dropped_failures[{store->kind(), method}];
      count_call(cells, entry.ended - started);
    }
    return;
  }
  entry.identity = store->identity();
  entry.method = method;
  entry.started = started;
  entry.record = record->id;
  entry.number = number;
  entry.thread_id = record->thread_id.load();
  entry.losses = store->losses();
  entry.shown.take(args, MAX_SHOWN_KEYS);
  into->ring.push_back(std::move(entry));
}

// ------------------------------------------------------------------ for Python

py::list counts_object(const Cells& cells) {
  py::list counts;
  for (size_t i = 0; i < BUCKETS + bounds.size() + 1; ++i) {
    counts.append(cells[i].get());
  }
  return counts;
}

// [(kind, method, counts, whether they are failures without a type)]
py::list sums() {
  Registry* current = registry.load();
  std::map<std::pair<int, int>, Cells> totals;
  std::map<std::pair<int, int>, Cells> failures;
  {
    std::lock_guard<std::mutex> lock(current->lock);
    for (Record* record : current->records) {
      for (int kind = 0; kind < MAX_KINDS; ++kind) {
        for (int method = 0; method < METHOD_COUNT; ++method) {
          const Cells* cells = record->cells[kind * METHOD_COUNT + method].load(
              std::memory_order_acquire);
          if (cells == nullptr) {
            continue;
          }
          Cells& total = totals[{kind, method}];
          for (size_t i = 0; i < total.size(); ++i) {
            total[i].add((*cells)[i].get());
          }
        }
      }
    }
  }
  {
    std::lock_guard<std::mutex> lock(current->ring_lock);
    for (const auto& [labels, cells] : current->dropped_failures) {
      Cells& total = failures[labels];
      for (size_t i = 0; i < total.size(); ++i) {
        total[i].add(cells[i].get());
      }
    }
  }
  py::list all;
  for (const auto& [labels, cells] : totals) {
    all.append(py::make_tuple(labels.first, labels.second, counts_object(cells), false));
  }
  for (const auto& [labels, cells] : failures) {
    all.append(py::make_tuple(labels.first, labels.second, counts_object(cells), true));
  }
  return all;
}

int64_t over_budget() {
  Registry* current = registry.load();
  std::lock_guard<std::mutex> lock(current->lock);
  int64_t total = 0;
  for (const Record* record : current->records) {
    total += record->over_budget.get();
  }
  return total;
}

// [(thread, state, call)], of each thread the outer call first.
py::list calls() {
  struct Found {
    c10::intrusive_ptr<NativeStore> store;
    int64_t record;
    uint64_t number;
    unsigned long thread_id;
    Method method;
    int64_t started;
    Shown shown;
  };
  std::vector<Found> found;
  Registry* current = registry.load();
  {
    std::lock_guard<std::mutex> lock(current->lock);
    for (Record* record : current->records) {
      for (Slot& slot : record->slots) {
        Locked locked(slot);
        if (slot.store == nullptr) {
          break;
        }
        found.push_back(
            {c10::intrusive_ptr<NativeStore>::reclaim_copy(slot.store), record->id,
             slot.number, record->thread_id.load(), slot.method, slot.started,
             slot.shown});
      }
    }
  }
  py::list all;
  for (const Found& each : found) {
    all.append(py::make_tuple(
        each.thread_id, each.store->state(),
        call_object(each.record, each.number, each.method, each.shown, each.started)));
  }
  return all;
}

// [(thread, identity, ended call, error)]
py::list drain() {
  std::vector<PyObject*> to_release;
  {
    Released* from = released.load();
    std::lock_guard<std::mutex> lock(from->lock);
    to_release.swap(from->objects);
  }
  for (PyObject* object : to_release) {
    Py_DECREF(object);
  }
  std::deque<Entry> entries;
  Registry* current = registry.load();
  {
    std::lock_guard<std::mutex> lock(current->ring_lock);
    entries.swap(current->ring);
  }
  py::list all;
  for (const Entry& entry : entries) {
    all.append(py::make_tuple(
        entry.thread_id,
        py::reinterpret_borrow<py::object>(entry.identity->object),
        ended_object(
            call_object(
                entry.record, entry.number, entry.method, entry.shown, entry.started),
            entry.ended, entry.losses, entry.bytes, entry.swapped),
        entry.error ? exception_object(entry.error) : py::object(py::none())));
  }
  return all;
}

int64_t dropped() {
  Registry* current = registry.load();
  std::lock_guard<std::mutex> lock(current->ring_lock);
  return current->dropped;
}

// Makes the Python exception of a call whose failure has a note, as torch would, and
// adds the note. Every other exception passes on to torch's own translation.
void translate_with_note(std::exception_ptr error) {
  if (!error) {
    return;
  }
  if (this_thread.note == nullptr || this_thread.noted != error) {
    std::rethrow_exception(error);
  }
  auto note = py::reinterpret_steal<py::object>(std::exchange(this_thread.note, nullptr));
  this_thread.noted = nullptr;
  py::object value = exception_object(error);
  if (value.is_none()) {
    std::rethrow_exception(error);
  }
  if (PyObject* done = PyObject_CallMethod(value.ptr(), "add_note", "O", note.ptr())) {
    Py_DECREF(done);
  } else {
    PyErr_Clear();
  }
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
}

} // namespace

PYBIND11_MODULE(tracedstore_native, module) {
  py::module_::import("torch.distributed"); // registers c10d::Store
  pthread_atfork(nullptr, nullptr, [] {
    released.store(new Released, std::memory_order_release);
    main_thread = pthread_self(); // the one that forked
    ending = false;
    start_from_zero();
  });
  py::register_exception_translator(translate_with_note);

  module.attr("KEY") = TRACEDSTORE_KEY;
  module.attr("MAX_KINDS") = MAX_KINDS;
  py::list names;
  for (const char* name : METHOD_NAMES) {
    names.append(name);
  }
  module.attr("METHODS") = py::tuple(names);

  py::class_<NativeStore, c10::intrusive_ptr<NativeStore>, c10d::Store>(
      module, "TracedStore")
      .def_property_readonly("_traced", &NativeStore::state)
      .def("_meeting", &Meeting::make);
  py::class_<Meeting>(module, "Meeting")
      .def_readonly("order", &Meeting::order)
      .def_readonly("arrived", &Meeting::arrived)
      .def_readonly("in_ledger", &Meeting::in_ledger)
      .def_readonly("is_last", &Meeting::is_last)
      .def_property_readonly(
          "last", [](const Meeting& meeting) { return optional_bytes(meeting.last); })
      .def_property_readonly(
          "entries",
          [](const Meeting& meeting) { return optional_bytes(meeting.entries); })
      .def("arrive", &Meeting::arrive)
      .def("wait", &Meeting::wait)
      .def("complete", &Meeting::complete);
  py::class_<WeakStore>(module, "WeakStore")
      .def("__call__", &WeakStore::store)
      .def_property_readonly("inner", &WeakStore::inner);

  // Arguments: of the thread that runs signal handlers its id, and what `submit` uses.
  module.def("set_helpers", [](unsigned long main, py::object idle, py::object unfinished,
                               py::object start, py::object target, py::object lock) {
    main_thread = static_cast<pthread_t>(main);
    idle_helpers = idle.release().ptr();
    unfinished_work = unfinished.release().ptr();
    start_thread = start.release().ptr();
    serve = target.release().ptr();
    new_lock = lock.release().ptr();
  });
  module.def("set_up", [](std::vector<int64_t> upper_bounds, py::object thread,
                          py::object returned, py::object failed, py::object state) {
    if (upper_bounds.size() + BUCKETS + 1 > MAX_COUNTS) {
      throw py::value_error("too many buckets");
    }
    bounds = std::move(upper_bounds);
    on_thread = thread.release().ptr();
    on_return = returned.release().ptr();
    on_fail = failed.release().ptr();
    make_state = state.release().ptr();
  });
  module.def("set_rules", [](bool on, bool counting, int64_t opens_at, int64_t slow_ns,
                             int64_t contended_after) {
    rules.counting = counting;
    rules.opens_at = opens_at;
    rules.slow_ns = slow_ns;
    rules.contended_after = contended_after;
    rules.on = on;
  });
  module.def("wrap", [](c10::intrusive_ptr<c10d::Store> inner, int kind,
                        py::object identity) {
    if (kind < 0 || kind >= MAX_KINDS) {
      throw py::value_error("no such kind of store");
    }
    return c10::make_intrusive<NativeStore>(
        std::move(inner), std::make_shared<Shared>(std::move(identity)), kind);
    // The Python object of the inner store stays the same as long as ours does.
  }, py::keep_alive<0, 1>());
  module.def("sums", &sums);
  module.def("over_budget", &over_budget);
  module.def("calls", &calls);
  module.def("drain", &drain);
  module.def("dropped", &dropped);
  module.def("end", [] { ending = true; });
  module.def("reset", &start_from_zero);
  module.def("enter_unrecorded", [] { this_thread.unrecorded++; });
  module.def("exit_unrecorded", [] { this_thread.unrecorded--; });
  module.def("enter_unsampled", [] { this_thread.unsampled++; });
  module.def("exit_unsampled", [] { this_thread.unsampled--; });
}
