// SM clock and power while a benchmark runs, read through NVML. Reads only.
#pragma once
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace harness {

class Telemetry {
  public:
    Telemetry();
    ~Telemetry();
    Telemetry(const Telemetry&) = delete;
    Telemetry& operator=(const Telemetry&) = delete;

    struct Reading {
        double sm_mhz;
        double watts;
    };

    /// Medians since the last call; zeros where NVML is missing or nothing was read.
    Reading take();

  private:
    void sample();

    void* library_ = nullptr;
    void* device_ = nullptr;
    std::atomic<bool> stop_{false};
    std::mutex lock_;
    std::vector<unsigned> mhz_;
    std::vector<unsigned> milliwatts_;
    std::thread thread_;
};

}  // namespace harness
