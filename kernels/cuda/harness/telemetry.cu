#include "telemetry.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>

namespace harness {
namespace {

constexpr int kClockSm = 1;
constexpr auto kPeriod = std::chrono::milliseconds(10);

template <class T>
double median(std::vector<T>& values) {
    if (values.empty()) {
        return 0.0;
    }
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return static_cast<double>(values[values.size() / 2]);
}

}  // namespace

Telemetry::Telemetry() {
    library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library_ == nullptr) {
        return;
    }
    const auto init = reinterpret_cast<int (*)()>(dlsym(library_, "nvmlInit_v2"));
    const auto handle = reinterpret_cast<int (*)(unsigned, void**)>(dlsym(library_, "nvmlDeviceGetHandleByIndex_v2"));
    if (init != nullptr && handle != nullptr && init() == 0 && handle(0, &device_) == 0) {
        thread_ = std::thread([this] { sample(); });
    }
}

Telemetry::~Telemetry() {
    stop_ = true;
    if (thread_.joinable()) {
        thread_.join();
    }
}

void Telemetry::sample() {
    const auto clock = reinterpret_cast<int (*)(void*, int, unsigned*)>(dlsym(library_, "nvmlDeviceGetClockInfo"));
    const auto power = reinterpret_cast<int (*)(void*, unsigned*)>(dlsym(library_, "nvmlDeviceGetPowerUsage"));
    while (!stop_) {
        unsigned mhz = 0;
        unsigned milliwatts = 0;
        const bool read = clock(device_, kClockSm, &mhz) == 0 && power(device_, &milliwatts) == 0;
        if (read) {
            const std::lock_guard<std::mutex> guard(lock_);
            mhz_.push_back(mhz);
            milliwatts_.push_back(milliwatts);
        }
        std::this_thread::sleep_for(kPeriod);
    }
}

Telemetry::Reading Telemetry::take() {
    const std::lock_guard<std::mutex> guard(lock_);
    const Reading reading = {median(mhz_), median(milliwatts_) / 1000.0};
    mhz_.clear();
    milliwatts_.clear();
    return reading;
}

}  // namespace harness
