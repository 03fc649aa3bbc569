use super::*;

#[test]
fn sizes_are_rounded_up_to_whole_granules_and_never_to_none() {
    let granule = 2 << 20;
    let cases =
        [(0, granule), (1, granule), (granule, granule), (granule + 1, 2 * granule), (70 << 20, 70 << 20)];
    for (bytes, size) in cases {
        assert_eq!(rounded(bytes, granule), Ok(size), "{bytes} bytes");
    }
    assert_eq!(rounded(usize::MAX, granule), Err(ShapeError::Overflow { what: "shared memory" }));
}

#[test]
fn a_refused_descriptor_is_told_from_a_failing_device() {
    assert!(refuses(CUresult::CUDA_ERROR_INVALID_VALUE) && refuses(CUresult::CUDA_ERROR_INVALID_HANDLE));
    for code in [
        CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        CUresult::CUDA_ERROR_LAUNCH_FAILED,
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
    ] {
        assert!(!refuses(code), "{code:?}");
    }
    let text = CudaError::Foreign { wanted: 7, problem: "it is larger".to_owned() }.to_string();
    assert_eq!(text, "the file descriptor holds no shared memory of 7 bytes on this GPU: it is larger");
}
