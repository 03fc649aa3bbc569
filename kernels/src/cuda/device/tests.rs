use super::*;

/// Whether this host has a driver's library and a GPU's device file, found without the code under test.
fn host_has_a_gpu() -> bool {
    std::path::Path::new("/dev/nvidia0").exists()
}

#[test]
fn bug_44_without_a_driver_or_gpu_opening_is_a_plain_error_and_no_panic() {
    match Device::open(0) {
        Ok(device) => assert!(device.info().capability >= (8, 0)),
        Err(error) if host_has_a_gpu() => assert!(!matches!(error, CudaError::NoDriver), "{error}"),
        Err(error) => {
            assert!(matches!(error, CudaError::NoDriver | CudaError::NoGpu { .. }), "{error:?}");
            assert_eq!(error.to_string().lines().count(), 1);
        }
    }
    // As often as one likes, and whichever GPU.
    assert!(Device::open(1000).is_err());
}

#[test]
fn errors_of_devices_say_in_one_line_what_to_do() {
    let gpu = "GeForce".to_owned();
    let texts = [
        (CudaError::NoDriver, "libcuda.so.1"),
        (
            CudaError::DriverTooOld { found: 12_040, needed: 13_000 },
            "CUDA 12.4, 13.0 is needed: install driver 580",
        ),
        (CudaError::NoGpu { ordinal: 2, count: 1 }, "no GPU 2: the driver shows 1"),
        (
            CudaError::Architecture { gpu, capability: (7, 5) },
            "GeForce has compute capability 7.5, at least 8.0",
        ),
        (CudaError::NoLibrary { library: "libcublasLt" }, "libcublasLt is missing: install the CUDA 13.x"),
        (CudaError::OutOfMemory { wanted: 10, free: 4, total: 8 }, "10 bytes do not fit: the GPU has 4 of 8"),
    ];
    for (error, part) in texts {
        let text = error.to_string();
        assert!(text.contains(part) && text.lines().count() == 1, "{text}");
    }
}
