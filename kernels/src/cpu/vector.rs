//! Loads and stores of vectors through references, whose type proves the length.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m128i, __m256, __m256i, __m512, __m512i, _mm_loadu_si128, _mm256_loadu_ps, _mm256_loadu_si256,
    _mm256_storeu_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
    _mm512_storeu_ps, _mm512_storeu_si512,
};

#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn load_i128(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: the reference proves 16 readable bytes; the load needs no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn load_i256(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: the reference proves 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn load_i512(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: the reference proves 64 readable bytes; the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn load_f32x8(values: &[f32; 8]) -> __m256 {
    // SAFETY: the reference proves 8 readable values; the load needs no more alignment than they have.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn store_f32x8(vector: __m256, values: &mut [f32; 8]) {
    // SAFETY: the reference proves 8 writable values; the store needs no more alignment than they have.
    unsafe { _mm256_storeu_ps(values.as_mut_ptr(), vector) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn store_f32x16(vector: __m512, values: &mut [f32; 16]) {
    // SAFETY: the reference proves 16 writable values; the store needs no more alignment than they have.
    unsafe { _mm512_storeu_ps(values.as_mut_ptr(), vector) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn load_f32x16(values: &[f32; 16]) -> __m512 {
    // SAFETY: the reference proves 16 readable values; the load needs no more alignment than they have.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn load_i32x16(values: &[i32; 16]) -> __m512i {
    // SAFETY: the reference proves 16 readable values; the load needs no more alignment than they have.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn store_i512(vector: __m512i, bytes: &mut [u8; 64]) {
    // SAFETY: the reference proves 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), vector) }
}

/// Up to 16 values, then zeros.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn load_f32s(values: &[f32]) -> __m512 {
    // SAFETY: the lanes of the mask are values of the slice; the load needs no more alignment than they have.
    unsafe { _mm512_maskz_loadu_ps(lanes(values.len()), values.as_ptr()) }
}

/// As many values as there is room for.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn store_f32s(vector: __m512, values: &mut [f32]) {
    // SAFETY: the lanes of the mask are values of the slice; the store needs no more alignment than they have.
    unsafe { _mm512_mask_storeu_ps(values.as_mut_ptr(), lanes(values.len()), vector) };
}

/// The first `count` of 16.
#[inline]
fn lanes(count: usize) -> u16 {
    if count < 16 { (1 << count) - 1 } else { u16::MAX }
}
